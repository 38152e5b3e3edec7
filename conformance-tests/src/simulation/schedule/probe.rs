//! The last client of a schedule, which nothing disturbs.

use std::collections::BTreeSet;

use leasehold_api::{Error, Lock, LockExt as _, LockGuard, LockKey};
use tokio::time::sleep;

use super::{LONGEST_WAIT, ScheduleRun};
use crate::simulation::judge::Judge;
use crate::simulation::stores::SimulatedClient;

impl ScheduleRun {
    /// Checks that an undisturbed client is granted every key and can release it.
    pub(super) async fn probe(&self, number: u64, judge: &Judge) -> Result<(), Error> {
        let environment = self.environment(number);
        let SimulatedClient { lock, engine } = self.store.connect(&environment)?;
        for key in &self.keys {
            let wait = self.store.bounds().capabilities.handover + LONGEST_WAIT;
            let guard = lock.key(key).wait(wait).acquire().await?;
            if let Err(error) = guard.release().await {
                judge.violation("C6", format!("a release that nothing disturbed ended with {error}"));
            }
            if !self.cooldown.is_zero() {
                continue;
            }
            drop(lock.key(key).wait(wait).acquire().await?);
            let undo = self.store.bounds().capabilities.undo;
            if let Err(error) = lock.key(key).wait(undo).acquire().await.map(drop) {
                judge.violation("C7", format!("{undo:?} after a guard of {key} was dropped: {error}"));
            }
            sleep(undo).await;
            match lock.key(key).try_acquire().await? {
                Some(guard) => guard.release().await?,
                None => judge.violation("C6", format!("{key} was released, and a try finds it held")),
            }
        }
        if let Some(modes) = self.network.modes.as_ref().filter(|_| self.cooldown.is_zero()) {
            probe_modes(&*lock, &self.keys, modes.permits, judge).await?;
        }
        lock.close().await?;
        drop(engine);
        Ok(())
    }
}

/// Checks that two readers are granted each key together, and that no permit is missing.
async fn probe_modes(lock: &dyn Lock, keys: &[LockKey], of: u32, judge: &Judge) -> Result<(), Error> {
    for key in keys {
        let reader = lock.key(key).shared().wait(LONGEST_WAIT).acquire().await?;
        // Later readers do not share the hold, so the second one calls the store.
        sleep(lock.capabilities().share_for).await;
        if lock.key(key).shared().try_acquire().await?.is_none() {
            judge.violation("C19", format!("a reader of {key} keeps out another one"));
        }
        reader.release().await?;
        let mut permits = Vec::new();
        for _ in 0..of {
            permits.push(lock.key(key).permits(of).wait(LONGEST_WAIT).acquire().await?);
        }
        let numbers: BTreeSet<_> = permits.iter().filter_map(LockGuard::permit).collect();
        if !numbers.iter().copied().eq(0..of) {
            judge.violation("C20", format!("{of} permits of {key} have the numbers {numbers:?}"));
        }
        for permit in permits {
            permit.release().await?;
        }
    }
    Ok(())
}
