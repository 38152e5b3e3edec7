//! The end of an acquisition: all guards are handed out, or none.

use std::mem;

use leasehold_api::{Error, LockGuard, LossReason, Validity};

use super::Acquisition;
use crate::acquire::budget::Refusal;
use crate::acquire::entry::{Entry, Stage};

impl Acquisition {
    /// The guards, if every one of them is still good.
    pub(super) fn finish(mut self) -> Result<Vec<LockGuard>, Refusal> {
        self.entries.iter().for_each(|entry| entry.hold.hand_out(true));
        if let Err(refusal) = self.check() {
            self.entries.iter().for_each(|entry| entry.hold.hand_out(false));
            return Err(refusal);
        }
        let entries = mem::take(&mut self.entries).into_iter();
        let guard = |entry: Entry| match entry.stage {
            Stage::Taken(guard) => Some(guard),
            _ => None,
        };
        Ok(entries.filter_map(guard).collect())
    }

    /// Whether everything that was taken is still held.
    fn check(&self) -> Result<(), Refusal> {
        // A hold that came into its slot while the engine closed was not seen by the closing.
        if self.shared.closing.is_cancelled() {
            return Err(self.shared.name_error(Error::closed(), self.first_key(0)).into());
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
