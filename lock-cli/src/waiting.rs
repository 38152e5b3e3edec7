//! What is said while a lock is waited for.

use std::cell::Cell;
use std::future::pending;
use std::time::Duration;

use leasehold::{HolderId, KeyInfo, Lock, LockKey};
use tokio::time::{Instant, sleep, timeout};

use crate::output::Notes;
use crate::patience::{AGAIN, Outage};
use crate::{admin, look};

/// The holders of all runs around a command, the innermost first.
pub(crate) const HOLDERS: &str = "LEASEHOLD_HOLDERS";

/// How long a wait is silent.
const SILENT: Duration = Duration::from_secs(2);

/// How often to look whether somebody else is waited for.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// How long to look for the holder's name, for a message.
const LOOK: Duration = Duration::from_secs(2);

/// The runs around this one, by the ids of their holders.
#[derive(Debug, Default)]
pub(crate) struct Around {
    holders: Vec<HolderId>,
    /// The innermost is for the same key.
    same_key: bool,
}

impl Around {
    pub(crate) fn of_environment(key: &LockKey) -> Self {
        let holders = std::env::var(HOLDERS).unwrap_or_default();
        Self {
            holders: holders.split(' ').filter_map(|holder| holder.parse().ok()).collect(),
            same_key: std::env::var("LEASEHOLD_KEY").is_ok_and(|outer| outer == key.as_str()),
        }
    }

    fn holds(&self, seen: &KeyInfo) -> bool {
        let mut holders = seen.holders.iter().filter_map(|hold| hold.holder);
        seen.is_held() && holders.any(|holder| self.holders.contains(&holder))
    }
}

/// For a command that runs under a hold of `holder`: its id, before those of the runs around this one.
pub(crate) fn holders_with(holder: HolderId) -> String {
    let around = std::env::var(HOLDERS).unwrap_or_default();
    format!("{holder} {around}").trim_end().to_owned()
}

/// Says what is waited for, again when the holder changes and once a minute; sets `said` then. Ends only when the
/// key turns out to be held by one of `around`, which would be waited for without an end.
pub(crate) async fn tell(
    lock: &dyn Lock,
    key: &LockKey,
    around: &Around,
    notes: Notes,
    outage: &mut Outage,
    said: &Cell<bool>,
) {
    if around.same_key
        && let Seen::Answer(seen) = look(lock, key).await
        && around.holds(&seen)
    {
        return;
    }
    if notes.quiet && around.holders.is_empty() {
        return pending().await;
    }
    sleep(SILENT).await;
    let mut last: Option<(Vec<Option<HolderId>>, Instant)> = None;
    loop {
        let seen = match look(lock, key).await {
            Seen::Failed(error) if error.is_retryable() => {
                outage.tell(&error);
                None
            }
            Seen::Answer(seen) => {
                outage.end();
                Some(seen)
            }
            Seen::Failed(_) | Seen::Nothing => None,
        };
        let holders = match (&seen, &last) {
            (Some(seen), _) => seen.holders.iter().map(|hold| hold.holder).collect(),
            // Nothing was learnt: that nobody is known is no change.
            (None, Some((holders, _))) => holders.clone(),
            (None, None) => Vec::new(),
        };
        let is_news = last.as_ref().is_none_or(|(shown, at)| *shown != holders || at.elapsed() >= AGAIN);
        if is_news {
            let mut holder = seen.as_ref().map(admin::in_words).unwrap_or_default();
            if seen.is_some() && holder.is_empty() {
                holder.push_str("; nobody is seen to hold it: waiting for the store");
                if let Err(error) = look::try_to_write(lock).await {
                    holder.push_str(&format!(" ({})", error.message()));
                }
            }
            notes.say(&format!("waiting for \"{key}\" on {lock}{holder}"));
            said.set(true);
            last = Some((holders, Instant::now()));
        }
        if seen.is_some_and(|seen| around.holds(&seen)) {
            return;
        }
        sleep(LOOK_EVERY).await;
    }
}

/// The key, if the store tells soon enough.
pub(crate) async fn seen(lock: &dyn Lock, key: &LockKey) -> Option<KeyInfo> {
    match look(lock, key).await {
        Seen::Answer(seen) => Some(seen),
        Seen::Failed(_) | Seen::Nothing => None,
    }
}

/// What a look at the key has brought.
enum Seen {
    Answer(KeyInfo),
    Failed(leasehold::Error),
    /// The store does not tell, or not soon enough.
    Nothing,
}

async fn look(lock: &dyn Lock, key: &LockKey) -> Seen {
    let Some(admin) = lock.admin() else { return Seen::Nothing };
    match timeout(LOOK, admin.inspect(key)).await {
        Ok(Ok(seen)) => Seen::Answer(seen),
        Ok(Err(error)) => Seen::Failed(error),
        Err(_) => Seen::Nothing,
    }
}
