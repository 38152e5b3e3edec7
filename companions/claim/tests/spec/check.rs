//! Checks of a table against its spec, and their messages.

use crate::common::*;
use leasehold_claim::sqlx::PgPool;
use leasehold_claim::sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use leasehold_claim::{
    ClaimError, ClaimSpec, ClaimSpecBuilder, Finding, IdType, OrderType, Retention, Sql, States, Table,
};

async fn findings(pool: &PgPool, spec: ClaimSpecBuilder) -> Vec<Finding> {
    spec.build().unwrap().check(pool).await.unwrap()
}

fn lease(table: &str) -> ClaimSpecBuilder {
    ClaimSpec::builder(Table::new(table).unwrap()).state("status", states()).lease_columns(
        "owner",
        "epoch",
        "lease_until",
    )
}

/// Creates a table that fits the spec, with `rows` rows.
async fn migrated(pool: &PgPool, spec: ClaimSpecBuilder, rows: u32) -> ClaimSpec {
    legacy_table(pool).await;
    let spec = spec.build().unwrap();
    spec.migration().attempts(3).apply(pool).await.unwrap();
    let fill = format!("INSERT INTO request (document) SELECT 'd' FROM generate_series(1, {rows})");
    run(pool, &fill).await;
    spec
}

/// After a migration, the check finds nothing, with tables of any size and with or without statistics.
#[tokio::test]
async fn a_migrated_table_fits_at_any_size() {
    for rows in [0, 1, 5_000] {
        for builder in [
            full("request"),
            full("request").queue("queue_id"),
            full("request").expire_on_read(),
            full("request").limit("document", 5),
            full("request").queue("queue_id").limit("queue_id", 5),
            full("request").order_by_descending("id", OrderType::Int),
            full("request").epoch_sequence(Table::new("e").unwrap()).retention(Retention::DeleteOnSettle),
        ] {
            let (_db, pool) = database().await;
            let spec = migrated(&pool, builder, rows).await;
            for how in [
                "SELECT 1",
                "ANALYZE request",
                "UPDATE request SET status = 'complete' WHERE id % 50 > 0; ANALYZE request",
            ] {
                run(&pool, how).await;
                let found = spec.check(&pool).await.unwrap();
                assert!(found.is_empty(), "{rows} rows after {how}: {found:#?}");
            }
            spec.ensure(&pool).await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_missing_table_or_column_is_named() {
    let (_db, pool) = database().await;
    let found = findings(&pool, full("request")).await;
    assert_finding(&found, Finding::Error, &["no table request"]);
    assert_eq!(found.len(), 1);
    let error = full("request").build().unwrap().constraints(&pool).await.unwrap_err();
    assert!(matches!(error, ClaimError::InvalidSpec(_)), "{error}");

    run(&pool, "CREATE TABLE request (id bigint PRIMARY KEY)").await;
    let found = findings(&pool, full("request").order_by("prio", OrderType::Int)).await;
    assert_finding(
        &found,
        Finding::Error,
        &["no column status", "ADD COLUMN \"status\" text NOT NULL DEFAULT 'new'"],
    );
    assert_finding(&found, Finding::Error, &["no column owner", "migration"]);
    assert_finding(&found, Finding::Error, &["no column document", "add it"]);
    assert_finding(&found, Finding::Error, &["no column prio", "the order"]);
    let error = full("request").build().unwrap().ensure(&pool).await.unwrap_err().to_string();
    assert!(error.contains("no column status") && error.contains("no column owner"), "{error}");

    run(&pool, "CREATE VIEW looks AS SELECT * FROM request").await;
    assert_finding(&findings(&pool, lease("looks")).await, Finding::Error, &["a view"]);
}

#[tokio::test]
async fn types_that_do_not_fit_are_named_with_what_to_do() {
    let (_db, pool) = database().await;
    run(
        &pool,
        "CREATE TYPE phase AS ENUM ('new', 'complete'); CREATE TABLE request (id text PRIMARY KEY, \
         status phase NOT NULL, owner bigint, epoch integer NOT NULL, lease_until timestamp, ready timestamp, \
         prio text, attempts bigint, short varchar(5) NOT NULL, done timestamptz)",
    )
    .await;
    let found = findings(
        &pool,
        lease("request")
            .ready_at("ready")
            .order_by("prio", OrderType::Int)
            .attempts("attempts")
            .order_by("done", OrderType::Time),
    )
    .await;
    assert_finding(&found, Finding::Error, &["column id", "text", "bigint"]);
    assert_finding(&found, Finding::Error, &["status", "States::enumeration", "phase"]);
    assert_finding(&found, Finding::Error, &["owner", "bigint", "owner_sequence"]);
    assert_finding(&found, Finding::Error, &["epoch", "integer"]);
    for column in ["lease_until", "ready"] {
        let fix = format!("TYPE timestamptz USING \"{column}\" AT TIME ZONE");
        assert_finding(&found, Finding::Error, &["timestamp without time zone", column, &fix]);
    }
    assert_finding(&found, Finding::Error, &["prio", "order_by"]);
    assert_finding(&found, Finding::Error, &["attempts", "bigint"]);
    assert!(!has(&found, Finding::Error, &["column done"]), "{found:#?}");

    let enumeration = |states: &str| {
        States::enumeration(Table::new(states).unwrap(), ["new"], "complete").taken("in-progress")
    };
    let spec = ClaimSpec::builder(Table::new("request").unwrap())
        .id("id", IdType::Text)
        .state("status", enumeration("phase"));
    let found = findings(&pool, spec).await;
    assert_finding(
        &found,
        Finding::Error,
        &["cannot hold", "in-progress", "ALTER TYPE phase ADD VALUE 'in-progress'"],
    );

    let spec =
        ClaimSpec::builder(Table::new("request").unwrap()).id("id", IdType::Text).state("short", states());
    let found = findings(&pool, spec).await;
    assert_finding(&found, Finding::Error, &["room for 5", "in-progress"]);
    let spec = ClaimSpec::builder(Table::new("request").unwrap())
        .id("id", IdType::Text)
        .state("short", States::boolean());
    assert_finding(&findings(&pool, spec).await, Finding::Error, &["short", "States::text"]);
}

/// Owners are UUIDs or numbers of a sequence. A text column is reported like any other type.
#[tokio::test]
async fn an_owner_that_is_text_is_named() {
    let (_db, pool) = database().await;
    let spec = migrated(&pool, full("request"), 0).await;
    run(&pool, "ALTER TABLE request ALTER owner TYPE text").await;
    let found = spec.check(&pool).await.unwrap();
    assert_finding(&found, Finding::Error, &["column owner for the owner", "type text, not uuid"]);
    assert_eq!(found.len(), 1, "{found:#?}");
}

/// A default of zero attempts would make rows that no worker can take.
#[tokio::test]
async fn attempts_that_default_to_zero_are_reported() {
    let (_db, pool) = database().await;
    let spec = migrated(&pool, full("request"), 0).await;
    for (kind, default) in [("integer", "0"), ("smallint", "0"), ("integer", "3"), ("integer", "10")] {
        let sql = format!(
            "ALTER TABLE request ALTER attempts_left TYPE {kind}, ALTER attempts_left SET DEFAULT {default}"
        );
        run(&pool, &sql).await;
        let found = spec.check(&pool).await.unwrap();
        if default == "0" {
            let words = ["attempts_left", "0 by default", "exhausted", "SET DEFAULT 3"];
            assert_finding(&found, Finding::Warning, &words);
        }
        assert_eq!(found.len(), usize::from(default == "0"), "{kind} {default}: {found:#?}");
    }
}

/// Rows with NULL in a column of the spec are reported and counted.
#[tokio::test]
async fn null_states_are_reported_and_counted() {
    let (_db, pool) = database().await;
    run(
        &pool,
        "CREATE TABLE item (id bigint PRIMARY KEY, processed boolean, prio int, attempts int, q text); \
         INSERT INTO item VALUES (1, NULL), (2, NULL), (3, false)",
    )
    .await;
    let spec = || {
        ClaimSpec::builder(Table::new("item").unwrap())
            .state("processed", States::boolean())
            .order_by("prio", OrderType::Int)
            .attempts("attempts")
    };
    let found = findings(&pool, spec()).await;
    assert_finding(
        &found,
        Finding::Warning,
        &["processed", "may be NULL", "SET DEFAULT 'false'", "SET NOT NULL"],
    );
    assert_finding(&found, Finding::Warning, &["2 rows have no state", "UPDATE \"item\""]);
    assert_finding(&found, Finding::Warning, &["prio", "may be NULL"]);
    assert_finding(&found, Finding::Warning, &["attempts", "for ever"]);
    assert_finding(&findings(&pool, spec().queue("q")).await, Finding::Error, &["queue", "may be NULL"]);
    spec().build().unwrap().ensure(&pool).await.expect("warnings are no errors");
    run(
        &pool,
        "UPDATE item SET processed = false WHERE processed IS NULL; ALTER TABLE item ALTER processed SET DEFAULT false; \
         ALTER TABLE item ALTER processed SET NOT NULL",
    )
    .await;
    let found = findings(&pool, spec()).await;
    assert!(
        !has(&found, Finding::Warning, &["processed"]) && !has(&found, Finding::Warning, &["no state"]),
        "{found:#?}"
    );
}

#[tokio::test]
async fn rows_in_a_strange_state_or_taken_for_ever_are_counted() {
    let (_db, pool) = database().await;
    let spec = migrated(&pool, full("request"), 0).await;
    run(&pool, "ALTER TABLE request DROP CONSTRAINT request_status_states").await;
    run(&pool, "INSERT INTO request (status) VALUES ('odd'), ('odd'), ('odd'), ('in-progress')").await;
    let found = spec.check(&pool).await.unwrap();
    assert_finding(&found, Finding::Warning, &["3 rows are in a state", "others"]);
    assert_finding(&found, Finding::Warning, &["1 rows are taken without a lease"]);
    assert_eq!(found.len(), 2, "{found:#?}");
}

#[tokio::test]
async fn columns_that_claims_cannot_write_are_errors() {
    let (_db, pool) = database().await;
    run(
        &pool,
        "CREATE TABLE request (id bigint PRIMARY KEY, status text NOT NULL, owner uuid NOT NULL, \
         epoch bigint GENERATED ALWAYS AS (id) STORED, lease_until timestamptz)",
    )
    .await;
    let found = findings(&pool, lease("request")).await;
    assert_finding(&found, Finding::Error, &["owner", "DROP NOT NULL"]);
    assert_finding(&found, Finding::Error, &["epoch", "computed"]);
}

#[tokio::test]
async fn the_key_has_to_be_unique() {
    let (_db, pool) = database().await;
    run(&pool, "CREATE TABLE request (id bigint NOT NULL, status text NOT NULL, q text NOT NULL)").await;
    let plain = || {
        ClaimSpec::builder(Table::new("request").unwrap()).state("status", States::text(["new"], "complete"))
    };
    let key = &["nothing makes", "unique", "CREATE UNIQUE INDEX"];
    for useless in ["(id) WHERE id > 5", "(lower(q))"] {
        run(&pool, &format!("CREATE UNIQUE INDEX useless ON request {useless}")).await;
        assert_finding(&findings(&pool, plain()).await, Finding::Error, key);
        run(&pool, "DROP INDEX useless").await;
    }
    run(&pool, "CREATE UNIQUE INDEX wide ON request (id, status)").await;
    assert_finding(&findings(&pool, plain()).await, Finding::Error, &["identified by", "id, status"]);
    run(&pool, "DROP INDEX wide; CREATE UNIQUE INDEX pair ON request (id, q)").await;
    assert_finding(&findings(&pool, plain()).await, Finding::Error, &["identified by", "id, q"]);
    assert!(
        findings(&pool, plain().queue("q")).await.iter().all(|one| !one.message().contains("identified by"))
    );
    assert!(!has(&findings(&pool, plain().queue("q")).await, Finding::Error, key));
}

/// A CHECK that would make a claim, a settle or a sweep impossible.
#[tokio::test]
async fn a_check_that_lacks_a_state_is_tried_out() {
    let (_db, pool) = database().await;
    let spec = migrated(&pool, full("request"), 3).await;
    let with = async |check: &str| {
        run(&pool, &format!("ALTER TABLE request ADD CONSTRAINT mine CHECK ({check}) NOT VALID")).await;
        let found = spec.check(&pool).await.unwrap();
        run(&pool, "ALTER TABLE request DROP CONSTRAINT mine").await;
        found
    };
    let found = with("status IN ('new', 'in-progress', 'complete')").await;
    assert_finding(&found, Finding::Error, &["mine", "settled as failed", "state error"]);
    assert_eq!(found.len(), 1, "{found:#?}");
    let found = with("status <> 'in-progress'").await;
    assert_finding(&found, Finding::Error, &["mine", "be claimed", "in-progress"]);
    let found = with("attempts_left > 0").await;
    assert_finding(&found, Finding::Error, &["mine", "be claimed"]);
    // Claims satisfy these checks, because a row has an owner exactly while it is claimed.
    assert!(with("(status = 'in-progress') = (owner IS NOT NULL)").await.is_empty());
    assert!(with("status <> 'in-progress' OR lease_until IS NOT NULL").await.is_empty());
    assert!(with("status <> 'complete' OR settled_at IS NOT NULL").await.is_empty());
    // The trial uses the values of existing rows for the application's columns.
    assert!(with("status <> 'complete' OR document IS NOT NULL").await.is_empty());
    let found = with("status <> 'complete' OR document = 'ready'").await;
    assert_finding(&found, Finding::Warning, &["mine", "be settled", "complete"]);
}

#[tokio::test]
async fn a_unique_index_over_the_state_is_a_warning_where_a_row_could_not_move() {
    let (_db, pool) = database().await;
    let spec = migrated(&pool, full("request"), 0).await;
    let with = async |index: &str| {
        run(&pool, &format!("CREATE UNIQUE INDEX mine ON request {index}")).await;
        let found = spec.check(&pool).await.unwrap();
        run(&pool, "DROP INDEX mine").await;
        found
    };
    let found = with("(document) WHERE status = 'new'").await;
    assert_finding(&found, Finding::Warning, &["mine", "put back or swept", "from in-progress to new"]);
    assert_eq!(found.len(), 1, "{found:#?}");
    let found = with("(document) WHERE status = 'in-progress'").await;
    assert_finding(&found, Finding::Error, &["mine", "be claimed"]);
    let found = with("(document, status)").await;
    assert_finding(&found, Finding::Warning, &["mine", "be settled"]);
    assert!(with("(document) WHERE status IN ('new', 'in-progress')").await.is_empty());
    assert!(with("(document) WHERE document <> ''").await.is_empty());
}

/// If all rows are claimable, any index suffices, and the server might prefer another one.
#[tokio::test]
async fn a_table_without_history_misleads_nobody() {
    for rows in [0, 1, 50] {
        for good in ["(status, id)", "(id) WHERE status = 'new'", "(id, document) WHERE status = 'new'"] {
            let (_db, pool) = database().await;
            legacy_table(&pool).await;
            run(&pool, &format!("INSERT INTO request (document) SELECT 'd' FROM generate_series(1, {rows})"))
                .await;
            let spec = ClaimSpec::builder(Table::new("request").unwrap())
                .state("status", States::text(["new"], "complete"));
            let spec = spec.build().unwrap();
            assert_finding(&spec.check(&pool).await.unwrap(), Finding::Warning, &["no index"]);
            run(&pool, &format!("CREATE INDEX mine ON request {good}; ANALYZE request")).await;
            let found = spec.check(&pool).await.unwrap();
            assert!(found.is_empty(), "{rows} rows with {good}: {found:#?}");
        }
    }
}

#[tokio::test]
async fn each_index_of_a_limit_is_asked_for() {
    let (_db, pool) = database().await;
    let spec = migrated(&pool, full("request").limit("document", 5), 10).await;
    for (name, missing) in
        [("limit", ["in their order", "document"]), ("at_work", ["taken rows", "document"])]
    {
        let sql = format!(
            "DO $$ BEGIN EXECUTE (SELECT 'DROP INDEX ' || indexrelid::regclass FROM pg_index \
             WHERE indexrelid::regclass::text LIKE '%claim_{name}%'); END $$"
        );
        run(&pool, &sql).await;
        assert_finding(&spec.check(&pool).await.unwrap(), Finding::Warning, &missing);
        spec.migration().attempts(3).apply(&pool).await.unwrap();
        assert!(spec.check(&pool).await.unwrap().is_empty());
    }
    let found = findings(&pool, full("request").limit("tenant", 5)).await;
    assert_finding(&found, Finding::Error, &["no column tenant", "the limit"]);
}

/// The check uses the planner, and the result does not depend on the size of the table.
#[tokio::test]
async fn an_index_that_is_missing_or_useless_is_a_warning_at_any_size() {
    for rows in [0, 3, 20_000] {
        let (_db, pool) = database().await;
        let spec = migrated(&pool, full("request").order_by_descending("epoch", OrderType::Int), rows).await;
        run(&pool, "UPDATE request SET status = 'complete' WHERE id % 100 > 0; ANALYZE request").await;
        assert!(spec.check(&pool).await.unwrap().is_empty());
        let pick = "SELECT indexrelid::regclass::text FROM pg_index WHERE indrelid = 'request'::regclass \
                    AND indexrelid::regclass::text LIKE '%claim_pick%'";
        let name = text(&pool, pick).await;
        run(&pool, &format!("DROP INDEX {name}")).await;
        for useless in [
            None,
            Some("(epoch DESC, id)"),
            Some("(document) WHERE status = 'new'"),
            Some("(epoch DESC, id) WHERE status = 'complete'"),
            Some("(epoch DESC, id) WHERE status <> 'odd'"),
        ] {
            if let Some(definition) = useless {
                run(&pool, &format!("CREATE INDEX mine ON request {definition}")).await;
            }
            let found = spec.check(&pool).await.unwrap();
            assert_finding(&found, Finding::Warning, &["no index", "run the migration"]);
            run(&pool, "DROP INDEX IF EXISTS mine").await;
        }
        for good in [
            "(epoch DESC, id) WHERE status = 'new'",
            "(epoch DESC, id) WHERE status IN ('new', 'error')",
            "(status, epoch DESC, id)",
            "(epoch DESC) WHERE status = 'new'",
        ] {
            run(&pool, &format!("CREATE INDEX mine ON request {good}")).await;
            let found = spec.check(&pool).await.unwrap();
            assert!(found.is_empty(), "{rows} rows with {good}: {found:#?}");
            run(&pool, "DROP INDEX mine").await;
        }
    }
}

#[tokio::test]
async fn what_belongs_to_the_spec_has_to_be_there() {
    let (_db, pool) = database().await;
    legacy_table(&pool).await;
    let plain = || {
        ClaimSpec::builder(Table::new("request").unwrap()).state("status", States::text(["new"], "complete"))
    };
    let side = || plain().side_table(Table::new("claims").unwrap());
    assert_finding(&findings(&pool, side()).await, Finding::Error, &["no side table claims"]);
    assert_finding(&findings(&pool, side()).await, Finding::Error, &["no sequence claims_epoch"]);
    side().build().unwrap().migration().apply(&pool).await.unwrap();
    assert!(findings(&pool, side()).await.is_empty());
    let numbered = side().owner_sequence(Table::new("owners").unwrap());
    let found = findings(&pool, numbered).await;
    assert_finding(&found, Finding::Error, &["no sequence owners"]);
    assert_finding(&found, Finding::Error, &["column owner of side table claims", "uuid", "bigint"]);

    let read = || lease("request").expire_on_read();
    read().build().unwrap().migration().apply(&pool).await.unwrap();
    assert!(findings(&pool, read()).await.is_empty());
    run(&pool, "DROP FUNCTION request_claim_state").await;
    assert_finding(&findings(&pool, read()).await, Finding::Error, &["function", "migration"]);
    assert!(findings(&pool, lease("request")).await.is_empty(), "who does not use it does not need it");
    let filtered = plain().filter(Sql::trusted("t.nonsense > 1"));
    assert_finding(&findings(&pool, filtered).await, Finding::Error, &["refused", "nonsense", "filter"]);
}

#[tokio::test]
async fn privileges_of_the_role_are_looked_at() {
    let (db, pool) = database().await;
    let spec = migrated(
        &pool,
        full("request").epoch_sequence(Table::new("e").unwrap()).retention(Retention::DeleteOnSettle),
        1,
    )
    .await;
    let role = format!("worker_{}", db.name());
    run(&pool, &format!("CREATE ROLE {role}; GRANT SELECT ON request TO {role}")).await;
    let options: PgConnectOptions = db.url().parse().unwrap();
    let as_worker = PgPoolOptions::new().connect_with(options.options([("role", &role)])).await.unwrap();
    let found = spec.check(&as_worker).await.unwrap();
    assert_finding(&found, Finding::Error, &["may not UPDATE", "\"status\"", "GRANT UPDATE"]);
    assert_finding(&found, Finding::Error, &["may not DELETE"]);
    assert_finding(&found, Finding::Error, &["sequence e", "GRANT USAGE"]);
    run(&pool, &format!("GRANT UPDATE, DELETE ON request TO {role}; GRANT USAGE ON SEQUENCE e TO {role}"))
        .await;
    let found = spec.check(&as_worker).await.unwrap();
    assert!(found.is_empty(), "{found:#?}");
    run(&pool, "ALTER TABLE request ENABLE ROW LEVEL SECURITY").await;
    assert_finding(&spec.check(&as_worker).await.unwrap(), Finding::Warning, &["row level security"]);
    as_worker.close().await;
    run(&pool, &format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
}

#[tokio::test]
async fn tables_that_lose_rows_are_warned_of() {
    let (_db, pool) = database().await;
    run(&pool, "CREATE UNLOGGED TABLE request (id bigint PRIMARY KEY, status text NOT NULL)").await;
    run(&pool, "CREATE TABLE child () INHERITS (request)").await;
    let spec =
        ClaimSpec::builder(Table::new("request").unwrap()).state("status", States::text(["new"], "complete"));
    let found = findings(&pool, spec).await;
    assert_finding(&found, Finding::Warning, &["unlogged"]);
    assert_finding(&found, Finding::Warning, &["inherit"]);
}

/// The listing names the table's constraints and indexes.
#[tokio::test]
async fn constraints_and_indexes_are_listed() {
    let (_db, pool) = database().await;
    let spec = migrated(&pool, full("request").queue("queue_id"), 0).await;
    run(&pool, "CREATE TABLE other (id bigint PRIMARY KEY); ALTER TABLE request ADD CONSTRAINT ref FOREIGN KEY (id) REFERENCES other NOT VALID")
        .await;
    let listed = spec.constraints(&pool).await.unwrap();
    assert!(listed["request_status_states"].starts_with("CHECK ("), "{listed:#?}");
    assert!(listed["request_queue_id_id_key"].starts_with("PRIMARY KEY (queue_id, id)"), "{listed:#?}");
    assert!(listed["ref"].starts_with("FOREIGN KEY") && listed["ref"].ends_with(" NOT VALID"), "{listed:#?}");
    let picks = listed.values().filter(|one| one.starts_with("CREATE INDEX") && one.contains("'new'"));
    assert!(picks.count() >= 2, "{listed:#?}");
}

/// A check changes nothing, and works with the strict settings of a pool.
#[tokio::test]
async fn looking_changes_nothing_and_leaves_no_connection_behind() {
    let (db, pool) = database().await;
    let spec = migrated(&pool, full("request"), 10).await;
    let name = text(&pool, "SELECT current_database()::text").await;
    run(&pool, &format!("ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'; ALTER DATABASE {name} SET default_transaction_read_only = on"))
        .await;
    let strict = PgPoolOptions::new().max_connections(1).connect(db.url()).await.unwrap();
    for _ in 0..3 {
        assert!(spec.check(&strict).await.unwrap().is_empty());
    }
    for millis in [0, 1, 3, 9] {
        let _ = tokio::time::timeout(std::time::Duration::from_millis(millis), spec.check(&strict)).await;
    }
    assert_eq!(text(&strict, "SHOW enable_seqscan").await, "on");
    assert_eq!(text(&strict, "SELECT (pg_current_xact_id_if_assigned() IS NULL)::text").await, "true");
}
