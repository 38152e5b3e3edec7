//! The claimed tables.

use leasehold_claim::{ClaimSpec, IdType, OrderType, States, Table as Name};
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection};

/// Returns the number of claimable rows.
pub(crate) fn rows() -> u64 {
    bench::or_smoke(1_000_000, 50_000)
}

#[derive(Clone, Debug)]
pub(crate) struct Table {
    pub(crate) name: &'static str,
    /// Number of its first rows that stay settled.
    settled: u64,
}

impl Table {
    /// Creates a table with claimable rows, and some that claims have settled.
    pub(crate) async fn create(url: &str, name: &'static str, settled: u64) -> Self {
        let mut connection = PgConnection::connect(url).await.unwrap();
        let rows = rows();
        let sql = format!(
            "CREATE TABLE {name} (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, run_at timestamptz NOT NULL,
                state text NOT NULL DEFAULT 'new', payload text NOT NULL, owner uuid, epoch bigint NOT NULL DEFAULT 0,
                lease_until timestamptz) WITH (fillfactor = 85);
            INSERT INTO {name} (run_at, payload)
                SELECT now() - interval '1 day' + n * interval '1 ms', 'order ' || n FROM generate_series(1, {settled}) n;
            CREATE INDEX {name}_pick ON {name} (run_at, id) WHERE state IN ('new');
            CREATE INDEX {name}_sweep ON {name} (lease_until) WHERE lease_until IS NOT NULL;
            UPDATE {name} SET state = 'complete', epoch = 1;
            INSERT INTO {name} (run_at, payload)
                SELECT now() + n * interval '1 ms', 'order ' || n FROM generate_series(1, {rows}) n;",
        );
        connection.execute(sqlx::raw_sql(AssertSqlSafe(sql))).await.unwrap();
        let vacuum = format!("VACUUM (ANALYZE) {name}");
        connection.execute(sqlx::raw_sql(AssertSqlSafe(vacuum))).await.unwrap();
        connection.execute("CHECKPOINT").await.unwrap();
        Self { name, settled }
    }

    pub(crate) fn spec(&self) -> ClaimSpec {
        ClaimSpec::builder(Name::new(self.name).unwrap())
            .id("id", IdType::Int)
            .state("state", States::text(["new"], "complete").taken("in-progress").failed("error"))
            .order_by("run_at", OrderType::Time)
            .lease_columns("owner", "epoch", "lease_until")
            .build()
            .unwrap()
    }

    /// Restores the settled rows, because each contender must begin with the same rows.
    pub(crate) async fn restore(&self, url: &str) {
        let mut connection = PgConnection::connect(url).await.unwrap();
        let back = format!(
            "UPDATE {} SET state = 'new' WHERE id > {} AND state = 'complete'",
            self.name, self.settled
        );
        connection.execute(sqlx::raw_sql(AssertSqlSafe(back))).await.unwrap();
        let vacuum = format!("VACUUM (ANALYZE) {}", self.name);
        connection.execute(sqlx::raw_sql(AssertSqlSafe(vacuum))).await.unwrap();
    }
}
