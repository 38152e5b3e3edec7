//! One schema per tenant, selected by the search path, so one name means many tables.

use std::time::Duration;

use crate::common::*;
use leasehold_claim::{
    ClaimSpec, ClaimSpecBuilder, ClaimStore as _, Finding, Outcome, PgClaims, PgHeld, Table, Take,
};
use leasehold_claim::{Wake, group_number};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, PgConnection, PgPool, raw_sql};
use test_bounds::within;

/// Creates two tenants with a row 7 each, and a common side table.
async fn tenants() -> World {
    let world = World::new("CREATE SCHEMA t1; CREATE SCHEMA t2").await;
    for tenant in ["t1", "t2"] {
        world
            .run(&format!(
                "CREATE TABLE {tenant}.job (id bigint PRIMARY KEY, entity text, status text NOT NULL DEFAULT 'new',
                     owner uuid, epoch bigint NOT NULL DEFAULT 0, lease_until timestamptz);
                 INSERT INTO {tenant}.job VALUES (7, 'a')"
            ))
            .await;
    }
    world.run(SIDE).await;
    world
}

fn job() -> ClaimSpecBuilder {
    ClaimSpec::builder(Table::new("job").unwrap()).state("status", states())
}

fn in_columns() -> ClaimSpecBuilder {
    job().lease_columns("owner", "epoch", "lease_until")
}

fn in_common() -> ClaimSpecBuilder {
    job().side_table(Table::new("lease").unwrap().in_schema("public").unwrap())
}

async fn pool_of(world: &World, tenant: &str) -> PgPool {
    let options: PgConnectOptions = world.database.url().parse().unwrap();
    let options = options.options([("search_path", &format!("{tenant},public"))]);
    PgPoolOptions::new().max_connections(4).acquire_timeout(LONG).connect_with(options).await.unwrap()
}

async fn of(world: &World, tenant: &str, spec: ClaimSpecBuilder) -> PgClaims {
    PgClaims::new(pool_of(world, tenant).await, spec.build().unwrap()).timeout(LONG)
}

async fn run_on(connection: &mut PgConnection, sql: &str) {
    raw_sql(AssertSqlSafe(sql.to_owned())).execute(connection).await.unwrap();
}

/// A tenant's sweep does not touch the leases of another tenant, and a claimed row does not block the other tenant's row.
#[tokio::test]
async fn tenants_with_a_common_side_table_have_leases_of_their_own() {
    let world = tenants().await;
    let (one, two) = (of(&world, "t1", in_common()).await, of(&world, "t2", in_common()).await);
    assert_eq!(flat(&take(&one, 9).await), [7]);
    let second = take_one(&two).await;
    assert_eq!(second.rows[0].key.id.to_string(), "7", "its own row is free");
    let tabs = "SELECT string_agg(tab, ' ' ORDER BY tab) FROM lease";
    assert_eq!(world.text(tabs).await, r#""t1"."job" "t2"."job""#);
    world.run("UPDATE lease SET lease_until = now() - interval '1 second'; DELETE FROM t2.job").await;
    let swept = two.sweep(9).await.unwrap();
    assert!(swept.returned.is_empty(), "{swept:?}");
    assert_eq!(two.taken(9).await.unwrap().len() + take(&two, 9).await.claims.len(), 0);
    assert_eq!(one.sweep(9).await.unwrap().returned.len(), 1);
    assert_eq!(flat(&take(&one, 9).await), [7], "and it can be taken again");
}

/// Each statement resolves the name again, not only once per process, pool or connection.
#[tokio::test]
async fn a_connection_whose_search_path_changes_works_on_the_table_that_it_names_now() {
    let world = tenants().await;
    let single = pool(world.database.url(), 1).await;
    let path = async |path: &str| {
        run_on(&mut single.acquire().await.unwrap(), &format!("SET search_path = {path}")).await;
    };
    path("t1, public").await;
    let claims = PgClaims::new(single.clone(), in_common().build().unwrap()).timeout(LONG);
    // More than five rounds, because the server then switches to a generic plan.
    for round in 1..=8 {
        let mut taken = Vec::new();
        for tenant in ["t1", "t2"] {
            path(&format!("{tenant}, public")).await;
            taken.push(take_one(&claims).await.claim);
            assert!(take(&claims, 9).await.claims.is_empty());
        }
        assert_eq!(world.number("SELECT count(DISTINCT tab) FROM lease").await, 2);
        for (tenant, claim) in ["t1", "t2"].into_iter().zip(&taken) {
            path(&format!("{tenant}, public")).await;
            settle(&claims, claim, Outcome::PutBack)
                .await
                .unwrap_or_else(|error| panic!("{round} {tenant}: {error}"));
        }
        assert_eq!(world.number("SELECT count(*) FROM lease").await, 0);
    }
}

/// One transaction holds rows of both tenants through `SET LOCAL`.
#[tokio::test]
async fn a_transaction_holds_rows_of_the_tenant_that_its_search_path_names() {
    let world = tenants().await;
    let held = PgHeld::new(world.pool.clone(), job().build().unwrap());
    let mut transaction = world.pool.begin().await.unwrap();
    let mut claims = Vec::new();
    for tenant in ["t1", "t2"] {
        run_on(&mut transaction, &format!("SET LOCAL search_path = {tenant}, public")).await;
        let taken = held.take_in(&mut transaction, &Take::up_to(9)).await.unwrap();
        assert_eq!(flat(&taken), [7], "{tenant}");
        claims.extend(taken.claims);
        assert!(
            held.take_in(&mut transaction, &Take::up_to(9)).await.unwrap().claims.is_empty(),
            "held already"
        );
    }
    run_on(&mut transaction, "SET LOCAL search_path = t1, public").await;
    held.settle_in(&mut transaction, &claims[0].claim, &Outcome::Done).await.unwrap();
    transaction.commit().await.unwrap();
    assert_eq!(
        world.text("SELECT (SELECT status FROM t1.job) || ' ' || (SELECT status FROM t2.job)").await,
        "complete new"
    );
}

/// An entity or a limit of one tenant does not block the same entity or limit of another tenant.
#[tokio::test]
async fn tenants_have_groups_and_limits_of_their_own() {
    for spec in [|| in_columns().group("entity").grouped(), || in_columns().limit("entity", 1)] {
        let world = tenants().await;
        let one = PgHeld::new(pool_of(&world, "t1").await, spec().build().unwrap());
        let hold = one.begin(&Take::up_to(1)).await.unwrap().unwrap();
        assert_eq!(flat(hold.taken()), [7]);
        let leased = of(&world, "t2", spec()).await;
        let claim = take_one(&leased).await;
        settle(&leased, &claim.claim, Outcome::PutBack).await.unwrap();
        let two = PgHeld::new(pool_of(&world, "t2").await, spec().build().unwrap());
        let other =
            two.begin(&Take::up_to(1)).await.unwrap().expect("the entity of the other tenant is free");
        other.rollback().await.unwrap();
        // Within a tenant, the entity is the same for a spec that names the table with its schema.
        let named = Table::new("job").unwrap().in_schema("t1").unwrap();
        let named = ClaimSpec::builder(named).state("status", states()).lease_columns(
            "owner",
            "epoch",
            "lease_until",
        );
        let named = if spec().build().unwrap().migration().sql().contains("at_work") {
            named.limit("entity", 1)
        } else {
            named.group("entity").grouped()
        };
        world.run("INSERT INTO t1.job VALUES (8, 'a')").await;
        assert!(take(&world.claims(named), 9).await.claims.is_empty(), "the entity is at work");
        hold.rollback().await.unwrap();
    }
}

/// Different tenants can sweep at the same time.
#[tokio::test]
async fn tenants_take_turns_in_upkeep_among_themselves() {
    let world = tenants().await;
    let (one, two) = (of(&world, "t1", in_columns()).await, of(&world, "t2", in_columns()).await);
    for claims in [&one, &two] {
        take_one(claims).await;
    }
    world.run("UPDATE t1.job SET lease_until = now(); UPDATE t2.job SET lease_until = now()").await;
    let turn = group_number(world.number("'t1.job'::regclass::oid").await, "\0upkeep");
    let mut other = world.pool.begin().await.unwrap();
    run_on(&mut other, &format!("SELECT pg_advisory_xact_lock({turn})")).await;
    assert!(one.upkeep(9).await.unwrap().swept.returned.is_empty(), "somebody else is at it");
    assert_eq!(two.upkeep(9).await.unwrap().swept.returned.len(), 1);
    other.rollback().await.unwrap();
    assert_eq!(one.upkeep(9).await.unwrap().swept.returned.len(), 1);
}

async fn woken(wake: &mut Box<dyn Wake>) {
    within(LONG, "not woken", wake.woken()).await.unwrap();
}

/// An insert of one tenant does not wake the listeners of another, and does not prove that the other's inserts are announced.
#[tokio::test]
async fn a_listener_hears_of_the_table_of_its_own_tenant() {
    let world = tenants().await;
    let quiet = of(&world, "t2", in_columns().notify_on_insert(false)).await;
    let loud = of(&world, "t1", in_columns()).await;
    loud.spec().migration().apply(loud.pool()).await.unwrap();
    let mut wake = quiet.listen().await.unwrap();
    world.run("INSERT INTO t1.job VALUES (8)").await;
    // Notifications arrive in order. This one announces a put-back row.
    let claim = take_one(&quiet).await;
    settle(&quiet, &claim.claim, Outcome::PutBack).await.unwrap();
    woken(&mut wake).await;
    assert!(!wake.announces(), "it was woken by the first, or believed it");
    let mut connection = quiet.pool().acquire().await.unwrap();
    quiet.notify(&mut connection).await.unwrap();
    woken(&mut wake).await;
    assert!(wake.announces());
}

/// A side table identifies a table with or without the schema in its name, so both spellings respect the same leases.
#[tokio::test]
async fn a_side_table_knows_a_table_under_every_spelling() {
    let world = tenants().await;
    let bare = of(&world, "t1", in_common()).await;
    let named = Table::new("job").unwrap().in_schema("t1").unwrap();
    let named = ClaimSpec::builder(named).state("status", states());
    let named = world.claims(named.side_table(Table::new("lease").unwrap()));
    let claim = take_one(&bare).await;
    assert_eq!(take(&named, 9).await.claims.len(), 0);
    settle(&named, &claim.claim, Outcome::Done).await.unwrap();
}

/// Early versions stored only the text of the spec as the table's name in leases.
#[tokio::test]
async fn leases_under_a_name_without_a_schema_are_found_and_can_be_given_one() {
    let world = tenants().await;
    let one = of(&world, "t1", in_common()).await;
    one.spec().migration().apply(one.pool()).await.unwrap();
    world
        .run(r#"INSERT INTO lease (tab, id, owner, epoch, lease_until, taken_at) VALUES ('"job"', '7', NULL, 1, now(), now())"#)
        .await;
    let found = one.spec().check(one.pool()).await.unwrap();
    let told = found.iter().find_map(|finding| match finding {
        Finding::Error(text) if text.contains("without a schema") => Some(text),
        _ => None,
    });
    let (_, advice) = told.unwrap_or_else(|| panic!("{found:#?}")).split_once("UPDATE").unwrap();
    run_on(&mut one.pool().acquire().await.unwrap(), &format!("UPDATE{advice}")).await;
    assert_eq!(world.text("SELECT tab FROM lease").await, r#""t1"."job""#);
    assert!(one.spec().check(one.pool()).await.unwrap().is_empty());
}

/// Names of schemas and tables may contain any characters.
#[tokio::test]
async fn odd_names_are_noted_as_a_spec_with_the_schema_notes_them() {
    let (schema, name) = (r#"o"d.d\'s"#, r#"a"b'\c"#);
    let table = Table::new(name).unwrap();
    let full = table.clone().in_schema(schema).unwrap();
    let quoted = full.quoted();
    let schema_quoted = quoted.strip_suffix(&format!(".{}", table.quoted())).unwrap();
    let world = World::new(SIDE).await;
    world
        .run(&format!(
            "CREATE SCHEMA {schema_quoted}; CREATE TABLE {quoted} (id bigint PRIMARY KEY, status text NOT NULL DEFAULT 'new');
             INSERT INTO {quoted} VALUES (1)"
        ))
        .await;
    let single = pool(world.database.url(), 1).await;
    run_on(&mut single.acquire().await.unwrap(), &format!("SET search_path = {schema_quoted}, public")).await;
    let side = || Table::new("lease").unwrap().in_schema("public").unwrap();
    let spec = |table: Table| {
        ClaimSpec::builder(table).state("status", states()).side_table(side()).build().unwrap()
    };
    let claim = take_one(&PgClaims::new(single, spec(table)).timeout(LONG)).await;
    assert_eq!(world.text("SELECT tab FROM lease").await, quoted);
    let named = PgClaims::new(world.pool.clone(), spec(full)).timeout(Duration::from_secs(120));
    settle(&named, &claim.claim, Outcome::Done).await.unwrap();
    let mut wake = named.listen().await.unwrap();
    run_on(
        &mut world.pool.acquire().await.unwrap(),
        &format!("NOTIFY \"{}\"", named.spec().channel().replace('"', "\"\"")),
    )
    .await;
    woken(&mut wake).await;
}
