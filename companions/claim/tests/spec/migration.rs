//! Migrations add the objects that specs need, on tables in use and repeatedly.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::common::*;
use leasehold_claim::sqlx::postgres::PgPoolOptions;
use leasehold_claim::sqlx::{Connection as _, PgPool};
use leasehold_claim::{ClaimError, ClaimSpec, IdType, States, Table};
use test_bounds::{Bound, within};
use tokio::time::timeout;

/// Returns all properties of a database's tables that a migration may change.
async fn picture(pool: &PgPool) -> Vec<String> {
    texts(
        pool,
        "SELECT 'column ' || attrelid::regclass || '.' || attname || format_type(atttypid, atttypmod) || attnotnull \
           FROM pg_attribute WHERE attrelid IN (SELECT oid FROM pg_class WHERE relnamespace = 'public'::regnamespace) \
           AND attnum > 0 AND NOT attisdropped \
         UNION ALL SELECT 'constraint ' || oid || conname || pg_get_constraintdef(oid) FROM pg_constraint \
           WHERE connamespace = 'public'::regnamespace \
         UNION ALL SELECT 'index ' || indexrelid || pg_get_indexdef(indexrelid) || indisvalid FROM pg_index i \
           JOIN pg_class c ON c.oid = i.indexrelid WHERE c.relnamespace = 'public'::regnamespace \
         UNION ALL SELECT 'function ' || oid || proname || prosrc || xmin FROM pg_proc \
           WHERE pronamespace = 'public'::regnamespace \
         UNION ALL SELECT 'trigger ' || oid || pg_get_triggerdef(oid) || xmin FROM pg_trigger \
         ORDER BY 1",
    )
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_live_table_is_migrated_by_several_at_once() {
    let (_db, pool) = database().await;
    legacy_table(&pool).await;
    run(&pool, "INSERT INTO request (document) SELECT 'd' || n FROM generate_series(1, 20000) n").await;
    let (stop, written) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let writers: Vec<_> = (0..4)
        .map(|_| {
            let (pool, stop, written) = (pool.clone(), stop.clone(), written.clone());
            tokio::spawn(async move {
                while !stop.load(Ordering::SeqCst) {
                    let id =
                        text(&pool, "INSERT INTO request (document) VALUES ('x') RETURNING id::text").await;
                    run(&pool, &format!("UPDATE request SET status = 'in-progress' WHERE id = {id}")).await;
                    run(&pool, &format!("UPDATE request SET status = 'complete' WHERE id = {id}")).await;
                    written.fetch_add(1, Ordering::SeqCst);
                }
            })
        })
        .collect();
    let spec = full("request").queue("queue_id").build().unwrap();
    let applied: Vec<_> = (0..4)
        .map(|_| {
            let (pool, migration) = (pool.clone(), spec.migration().attempts(3).within(LONG));
            tokio::spawn(async move { migration.apply(&pool).await })
        })
        .collect();
    for apply in applied {
        within(LONG, "not ended", apply).await.unwrap().unwrap();
    }
    stop.store(true, Ordering::SeqCst);
    for writer in writers {
        within(LONG, "not ended", writer).await.expect("no write failed meanwhile");
    }
    let written = written.load(Ordering::SeqCst);
    assert!(written > 0, "there was traffic");
    let good =
        "SELECT count(*)::text FROM request WHERE queue_id = 'default' AND epoch = 0 AND attempts_left = 3";
    assert_eq!(text(&pool, good).await, (20_000 + written).to_string());
    assert_eq!(
        constraints(&pool, "request").await,
        ["c request_attempts_left_not_negative", "c request_status_states", "p request_queue_id_id_key"]
    );
    assert!(indexes(&pool, "request").await.iter().all(|index| !index.contains("INVALID")));
    // The same id may be in two queues, but not twice in one.
    run(&pool, "INSERT INTO request (id, queue_id) VALUES (1, 'other')").await;
    assert_eq!(refused(&pool, "INSERT INTO request (id, queue_id) VALUES (1, 'other')").await, "23505");

    let before = picture(&pool).await;
    spec.migration().attempts(3).apply(&pool).await.unwrap();
    assert_eq!(picture(&pool).await, before, "there is nothing to do the second time");
}

/// Other sessions do not queue behind a waiting migration.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn writers_go_on_while_the_migration_waits_for_a_long_transaction() {
    let (db, pool) = database().await;
    legacy_table(&pool).await;
    run(&pool, "INSERT INTO request (document) VALUES ('a')").await;
    let mut long = db.connect().await;
    let mut holder = long.begin().await.unwrap();
    run(&mut *holder, "UPDATE request SET document = 'b'").await;
    let apply = {
        let (pool, migration) = (pool.clone(), full("request").build().unwrap().migration().within(LONG));
        tokio::spawn(async move { migration.apply(&pool).await })
    };
    let waiting = "SELECT count(*)::text FROM pg_locks WHERE relation = 'request'::regclass AND NOT granted";
    let until = Bound::new(LONG);
    while text(&pool, waiting).await == "0" {
        until.check("the migration has not come to the table");
        tokio::task::yield_now().await;
    }
    // Much longer than a statement of the migration may wait, and much shorter than the long transaction.
    let mut writer = db.connect().await;
    run(&mut writer, "SET statement_timeout = '20s'").await;
    run(&mut writer, "INSERT INTO request (document) VALUES ('c')").await;
    assert!(!apply.is_finished());
    holder.commit().await.unwrap();
    within(LONG, "not ended", apply).await.unwrap().unwrap();
    assert_eq!(text(&pool, "SELECT count(*)::text FROM request WHERE epoch = 0").await, "2");
}

/// The queue column exists already, with NULL in some rows.
#[tokio::test]
async fn rows_without_a_queue_get_the_default_one() {
    let (_db, pool) = database().await;
    legacy_table(&pool).await;
    run(&pool, "ALTER TABLE request ADD COLUMN queue_id text").await;
    run(&pool, "INSERT INTO request (queue_id) SELECT CASE WHEN n % 2 = 0 THEN 'q' END FROM generate_series(1, 5001) n")
        .await;
    let spec = full("request").queue("queue_id").build().unwrap();
    spec.migration().apply(&pool).await.unwrap();
    let counts = "SELECT string_agg(queue_id || ' ' || n, ', ' ORDER BY queue_id) \
                  FROM (SELECT queue_id, count(*) n FROM request GROUP BY 1) c";
    assert_eq!(text(&pool, counts).await, "default 2501, q 2500");
    assert_eq!(refused(&pool, "INSERT INTO request (queue_id) VALUES (NULL)").await, "23502");
    run(&pool, "INSERT INTO request DEFAULT VALUES").await;
    let names = constraints(&pool, "request").await;
    assert!(!names.iter().any(|name| name.contains("given")), "{names:?}");
}

/// A foreign key keeps the id unique.
#[tokio::test]
async fn a_reference_to_the_id_is_reported_and_ids_can_stay_unique() {
    let (_db, pool) = database().await;
    legacy_table(&pool).await;
    run(&pool, "CREATE TABLE reply (request bigint REFERENCES request (id))").await;
    let spec = full("request").queue("queue_id").build().unwrap();
    let error = spec.migration().apply(&pool).await.unwrap_err();
    assert!(matches!(&error, ClaimError::InvalidSpec(text) if text.contains("keep_unique_id")), "{error}");
    run(&pool, "INSERT INTO request (document) VALUES ('still works')").await;
    spec.migration().keep_unique_id().apply(&pool).await.unwrap();
    assert!(constraints(&pool, "request").await.contains(&"p request_pkey".to_owned()));
}

/// A unique constraint that is not the primary key, and a unique index without a constraint, are replaced too.
#[tokio::test]
async fn every_kind_of_unique_id_is_replaced() {
    for unique in ["ALTER TABLE request ADD UNIQUE (id)", "CREATE UNIQUE INDEX request_one ON request (id)"] {
        let (_db, pool) = database().await;
        run(&pool, "CREATE TABLE request (id bigint NOT NULL, status text NOT NULL, document text)").await;
        run(&pool, unique).await;
        let spec = full("request").queue("queue_id").build().unwrap();
        spec.migration().apply(&pool).await.unwrap();
        spec.migration().apply(&pool).await.unwrap();
        run(&pool, "INSERT INTO request (id, status, queue_id) VALUES (1, 'new', 'a'), (1, 'new', 'b')")
            .await;
        assert!(
            constraints(&pool, "request").await.contains(&"u request_queue_id_id_key".to_owned()),
            "{unique}"
        );
    }
}

/// The printed statements name their constraints and can be run twice.
#[tokio::test]
async fn the_printed_statements_run_and_name_their_constraints() {
    let (_db, pool) = database().await;
    legacy_table(&pool).await;
    let spec = full("request")
        .queue("queue_id")
        .epoch_sequence(Table::new("request_epoch").unwrap())
        .expire_on_read()
        .build()
        .unwrap();
    for _ in 0..2 {
        for statement in spec.migration().statements() {
            run(&pool, &statement).await;
        }
    }
    assert_eq!(refused(&pool, "INSERT INTO request (status) VALUES ('unheard-of')").await, "23514");
    assert_eq!(refused(&pool, "INSERT INTO request (attempts_left) VALUES (-1)").await, "23514");
    let sql = spec.migration().sql();
    for name in ["request_status_states", "request_attempts_left_not_negative", "request_queue_id_id_key"] {
        assert!(sql.contains(&format!("CONSTRAINT \"{name}\"")), "{name} in {sql}");
    }
    assert!(sql.contains("-- ALTER TABLE \"request\" SET (autovacuum"), "a suggestion is a comment");
    // No statement scans rows while it blocks other sessions.
    for statement in spec.migration().statements() {
        assert!(!statement.contains(" CHECK (") || statement.contains("NOT VALID"), "{statement}");
        assert!(
            !statement.contains("INDEX \"")
                || statement.contains(" CONCURRENTLY ")
                || !statement.starts_with("CREATE"),
            "{statement}"
        );
    }
    let after = picture(&pool).await;
    spec.migration().apply(&pool).await.unwrap();
    assert_eq!(picture(&pool).await, after, "printed or applied is the same");
}

#[tokio::test]
async fn a_set_of_states_only_grows() {
    let (_db, pool) = database().await;
    legacy_table(&pool).await;
    let old = ClaimSpec::builder(Table::new("request").unwrap())
        .state("status", States::text(["new"], "complete").others(["legacy"]))
        .build()
        .unwrap();
    let new = full("request").build().unwrap();
    for spec in [&old, &new, &old, &new] {
        spec.migration().apply(&pool).await.unwrap();
    }
    for state in ["legacy", "in-progress", "error", "new", "complete"] {
        run(&pool, &format!("INSERT INTO request (status) VALUES ('{state}')")).await;
    }
    assert_eq!(refused(&pool, "INSERT INTO request (status) VALUES ('other')").await, "23514");
}

#[tokio::test]
async fn rows_that_contradict_are_named_by_their_constraint_and_block_nothing() {
    let (_db, pool) = database().await;
    legacy_table(&pool).await;
    run(&pool, "INSERT INTO request (status) VALUES ('odd')").await;
    let spec = full("request").build().unwrap();
    let error = spec.migration().apply(&pool).await.unwrap_err();
    assert!(
        matches!(&error, ClaimError::Constraint { constraint, .. } if &**constraint == "request_status_states"),
        "{error}"
    );
    run(&pool, "UPDATE request SET status = 'error'").await;
    spec.migration().apply(&pool).await.unwrap();
}

#[tokio::test]
async fn an_index_that_was_not_finished_is_made_again() {
    let (_db, pool) = database().await;
    run(&pool, "CREATE TABLE request (id bigint NOT NULL, status text NOT NULL, document text)").await;
    run(&pool, "INSERT INTO request VALUES (1, 'new'), (1, 'new')").await;
    let spec = full("request").build().unwrap();
    let error = spec.migration().apply(&pool).await.unwrap_err();
    assert!(
        matches!(&error, ClaimError::Duplicate { constraint, .. } if &**constraint == "request_id_key"),
        "{error}"
    );
    let left = indexes(&pool, "request").await;
    assert!(left.is_empty(), "a half-made unique index would refuse writes: {left:?}");

    // An invalid index, as a killed migration leaves it.
    try_run(&pool, "CREATE UNIQUE INDEX CONCURRENTLY request_id_key ON request (id)").await.unwrap_err();
    assert!(indexes(&pool, "request").await[0].contains("INVALID"));
    run(&pool, "DELETE FROM request").await;
    spec.migration().apply(&pool).await.unwrap();
    let made = indexes(&pool, "request").await;
    assert!(made.iter().all(|index| !index.contains("INVALID")), "{made:?}");
    assert!(made.iter().any(|index| index.contains("UNIQUE INDEX request_id_key")), "{made:?}");
}

/// A dropped future leaves no lock and no setting behind, and the next call continues.
#[tokio::test]
async fn a_migration_that_was_given_up_is_finished_by_the_next() {
    let (_db, pool) = database().await;
    legacy_table(&pool).await;
    run(&pool, "INSERT INTO request (document) SELECT 'd' FROM generate_series(1, 5000)").await;
    let spec = full("request").queue("queue_id").build().unwrap();
    for millis in [1, 5, 20, 60] {
        let _ = timeout(Duration::from_millis(millis), spec.migration().apply(&pool)).await;
    }
    spec.migration().within(LONG).apply(&pool).await.unwrap();
    assert!(indexes(&pool, "request").await.iter().all(|index| !index.contains("INVALID")));
    assert_eq!(text(&pool, "SHOW lock_timeout").await, "0");
}

#[tokio::test]
async fn it_ends_in_time_with_a_sentence() {
    let (db, pool) = database().await;
    legacy_table(&pool).await;
    let mut other = db.connect().await;
    let mut holder = other.begin().await.unwrap();
    run(&mut *holder, "LOCK TABLE request IN SHARE MODE").await;
    let spec = full("request").build().unwrap();
    let error = spec.migration().within(Duration::from_millis(1500)).apply(&pool).await.unwrap_err();
    assert!(error.to_string().contains("kept the table locked"), "{error}");
}

#[tokio::test]
async fn what_only_the_user_knows_is_asked_for() {
    let (_db, pool) = database().await;
    let spec = full("request").build().unwrap();
    let says = |error: ClaimError| match error {
        ClaimError::InvalidSpec(text) | ClaimError::Unsupported(text) => text,
        other => panic!("{other}"),
    };
    assert!(says(spec.migration().apply(&pool).await.unwrap_err()).contains("no table request"));
    run(&pool, "CREATE TABLE request (id bigint PRIMARY KEY, document text)").await;
    assert!(says(spec.migration().apply(&pool).await.unwrap_err()).contains("no column status"));
    run(
        &pool,
        "DROP TABLE request; CREATE TABLE request (id bigint, status text) PARTITION BY LIST (status)",
    )
    .await;
    assert!(says(spec.migration().apply(&pool).await.unwrap_err()).contains("partitioned"));
}

/// The pool's settings may be too strict for a migration, which then overrides them.
#[tokio::test]
async fn the_settings_of_the_pool_do_not_matter() {
    let (db, pool) = database().await;
    legacy_table(&pool).await;
    let name = text(&pool, "SELECT current_database()::text").await;
    let set = |setting: &str| format!("ALTER DATABASE {name} SET {setting}; ");
    let strict = [
        "default_transaction_isolation = 'serializable'",
        "standard_conforming_strings = off",
        "default_transaction_read_only = on",
    ];
    run(&pool, &strict.map(set).concat()).await;
    let strict = PgPoolOptions::new().max_connections(2).connect(db.url()).await.unwrap();
    full("request").queue("queue_id").build().unwrap().migration().apply(&strict).await.unwrap();
    assert_eq!(text(&strict, "SHOW transaction_read_only").await, "on", "the pool has its own settings");
}

/// Claims and inspections use the same function.
#[tokio::test]
async fn the_state_function_is_inlined_and_has_one_boundary() {
    let (_db, pool) = database().await;
    legacy_table(&pool).await;
    let spec = full("request").expire_on_read().build().unwrap();
    spec.migration().apply(&pool).await.unwrap();
    let name = spec.migration().state_function().unwrap();
    assert_eq!(name.to_string(), "request_claim_state");
    let call = format!("{}(status, lease_until)", name.quoted());
    run(
        &pool,
        "INSERT INTO request (id, status, lease_until) VALUES (1, 'new', NULL), (2, 'in-progress', now() + '1 h'), \
         (3, 'in-progress', clock_timestamp()), (4, 'complete', now() - interval '1 h')",
    )
    .await;
    run(&pool, &format!("CREATE VIEW api AS SELECT id, {call} AS state FROM request")).await;
    let states = "SELECT string_agg(state, ' ' ORDER BY id) FROM api";
    assert_eq!(text(&pool, states).await, "new in-progress new complete");
    let taken =
        format!("SELECT string_agg(id::text, ' ' ORDER BY id) FROM request t WHERE {call} IN ('new')");
    assert_eq!(text(&pool, &taken).await, "1 3");
    // The planner inlines the function, so it is not called for each row and its index can be used.
    let sql = format!(
        "EXPLAIN (VERBOSE, COSTS off) SELECT id FROM request t WHERE status IN ('new', 'in-progress') AND {call} IN ('new')"
    );
    let plan = texts(&pool, &sql).await.join("\n");
    assert!(plan.contains("CASE WHEN") && !plan.contains("claim_state"), "{plan}");
}

/// Without a state for claimed rows, the function returns NULL for a claimed row.
#[tokio::test]
async fn boolean_and_enum_columns_get_a_state_function_too() {
    let (_db, pool) = database().await;
    run(&pool, "CREATE TABLE item (id bigint PRIMARY KEY, processed boolean NOT NULL DEFAULT false)").await;
    let spec = ClaimSpec::builder(Table::new("item").unwrap())
        .state("processed", States::boolean())
        .lease_columns("owner", "epoch", "lease_until")
        .build()
        .unwrap();
    spec.migration().apply(&pool).await.unwrap();
    run(
        &pool,
        "INSERT INTO item (id, processed, lease_until) VALUES (1, false, NULL), (2, false, now() + interval '1 h'), \
         (3, false, now() - interval '1 s'), (4, true, now() + interval '1 h')",
    )
    .await;
    let states = "SELECT string_agg(coalesce(item_claim_state(processed, lease_until)::text, 'taken'), ' ' ORDER BY id) FROM item";
    assert_eq!(text(&pool, states).await, "false taken false true");

    run(&pool, "CREATE TYPE phase AS ENUM ('new', 'done')").await;
    run(&pool, "CREATE TABLE task (id bigint PRIMARY KEY, phase phase NOT NULL DEFAULT 'new')").await;
    let spec = ClaimSpec::builder(Table::new("task").unwrap())
        .state("phase", States::enumeration(Table::new("phase").unwrap(), ["new"], "done").taken("working"))
        .lease_columns("owner", "epoch", "lease_until")
        .build()
        .unwrap();
    spec.migration().apply(&pool).await.unwrap();
    spec.migration().apply(&pool).await.unwrap();
    run(&pool, "INSERT INTO task (id, phase, lease_until) VALUES (1, 'working', now() - interval '1 s')")
        .await;
    assert_eq!(text(&pool, "SELECT task_claim_state(phase, lease_until)::text FROM task").await, "new");
}

#[tokio::test]
async fn a_side_table_leaves_the_table_as_it_is() {
    let (_db, pool) = database().await;
    run(&pool, "CREATE TABLE item (id uuid PRIMARY KEY, processed boolean NOT NULL DEFAULT false)").await;
    let spec = ClaimSpec::builder(Table::new("item").unwrap())
        .id("id", IdType::Uuid)
        .state("processed", States::boolean())
        .side_table(Table::new("claims").unwrap())
        .build()
        .unwrap();
    for _ in 0..2 {
        spec.migration().apply(&pool).await.unwrap();
    }
    let columns = "SELECT string_agg(attname, ' ' ORDER BY attnum) FROM pg_attribute \
                   WHERE attrelid = '{}'::regclass AND attnum > 0";
    assert_eq!(text(&pool, &columns.replace("{}", "item")).await, "id processed");
    let side = "tab queue id owner epoch lease_until taken_at";
    assert_eq!(text(&pool, &columns.replace("{}", "claims")).await, side);
    assert_eq!(text(&pool, "SELECT nextval('claims_epoch')::text").await, "1");
    assert_eq!(spec.migration().state_function(), None);
}

#[tokio::test]
async fn a_sequence_of_epochs_begins_above_those_that_were() {
    let (_db, pool) = database().await;
    legacy_table(&pool).await;
    full("request").build().unwrap().migration().apply(&pool).await.unwrap();
    run(&pool, "INSERT INTO request (epoch) VALUES (41)").await;
    let spec = full("request")
        .epoch_sequence(Table::new("request_epochs").unwrap())
        .owner_sequence(Table::new("owners").unwrap())
        .build()
        .unwrap();
    spec.migration().apply(&pool).await.unwrap();
    assert_eq!(text(&pool, "SELECT nextval('request_epochs')::text").await, "42");
    assert_eq!(text(&pool, "SELECT nextval('owners')::text").await, "1");
}

/// Names are taken literally, and long names stay distinct.
#[tokio::test]
async fn no_name_leaves_its_quotes() {
    let (_db, pool) = database().await;
    run(&pool, "CREATE TABLE victim (id int)").await;
    let long = "x".repeat(63);
    for name in [
        r#"a"; DROP TABLE victim; --"#,
        "b'; DROP TABLE victim; --",
        "%I %s $leasehold$ \\",
        "line\nDROP TABLE victim;\n",
        long.as_str(),
    ] {
        let quoted = Table::new(name).unwrap().quoted();
        let (state, queue) = ("st'at\"e$leasehold$%I", "qu'e\"u\\e");
        let column = |name: &str| Table::new(name).unwrap().quoted();
        run(
            &pool,
            &format!(
                "CREATE TABLE {quoted} (id bigint PRIMARY KEY, {} text NOT NULL, {} text)",
                column(state),
                column(queue)
            ),
        )
        .await;
        let spec = ClaimSpec::builder(Table::new(name).unwrap())
            .state(state, States::text(["it's", "b\\'; DROP TABLE victim; --"], "$leasehold$").taken("%I"))
            .lease_columns("own\"er", "epoch", "lease until")
            .queue(queue)
            .build()
            .unwrap();
        for _ in 0..2 {
            spec.migration().apply(&pool).await.unwrap_or_else(|error| panic!("{name}: {error}"));
        }
        let function = spec.migration().state_function().unwrap();
        let made = format!("SELECT count(*)::text FROM pg_proc WHERE proname = $x${}$x$", function.name());
        assert_eq!(text(&pool, &made).await, "1");
        let sql = spec.migration().sql();
        let (_, end) = sql.split_once("-- Suggested").unwrap();
        assert!(end.lines().skip(1).all(|line| line.starts_with("-- ")), "{end}");
    }
    assert_eq!(text(&pool, "SELECT count(*)::text FROM victim").await, "0");
}

/// The table is in a separate schema that is not on the search path.
#[tokio::test]
async fn everything_is_made_in_the_schema_of_the_table() {
    let (_db, pool) = database().await;
    run(&pool, "CREATE SCHEMA work; CREATE TABLE work.job (id bigint PRIMARY KEY, status text NOT NULL)")
        .await;
    let spec = ClaimSpec::builder(Table::new("job").unwrap().in_schema("work").unwrap())
        .state("status", states())
        .lease_columns("owner", "epoch", "lease_until")
        .queue("queue")
        .attempts("attempts_left")
        .build()
        .unwrap();
    for _ in 0..2 {
        spec.migration().apply(&pool).await.unwrap();
    }
    let elsewhere = "SELECT count(*)::text FROM pg_class WHERE relnamespace = 'public'::regnamespace";
    assert_eq!(text(&pool, elsewhere).await, "0");
    assert_eq!(text(&pool, "SELECT work.job_claim_state('new', NULL)").await, "new");
}
