//! The backend, which turns calls into jobs of the sessions.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_api::{Capabilities, Error, ErrorKind, HolderId, LockAdmin, LockKey, LossReason, Mode};
use leasehold_engine::{Attempt, Backend, Events, HoldRef, ReleaseReply, Renewed, Request, Timing, token};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::common::Common;
use super::dialect::{Dialect, Extension, Statements};
use super::hints::bloom::BloomFilter;
use super::hints::contention::ContentionHints;
use super::job::{Adoption, PendingCall, TableJob, ask, only};
use super::registry::{HoldId, Registry, ReleaseRequest};
use super::upkeep::{Upkeep, free};
use super::values::micros;
use super::work::TableWork;
use crate::config::PgConfig;
use crate::job_queue::JobQueue;
use crate::session::Session;
use crate::sql::channel;

/// How long closing waits for the sessions to end.
const SESSION_END: Duration = Duration::from_secs(2);

/// Interval at which closing checks whether everything is released.
const AGAIN: Duration = Duration::from_millis(20);

/// Capabilities and settings of a store with one row per key.
#[derive(Clone)]
#[allow(clippy::exhaustive_structs)] // Only stores of this family make it, with all fields.
pub struct TableSettings {
    /// The store's capabilities.
    pub capabilities: Capabilities,
    /// Timing for the engine.
    pub timing: Timing,
    /// Interval at which waiters poll if no notification arrives.
    pub poll: Duration,
    /// Number of sessions.
    pub connections: u8,
    /// Time after the end of a hold at which its row is removed. `None` keeps all rows.
    pub purge_after: Option<Duration>,
    /// Makes the extension of this store's guards.
    pub extension: Option<Extension>,
}

/// One client of a store with one row per key.
pub struct TableBackend {
    pub(super) common: Arc<Common>,
    capabilities: Capabilities,
    timing: Timing,
    pub(super) queue: JobQueue<TableJob>,
    sessions: Mutex<Vec<Session>>,
    /// Queue of the session that is opened on another runtime when the first runtime has ended, for the last
    /// releases.
    last: OnceLock<JobQueue<TableJob>>,
    closed: CancellationToken,
}

impl TableBackend {
    /// Opens the sessions: the first one at once, to report errors, and the others on demand.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption) if a setting is out of range.
    /// [`Unavailable`](ErrorKind::Unavailable), [`PermissionDenied`](ErrorKind::PermissionDenied) or
    /// [`SchemaMissing`](ErrorKind::SchemaMissing) if no session can be opened.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the call closes the sessions it has opened.
    pub async fn connect(
        config: &PgConfig,
        dialect: &Dialect,
        settings: TableSettings,
    ) -> Result<Self, Error> {
        config.check()?;
        check(&settings)?;
        let TableSettings { capabilities, timing, poll, connections, purge_after, extension } = settings;
        // Gives up one interval earlier than the engine, which counts from an earlier moment than the
        // registry.
        let sticky = timing.confirm.filter(|confirm| confirm.sticky);
        let channel = channel(dialect.kind, &config.schema);
        let common = Arc::new(Common {
            config: config.clone(),
            statements: Statements::new(dialect, &config.schema, &channel),
            extension,
            registry: Registry::new(sticky.map(|c| c.lost_after.saturating_sub(c.every))),
            events: OnceLock::new(),
            channel,
            poll,
            listening: AtomicBool::new(false),
            pinned: Mutex::default(),
            known_rows: BloomFilter::new(),
            contention: ContentionHints::new(),
            in_parts: ContentionHints::new(),
            process: process(config),
            closing: AtomicBool::new(false),
            may_only_read: AtomicBool::new(false),
        });
        let queue = JobQueue::new();
        let mut sessions = vec![Session::open(config, &queue, TableWork::new(&common)).await?];
        sessions.extend((1..connections).map(|_| Session::lazy(config, &queue, TableWork::new(&common))));
        let closed = CancellationToken::new();
        let upkeep =
            Upkeep { common: Arc::clone(&common), queue: queue.clone(), closed: closed.clone(), purge_after };
        tokio::spawn(upkeep.run());
        let (sessions, last) = (Mutex::new(sessions), OnceLock::new());
        Ok(Self { common, capabilities, timing, queue, sessions, last, closed })
    }

    /// Removes rows that ended longer ago than `age` (at least an hour), in small batches, and returns their number.
    /// The upkeep also does this periodically. Tokens keep growing after a removal.
    ///
    /// # Errors
    ///
    /// The store's error.
    ///
    /// # Cancel safety
    ///
    /// If dropped, some rows might remain, which the next call removes.
    pub async fn purge(&self, age: Duration) -> Result<u64, Error> {
        super::upkeep::purge(&self.queue, age.max(SAFE_AGE)).await
    }

    /// Returns the name of the schema's notification channel.
    #[must_use]
    pub fn channel(&self) -> &str {
        &self.common.channel
    }

    pub(super) async fn ask<Q, A>(
        &self,
        job: fn(PendingCall<Q, A>) -> TableJob,
        items: Vec<Q>,
    ) -> Vec<Result<A, Error>> {
        ask(&self.queue, job, items).await
    }

    /// Returns the reply for a hold that the server has or has no more.
    fn still_held(&self, holder: HolderId, is_held: bool) -> Renewed {
        if is_held {
            return Renewed::Extended;
        }
        self.common.registry.ended(holder);
        Renewed::Gone(LossReason::Gone)
    }

    /// Closes the queues. Queued jobs still run, but no key is granted. Returns the sessions.
    fn end(&self) -> Vec<Session> {
        self.common.closing.store(true, Ordering::Release);
        self.queue.close();
        if let Some(last) = self.last.get() {
            last.close();
        }
        std::mem::take(&mut *self.sessions.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Releases holds left by calls that were dropped before their end.
    async fn free_the_rest(&self) {
        let registry = &self.common.registry;
        let freed = async {
            while !self.queue.is_closed() {
                registry.end_all();
                if registry.needs_cleanup() && !free(&self.common, &self.queue).await || registry.is_quiet() {
                    return;
                }
                sleep(AGAIN).await;
            }
        };
        // Limits the wait to less than the engine's own limit, because the sessions still have to be closed.
        let _ = timeout(self.timing.request_timeout.min(self.timing.close) / 2, freed).await;
    }
}

fn check(settings: &TableSettings) -> Result<(), Error> {
    let invalid = |message: &str| Err(Error::new(ErrorKind::InvalidOption, message.to_owned()));
    if settings.connections == 0 {
        return invalid("a store needs at least one connection");
    }
    if settings.poll < Duration::from_millis(10) || settings.poll > Duration::from_secs(60) {
        return invalid("waiters ask every 10 ms to 60 s; choose an interval between them");
    }
    if settings.purge_after.is_some_and(|after| after < SAFE_AGE) {
        return invalid("rows are removed an hour after their end at the earliest");
    }
    Ok(())
}

/// The least age of a removed row. Younger rows stay, because a statement that has read one might still run.
const SAFE_AGE: Duration = Duration::from_secs(3600);

fn process(config: &PgConfig) -> String {
    let name = config.options().get_application_name().unwrap_or("leasehold");
    format!("{name} pid {}", std::process::id())
}

fn release_request(hold: HoldRef) -> ReleaseRequest {
    ReleaseRequest { unused: hold.unused, hold: hold_id(hold) }
}

fn hold_id(hold: HoldRef) -> HoldId {
    HoldId::new(hold.key, hold.holder, hold.mode)
}

#[async_trait]
impl Backend for TableBackend {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn timing(&self) -> Timing {
        self.timing.clone()
    }

    fn attach(&self, events: Events) {
        // Keeps the events of the first engine, because a backend belongs to one engine only.
        let _ = self.common.events.set(events);
    }

    async fn acquire(&self, requests: Vec<Request>) -> Vec<Result<Attempt, Error>> {
        self.ask(TableJob::Acquire, requests).await
    }

    async fn renew(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>> {
        let with_ttl = |hold: HoldRef| {
            let ttl = hold.ttl.map_or(0, micros);
            (hold_id(hold), ttl)
        };
        self.ask(TableJob::Renew, holds.into_iter().map(with_ttl).collect()).await
    }

    async fn look(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>> {
        let holders: Vec<_> = holds.iter().map(|hold| hold.holder).collect();
        let answers = self.ask(TableJob::Confirm, holds.into_iter().map(hold_id).collect()).await;
        let told = |(holder, answer): (_, Result<bool, Error>)| Ok(self.still_held(holder, answer?));
        holders.into_iter().zip(answers).map(told).collect()
    }

    async fn relabel(&self, hold: HoldRef, label: Arc<str>) -> Result<Renewed, Error> {
        let hold = hold_id(hold);
        let holder = hold.holder;
        Ok(self.still_held(holder, only(self.ask(TableJob::Relabel, vec![(hold, label)]).await)?))
    }

    async fn give_out(&self, hold: HoldRef) -> Result<Renewed, Error> {
        let (holder, ttl) = (hold.holder, hold.ttl.map_or(0, micros));
        let is_held = only(self.ask(TableJob::GiveOut, vec![(hold_id(hold), ttl)]).await)?;
        // Forgets the hold, because a client that closes releases every hold in its registry.
        self.common.registry.ended(holder);
        Ok(self.still_held(holder, is_held))
    }

    async fn adopt(&self, request: Request, given: HoldRef) -> Result<Attempt, Error> {
        if self.common.statements.adopt.is_none() {
            return Ok(Attempt::Refused(Error::unsupported("hold that can be adopted")));
        }
        let number = given.token.map_or(0, |token| token.as_i64() >> token::LOCAL_BITS);
        only(self.ask(TableJob::Adopt, vec![Adoption { request, holder: given.holder, number }]).await)
    }

    async fn release(&self, holds: Vec<HoldRef>) -> Vec<Result<ReleaseReply, Error>> {
        self.ask(TableJob::Release, holds.into_iter().map(release_request).collect()).await
    }

    async fn was_served(&self, key: &LockKey, holder: HolderId) -> Option<bool> {
        let hold = HoldId::new(key.clone(), holder, Mode::Exclusive);
        // An error is no reply, and the engine queries again.
        Some(matches!(self.ask(TableJob::Served, vec![hold]).await[..], [Ok(true)]))
    }

    async fn release_on_new_runtime(&self, holds: Vec<HoldRef>) -> Vec<Result<ReleaseReply, Error>> {
        let last = self.last.get_or_init(|| {
            let queue = JobQueue::new();
            // Drops the handle, because the session's actor ends when `abort` closes the queue.
            drop(Session::lazy(&self.common.config, &queue, TableWork::new(&self.common)));
            queue
        });
        ask(last, TableJob::Release, holds.into_iter().map(release_request).collect()).await
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        Some(self)
    }

    async fn close(&self) {
        self.common.closing.store(true, Ordering::Release);
        self.free_the_rest().await;
        for session in self.end() {
            session.ended(SESSION_END).await;
        }
        // Stops the upkeep last, because a running upkeep call must get its reply first.
        self.closed.cancel();
    }

    fn abort(&self) {
        self.end().iter().for_each(Session::abort);
        self.closed.cancel();
    }
}

impl Drop for TableBackend {
    fn drop(&mut self) {
        // Ends the sessions here too, because only an engine calls `close`.
        drop(self.end());
        self.closed.cancel();
    }
}

impl fmt::Display for TableBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} rows of {}", self.common.statements.kind, self.common.config)
    }
}

impl fmt::Debug for TableBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TableBackend")
            .field("config", &self.common.config)
            .field("queue", &self.queue)
            .field("held", &self.common.registry.held().len())
            .field("in_doubt", &self.common.registry.unconfirmed().len())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for TableSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TableSettings")
            .field("capabilities", &self.capabilities)
            .field("timing", &self.timing)
            .field("poll", &self.poll)
            .field("connections", &self.connections)
            .field("purge_after", &self.purge_after)
            .finish_non_exhaustive()
    }
}
