//! Tables that a spec creates.

use crate::common::*;
use leasehold_claim::sqlx::PgPool;
use leasehold_claim::{
    ClaimError, ClaimSpec, ClaimSpecBuilder, ClaimStore as _, IdType, OrderType, Outcome, PgClaims, PgHeld,
    Retention, States, Table, Take, Unmet,
};

fn table(name: &str) -> Table {
    Table::new(name).unwrap()
}

fn enumeration() -> States {
    States::enumeration(table("phase"), ["new", "again"], "complete").taken("in-progress").failed("error")
}

/// Specs that use everything that a table can have.
fn specs() -> Vec<ClaimSpecBuilder> {
    let boolean = || ClaimSpec::builder(table("payment")).state("processed", States::boolean());
    let all = || full("request").max_attempts(3).settled_by("settled_by");
    let kept = Retention::KeepFor(std::time::Duration::from_secs(86_400));
    vec![
        all(),
        all().queue("queue_id").limit("tenant", 5).retention(kept),
        all()
            .order_by_descending("priority", OrderType::Int)
            .order_by("ready_at", OrderType::Time)
            .expire_on_read(),
        all()
            .order_by("name", OrderType::Text)
            .order_by("due", OrderType::Time)
            .order_by("batch", OrderType::Uuid),
        all().state("phase", enumeration()).epoch_sequence(table("epochs")).owner_sequence(table("owners")),
        all().kind("kind").group("entity").grouped().waits("update", "create", Unmet::Block, Unmet::Block),
        all()
            .id("id", IdType::Uuid)
            .queue("queue_id")
            .order_by("queue_id", OrderType::Text)
            .notify_on_insert(false),
        boolean().epoch_sequence(table("epochs")),
        boolean().id("name", IdType::Text).side_table(table("leases")).limit("tenant", 2),
        boolean().work(["id", "processed", "amount"]),
    ]
}

/// Everything of the schema that a migration can add or change.
async fn objects(pool: &PgPool, table: &str) -> Vec<String> {
    let mut all = constraints(pool, table).await;
    all.extend(indexes(pool, table).await);
    let columns = format!(
        "SELECT attname || ' ' || format_type(atttypid, atttypmod) || ' ' || attnotnull || ' ' || atthasdef
         FROM pg_attribute WHERE attrelid = '{table}'::regclass AND attnum > 0 ORDER BY attnum"
    );
    all.extend(texts(pool, columns).await);
    let beside = "SELECT name FROM (SELECT relkind::text || ' ' || relname FROM pg_class WHERE relnamespace = 'public'::regnamespace
         UNION ALL SELECT proname::text FROM pg_proc WHERE pronamespace = 'public'::regnamespace
         UNION ALL SELECT tgname::text FROM pg_trigger) n(name) ORDER BY 1";
    all.extend(texts(pool, beside).await);
    all
}

/// Returns an insert into the table of a spec that names only the kind and the columns of the application: the work, a
/// text as id, the order, the entity, and the tenant.
fn insert(spec: &ClaimSpec, script: &str) -> String {
    let columns = [
        ("kind", "'create'"),
        ("document", "'{\"a\": 1}'"),
        ("amount", "'5'"),
        ("name", "'first'"),
        ("batch", "gen_random_uuid()"),
        ("entity", "'e'"),
        ("tenant", "'t'"),
    ];
    let used = columns.into_iter().filter(|(column, _)| script.contains(&format!("\"{column}\" ")));
    let (names, values): (Vec<_>, Vec<_>) = used.unzip();
    if names.is_empty() {
        return format!("INSERT INTO {} DEFAULT VALUES", spec.table().name());
    }
    format!("INSERT INTO {} ({}) VALUES ({})", spec.table().name(), names.join(", "), values.join(", "))
}

/// The script runs in one transaction, as tools for migrations run it. Then nothing is left to be found or migrated,
/// and a row is claimed that was inserted with the columns of the application alone.
#[tokio::test]
async fn a_created_table_fits_its_spec_as_it_is() {
    let mut leased = 0;
    for builder in specs() {
        let spec = builder.build().unwrap();
        let (_db, pool) = database().await;
        let script = spec.create_sql();
        run(&pool, format!("BEGIN; {script} COMMIT")).await;
        let name = spec.table().name().to_owned();
        assert_eq!(spec.check(&pool).await.unwrap(), [], "{script}");
        let before = objects(&pool, &name).await;
        spec.migration().apply(&pool).await.unwrap();
        assert_eq!(objects(&pool, &name).await, before, "{script}");
        let insert = insert(&spec, &script);
        run(&pool, &insert).await;
        let mut hold = PgHeld::new(pool.clone(), spec.clone()).begin(&Take::up_to(5)).await.unwrap().unwrap();
        let held = hold.taken().claims[0].claim.clone();
        hold.settle(&held, &Outcome::Done).await.unwrap();
        hold.rollback().await.unwrap();
        let claims = PgClaims::new(pool.clone(), spec);
        match claims.take(&Take::up_to(5)).await {
            Ok(taken) => {
                claims.settle_one(&taken.claims[0].claim, Outcome::Done).await.unwrap();
                leased += 1;
            }
            Err(error) => assert!(matches!(error, ClaimError::Unsupported(_)), "{error}"),
        }
    }
    assert_eq!(leased, 8, "two of the specs have no lease");
}

/// A row that is inserted with the columns of its work alone has the first state, a number that grows, and its
/// attempts, and is claimed in either mode.
#[tokio::test]
async fn a_created_table_needs_only_the_columns_of_the_work() {
    let (_db, pool) = database().await;
    let spec = full("request").max_attempts(3).settled_by("settled_by").build().unwrap();
    run(&pool, spec.create_sql()).await;
    let insert =
        r#"INSERT INTO request (document) VALUES ('{"a": 1}') RETURNING id || status || attempts_left"#;
    // On three connections, because a session that draws several numbers at once would leave a gap.
    let mut sessions = Vec::new();
    for row in ["1new3", "2new3", "3new3"] {
        let mut session = pool.acquire().await.unwrap();
        assert_eq!(text(&mut *session, insert).await, row);
        sessions.push(session);
    }
    drop(sessions);
    for (state, code) in [("paused", "23514"), ("NEW", "23514")] {
        let insert = format!("INSERT INTO request (document, status) VALUES ('{{}}', '{state}')");
        assert_eq!(refused(&pool, insert).await, code);
    }
    let claims = PgClaims::new(pool.clone(), spec.clone());
    let taken = claims.take(&Take::up_to(1)).await.unwrap().claims.remove(0);
    assert_eq!(taken.rows[0].work["document"]["a"], 1);
    claims.settle_one(&taken.claim, Outcome::Done).await.unwrap();
    let mut hold = PgHeld::new(pool.clone(), spec).begin(&Take::up_to(1)).await.unwrap().unwrap();
    let held = hold.taken().claims[0].claim.clone();
    hold.settle(&held, &Outcome::Failed("no".to_owned())).await.unwrap();
    hold.commit().await.unwrap();
    let ends =
        "SELECT string_agg(status || ' ' || coalesce(settled_by, 'by none'), ', ' ORDER BY id) FROM request";
    let (first, second) = (taken.claim.owner, held.owner);
    assert_eq!(text(&pool, ends).await, format!("complete {first}, error {second}, new by none"));
}

/// A created table has no default for the kind, because nobody guesses it. Each kind is claimed, an update after its
/// create.
#[tokio::test]
async fn rows_of_each_kind_are_claimed_in_a_created_table() {
    let (_db, pool) = database().await;
    let builder = full("request").max_attempts(3).kind("kind").group("entity");
    let spec = builder.waits("update", "create", Unmet::Block, Unmet::Block).build().unwrap();
    run(&pool, spec.create_sql()).await;
    assert_eq!(refused(&pool, "INSERT INTO request (document) VALUES ('{}')").await, "23502");
    run(
        &pool,
        "INSERT INTO request (kind, entity, document) VALUES
            ('create', 'a', '1'), ('update', 'a', '2'), ('create', 'b', '3')",
    )
    .await;
    let claims = PgClaims::new(pool.clone(), spec);
    let documents = async || {
        let taken = claims.take(&Take::up_to(9)).await.unwrap().claims;
        for claimed in &taken {
            claims.settle_one(&claimed.claim, Outcome::Done).await.unwrap();
        }
        taken.iter().map(|claimed| claimed.rows[0].work["document"].to_string()).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(documents().await, "1 3", "the update of `a` waits");
    assert_eq!(documents().await, "2");
    let rows = "SELECT string_agg(concat_ws(' ', document, kind, status), ', ' ORDER BY id) FROM request";
    assert_eq!(text(&pool, rows).await, "1 create complete, 2 update complete, 3 create complete");
}

/// Without a number of attempts in the spec, nobody guesses one.
#[tokio::test]
async fn attempts_that_the_spec_does_not_name_have_to_be_given() {
    let (_db, pool) = database().await;
    let spec = full("request").build().unwrap();
    run(&pool, spec.create_sql()).await;
    assert_eq!(spec.check(&pool).await.unwrap(), []);
    assert_eq!(refused(&pool, "INSERT INTO request (document) VALUES ('{}')").await, "23502");
    run(&pool, "INSERT INTO request (document, attempts_left) VALUES ('{}', 2)").await;
}

/// Names that need quoting, in another schema, with a constraint whose derived name the server would cut.
#[tokio::test]
async fn a_created_table_can_have_any_name() {
    let (_db, pool) = database().await;
    let odd = Table::new("t'\"".repeat(20)).unwrap().in_schema("s\"x").unwrap();
    let spec = ClaimSpec::builder(odd)
        .id("i'd", IdType::Int)
        .state("sta\"tus", States::text(["ne'w"], "do\\ne").taken("in\"progress"))
        .lease_columns("own\"er", "ep'och", "lease_until")
        .work(["bus'iness"])
        .build()
        .unwrap();
    run(&pool, "CREATE SCHEMA \"s\"\"x\"").await;
    run(&pool, spec.create_sql()).await;
    assert_eq!(spec.check(&pool).await.unwrap(), []);
}
