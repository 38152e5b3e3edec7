//! The features and bounds of a store: declared, read by callers, tested by the conformance suite.

use std::fmt;
use std::time::Duration;

use crate::error::{Error, ErrorKind};

/// The features of a lock and every bound it promises.
///
/// The conformance suite tests them: a declared feature must work, and an undeclared one must return
/// [`ErrorKind::Unsupported`] rather than do something weaker.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Which clients exclude each other: clients of one process, of one machine or of one server.
    pub scope: Scope,
    /// The bounds of leases. `None` if the store has no leases.
    pub lease: Option<LeaseBounds>,
    /// The fencing tokens, and the failures that they survive.
    pub fencing: Fencing,
    /// The order among waiters of different clients. Within one client it is always first come, first served.
    pub fairness: Fairness,
    /// The maximum time from the end of a hold by the store until the guard reads lost. Two guards overlap at
    /// most this long.
    pub loss_detection: Duration,
    /// The maximum time from dropping a future or guard until the key is free, while the store answers.
    pub undo: Duration,
    /// The maximum time from a release to the grant of a waiter, if all notifications are lost.
    pub handover: Duration,
    /// The maximum time for which callers of one client pass a hold of the store to each other. A waiter of
    /// another client possibly waits that much longer, and the order among clients can differ by it. Zero if
    /// each grant is the store's own.
    pub handover_for: Duration,
    /// The maximum time for which readers of one client join a hold of the store without a call. A writer of another client
    /// possibly waits that much longer before later readers queue behind it. Zero if each reader has a separate hold.
    pub share_for: Duration,
    /// The maximum time from the death of the holder's process until its hold ends. `None` means never.
    pub crash_release: Option<Duration>,
    /// The modes beside exclusive.
    pub modes: Modes,
    /// Whether a grant can block the next one for a time (a cooldown).
    pub cooldown: bool,
    /// The maximum time by which leases and cooldowns end late, as in a store that counts in whole seconds. They
    /// never end early. Zero by default.
    pub ends_late_by: Duration,
    /// Whether the label of a grant can be changed ([`LockGuard::relabel`](crate::LockGuard::relabel)).
    pub relabel: bool,
    /// Whether a hold with a lease can be given to another client
    /// ([`LockGuard::into_ref`](crate::LockGuard::into_ref), [`Lock::adopt`](crate::Lock::adopt)).
    pub portable: bool,
    /// The operations for operators.
    pub admin: AdminCapabilities,
    /// Whether two different keys can exclude each other.
    pub keys: KeyIdentity,
    /// The maximum number of keys held at once through the store, if there is a limit.
    pub max_holds: Option<u64>,
}

impl Capabilities {
    /// Makes the weakest capabilities. Set the public fields of each feature that the store adds.
    #[must_use]
    pub fn new(scope: Scope) -> Self {
        Self {
            scope,
            lease: None,
            fencing: Fencing::None,
            fairness: Fairness::Unordered,
            loss_detection: Duration::from_secs(30),
            undo: Duration::from_secs(30),
            handover: Duration::from_secs(30),
            handover_for: Duration::ZERO,
            share_for: Duration::ZERO,
            crash_release: None,
            modes: Modes::default(),
            cooldown: false,
            ends_late_by: Duration::ZERO,
            relabel: false,
            portable: false,
            admin: AdminCapabilities::default(),
            keys: KeyIdentity::Exact,
            max_holds: None,
        }
    }
}

/// Which clients exclude each other.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// Between the tasks and threads of one process.
    Process,
    /// Between the processes of one machine.
    Machine,
    /// Between all clients that reach the same server.
    Network,
}

/// The modes of a store beside [`Mode::Exclusive`](crate::Mode::Exclusive). The default is neither.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Modes {
    /// [`Mode::Shared`](crate::Mode::Shared).
    pub shared: bool,
    /// [`Mode::Permit`](crate::Mode::Permit): the maximum number of permits of a key, or zero without
    /// semaphores.
    pub max_permits: u32,
}

/// The bounds of a store's leases.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseBounds {
    /// The default TTL. `None` means a hold without a lease.
    pub default: Option<Duration>,
    /// The shortest TTL.
    pub min: Duration,
    /// The longest TTL.
    pub max: Duration,
}

impl LeaseBounds {
    /// Makes bounds of `min` to `max`, with the default TTL `default`.
    #[must_use]
    pub const fn new(default: Option<Duration>, min: Duration, max: Duration) -> Self {
        Self { default, min, max }
    }
}

/// The tokens of a store, and the failures that their growth survives.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fencing {
    /// Grants have no token.
    None,
    /// Tokens grow while the store's process or memory lives.
    Volatile,
    /// Tokens grow across crash and restart of one server. They also grow across a fail-over, unless
    /// asynchronous replication loses more than the last `margin` of the confirmed data.
    Replicated {
        /// The maximum time of confirmed data that a fail-over can lose.
        margin: Duration,
    },
    /// Tokens grow across crash and restart of the store, but not across the loss of confirmed data, such as a
    /// backup restored by hand. The store's documentation lists the other failures that they survive.
    Durable,
}

impl Fencing {
    /// Returns whether grants have tokens.
    #[must_use]
    pub const fn has_tokens(self) -> bool {
        !matches!(self, Self::None)
    }
}

/// The order among waiters of different clients. It can differ by [`Capabilities::handover_for`], and among readers and
/// writers by [`Capabilities::share_for`].
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fairness {
    /// No order. A client that re-acquires in a loop still yields to others.
    Unordered,
    /// First come, first served, except for waiters that arrive within one poll of each other.
    Roughly,
    /// First come, first served.
    Fifo,
}

/// The operations that a store offers to operators.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct AdminCapabilities {
    /// Inspect one key.
    pub inspect: bool,
    /// List holds.
    pub list: bool,
    /// End the hold of another client.
    pub force_release: bool,
    /// Send the holder of another client a request to release.
    pub ask: bool,
    /// The maximum time after a grant, or a change of its label, until other clients see its name, holder, token
    /// and label. They see at once that the key is held.
    pub lag: Duration,
}

impl AdminCapabilities {
    /// Returns a value with all operations.
    #[must_use]
    pub const fn all() -> Self {
        Self { force_release: true, ask: true, ..Self::read_only() }
    }

    /// Returns a value with inspection and lists.
    #[must_use]
    pub const fn read_only() -> Self {
        Self { inspect: true, list: true, force_release: false, ask: false, lag: Duration::ZERO }
    }
}

/// Whether two different keys can exclude each other.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KeyIdentity {
    /// Keys are compared whole.
    Exact,
    /// Keys are compared by a hash of this many bits. Two keys with the same hash exclude each other, which is
    /// safe. The store documents this.
    Hashed {
        /// The width of the hash.
        bits: u32,
    },
}

/// The features that a program needs from a lock, checked at start-up with
/// [`LockExt::require`](crate::LockExt::require).
///
/// ```
/// use leasehold_api::{Requirements, Scope};
///
/// let needs = Requirements::new().scope(Scope::Network).fencing();
/// # let _ = needs;
/// ```
#[derive(Clone, Debug, Default)]
pub struct Requirements {
    scope: Option<Scope>,
    lease: bool,
    fencing: bool,
    durable_fencing: bool,
    cooldown: bool,
    shared: bool,
    permits: u32,
    force_release: bool,
    loss_within: Option<Duration>,
    crash_release_within: Option<Duration>,
}

impl Requirements {
    /// Makes an empty list of requirements.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Requires exclusion at least in this scope.
    #[must_use]
    pub fn scope(mut self, scope: Scope) -> Self {
        self.scope = Some(scope);
        self
    }

    /// Requires leases.
    #[must_use]
    pub fn lease(mut self) -> Self {
        self.lease = true;
        self
    }

    /// Requires fencing tokens.
    #[must_use]
    pub fn fencing(mut self) -> Self {
        self.fencing = true;
        self
    }

    /// Requires fencing tokens that survive a restart of the store.
    #[must_use]
    pub fn durable_fencing(mut self) -> Self {
        self.durable_fencing = true;
        self
    }

    /// Requires cooldowns.
    #[must_use]
    pub fn cooldown(mut self) -> Self {
        self.cooldown = true;
        self
    }

    /// Requires [shared grants](crate::Mode::Shared).
    #[must_use]
    pub fn shared(mut self) -> Self {
        self.shared = true;
        self
    }

    /// Requires semaphores of at least this many [permits](crate::Mode::Permit).
    #[must_use]
    pub fn permits(mut self, of: u32) -> Self {
        self.permits = self.permits.max(of);
        self
    }

    /// Requires forced release by operators.
    #[must_use]
    pub fn force_release(mut self) -> Self {
        self.force_release = true;
        self
    }

    /// Requires that a holder learns of its loss within this time.
    #[must_use]
    pub fn loss_within(mut self, bound: Duration) -> Self {
        self.loss_within = Some(bound);
        self
    }

    /// Requires that the key is free within this time after its holder crashed.
    #[must_use]
    pub fn crash_release_within(mut self, bound: Duration) -> Self {
        self.crash_release_within = Some(bound);
        self
    }

    /// Compares the requirements with the capabilities of a store.
    ///
    /// ```
    /// use leasehold_api::{Capabilities, Requirements, Scope};
    /// let has = Capabilities::new(Scope::Machine);
    /// assert!(Requirements::new().scope(Scope::Process).check(&has).is_ok());
    /// let error = Requirements::new().lease().fencing().check(&has).unwrap_err();
    /// assert!(error.message().contains("leases, fencing tokens"));
    /// ```
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`] with a list of all missing features.
    pub fn check(&self, has: &Capabilities) -> Result<(), Error> {
        let mut missing = Vec::new();
        let mut need = |ok: bool, what: String| {
            if !ok {
                missing.push(what);
            }
        };
        if let Some(scope) = self.scope {
            need(has.scope >= scope, format!("exclusion {scope}"));
        }
        need(!self.lease || has.lease.is_some(), "leases".into());
        need(!self.fencing || has.fencing.has_tokens(), "fencing tokens".into());
        need(
            !self.durable_fencing || has.fencing == Fencing::Durable,
            "fencing tokens that survive a restart of the store".into(),
        );
        need(!self.cooldown || has.cooldown, "cooldowns".into());
        need(!self.shared || has.modes.shared, "shared grants".into());
        let most = has.modes.max_permits;
        need(self.permits <= most, format!("{} permits of one key (it has {most})", self.permits));
        need(!self.force_release || has.admin.force_release, "forced release".into());
        if let Some(bound) = self.loss_within {
            need(
                has.loss_detection <= bound,
                format!("loss detection within {bound:?} (it has {:?})", has.loss_detection),
            );
        }
        if let Some(bound) = self.crash_release_within {
            need(
                has.crash_release.is_some_and(|b| b <= bound),
                format!("release within {bound:?} after a crash (it has {:?})", has.crash_release),
            );
        }
        if missing.is_empty() {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "this store lacks what was required: {}; choose another store or require less",
                missing.join(", ")
            ),
        ))
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Process => "within one process",
            Self::Machine => "between processes of one machine",
            Self::Network => "between all clients of the same store, on whatever machine",
        })
    }
}

impl fmt::Display for Fencing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Volatile => "growing while the store's memory lives",
            Self::Replicated { .. } => "growing across restarts, but for what a fail-over loses",
            Self::Durable => "growing across restarts of the store",
        })
    }
}

impl fmt::Display for Fairness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unordered => "unordered",
            Self::Roughly => "roughly first come, first served",
            Self::Fifo => "first come, first served",
        })
    }
}

impl fmt::Display for KeyIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact => f.write_str("exact"),
            Self::Hashed { bits } => write!(f, "by {bits}-bit hash"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_everything_that_is_missing_at_once() {
        let has = Capabilities::new(Scope::Process);
        let error = Requirements::new().scope(Scope::Network).lease().cooldown().check(&has).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        for part in ["between all clients", "leases", "cooldowns"] {
            assert!(error.to_string().contains(part), "{part} in {error}");
        }
    }

    #[test]
    fn modes_are_compared_with_the_declared_ones() {
        let mut has = Capabilities::new(Scope::Process);
        let needs = Requirements::new().shared().permits(8).permits(3);
        let error = needs.check(&has).unwrap_err();
        assert!(error.message().contains("shared grants, 8 permits of one key (it has 0)"), "{error}");
        has.modes = Modes { shared: true, max_permits: 8 };
        assert!(needs.check(&has).is_ok());
        assert!(needs.permits(9).check(&has).is_err());
    }

    #[test]
    fn a_wider_scope_serves_a_narrower_need() {
        let has = Capabilities::new(Scope::Network);
        assert!(Requirements::new().scope(Scope::Machine).check(&has).is_ok());
    }
}
