//! A complete example in real time: a store that processes share, with a table, a child process, faults,
//! short bounds for tests, and its verdict. Further arguments select cases.
//!
//! ```text
//! cargo run -p leasehold-conformance --example your_sql_store -- --threads 16
//! ```
//!
//! The database here is a directory with a file of rows. A lock on the directory makes a transaction. With a
//! real database each closure below is one transaction, and the comments show its statements.

#![allow(clippy::incompatible_msrv)] // This example needs the file locks of Rust 1.89, the library does not.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, SystemTime};
use std::{fmt, io, thread};

use leasehold_api::{Capabilities, Error, ErrorKind, Fencing, LeaseBounds, Lock, LockKey, LossReason, Scope};
use leasehold_conformance::{
    ClientSetup, Disturbed, Factory, FaultSet, Faults, FaultyClient, Harness, SkewedClock, Time, async_trait,
    pace,
};
use leasehold_engine::{
    Attempt, Backend, Contended, Engine, Events, Granted, HoldRef, ReleaseReply, Renewed, Request,
    SystemClock, Timing, token,
};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

/// Short in tests, because crash cases wait for the end of a default lease. Use 30 s or more in production. The pace
/// makes this and the next two longer on a slow machine. Only a test needs that.
fn default_ttl() -> Duration {
    Duration::from_secs(2) * pace()
}

fn max_ttl() -> Duration {
    Duration::from_secs(10) * pace()
}

/// The time limit of a call. Short in tests, because a case on a silent store waits for it.
fn request_timeout() -> Duration {
    Duration::from_secs(2) * pace()
}

/// `CREATE TABLE locks (key text PRIMARY KEY, holder text, token bigint, ends bigint, awaited boolean)`, and a sequence.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Database {
    locks: BTreeMap<String, Row>,
    /// The source of tokens. It never decreases, even if rows are deleted.
    sequence: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Row {
    holder: String,
    token: u64,
    /// The end of the lease on the database's clock, in microseconds. Whole milliseconds would end it too early.
    ends: u64,
    /// Whether a waiting request was refused during this hold.
    awaited: bool,
}

impl Database {
    /// Runs one transaction, which excludes all others. A killed transaction changes nothing.
    fn transaction<T>(directory: &Path, work: impl FnOnce(&mut Self, u64) -> T) -> io::Result<T> {
        let lock = File::create(directory.join("lock"))?;
        lock.lock()?;
        let mut database = match fs::read(directory.join("rows")) {
            Ok(rows) => serde_json::from_slice(&rows)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Self::default(),
            Err(error) => return Err(error),
        };
        let done = work(&mut database, clock());
        fs::write(directory.join("rows.new"), serde_json::to_vec(&database)?)?;
        fs::rename(directory.join("rows.new"), directory.join("rows"))?;
        Ok(done)
    }

    fn acquire(&mut self, now: u64, request: Request) -> Attempt {
        let (holder, ttl) = (request.holder.to_string(), microseconds(request.ttl));
        // SELECT ... FOR UPDATE
        let row = self.locks.get_mut(request.key.as_str()).filter(|row| row.ends > now);
        if let Some(row) = row {
            if row.holder != holder {
                row.awaited |= request.waits;
                let mut contended = Contended::new();
                contended.retry_after = Some(Duration::from_micros(row.ends - now));
                return Attempt::Contended(contended);
            }
            // Two requests of the same attempt are one grant. The second renews its lease and never shortens
            // it.
            row.ends = row.ends.max(now + ttl);
            return Attempt::Granted(Granted::with_token(token::from_store_number(row.token)));
        }
        // INSERT ... ON CONFLICT DO UPDATE ... RETURNING nextval(...)
        self.sequence += 1;
        let token = self.sequence;
        let row = Row { holder, token, ends: now + ttl, awaited: false };
        self.locks.insert(request.key.as_str().to_owned(), row);
        Attempt::Granted(Granted::with_token(token::from_store_number(token)))
    }

    /// UPDATE ... WHERE key = $1 AND holder = $2 AND ends > now. An ended lease stays ended.
    fn renew(&mut self, now: u64, hold: HoldRef) -> Renewed {
        let holder = hold.holder.to_string();
        let row = self.locks.get_mut(hold.key.as_str());
        match row.filter(|row| row.holder == holder && row.ends > now) {
            Some(row) => {
                row.ends = now + microseconds(hold.ttl);
                Renewed::Extended
            }
            None => Renewed::Gone(LossReason::Gone),
        }
    }

    /// DELETE ... WHERE key = $1 AND holder = $2 RETURNING ends > now, awaited
    fn release(&mut self, now: u64, hold: HoldRef) -> ReleaseReply {
        let (key, holder) = (hold.key.as_str(), hold.holder.to_string());
        if self.locks.get(key).is_none_or(|row| row.holder != holder) {
            return ReleaseReply::new(false);
        }
        let row = self.locks.remove(key);
        row.map_or(ReleaseReply::new(false), |row| ReleaseReply::new(row.ends > now).waiters(row.awaited))
    }
}

/// Returns the time of the database's clock, which all clients share. A real store reads the server's clock
/// in the statement, never a client's clock.
fn clock() -> u64 {
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    u64::try_from(now.as_micros()).unwrap_or(u64::MAX)
}

fn microseconds(ttl: Option<Duration>) -> u64 {
    u64::try_from(ttl.unwrap_or_else(default_ttl).as_micros()).unwrap_or(u64::MAX)
}

type Job = Box<dyn FnOnce(&Path) + Send>;

/// A client: one connection, with a thread because calls of the database block. The thread keeps the calls in order,
/// because a release must not overtake the abandoned acquire that it undoes.
#[derive(Debug)]
struct Client {
    directory: PathBuf,
    jobs: mpsc::Sender<Job>,
    capabilities: Capabilities,
}

impl Client {
    fn connect(directory: &Path) -> Self {
        let (jobs, queue) = mpsc::channel::<Job>();
        let place = directory.to_owned();
        thread::spawn(move || queue.iter().for_each(|job| job(&place)));
        // Declares only the features of the store. The bounds include the engine's part. It renews a lease
        // after a third of its TTL, loses it after nine tenths, and lets waiters poll every 100 ms.
        let mut capabilities = Capabilities::new(Scope::Machine);
        capabilities.lease = Some(LeaseBounds::new(Some(default_ttl()), Duration::from_secs(1), max_ttl()));
        capabilities.fencing = Fencing::Durable;
        capabilities.loss_detection = max_ttl();
        capabilities.undo = request_timeout();
        capabilities.handover = Duration::from_secs(1) * pace();
        capabilities.crash_release = Some(max_ttl() + Duration::from_secs(1));
        Self { directory: directory.to_owned(), jobs, capabilities }
    }

    /// Runs all requests of a call in one transaction, so that one statement can renew ten thousand leases.
    /// After an error the outcome is unknown, and the engine releases by holder id.
    async fn each<A: Send + 'static, T: Send + 'static>(
        &self,
        asked: Vec<A>,
        work: fn(&mut Database, u64, A) -> T,
    ) -> Vec<Result<T, Error>> {
        let (reply, answer) = oneshot::channel();
        let count = asked.len();
        let all = move |database: &mut Database, now| -> Vec<_> {
            asked.into_iter().map(|one| work(database, now, one)).collect()
        };
        let job = move |directory: &Path| drop(reply.send(Database::transaction(directory, all)));
        let failed = |error: Error| (0..count).map(|_| Err(error.clone())).collect();
        if self.jobs.send(Box::new(job)).is_err() {
            return failed(Error::closed());
        }
        match answer.await {
            Ok(Ok(answers)) => answers.into_iter().map(Ok).collect(),
            Ok(Err(error)) => {
                failed(Error::new(ErrorKind::OutcomeUnknown, "the transaction failed").with_source(error))
            }
            Err(_) => failed(Error::closed()),
        }
    }
}

#[async_trait]
impl Backend for Client {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn timing(&self) -> Timing {
        let mut timing = Timing::default();
        timing.request_timeout = request_timeout();
        timing
    }

    /// Does nothing, because waiters poll. A store that reports free keys or lost holds keeps the [`Events`].
    fn attach(&self, _: Events) {}

    async fn acquire(&self, requests: Vec<Request>) -> Vec<Result<Attempt, Error>> {
        self.each(requests, Database::acquire).await
    }

    async fn renew(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>> {
        self.each(holds, Database::renew).await
    }

    async fn release(&self, holds: Vec<HoldRef>) -> Vec<Result<ReleaseReply, Error>> {
        self.each(holds, Database::release).await
    }

    /// Does nothing, because the connection ends with its thread when the client is dropped.
    async fn close(&self) {}
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sql:{}", self.directory.display())
    }
}

/// Opens stores in new directories.
#[derive(Debug)]
pub struct SqlFactory;

#[async_trait]
impl Factory for SqlFactory {
    fn time(&self) -> Time {
        Time::Real
    }

    async fn open(&self) -> Result<Box<dyn Harness>, Error> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("your-sql-store-{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let unavailable = |error| Error::new(ErrorKind::Unavailable, "no directory").with_source(error);
        fs::create_dir_all(&directory).map_err(unavailable)?;
        Ok(Box::new(SqlHarness { directory }))
    }

    /// Connects to the directory that [`Harness::child`] returned. A real store uses a connection string.
    async fn connect_child(&self, spec: &str) -> Result<Arc<dyn Lock>, Error> {
        Ok(Arc::new(Engine::start(Client::connect(Path::new(spec)))?))
    }
}

#[derive(Debug)]
struct SqlHarness {
    directory: PathBuf,
}

impl Drop for SqlHarness {
    fn drop(&mut self) {
        // Ignores a failure, which only leaves a directory among the temporary files.
        let _ = fs::remove_dir_all(&self.directory);
    }
}

#[async_trait]
impl Harness for SqlHarness {
    async fn client(&self) -> Result<Arc<dyn Lock>, Error> {
        Ok(Arc::new(Engine::start(Client::connect(&self.directory))?))
    }

    fn child(&self) -> Option<String> {
        Some(self.directory.display().to_string())
    }

    fn faults(&self) -> Option<&dyn Faults> {
        Some(self)
    }
}

#[async_trait]
impl Faults for SqlHarness {
    fn supports(&self) -> FaultSet {
        let mut set = Disturbed::<Client>::supports();
        set.skew = true;
        set.purge = true;
        set.restart = true;
        // The waiters poll.
        set.mute = true;
        set
    }

    async fn client(&self, setup: ClientSetup) -> Result<FaultyClient, Error> {
        let backend = Disturbed::new(Client::connect(&self.directory));
        let faults = backend.faults();
        let clock = SkewedClock::new(SystemClock, setup.skew);
        let lock = Engine::builder(backend).clock(Arc::new(clock)).start()?;
        Ok(FaultyClient::new(Arc::new(lock), faults))
    }

    /// Runs `DELETE FROM locks WHERE key = $1`.
    async fn purge(&self, key: &LockKey) -> bool {
        let deleted = Database::transaction(&self.directory, |database, now| {
            database.locks.remove(key.as_str()).is_some_and(|row| row.ends > now)
        });
        deleted.unwrap_or(false)
    }

    /// Imitates a crash and a restart of the server. In this database an interrupted transaction leaves at
    /// most a file that was not renamed.
    async fn restart(&self) {
        let _ = fs::remove_file(self.directory.join("rows.new"));
    }
}

#[allow(dead_code)] // The tests include this file for its store.
fn main() -> ExitCode {
    leasehold_conformance::main(SqlFactory)
}
