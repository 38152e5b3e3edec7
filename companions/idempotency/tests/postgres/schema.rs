//! The tables, installed by many processes and used by a role with minimal privileges.

use crate::common::{effect, on, pool, private, world};
use crate::suite::{fresh, ident, replay, request};
use leasehold_api::ErrorKind;
use leasehold_idempotency::{IdempotencyError, PgIdempotency, Stored};
use sqlx::{AssertSqlSafe, raw_sql};
use test_servers::{Cluster, ClusterOptions};

#[tokio::test]
async fn it_is_installed_by_many_at_once_under_any_name_and_again() {
    let world = world(8).await;
    for name in ["other", r#"odd"; \$leasehold$ '{schema}"#] {
        let store = PgIdempotency::new(world.pool.clone()).schema(name.parse().unwrap());
        let all = (0..8).map(|_| store.migrate());
        for done in futures_util::future::join_all(all).await {
            done.unwrap();
        }
        let script = PgIdempotency::schema_sql(&name.parse().unwrap());
        raw_sql(AssertSqlSafe(script)).execute(&world.pool).await.unwrap();
        let mut first = fresh(store.begin(&ident("a"), &request("x")).await);
        effect(&mut first).await;
        first.finish(Stored::done(200, name.to_owned())).await.unwrap();
        assert_eq!(replay(store.begin(&ident("a"), &request("x")).await).body(), name.as_bytes());
        let mut forgotten = world.pool.begin().await.unwrap();
        drop(fresh(store.begin_in(&mut forgotten, &ident("b"), &request("x")).await));
        assert!(forgotten.commit().await.is_err(), "the trigger is there");
    }
    assert_eq!(world.effects().await, 2);
}

/// If everything exists, the script neither waits for writers nor blocks them.
#[tokio::test]
async fn the_script_can_be_run_again_beside_a_request() {
    let world = world(4).await;
    let mut slow = fresh(world.store.begin(&ident("slow"), &request("x")).await);
    effect(&mut slow).await;
    let script = PgIdempotency::schema_sql(&"leasehold".parse().unwrap());
    raw_sql(AssertSqlSafe(script)).execute(&world.pool).await.unwrap();
    slow.finish(Stored::done(200, "slow")).await.unwrap();
}

/// Statement texts must not vary by key, because each text would be a separate entry in `pg_stat_statements`.
#[tokio::test]
async fn all_keys_send_the_same_statements() {
    let database = Cluster::start(ClusterOptions::new().setting("log_statement", "all"));
    let world = on(database.fresh_database().await, 1).await;
    let mut sent = Vec::new();
    for key in ["a", "b", "c"] {
        let before = database.log().lines().count();
        let mut begun = fresh(world.store.begin(&ident(key), &request("x")).await);
        effect(&mut begun).await;
        begun.finish(Stored::rejected(402, "")).await.unwrap();
        let log = database.log();
        let statements = log
            .lines()
            .skip(before)
            .filter_map(|line| line.split_once(" execute ").or(line.split_once("statement: ")));
        // Removes the name of the prepared statement.
        let texts =
            statements.map(|(_, text)| text.split_once(": ").map_or(text, |(_, text)| text).to_owned());
        sent.push(texts.collect::<Vec<_>>());
    }
    assert!(sent[0].iter().any(|text| text == "ROLLBACK AND CHAIN"), "{:?}", sent[0]);
    assert!(!sent[0].iter().any(|text| text.starts_with("SAVEPOINT")), "{:?}", sent[0]);
    assert_eq!(sent[1], sent[2]);
}

#[tokio::test]
async fn tables_and_indexes_say_what_they_are_for() {
    let world = world(2).await;
    let silent = "SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
        WHERE n.nspname = 'leasehold' AND c.relname IN ('idempotency', 'idempotency_expires', 'journey', 'journey_expires') \
        AND obj_description(c.oid, 'pg_class') IS NOT NULL";
    assert_eq!(world.number(silent).await, 4);
}

#[tokio::test]
async fn the_least_privileges_are_enough_and_needed() {
    let world = private(4).await;
    let role = format!("app_{}", world.database.name());
    world.run(format!("CREATE ROLE {role} LOGIN; GRANT INSERT ON effect TO {role}")).await;
    let url = world.database.url().replace("postgres@", &format!("{role}@"));
    let store = PgIdempotency::new(pool(&url, 2).await);
    let refused = store.begin(&ident("a"), &request("x")).await.unwrap_err();
    assert!(
        matches!(&refused, IdempotencyError::Store(error) if error.kind() == ErrorKind::PermissionDenied),
        "{refused}"
    );
    world.run(PgIdempotency::grants_sql(&"leasehold".parse().unwrap(), &role.parse().unwrap())).await;
    store.migrate().await.unwrap();
    let mut first = fresh(store.begin(&ident("a"), &request("x")).await);
    effect(&mut first).await;
    first.finish(Stored::done(200, "x")).await.unwrap();
    assert_eq!(replay(store.begin(&ident("a"), &request("x")).await).body(), "x");
    world.run("UPDATE leasehold.idempotency SET expires_at = clock_timestamp()").await;
    assert_eq!(store.purge(10).await.unwrap(), 1);
    drop(store);
    world.run(format!("DROP OWNED BY {role}")).await;
}
