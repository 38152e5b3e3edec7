//! Checks of plain tables, and migrations that add the missing columns.

#![allow(clippy::unwrap_used)] // Applies to the shared test code too.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use leasehold_plain_tables::{
    ClaimError, Column, Finding, IdType, MutexTable, PlainMigration, Table, TimeoutTable,
};
use sqlx::{PgConnection, PgPool};
use test_bounds::within;
use test_servers::sql::{LONG, pool, run, text};
use test_servers::{Database, fresh_database};

fn column(name: &str) -> Column {
    Column::new(name).unwrap()
}

fn mutexes() -> MutexTable {
    MutexTable::new(Table::new("mutex").unwrap(), column("id"), IdType::Int, column("acquired"))
}

fn tasks() -> TimeoutTable {
    let table = Table::new("task").unwrap();
    TimeoutTable::new(table, column("id"), IdType::Int, column("started"), column("timeout"))
}

async fn database(sql: &str) -> (Database, PgPool, PgConnection) {
    let db = fresh_database().await;
    let mut observer = db.connect().await;
    run(&mut observer, sql).await;
    let pool = pool(db.url(), 10).await;
    (db, pool, observer)
}

#[track_caller]
fn assert_finding(findings: &[Finding], kind: fn(String) -> Finding, words: &[&str]) {
    let is = |found: &&Finding| kind(found.message().to_owned()) == **found;
    let found =
        findings.iter().filter(is).any(|found| words.iter().all(|word| found.message().contains(word)));
    assert!(found, "no {:?} in {findings:#?}", kind(words.join(" .. ")));
}

/// Returns a description of the table's columns, constraints and indexes.
async fn picture(observer: &mut PgConnection, table: &str) -> String {
    let sql = format!(
        "SELECT concat_ws(' ', (SELECT string_agg(attname || ' ' || attnum || attnotnull || coalesce(pg_get_expr(adbin, adrelid), ''), ', ' \
         ORDER BY attnum) FROM pg_attribute LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum \
         WHERE attrelid = '{table}'::regclass AND attnum > 0), (SELECT string_agg(indexrelid || pg_get_indexdef(indexrelid), ', ' \
         ORDER BY 1) FROM pg_index WHERE indrelid = '{table}'::regclass))"
    );
    text(observer, &sql).await
}

/// Distinguishes locks made before the column from later ones, while locks are created continuously.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn existing_locks_get_other_attempts_than_new_ones() {
    let (_db, pool, mut observer) = database(
        "CREATE TABLE mutex (id bigserial PRIMARY KEY, acquired boolean NOT NULL DEFAULT false, writer int, n bigint);
        INSERT INTO mutex (writer, n) SELECT 9, n FROM generate_series(1, 5000) n",
    )
    .await;
    let (stop, counts) = (Arc::new(AtomicBool::new(false)), Arc::new([const { AtomicU64::new(0) }; 4]));
    let writers: Vec<_> = (0..4)
        .map(|writer| {
            let (pool, stop, counts) = (pool.clone(), Arc::clone(&stop), Arc::clone(&counts));
            tokio::spawn(async move {
                let mut connection = pool.acquire().await.unwrap();
                while !stop.load(Ordering::SeqCst) {
                    let n = counts[writer].load(Ordering::SeqCst);
                    let sql = format!("INSERT INTO mutex (writer, n) VALUES ({writer}, {n})");
                    run(&mut *connection, &sql).await;
                    counts[writer].store(n + 1, Ordering::SeqCst);
                }
            })
        })
        .collect();
    let each_goes_on = async || {
        let before: Vec<u64> = counts.iter().map(|count| count.load(Ordering::SeqCst)).collect();
        let all = async {
            while counts.iter().zip(&before).any(|(count, before)| count.load(Ordering::SeqCst) <= *before) {
                tokio::time::sleep(std::time::Duration::from_millis(1)).await;
            }
        };
        within(LONG, "writers go on", all).await;
    };
    each_goes_on().await;
    let locks = mutexes().attempts(column("retries_left"));
    let migration = locks.migration().attempts(3).attempts_of_present(1).within(LONG);
    let applied: Vec<_> = (0..3)
        .map(|_| {
            let (pool, migration) = (pool.clone(), migration.clone());
            tokio::spawn(async move { migration.apply(&pool).await })
        })
        .collect();
    for one in applied {
        within(LONG, "not ended", one).await.unwrap().unwrap();
    }
    each_goes_on().await;
    stop.store(true, Ordering::SeqCst);
    for writer in writers {
        within(LONG, "not ended", writer).await.expect("no insert failed meanwhile");
    }
    assert_eq!(
        text(&mut observer, "SELECT count(*) FROM mutex WHERE writer = 9 AND retries_left = 1").await,
        "5000"
    );
    // For each writer, the existing locks come first and the new ones follow without a gap.
    let told_apart = "SELECT string_agg(writer::text, ' ' ORDER BY writer) FROM (SELECT writer FROM mutex WHERE writer < 9 \
        GROUP BY writer HAVING max(n) FILTER (WHERE retries_left = 1) + 1 = min(n) FILTER (WHERE retries_left = 3) \
        AND count(*) = count(*) FILTER (WHERE retries_left IN (1, 3))) w";
    assert_eq!(text(&mut observer, told_apart).await, "0 1 2 3");
    // Grants use that number.
    assert_eq!(locks.grant(&pool, 1).await.unwrap().unwrap().attempts_left, Some(0));
    let newest: i64 = text(&mut observer, "SELECT max(id) FROM mutex").await.parse().unwrap();
    assert_eq!(locks.grant(&pool, newest).await.unwrap().unwrap().attempts_left, Some(2));
    assert!(locks.check(&pool).await.unwrap().is_empty());
    let before = picture(&mut observer, "mutex").await;
    locks.migration().attempts(7).attempts_of_present(8).apply(&pool).await.unwrap();
    assert_eq!(picture(&mut observer, "mutex").await, before, "there is nothing to do the second time");
}

/// Any table can get attempts and queues later. The printed statements equal the applied ones.
#[tokio::test]
async fn plain_tables_can_get_attempts_and_queues_later() {
    let (_db, pool, mut observer) = database(
        "CREATE TABLE mutex (id int PRIMARY KEY, acquired boolean NOT NULL DEFAULT false);
        INSERT INTO mutex VALUES (1), (2);
        CREATE TABLE task (id int PRIMARY KEY); INSERT INTO task VALUES (1)",
    )
    .await;
    let full = mutexes().queue(column("queue_id")).owner(column("owner")).epoch(column("epoch"));
    let full = full.attempts(column("retries_left"));
    assert!(mutexes().check(&pool).await.unwrap().is_empty());
    let found = full.check(&pool).await.unwrap();
    for name in ["queue_id", "owner", "epoch", "retries_left"] {
        assert_finding(&found, Finding::Error, &["no column", name, "run the migration"]);
    }
    assert_finding(&found, Finding::Error, &["nothing makes", "\"queue_id\", \"id\"", "unique"]);
    full.migration().attempts(2).apply(&pool).await.unwrap();
    assert!(full.check(&pool).await.unwrap().is_empty());
    // Without a number for existing locks, they have as many attempts as new ones. The same id in two queues is two
    // locks.
    assert!(full.create(&pool, ("other", 1)).await.unwrap());
    for queue in ["default", "other"] {
        assert_eq!(full.grant(&pool, (queue, 1)).await.unwrap().unwrap().attempts_left, Some(1), "{queue}");
    }
    // A lock is not granted while it has no seconds.
    let tasks = tasks().attempts(column("left")).queue(column("queue_id"));
    tasks.migration().apply(&pool).await.unwrap();
    assert!(tasks.check(&pool).await.unwrap().is_empty());
    let error = tasks.acquire(&pool, ("default", 1)).await.unwrap_err();
    assert!(error.to_string().contains("no seconds"), "{error}");
    run(&mut observer, "UPDATE task SET timeout = 60").await;
    let grant = tasks.grant(&pool, ("default", 1)).await.unwrap().unwrap();
    assert_eq!(grant.attempts_left, None, "no number, no limit");
    for (table, migration) in [("mutex", full.migration().attempts(2)), ("task", tasks.migration())] {
        let before = picture(&mut observer, table).await;
        printed(&mut observer, &migration).await;
        migration.apply(&pool).await.unwrap();
        assert_eq!(picture(&mut observer, table).await, before, "{table}: once is enough");
    }
    run(
        &mut observer,
        "DROP TABLE mutex; CREATE TABLE mutex (id int PRIMARY KEY, acquired boolean NOT NULL DEFAULT false)",
    )
    .await;
    printed(&mut observer, &full.migration().attempts(2)).await;
    assert!(full.check(&pool).await.unwrap().is_empty());
    let error = mutexes().epoch(column("e")).queue(column("id")).migration().statements().unwrap_err();
    assert!(matches!(error, ClaimError::InvalidSpec(_)), "{error}");
}

async fn printed(observer: &mut PgConnection, migration: &PlainMigration) {
    for statement in migration.statements().unwrap() {
        run(&mut *observer, &statement).await;
    }
}

/// A grant time in the future blocks the lock until then.
#[tokio::test]
async fn times_in_the_future_are_named() {
    for (kind, later) in
        [("timestamptz", "now() + interval '2 hours'"), ("bigint", "extract(epoch from now()) + 7200")]
    {
        let (_db, pool, mut observer) =
            database(&format!("CREATE TABLE task (id int PRIMARY KEY, started {kind}, timeout int)")).await;
        let table = if kind == "bigint" { tasks().unix_time() } else { tasks() };
        assert!(table.check(&pool).await.unwrap().is_empty());
        run(&mut observer, &format!("INSERT INTO task VALUES (1, {later}, 5), (2, NULL, 5)")).await;
        let found = table.check(&pool).await.unwrap();
        assert_finding(&found, Finding::Warning, &["1 locks", "in the future", "column started"]);
    }
}

/// Findings name the defect and the fix.
#[tokio::test]
async fn wrong_types_and_defaults_are_reported() {
    let (_db, pool, mut observer) = database(
        "CREATE TABLE task (id int PRIMARY KEY, started bigint, timeout text);
        CREATE TABLE mutex (id text, acquired int, owner int, retries_left int NOT NULL DEFAULT 0, small smallint DEFAULT 0)",
    )
    .await;
    let found = tasks().check(&pool).await.unwrap();
    assert_finding(&found, Finding::Error, &["column started", "bigint", "not timestamp with time zone"]);
    assert_finding(&found, Finding::Error, &["column timeout", "text", "not smallint or integer"]);
    run(&mut observer, "ALTER TABLE task ALTER timeout TYPE int USING 1").await;
    assert!(tasks().unix_time().check(&pool).await.unwrap().is_empty());
    run(&mut observer, "CREATE DOMAIN seconds AS bigint; ALTER TABLE task ALTER timeout TYPE seconds").await;
    assert!(tasks().unix_time().check(&pool).await.unwrap().is_empty());
    for wrong in ["seconds", "int", "numeric", "timestamptz USING to_timestamp(started)"] {
        run(&mut observer, &format!("ALTER TABLE task ALTER started TYPE {wrong}")).await;
        let found = tasks().unix_time().check(&pool).await.unwrap();
        assert_finding(&found, Finding::Error, &["column started", "the time of the grant", "not bigint"]);
        assert_eq!(found.len(), 1, "{found:#?}");
    }
    assert!(tasks().check(&pool).await.unwrap().is_empty());

    let found = mutexes().owner(column("owner")).attempts(column("retries_left")).check(&pool).await.unwrap();
    assert_finding(&found, Finding::Error, &["column id", "text", "not smallint or integer or bigint"]);
    assert_finding(&found, Finding::Error, &["column acquired", "integer", "not boolean"]);
    assert_finding(&found, Finding::Error, &["column owner", "integer", "not uuid or text"]);
    assert_finding(&found, Finding::Error, &["nothing makes \"id\"", "unique"]);
    assert_finding(&found, Finding::Warning, &["retries_left", "0 by default", "SET DEFAULT"]);
    let found = mutexes().attempts(column("small")).check(&pool).await.unwrap();
    assert_finding(&found, Finding::Warning, &["small", "0 by default"]);
    run(&mut observer, "ALTER TABLE mutex ALTER retries_left SET DEFAULT 3").await;
    let found = mutexes().attempts(column("retries_left")).check(&pool).await.unwrap();
    assert!(!found.iter().any(|found| matches!(found, Finding::Warning(_))), "{found:#?}");
    run(&mut observer, "DROP TABLE mutex").await;
    let found = mutexes().check(&pool).await.unwrap();
    assert_eq!(found.len(), 1);
    assert_finding(&found, Finding::Error, &["no table mutex"]);
}

/// The owner can be a text column.
#[tokio::test]
async fn an_owner_can_be_text() {
    for kind in ["uuid", "text", "varchar(36)"] {
        let table = format!(
            "CREATE TABLE mutex (id int PRIMARY KEY, acquired boolean, owner {kind}); INSERT INTO mutex VALUES (1)"
        );
        let (_db, pool, mut observer) = database(&table).await;
        let locks = mutexes().owner(column("owner"));
        assert!(locks.check(&pool).await.unwrap().is_empty(), "{kind}");
        let first = locks.grant(&pool, 1).await.unwrap().unwrap();
        let owner = text(&mut observer, "SELECT owner FROM mutex").await;
        assert_eq!(owner, first.owner.unwrap().to_string(), "{kind}");
        assert!(locks.break_lock(&pool, 1, first.owner.unwrap()).await.unwrap());
        let second = locks.grant(&pool, 1).await.unwrap().unwrap();
        assert!(matches!(locks.give_back(&pool, &first).await.unwrap_err(), ClaimError::Superseded { .. }));
        assert!(locks.give_back(&pool, &second).await.unwrap());
        assert_eq!(text(&mut observer, "SELECT owner FROM mutex").await, "NULL");
    }
}

/// No unique index is created on a part of a wider key, because it would refuse rows of the application.
#[tokio::test]
async fn no_unique_index_on_a_part_of_a_wider_key_is_advised_or_made() {
    let (_db, pool, mut observer) = database(
        "CREATE TABLE mutex (tenant int, id int, acquired boolean NOT NULL DEFAULT false, PRIMARY KEY (tenant, id));
        INSERT INTO mutex VALUES (1, 1), (2, 2)",
    )
    .await;
    let found = mutexes().check(&pool).await.unwrap();
    assert_finding(&found, Finding::Error, &["key of the table has more columns"]);
    assert!(found.iter().all(|finding| !finding.message().contains("CREATE UNIQUE")), "{found:#?}");
    let error = mutexes().queue(column("queue_id")).migration().apply(&pool).await.unwrap_err();
    assert!(matches!(&error, ClaimError::InvalidSpec(text) if text.contains("tenant, id")), "{error}");
    run(&mut observer, "INSERT INTO mutex VALUES (3, 1)").await;
    let columns = "SELECT count(*) FROM pg_attribute WHERE attrelid = 'mutex'::regclass AND attnum > 0";
    assert_eq!(text(&mut observer, columns).await, "3", "nothing was added");
}
