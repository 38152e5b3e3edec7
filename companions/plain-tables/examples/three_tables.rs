//! `acquire`, `release`, `capture` and `set_status` on three plain tables: a mutex, a timeout and a state machine. Then on
//! the same tables with retries and queues.
//!
//! The tables have no columns for this library. Only the state machine gets a side table, which records the holders. The
//! example drops and creates its schemas on each run.
//!
//! ```text
//! DATABASE_URL=postgres://localhost/test cargo run -p leasehold-plain-tables --example three_tables
//! ```

use std::collections::BTreeMap;
use std::error::Error;

use leasehold_claim::{ClaimRef, ClaimSpec, ClaimStore as _, Outcome, PgClaims, State, States, Take};
use leasehold_plain_tables::{ClaimError, Column, IdType, MutexTable, RowKey, Table, TimeoutTable};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;

type Result<T, E = Box<dyn Error + Send + Sync>> = std::result::Result<T, E>;

const SCHEMAS: &str = "
    DROP SCHEMA IF EXISTS leasehold_mutex, leasehold_timeout, leasehold_transition CASCADE;
    CREATE SCHEMA leasehold_mutex;
    CREATE SCHEMA leasehold_timeout;
    CREATE SCHEMA leasehold_transition;
    CREATE TYPE leasehold_transition.task_status AS ENUM ('done', 'in_progress', 'failed')";

const TABLES: &str = "
    CREATE TABLE leasehold_mutex.task_state (id text UNIQUE, acquired boolean);
    CREATE TABLE leasehold_timeout.task (id text UNIQUE, ts bigint, timeout bigint);
    CREATE TABLE leasehold_transition.task (id text, status leasehold_transition.task_status);
    INSERT INTO leasehold_mutex.task_state VALUES ('a', false), ('b', false);
    INSERT INTO leasehold_timeout.task VALUES ('a', 0, 3600);
    INSERT INTO leasehold_transition.task VALUES ('a', 'done'), ('b', 'done'), ('c', 'failed')";

const TABLES_WITH_RETRIES_AND_QUEUES: &str = "
    CREATE TABLE leasehold_mutex.task_state (id text, acquired boolean,
        retries_left integer DEFAULT 0, queue_id text DEFAULT 'default', UNIQUE (queue_id, id));
    CREATE TABLE leasehold_timeout.task (id text, ts bigint, timeout bigint,
        retries_left integer DEFAULT 0, queue_id text DEFAULT 'default', UNIQUE (queue_id, id));
    CREATE TABLE leasehold_transition.task (id text, status leasehold_transition.task_status,
        retries_left integer DEFAULT 0, queue_id text DEFAULT 'default', UNIQUE (queue_id, id));
    INSERT INTO leasehold_mutex.task_state VALUES
        ('a', false, 2, 'default'), ('c', false, 1, 'default'), ('a', false, 1, 'mail'), ('b', false, 1, 'mail');
    INSERT INTO leasehold_timeout.task VALUES ('a', 0, 3600, 2, 'default'), ('a', 0, 3600, 1, 'mail');
    INSERT INTO leasehold_transition.task VALUES
        ('a', 'done', 2, 'default'), ('a', 'done', 1, 'mail'), ('b', 'failed', 0, 'mail')";

#[tokio::main]
async fn main() -> Result<()> {
    let url = std::env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL to a database to try this in")?;
    for line in plain(&url).await? {
        println!("{line}");
    }
    println!("with retries and queues:");
    for line in with_retries_and_queues(&url).await? {
        println!("{line}");
    }
    Ok(())
}

/// Describes `task_state` with an id and a boolean.
fn mutex() -> Result<MutexTable> {
    let table = Table::new("task_state")?.in_schema("leasehold_mutex")?;
    Ok(MutexTable::new(table, Column::new("id")?, IdType::Text, Column::new("acquired")?))
}

/// Describes `task` with a time in seconds since 1970 and a timeout in seconds.
fn timeout() -> Result<TimeoutTable> {
    let table = Table::new("task")?.in_schema("leasehold_timeout")?;
    let (id, ts, timeout) = (Column::new("id")?, Column::new("ts")?, Column::new("timeout")?);
    Ok(TimeoutTable::new(table, id, IdType::Text, ts, timeout).unix_time())
}

/// The status of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The task was run or is new.
    Done,
    /// A worker has captured the task.
    InProgress,
    /// The task has failed.
    Failed,
}

impl From<Status> for State {
    fn from(status: Status) -> Self {
        match status {
            Status::Done => "done",
            Status::InProgress => "in_progress",
            Status::Failed => "failed",
        }
        .into()
    }
}

/// Describes `task` with a status. A task that is done or has failed can be captured. `has_queues` includes the columns
/// of retries and queues.
fn tasks(has_queues: bool) -> Result<ClaimSpec> {
    let table = |name: &str| Table::new(name)?.in_schema("leasehold_transition");
    let states = States::enumeration(table("task_status")?, [Status::Failed, Status::Done], Status::Done);
    let mut spec = ClaimSpec::builder(table("task")?)
        .id("id", IdType::Text)
        .state("status", states.taken(Status::InProgress).cyclic())
        .side_table(table("task_claim")?);
    if has_queues {
        spec = spec.attempts("retries_left").queue("queue_id");
    }
    Ok(spec.build()?)
}

/// A worker of the state machine, and the tasks that it has captured.
#[derive(Debug)]
pub struct Tasks {
    claims: PgClaims,
    captured: BTreeMap<RowKey, ClaimRef>,
}

impl Tasks {
    /// Builds a worker without captured tasks.
    #[must_use]
    pub fn new(claims: &PgClaims) -> Self {
        Self { claims: claims.clone(), captured: BTreeMap::new() }
    }

    /// Captures at most `limit` tasks. Their status becomes `in_progress`.
    pub async fn capture(&mut self, limit: u32) -> Result<Vec<RowKey>, ClaimError> {
        self.capture_by(Take::up_to(limit)).await
    }

    /// Captures at most `limit` tasks of a queue.
    pub async fn capture_of(&mut self, queue: &str, limit: u32) -> Result<Vec<RowKey>, ClaimError> {
        self.capture_by(Take::up_to(limit).queue(queue)).await
    }

    async fn capture_by(&mut self, take: Take) -> Result<Vec<RowKey>, ClaimError> {
        let mut keys = Vec::new();
        for claimed in self.claims.take(&take).await?.claims {
            let key = claimed.rows[0].key.clone();
            self.captured.insert(key.clone(), claimed.claim);
            keys.push(key);
        }
        keys.sort();
        Ok(keys)
    }

    /// Sets the status of a captured task and releases it.
    pub async fn set_status(&mut self, key: &RowKey, status: Status) -> Result<(), ClaimError> {
        let claim = self.captured.get(key).cloned();
        let claim = claim.ok_or_else(|| ClaimError::NotFound { row: key.clone() })?;
        self.claims.settle_one(&claim, Outcome::To(status.into())).await?;
        self.captured.remove(key);
        Ok(())
    }
}

/// Connects and creates the tables.
async fn set_up(url: &str, tables: &'static str, tasks: &ClaimSpec) -> Result<PgPool> {
    let pool = PgPoolOptions::new().max_connections(4).connect(url).await?;
    sqlx::raw_sql(SCHEMAS).execute(&pool).await?;
    sqlx::raw_sql(tables).execute(&pool).await?;
    // Creates the side table and makes the id unique. The task table gets no columns.
    tasks.migration().apply(&pool).await?;
    tasks.ensure(&pool).await?;
    Ok(pool)
}

/// Runs the calls on the tables without retries and queues. Returns a line per call.
pub async fn plain(url: &str) -> Result<Vec<String>> {
    let spec = tasks(false)?;
    let pool = set_up(url, TABLES, &spec).await?;
    let mut said = Vec::new();

    let mutex = mutex()?;
    said.push(format!("mutex: acquire(a) {}", mutex.acquire(&pool, "a").await?));
    said.push(format!("mutex: acquire(a) {}", mutex.acquire(&pool, "a").await?));
    said.push(format!("mutex: release(a) {}", mutex.release(&pool, "a").await?));
    said.push(format!("mutex: release(a) {}", mutex.release(&pool, "a").await?));
    said.push(format!("mutex: acquire(a) {}", mutex.acquire(&pool, "a").await?));

    let timeout = timeout()?;
    said.push(format!("timeout: acquire(a) {}", timeout.acquire(&pool, "a").await?));
    said.push(format!("timeout: acquire(a) {}", timeout.acquire(&pool, "a").await?));
    // Simulates that an hour has passed.
    sqlx::raw_sql("UPDATE leasehold_timeout.task SET ts = ts - 3601").execute(&pool).await?;
    said.push(format!("timeout: acquire(a) {}", timeout.acquire(&pool, "a").await?));

    let claims = PgClaims::new(pool.clone(), spec);
    let (mut one, mut other) = (Tasks::new(&claims), Tasks::new(&claims));
    let (a, b) = (RowKey::new("a"), RowKey::new("b"));
    said.push(format!("one: capture(2) {}", names(&one.capture(2).await?)));
    said.push(format!("other: capture(2) {}", names(&other.capture(2).await?)));
    said.push(format!("other: set_status(a, done) {}", told(other.set_status(&a, Status::Done).await)));
    // Simulates that the first worker's lease of `a` has ended.
    let end =
        "UPDATE leasehold_transition.task_claim SET lease_until = now() - interval '1 second' WHERE id = 'a'";
    sqlx::raw_sql(end).execute(&pool).await?;
    said.push(format!("sweep {}", names(&claims.sweep(9).await?.returned)));
    said.push(format!("other: capture(9) {}", names(&other.capture(9).await?)));
    said.push(format!("one: set_status(a, done) {}", told(one.set_status(&a, Status::Done).await)));
    said.push(format!("other: set_status(a, failed) {}", told(other.set_status(&a, Status::Failed).await)));
    said.push(format!("one: set_status(b, done) {}", told(one.set_status(&b, Status::Done).await)));
    said.push(format!("other: capture(9) {}", names(&other.capture(9).await?)));
    Ok(said)
}

/// Runs the calls on the tables with retries and queues. Returns a line per call.
pub async fn with_retries_and_queues(url: &str) -> Result<Vec<String>> {
    let spec = tasks(true)?;
    let pool = set_up(url, TABLES_WITH_RETRIES_AND_QUEUES, &spec).await?;
    let (retries, queue) = (Column::new("retries_left")?, Column::new("queue_id")?);
    let mut said = Vec::new();

    let mutex = mutex()?.attempts(retries.clone()).queue(queue.clone());
    let (default, mail) = (("default", "a"), ("mail", "a"));
    for _ in 0..2 {
        said.push(format!("mutex: acquire(default, a) {}", granted(mutex.acquire(&pool, default).await)));
        said.push(format!("mutex: release(default, a) {}", mutex.release(&pool, default).await?));
    }
    said.push(format!("mutex: acquire(default, a) {}", granted(mutex.acquire(&pool, default).await)));
    let captured = mutex.capture(&pool, "mail", 9).await?;
    let keys: Vec<RowKey> = captured.into_iter().map(|grant| grant.key).collect();
    said.push(format!("mutex: capture(mail, 9) {}", names(&keys)));
    mutex.top_up(&pool, default, 1).await?;
    said.push(format!(
        "mutex: acquire(default, a), topped up {}",
        granted(mutex.acquire(&pool, default).await)
    ));

    let timeout = timeout()?.attempts(retries).queue(queue);
    said.push(format!("timeout: acquire(mail, a) {}", granted(timeout.acquire(&pool, mail).await)));
    said.push(format!("timeout: acquire(default, a) {}", granted(timeout.acquire(&pool, default).await)));
    sqlx::raw_sql("UPDATE leasehold_timeout.task SET ts = ts - 3601").execute(&pool).await?;
    said.push(format!("timeout: acquire(mail, a) {}", granted(timeout.acquire(&pool, mail).await)));
    said.push(format!("timeout: acquire(default, a) {}", granted(timeout.acquire(&pool, default).await)));

    let mut worker = Tasks::new(&PgClaims::new(pool, spec));
    said.push(format!("capture(mail, 9) {}", names(&worker.capture_of("mail", 9).await?)));
    let set = worker.set_status(&RowKey::queued("mail", "a"), Status::Failed).await;
    said.push(format!("set_status(mail, a, failed) {}", told(set)));
    said.push(format!("capture(mail, 9) {}", names(&worker.capture_of("mail", 9).await?)));
    said.push(format!("capture(default, 9) {}", names(&worker.capture_of("default", 9).await?)));
    Ok(said)
}

fn names(keys: &[RowKey]) -> String {
    let names: Vec<String> = keys.iter().map(|key| key.id.to_string()).collect();
    format!("{names:?}")
}

fn told(result: Result<(), ClaimError>) -> &'static str {
    match result {
        Ok(()) => "ok",
        Err(ClaimError::NotFound { .. }) => "refused, it has not captured it",
        Err(ClaimError::Superseded { .. }) => "refused, another worker has captured it since",
        Err(_) => "failed",
    }
}

fn granted(result: Result<bool, ClaimError>) -> &'static str {
    match result {
        Ok(true) => "true",
        Ok(false) => "false",
        Err(ClaimError::Exhausted { .. }) => "no retries left",
        Err(_) => "failed",
    }
}
