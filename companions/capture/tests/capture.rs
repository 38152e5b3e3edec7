//! Changes of other tables become claimable rows.

#![allow(clippy::unwrap_used)] // A failed `unwrap` fails the test.

#[path = "capture/consumer.rs"]
mod consumer;
#[path = "capture/cost.rs"]
mod cost;

use leasehold_capture::{Capture, CaptureBuilder, Source};
use leasehold_claim::sqlx::postgres::{PgConnectOptions, PgListener, PgPoolOptions};
use leasehold_claim::sqlx::{Connection as _, PgPool};
use leasehold_claim::{ClaimError, ClaimSpec, Finding, States, Table};
use test_bounds::within;
use test_servers::sql::{LONG, pool, refused, run, text, texts};
use test_servers::{Database, fresh_database};

fn table(name: &str) -> Table {
    Table::new(name).unwrap()
}

async fn database() -> (Database, PgPool) {
    let db = fresh_database().await;
    let pool = pool(db.url(), 20).await;
    (db, pool)
}

/// Fails unless one of `findings` has this kind and contains all `words`.
#[track_caller]
fn assert_finding(findings: &[Finding], kind: fn(String) -> Finding, words: &[&str]) {
    let is = |found: &&Finding| kind(found.message().to_owned()) == **found;
    let found =
        findings.iter().filter(is).any(|found| words.iter().all(|word| found.message().contains(word)));
    assert!(found, "no {:?} in {findings:#?}", kind(words.join(" .. ")));
}

async fn event_table(pool: &PgPool) {
    run(
        pool,
        "CREATE TABLE event (id bigserial PRIMARY KEY, status text NOT NULL DEFAULT 'new', kind text NOT NULL, \
         order_id bigint, op text, document jsonb)",
    )
    .await;
}

fn orders() -> Source {
    Source::new(table("orders")).copy("order_id", "id").constant("kind", "order").operation("op")
}

async fn made(builder: CaptureBuilder) -> (Database, PgPool, Capture) {
    let (db, pool) = database().await;
    event_table(&pool).await;
    run(&pool, "CREATE TABLE orders (id bigint PRIMARY KEY, text text)").await;
    let capture = builder.build().unwrap();
    capture.install(&pool).await.unwrap();
    (db, pool, capture)
}

const EVENTS: &str = "SELECT string_agg(kind || ' ' || op || ' ' || coalesce(order_id::text, '-'), ', ' ORDER BY id) FROM event";

#[tokio::test]
async fn a_change_by_plain_sql_is_recorded_as_one_row() {
    let (_db, pool, capture) = made(Capture::into(table("event")).source(orders())).await;
    assert!(capture.check(&pool).await.unwrap().is_empty());
    run(&pool, "INSERT INTO orders VALUES (1, 'a'), (2, 'b')").await;
    run(&pool, "UPDATE orders SET text = 'c' WHERE id = 1").await;
    run(&pool, "DELETE FROM orders WHERE id = 2").await;
    let expected = "order INSERT 1, order INSERT 2, order UPDATE 1, order DELETE 2";
    assert_eq!(text(&pool, EVENTS).await, expected);
    // A moved row is recorded for both groups.
    run(&pool, "UPDATE orders SET id = 3 WHERE id = 1").await;
    assert_eq!(text(&pool, EVENTS).await, format!("{expected}, order UPDATE 3, order UPDATE 1"));
    assert_eq!(text(&pool, "SELECT string_agg(DISTINCT status, '') FROM event").await, "new");
}

#[tokio::test]
async fn seventeen_tables_feed_one() {
    let (_db, pool) = database().await;
    event_table(&pool).await;
    let mut builder = Capture::into(table("event"));
    for n in 0..17 {
        run(&pool, &format!("CREATE TABLE source_{n} (id int, order_id int)")).await;
        builder = builder.source(
            Source::new(table(&format!("source_{n}")))
                .copy("order_id", "order_id")
                .constant("kind", &format!("s{n}"))
                .operation("op"),
        );
    }
    let capture = builder.build().unwrap();
    capture.install(&pool).await.unwrap();
    let mut tx = pool.begin().await.unwrap();
    for n in 0..17 {
        run(&mut *tx, &format!("INSERT INTO source_{n} VALUES (1, {n})")).await;
    }
    tx.commit().await.unwrap();
    assert_eq!(
        text(&pool, "SELECT count(DISTINCT (kind, order_id))::text || ' ' || count(*) FROM event").await,
        "17 17"
    );
    assert!(capture.check(&pool).await.unwrap().is_empty());
    capture.uninstall(&pool).await.unwrap();
    capture.uninstall(&pool).await.unwrap();
    run(&pool, "INSERT INTO source_3 VALUES (2, 2)").await;
    assert_eq!(text(&pool, "SELECT count(*)::text FROM event").await, "17");
    assert_eq!(text(&pool, "SELECT count(*)::text FROM pg_proc WHERE proname LIKE '%capture%'").await, "0");
    assert_eq!(capture.check(&pool).await.unwrap().len(), 17 * 3);
}

#[tokio::test]
async fn a_change_and_its_record_are_one_transaction() {
    let (_db, pool, _) = made(Capture::into(table("event")).source(orders())).await;
    let mut tx = pool.begin().await.unwrap();
    run(&mut *tx, "INSERT INTO orders VALUES (1)").await;
    assert_eq!(text(&mut *tx, "SELECT count(*)::text FROM event").await, "1");
    assert_eq!(
        text(&pool, "SELECT count(*)::text FROM event").await,
        "0",
        "nobody sees it before the commit"
    );
    let mut point = tx.begin().await.unwrap();
    run(&mut *point, "INSERT INTO orders VALUES (2)").await;
    point.rollback().await.unwrap();
    tx.rollback().await.unwrap();
    assert_eq!(text(&pool, "SELECT count(*)::text FROM event").await, "0", "no phantom");

    // A change that cannot be recorded fails.
    run(&pool, "INSERT INTO orders VALUES (1)").await;
    run(&pool, "ALTER TABLE event ADD CONSTRAINT small CHECK (order_id < 100)").await;
    assert_eq!(refused(&pool, "INSERT INTO orders VALUES (100)").await, "23514");
    assert_eq!(text(&pool, "SELECT count(*)::text FROM orders").await, "1");
}

/// TRUNCATE has a separate trigger, also on partitions.
#[tokio::test]
async fn a_truncate_is_recorded() {
    let (_db, pool, capture) = made(Capture::into(table("event")).source(orders())).await;
    run(&pool, "INSERT INTO orders VALUES (1), (2); TRUNCATE orders").await;
    assert_eq!(text(&pool, EVENTS).await, "order INSERT 1, order INSERT 2, order TRUNCATE -");
    run(&pool, "DROP TRIGGER event_capture_truncate_67f56cc9 ON orders").await;
    assert_finding(
        &capture.check(&pool).await.unwrap(),
        Finding::Error,
        &["orders", "TRUNCATE is not recorded"],
    );
    capture.install(&pool).await.unwrap();
    run(&pool, "DELETE FROM event; ALTER TABLE event ALTER order_id SET NOT NULL").await;
    assert_finding(&capture.check(&pool).await.unwrap(), Finding::Error, &["order_id", "truncated_as"]);
    assert_eq!(refused(&pool, "TRUNCATE orders").await, "23502", "nothing goes that is not recorded");
}

#[tokio::test]
async fn partitions_have_triggers_and_the_check_reports_a_new_one_without() {
    let (_db, pool) = database().await;
    event_table(&pool).await;
    run(
        &pool,
        "CREATE TABLE orders (id bigint, text text) PARTITION BY RANGE (id); \
         CREATE TABLE low PARTITION OF orders FOR VALUES FROM (0) TO (100)",
    )
    .await;
    let capture = Capture::into(table("event")).source(orders()).build().unwrap();
    for _ in 0..2 {
        capture.install(&pool).await.unwrap();
    }
    run(&pool, "INSERT INTO orders VALUES (1); INSERT INTO low VALUES (2); TRUNCATE low").await;
    assert_eq!(text(&pool, EVENTS).await, "order INSERT 1, order INSERT 2, order TRUNCATE -");
    assert!(capture.check(&pool).await.unwrap().is_empty());

    run(&pool, "CREATE TABLE high PARTITION OF orders FOR VALUES FROM (100) TO (200)").await;
    let found = capture.check(&pool).await.unwrap();
    assert_finding(&found, Finding::Error, &["high", "TRUNCATE is not recorded"]);
    assert_eq!(found.len(), 1, "rows of it are recorded: {found:#?}");
    capture.install(&pool).await.unwrap();
    assert!(capture.check(&pool).await.unwrap().is_empty());
    run(&pool, "ALTER TABLE low DISABLE TRIGGER ALL").await;
    assert_finding(&capture.check(&pool).await.unwrap(), Finding::Error, &["low", "disabled"]);
    capture.uninstall(&pool).await.unwrap();
    assert_eq!(text(&pool, "SELECT count(*)::text FROM pg_trigger WHERE tgname LIKE '%capture%'").await, "0");
}

/// Every cause that stops a trigger is found, and an installation fixes it.
#[tokio::test]
async fn every_lost_or_changed_trigger_is_found_and_repaired() {
    let (_db, pool, capture) = made(Capture::into(table("event")).source(orders())).await;
    for (harm, words) in [
        ("ALTER TABLE orders DISABLE TRIGGER event_capture_row_67f56cc9", ["disabled", "ENABLE TRIGGER"]),
        ("ALTER TABLE orders DISABLE TRIGGER ALL", ["event_capture_truncate_67f56cc9", "disabled"]),
        (
            "ALTER TABLE orders ENABLE REPLICA TRIGGER event_capture_row_67f56cc9",
            ["replicated changes only", "install"],
        ),
        ("DROP TRIGGER event_capture_row_67f56cc9 ON orders", ["not recorded", "install"]),
        (
            "CREATE OR REPLACE TRIGGER event_capture_row_67f56cc9 AFTER INSERT ON orders FOR EACH ROW EXECUTE FUNCTION event_capture_orders_57d0b96a()",
            ["not the one", "rows"],
        ),
        (
            "CREATE OR REPLACE TRIGGER event_capture_row_67f56cc9 AFTER INSERT OR UPDATE OR DELETE ON orders FOR EACH ROW WHEN (false) EXECUTE FUNCTION event_capture_orders_57d0b96a()",
            ["not the one", "rows"],
        ),
        (
            "CREATE OR REPLACE FUNCTION event_capture_orders_57d0b96a() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
            ["function", "something else"],
        ),
        ("DROP FUNCTION event_capture_orders_57d0b96a() CASCADE", ["function", "missing"]),
    ] {
        let harm = harm.replace("WHEN (false)", "WHEN (pg_trigger_depth() > 99)");
        run(&pool, &harm).await;
        assert_finding(&capture.check(&pool).await.unwrap(), Finding::Error, &words);
        capture.install(&pool).await.unwrap();
        assert!(capture.check(&pool).await.unwrap().is_empty(), "after {harm}");
        run(&pool, "DELETE FROM event; INSERT INTO orders VALUES (1); TRUNCATE orders").await;
        assert_eq!(text(&pool, EVENTS).await, "order INSERT 1, order TRUNCATE -", "after {harm}");
    }
    run(&pool, "CREATE TABLE child () INHERITS (orders)").await;
    assert_finding(&capture.check(&pool).await.unwrap(), Finding::Warning, &["child", "inherits"]);
}

/// The documented limit, and its workaround.
#[tokio::test]
async fn replica_sessions_record_only_if_configured() {
    let (_db, pool, capture) = made(Capture::into(table("event")).source(orders())).await;
    let as_replica = "SET LOCAL session_replication_role = replica";
    run(&pool, &format!("{as_replica}; INSERT INTO orders VALUES (1)")).await;
    assert_eq!(text(&pool, "SELECT count(*)::text FROM event").await, "0");
    let always = Capture::into(table("event")).source(orders()).always().build().unwrap();
    assert_finding(&always.check(&pool).await.unwrap(), Finding::Error, &["session_replication_role"]);
    always.install(&pool).await.unwrap();
    assert!(always.check(&pool).await.unwrap().is_empty());
    run(&pool, &format!("{as_replica}; INSERT INTO orders VALUES (2); TRUNCATE orders")).await;
    assert_eq!(text(&pool, EVENTS).await, "order INSERT 2, order TRUNCATE -");
    assert_finding(&capture.check(&pool).await.unwrap(), Finding::Warning, &["replicated changes too"]);
}

#[tokio::test]
async fn rows_before_and_after_are_recorded_where_it_is_asked_for() {
    let source = Source::new(table("orders")).constant("kind", "order").image("document").operation("op");
    let (_db, pool, capture) = made(Capture::into(table("event")).source(source)).await;
    run(
        &pool,
        "INSERT INTO orders VALUES (1, 'a'); UPDATE orders SET id = 2; DELETE FROM orders; TRUNCATE orders",
    )
    .await;
    let documents = texts(&pool, "SELECT (document - 'table')::text FROM event ORDER BY id").await;
    assert_eq!(
        documents,
        [
            r#"{"op": "INSERT", "new": {"id": 1, "text": "a"}}"#,
            r#"{"op": "UPDATE", "new": {"id": 2, "text": "a"}, "old": {"id": 1, "text": "a"}}"#,
            r#"{"op": "DELETE", "old": {"id": 2, "text": "a"}}"#,
            r#"{"op": "TRUNCATE"}"#,
        ]
    );
    assert_eq!(text(&pool, "SELECT DISTINCT document ->> 'table' FROM event").await, "orders");
    assert!(capture.check(&pool).await.unwrap().is_empty());
}

/// Notifications are off by default.
#[tokio::test]
async fn workers_are_woken_only_where_it_is_asked_for() {
    let (db, pool, _) = made(Capture::into(table("event")).source(orders())).await;
    let mut listener = PgListener::connect(db.url()).await.unwrap();
    listener.listen("it's").await.unwrap();
    run(&pool, "INSERT INTO orders VALUES (1); SELECT pg_notify('it''s', 'marker')").await;
    assert_eq!(within(LONG, "not ended", listener.recv()).await.unwrap().payload(), "marker");
    let waking = Capture::into(table("event")).source(orders()).notify("it's").build().unwrap();
    waking.install(&pool).await.unwrap();
    run(&pool, "INSERT INTO orders VALUES (2), (3)").await;
    assert_eq!(within(LONG, "not ended", listener.recv()).await.unwrap().payload(), "new in public");
}

/// The spec of the claimed table must omit its own trigger too.
#[tokio::test]
async fn a_target_that_wakes_workers_is_warned_of_unless_it_is_asked_for() {
    let (_db, pool, capture) = made(Capture::into(table("event")).source(orders())).await;
    let event = || {
        ClaimSpec::builder(table("event"))
            .state("status", States::text(["new"], "complete").taken("in-progress").failed("error"))
            .lease_columns("owner", "epoch", "until")
    };
    let (quiet, waking) = (event().notify_on_insert(false).build().unwrap(), event().build().unwrap());
    quiet.migration().apply(&pool).await.unwrap();
    assert!(capture.check(&pool).await.unwrap().is_empty());
    waking.migration().apply(&pool).await.unwrap();
    let found = capture.check(&pool).await.unwrap();
    assert_finding(&found, Finding::Warning, &["event_claim_notify", "notify_on_insert(false)"]);
    assert_eq!(found.len(), 1, "{found:#?}");
    capture.install(&pool).await.expect("a warning is no error");
    let asked = Capture::into(table("event")).source(orders()).notify(waking.channel()).build().unwrap();
    asked.install(&pool).await.unwrap();
    assert!(asked.check(&pool).await.unwrap().is_empty());
}

#[tokio::test]
async fn what_would_fail_the_writers_is_refused_before_it_is_installed() {
    let (_db, pool) = database().await;
    event_table(&pool).await;
    run(
        &pool,
        "CREATE TABLE orders (id bigint PRIMARY KEY, at timestamptz); CREATE VIEW looks AS TABLE orders",
    )
    .await;
    run(&pool, "CREATE TABLE strict (order_id bigint NOT NULL)").await;
    let says = async |target: &str, source: Source| {
        let capture = Capture::into(table(target)).source(source).build().unwrap();
        match capture.install(&pool).await.unwrap_err() {
            ClaimError::InvalidSpec(text) => text,
            other => panic!("{other}"),
        }
    };
    assert!(says("nowhere", orders()).await.contains("no table nowhere"));
    assert!(says("event", Source::new(table("none")).constant("kind", "x")).await.contains("no table none"));
    assert!(
        says("event", Source::new(table("looks")).constant("kind", "x")).await.contains("looks is no table")
    );
    assert!(says("event", orders().copy("nothing", "at")).await.contains("nothing"));
    assert!(says("event", Source::new(table("orders")).copy("order_id", "at")).await.contains("order_id"));
    assert!(says("event", Source::new(table("orders")).copy("order_id", "odd")).await.contains("odd"));
    assert!(
        says("strict", Source::new(table("orders")).copy("order_id", "id")).await.contains("truncated_as")
    );
    assert_eq!(text(&pool, "SELECT count(*)::text FROM pg_trigger WHERE NOT tgisinternal").await, "0");
    let fine = Source::new(table("orders")).copy("order_id", "id").truncated_as("order_id", "-1");
    Capture::into(table("strict")).source(fine).build().unwrap().install(&pool).await.unwrap();
    run(&pool, "INSERT INTO orders VALUES (5); TRUNCATE orders").await;
    assert_eq!(text(&pool, "SELECT string_agg(order_id::text, ' ') FROM strict").await, "5 -1");
}

#[test]
fn a_capture_that_cannot_be_meant_is_refused() {
    let says = |builder: CaptureBuilder| builder.build().unwrap_err().to_string();
    let into = || Capture::into(table("event"));
    assert!(says(into()).contains("at least one source"));
    assert!(
        says(into().source(Source::new(table("event")).constant("kind", "x"))).contains("its own changes")
    );
    assert!(says(into().source(orders()).source(orders())).contains("twice"));
    assert!(says(into().source(Source::new(table("orders")))).contains("nothing of orders"));
    assert!(says(into().source(orders().constant("kind", "y"))).contains("two values"));
    assert!(says(into().source(orders().truncated_as("q", "y"))).contains("only when"));
    assert!(says(into().source(orders().copy("", "x"))).contains("name"));
    assert!(says(into().source(orders().constant("q", "\0"))).contains("NUL"));
    assert!(says(into().source(orders()).notify("")).contains("channel"));
    assert!(says(into().source(orders()).security_definer()).contains("schema"));
}

/// Names and constants are taken literally everywhere.
#[tokio::test]
async fn no_name_and_no_constant_leaves_its_quotes() {
    let (_db, pool) = database().await;
    run(&pool, "CREATE TABLE victim (id int)").await;
    let long = "y".repeat(63);
    for odd in [
        r#"a"; DROP TABLE victim; --"#,
        "b'); DROP TABLE victim; --",
        "%I%s $leasehold$",
        "E'\\'; \n--",
        long.as_str(),
    ] {
        let (source, target) = (table(odd), table(&format!("{}t", &odd[1..])));
        let column = table(odd).quoted();
        run(&pool, &format!("CREATE TABLE {} ({column} text)", source.quoted())).await;
        run(&pool, &format!("CREATE TABLE {} (id bigserial, {column} text, value text)", target.quoted()))
            .await;
        let from = Source::new(source.clone()).copy(odd, odd).constant("value", odd);
        let capture = Capture::into(target.clone()).source(from).notify(odd).always().build().unwrap();
        for _ in 0..2 {
            capture.install(&pool).await.unwrap_or_else(|error| panic!("{odd}: {error}"));
            let found = capture.check(&pool).await.unwrap();
            assert!(found.is_empty(), "{odd}: {found:#?}");
        }
        run(&pool, &format!("INSERT INTO {} VALUES ('x'); TRUNCATE {0}", source.quoted())).await;
        let recorded = format!(
            "SELECT string_agg(coalesce({column}, '-') || value, '|' ORDER BY id) FROM {}",
            target.quoted()
        );
        assert_eq!(text(&pool, &recorded).await, format!("x{odd}|-{odd}"));
        capture.uninstall(&pool).await.unwrap();
    }
    assert_eq!(text(&pool, "SELECT count(*)::text FROM victim").await, "0");
}

/// A writer of a source has another search path, and fewer rights.
#[tokio::test]
async fn the_path_and_the_rights_of_the_writer_do_not_matter() {
    let (db, pool) = database().await;
    event_table(&pool).await;
    run(
        &pool,
        "CREATE TABLE orders (id bigint PRIMARY KEY); CREATE SCHEMA other; CREATE TABLE other.event (x int)",
    )
    .await;
    let plain = Capture::into(table("event")).source(orders()).build().unwrap();
    plain.install(&pool).await.unwrap();
    run(&pool, "SET LOCAL search_path = other; INSERT INTO public.orders VALUES (1)").await;
    assert_eq!(text(&pool, EVENTS).await, "order INSERT 1");

    let role = format!("writer_{}", db.name());
    run(&pool, &format!("CREATE ROLE {role}; GRANT INSERT ON orders TO {role}")).await;
    let options: PgConnectOptions = db.url().parse().unwrap();
    let writer = PgPoolOptions::new().connect_with(options.options([("role", &role)])).await.unwrap();
    assert_eq!(refused(&writer, "INSERT INTO orders VALUES (2)").await, "42501");
    let public = |name: &str| table(name).in_schema("public").unwrap();
    let source =
        Source::new(public("orders")).copy("order_id", "id").constant("kind", "order").operation("op");
    plain.uninstall(&pool).await.unwrap();
    let lent = Capture::into(public("event")).source(source).security_definer().build().unwrap();
    lent.install(&pool).await.unwrap();
    run(&writer, "INSERT INTO orders VALUES (2)").await;
    assert_eq!(text(&pool, EVENTS).await, "order INSERT 1, order INSERT 2");
    writer.close().await;
    run(&pool, &format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
}

/// Several processes install at once while rows are written. Writers are not blocked.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn several_install_at_once_in_use_and_the_printed_statements_do_the_same() {
    let (_db, pool, capture) = made(Capture::into(table("event")).source(orders())).await;
    let installs: Vec<_> = (0..4)
        .map(|_| {
            let (pool, capture) = (pool.clone(), capture.clone());
            tokio::spawn(async move { capture.install(&pool).await })
        })
        .collect();
    for n in 0..200 {
        run(&pool, &format!("INSERT INTO orders VALUES ({n})")).await;
    }
    for install in installs {
        within(LONG, "not ended", install).await.unwrap().unwrap();
    }
    assert_eq!(text(&pool, "SELECT count(*)::text FROM event").await, "200", "each change once");
    for statement in capture.uninstall_statements().iter().chain(&capture.statements()) {
        run(&pool, statement).await;
    }
    assert!(capture.check(&pool).await.unwrap().is_empty());
}

/// One schema per tenant, with equal names of targets and sources, and one common source.
#[tokio::test]
async fn two_targets_of_one_name_each_record_the_changes_of_a_common_source() {
    let (db, pool) = database().await;
    run(&pool, "CREATE TABLE common (id bigint PRIMARY KEY); CREATE SCHEMA t1; CREATE SCHEMA t2").await;
    let mut captures = Vec::new();
    for tenant in ["t1", "t2"] {
        let options: PgConnectOptions = db.url().parse().unwrap();
        // The first schema of the path is the same for both, and the tables are in a later one.
        let options = options.options([("search_path", format!("public,{tenant}"))]);
        let own = PgPoolOptions::new().connect_with(options).await.unwrap();
        run(&own, &format!(
            "CREATE TABLE {tenant}.event (id bigserial PRIMARY KEY, status text NOT NULL DEFAULT 'new', kind text NOT NULL, \
             order_id bigint, op text); CREATE TABLE {tenant}.orders (id bigint PRIMARY KEY)"
        )).await;
        let common =
            Source::new(table("common")).copy("order_id", "id").constant("kind", "common").operation("op");
        let capture = Capture::into(table("event")).source(orders()).source(common).build().unwrap();
        capture.install(&own).await.unwrap();
        captures.push((own, capture));
    }
    for (own, capture) in &captures {
        assert!(capture.check(own).await.unwrap().is_empty());
    }
    run(
        &pool,
        "INSERT INTO common VALUES (1); INSERT INTO t1.orders VALUES (2); INSERT INTO t2.orders VALUES (3)",
    )
    .await;
    let events = |tenant: &str| EVENTS.replace("FROM event", &format!("FROM {tenant}.event"));
    assert_eq!(text(&pool, &events("t1")).await, "common INSERT 1, order INSERT 2");
    assert_eq!(text(&pool, &events("t2")).await, "common INSERT 1, order INSERT 3");
    captures[1].1.uninstall(&captures[1].0).await.unwrap();
    run(&pool, "INSERT INTO common VALUES (4)").await;
    assert_eq!(text(&pool, &events("t1")).await, "common INSERT 1, order INSERT 2, common INSERT 4");
    assert!(captures[0].1.check(&captures[0].0).await.unwrap().is_empty());
}

/// Loads only data by COPY, as `pg_restore` does.
#[tokio::test]
async fn a_load_of_data_alone_fires_the_triggers_and_disabling_them_loads_right() {
    let (_db, pool, _) = made(Capture::into(table("event")).source(orders())).await;
    run(&pool, "INSERT INTO orders VALUES (1, 'a')").await;
    run(&pool, "CREATE TABLE dump AS TABLE event; CREATE TABLE dumped AS TABLE orders; DELETE FROM event; TRUNCATE orders; TRUNCATE event RESTART IDENTITY").await;
    let load = "INSERT INTO event TABLE dump; INSERT INTO orders TABLE dumped";
    assert_eq!(refused(&pool, load).await, "23505", "the ids of what is recorded again exist");
    run(
        &pool,
        &format!("ALTER TABLE orders DISABLE TRIGGER ALL; {load}; ALTER TABLE orders ENABLE TRIGGER ALL"),
    )
    .await;
    assert_eq!(text(&pool, EVENTS).await, "order INSERT 1");
}
