//! State shared by the sessions of one client.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use leasehold_api::{Error, ErrorKind, LockKey, LossReason};
use leasehold_engine::Events;
use leasehold_postgres::schema::{Access, Stores};
use leasehold_postgres::{
    DEFAULT_SCHEMA, Identifier, JobQueue, KeyNumber, KeySpace, PgConfig, Pooler, store_error,
};
use sqlx::PgConnection;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::registry::{Location, Registry};
use crate::server::lock_table_capacity;
use crate::shared_session::job::SharedJob;
use crate::side_session::job::SideJob;
use crate::sql::Statements;

/// The tasks of this process that poll for a number, by that number.
pub(crate) type Pollers = Arc<Mutex<HashMap<i64, PollerEntry>>>;

/// One task that polls.
#[derive(Clone)]
pub(crate) struct PollerEntry {
    /// Notified by a release of the number.
    pub(crate) woken: Arc<Notify>,
    /// Whether the task closes the gate of the number, because it waits for the exclusive lock outside of the server's
    /// queue, and readers of other clients would overlap indefinitely.
    pub(crate) closes_gate: bool,
}

pub(crate) struct Common {
    pub(crate) config: PgConfig,
    pub(crate) schema: Identifier,
    pub(crate) hasher: Arc<dyn KeyNumber>,
    pub(crate) statements: Statements,
    /// Channel on which pollers are notified of a release.
    pub(crate) channel: String,
    pub(crate) registry: Registry,
    pub(crate) pollers: Pollers,
    /// Queues of the shared sessions.
    pub(crate) queues: Vec<JobQueue<SharedJob>>,
    /// Queue of the side session, which holds no locks.
    pub(crate) side_session: JobQueue<SideJob>,
    pids: Vec<AtomicI32>,
    /// Server process ids of the wait sessions that hold a lock, by session id.
    wait_pids: Mutex<HashMap<u64, i32>>,
    events: OnceLock<Events>,
    pub(crate) closed: AtomicBool,
    pooled: AtomicBool,
    capacity: AtomicU64,
    warned: AtomicBool,
    started: Instant,
    /// Whether the role can only read.
    may_only_read: AtomicBool,
}

impl Common {
    pub(crate) fn new(config: PgConfig, hasher: Arc<dyn KeyNumber>, shared_sessions: usize) -> Self {
        let schema = config.schema_name().clone();
        let statements = Statements::new(&schema, hasher.space());
        Self {
            channel: leasehold_postgres::channel("advisory", &schema),
            config,
            schema,
            hasher,
            statements,
            registry: Registry::default(),
            pollers: Arc::new(Mutex::new(HashMap::new())),
            queues: std::iter::repeat_with(JobQueue::new).take(shared_sessions).collect(),
            side_session: JobQueue::new(),
            started: Instant::now(),
            may_only_read: AtomicBool::new(false),
            pids: std::iter::repeat_with(AtomicI32::default).take(shared_sessions).collect(),
            wait_pids: Mutex::default(),
            events: OnceLock::new(),
            closed: AtomicBool::new(false),
            pooled: AtomicBool::new(false),
            capacity: AtomicU64::new(0),
            warned: AtomicBool::new(false),
        }
    }

    pub(crate) fn number(&self, key: &LockKey) -> Result<i64, Error> {
        self.hasher.number(&self.schema, key).map_err(|error| error.with_key(key))
    }

    pub(crate) fn space(&self) -> KeySpace {
        self.hasher.space()
    }

    /// Returns the index of the shared session for `number`.
    pub(crate) fn shared_session_of(&self, number: i64) -> usize {
        // The conversion does not fail, because the number of sessions is small, and so is the remainder.
        usize::try_from(number.rem_euclid(self.queues.len() as i64)).unwrap_or(0)
    }

    /// Returns the time limit of a statement, longer than the server's own limit.
    pub(crate) fn statement_limit(&self) -> Duration {
        self.config.statement_limit() + Duration::from_secs(1)
    }

    pub(crate) fn attach(&self, events: Events) {
        let _ = self.events.set(events);
    }

    pub(crate) fn events(&self) -> Option<&Events> {
        self.events.get()
    }

    /// Returns the server processes of the shared sessions.
    pub(crate) fn shared_pids(&self) -> Vec<i32> {
        self.pids.iter().map(|pid| pid.load(Ordering::Acquire)).collect()
    }

    /// Returns the server processes of the wait sessions that hold a lock.
    pub(crate) fn wait_pids(&self) -> HashMap<u64, i32> {
        self.wait_pids.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the session of this client with the server process `pid`, if it holds locks.
    pub(crate) fn location_of(&self, pid: i32) -> Option<Location> {
        let shared = self.shared_pids().iter().position(|session| *session == pid).map(Location::Shared);
        let waiting = || self.wait_pids().into_iter().find(|(_, session)| *session == pid);
        shared.or_else(|| waiting().map(|(id, _)| Location::Own(id)))
    }

    pub(crate) fn wait_session_keeps(&self, id: u64, pid: Option<i32>) {
        let mut pids = self.wait_pids.lock().unwrap_or_else(PoisonError::into_inner);
        match pid {
            Some(pid) => drop(pids.insert(id, pid)),
            None => drop(pids.remove(&id)),
        }
    }

    /// Checks the schema and reads the size of the server's lock table.
    pub(crate) async fn prepare(&self, connection: &mut PgConnection) -> Result<(), Error> {
        let may_only_read = self.config.prepare(connection, Stores::Advisory).await? == Access::ReadOnly;
        self.may_only_read.store(may_only_read, Ordering::Relaxed);
        let capacity = lock_table_capacity(connection).await;
        let capacity = capacity.map_err(|error| store_error(error, "read the server's settings"))?;
        self.capacity.store(capacity, Ordering::Relaxed);
        Ok(())
    }

    /// Returns whether the role can only read.
    pub(crate) fn may_only_read(&self) -> bool {
        self.may_only_read.load(Ordering::Relaxed)
    }

    /// Returns whether tokens grow between grants of a number. They do not if several schemas share the number, because
    /// each has a separate sequence.
    pub(crate) fn has_tokens(&self) -> bool {
        self.hasher.covers_schema() || self.schema.as_str() == DEFAULT_SCHEMA
    }

    /// Returns the next time, at least half an interval ahead, at which all waiters check their waits. The
    /// checks of one time are batched.
    pub(crate) fn next_look(&self, every: Duration) -> Instant {
        let every = every.max(Duration::from_millis(1));
        let soonest = self.started.elapsed() + every / 2;
        let ticks = u32::try_from(soonest.as_nanos().div_ceil(every.as_nanos())).unwrap_or(u32::MAX);
        self.started + every * ticks
    }

    pub(crate) fn close_queues(&self) {
        self.queues.iter().for_each(JobQueue::close);
        self.side_session.close();
    }

    /// Returns the capacity of the server's lock table, for locks of all kinds, or `None` before it was read.
    pub(crate) fn capacity(&self) -> Option<u64> {
        Some(self.capacity.load(Ordering::Relaxed)).filter(|capacity| *capacity > 0)
    }

    /// Returns whether a pooler in transaction mode was found.
    pub(crate) fn is_pooled(&self) -> bool {
        self.pooled.load(Ordering::Relaxed)
    }

    /// Returns the configuration of further sessions, which do not detect poolers again.
    pub(crate) fn config_of_more(&self) -> PgConfig {
        let pooler = if self.is_pooled() { Pooler::Transaction } else { Pooler::Known };
        self.config.clone().pooler(pooler)
    }

    pub(crate) fn shared_session_opened(&self, index: usize, pid: i32, pooled: bool) {
        self.pooled.store(pooled, Ordering::Relaxed);
        if let Some(slot) = self.pids.get(index) {
            slot.store(pid, Ordering::Release);
        }
        // Makes all waiters check, because notifications were missed without a session.
        if let Some(events) = self.events() {
            events.resync();
        }
    }

    /// Records that a shared session was closed while it held no locks.
    pub(crate) fn shared_session_closed(&self, index: usize) {
        if let Some(slot) = self.pids.get(index) {
            slot.store(0, Ordering::Release);
        }
    }

    /// Returns whether a lock is held or requested.
    pub(crate) fn is_used(&self) -> bool {
        let is_polled = !self.pollers.lock().unwrap_or_else(PoisonError::into_inner).is_empty();
        is_polled || self.registry.len() > 0
    }

    /// Returns whether this client's sessions were closed because they were unused.
    pub(crate) fn is_asleep(&self) -> bool {
        self.config.closes_when_idle(Duration::MAX) && !self.queues.iter().any(JobQueue::is_served)
    }

    /// Forgets all locks at `location` and reports their loss.
    pub(crate) fn session_lost(&self, location: Location, reason: LossReason) {
        let lost = self.registry.lost(location);
        if let Location::Own(id) = location {
            self.wait_session_keeps(id, None);
        }
        if let Some(events) = self.events() {
            lost.iter().for_each(|(key, holder)| events.lost(key, *holder, reason));
        }
    }

    /// Warns once if this client's locks fill half of the server's lock table, because at its limit other
    /// users' statements fail too.
    pub(crate) fn watch_capacity(&self, held: u64) {
        let Some(capacity) = self.capacity() else { return };
        if held * 2 > capacity && !self.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                held,
                capacity,
                "this process alone holds more than half of the server's lock table; raise max_locks_per_transaction, or use a row or lease store for so many keys"
            );
        }
    }

    pub(crate) fn behind_a_pooler(&self) -> Error {
        Error::new(
            ErrorKind::Unsupported,
            "a pooler in transaction mode is in between, where a session lock would be left on a connection that others use; connect to the server directly, or use postgres+advisory-xact, postgres+row or postgres+ttl",
        )
        .with_store(self.config.to_string())
    }

    pub(crate) fn only_pretends(&self) -> Error {
        Error::new(
            ErrorKind::Unsupported,
            "the server has no advisory locks that exclude: one session was granted what another one held, or the functions are missing. Servers that only resemble Postgres may have functions that do nothing; use postgres+row or postgres+ttl, or a server of PostgreSQL itself",
        )
        .with_store(self.config.to_string())
    }

    pub(crate) fn open(&self) -> Result<(), Error> {
        if self.closed.load(Ordering::Acquire) { Err(Error::closed()) } else { Ok(()) }
    }
}
