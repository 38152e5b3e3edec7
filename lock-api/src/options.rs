//! How to acquire: wait budget, TTL, cooldown, label.

use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, ErrorKind};
use crate::key::LockKey;

/// The default wait budget of an acquire: 30 seconds.
pub const DEFAULT_WAIT: Duration = Duration::from_secs(30);

/// The longest label, in bytes of UTF-8.
pub const MAX_LABEL_BYTES: usize = 256;

/// The wait budget of an acquire.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// At most this long in total, for other holders, outages of the store, and all keys of one call. Zero
    /// makes exactly one attempt.
    For(Duration),
    /// Without a limit, until the key is granted or the lock is closed.
    Forever,
}

impl Default for Wait {
    fn default() -> Self {
        Self::For(DEFAULT_WAIT)
    }
}

/// Which other holders a grant excludes. Grants of different modes always exclude each other.
///
/// [`Capabilities::modes`](crate::Capabilities::modes) declares the modes of a store beside
/// [`Exclusive`](Self::Exclusive). Another mode is [`ErrorKind::Unsupported`].
///
/// No call turns a grant into one of another mode. A holder that acquires its key again, in any mode, waits like
/// every other caller. A task that holds a shared grant and waits for an exclusive one of the same key therefore waits
/// for itself until its budget ends, and blocks new shared grants until then. Release first.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    /// The grant is the only one of the key. Every store has this mode.
    #[default]
    Exclusive,
    /// Other shared grants can exist at the same time, but no grant of another mode. For readers.
    Shared,
    /// One permit of a semaphore: at most `of` such grants exist at once, and no grant of another mode. All callers of a
    /// key name the same number. While the key is in use with another one, the call is
    /// [`ErrorKind::ModeMismatch`].
    Permit {
        /// How many permits the key has.
        of: u32,
    },
}

/// One key of a call for several keys that names a mode for each ([`LockExt::wanting`](crate::LockExt::wanting)).
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The key.
    pub key: LockKey,
    /// The mode of its grant.
    pub mode: Mode,
}

impl Wanted {
    /// Names the mode in which the call takes `key`.
    #[must_use]
    pub const fn new(key: LockKey, mode: Mode) -> Self {
        Self { key, mode }
    }
}

/// The policy for a key whose last grant left a running cooldown.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OnCooldown {
    /// Wait for the cooldown's end like for a holder, within the budget.
    #[default]
    Wait,
    /// Return [`ErrorKind::NotDue`] at once.
    NotDue,
}

/// The options of one acquisition. The default waits 30 seconds and takes the store's TTL.
///
/// ```
/// use std::time::Duration;
/// use leasehold_api::{AcquireOptions, OnCooldown, Wait};
/// let options = AcquireOptions::new()
///     .wait(Duration::from_secs(5))
///     .ttl(Duration::from_secs(60))
///     .cooldown(Duration::from_secs(3600))
///     .on_cooldown(OnCooldown::NotDue);
/// assert_eq!(options.wait, Wait::For(Duration::from_secs(5)));
/// assert!(options.ttl(Duration::ZERO).check().is_err());
/// ```
#[non_exhaustive]
#[derive(Clone, Debug, Default)]
pub struct AcquireOptions {
    /// The wait budget.
    pub wait: Wait,
    /// The TTL of the lease. `None` takes the store's default. [`ErrorKind::Unsupported`] on a store without
    /// leases.
    pub ttl: Option<Duration>,
    /// The maximum time from the grant to the end of the hold, on every store. After it the lock stops
    /// renewing, the guard reads lost ([`LossReason::HeldTooLong`](crate::LossReason::HeldTooLong)) and the
    /// lock is released at the store. Faulty code then cannot hold a lock indefinitely.
    pub max_hold: Option<Duration>,
    /// The time after this grant in which no caller is granted the key, even if this holder releases or
    /// crashes. An attempt that is undone before a caller has its guard leaves no cooldown.
    /// [`ErrorKind::Unsupported`] on a store without cooldowns.
    pub cooldown: Option<Duration>,
    /// The policy for the cooldown of an earlier grant.
    pub on_cooldown: OnCooldown,
    /// A text that operators see beside the hold, at most [`MAX_LABEL_BYTES`] bytes.
    pub label: Option<Arc<str>>,
    /// Which other holders the grant excludes. A mode that the store does not declare is [`ErrorKind::Unsupported`].
    pub mode: Mode,
    /// Whether a failure of the store is returned at once, instead of retried until the wait budget ends.
    pub give_up_on_failure: bool,
}

impl AcquireOptions {
    /// Returns the defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the wait budget. A duration too long for the clock means no limit.
    #[must_use]
    pub fn wait(mut self, budget: Duration) -> Self {
        self.wait = Wait::For(budget);
        self
    }

    /// Waits without a limit, until the key is granted or the lock is closed.
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

    /// Sets the maximum time from the grant to the end of the hold.
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

    /// Sets the policy for the cooldown of an earlier grant.
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

    /// Sets the mode. A mode that the store does not declare is [`ErrorKind::Unsupported`].
    #[must_use]
    pub fn mode(mut self, mode: Mode) -> Self {
        self.mode = mode;
        self
    }

    /// Returns a failure of the store at once. Without this option [`Lock::acquire`](crate::Lock::acquire)
    /// retries with growing pauses until the wait budget ends, if the store is down, restarting or full
    /// ([`Unavailable`](ErrorKind::Unavailable), [`OutcomeUnknown`](ErrorKind::OutcomeUnknown),
    /// [`Capacity`](ErrorKind::Capacity)). A try is never repeated.
    #[must_use]
    pub fn give_up_on_failure(mut self) -> Self {
        self.give_up_on_failure = true;
        self
    }

    /// Checks the options that need no store.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidOption`] for a TTL, maximum hold or cooldown of zero, for a semaphore without
    /// permits, for a cooldown in another mode than exclusive, and for a label that is too long or contains NUL.
    pub fn check(&self) -> Result<(), Error> {
        let reason = if self.ttl == Some(Duration::ZERO) {
            "a TTL of zero ends before it begins; leave it out for the store's default"
        } else if self.max_hold == Some(Duration::ZERO) {
            "a maximum hold of zero ends before it begins; leave it out to hold without a limit"
        } else if (self.mode == Mode::Permit { of: 0 }) {
            "a semaphore needs at least one permit"
        } else if self.cooldown == Some(Duration::ZERO) {
            "a cooldown of zero does nothing; leave it out"
        } else if self.cooldown.is_some() && self.mode != Mode::Exclusive {
            "only an exclusive grant can have a cooldown; leave one of the two out"
        } else {
            return self.label.as_deref().map_or(Ok(()), check_label);
        };
        Err(Error::new(ErrorKind::InvalidOption, reason))
    }
}

/// Checks the text of a label.
pub(crate) fn check_label(label: &str) -> Result<(), Error> {
    let reason = if label.len() > MAX_LABEL_BYTES {
        "a label has at most 256 bytes"
    } else if label.contains('\0') {
        "a label cannot contain NUL"
    } else {
        return Ok(());
    };
    Err(Error::new(ErrorKind::InvalidOption, reason))
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
            ok.clone().mode(Mode::Shared).cooldown(DEFAULT_WAIT),
            ok.clone().mode(Mode::Permit { of: 1 }).cooldown(DEFAULT_WAIT),
            ok.clone().label("x".repeat(MAX_LABEL_BYTES + 1)),
            ok.clone().label("a\0b"),
        ] {
            assert_eq!(bad.check().unwrap_err().kind(), ErrorKind::InvalidOption, "{bad:?}");
        }
    }
}
