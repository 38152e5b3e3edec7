//! How to acquire: wait budget, TTL, cooldown, label.

use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, ErrorKind};

/// How long an acquire waits when nothing else was said: 30 seconds.
pub const DEFAULT_WAIT: Duration = Duration::from_secs(30);

/// The longest label, in bytes of UTF-8.
pub const MAX_LABEL_BYTES: usize = 256;

/// How long an acquire may wait.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// At most this long, in all: for other holders, for a store that is away, over all keys of one call.
    /// Zero is exactly one attempt.
    For(Duration),
    /// Until granted or closed.
    Forever,
}

impl Default for Wait {
    fn default() -> Self {
        Self::For(DEFAULT_WAIT)
    }
}

/// Which other holders a grant excludes.
///
/// Use [`Exclusive`](Self::Exclusive). The engine of this version answers the other modes with
/// [`ErrorKind::Unsupported`] on every store, whatever [`Capabilities::modes`](crate::Capabilities::modes) declares.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    /// The grant is the key's only one. Every store has it.
    #[default]
    Exclusive,
    /// Other shared grants can exist at the same time, exclusive ones cannot. Not supported yet.
    Shared,
    /// One permit of a semaphore: at most `of` such grants exist at once. All callers of a key name the same number. Not
    /// supported yet.
    Permit {
        /// How many permits the key has.
        of: u32,
    },
}

/// What a caller wants who meets the cooldown of an earlier grant.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OnCooldown {
    /// Treat it like any other holder: wait, within the budget.
    #[default]
    Wait,
    /// Answer [`ErrorKind::NotDue`] at once.
    NotDue,
}

/// The options of one acquisition. The default waits 30 seconds and takes the store's own TTL.
#[non_exhaustive]
#[derive(Clone, Debug, Default)]
pub struct AcquireOptions {
    /// The wait budget.
    pub wait: Wait,
    /// The lease's TTL; `None` takes the store's default. [`ErrorKind::Unsupported`] on a store without leases.
    pub ttl: Option<Duration>,
    /// How long the grant may be held at the most, counted from the grant. Past it renewal stops, the guard
    /// reads lost ([`LossReason::HeldTooLong`](crate::LossReason::HeldTooLong)) and the store is told to let
    /// go, so that faulty code cannot hold a lock for ever. On every store.
    pub max_hold: Option<Duration>,
    /// No new grant of the key before this long after this grant, whoever asks, released or not, and even if
    /// this holder crashes. An attempt that is undone, since no caller was given its guard, leaves none.
    /// [`ErrorKind::Unsupported`] on a store without cooldowns.
    pub cooldown: Option<Duration>,
    /// What to do about the cooldown of an earlier grant.
    pub on_cooldown: OnCooldown,
    /// Free text that operators see beside the hold, at most [`MAX_LABEL_BYTES`] bytes.
    pub label: Option<Arc<str>>,
    /// Which other holders the grant excludes. All but [`Mode::Exclusive`] are [`ErrorKind::Unsupported`].
    pub mode: Mode,
    /// Answer a failure of the store at once, instead of asking again until the wait budget ends.
    pub give_up_on_failure: bool,
}

impl AcquireOptions {
    /// The defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the wait budget. A duration too long to add to the clock means for ever.
    #[must_use]
    pub fn wait(mut self, budget: Duration) -> Self {
        self.wait = Wait::For(budget);
        self
    }

    /// Waits until granted or closed.
    #[must_use]
    pub fn wait_forever(mut self) -> Self {
        self.wait = Wait::Forever;
        self
    }

    /// Sets the TTL of the lease.
    #[must_use]
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = Some(ttl);
        self
    }

    /// Sets how long the grant may be held at the most.
    #[must_use]
    pub fn max_hold(mut self, limit: Duration) -> Self {
        self.max_hold = Some(limit);
        self
    }

    /// Sets the cooldown after this grant.
    #[must_use]
    pub fn cooldown(mut self, cooldown: Duration) -> Self {
        self.cooldown = Some(cooldown);
        self
    }

    /// Sets what to do about the cooldown of an earlier grant.
    #[must_use]
    pub fn on_cooldown(mut self, policy: OnCooldown) -> Self {
        self.on_cooldown = policy;
        self
    }

    /// Sets the label that operators see.
    #[must_use]
    pub fn label(mut self, label: impl Into<Arc<str>>) -> Self {
        self.label = Some(label.into());
        self
    }

    /// Sets the mode. All but [`Mode::Exclusive`] are [`ErrorKind::Unsupported`].
    #[must_use]
    pub fn mode(mut self, mode: Mode) -> Self {
        self.mode = mode;
        self
    }

    /// Answers a failure of the store at once. Without it [`Lock::acquire`](crate::Lock::acquire) asks a store that
    /// cannot be reached, is restarting or is full ([`Unavailable`](ErrorKind::Unavailable),
    /// [`OutcomeUnknown`](ErrorKind::OutcomeUnknown), [`Capacity`](ErrorKind::Capacity)) again, with growing
    /// pauses, until the wait budget ends. A try never asks twice.
    #[must_use]
    pub fn give_up_on_failure(mut self) -> Self {
        self.give_up_on_failure = true;
        self
    }

    /// Checks what can be checked without a store.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidOption`] for a TTL, maximum hold or cooldown of zero, for a semaphore without
    /// permits, and for a label that is too long or contains NUL.
    pub fn check(&self) -> Result<(), Error> {
        let reason = if self.ttl == Some(Duration::ZERO) {
            "a TTL of zero ends before it begins; leave it out for the store's default"
        } else if self.max_hold == Some(Duration::ZERO) {
            "a maximum hold of zero ends before it begins; leave it out to hold without a limit"
        } else if (self.mode == Mode::Permit { of: 0 }) {
            "a semaphore needs at least one permit"
        } else if self.cooldown == Some(Duration::ZERO) {
            "a cooldown of zero does nothing; leave it out"
        } else if self.label.as_ref().is_some_and(|l| l.len() > MAX_LABEL_BYTES) {
            "a label has at most 256 bytes"
        } else if self.label.as_ref().is_some_and(|l| l.contains('\0')) {
            "a label cannot contain NUL"
        } else {
            return Ok(());
        };
        Err(Error::new(ErrorKind::InvalidOption, reason))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_what_no_store_can_mean() {
        let ok = AcquireOptions::new();
        assert!(ok.check().is_ok());
        for bad in [
            ok.clone().ttl(Duration::ZERO),
            ok.clone().cooldown(Duration::ZERO),
            ok.clone().max_hold(Duration::ZERO),
            ok.clone().mode(Mode::Permit { of: 0 }),
            ok.clone().label("x".repeat(MAX_LABEL_BYTES + 1)),
            ok.clone().label("a\0b"),
        ] {
            assert_eq!(bad.check().unwrap_err().kind(), ErrorKind::InvalidOption, "{bad:?}");
        }
    }
}
