//! Crashes, lost replies, dropped futures, and rows of foreign statements.

use std::time::Duration;

use crate::common::{PATIENT, effect, pool, private, world};
use crate::suite::{fresh, ident, replay, request};
use leasehold_api::ErrorKind;
use leasehold_idempotency::{Begin, IdempotencyError, KeyTransaction, PgIdempotency, Stored};
use sqlx::Executor as _;
use test_bounds::Bound;
use test_servers::{Cluster, PgBouncer, PgBouncerOptions, Proxy};

fn kind(error: &IdempotencyError) -> ErrorKind {
    match error {
        IdempotencyError::Store(error) => error.kind(),
        other => panic!("{other}"),
    }
}

/// Retries until the server has ended the key's earlier transaction.
async fn begin_again(store: &PgIdempotency) -> Begin<KeyTransaction> {
    let deadline = Bound::new(PATIENT);
    loop {
        match store.begin(&ident("a"), &request("x")).await.unwrap() {
            Begin::InFlight { .. } => {
                deadline.check("in flight for ever");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            told => return told,
        }
    }
}

#[tokio::test]
async fn a_crash_before_the_commit_leaves_no_effect() {
    let world = world(8).await;
    let mut first = fresh(world.store.begin(&ident("a"), &request("x")).await);
    effect(&mut first).await;
    let pid: i32 = sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut *first).await.unwrap();
    assert_eq!(world.number(&format!("SELECT pg_terminate_backend({pid})::int::bigint")).await, 1);
    assert!(first.finish(Stored::done(200, "first")).await.is_err());
    let Begin::Fresh(mut second) = begin_again(&world.store).await else { panic!("it was not committed") };
    effect(&mut second).await;
    second.finish(Stored::done(200, "second")).await.unwrap();
    assert_eq!(world.effects().await, 1);
    assert_eq!(replay(world.store.begin(&ident("a"), &request("x")).await).body(), "second");
}

#[tokio::test]
async fn a_lost_answer_to_the_commit_is_resolved_by_the_same_key() {
    let world = private(8).await;
    let proxy = Proxy::start(Cluster::shared().address()).await;
    let store = PgIdempotency::new(pool(&proxy.url(world.database.url()), 2).await);
    let mut first = fresh(store.begin(&ident("a"), &request("x")).await);
    effect(&mut first).await;
    proxy.drop_next_reply_with("COMMIT");
    let error = first.finish(Stored::done(200, "first")).await.unwrap_err();
    assert_eq!(kind(&error), ErrorKind::OutcomeUnknown, "{error}");
    assert!(error.is_retryable());
    let Begin::Replay(told) = begin_again(&store).await else { panic!("it was committed") };
    assert_eq!(told.body(), "first");
    assert_eq!(world.effects().await, 1);
}

#[tokio::test]
async fn a_connection_broken_before_the_commit_leaves_no_effect() {
    let world = private(8).await;
    let proxy = Proxy::start(Cluster::shared().address()).await;
    let store = PgIdempotency::new(pool(&proxy.url(world.database.url()), 2).await);
    let mut first = fresh(store.begin(&ident("a"), &request("x")).await);
    effect(&mut first).await;
    proxy.reset();
    assert!(first.finish(Stored::done(200, "first")).await.is_err());
    let Begin::Fresh(mut second) = begin_again(&store).await else { panic!("it was not committed") };
    effect(&mut second).await;
    second.finish(Stored::done(200, "second")).await.unwrap();
    assert_eq!(world.effects().await, 1);
}

/// The client gives up during the commit and repeats its request at once. A trigger delays the commit until the
/// repetition was answered.
#[tokio::test]
async fn a_client_that_gives_up_during_the_commit_and_repeats_has_one_effect() {
    let world = private(8).await;
    world
        .run(
            "CREATE FUNCTION held() RETURNS trigger LANGUAGE plpgsql AS
                $$ BEGIN PERFORM pg_advisory_xact_lock_shared(99); RETURN NULL; END $$;
            CREATE CONSTRAINT TRIGGER held AFTER INSERT ON effect DEFERRABLE INITIALLY DEFERRED
                FOR EACH ROW EXECUTE FUNCTION held();",
        )
        .await;
    let mut gate = world.database.connect().await;
    gate.execute("SELECT pg_advisory_lock(99)").await.unwrap();
    let mut first = fresh(world.store.begin(&ident("a"), &request("x")).await);
    effect(&mut first).await;
    let first = tokio::spawn(first.finish(Stored::done(200, "first")));
    world.until_it_waits(&first).await;
    first.abort();
    assert!(first.await.unwrap_err().is_cancelled());
    for store in [world.store.clone(), world.elsewhere()] {
        let told = store.begin(&ident("a"), &request("x")).await;
        assert!(matches!(told, Ok(Begin::InFlight { .. })), "the commit may still happen: {told:?}");
    }
    gate.execute("SELECT pg_advisory_unlock(99)").await.unwrap();
    let Begin::Replay(told) = begin_again(&world.store).await else { panic!("it was committed") };
    assert_eq!(told.body(), "first");
    assert_eq!(world.effects().await, 1);
}

/// Polls `future` at most `polls` times and drops it.
async fn poll_and_drop<T>(future: impl Future<Output = T>, polls: u32) -> Option<T> {
    let mut future = std::pin::pin!(future);
    for _ in 0..polls {
        if let std::task::Poll::Ready(value) = futures_util::poll!(&mut future) {
            return Some(value);
        }
        // Waits for the server's reply, so that polls reach each state of the future.
        tokio::time::sleep(Duration::from_micros(300)).await;
    }
    None
}

#[tokio::test]
async fn three_hundred_cancelled_begins_leave_no_transaction_open() {
    let world = private(4).await;
    let mut outside = world.database.connect().await;
    let mut begun = 0;
    for n in 0..300_u32 {
        let (key, asked) = (ident(&format!("k{n}")), request("x"));
        if let Some(told) = poll_and_drop(world.store.begin(&key, &asked), n % 12).await {
            drop(fresh(told));
            begun += 1;
        }
        // Checked each time, because the next use of the connection would end an open transaction.
        world.settled(&mut outside).await;
    }
    assert!(begun < 300, "some were dropped half-way");
    assert_eq!(world.number("SELECT count(*) FROM leasehold.idempotency").await, 0);
    for n in 0..300 {
        drop(fresh(world.store.begin(&ident(&format!("k{n}")), &request("x")).await));
    }
}

#[tokio::test]
async fn cancelled_finishes_are_committed_or_rolled_back_as_a_whole() {
    let world = private(4).await;
    for n in 0..60_u32 {
        let key = ident(&format!("k{n}"));
        let mut first = fresh(world.store.begin(&key, &request("x")).await);
        effect(&mut first).await;
        poll_and_drop(first.finish(Stored::done(200, "x")), n % 10).await.transpose().unwrap();
    }
    world.settled(&mut world.database.connect().await).await;
    let finished = world.number("SELECT count(*) FROM leasehold.idempotency WHERE outcome = 'done'").await;
    assert_eq!(world.effects().await, finished, "each effect with its record");
    assert_eq!(world.number("SELECT count(*) FROM leasehold.idempotency").await, finished);
}

#[tokio::test]
async fn dropped_in_the_middle_of_a_statement_it_is_in_flight_until_the_server_has_ended_it() {
    let world = private(4).await;
    let mut gate = world.database.connect().await;
    gate.execute("SELECT pg_advisory_lock(99)").await.unwrap();
    let mut first = fresh(world.store.begin(&ident("a"), &request("x")).await);
    effect(&mut first).await;
    let held = tokio::spawn(async move { first.execute("SELECT pg_advisory_xact_lock(99)").await.map(drop) });
    world.until_it_waits(&held).await;
    held.abort();
    assert!(held.await.unwrap_err().is_cancelled());
    let told = world.store.begin(&ident("a"), &request("x")).await;
    assert!(matches!(told, Ok(Begin::InFlight { .. })), "{told:?}");
    gate.execute("SELECT pg_advisory_unlock(99)").await.unwrap();
    let Begin::Fresh(second) = begin_again(&world.store).await else { panic!("nothing was committed") };
    second.rollback().await.unwrap();
    world.settled(&mut world.database.connect().await).await;
    assert_eq!(world.effects().await, 0);
}

#[tokio::test]
async fn a_row_of_another_version_is_an_error_and_not_a_panic() {
    let world = world(8).await;
    fresh(world.store.begin(&ident("a"), &request("x")).await).finish(Stored::done(200, "x")).await.unwrap();
    world.run("ALTER TABLE leasehold.idempotency DROP CONSTRAINT idempotency_outcome").await;
    world.run("ALTER TABLE leasehold.idempotency DROP CONSTRAINT idempotency_fingerprint").await;
    let good = "outcome = 'done', status = 200, headers = NULL";
    for (bad, word) in [
        ("outcome = 'postponed'", "postponed"),
        ("status = NULL", "status"),
        ("status = 70000", "70000"),
        ("status = -1", "-1"),
        ("headers = '{\"a\": 1}'", "headers"),
        ("headers = '[[\"a\"]]'", "headers"),
        ("headers = '\"text\"'", "headers"),
        ("fingerprint = '\\x00'", "fingerprint"),
    ] {
        world
            .run(format!("UPDATE leasehold.idempotency SET {good}; UPDATE leasehold.idempotency SET {bad}"))
            .await;
        let told = world.store.begin(&ident("a"), &request("x")).await;
        assert!(
            matches!(&told, Err(IdempotencyError::Unreadable(text)) if text.contains(word)),
            "{bad}: {told:?}"
        );
    }
    world.settled(&mut world.database.connect().await).await;
}

#[tokio::test]
async fn behind_a_pooler_in_transaction_mode() {
    let world = private(8).await;
    let options = PgBouncerOptions::new().pool_size(4).round_robin();
    // The driver sets this parameter with every connection.
    let options = options.setting("ignore_startup_parameters", "extra_float_digits");
    let bouncer = PgBouncer::start(Cluster::shared(), &options);
    let pooled = pool(&bouncer.url(world.database.name()), 8).await;
    let store = PgIdempotency::new(pooled).behind_pooler();
    store.migrate().await.unwrap();
    let mut callers = tokio::task::JoinSet::new();
    for n in 0..8 {
        let store = store.clone();
        callers.spawn(async move {
            for round in 0..10 {
                let key = ident(&format!("k{n}-{round}"));
                let mut first = fresh(store.begin(&key, &request("x")).await);
                sqlx::query("INSERT INTO effect DEFAULT VALUES")
                    .persistent(false)
                    .execute(&mut *first)
                    .await
                    .unwrap();
                let end = if round % 2 == 0 { Stored::done(200, "x") } else { Stored::rejected(402, "x") };
                first.finish(end.clone()).await.unwrap();
                assert_eq!(replay(store.begin(&key, &request("x")).await), end);
            }
        });
    }
    while let Some(caller) = callers.join_next().await {
        caller.unwrap();
    }
    assert_eq!(world.effects().await, 40);
    world.run("UPDATE leasehold.idempotency SET expires_at = clock_timestamp()").await;
    assert_eq!(store.purge(1000).await.unwrap(), 80);
}

#[tokio::test]
async fn a_store_that_is_not_there_is_an_error_and_holds_nothing() {
    let world = private(2).await;
    let proxy = Proxy::start(Cluster::shared().address()).await;
    let options =
        sqlx::postgres::PgPoolOptions::new().max_connections(2).acquire_timeout(Duration::from_millis(200));
    let store = PgIdempotency::new(options.connect_lazy(&proxy.url(world.database.url())).unwrap());
    proxy.cut();
    for _ in 0..2 {
        let error = store.begin(&ident("a"), &request("x")).await.unwrap_err();
        assert_eq!(kind(&error), ErrorKind::Unavailable, "{error}");
    }
    proxy.restore();
    world.run("DROP TABLE leasehold.idempotency").await;
    let error = begin_error(&store).await;
    assert_eq!(kind(&error), ErrorKind::SchemaMissing, "{error}");
    assert!(error.to_string().contains("PgIdempotency::migrate"), "{error}");
}

/// Returns the first error with another cause than the connection.
async fn begin_error(store: &PgIdempotency) -> IdempotencyError {
    loop {
        let error = store.begin(&ident("a"), &request("x")).await.unwrap_err();
        if kind(&error) != ErrorKind::Unavailable {
            return error;
        }
    }
}
