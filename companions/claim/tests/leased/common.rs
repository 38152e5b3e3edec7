//! Common parts of the tests of claims in Postgres.
#![allow(unreachable_pub)]

use std::time::Duration;

use leasehold_claim::{
    ClaimError, ClaimRef, ClaimSpec, ClaimSpecBuilder, ClaimStore as _, Claimed, IdType, Outcome, PgClaims,
    Settled, States, Table, Take, Taken,
};
use sqlx::{AssertSqlSafe, PgPool, Row as _};
use test_bounds::within;
pub use test_servers::sql::pool;
use test_servers::{Cluster, Database, fresh_database};

/// Limit of a wait that only a broken server exceeds.
pub const LONG: Duration = Duration::from_secs(120);

/// The claimed table of most tests.
pub const REQUEST: &str = "
    CREATE TABLE request (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        entity text,
        kind text NOT NULL DEFAULT 'update',
        document text,
        status text NOT NULL DEFAULT 'new'
            CONSTRAINT request_status CHECK (status IN ('new', 'in-progress', 'complete', 'error', 'exhausted')),
        owner uuid, epoch bigint NOT NULL DEFAULT 0, lease_until timestamptz,
        attempts_left integer, error text, taken_at timestamptz, settled_at timestamptz,
        ready_at timestamptz, timeout_s integer);
    CREATE INDEX request_ready ON request (id) WHERE status = 'new';";

pub fn states() -> States {
    States::text(["new"], "complete").taken("in-progress").failed("error").exhausted("exhausted")
}

/// Returns the spec of [`REQUEST`] with the lease in its columns.
pub fn request() -> ClaimSpecBuilder {
    ClaimSpec::builder(Table::new("request").unwrap())
        .id("id", IdType::Int)
        .state("status", states())
        .lease_columns("owner", "epoch", "lease_until")
        .attempts("attempts_left")
        .error("error")
        .taken_at("taken_at")
        .settled_at("settled_at")
        .ready_at("ready_at")
        .work(["entity", "document"])
}

/// Returns the spec of [`REQUEST`] with the lease in a side table.
pub fn beside() -> ClaimSpecBuilder {
    ClaimSpec::builder(Table::new("request").unwrap())
        .id("id", IdType::Int)
        .state("status", states())
        .side_table(Table::new("lease").unwrap())
        .attempts("attempts_left")
        .error("error")
        .work(["entity", "document"])
}

pub const SIDE: &str = "
    CREATE TABLE lease (tab text NOT NULL, queue text NOT NULL DEFAULT '', id text NOT NULL, owner uuid,
        epoch bigint NOT NULL, lease_until timestamptz NOT NULL, taken_at timestamptz NOT NULL,
        PRIMARY KEY (tab, queue, id));
    CREATE SEQUENCE lease_epoch;";

pub struct World {
    pub database: Database,
    pub pool: PgPool,
}

impl World {
    /// Creates a database and runs `sql` in it.
    pub async fn new(sql: &str) -> Self {
        let database = fresh_database().await;
        let pool = pool(database.url(), 20).await;
        let world = Self { database, pool };
        world.run(sql).await;
        world
    }

    /// Creates a database like [`new`](Self::new) on a private server, for tests that need a superuser.
    pub async fn private(sql: &str) -> Self {
        let database = Cluster::shared().fresh_database().await;
        let pool = pool(database.url(), 20).await;
        let world = Self { database, pool };
        world.run(sql).await;
        world
    }

    pub async fn run(&self, sql: &str) {
        sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&self.pool).await.unwrap();
    }

    /// Returns the value of the expression `sql` as text, or "NULL" for NULL and for no row.
    pub async fn text(&self, sql: &str) -> String {
        let row = sqlx::raw_sql(AssertSqlSafe(format!("SELECT ({sql})::text")));
        let row = row.fetch_optional(&self.pool).await.unwrap();
        row.and_then(|row| row.get::<Option<String>, _>(0)).unwrap_or_else(|| "NULL".to_owned())
    }

    pub async fn number(&self, sql: &str) -> i64 {
        self.text(sql).await.parse().unwrap()
    }

    pub fn claims(&self, spec: ClaimSpecBuilder) -> PgClaims {
        PgClaims::new(self.pool.clone(), spec.build().unwrap()).timeout(LONG)
    }

    /// Inserts `count` requests.
    pub async fn insert(&self, count: u32) {
        let sql =
            format!("INSERT INTO request (document) SELECT 'd' || n FROM generate_series(1, {count}) n");
        self.run(&sql).await;
    }

    /// Ends all leases.
    pub async fn expire(&self) {
        self.run("UPDATE request SET lease_until = clock_timestamp() - interval '1 second' WHERE lease_until IS NOT NULL")
            .await;
    }
}

/// Returns the ids of the taken rows, claim by claim.
pub fn ids(taken: &Taken) -> Vec<Vec<String>> {
    let of = |claim: &Claimed| claim.rows.iter().map(|row| row.key.id.to_string()).collect();
    taken.claims.iter().map(of).collect()
}

/// Returns the ids of all taken rows.
pub fn flat(taken: &Taken) -> Vec<i64> {
    ids(taken).concat().iter().map(|id| id.parse().unwrap()).collect()
}

pub async fn take(claims: &PgClaims, limit: u32) -> Taken {
    claims.take(&Take::up_to(limit)).await.unwrap()
}

/// Takes the only claim that can be taken.
pub async fn take_one(claims: &PgClaims) -> Claimed {
    let mut taken = take(claims, 1).await;
    assert_eq!(taken.claims.len(), 1, "{taken:?}");
    taken.claims.remove(0)
}

pub async fn settle(claims: &PgClaims, claim: &ClaimRef, outcome: Outcome) -> Result<Settled, ClaimError> {
    let mut answers = claims.settle(&[(claim.clone(), outcome)]).await.unwrap();
    assert_eq!(answers.len(), 1);
    answers.remove(0)
}

/// Awaits `work` with a time limit that only a fault exceeds.
pub async fn bounded<T>(work: impl Future<Output = T>) -> T {
    within(LONG, "not done", work).await
}

/// Waits until `count` sessions of this database wait for a lock.
pub async fn until_waiting(world: &World, count: i64) {
    let sql = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    bounded(async {
        while world.number(sql).await != count {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
}
