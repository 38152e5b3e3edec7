//! Registers that holders read and write, one with a check of tokens and one without.

use leasehold_api::{LockGuard, LockKey, Mode};

use super::super::coverage::Situation;
use super::Judge;

#[derive(Default)]
pub(crate) struct Register {
    fenced: u64,
    highest: u64,
    unfenced: u64,
}

/// The values of its key's registers that a holder read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Read {
    fenced: Option<u64>,
    unfenced: u64,
}

impl Judge {
    /// Returns the registers of the guard's key, as a holder reads them at its start.
    pub(crate) fn read(&self, guard: &LockGuard) -> Read {
        let mut state = self.lock();
        let register = state.registers.entry(guard.key().clone()).or_default();
        if guard.mode() != Mode::Exclusive {
            // A resource never compares the tokens of readers.
            return Read { fenced: None, unfenced: register.unfenced };
        }
        let token = guard.token().map_or(0, leasehold_api::FencingToken::as_u64);
        let fenced = (token >= register.highest).then_some(register.fenced);
        register.highest = register.highest.max(token);
        Read { fenced, unfenced: register.unfenced }
    }

    /// Applies a write of a holder to the registers of the key. The write was sent while the guard read held.
    pub(crate) fn write(&self, key: &LockKey, token: u64, read: Read) {
        let mut state = self.lock();
        let register = state.registers.entry(key.clone()).or_default();
        if register.unfenced != read.unfenced {
            self.network.coverage.note(Situation::UnfencedUpdateLost);
        }
        register.unfenced = read.unfenced + 1;
        let Some(fenced) = read.fenced else { return };
        if token < register.highest {
            self.network.coverage.note(Situation::FencedWriteRefused);
            return;
        }
        let lost = register.fenced != fenced;
        register.fenced = fenced + 1;
        if lost {
            state.violation(
                self.start,
                "C8",
                &format!("a fenced update of {key} was lost, by token {token}"),
            );
        }
    }
}
