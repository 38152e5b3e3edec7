//! Runs a job once although several replicas schedule it: `docs/cookbook/scheduled-job.md`.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use apalis::prelude::{BoxDynError, Data, WorkerBuilder, WorkerError};
use apalis_cron::timezone::Utc as TickUtc;
use apalis_cron::{CronScheduler, Schedule, Tick};
use chrono::Utc;
use croner::parser::{CronParser, Seconds};
use leasehold_api::{BoxFuture, Lock, LockExt as _, LockGuard, RunError, WindowOutcome, key};
use tokio_cron_scheduler::{Job, JobSchedulerError};

/// How long a run keeps other replicas from the same fire time. Longer than the delays of replicas and the differences
/// of their clocks.
const WINDOW: Duration = Duration::from_secs(3600);

/// Runs `work` once per fire time, in seconds since 1970. Returns `None` if another replica has started it.
///
/// # Errors
///
/// [`RunError`].
///
/// # Cancel safety
///
/// If dropped, `work` is dropped too, and no replica runs the fire time again.
pub async fn once_per_fire_time<T>(
    lock: &dyn Lock,
    job: &str,
    fire_time: u64,
    work: impl AsyncFnOnce(&LockGuard) -> T,
) -> Result<Option<T>, RunError<T>> {
    let key = key!["job", job, fire_time].map_err(RunError::NotRun)?;
    match lock.key(key).at_most_once_per(WINDOW).run(work).await? {
        WindowOutcome::Due(value) => Ok(Some(value)),
        WindowOutcome::NotDue { .. } => Ok(None),
    }
}

/// Makes a job for `tokio-cron-scheduler`. `work` gets the fire time.
///
/// # Errors
///
/// If the schedule does not parse.
pub fn cron_job<W>(
    lock: Arc<dyn Lock>,
    name: &'static str,
    schedule: &str,
    work: W,
) -> Result<Job, JobSchedulerError>
where
    W: Fn(u64) -> BoxFuture<'static, ()> + Clone + Send + Sync + 'static,
{
    // Parses with the scheduler's rules.
    let parser = CronParser::builder().seconds(Seconds::Required).dom_and_dow(true).build();
    let cron = parser.parse(schedule);
    let cron = cron.map_err(|_| JobSchedulerError::ParseSchedule)?;
    Job::new_async(schedule, move |_, _| {
        let last = cron.find_previous_occurrence(&Utc::now(), true);
        let (lock, work) = (Arc::clone(&lock), work.clone());
        Box::pin(async move {
            let Some(fire_time) = last.ok().and_then(|last| u64::try_from(last.timestamp()).ok()) else {
                return;
            };
            let run = once_per_fire_time(&*lock, name, fire_time, async |_| work(fire_time).await);
            if let Err(error) = run.await {
                tracing::warn!(job = name, fire_time, %error, "scheduled job");
            }
        })
    })
}

/// A job for `apalis`: its name, its lock and its work at a fire time.
#[derive(Clone)]
pub struct FiredJob {
    name: &'static str,
    lock: Arc<dyn Lock>,
    work: Arc<dyn Fn(u64) -> BoxFuture<'static, ()> + Send + Sync>,
}

impl FiredJob {
    /// Creates a job with this name, which all replicas share.
    pub fn new<W>(name: &'static str, lock: Arc<dyn Lock>, work: W) -> Self
    where
        W: Fn(u64) -> BoxFuture<'static, ()> + Send + Sync + 'static,
    {
        Self { name, lock, work: Arc::new(work) }
    }
}

impl fmt::Debug for FiredJob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FiredJob").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Fires whenever the time since 1970 is a multiple of this many seconds.
#[derive(Clone, Copy, Debug)]
pub struct Every(u64);

impl Every {
    /// Creates a schedule of this many seconds, at least one.
    #[must_use]
    pub const fn seconds(seconds: u64) -> Self {
        Self(if seconds == 0 { 1 } else { seconds })
    }
}

impl Schedule<TickUtc> for Every {
    fn next_tick(&mut self, _: &TickUtc) -> Option<Tick<TickUtc>> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).ok()?;
        Some(Tick::new((now.as_secs() / self.0 + 1) * self.0))
    }
}

/// Handles a tick of an `apalis` worker.
///
/// # Errors
///
/// [`RunError`], boxed for `apalis`.
///
/// # Cancel safety
///
/// If dropped, the work is dropped at its next await, and the lock is released in the background.
pub async fn on_tick(tick: Tick, job: Data<FiredJob>) -> Result<(), BoxDynError> {
    let fire_time = tick.get_timestamp();
    let run = once_per_fire_time(&*job.lock, job.name, fire_time, async |_| (job.work)(fire_time).await);
    run.await?;
    Ok(())
}

/// Runs an `apalis` worker until it fails.
///
/// # Errors
///
/// If a tick passed while the worker did not run. Start it again.
///
/// # Cancel safety
///
/// If dropped, the current run is dropped, and no replica runs its fire time again.
pub async fn work_off(job: FiredJob, every: Every) -> Result<(), WorkerError> {
    let worker = WorkerBuilder::new(job.name).backend(CronScheduler::new(every)).data(job).build(on_tick);
    worker.run().await
}
