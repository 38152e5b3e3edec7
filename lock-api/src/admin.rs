//! The operator's view: look, list, and end a hold by force. Not for domain code.

use std::any::{Any, TypeId};
use std::fmt::Debug;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;

use crate::error::Error;
use crate::id::{FencingToken, HolderId};
use crate::key::LockKey;
use crate::options::Mode;

/// What operators do with a store. Looking never takes, blocks or lengthens a lock.
#[async_trait]
pub trait LockAdmin: Debug + Send + Sync {
    /// What is known of one key: who holds it, who waits, and whether a cooldown lasts. A free key is one
    /// without holders and cooldown.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](crate::ErrorKind::Unsupported) unless declared; else what the store answers.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future has no effect on any lock.
    async fn inspect(&self, key: &LockKey) -> Result<KeyInfo, Error>;

    /// The keys that `query` selects, in their order.
    ///
    /// # Errors
    ///
    /// As [`inspect`](LockAdmin::inspect).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future has no effect on any lock.
    async fn list(&self, query: &ListQuery) -> Result<Vec<KeyInfo>, Error>;

    /// Ends the hold of `key` if and only if `holder` has it. `Ok(true)`: ended; the holder's guard
    /// reads lost within [`Capabilities::loss_detection`](crate::Capabilities::loss_detection) and the
    /// next grant has a larger token. `Ok(false)`: that holder does not hold the key (any more).
    ///
    /// # Errors
    ///
    /// [`Unsupported`](crate::ErrorKind::Unsupported) unless declared; else what the store answers.
    ///
    /// # Cancel safety
    ///
    /// A dropped call may or may not have ended the hold; inspect to see.
    async fn force_release(&self, key: &LockKey, holder: HolderId) -> Result<bool, Error>;

    /// What this store's operators can do beyond that, by type; see [`extension`](#method.extension) on
    /// `dyn LockAdmin`.
    fn extension_of(&self, id: TypeId) -> Option<&(dyn Any + Send + Sync)> {
        let _ = id;
        None
    }
}

impl dyn LockAdmin + '_ {
    /// What only some stores have, by its type, which the store's crate documents: how to end a database
    /// session with all that it holds, for instance. A wrapper that shows other keys than the store's has none.
    #[must_use]
    pub fn extension<T: Any + Send + Sync>(&self) -> Option<&T> {
        self.extension_of(TypeId::of::<T>())?.downcast_ref()
    }
}

/// Which keys to list.
#[non_exhaustive]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListQuery {
    /// Only keys that begin with this text.
    pub prefix: String,
    /// At most this many; `None` lists all.
    pub limit: Option<usize>,
    /// Also keys that nobody holds but whose cooldown lasts, and holds that expired and were not taken since.
    pub include_ended: bool,
}

impl ListQuery {
    /// All keys that are held.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Only keys that begin with `prefix`.
    #[must_use]
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// At most `limit` of them.
    #[must_use]
    pub fn limit(mut self, limit: usize) -> Self {
        self.limit = Some(limit);
        self
    }

    /// Also what ended: expired leases, cooldowns.
    #[must_use]
    pub fn include_ended(mut self) -> Self {
        self.include_ended = true;
        self
    }
}

/// What the store knows of one key.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyInfo {
    /// The key.
    pub key: LockKey,
    /// Whether that is its name. A store that hashes keys ([`KeyIdentity::Hashed`](crate::KeyIdentity::Hashed))
    /// may know only a number, which `key` then spells.
    pub named: bool,
    /// Who holds it; who held it last, where a lease ended and nobody has taken the key since. More than one
    /// only in the modes that share a key.
    pub holders: Vec<HoldInfo>,
    /// How many others wait, where the store knows.
    pub waiters: Option<u64>,
    /// How long until a new grant is possible, if a cooldown lasts.
    pub cooldown: Option<Duration>,
}

impl KeyInfo {
    /// A key that nobody holds; fill in the fields.
    #[must_use]
    pub const fn free(key: LockKey) -> Self {
        Self { key, named: true, holders: Vec::new(), waiters: None, cooldown: None }
    }

    /// A key that `hold` holds or held.
    #[must_use]
    pub fn with_hold(key: LockKey, hold: HoldInfo) -> Self {
        Self { holders: vec![hold], ..Self::free(key) }
    }

    /// The first of those who hold it now.
    #[must_use]
    pub fn holder(&self) -> Option<&HoldInfo> {
        self.holders.iter().find(|hold| hold.state == HoldState::Held)
    }

    /// Whether somebody holds it now.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.holder().is_some()
    }

    /// Whether it can be granted now: nobody holds it, and no cooldown lasts.
    #[must_use]
    pub fn is_free(&self) -> bool {
        !self.is_held() && self.cooldown.is_none()
    }
}

/// What the store knows of one hold.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HoldInfo {
    /// Whether it is held now.
    pub state: HoldState,
    /// The grant that has (or last had) the key.
    pub holder: Option<HolderId>,
    /// Which other holders it excludes. Always [`Mode::Exclusive`] for holds of this version.
    pub mode: Mode,
    /// Its token.
    pub token: Option<FencingToken>,
    /// The label it was acquired with.
    pub label: Option<Arc<str>>,
    /// When it was granted, by the store's clock.
    pub since: Option<SystemTime>,
    /// How long until the lease ends by itself; `None` without a lease.
    pub expires_in: Option<Duration>,
    /// Who that is outside the lock: a process, a client address.
    pub owner: Option<String>,
}

impl HoldInfo {
    /// A live, exclusive hold of which nothing else is known yet; fill in the fields.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            state: HoldState::Held,
            holder: None,
            mode: Mode::Exclusive,
            token: None,
            label: None,
            since: None,
            expires_in: None,
            owner: None,
        }
    }
}

impl Default for HoldInfo {
    fn default() -> Self {
        Self::new()
    }
}

/// Whether a hold is live.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HoldState {
    /// Held.
    Held,
    /// The lease ended and nobody has taken the key since.
    Expired,
}
