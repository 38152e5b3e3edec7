//! What a store has and how well: declared, read by callers, tested by the conformance suite.

use std::fmt;
use std::time::Duration;

use crate::error::{Error, ErrorKind};

/// What a lock can do and every bound it promises.
///
/// The conformance suite reads these and tests them: what is declared must hold, and what is not
/// declared must answer [`ErrorKind::Unsupported`] rather than something weaker.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Between whom the lock excludes.
    pub scope: Scope,
    /// Leases, if holds can end by themselves.
    pub lease: Option<LeaseBounds>,
    /// The fencing tokens and what they survive.
    pub fencing: Fencing,
    /// Order among waiters of different clients. Within one client it is always first come, first served.
    pub fairness: Fairness,
    /// How long after the store itself ended a hold the guard reads lost at the latest. Two guards can
    /// overlap no longer than this.
    pub loss_detection: Duration,
    /// How long after a future or guard was dropped the key is free at the latest, while the store answers.
    pub undo: Duration,
    /// How long after a release a waiter is granted at the latest, with every notification lost.
    pub handover: Duration,
    /// How long after the holder's process died its hold is free at the latest; `None` is never.
    pub crash_release: Option<Duration>,
    /// The modes beside exclusive, which the engine does not ask for yet.
    pub modes: Modes,
    /// Whether a grant may forbid the next one for a time.
    pub cooldown: bool,
    /// What operators can do.
    pub admin: AdminCapabilities,
    /// Whether two keys can be taken for one.
    pub keys: KeyIdentity,
    /// How many keys may be held at once through the store, if there is a limit.
    pub max_holds: Option<u64>,
}

impl Capabilities {
    /// The least that a store can declare; set the public fields for what it has beyond that.
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
            crash_release: None,
            modes: Modes::default(),
            cooldown: false,
            admin: AdminCapabilities::default(),
            keys: KeyIdentity::Exact,
            max_holds: None,
        }
    }
}

/// Between whom a lock excludes.
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

/// Which modes a store has beside [`Mode::Exclusive`](crate::Mode::Exclusive). The default is neither.
///
/// A declared mode has no effect yet: the engine refuses both, and no store of this workspace has them.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Modes {
    /// [`Mode::Shared`](crate::Mode::Shared).
    pub shared: bool,
    /// [`Mode::Permit`](crate::Mode::Permit): the most permits that a key can have; zero without semaphores.
    pub max_permits: u32,
}

/// The bounds of a store's leases.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseBounds {
    /// The TTL when the caller names none; `None`: a hold without a lease.
    pub default: Option<Duration>,
    /// The shortest TTL.
    pub min: Duration,
    /// The longest TTL.
    pub max: Duration,
}

impl LeaseBounds {
    /// Leases of `min` to `max`, by default `default`.
    #[must_use]
    pub const fn new(default: Option<Duration>, min: Duration, max: Duration) -> Self {
        Self { default, min, max }
    }
}

/// Which tokens a store gives and what their growth survives.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fencing {
    /// Grants have no token.
    None,
    /// Tokens grow as long as the store's process or memory lives.
    Volatile,
    /// Tokens grow across crash and restart of one server, and across a fail-over unless it loses the last
    /// `margin` of what the server had confirmed, as replication that is not waited for may.
    Replicated {
        /// How much of the confirmed past a fail-over may lose at the most.
        margin: Duration,
    },
    /// Tokens grow also across crash and restart of the store, but not across the loss of data that
    /// the store had confirmed (a backup that was put back by hand, say); the store's own documentation
    /// says what they survive besides.
    Durable,
}

impl Fencing {
    /// Whether grants have tokens.
    #[must_use]
    pub const fn has_tokens(self) -> bool {
        !matches!(self, Self::None)
    }
}

/// Order among waiters of different clients.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fairness {
    /// No order; somebody gets it. A client that re-acquires in a loop still yields to others.
    Unordered,
    /// First come, first served, up to waiters that arrive within one poll of each other.
    Roughly,
    /// First come, first served.
    Fifo,
}

/// What operators can do with a store.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct AdminCapabilities {
    /// Look at one key.
    pub inspect: bool,
    /// List holds.
    pub list: bool,
    /// End somebody else's hold.
    pub force_release: bool,
    /// How long after a grant other clients see its name, holder, token and label at the latest. That
    /// the key is held shows at once.
    pub lag: Duration,
}

impl AdminCapabilities {
    /// All of them.
    #[must_use]
    pub const fn all() -> Self {
        Self { force_release: true, ..Self::read_only() }
    }

    /// Looking, but no forced release.
    #[must_use]
    pub const fn read_only() -> Self {
        Self { inspect: true, list: true, force_release: false, lag: Duration::ZERO }
    }
}

/// Whether two keys can be taken for one.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KeyIdentity {
    /// Keys are compared whole.
    Exact,
    /// Keys are compared by a hash of this many bits. Two keys that meet exclude each other, which is
    /// safe, and the store says so.
    Hashed {
        /// The width of the hash.
        bits: u32,
    },
}

/// What a caller needs from a lock, checked once at start-up with
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
    force_release: bool,
    loss_within: Option<Duration>,
    crash_release_within: Option<Duration>,
}

impl Requirements {
    /// No requirement.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Excludes at least between these.
    #[must_use]
    pub fn scope(mut self, scope: Scope) -> Self {
        self.scope = Some(scope);
        self
    }

    /// Has leases.
    #[must_use]
    pub fn lease(mut self) -> Self {
        self.lease = true;
        self
    }

    /// Gives fencing tokens.
    #[must_use]
    pub fn fencing(mut self) -> Self {
        self.fencing = true;
        self
    }

    /// Gives fencing tokens that survive a restart of the store.
    #[must_use]
    pub fn durable_fencing(mut self) -> Self {
        self.durable_fencing = true;
        self
    }

    /// Has cooldowns.
    #[must_use]
    pub fn cooldown(mut self) -> Self {
        self.cooldown = true;
        self
    }

    /// Lets operators end a hold.
    #[must_use]
    pub fn force_release(mut self) -> Self {
        self.force_release = true;
        self
    }

    /// Tells a holder of its loss within this time.
    #[must_use]
    pub fn loss_within(mut self, bound: Duration) -> Self {
        self.loss_within = Some(bound);
        self
    }

    /// Frees the key within this time after its holder crashed.
    #[must_use]
    pub fn crash_release_within(mut self, bound: Duration) -> Self {
        self.crash_release_within = Some(bound);
        self
    }

    /// Compares with what a store declares.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`] that lists everything that is missing.
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
    fn a_wider_scope_serves_a_narrower_need() {
        let has = Capabilities::new(Scope::Network);
        assert!(Requirements::new().scope(Scope::Machine).check(&has).is_ok());
    }
}
