//! The harness of a table in Postgres, in a separate database.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_claim::{ClaimSpec, ClaimStore, IdType, PgClaims, PgHeld, RowKey};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection, PgPool, Row as _};
use test_servers::{Database, prepared_database};

use super::bench::{Harness, Layout, Seed, Seen, StateKind, TableHarness, Tracking, Variant};
use super::hold::HoldStore;
use super::{Env, case};

pub struct Postgres;

pub struct PgTable {
    database: Database,
    pool: PgPool,
    layout: Layout,
    spec: ClaimSpec,
    is_silent: AtomicBool,
}

#[async_trait]
impl Harness for Postgres {
    async fn table(&self, layout: &Layout, spec: &ClaimSpec) -> Box<dyn TableHarness> {
        let database = prepared_database(&ddl(layout)).await;
        // Without JIT, as the README advises.
        let options = database.url().parse::<PgConnectOptions>().unwrap().options([("jit", "off")]);
        let pool = PgPoolOptions::new().max_connections(8).connect_with(options).await.unwrap();
        if layout.on_read {
            spec.migration().apply(&pool).await.unwrap();
        }
        Box::new(PgTable {
            database,
            pool,
            layout: layout.clone(),
            spec: spec.clone(),
            is_silent: AtomicBool::new(false),
        })
    }
}

/// Returns the statement that creates a table with every column that a layout may use.
fn ddl(layout: &Layout) -> String {
    let id = match layout.id {
        IdType::Uuid => "uuid",
        IdType::Text => "text",
        _ => "bigint",
    };
    let states = "'new', 'again', 'in-progress', 'complete', 'error', 'exhausted', 'paused'";
    let (state, make) = match layout.variant.states {
        StateKind::Text => {
            (format!("text NOT NULL DEFAULT 'new' CHECK (status IN ({states}))"), String::new())
        }
        StateKind::Enum => (
            "request_state NOT NULL DEFAULT 'new'".to_owned(),
            format!("CREATE TYPE request_state AS ENUM ({states});"),
        ),
        StateKind::Boolean => ("boolean NOT NULL DEFAULT false".to_owned(), String::new()),
    };
    let owner = if layout.numbered_owners { "bigint" } else { "uuid" };
    let lease = match layout.variant.tracking {
        Tracking::Columns => {
            format!(
                "owner {owner}, epoch bigint NOT NULL DEFAULT 0, lease_until timestamptz, taken_at timestamptz,"
            )
        }
        _ => String::new(),
    };
    // Without queues in the spec, the queue must not be part of the key.
    let key = if layout.queued { "queue, id" } else { "id" };
    format!(
        "{make}
         CREATE TABLE request (id {id} NOT NULL, queue text NOT NULL DEFAULT 'default', status {state},
             entity text, kind text NOT NULL, attempts_left integer, {lease} settled_at timestamptz, settled_by text,
             ready_at timestamptz, timeout_seconds integer, error text, priority bigint NOT NULL,
             due timestamptz, label text NOT NULL, PRIMARY KEY ({key}));
         CREATE TABLE request_claims (tab text NOT NULL, queue text NOT NULL, id text NOT NULL, owner {owner} NOT NULL,
             epoch bigint NOT NULL, lease_until timestamptz NOT NULL, taken_at timestamptz NOT NULL,
             PRIMARY KEY (tab, queue, id));
         CREATE SEQUENCE request_claims_epoch;
         CREATE SEQUENCE request_owners;
         CREATE SEQUENCE request_epochs;"
    )
}

impl PgTable {
    fn is_side(&self) -> bool {
        self.layout.variant.tracking == Tracking::Side
    }

    /// Returns the condition for a row of the table, with the values `$1` (queue) and `$2` (id).
    fn is_row(&self) -> &'static str {
        "queue = $1 AND id::text = $2"
    }

    async fn run(&self, sql: &str, key: &RowKey) -> u64 {
        let queue = key.queue.as_deref().unwrap_or("default");
        let query = sqlx::query(AssertSqlSafe(sql.to_owned())).bind(queue).bind(key.id.to_string());
        query.execute(&self.pool).await.unwrap().rows_affected()
    }

    /// Returns the condition for a row of the side table, with the same values.
    fn side_row(&self) -> &'static str {
        if self.layout.queued { "queue = $1 AND id = $2" } else { "queue = '' AND $1 <> '' AND id = $2" }
    }
}

#[async_trait]
impl TableHarness for PgTable {
    fn client(&self) -> Arc<dyn ClaimStore> {
        Arc::new(PgClaims::new(self.pool.clone(), self.spec.clone()))
    }

    fn holder(&self) -> Arc<dyn HoldStore> {
        Arc::new(PgHeld::new(self.pool.clone(), self.spec.clone()))
    }

    async fn insert(&self, seed: Seed) -> RowKey {
        let state = match (self.layout.variant.states, seed.state) {
            (_, None) => "DEFAULT".to_owned(),
            (_, Some(state)) => format!("'{state}'"),
        };
        let id = match self.layout.id {
            IdType::Uuid => "uuid",
            IdType::Text => "text",
            _ => "bigint",
        };
        let sql = format!(
            "WITH made AS (INSERT INTO request (id, queue, status, entity, kind, attempts_left, ready_at, timeout_seconds,
                 priority, due, label)
             VALUES (($1::text)::{id}, $2, {state}, $3, $4, $5, clock_timestamp() + $6 * interval '1 second', $7, $8,
                 timestamptz '2026-01-01 00:00Z' + $9 * interval '1 second', $10) RETURNING 1)
             SELECT pg_notify($11, '') FROM made"
        );
        let query = sqlx::query(AssertSqlSafe(sql))
            .bind(seed.id.to_string())
            .bind(seed.queue)
            .bind(seed.entity)
            .bind(seed.kind)
            .bind(seed.attempts)
            .bind(seed.ready_in.map(|after| after.as_secs_f64()))
            .bind(seed.timeout)
            .bind(seed.priority)
            .bind(seed.due_in.map(|after| after.as_secs_f64()))
            .bind(seed.label)
            .bind(if self.is_silent.load(Ordering::SeqCst) {
                "nobody listens here".to_owned()
            } else {
                self.spec.channel().to_owned()
            });
        query.execute(&self.pool).await.unwrap();
        RowKey { queue: self.layout.queued.then(|| seed.queue.into()), id: seed.id }
    }

    async fn see(&self, key: &RowKey) -> Option<Seen> {
        let queue = key.queue.as_deref().unwrap_or("default");
        let lease = match self.layout.variant.tracking {
            Tracking::Columns => "owner::text AS owner, epoch, lease_until IS NOT NULL AS leased".to_owned(),
            Tracking::Side => format!(
                "(SELECT owner::text FROM request_claims c WHERE {side}) AS owner,
                 (SELECT epoch FROM request_claims c WHERE {side}) AS epoch,
                 EXISTS (SELECT FROM request_claims c WHERE {side}) AS leased",
                side = self.side_row().replace("queue =", "c.queue =").replace(" id =", " c.id =")
            ),
            Tracking::None => "NULL::text AS owner, NULL::bigint AS epoch, false AS leased".to_owned(),
        };
        let sql = format!(
            "SELECT status::text AS status, attempts_left, error, settled_at IS NOT NULL AS dated, settled_by, {lease}
             FROM request WHERE {}",
            self.is_row()
        );
        let query = sqlx::query(AssertSqlSafe(sql)).bind(queue).bind(key.id.to_string());
        let row = query.fetch_optional(&self.pool).await.unwrap()?;
        Some(Seen {
            state: row.get("status"),
            owner: row.get("owner"),
            epoch: row.get("epoch"),
            attempts: row.get("attempts_left"),
            error: row.get("error"),
            has_lease: row.get("leased"),
            is_dated: row.get("dated"),
            settled_by: row.get("settled_by"),
        })
    }

    async fn expire(&self, key: &RowKey) {
        let (table, row) =
            if self.is_side() { ("request_claims", self.side_row()) } else { ("request", self.is_row()) };
        let sql = format!(
            "UPDATE {table} SET lease_until = clock_timestamp() - interval '1 second'
             WHERE lease_until IS NOT NULL AND {row}"
        );
        assert_eq!(self.run(&sql, key).await, 1, "row {key} has a lease that can end");
    }

    async fn set_state(&self, key: &RowKey, state: &str) {
        let sql = format!("UPDATE request SET status = '{state}' WHERE {}", self.is_row());
        assert_eq!(self.run(&sql, key).await, 1);
    }

    async fn settled_earlier(&self, key: &RowKey, by: Duration) {
        let sql = format!(
            "UPDATE request SET settled_at = settled_at - interval '{} seconds'
             WHERE settled_at IS NOT NULL AND {}",
            by.as_secs(),
            self.is_row()
        );
        assert_eq!(self.run(&sql, key).await, 1, "row {key} is settled");
    }

    async fn delete(&self, key: &RowKey) {
        assert_eq!(self.run(&format!("DELETE FROM request WHERE {}", self.is_row()), key).await, 1);
    }

    async fn lock(&self, key: &RowKey) -> Box<dyn Any + Send> {
        let mut connection = self.database.connect().await;
        sqlx::raw_sql("BEGIN").execute(&mut connection).await.unwrap();
        let sql = format!("SELECT FROM request WHERE {} FOR UPDATE", self.is_row());
        let query = sqlx::query(AssertSqlSafe(sql)).bind(key.queue.as_deref().unwrap_or("default"));
        assert_eq!(query.bind(key.id.to_string()).fetch_all(&mut connection).await.unwrap().len(), 1);
        Box::new(connection)
    }

    async fn unlock(&self, lock: Box<dyn Any + Send>) {
        let mut connection = *lock.downcast::<PgConnection>().unwrap();
        sqlx::raw_sql("ROLLBACK").execute(&mut connection).await.unwrap();
        connection.close().await.unwrap();
    }

    async fn lose_wake_ups(&self) {
        self.is_silent.store(true, Ordering::SeqCst);
    }
}

/// Runs a case in real time, with threads for its workers.
pub fn run(variant: Variant, name: &str) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let env = Env { harness: Box::new(Postgres), variant };
    runtime.block_on((case(name).run)(&env));
}
