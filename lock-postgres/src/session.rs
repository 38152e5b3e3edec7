//! A session with the server as an actor, which owns the connection, runs the jobs of its queue, and notices
//! immediately if the server ends the session.
//!
//! An idle connection of the driver does not read its socket and would notice its end only at the next
//! statement. The driver's listener does read the socket, so the actor keeps its connection in a listener.

use std::fmt;
use std::ops::ControlFlow;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt as _;
use leasehold_api::{Error, ErrorKind};
use sqlx::PgConnection;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::task::AbortOnDropHandle;

use crate::config::PgConfig;
use crate::connect::link::Link;
use crate::job_queue::{Job, JobQueue};
use crate::time_limit::{Overrun, limited};

/// The most jobs in one batch.
pub const MOST_JOBS: usize = 512;

/// The shortest and the longest pause between attempts to connect.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// The longest time without input before the session is pinged. The ping detects a dead path, on which no notification
/// can arrive, and the session is opened again.
const ECHO: Duration = Duration::from_secs(20);

/// Extra time that lets the server's statement timeout fire first.
const GRACE: Duration = Duration::from_secs(1);

/// An opened session, as the server identifies it.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionId {
    /// Process id on the server. Behind a pooler it changes from one transaction to the next.
    pub pid: i32,
    /// Counts the sessions of one actor. Locks of an earlier session are gone.
    pub epoch: u64,
    /// Whether a transaction pooler was found.
    pub pooled: bool,
    /// Whether an advisory lock of one session blocked another session. Also `true` if not tested, because the
    /// configuration states whether a pooler exists ([`Pooler`](crate::Pooler)).
    pub excludes: bool,
}

/// The work an actor does with its session.
pub trait Work: Send + 'static {
    /// A request to the actor.
    type Job: Job;

    /// Called after the session was opened and configured, before the first job. An error closes the session and fails
    /// the queued jobs.
    fn opened(
        &mut self,
        connection: &mut PgConnection,
        session: SessionId,
    ) -> impl Future<Output = Result<(), Error>> + Send;

    /// Runs all of `jobs` and answers them. An error puts the connection in doubt, so it is closed. Jobs dropped
    /// without an answer have an unknown outcome.
    fn run(
        &mut self,
        connection: &mut PgConnection,
        jobs: Vec<Self::Job>,
    ) -> impl Future<Output = Result<(), Error>> + Send;

    /// Returns the time limit for [`run`](Self::run), or `None` for no limit. Default: [`PgConfig::statement_timeout`].
    fn limit(&self, jobs: &[Self::Job], usual: Duration) -> Option<Duration> {
        let _ = jobs;
        Some(usual)
    }

    /// Returns whether to keep a session that ran nothing for `unused`. If `false`, the session ends without a call of
    /// [`ended`](Self::ended) and is opened again for the next job. Called periodically, between jobs.
    fn keep(&mut self, unused: Duration) -> bool {
        let _ = unused;
        true
    }

    /// Called for each notification that arrives on the session.
    fn notified(&mut self, channel: &str, payload: &str) {
        let _ = (channel, payload);
    }

    /// Called if the session has ended or could not be opened. Its locks are gone.
    fn ended(&mut self, error: &Error) {
        let _ = error;
    }
}

/// A started actor. Dropping this value changes nothing, because the actor ends when its queue is closed.
pub struct Session {
    task: JoinHandle<()>,
}

impl Session {
    /// Opens a session for `work` and starts its actor on the current runtime.
    ///
    /// # Errors
    ///
    /// The error that prevented the session, or [`NoRuntime`](ErrorKind::NoRuntime) outside of a tokio runtime.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the call closes the session it has opened.
    pub async fn open<W: Work>(config: &PgConfig, queue: &JobQueue<W::Job>, work: W) -> Result<Self, Error> {
        let runtime = Handle::try_current().map_err(|error| {
            let message = "there is no tokio runtime here to open a session on; connect inside one";
            Error::new(ErrorKind::NoRuntime, message).with_store(config.to_string()).with_source(error)
        })?;
        let actor = Actor::new(config, queue, work);
        let (tell, told) = oneshot::channel();
        // Runs the actor in a task from the start, because connections must not be dropped outside a runtime.
        let task = AbortOnDropHandle::new(runtime.spawn(actor.begin(tell)));
        match told.await {
            Ok(Ok(())) => Ok(Self { task: task.detach() }),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(Error::new(ErrorKind::Unavailable, "the runtime ended while a session was opened")),
        }
    }

    /// Starts an actor that opens its session for the first job. Needs a tokio runtime.
    #[must_use]
    pub fn lazy<W: Work>(config: &PgConfig, queue: &JobQueue<W::Job>, work: W) -> Self {
        Self { task: tokio::spawn(Actor::new(config, queue, work).act(None)) }
    }

    /// Waits at most `limit` until the actor of a closed queue has ended its session, then aborts the actor.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the actor still ends after its queue is closed.
    pub async fn ended(self, limit: Duration) {
        let abort = self.task.abort_handle();
        if timeout(limit, self.task).await.is_err() {
            abort.abort();
        }
    }

    /// Aborts the actor without waiting.
    pub fn abort(&self) {
        self.task.abort();
    }

    /// Returns a handle that aborts the actor while another owner holds this value.
    #[must_use]
    pub fn abort_handle(&self) -> AbortHandle {
        self.task.abort_handle()
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("ended", &self.task.is_finished()).finish()
    }
}

struct Actor<W: Work> {
    config: PgConfig,
    queue: JobQueue<W::Job>,
    work: W,
    epoch: u64,
    serving: bool,
    /// Whether the actor ends on request, not by an abort or a panic.
    over: bool,
}

impl<W: Work> Actor<W> {
    fn new(config: &PgConfig, queue: &JobQueue<W::Job>, work: W) -> Self {
        Self { config: config.clone(), queue: queue.clone(), work, epoch: 0, serving: false, over: false }
    }

    /// Opens the session, reports the outcome, and serves the session.
    async fn begin(mut self, tell: oneshot::Sender<Result<(), Error>>) {
        let opened = self.connect().await;
        let (outcome, link) = match opened {
            Ok(link) => (Ok(()), Some(link)),
            Err(error) => (Err(error), None),
        };
        // Ignores a receiver that is gone, because then the caller has given up and this task is being
        // aborted.
        let _ = tell.send(outcome);
        match link {
            Some(link) => self.act(Some(link)).await,
            None => self.over = true,
        }
    }

    async fn act(mut self, mut link: Option<Link>) {
        let mut pause = BACKOFF.0;
        loop {
            let Some(open) = link.take() else {
                if !self.queue.wanted().await {
                    self.over = true;
                    return;
                }
                match self.connect().await {
                    Ok(open) => {
                        pause = BACKOFF.0;
                        link = Some(open);
                    }
                    Err(error) => {
                        tracing::warn!(server = %self.config, %error, "cannot open a session");
                        self.queue.fail_if_unserved(&error);
                        tokio::time::sleep(pause / 2 + pause.mul_f64(fastrand::f64() / 2.0)).await;
                        pause = (pause * 2).min(BACKOFF.1);
                    }
                }
                continue;
            };
            let error = match self.serve(open).await {
                ControlFlow::Break(()) => {
                    self.over = true;
                    return;
                }
                ControlFlow::Continue(error) => error,
            };
            self.serving = false;
            if let Some(error) = error {
                tracing::warn!(server = %self.config, %error, "a session has ended");
                self.work.ended(&error);
            }
        }
    }

    /// Opens a session within its time limit.
    async fn connect(&mut self) -> Result<Link, Error> {
        self.epoch += 1;
        let limit = self.config.connect_timeout;
        let opening = async {
            let mut link = Link::open(&self.config).await?;
            let Link { pid, pooled, excludes, .. } = link;
            let id = SessionId { pid, epoch: self.epoch, pooled, excludes };
            self.work.opened(link.connection().await?, id).await?;
            Ok(link)
        };
        let opened = limited(limit, opening).await.unwrap_or_else(|overrun| {
            Err(overrun.into_error(format!(
                "the server did not open a session within {limit:?}; check the network and the server's load, and whether a pooler in between has a connection left"
            )))
        });
        opened.map_err(|error: Error| {
            let error = error.with_store(self.config.to_string());
            self.work.ended(&error);
            error
        })
    }

    /// Runs jobs until the queue is closed (`Break`), or the session ended by an error or because it was unused.
    async fn serve(&mut self, mut link: Link) -> ControlFlow<(), Option<Error>> {
        self.serving = true;
        let mut serving = self.queue.serve();
        let echo = ECHO.min(self.config.liveness.lost_after.saturating_mul(2));
        let pause = self.config.idle.map_or(echo, |idle| idle.min(echo));
        let mut idle = std::pin::pin!(sleep_until(Instant::now() + pause));
        // Times of the server's last message and of the last finished job.
        let mut last = Instant::now();
        let mut worked = last;
        loop {
            let done = tokio::select! {
                biased;
                jobs = serving.take(MOST_JOBS) => match jobs {
                    Some(jobs) => {
                        let done = self.run(&mut link, jobs).await;
                        worked = Instant::now();
                        done
                    }
                    None => {
                        link.close().await;
                        return ControlFlow::Break(());
                    }
                },
                event = link.next_event() => event.map(|(channel, payload)| self.work.notified(&channel, &payload)),
                () = &mut idle => {
                    if !self.work.keep(worked.elapsed()) {
                        // Closes the unused session. Later jobs wait in the queue until it is opened again.
                        link.close().await;
                        return ControlFlow::Continue(None);
                    }
                    let next = Instant::now() + pause;
                    if last.elapsed() < echo {
                        idle.as_mut().reset(next.min(last + echo));
                        continue;
                    }
                    let outcome = self.ping(&mut link).await;
                    idle.as_mut().reset(Instant::now() + pause);
                    outcome
                }
            };
            if let Err(error) = done {
                link.abandon();
                return ControlFlow::Continue(Some(error));
            }
            last = Instant::now();
            while let Some((channel, payload)) = link.buffered_event() {
                self.work.notified(&channel, &payload);
            }
        }
    }

    async fn run(&mut self, link: &mut Link, jobs: Vec<W::Job>) -> Result<(), Error> {
        let limit = self.work.limit(&jobs, self.config.statement_timeout + GRACE);
        let work = async {
            match link.connection().await {
                Ok(connection) => self.work.run(connection, jobs).await,
                Err(error) => {
                    jobs.into_iter().for_each(|job| job.fail(error.clone()));
                    Err(error)
                }
            }
        };
        // Catches panics, because a bug in one batch must only cost this session, not later ones.
        let work =
            AssertUnwindSafe(work).catch_unwind().map(|outcome| outcome.unwrap_or_else(|_| Err(panicked())));
        match limit {
            None => work.await,
            Some(limit) => limited(limit, work).await.unwrap_or_else(|overrun| Err(silent(limit, overrun))),
        }
    }

    async fn ping(&mut self, link: &mut Link) -> Result<(), Error> {
        let limit = self.config.confirmation_limit();
        limited(limit, link.ping()).await.unwrap_or_else(|overrun| Err(silent(limit, overrun)))
    }
}

/// Fails the queued jobs however the actor ends, even by a panic.
impl<W: Work> Drop for Actor<W> {
    fn drop(&mut self) {
        let error = Error::new(ErrorKind::Unavailable, "the session's task has ended; connect again");
        if self.serving {
            self.work.ended(&error);
        }
        if !self.over {
            // Closes the queue after an abort or a panic, because no actor will run later jobs.
            self.queue.close();
        }
        self.queue.fail_if_unserved(&error);
    }
}

fn panicked() -> Error {
    Error::new(
        ErrorKind::OutcomeUnknown,
        "a statement's handling panicked; the session was closed, and this is a bug to report",
    )
}

fn silent(limit: Duration, overrun: Overrun) -> Error {
    overrun.into_error(format!(
        "the server did not answer within {limit:?}; the session was closed, check the network and the server's load"
    ))
}
