//! Notes printed during a wait for a lock.

use std::cell::Cell;
use std::future::pending;
use std::time::Duration;

use leasehold::{HoldInfo, HoldState, HolderId, KeyInfo, Lock, LockKey, Mode};
use tokio::time::{Instant, sleep, timeout};

use crate::deadlock::DeadlockCheck;
use crate::output::Notes;
use crate::wait_budget::{AGAIN, OutageReport};
use crate::{admin, file_store};

/// The environment variable with the holders of all enclosing runs, innermost first, and within a run in the order of
/// its keys.
pub(crate) const HOLDERS: &str = "LEASEHOLD_HOLDERS";

/// The environment variable with the keys of the innermost enclosing run, one per line.
pub(crate) const KEYS: &str = "LEASEHOLD_KEYS";

/// For this long, a wait prints no note.
const SILENT: Duration = Duration::from_secs(2);

/// The interval of checks who holds the key.
const INSPECT_EVERY: Duration = Duration::from_secs(5);

/// The time limit for inspecting a key for a message.
pub(crate) const INSPECT_LIMIT: Duration = Duration::from_secs(2);

/// The enclosing runs, by the ids of their holders.
#[derive(Debug, Default)]
pub(crate) struct EnclosingRuns {
    pub(crate) holders: Vec<HolderId>,
    /// Keys of the innermost run, each with its holder.
    pub(crate) innermost: Vec<(LockKey, HolderId)>,
    /// Whether the innermost run holds one of the wanted keys.
    same_key: bool,
}

impl EnclosingRuns {
    pub(crate) fn of_environment(wanted: &[LockKey]) -> Self {
        let holders = std::env::var(HOLDERS).unwrap_or_default();
        let holders: Vec<HolderId> = holders.split(' ').filter_map(|holder| holder.parse().ok()).collect();
        let keys = std::env::var(KEYS).unwrap_or_default();
        let keys = keys.lines().filter_map(|key| key.parse().ok());
        let innermost: Vec<(LockKey, HolderId)> = keys.zip(holders.iter().copied()).collect();
        let same_key = innermost.iter().any(|(key, _)| wanted.contains(key));
        Self { holders, innermost, same_key }
    }

    /// Returns whether a request in `mode` waits for the enclosing runs. `is_waiting` is whether it has waited for a time.
    fn block(&self, seen: &KeyInfo, mode: Mode, is_waiting: bool) -> bool {
        let is_ours = |hold: &&HoldInfo| hold.holder.is_some_and(|holder| self.holders.contains(&holder));
        let live = seen.holders.iter().filter(|hold| hold.state == HoldState::Held);
        let ours: Vec<Mode> = live.filter(is_ours).map(|hold| hold.mode).collect();
        match mode {
            _ if ours.iter().any(|held| *held != mode) => true,
            // A reader beside an enclosing reader waits only for a writer, which waits for the enclosing one.
            Mode::Shared => is_waiting && !ours.is_empty(),
            Mode::Permit { of } => u32::try_from(ours.len()).is_ok_and(|ours| ours >= of),
            _ => !ours.is_empty(),
        }
    }
}

/// Returns the value of `LEASEHOLD_HOLDERS` for a command: the ids in `holders`, before the enclosing runs' ids.
pub(crate) fn holders_with(holders: &str) -> String {
    let enclosing = std::env::var(HOLDERS).unwrap_or_default();
    format!("{holders} {enclosing}").trim_end().to_owned()
}

/// The keys for which a run waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WantedKeys<'a> {
    pub(crate) lock: &'a dyn Lock,
    pub(crate) keys: &'a [LockKey],
    pub(crate) mode: Mode,
    /// The label of this wait, by which the run recognises its own holds.
    pub(crate) label: &'a str,
}

impl<'a> WantedKeys<'a> {
    /// Inspects the keys in the order of acquisition, up to the first one held by another client.
    async fn first_held_by_others(self) -> (&'a LockKey, Inspected) {
        let mut keys: Vec<&LockKey> = self.keys.iter().collect();
        keys.sort_unstable_by_key(|key| key.as_str());
        let mut first = None;
        for key in keys {
            match inspect(self.lock, key).await {
                Inspected::Answer(seen) if !self.is_held_by_others(&seen) => {
                    first.get_or_insert((key, Inspected::Answer(seen)));
                }
                other => return (key, other),
            }
        }
        first.unwrap_or((&self.keys[0], Inspected::Nothing))
    }

    /// Returns the first key held by another client, and its state if the store answers in time.
    pub(crate) async fn held(self) -> (&'a LockKey, Option<KeyInfo>) {
        match self.first_held_by_others().await {
            (key, Inspected::Answer(seen)) => (key, Some(seen)),
            (key, Inspected::Failed(_) | Inspected::Nothing) => (key, None),
        }
    }

    /// Returns whether other clients hold the key, and this process does not hold it beside them.
    fn is_held_by_others(self, seen: &KeyInfo) -> bool {
        let mut live = seen.holders.iter().filter(|hold| hold.state == HoldState::Held).peekable();
        live.peek().is_some() && !live.any(|hold| self.is_ours(hold))
    }

    /// Returns whether the hold belongs to this process, which waits for the other keys.
    fn is_ours(self, hold: &HoldInfo) -> bool {
        let process = std::process::id().to_string();
        let is_process =
            |owner: &str| owner.split(|c: char| !c.is_ascii_digit()).any(|number| number == process);
        self.keys.len() > 1
            && hold.label.as_deref() == Some(self.label)
            && hold.owner.as_deref().is_some_and(is_process)
    }
}

fn held_by_enclosing_run(key: &LockKey) -> String {
    format!(
        "you hold \"{key}\" already: a `leasehold` that runs this one does (LEASEHOLD_HOLDERS), and would be waited for without an end"
    )
}

/// Reports the wait with notes: at first, if the holder changes, and once a minute. Sets `said` after a note. Returns a
/// reason only if the wait would never end: one of `enclosing` holds a key, or waits for this run in a cycle.
pub(crate) async fn report(
    wanted: WantedKeys<'_>,
    enclosing: &EnclosingRuns,
    notes: Notes,
    outage: &mut OutageReport,
    said: &Cell<bool>,
) -> String {
    let lock = wanted.lock;
    if enclosing.same_key
        && let (key, Inspected::Answer(seen)) = wanted.first_held_by_others().await
        && enclosing.block(&seen, wanted.mode, false)
    {
        return held_by_enclosing_run(key);
    }
    if notes.quiet && enclosing.holders.is_empty() {
        return pending().await;
    }
    sleep(SILENT).await;
    let mut last: Option<(Vec<Option<HolderId>>, Instant)> = None;
    let mut deadlock = DeadlockCheck::default();
    loop {
        let (key, seen) = wanted.first_held_by_others().await;
        let seen = match seen {
            Inspected::Failed(error) if error.is_retryable() => {
                outage.report(&error);
                None
            }
            Inspected::Answer(seen) => {
                outage.end();
                Some(seen)
            }
            Inspected::Failed(_) | Inspected::Nothing => None,
        };
        let holders = match (&seen, &last) {
            (Some(seen), _) => seen.holders.iter().map(|hold| hold.holder).collect(),
            // Keeps the former holders, because a failed inspection is no change.
            (None, Some((holders, _))) => holders.clone(),
            (None, None) => Vec::new(),
        };
        let is_news = last.as_ref().is_none_or(|(shown, at)| *shown != holders || at.elapsed() >= AGAIN);
        if is_news {
            let mut holder = seen.as_ref().map(admin::in_words).unwrap_or_default();
            if seen.is_some() && holder.is_empty() {
                holder.push_str("; the store shows no holder: waiting for the store");
                if let Err(error) = file_store::check_writable(lock).await {
                    holder.push_str(&format!(" ({})", error.message()));
                }
            }
            notes.say(&format!("waiting for \"{key}\" on {lock}{holder}"));
            said.set(true);
            last = Some((holders, Instant::now()));
        }
        // While no key is held by others alone, the first one can be a key that an enclosing run shares with this one.
        if let Some(seen) = seen.filter(|seen| wanted.is_held_by_others(seen)) {
            if enclosing.block(&seen, wanted.mode, true) {
                return held_by_enclosing_run(key);
            }
            // A holder of another permit can release it, although the first one in the list waits for this run.
            if !matches!(wanted.mode, Mode::Permit { .. })
                && let Some(found) = deadlock.check(lock, enclosing, key, &seen).await
            {
                return found;
            }
        }
        sleep(INSPECT_EVERY).await;
    }
}

/// Returns the key's state if the store answers in time.
pub(crate) async fn inspect_in_time(lock: &dyn Lock, key: &LockKey) -> Option<KeyInfo> {
    match inspect(lock, key).await {
        Inspected::Answer(seen) => Some(seen),
        Inspected::Failed(_) | Inspected::Nothing => None,
    }
}

/// The result of inspecting a key.
enum Inspected {
    Answer(KeyInfo),
    Failed(leasehold::Error),
    /// The store cannot inspect, or its answer was late.
    Nothing,
}

async fn inspect(lock: &dyn Lock, key: &LockKey) -> Inspected {
    let Some(admin) = lock.admin() else { return Inspected::Nothing };
    match timeout(INSPECT_LIMIT, admin.inspect(key)).await {
        Ok(Ok(seen)) => Inspected::Answer(seen),
        Ok(Err(error)) => Inspected::Failed(error),
        Err(_) => Inspected::Nothing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(mode: Mode, serials: &[u64]) -> KeyInfo {
        let mut seen = KeyInfo::free("k".parse().unwrap());
        for serial in serials {
            let mut hold = HoldInfo::new();
            (hold.holder, hold.mode) = (Some(HolderId::from_parts(1, *serial)), mode);
            seen.holders.push(hold);
        }
        seen
    }

    #[tokio::test]
    async fn a_run_does_not_wait_for_a_key_that_it_shares_with_others() {
        let lock = leasehold::memory::connect().unwrap();
        let keys = ["a", "b"].map(|key| key.parse::<LockKey>().unwrap());
        let wanted = WantedKeys { lock: &lock, keys: &keys, mode: Mode::Shared, label: "ours" };
        let mut seen = held(Mode::Shared, &[7]);
        assert!(wanted.is_held_by_others(&seen));
        let mut ours = HoldInfo::new();
        ours.label = Some("ours".into());
        ours.owner = Some(format!("pid {}", std::process::id()));
        seen.holders.push(ours);
        assert!(!wanted.is_held_by_others(&seen), "the first holder is another client");
    }

    #[test]
    fn a_run_inside_another_one_of_the_same_key_waits_for_it_only_if_the_two_exclude_each_other() {
        let holders = vec![HolderId::from_parts(1, 7)];
        let enclosing = EnclosingRuns { holders, innermost: Vec::new(), same_key: true };
        let (shared, two) = (Mode::Shared, Mode::Permit { of: 2 });
        for (wanted, holds, serials, at_once, later) in [
            (Mode::Exclusive, Mode::Exclusive, vec![7], true, true),
            (Mode::Exclusive, Mode::Exclusive, vec![8], false, false),
            (Mode::Exclusive, shared, vec![8, 7], true, true),
            (shared, Mode::Exclusive, vec![7], true, true),
            (shared, shared, vec![8, 7], false, true),
            (shared, shared, vec![8], false, false),
            (two, two, vec![7, 8], false, false),
            (two, two, vec![7, 7], true, true),
            (two, shared, vec![7], true, true),
        ] {
            let seen = held(holds, &serials);
            let blocks = [false, true].map(|is_waiting| enclosing.block(&seen, wanted, is_waiting));
            assert_eq!(blocks, [at_once, later], "{wanted:?} inside {holds:?} of {serials:?}");
        }
    }
}
