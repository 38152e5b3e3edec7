use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cookbook::scheduled_job::{Every, FiredJob, cron_job, once_per_fire_time, work_off};
use leasehold_api::{
    AcquireOptions, BoxFuture, Capabilities, Error, Lock, LockAdmin, LockExt as _, LockGuard, LockKey,
    MultiGuard, async_trait,
};
use leasehold_postgres::PgConfig;
use leasehold_postgres_ttl::TtlConfig;
use test_bounds::within;
use test_servers::Database;
use tokio::sync::Notify;
use tokio::time::timeout;
use tokio_cron_scheduler::JobScheduler;

use crate::support::{LONG, database};

const REPLICAS: usize = 5;

async fn replica(db: &Database) -> Arc<dyn Lock> {
    let server = PgConfig::from_url(db.url()).unwrap().install_schema(true);
    Arc::new(TtlConfig::new(server).connect().await.unwrap())
}

/// The lock requests per fire time, and the runs.
#[derive(Clone, Debug, Default)]
struct Record {
    asked: Arc<Mutex<BTreeSet<(String, usize)>>>,
    ran: Arc<Mutex<Vec<(u64, usize)>>>,
}

impl Record {
    /// Returns the work of a replica at its fire times.
    fn work(&self, replica: usize) -> impl Fn(u64) -> BoxFuture<'static, ()> + Clone + Send + Sync + 'static {
        let ran = Arc::clone(&self.ran);
        move |fire_time| {
            ran.lock().unwrap().push((fire_time, replica));
            Box::pin(async {})
        }
    }

    /// Waits until all replicas have requested locks, some for the same fire time, and this many fire times have run.
    async fn until(&self, fire_times: usize) {
        let enough = async {
            loop {
                let asked = self.asked.lock().unwrap().clone();
                let keys: BTreeSet<_> = asked.iter().map(|(key, _)| key).collect();
                let replicas: BTreeSet<_> = asked.iter().map(|(_, replica)| replica).collect();
                let times: BTreeSet<_> = self.ran.lock().unwrap().iter().map(|(time, _)| *time).collect();
                if replicas.len() == REPLICAS && asked.len() > keys.len() && times.len() >= fire_times {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        within(LONG, "they do not fire", enough).await;
    }
}

/// The lock of one replica, which records its requests.
#[derive(Debug)]
struct Recorded {
    lock: Arc<dyn Lock>,
    record: Record,
    replica: usize,
}

impl fmt::Display for Recorded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lock.fmt(f)
    }
}

#[async_trait]
impl Lock for Recorded {
    async fn try_acquire(&self, key: &LockKey, options: &AcquireOptions) -> Result<Option<LockGuard>, Error> {
        self.lock.try_acquire(key, options).await
    }

    async fn acquire(&self, key: &LockKey, options: &AcquireOptions) -> Result<LockGuard, Error> {
        self.record.asked.lock().unwrap().insert((key.to_string(), self.replica));
        self.lock.acquire(key, options).await
    }

    async fn try_acquire_all(
        &self,
        keys: &[LockKey],
        options: &AcquireOptions,
    ) -> Result<Option<MultiGuard>, Error> {
        self.lock.try_acquire_all(keys, options).await
    }

    async fn acquire_all(&self, keys: &[LockKey], options: &AcquireOptions) -> Result<MultiGuard, Error> {
        self.lock.acquire_all(keys, options).await
    }

    async fn close(&self) -> Result<(), Error> {
        self.lock.close().await
    }

    fn capabilities(&self) -> &Capabilities {
        self.lock.capabilities()
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        self.lock.admin()
    }
}

/// Creates five replicas with a common record.
async fn replicas(db: &Database) -> (Record, Vec<Arc<dyn Lock>>) {
    let (record, mut locks) = (Record::default(), Vec::new());
    for number in 0..REPLICAS {
        let recorded = Recorded { lock: replica(db).await, record: record.clone(), replica: number };
        locks.push(Arc::new(recorded) as Arc<dyn Lock>);
    }
    (record, locks)
}

/// Checks that each fire time ran at most once, although several replicas requested it.
async fn assert_each_once(record: &Record, locks: &[Arc<dyn Lock>]) {
    record.until(3).await;
    for lock in locks {
        // After the close no run starts, and all started runs are recorded.
        lock.close().await.unwrap();
    }
    let mut times: Vec<_> = record.ran.lock().unwrap().iter().map(|(time, _)| *time).collect();
    let runs = times.len();
    times.sort_unstable();
    times.dedup();
    assert_eq!(times.len(), runs, "{record:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn scheduled_five_replicas_of_tokio_cron_scheduler_run_each_fire_time_once() {
    let db = database("").await;
    let (record, locks) = replicas(&db).await;
    let mut schedulers = Vec::new();
    for (number, lock) in locks.iter().enumerate() {
        let job = cron_job(Arc::clone(lock), "report", "* * * * * *", record.work(number)).unwrap();
        let scheduler = JobScheduler::new().await.unwrap();
        scheduler.add(job).await.unwrap();
        scheduler.start().await.unwrap();
        schedulers.push(scheduler);
    }
    assert_each_once(&record, &locks).await;
    for mut scheduler in schedulers {
        scheduler.shutdown().await.unwrap();
    }
    assert!(cron_job(Arc::clone(&locks[0]), "report", "not a schedule", record.work(0)).is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn scheduled_five_replicas_of_apalis_run_each_fire_time_once() {
    let db = database("").await;
    let (record, locks) = replicas(&db).await;
    let mut workers = tokio::task::JoinSet::new();
    for (number, lock) in locks.iter().enumerate() {
        let job = FiredJob::new("report", Arc::clone(lock), record.work(number));
        workers.spawn(async move {
            // A tick that passes while the machine is busy ends the worker.
            loop {
                let _ = work_off(job.clone(), Every::seconds(1)).await;
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
    }
    assert_each_once(&record, &locks).await;
    workers.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn scheduled_a_crashed_run_is_not_repeated() {
    let db = database("").await;
    let (a, b) = (replica(&db).await, replica(&db).await);
    // The first replica's future is dropped in the middle of the work.
    let begun = Notify::new();
    let work = async |_: &LockGuard| {
        begun.notify_one();
        std::future::pending::<()>().await;
    };
    let mut crashing = Box::pin(once_per_fire_time(&*a, "report", 60, work));
    tokio::select! {
        _ = &mut crashing => panic!("it does not end"),
        begun = timeout(LONG, begun.notified()) => begun.unwrap(),
    }
    drop(crashing);
    assert_eq!(once_per_fire_time(&*b, "report", 60, async |_| 1).await.unwrap(), None);
    assert_eq!(
        once_per_fire_time(&*b, "report", 61, async |_| 1).await.unwrap(),
        Some(1),
        "another fire time"
    );
    assert_eq!(once_per_fire_time(&*b, "other", 60, async |_| 1).await.unwrap(), Some(1), "another job");
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_a_plain_lock_runs_again_for_whoever_is_late() {
    let db = database("").await;
    let (a, b) = (replica(&db).await, replica(&db).await);
    let mut runs = 0;
    for late in [&a, &b] {
        late.key("report").run(async |_| runs += 1).await.unwrap();
    }
    assert_eq!(runs, 2, "of one fire time");
}
