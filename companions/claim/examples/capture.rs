//! `capture(limit)` and `set_status(id, status)`: tasks that are run again and again, as a state machine.
//!
//! The status is an enum of the database. A worker captures tasks in the requested states, which sets them to
//! `in_progress`. Only that worker can then set another status. A task has its own timeout, after which a sweep sets
//! it to `failed` and later calls of the worker are refused. It also has a number of retries, after which it is
//! `exhausted` until it is requeued. Everything is in a separate schema, which is recreated on each run.
//!
//! ```text
//! DATABASE_URL=postgres://localhost/test cargo run -p leasehold-claim --example capture
//! ```

use std::collections::BTreeMap;
use std::error::Error;

use leasehold_claim::sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use leasehold_claim::sqlx::{PgPool, query_scalar, raw_sql};
use leasehold_claim::{
    ClaimError, ClaimRef, ClaimSpec, ClaimStore as _, Outcome, PgClaims, RowId, RowKey, State, States, Table,
    Take,
};

type Result<T, E = Box<dyn Error + Send + Sync>> = std::result::Result<T, E>;

const SCHEMA: &str = "leasehold_capture";

const TABLES: &str = "
    DROP SCHEMA IF EXISTS leasehold_capture CASCADE;
    CREATE SCHEMA leasehold_capture;
    CREATE TYPE task_status AS ENUM ('done', 'in_progress', 'failed', 'exhausted', 'retired');
    CREATE TABLE task (
        id bigint PRIMARY KEY,
        status task_status NOT NULL DEFAULT 'done',
        retries_left integer DEFAULT 5,
        timeout_seconds integer NOT NULL DEFAULT 60
    );
    INSERT INTO task (id) SELECT n FROM generate_series(1, 5) n";

/// The status of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The task was run or is new, and can be run.
    Done,
    /// A worker is running the task, and no other worker can.
    InProgress,
    /// The task has failed, or took too long.
    Failed,
    /// The task has no retries left.
    Exhausted,
    /// The task must not be run again.
    Retired,
}

impl From<Status> for State {
    fn from(status: Status) -> Self {
        let name = match status {
            Status::Done => "done",
            Status::InProgress => "in_progress",
            Status::Failed => "failed",
            Status::Exhausted => "exhausted",
            Status::Retired => "retired",
        };
        name.into()
    }
}

/// Describes the tasks and their transitions. A captured task can become `done` or `failed`, states from which it can
/// be captured again, or `retired`, from which it cannot. A sweep returns tasks to the first claimable state, `failed`.
fn spec() -> Result<ClaimSpec, ClaimError> {
    let states =
        States::enumeration(Table::new("task_status")?, [Status::Failed, Status::Done], Status::Retired);
    ClaimSpec::builder(Table::new("task")?)
        .state("status", states.taken(Status::InProgress).exhausted(Status::Exhausted))
        .lease_columns("owner", "epoch", "lease_until")
        .attempts("retries_left")
        .timeout_seconds("timeout_seconds")
        .build()
}

/// A worker, and the tasks that it has captured.
#[derive(Debug)]
pub struct Tasks {
    claims: PgClaims,
    captured: BTreeMap<i64, ClaimRef>,
}

impl Tasks {
    /// Builds a worker without captured tasks.
    pub fn new(claims: PgClaims) -> Self {
        Self { claims, captured: BTreeMap::new() }
    }

    /// Captures at most `limit` tasks that are in one of the states `from`, which become `in_progress`.
    pub async fn capture(&mut self, limit: u32, from: &[Status]) -> Result<Vec<i64>, ClaimError> {
        let take = Take::up_to(limit).from(from.iter().copied().map(State::from));
        let mut ids = Vec::new();
        for claimed in self.claims.take(&take).await?.claims {
            let id = id(&claimed.rows[0].key)?;
            self.captured.insert(id, claimed.claim);
            ids.push(id);
        }
        Ok(ids)
    }

    /// Sets the status of a captured task and releases it. After a refused status the task is still captured.
    pub async fn set_status(&mut self, id: i64, status: Status) -> Result<(), ClaimError> {
        let claim = self.captured.get(&id).cloned();
        let claim = claim.ok_or_else(|| ClaimError::NotFound { row: RowKey::new(id) })?;
        let set = self.claims.settle_one(&claim, Outcome::To(status.into())).await;
        if let Ok(_) | Err(ClaimError::Superseded { .. }) = set {
            self.captured.remove(&id);
        }
        set?;
        Ok(())
    }
}

fn id(key: &RowKey) -> Result<i64, ClaimError> {
    let RowId::Int(id) = key.id else { return Err(ClaimError::Unsupported("tasks have numbers".to_owned())) };
    Ok(id)
}

#[tokio::main]
async fn main() -> Result<()> {
    let url = std::env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL to a database to try this in")?;
    let example = Example::set_up(&url).await?;
    example.two_capture().await?.iter().for_each(|line| println!("{line}"));
    example.one_is_too_late().await?.iter().for_each(|line| println!("{line}"));
    example.until_exhausted().await?.iter().for_each(|line| println!("{line}"));
    Ok(())
}

/// The table and its users.
#[derive(Debug)]
pub struct Example {
    pool: PgPool,
    claims: PgClaims,
}

impl Example {
    /// Makes the table.
    pub async fn set_up(url: &str) -> Result<Self> {
        let options = url.parse::<PgConnectOptions>()?.options([("search_path", SCHEMA)]);
        let pool = PgPoolOptions::new().connect_with(options).await?;
        raw_sql(TABLES).execute(&pool).await?;
        let spec = spec()?;
        spec.migration().attempts(5).apply(&pool).await?;
        spec.ensure(&pool).await?;
        Ok(Self { claims: PgClaims::new(pool.clone(), spec), pool })
    }

    /// Lets two workers capture different tasks and set their status.
    pub async fn two_capture(&self) -> Result<Vec<String>> {
        let (mut a, mut b) = (Tasks::new(self.claims.clone()), Tasks::new(self.claims.clone()));
        let all = [Status::Done, Status::Failed];
        Ok(vec![
            format!("A captures {:?}", a.capture(2, &all).await?),
            format!("B captures {:?}", b.capture(2, &all).await?),
            told("B sets 1 to done", b.set_status(1, Status::Done).await),
            told("A sets 1 to failed", a.set_status(1, Status::Failed).await),
            told("A sets 2 to exhausted", a.set_status(2, Status::Exhausted).await),
            told("A sets 2 to done", a.set_status(2, Status::Done).await),
            told("B sets 3 to retired", b.set_status(3, Status::Retired).await),
            format!("B captures of those that failed {:?}", b.capture(9, &[Status::Failed]).await?),
            told("B sets 1 to done", b.set_status(1, Status::Done).await),
            told("B sets 4 to done", b.set_status(4, Status::Done).await),
        ])
    }

    /// Lets a task take longer than its timeout.
    pub async fn one_is_too_late(&self) -> Result<Vec<String>> {
        let (mut a, mut b) = (Tasks::new(self.claims.clone()), Tasks::new(self.claims.clone()));
        let mut said = vec![format!("A captures {:?}", a.capture(1, &[Status::Done]).await?)];
        // Simulates the end of the timeout, which is a minute.
        raw_sql("UPDATE task SET lease_until = lease_until - interval '1 minute' WHERE id = 1")
            .execute(&self.pool)
            .await?;
        let (one, two) = tokio::join!(self.claims.sweep(100), self.claims.sweep(100));
        said.push(format!("two sweeps return {}", one?.returned.len() + two?.returned.len()));
        said.push(format!("B captures {:?}", b.capture(1, &[Status::Failed]).await?));
        said.push(told("A sets 1 to done", a.set_status(1, Status::Done).await));
        said.push(told("B sets 1 to done", b.set_status(1, Status::Done).await));
        Ok(said)
    }

    /// Lets a task fail until it is exhausted, and requeues it.
    pub async fn until_exhausted(&self) -> Result<Vec<String>> {
        raw_sql("INSERT INTO task (id, status, retries_left) VALUES (6, 'failed', 3)")
            .execute(&self.pool)
            .await?;
        let mut a = Tasks::new(self.claims.clone());
        let mut said = Vec::new();
        for _ in 0..4 {
            let captured = a.capture(1, &[Status::Failed]).await?;
            said.push(format!("A captures {captured:?}"));
            for id in captured {
                a.set_status(id, Status::Failed).await?;
            }
        }
        // A sweep also finds unclaimed tasks without retries left.
        self.claims.sweep(100).await?;
        said.push(format!("6 is {}", self.status(6).await?));
        said.push(format!("{} topped up", self.claims.requeue(&[RowKey::new(6)], 1).await?));
        said.push(format!("A captures {:?}", a.capture(1, &[Status::Failed]).await?));
        Ok(said)
    }

    async fn status(&self, id: i64) -> Result<String> {
        Ok(query_scalar("SELECT status::text FROM task WHERE id = $1").bind(id).fetch_one(&self.pool).await?)
    }
}

/// Formats the result of a call for the printed protocol. An error is shown by its kind.
fn told(what: &str, result: Result<(), ClaimError>) -> String {
    match result {
        Ok(()) => what.to_owned(),
        Err(ClaimError::NotFound { .. }) => format!("{what}: refused, it has not captured it"),
        Err(ClaimError::IllegalTransition { from, to, .. }) => format!("{what}: refused, {from} to {to}"),
        Err(ClaimError::Superseded { .. }) => format!("{what}: refused, another worker has claimed it since"),
        Err(error) => format!("{what}: {error}"),
    }
}
