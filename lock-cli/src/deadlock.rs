//! Finds deadlocks between runs: cycles in which each run holds a key, and a run inside it waits for a key of the next
//! run.
//!
//! ```text
//!   leasehold run a -- leasehold run b -- ..      holds a, waits for b
//!   leasehold run b -- leasehold run a -- ..      holds b, waits for a
//! ```
//!
//! A waiting run inside another run publishes its wait in the store. For each key of the enclosing run it takes another
//! key. The label of that key names the enclosing run's holder and the awaited key. A waiter follows these labels from
//! holder to holder. A cycle exists if the path reaches a key of an enclosing run.

use leasehold::{AcquireOptions, HolderId, KeyInfo, Lock, LockGuard, LockKey};
use tokio::time::timeout;

use crate::waiting::{EnclosingRuns, INSPECT_LIMIT};

/// Prefix of the keys that publish a wait.
const PREFIX: &str = "leasehold:nested:";

/// The text between the holder and the key in the label that publishes a wait.
const WAITS_FOR: &str = " waits for ";

/// Maximum number of runs in a detected cycle.
const LONGEST: usize = 16;

/// After this many checks, a run ends a cycle that another run should end, because that run might not detect it.
const MOST_FOUND: u32 = 4;

/// Maximum length of a label in the stores.
const LONGEST_LABEL: usize = 256;

/// The published wait and the detected cycles.
#[derive(Debug, Default)]
pub(crate) struct DeadlockCheck {
    published: Option<(LockKey, Vec<LockGuard>)>,
    /// Number of consecutive checks that found a cycle which another run should end.
    found: u32,
}

impl DeadlockCheck {
    /// Publishes that a run inside `enclosing` waits for `key`, which is held as `seen`. Returns a description of the
    /// cycle if this run should end it: the run with the greatest holder, or any run if the cycle lasts.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the published keys are released in the background.
    pub(crate) async fn check(
        &mut self,
        lock: &dyn Lock,
        enclosing: &EnclosingRuns,
        key: &LockKey,
        seen: &KeyInfo,
    ) -> Option<String> {
        if enclosing.innermost.is_empty() {
            return None;
        }
        if self.published.as_ref().is_none_or(|(published, _)| published != key) {
            // Releases the former keys first, because the next wait uses the same ones.
            if let Some((_, guards)) = self.published.take() {
                let released = guards.into_iter().collect::<leasehold::MultiGuard>().release();
                let _ = timeout(INSPECT_LIMIT, released).await;
            }
            let published = timeout(INSPECT_LIMIT, publish(lock, enclosing, key)).await.unwrap_or_default();
            self.published = Some((key.clone(), published));
        }
        let path = timeout(INSPECT_LIMIT, find_path(lock, enclosing, key, seen)).await.ok().flatten();
        self.found = if path.is_some() { self.found + 1 } else { 0 };
        path.filter(|path| is_greatest(path) || self.found >= MOST_FOUND).map(|path| describe(&path))
    }
}

/// Returns the key that publishes a wait under the holder of `key`. `None` if it would be too long.
fn wait_key(key: &LockKey) -> Option<LockKey> {
    format!("{PREFIX}{}", key.as_str()).parse().ok()
}

async fn publish(lock: &dyn Lock, enclosing: &EnclosingRuns, waits_for: &LockKey) -> Vec<LockGuard> {
    let mut published = Vec::new();
    for (key, holder) in &enclosing.innermost {
        let label = format!("{holder}{WAITS_FOR}{}", waits_for.as_str());
        let Some(wait_key) = wait_key(key).filter(|_| label.len() <= LONGEST_LABEL) else { continue };
        let options = AcquireOptions::new().label(label);
        let mut taken = lock.try_acquire(&wait_key, &options).await;
        if matches!(taken, Ok(None)) && release_stale(lock, key, &wait_key, *holder).await {
            taken = lock.try_acquire(&wait_key, &options).await;
        }
        published.extend(taken.ok().flatten());
    }
    published
}

/// Releases a key left by a run under an earlier holder of `key`, in stores that keep the holds of dead processes. Returns
/// whether a key was released.
async fn release_stale(lock: &dyn Lock, key: &LockKey, wait_key: &LockKey, holder: HolderId) -> bool {
    let Some(admin) = lock.admin() else { return false };
    let Ok(seen) = admin.inspect(wait_key).await else { return false };
    let by = seen.holder().and_then(|hold| waits_for(hold.label.as_deref()?));
    let (Some((by, _)), Some(left)) = (by, seen.holder().and_then(|hold| hold.holder)) else { return false };
    // Another run can share the key with this one, and wait too.
    let Ok(now) = admin.inspect(key).await else { return false };
    if by == holder || now.holders.iter().any(|hold| hold.holder == Some(by)) {
        return false;
    }
    admin.force_release(wait_key, left).await.unwrap_or(false)
}

/// Parses a label into the enclosing holder and the awaited key.
fn waits_for(label: &str) -> Option<(HolderId, LockKey)> {
    let (holder, key) = label.split_once(WAITS_FOR)?;
    Some((holder.parse().ok()?, key.parse().ok()?))
}

/// Returns the path from `key` to a key held by an enclosing run, each key with its holder. `None` if no path exists.
async fn find_path(
    lock: &dyn Lock,
    enclosing: &EnclosingRuns,
    key: &LockKey,
    seen: &KeyInfo,
) -> Option<Vec<(LockKey, HolderId)>> {
    let admin = lock.admin()?;
    let (mut key, mut seen) = (key.clone(), seen.clone());
    let mut path = Vec::new();
    while path.len() < LONGEST {
        let holder = seen.holder()?.holder?;
        path.push((key.clone(), holder));
        if enclosing.holders.contains(&holder) {
            return Some(path);
        }
        let published = admin.inspect(&wait_key(&key)?).await.ok()?;
        let (by, next) = waits_for(published.holder()?.label.as_deref()?)?;
        if by != holder {
            return None;
        }
        seen = admin.inspect(&next).await.ok()?;
        key = next;
    }
    None
}

/// Returns whether the last run of the path, which encloses this one, has the greatest holder. All runs of a cycle
/// agree on this.
fn is_greatest(path: &[(LockKey, HolderId)]) -> bool {
    path.iter().map(|(_, holder)| holder.to_string()).max()
        == path.last().map(|(_, holder)| holder.to_string())
}

fn describe(path: &[(LockKey, HolderId)]) -> String {
    let pairs = path.iter().zip(path.iter().skip(1));
    let steps =
        pairs.map(|((key, _), (next, _))| format!("the run that holds \"{key}\" waits for \"{next}\""));
    let steps = steps.collect::<Vec<_>>().join(", ");
    let (first, last) = (&path[0].0, &path[path.len() - 1].0);
    format!(
        "a circle of runs, which would wait for each other without an end: this one holds \"{last}\" and waits for \"{first}\", {steps}; take all keys in one run, as in: leasehold run KEY KEY2 -- COMMAND"
    )
}

#[cfg(test)]
mod tests {
    use leasehold::{Mode, Validity};

    use super::*;

    #[test]
    fn of_a_circle_one_run_is_the_one_to_end_it() {
        let key = |name: &str| name.parse::<LockKey>().unwrap();
        let holder = |n: u64| format!("{n:032x}-1").parse::<HolderId>().unwrap();
        let path = |ids: [(&str, u64); 2]| ids.map(|(name, n)| (key(name), holder(n)));
        let (one, other) = (path([("b", 2), ("a", 1)]), path([("a", 1), ("b", 2)]));
        assert_eq!((is_greatest(&one), is_greatest(&other)), (false, true));
        let words = describe(&other);
        assert!(
            words.contains("holds \"b\" and waits for \"a\", the run that holds \"a\" waits for \"b\""),
            "{words}"
        );
    }

    #[tokio::test]
    async fn only_a_wait_under_a_holder_that_has_gone_is_released() {
        let lock = leasehold::memory::connect().unwrap();
        let key = |name: &str| name.parse::<LockKey>().unwrap();
        let shared = AcquireOptions::new().mode(Mode::Shared);
        let reader = lock.acquire(&key("a"), &shared).await.unwrap();
        let publish_under = async |holder| {
            let mut enclosing = EnclosingRuns::default();
            enclosing.innermost.push((key("a"), holder));
            publish(&lock, &enclosing, &key("b")).await
        };
        let other = HolderId::from_parts(7, 1);
        let stale = publish_under(other).await;
        let published = publish_under(reader.holder()).await;
        assert_eq!((stale.len(), published.len()), (1, 1));
        assert!(publish_under(other).await.is_empty());
        assert_eq!((stale[0].validity(), published[0].validity()), (Validity::Lost, Validity::Valid));
    }

    #[test]
    fn a_label_says_who_waits_for_what() {
        let label = format!("{:032x}-1 waits for a waits for b", 7);
        let (holder, key) = waits_for(&label).unwrap();
        assert_eq!((holder.to_string(), key.as_str()), (format!("{:032x}-1", 7), "a waits for b"));
        assert_eq!(waits_for("nightly waits for nobody"), None);
    }
}
