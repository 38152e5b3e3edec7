//! The end of an acquisition: the caller gets all guards, or none.

use std::mem;

use leasehold_api::{Error, LockGuard, LossReason, Validity};

use super::Acquisition;
use crate::acquire::budget::Refusal;
use crate::acquire::entry::{Entry, Stage};

impl Acquisition {
    /// Returns the guards, if all of them are still held.
    pub(super) fn finish(mut self) -> Result<Vec<LockGuard>, Refusal> {
        self.entries.iter().for_each(|entry| entry.hold.deliver());
        if let Err(refusal) = self.check() {
            self.entries.iter().for_each(|entry| entry.hold.delivery.take_back());
            return Err(refusal);
        }
        let entries = mem::take(&mut self.entries).into_iter();
        let guard = |entry: Entry| match entry.stage {
            Stage::Taken(guard) => Some(guard),
            _ => None,
        };
        Ok(entries.filter_map(guard).collect())
    }

    /// Fails if a taken hold was lost, or if the engine closes.
    fn check(&self) -> Result<(), Refusal> {
        // Checks the engine too, because closing misses a hold that entered its slot at the same time.
        if self.core.closing.is_cancelled() {
            return Err(self.core.name_error(Error::closed(), self.first_key(0)).into());
        }
        for entry in &self.entries {
            if entry.hold.current_validity() == Validity::Lost {
                let error = match entry.hold.loss_reason() {
                    Some(LossReason::Closed | LossReason::RuntimeGone) | None => Error::closed(),
                    Some(reason) => Error::lost(reason),
                };
                return Err(entry.hold.named(error).into());
            }
        }
        Ok(())
    }
}
