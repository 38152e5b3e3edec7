//! The operator's view: look, list, and end a hold by force. Not for domain code.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;

use crate::error::Error;
use crate::id::{FencingToken, HolderId};
use crate::key::LockKey;

/// What operators do with a store. Looking never takes, blocks or lengthens a lock.
#[async_trait]
pub trait LockAdmin: Debug + Send + Sync {
    /// The hold of one key, or `None` when it is free. A key that nobody holds, but that a cooldown keeps shut, is
    /// [`HoldState::Cooling`](crate::HoldState::Cooling).
    ///
    /// # Errors
    ///
    /// [`Unsupported`](crate::ErrorKind::Unsupported) unless declared; else what the store answers.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future has no effect on any lock.
    async fn inspect(&self, key: &LockKey) -> Result<Option<HoldInfo>, Error>;

    /// The holds that `query` selects, ordered by key.
    ///
    /// # Errors
    ///
    /// As [`inspect`](LockAdmin::inspect).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future has no effect on any lock.
    async fn list(&self, query: &ListQuery) -> Result<Vec<HoldInfo>, Error>;

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

    /// The session that keeps the hold of `key`, where a store keeps holds by sessions that can only be
    /// ended as a whole; `None` when the key is free.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](crate::ErrorKind::Unsupported) unless
    /// [`end_session`](crate::AdminCapabilities::end_session) is declared, which is the default; else
    /// what the store answers.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future has no effect on any lock.
    async fn session_of(&self, key: &LockKey) -> Result<Option<SessionInfo>, Error> {
        Err(Error::unsupported("sessions that could be ended").with_key(key))
    }

    /// Ends a session that [`session_of`](Self::session_of) has found, and with it all that it holds.
    /// `Ok(false)`: it had ended before.
    ///
    /// # Errors
    ///
    /// As [`session_of`](Self::session_of).
    ///
    /// # Cancel safety
    ///
    /// A dropped call may or may not have ended the session; look again.
    async fn end_session(&self, session: &SessionInfo) -> Result<bool, Error> {
        let _ = session;
        Err(Error::unsupported("sessions that could be ended"))
    }
}

/// A session of the store and what goes when it is ended.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionInfo {
    /// What the store calls it. It names no later session.
    pub id: String,
    /// Whose it is: a client address, an application.
    pub owner: Option<String>,
    /// Everything that it holds.
    pub holds: Vec<HoldInfo>,
}

impl SessionInfo {
    /// The session `id` with its holds.
    #[must_use]
    pub fn new(id: String, owner: Option<String>, holds: Vec<HoldInfo>) -> Self {
        Self { id, owner, holds }
    }
}

/// Which holds to list.
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
    /// All live holds.
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

/// What the store knows of one hold.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HoldInfo {
    /// The key.
    pub key: LockKey,
    /// Whether that is its name. A store that hashes keys may know only a number, which `key` then spells.
    pub named: bool,
    /// Whether it is held now.
    pub state: HoldState,
    /// The grant that has (or last had) it.
    pub holder: Option<HolderId>,
    /// Its token.
    pub token: Option<FencingToken>,
    /// The label it was acquired with.
    pub label: Option<Arc<str>>,
    /// When it was granted, by the store's clock.
    pub since: Option<SystemTime>,
    /// How long until the lease ends by itself; `None` without a lease.
    pub expires_in: Option<Duration>,
    /// How long until a new grant is possible, if a cooldown lasts.
    pub cooling_for: Option<Duration>,
    /// Who that is outside the lock: a process, a client address.
    pub owner: Option<String>,
    /// How many others wait, where the store knows.
    pub waiters: Option<u64>,
}

impl HoldInfo {
    /// A live hold of `key` of which nothing else is known yet; fill in the fields.
    #[must_use]
    pub fn new(key: LockKey) -> Self {
        Self {
            key,
            named: true,
            state: HoldState::Held,
            holder: None,
            token: None,
            label: None,
            since: None,
            expires_in: None,
            cooling_for: None,
            owner: None,
            waiters: None,
        }
    }
}

/// Whether a key is held.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HoldState {
    /// Held.
    Held,
    /// The lease ended and nobody has taken the key since.
    Expired,
    /// Free, but no new grant before the cooldown has passed.
    Cooling,
}
