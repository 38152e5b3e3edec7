//! A session with the server as an actor: it owns the connection, carries out the jobs of its queue, and
//! notices immediately when the server ends it.
//!
//! An idle connection of the driver does not read its socket, so it would learn of its death only from the
//! next statement. The driver's listener does read; the actor therefore keeps its connection in one.

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

/// The most jobs that travel together.
pub const MOST_JOBS: usize = 512;

/// The pauses between attempts to connect.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// How long a session that reads nothing is left alone at most before it is asked whether it is still there,
/// so that one on a dead path, which brings no notification any more, is opened again.
const ECHO: Duration = Duration::from_secs(20);

/// What the statement's own time limit on the server is given to come first.
const GRACE: Duration = Duration::from_secs(1);

/// A session that was opened: what the server calls it.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionId {
    /// The process on the server. Behind a pooler it changes from one transaction to the next.
    pub pid: i32,
    /// Counts the sessions of one actor: what was held on an earlier one is gone.
    pub epoch: u64,
    /// Whether a transaction pooler is in between.
    pub pooled: bool,
    /// Whether an advisory lock that one session held kept another one out. `true` also if that was not
    /// tried, because the configuration says what is in between ([`Pooler`](crate::Pooler)).
    pub excludes: bool,
}

/// What an actor does with its session.
pub trait Work: Send + 'static {
    /// What it is asked to do.
    type Job: Job;

    /// The session was opened and has its settings; nothing was done on it yet. An error closes it
    /// and fails what waits in the queue.
    fn opened(
        &mut self,
        connection: &mut PgConnection,
        session: SessionId,
    ) -> impl Future<Output = Result<(), Error>> + Send;

    /// Carries out all of `jobs` and answers them. On an error the connection is in doubt: it is closed,
    /// and jobs that were dropped unanswered have an unknown outcome.
    fn run(
        &mut self,
        connection: &mut PgConnection,
        jobs: Vec<Self::Job>,
    ) -> impl Future<Output = Result<(), Error>> + Send;

    /// How long [`run`](Self::run) may take; `None` sets no limit. By default what
    /// [`PgConfig::statement_timeout`] says.
    fn limit(&self, jobs: &[Self::Job], usual: Duration) -> Option<Duration> {
        let _ = jobs;
        Some(usual)
    }

    /// Whether a session that carried out nothing for as long as `unused` is kept. `false` ends it, without
    /// [`ended`](Self::ended), and it is opened again when there is something to do. Called from time to
    /// time, between jobs.
    fn keep(&mut self, unused: Duration) -> bool {
        let _ = unused;
        true
    }

    /// A notification came.
    fn notified(&mut self, channel: &str, payload: &str) {
        let _ = (channel, payload);
    }

    /// The session has ended, or could not be opened: whatever it held is gone.
    fn ended(&mut self, error: &Error) {
        let _ = error;
    }
}

/// An actor that was started. Dropping it changes nothing: the actor ends when its queue is closed.
pub struct Session {
    task: JoinHandle<()>,
}

impl Session {
    /// Opens a session for `work` and starts its actor on the current runtime.
    ///
    /// # Errors
    ///
    /// What keeps the session from being opened; [`NoRuntime`](ErrorKind::NoRuntime) outside of a tokio
    /// runtime.
    ///
    /// # Cancel safety
    ///
    /// A dropped call closes what it has opened.
    pub async fn open<W: Work>(config: &PgConfig, queue: &JobQueue<W::Job>, work: W) -> Result<Self, Error> {
        let runtime = Handle::try_current().map_err(|error| {
            let message = "there is no tokio runtime here to open a session on; connect inside one";
            Error::new(ErrorKind::NoRuntime, message).with_store(config.to_string()).with_source(error)
        })?;
        let actor = Actor::new(config, queue, work);
        let (tell, told) = oneshot::channel();
        // In a task from the start: connections must not be dropped where there is no runtime.
        let task = AbortOnDropHandle::new(runtime.spawn(actor.begin(tell)));
        match told.await {
            Ok(Ok(())) => Ok(Self { task: task.detach() }),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(Error::new(ErrorKind::Unavailable, "the runtime ended while a session was opened")),
        }
    }

    /// Starts an actor that opens its session when there is something to do. Needs a tokio runtime.
    #[must_use]
    pub fn lazy<W: Work>(config: &PgConfig, queue: &JobQueue<W::Job>, work: W) -> Self {
        Self { task: tokio::spawn(Actor::new(config, queue, work).act(None)) }
    }

    /// Waits until the actor of a closed queue has ended its session, at most `limit`; then ends it hard.
    ///
    /// # Cancel safety
    ///
    /// Dropping it leaves the actor to end by itself.
    pub async fn ended(self, limit: Duration) {
        let abort = self.task.abort_handle();
        if timeout(limit, self.task).await.is_err() {
            abort.abort();
        }
    }

    /// Ends the actor without waiting for anything.
    pub fn abort(&self) {
        self.task.abort();
    }

    /// What ends the actor while somebody else has this value.
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
    /// It ends because it was told to.
    over: bool,
}

impl<W: Work> Actor<W> {
    fn new(config: &PgConfig, queue: &JobQueue<W::Job>, work: W) -> Self {
        Self { config: config.clone(), queue: queue.clone(), work, epoch: 0, serving: false, over: false }
    }

    /// Opens the session, says how that went, and serves it.
    async fn begin(mut self, tell: oneshot::Sender<Result<(), Error>>) {
        let opened = self.connect().await;
        let (outcome, link) = match opened {
            Ok(link) => (Ok(()), Some(link)),
            Err(error) => (Err(error), None),
        };
        // Who does not listen any more has ended this task.
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

    /// Does what comes until the queue is closed (`Break`) or the session has ended, by an error or because
    /// nobody needed it.
    async fn serve(&mut self, mut link: Link) -> ControlFlow<(), Option<Error>> {
        self.serving = true;
        let mut serving = self.queue.serve();
        let echo = ECHO.min(self.config.liveness.lost_after.saturating_mul(2));
        let pause = self.config.idle.map_or(echo, |idle| idle.min(echo));
        let mut idle = std::pin::pin!(sleep_until(Instant::now() + pause));
        // When the server last said something, and when the last job was done.
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
                        // What comes from here on waits in the queue, until the session is opened again.
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
        // A bug in one batch costs this session, not all that come after it.
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

/// Whatever happens to the actor, also a panic: nobody waits for it in vain.
impl<W: Work> Drop for Actor<W> {
    fn drop(&mut self) {
        let error = Error::new(ErrorKind::Unavailable, "the session's task has ended; connect again");
        if self.serving {
            self.work.ended(&error);
        }
        if !self.over {
            // Aborted, or a bug: nobody is there to do what comes.
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
