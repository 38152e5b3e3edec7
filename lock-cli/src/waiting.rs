//! Notes printed during a wait for a lock.

use std::cell::Cell;
use std::future::pending;
use std::time::Duration;

use leasehold::{HoldInfo, HolderId, KeyInfo, Lock, LockKey};
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

    fn holds(&self, seen: &KeyInfo) -> bool {
        let mut holders = seen.holders.iter().filter_map(|hold| hold.holder);
        seen.is_held() && holders.any(|holder| self.holders.contains(&holder))
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
                Inspected::Answer(seen) if seen.holder().is_none_or(|hold| self.is_ours(hold)) => {
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
        && enclosing.holds(&seen)
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
        if let Some(seen) = seen {
            if enclosing.holds(&seen) {
                return held_by_enclosing_run(key);
            }
            if let Some(found) = deadlock.check(lock, enclosing, key, &seen).await {
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
