//! Worlds on a real server.
#![allow(unreachable_pub)]

use std::time::Duration;

use leasehold_idempotency::{
    Fingerprint, IdempotencyError, Ident, Isolation, KeyTransaction, PgIdempotency, RequestOutcome, Stored,
};
use sqlx::postgres::PgPool;
use sqlx::{AssertSqlSafe, PgConnection};
use test_bounds::Bound;
pub use test_servers::sql::pool;
use test_servers::{Cluster, Database, fresh_database};
use tokio::task::JoinHandle;

pub struct Pg {
    pub database: Database,
    pub pool: PgPool,
    pub store: PgIdempotency,
}

/// Time limit of a wait for a connection, which no test reaches.
pub const PATIENT: Duration = Duration::from_secs(120);

pub async fn world(connections: u32) -> Pg {
    on(fresh_database().await, connections).await
}

/// Creates a database on the tests' own server, which they can inspect from outside.
pub async fn private(connections: u32) -> Pg {
    on(Cluster::shared().fresh_database().await, connections).await
}

pub async fn on(database: Database, connections: u32) -> Pg {
    let pool = pool(database.url(), connections).await;
    let store = PgIdempotency::new(pool.clone());
    store.migrate().await.unwrap();
    let world = Pg { database, pool, store };
    world.run("CREATE TABLE effect (id bigint GENERATED ALWAYS AS IDENTITY)").await;
    world
}

pub async fn isolated(isolation: Isolation) -> Pg {
    let mut world = world(8).await;
    world.store = world.store.isolation(isolation);
    world
}

impl Pg {
    /// Returns a store on the same database, as in another process.
    pub fn elsewhere(&self) -> PgIdempotency {
        PgIdempotency::new(self.pool.clone())
    }

    pub async fn run(&self, sql: impl Into<String>) {
        sqlx::raw_sql(AssertSqlSafe(sql.into())).execute(&self.pool).await.unwrap();
    }

    pub async fn number(&self, sql: &str) -> i64 {
        sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_one(&self.pool).await.unwrap()
    }

    pub async fn effects(&self) -> i64 {
        self.number("SELECT count(*) FROM effect").await
    }

    /// Waits until `task` waits for an advisory lock that the test holds.
    pub async fn until_it_waits<T>(&self, task: &JoinHandle<T>) {
        while !Cluster::shared().advisory_locks(self.database.name()).await.iter().any(|lock| !lock.granted) {
            assert!(!task.is_finished(), "it did not wait");
            tokio::task::yield_now().await;
        }
    }

    /// Waits until the database has no open transaction and no advisory lock.
    pub async fn settled(&self, outside: &mut PgConnection) {
        let open = "SELECT (SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
            AND state <> 'idle' AND pid <> pg_backend_pid()) + (SELECT count(*) FROM pg_locks l JOIN pg_database d \
            ON d.oid = l.database WHERE l.locktype = 'advisory' AND d.datname = current_database())";
        let deadline = Bound::new(PATIENT / 4);
        loop {
            let open: i64 = sqlx::query_scalar(open).fetch_one(&mut *outside).await.unwrap();
            if open == 0 {
                return;
            }
            deadline.check(format_args!("{open} transactions or locks stay open"));
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

pub async fn effect(connection: &mut PgConnection) {
    sqlx::query("INSERT INTO effect DEFAULT VALUES").execute(connection).await.unwrap();
}

impl crate::suite::World for Pg {
    type Store = PgIdempotency;

    fn store(&self) -> PgIdempotency {
        self.store.clone()
    }

    fn joining(&self, wait: Duration) -> PgIdempotency {
        self.store.clone().join(wait)
    }

    fn bounded(&self, bytes: usize) -> PgIdempotency {
        self.store.clone().max_body(bytes)
    }

    async fn effect(&self, fresh: &mut KeyTransaction) {
        effect(fresh).await;
    }

    async fn effects(&self) -> u64 {
        self.effects().await.try_into().unwrap()
    }

    async fn expire(&self) {
        self.run("UPDATE leasehold.idempotency SET expires_at = clock_timestamp()").await;
    }

    async fn run(
        &self,
        ident: &Ident,
        fingerprint: &Fingerprint,
        end: Result<Stored, IdempotencyError>,
    ) -> Result<RequestOutcome, IdempotencyError> {
        let body = async |fresh: &mut KeyTransaction| {
            effect(fresh).await;
            end
        };
        self.store.run(ident, fingerprint, body).await
    }
}
