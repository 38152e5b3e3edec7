//! The trigger that announces inserted rows, and its detection by listeners.
use crate::common::*;
use leasehold_claim::sqlx::postgres::{PgConnectOptions, PgListener, PgPoolOptions};
use leasehold_claim::sqlx::{Connection as _, PgPool};
use leasehold_claim::{
    ClaimSpec, ClaimSpecBuilder, ClaimStore as _, Finding, Outcome, PgClaims, States, Table, Take,
};
use test_bounds::within;
use test_servers::{Cluster, PgBouncer, PgBouncerOptions};

const TRIGGERS: &str = "SELECT count(*)::text FROM pg_trigger WHERE NOT tgisinternal";
const FUNCTIONS: &str = "SELECT count(*)::text FROM pg_proc WHERE prorettype = 'trigger'::regtype \
                         AND pronamespace = 'public'::regnamespace";
/// Query of the trigger and its function, with the ids that change if they are created again.
const MADE: &str = "SELECT t.oid || ' ' || t.xmin || ' ' || p.oid || ' ' || p.xmin FROM pg_trigger t \
                    JOIN pg_proc p ON p.oid = tgfoid WHERE NOT tgisinternal";

fn request() -> ClaimSpecBuilder {
    full("request").max_attempts(3)
}

async fn migrated(pool: &PgPool, spec: ClaimSpecBuilder) -> ClaimSpec {
    legacy_table(pool).await;
    let spec = spec.build().unwrap();
    spec.migration().apply(pool).await.unwrap();
    spec
}

/// Returns a listener on the channel of `spec`.
async fn hearer(url: &str, spec: &ClaimSpec) -> PgListener {
    let mut hearer = PgListener::connect(url).await.unwrap();
    hearer.listen(spec.channel()).await.unwrap();
    hearer
}

async fn heard(hearer: &mut PgListener) -> String {
    within(LONG, "not ended", hearer.recv()).await.unwrap().payload().to_owned()
}

async fn mark(pool: &PgPool, spec: &ClaimSpec) {
    run(pool, &format!("SELECT pg_notify('{}', 'marker')", spec.channel())).await;
}

async fn knows(claims: &PgClaims) -> bool {
    within(LONG, "not ended", claims.listen()).await.unwrap().announces()
}

/// Each transaction that inserts rows is announced once, with its commit. Other changes are not announced.
#[tokio::test]
async fn each_inserting_transaction_is_announced_once() {
    let (db, pool) = database().await;
    let spec = migrated(&pool, request()).await;
    let mut hearer = hearer(db.url(), &spec).await;
    let mut psql = db.connect().await;
    let mut transaction = psql.begin().await.unwrap();
    run(&mut *transaction, "INSERT INTO request (document) VALUES ('lost')").await;
    transaction.rollback().await.unwrap();
    mark(&pool, &spec).await;
    assert_eq!(heard(&mut hearer).await, "marker", "nothing of what was rolled back");

    let mut transaction = psql.begin().await.unwrap();
    for _ in 0..3 {
        run(&mut *transaction, "INSERT INTO request (document) SELECT 'd' FROM generate_series(1, 100)")
            .await;
    }
    PgClaims::new(pool.clone(), spec.clone()).notify(&mut transaction).await.unwrap();
    transaction.commit().await.unwrap();
    mark(&pool, &spec).await;
    assert_eq!(heard(&mut hearer).await, "new in public");
    assert_eq!(heard(&mut hearer).await, "marker", "no more than one");

    let claims = PgClaims::new(pool.clone(), spec.clone());
    let taken = claims.take(&Take::up_to(1)).await.unwrap();
    claims.settle_one(&taken.claims[0].claim, Outcome::Done).await.unwrap();
    run(&pool, "UPDATE request SET document = 'x'; DELETE FROM request WHERE id > 200").await;
    mark(&pool, &spec).await;
    assert_eq!(
        heard(&mut hearer).await,
        "marker",
        "takes, ends, updates and deletes are none of its business"
    );
}

#[tokio::test]
async fn there_is_none_where_it_is_not_wanted_or_nobody_would_listen() {
    let (db, pool) = database().await;
    let spec = migrated(&pool, request().notify_on_insert(false)).await;
    run(&pool, "CREATE TABLE item (id bigint PRIMARY KEY, processed boolean NOT NULL DEFAULT false)").await;
    let held = ClaimSpec::builder(Table::new("item").unwrap()).state("processed", States::boolean());
    let held = held.build().unwrap();
    held.migration().apply(&pool).await.unwrap();
    assert_eq!((text(&pool, TRIGGERS).await, text(&pool, FUNCTIONS).await), ("0".into(), "0".into()));
    for spec in [&spec, &held] {
        let found = spec.check(&pool).await.unwrap();
        assert!(found.is_empty(), "{found:#?}");
    }
    let mut hearer = hearer(db.url(), &spec).await;
    assert!(!knows(&PgClaims::new(pool.clone(), spec.clone())).await);
    mark(&pool, &spec).await;
    assert_eq!(heard(&mut hearer).await, "marker", "without the trigger there is nothing to prove");

    // An existing trigger stays, because other specs might want it.
    request().build().unwrap().migration().apply(&pool).await.unwrap();
    spec.migration().apply(&pool).await.unwrap();
    assert_eq!(text(&pool, TRIGGERS).await, "1");
}

/// The trigger belongs to the table's owner, and a second migration does nothing. A disabled trigger stays disabled.
#[tokio::test]
async fn it_belongs_to_the_owner_of_the_table_and_is_made_once() {
    let (db, pool) = database().await;
    legacy_table(&pool).await;
    let owner = format!("Owner {}", db.name());
    run(
        &pool,
        &format!(
            "CREATE ROLE \"{owner}\"; GRANT ALL ON SCHEMA public TO \"{owner}\"; \
             ALTER TABLE request OWNER TO \"{owner}\""
        ),
    )
    .await;
    let spec = request().build().unwrap();
    spec.migration().apply(&pool).await.unwrap();
    let owners = "SELECT string_agg(pg_get_userbyid(proowner), ' ') FROM pg_proc WHERE prorettype = 'trigger'::regtype \
                  AND pronamespace = 'public'::regnamespace";
    assert_eq!(text(&pool, owners).await, owner);
    let comments = "SELECT count(*)::text FROM pg_description WHERE description LIKE '%notify_on_insert%'";
    assert_eq!(text(&pool, comments).await, "2");
    let made = text(&pool, MADE).await;
    let options: PgConnectOptions = db.url().parse().unwrap();
    let as_owner = options.options([("role", owner.as_str())]);
    let as_owner = PgPoolOptions::new().connect_with(as_owner).await.unwrap();
    run(&pool, "ALTER TABLE request DISABLE TRIGGER USER").await;
    let disabled = text(&pool, MADE).await;
    assert_ne!(disabled, made);
    spec.migration().apply(&as_owner).await.unwrap();
    assert_eq!(text(&pool, MADE).await, disabled);
    // The migration restores a changed function.
    let function = text(&pool, "SELECT tgfoid::regproc::text FROM pg_trigger WHERE NOT tgisinternal").await;
    let how =
        format!("SELECT prosecdef || ' ' || proconfig::text FROM pg_proc WHERE oid = '{function}'::regproc");
    for change in ["SECURITY DEFINER", "SET search_path = public"] {
        run(&pool, &format!("ALTER FUNCTION {function}() {change}")).await;
        spec.migration().apply(&as_owner).await.unwrap();
        assert_eq!(text(&pool, &how).await, "false {search_path=pg_catalog}", "{change}");
    }
    // By the owner as by a superuser.
    // By the owner as by a superuser.
    run(&pool, &format!("DROP FUNCTION {function} CASCADE")).await;
    spec.migration().apply(&as_owner).await.unwrap();
    assert_eq!(text(&pool, owners).await, owner);
    as_owner.close().await;
    run(&pool, &format!("DROP OWNED BY \"{owner}\" CASCADE; DROP ROLE \"{owner}\"")).await;
}

/// A role that may insert needs no right on the function, and no other role can replace the server's `pg_notify` in it.
#[tokio::test]
async fn whoever_may_insert_announces_and_nobody_gets_in_between() {
    let (db, pool) = database().await;
    let spec = migrated(&pool, request()).await;
    let mut hearer = hearer(db.url(), &spec).await;
    let role = format!("writer_{}", db.name());
    let function = text(&pool, "SELECT tgfoid::regproc::text FROM pg_trigger WHERE NOT tgisinternal").await;
    run(
        &pool,
        &format!(
            "CREATE ROLE {role}; GRANT INSERT ON request TO {role}; GRANT USAGE ON SEQUENCE request_id_seq TO {role}; \
             REVOKE ALL ON FUNCTION {function}() FROM PUBLIC; \
             CREATE FUNCTION public.pg_notify(text, text) RETURNS void LANGUAGE plpgsql AS \
             'BEGIN RAISE EXCEPTION ''not this one''; END'"
        ),
    )
    .await;
    assert_eq!(
        text(&pool, &format!("SELECT has_function_privilege('{role}', '{function}()', 'EXECUTE')::text"))
            .await,
        "false"
    );
    let mut writer = db.connect().await;
    run(&mut writer, &format!("SET ROLE {role}; SET search_path = public, pg_catalog")).await;
    assert_eq!(refused(&mut writer, "SELECT pg_notify('a', 'b')").await, "P0001", "it shadows the server's");
    run(&mut writer, "INSERT INTO request (document) VALUES ('d')").await;
    assert_eq!(heard(&mut hearer).await, "new in public");
    writer.close().await.unwrap();
    run(&pool, &format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
}

/// Two specs of one table use two channels.
#[tokio::test]
async fn each_channel_has_its_trigger() {
    let (db, pool) = database().await;
    let one = migrated(&pool, request()).await;
    let two = request().channel("it's\\").build().unwrap();
    two.migration().apply(&pool).await.unwrap();
    one.migration().apply(&pool).await.unwrap();
    let (mut first, mut second) = (hearer(db.url(), &one).await, hearer(db.url(), &two).await);
    run(&pool, "INSERT INTO request (document) VALUES ('d')").await;
    assert_eq!([heard(&mut first).await, heard(&mut second).await], ["new in public"; 2]);
    for spec in [one, two] {
        assert!(spec.check(&pool).await.unwrap().is_empty());
        assert!(knows(&PgClaims::new(pool.clone(), spec)).await);
    }
}

#[tokio::test]
async fn a_table_that_announces_nothing_is_warned_of() {
    let (db, pool) = database().await;
    let spec = migrated(&pool, request()).await;
    let only = async |words: &[&str]| {
        let found = spec.check(&pool).await.unwrap();
        assert_finding(&found, Finding::Warning, words);
        assert_eq!(found.len(), 1, "{found:#?}");
        spec.ensure(&pool).await.expect("a warning is no error");
        found[0].message().to_owned()
    };
    let fix = |message: String| message.split_once("ALTER ").map(|(_, fix)| format!("ALTER {fix}")).unwrap();
    for how in ["DISABLE TRIGGER USER", "ENABLE REPLICA TRIGGER"] {
        let name = text(&pool, "SELECT tgname::text FROM pg_trigger WHERE NOT tgisinternal").await;
        let name = if how.contains("USER") { String::new() } else { name };
        run(&pool, &format!("ALTER TABLE request {how} {name}")).await;
        let said = only(&["is disabled", "ENABLE TRIGGER", "notify_on_insert(false)"]).await;
        run(&pool, fix(said).split(", or").next().unwrap()).await;
        assert!(spec.check(&pool).await.unwrap().is_empty());
    }
    let role = format!("other_{}", db.name());
    let function = text(&pool, "SELECT tgfoid::regproc::text FROM pg_trigger WHERE NOT tgisinternal").await;
    let gone = format!("CREATE ROLE {role}; ALTER FUNCTION {function}() OWNER TO {role}");
    run(&pool, &gone).await;
    let said = only(&["rights of whoever inserts", "OWNER TO"]).await;
    run(&pool, &fix(said)).await;
    assert!(spec.check(&pool).await.unwrap().is_empty());
    run(&pool, &format!("ALTER FUNCTION {function}() OWNER TO {role}")).await;
    spec.migration().apply(&pool).await.unwrap();
    assert!(spec.check(&pool).await.unwrap().is_empty(), "the migration mends it too");

    run(&pool, &format!("CREATE OR REPLACE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog AS 'BEGIN RETURN NULL; END'"))
        .await;
    only(&["no trigger announces", "migration", "notify_on_insert(false)"]).await;
    spec.migration().apply(&pool).await.unwrap();
    assert!(spec.check(&pool).await.unwrap().is_empty());
    let name = text(&pool, "SELECT tgname::text FROM pg_trigger WHERE NOT tgisinternal").await;
    for other in
        ["AFTER UPDATE ON request", "AFTER INSERT ON request WHEN (false)", "BEFORE INSERT ON request"]
    {
        run(
            &pool,
            &format!(
                "DROP TRIGGER {name} ON request; CREATE TRIGGER {name} {other} EXECUTE FUNCTION {function}()"
            ),
        )
        .await;
        only(&["no trigger announces"]).await;
    }
    spec.migration().apply(&pool).await.unwrap();
    assert!(spec.check(&pool).await.unwrap().is_empty());
    run(&pool, &format!("DROP FUNCTION {function} CASCADE")).await;
    only(&["no trigger announces"]).await;
    run(&pool, &format!("DROP ROLE {role}")).await;
}

/// With the trigger, a listener expects announcements from the start. Without it, only after the first one.
#[tokio::test]
async fn a_listener_knows_from_the_start_that_inserts_are_announced() {
    let (_db, pool) = database().await;
    let spec = migrated(&pool, request()).await;
    let claims = PgClaims::new(pool.clone(), spec.clone());
    assert!(knows(&claims).await);
    run(&pool, "ALTER TABLE request DISABLE TRIGGER USER").await;
    assert!(!knows(&claims).await, "disabled");
    run(&pool, "ALTER TABLE request ENABLE TRIGGER USER").await;
    assert!(knows(&claims).await);
    let function = text(&pool, "SELECT tgfoid::regproc::text FROM pg_trigger WHERE NOT tgisinternal").await;
    run(&pool, &format!("DROP FUNCTION {function} CASCADE")).await;
    let mut wake = claims.listen().await.unwrap();
    assert!(!wake.announces(), "there is none");
    claims.notify(&mut pool.acquire().await.unwrap()).await.unwrap();
    within(LONG, "not ended", wake.woken()).await.unwrap();
    assert!(wake.announces());
}

/// The test notification of a listener neither wakes other listeners nor counts as an announcement for them.
#[tokio::test]
async fn a_listeners_own_notification_does_not_count_for_others() {
    let (db, pool) = database().await;
    let spec = migrated(&pool, request()).await;
    let other = request().notify_on_insert(false).build().unwrap();
    let mut wake = PgClaims::new(pool.clone(), other).listen().await.unwrap();
    let mut hearer = hearer(db.url(), &spec).await;
    assert!(knows(&PgClaims::new(pool.clone(), spec.clone())).await);
    assert!(heard(&mut hearer).await.starts_with("leasehold echo "), "others were told");
    run(&pool, &format!("SELECT pg_notify('{}', 'returned')", spec.channel())).await;
    within(LONG, "not ended", wake.woken()).await.unwrap();
    assert!(!wake.announces());
    run(&pool, "INSERT INTO request (document) VALUES ('d')").await;
    within(LONG, "not ended", wake.woken()).await.unwrap();
    assert!(wake.announces(), "the second time it was woken it was for the row");
}

/// Behind an undeclared pooler in transaction mode, `LISTEN` succeeds, but the notifications reach other clients.
#[tokio::test(flavor = "multi_thread")]
async fn a_listener_that_misses_its_own_notification_expects_none() {
    let db = Cluster::shared().fresh_database().await;
    let pool = PgPoolOptions::new().connect(db.url()).await.unwrap();
    let spec = migrated(&pool, request()).await;
    let mut hearer = hearer(db.url(), &spec).await;
    let bouncer = PgBouncer::start(Cluster::shared(), &PgBouncerOptions::new().pool_size(1));
    // The pooler refuses this option by default.
    let options = bouncer.url(db.name()).parse::<PgConnectOptions>().unwrap().extra_float_digits(None);
    let through = PgPoolOptions::new().connect_with(options).await.unwrap();
    assert!(!knows(&PgClaims::new(through, spec.clone())).await);
    assert!(heard(&mut hearer).await.starts_with("leasehold echo "), "it was sent");
}

/// These connections never commit, so the listener's test notification never arrives, and the wait for it must end.
#[tokio::test]
async fn a_listener_waits_for_its_own_notification_for_a_bounded_time() {
    let (db, pool) = database().await;
    let spec = migrated(&pool, request()).await;
    let lost = PgPoolOptions::new()
        .after_connect(|connection, _| Box::pin(async { try_run(connection, "BEGIN").await.map(drop) }));
    let lost = lost.connect(db.url()).await.unwrap();
    assert!(!knows(&PgClaims::new(lost, spec)).await);
}

/// A listener works even if all connections of the pool are in use.
#[tokio::test]
async fn a_busy_pool_does_not_keep_a_listener_from_listening() {
    let (db, pool) = database().await;
    let spec = migrated(&pool, request()).await;
    let one = PgPoolOptions::new().max_connections(1).connect(db.url()).await.unwrap();
    let busy = one.acquire().await.unwrap();
    let mut wake = within(LONG, "not ended", PgClaims::new(one.clone(), spec).listen()).await.unwrap();
    assert!(!wake.announces());
    run(&pool, "INSERT INTO request (document) VALUES ('d')").await;
    within(LONG, "not ended", wake.woken()).await.unwrap();
    assert!(wake.announces());
    drop(busy);
}
