//! Measures inserts into tables whose changes are recorded by triggers, against the same tables without triggers and
//! against a record written by hand in the same statement.

use std::sync::Arc;

use bench::report::{Row, row};
use leasehold_capture::{Capture, Source};
use leasehold_claim::{ClaimSpec, States, Table};
use sqlx::{AssertSqlSafe, Executor as _, PgPool};

use crate::companions::rounds::{Contender, Worker, compete};
use crate::companions::transactions::pool;

const CLIENTS: u32 = 8;
/// Number of captured tables that feed one table.
const MANY: usize = 17;
/// Number of rows in a large insert.
const BATCH: u32 = 1_000;

/// One client. It inserts into its tables in turn.
struct Client {
    pool: PgPool,
    statements: Arc<[String]>,
    next: usize,
}

impl Worker for Client {
    async fn cycle(&mut self) {
        let statement = self.statements[self.next % self.statements.len()].clone();
        self.next += 1;
        let number = i64::try_from(self.next).unwrap();
        sqlx::query(AssertSqlSafe(statement)).bind(number).execute(&self.pool).await.unwrap();
    }
}

pub(crate) async fn measure(url: &str, rows: &mut Vec<Row>) {
    println!("capture triggers, {CLIENTS} clients");
    let pool = pool(url, CLIENTS).await;
    tables(&pool, "plain", MANY).await;
    tables(&pool, "by_hand", 1).await;
    change_table(&pool, "by_hand").await;
    for (name, count) in [("single", 1), ("many", MANY)] {
        tables(&pool, name, count).await;
        change_table(&pool, name).await;
        capture(&pool, name, count).await;
    }
    let insert = |table: String| format!("INSERT INTO {table} (order_id, article) VALUES ($1, 'pear')");
    let inserts = |name: &str, count: usize| -> Arc<[String]> {
        (0..count).map(|number| insert(format!("{name}_{number}"))).collect()
    };
    let batch = |name: &str| -> Arc<[String]> {
        let select = format!("SELECT $1 + n, 'pear' FROM generate_series(1, {BATCH}) n");
        [format!("INSERT INTO {name}_0 (order_id, article) {select}")].into()
    };
    let by_hand = format!(
        "WITH change AS (INSERT INTO by_hand_change (order_id, source, operation) VALUES ($1, 'by_hand_0', 'INSERT')) {}",
        insert("by_hand_0".to_owned())
    );
    let contender = |name: &str, statements: Arc<[String]>| {
        let client =
            |at: u32| Client { pool: pool.clone(), statements: statements.clone(), next: at as usize };
        Contender::new(name, (0..CLIENTS).map(client).collect())
    };
    let series = compete(vec![
        contender("no captured table", inserts("plain", 1)),
        contender("1 captured table", inserts("single", 1)),
        contender("17 tables, none captured", inserts("plain", MANY)),
        contender("17 captured tables", inserts("many", MANY)),
        contender("recorded by hand", [by_hand].into()),
    ])
    .await;
    rows.push(row("inserts, 1 captured table", &series[1], &series[0], 0.5));
    rows.push(row("inserts, 17 captured tables", &series[3], &series[2], 0.5));
    rows.push(row("inserts, 1 captured table, beside a record by hand", &series[1], &series[4], 0.8));
    let series = compete(vec![
        contender("1,000 rows, not captured", batch("plain")),
        contender("1,000 rows, captured", batch("single")),
    ])
    .await;
    rows.push(row("inserts of 1,000 rows, captured", &series[1], &series[0], None));
    pool.close().await;
}

async fn tables(pool: &PgPool, name: &str, count: usize) {
    for number in 0..count {
        let table = format!(
            "CREATE TABLE {name}_{number} (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
                order_id bigint NOT NULL, article text NOT NULL)"
        );
        pool.execute(sqlx::raw_sql(AssertSqlSafe(table))).await.unwrap();
    }
}

/// Creates the table of changes, with the columns and indexes of claims.
async fn change_table(pool: &PgPool, name: &str) {
    let table = format!(
        "CREATE TABLE {name}_change (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            status text NOT NULL DEFAULT 'new', order_id bigint, source text NOT NULL, operation text NOT NULL)"
    );
    pool.execute(sqlx::raw_sql(AssertSqlSafe(table))).await.unwrap();
    let spec = ClaimSpec::builder(Table::new(format!("{name}_change")).unwrap())
        .state("status", States::text(["new"], "done").taken("in_progress").failed("failed"))
        .lease_columns("owner", "epoch", "lease_until")
        .notify_on_insert(false)
        .build()
        .unwrap();
    spec.migration().apply(pool).await.unwrap();
}

async fn capture(pool: &PgPool, name: &str, count: usize) {
    let mut capture = Capture::into(Table::new(format!("{name}_change")).unwrap());
    for number in 0..count {
        let table = format!("{name}_{number}");
        let source = Source::new(Table::new(&table).unwrap()).copy("order_id", "order_id");
        capture = capture.source(source.constant("source", &table).operation("operation"));
    }
    capture.build().unwrap().install(pool).await.unwrap();
}
