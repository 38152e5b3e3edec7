//! State shared by the sessions, the backend and the upkeep of one client.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use leasehold_api::LockKey;
use leasehold_engine::Events;
use tokio::time::Instant;

use super::dialect::{Extension, Statements};
use super::hints::bloom::BloomFilter;
use super::hints::contention::ContentionHints;
use super::registry::{DoubtPeriod, Process, Registry};
use crate::config::PgConfig;

/// How long statements skip a row that another transaction had locked (a pinned row).
const PINNED: Duration = Duration::from_secs(5);

/// State shared by the sessions, the backend and the upkeep of one client.
pub(super) struct Common {
    pub(super) config: PgConfig,
    pub(super) statements: Statements,
    pub(super) extension: Option<Extension>,
    pub(super) registry: Registry,
    pub(super) events: OnceLock<Events>,
    /// Channel of the schema's notifications.
    pub(super) channel: String,
    /// Poll interval of waiters.
    pub(super) poll: Duration,
    /// Whether one of the sessions listens for notifications.
    pub(super) listening: AtomicBool,
    /// Pinned keys: another transaction has locked the key's row. The value is the time until which
    /// statements skip the row.
    pub(super) pinned: Mutex<HashMap<LockKey, Instant>>,
    pub(super) known_rows: BloomFilter,
    pub(super) contention: ContentionHints,
    /// Keys that several holders had at once when this client requested them last.
    pub(super) in_parts: ContentionHints,
    /// Description of this process for operators, without the client's address.
    pub(super) process: String,
    pub(super) closing: AtomicBool,
    /// Whether the role can only read.
    pub(super) may_only_read: AtomicBool,
}

impl Common {
    pub(super) fn events(&self, tell: impl FnOnce(&Events)) {
        if let Some(events) = self.events.get() {
            tell(events);
        }
    }

    /// Returns the time limit of a statement, after which its connection is dropped.
    pub(super) fn limit(&self) -> Duration {
        self.config.statement_timeout + Duration::from_secs(1)
    }

    /// Returns how long the server might still run a request of `session` after its connection broke. It runs
    /// while `session` exists, and for a time: until the request arrives or, without `session` (hidden by a
    /// pooler), until the pooler notices the client's end, plus a statement's limit. A commit has no limit.
    pub(super) fn doubt_period(&self, session: Option<Process>) -> DoubtPeriod {
        let arrives = session.map_or(self.config.liveness.server_gives_up, |_| Duration::from_secs(1));
        DoubtPeriod { session, time: arrives + self.config.statement_timeout }
    }

    /// Returns whether grants have stopped because the client is closing.
    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// Returns whether a row of `keys` is pinned, in which case statements must skip locked rows.
    pub(super) fn is_any_pinned<'k>(&self, keys: impl IntoIterator<Item = &'k LockKey>) -> bool {
        let mut pinned = self.pinned.lock().unwrap_or_else(PoisonError::into_inner);
        if pinned.is_empty() {
            return false;
        }
        let now = Instant::now();
        pinned.retain(|_, until| *until > now);
        keys.into_iter().any(|key| pinned.contains_key(key))
    }

    pub(super) fn pin(&self, key: &LockKey) {
        let mut pinned = self.pinned.lock().unwrap_or_else(PoisonError::into_inner);
        pinned.insert(key.clone(), Instant::now() + PINNED);
    }
}
