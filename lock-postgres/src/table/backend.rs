//! The backend: calls become jobs of the sessions.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_api::{Capabilities, Error, ErrorKind, HolderId, LockAdmin, LossReason};
use leasehold_engine::{Attempt, Backend, Events, HoldRef, ReleaseReply, Renewed, Request, Timing};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::common::Common;
use super::dialect::{Dialect, Extension, Statements};
use super::hints::bloom::BloomFilter;
use super::hints::contention::ContentionHints;
use super::job::{PendingCall, TableJob, ask};
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

/// How often closing looks whether everything is released.
const AGAIN: Duration = Duration::from_millis(20);

/// What a store of this family promises, and how it is driven.
#[derive(Clone)]
#[allow(clippy::exhaustive_structs)] // Made by the stores of this family, with everything they decide.
pub struct TableSettings {
    /// What the store declares.
    pub capabilities: Capabilities,
    /// How the engine drives it.
    pub timing: Timing,
    /// How often waiters ask when no notification comes.
    pub poll: Duration,
    /// How many sessions to keep.
    pub connections: u8,
    /// How long after their end rows are removed; `None` keeps them.
    pub purge_after: Option<Duration>,
    /// What a guard of this store offers beside the lock.
    pub extension: Option<Extension>,
}

/// One client of a store with one row per key.
pub struct TableBackend {
    pub(super) common: Arc<Common>,
    capabilities: Capabilities,
    timing: Timing,
    pub(super) queue: JobQueue<TableJob>,
    sessions: Mutex<Vec<Session>>,
    /// The queue of the session that outlives the runtime of the others.
    last: OnceLock<JobQueue<TableJob>>,
    closed: CancellationToken,
}

impl TableBackend {
    /// Opens the sessions: the first one now, so that what is wrong is told; the others when there is work.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption) for settings that cannot be kept; what keeps a session
    /// from being opened: [`Unavailable`](ErrorKind::Unavailable),
    /// [`PermissionDenied`](ErrorKind::PermissionDenied), [`SchemaMissing`](ErrorKind::SchemaMissing).
    ///
    /// # Cancel safety
    ///
    /// A dropped call closes what it has opened.
    pub async fn connect(
        config: &PgConfig,
        dialect: &Dialect,
        settings: TableSettings,
    ) -> Result<Self, Error> {
        config.check()?;
        check(&settings)?;
        let TableSettings { capabilities, timing, poll, connections, purge_after, extension } = settings;
        // One interval earlier than the engine, which counts from before we did.
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

    /// Removes rows that ended longer ago than `age` (an hour at least), in small batches, and says how many
    /// there were. It also happens by itself; tokens grow on all the same.
    ///
    /// # Errors
    ///
    /// What the store answers.
    ///
    /// # Cancel safety
    ///
    /// A dropped call may leave rows that the next one removes.
    pub async fn purge(&self, age: Duration) -> Result<u64, Error> {
        super::upkeep::purge(&self.queue, age.max(SAFE_AGE)).await
    }

    /// The name of the notifications of this schema.
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

    /// From here on nothing is granted, and nothing is asked once the queue is empty.
    fn end(&self) -> Vec<Session> {
        self.common.closing.store(true, Ordering::Release);
        self.queue.close();
        if let Some(last) = self.last.get() {
            last.close();
        }
        std::mem::take(&mut *self.sessions.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Releases what calls have left that were not polled to their end.
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
        // The engine's own limit must not end us before the sessions are ended.
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

/// Rows younger than this stay: a statement that saw one may still be under way.
const SAFE_AGE: Duration = Duration::from_secs(3600);

fn process(config: &PgConfig) -> String {
    let name = config.options().get_application_name().unwrap_or("leasehold");
    format!("{name} pid {}", std::process::id())
}

fn release_request(hold: HoldRef) -> ReleaseRequest {
    ReleaseRequest { unused: hold.unused, hold: hold_id(hold) }
}

fn hold_id(hold: HoldRef) -> HoldId {
    HoldId { key: hold.key, holder: hold.holder }
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
        // A backend belongs to one engine; a second one would find the first one's events.
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
        let told = |(holder, answer): (HolderId, Result<bool, Error>)| match answer {
            Ok(true) => Ok(Renewed::Extended),
            Ok(false) => {
                self.common.registry.ended(holder);
                Ok(Renewed::Gone(LossReason::Gone))
            }
            Err(error) => Err(error),
        };
        holders.into_iter().zip(answers).map(told).collect()
    }

    async fn release(&self, holds: Vec<HoldRef>) -> Vec<Result<ReleaseReply, Error>> {
        self.ask(TableJob::Release, holds.into_iter().map(release_request).collect()).await
    }

    async fn release_on_new_runtime(&self, holds: Vec<HoldRef>) -> Vec<Result<ReleaseReply, Error>> {
        let last = self.last.get_or_init(|| {
            let queue = JobQueue::new();
            // Its actor ends with the queue, in `abort`.
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
        // Not before: what it has asked for is asked to the end.
        self.closed.cancel();
    }

    fn abort(&self) {
        self.end().iter().for_each(Session::abort);
        self.closed.cancel();
    }
}

impl Drop for TableBackend {
    fn drop(&mut self) {
        // Without an engine nobody calls `close`.
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
