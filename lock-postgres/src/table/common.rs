//! What the sessions, the backend and the upkeep of one client share.

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

/// How long a row that was found locked is not waited for.
const PINNED: Duration = Duration::from_secs(5);

/// What the sessions, the backend and the upkeep of one client have in common.
pub(super) struct Common {
    pub(super) config: PgConfig,
    pub(super) statements: Statements,
    pub(super) extension: Option<Extension>,
    pub(super) registry: Registry,
    pub(super) events: OnceLock<Events>,
    /// The name under which the schema's notifications travel.
    pub(super) channel: String,
    /// How often waiters ask.
    pub(super) poll: Duration,
    /// Whether one of the sessions listens.
    pub(super) listening: AtomicBool,
    /// Keys whose row another transaction keeps locked, and until when to expect that.
    pub(super) pinned: Mutex<HashMap<LockKey, Instant>>,
    pub(super) known_rows: BloomFilter,
    pub(super) contention: ContentionHints,
    /// How this process is shown to operators; without the client's address.
    pub(super) process: String,
    pub(super) closing: AtomicBool,
    /// Whether the role can look and no more.
    pub(super) may_only_read: AtomicBool,
}

impl Common {
    pub(super) fn events(&self, tell: impl FnOnce(&Events)) {
        if let Some(events) = self.events.get() {
            tell(events);
        }
    }

    /// How long one statement may take until its connection is given up.
    pub(super) fn limit(&self) -> Duration {
        self.config.statement_timeout + Duration::from_secs(1)
    }

    /// How long the server may still carry out what it was sent on a connection that broke, by `session`.
    /// Where a pooler hides that one: until the pooler has noticed that the client is gone, or what it passed
    /// on has arrived, and then as long as a statement takes. A commit has no limit.
    pub(super) fn doubt_period(&self, session: Option<Process>) -> DoubtPeriod {
        let arrives = session.map_or(self.config.liveness.server_gives_up, |_| Duration::from_secs(1));
        DoubtPeriod { session, time: arrives + self.config.statement_timeout }
    }

    /// Whether nothing is to be granted any more.
    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// Which of `keys` are not to be waited for.
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
