//! Claims under unusual servers, poolers and settings.
use std::str::FromStr as _;
use std::time::Duration;

use crate::common::*;
use leasehold_api::ErrorKind;
use leasehold_claim::{
    ClaimError, ClaimSpec, ClaimStore as _, Outcome, PgClaims, Renewal, States, Table, Take,
};
use sqlx::Executor as _;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use test_servers::{Cluster, ClusterOptions, PgBouncer, PgBouncerOptions, Proxy, StopMode};

/// Runs each operation once, on a table with the new rows 1 to 6.
async fn everything(world: &World, claims: &PgClaims) {
    let taken = take(claims, 4).await;
    let all: Vec<_> = taken.claims.iter().map(|claim| claim.claim.clone()).collect();
    assert_eq!(all.len(), 4);
    assert_eq!(claims.renew(&all, LONG).await.unwrap(), vec![Renewal::Renewed; 4]);
    assert_eq!(claims.taken(9).await.unwrap().len(), 4);
    let ends = [Outcome::Done, Outcome::Failed("x".into()), Outcome::PutBack, Outcome::PutBack];
    let ends: Vec<_> = all.iter().zip(ends).map(|(claim, end)| (claim.clone(), end)).collect();
    for answer in claims.settle(&ends).await.unwrap() {
        answer.unwrap();
    }
    let one = take_one(claims).await;
    world.run("UPDATE request SET lease_until = '-infinity' WHERE lease_until IS NOT NULL").await;
    assert_eq!(claims.sweep(9).await.unwrap().returned, [one.rows[0].key.clone()]);
    assert!(claims.pending(&Take::up_to(1)).await.unwrap());
    assert!(claims.exhausted(9).await.unwrap().is_empty());
    let mut transaction = claims.pool().begin().await.unwrap();
    let one = take_one(claims).await;
    claims.settle_in(&mut transaction, &one.claim, &Outcome::Done).await.unwrap();
    claims.notify(&mut transaction).await.unwrap();
    transaction.commit().await.unwrap();
    assert_eq!(world.number("SELECT count(*) FROM request WHERE status = 'complete'").await, 2);
}

/// Behind PgBouncer in transaction mode, leases work, and listening returns an error, so claimers poll.
#[tokio::test(flavor = "multi_thread")]
async fn behind_a_pooler_in_transaction_mode() {
    let world = World::private(REQUEST).await;
    world.insert(6).await;
    let options = PgBouncerOptions::new().pool_size(4).round_robin();
    // The driver sends this parameter with every connection.
    let options = options.setting("ignore_startup_parameters", "extra_float_digits");
    let bouncer = PgBouncer::start(Cluster::shared(), &options);
    let url = bouncer.url(world.database.name());
    let claims = PgClaims::new(pool(&url, 4).await, request().build().unwrap()).behind_pooler();
    everything(&world, &claims).await;
    let error = claims.listen().await.unwrap_err();
    assert!(matches!(&error, ClaimError::Unsupported(text) if text.contains("polls")), "{error}");
    // Groups are claimed in one transaction, so their locks end with it.
    world.run("INSERT INTO request (entity) VALUES ('a'), ('a')").await;
    let groups = PgClaims::new(claims.pool().clone(), request().group("kind").grouped().build().unwrap())
        .behind_pooler();
    let taken = take(&groups, 9).await;
    assert_eq!(taken.claims.len(), 1, "{taken:?}");
    assert!(Cluster::shared().advisory_locks(world.database.name()).await.is_empty());
    // Many workers at once, over fewer connections.
    world.insert(200).await;
    let mut workers = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let claims = claims.clone();
        workers.spawn(async move {
            let mut count = 0;
            while let Some(claim) = claims.take(&Take::up_to(1)).await.unwrap().claims.pop() {
                settle(&claims, &claim.claim, Outcome::Done).await.unwrap();
                count += 1;
            }
            count
        });
    }
    let mut count = 0;
    while let Some(of_one) = bounded(workers.join_next()).await {
        count += of_one.unwrap();
    }
    assert_eq!(count, 200);
}

/// The session's defaults are SERIALIZABLE, REPEATABLE READ or read-only transactions, or other formats.
#[tokio::test(flavor = "multi_thread")]
async fn defaults_of_the_session_do_not_matter() {
    for (name, value) in [
        ("default_transaction_isolation", "serializable"),
        ("default_transaction_isolation", "repeatable read"),
        ("default_transaction_read_only", "on"),
        ("DateStyle", "German"),
        ("IntervalStyle", "iso_8601"),
        ("TimeZone", "America/St_Johns"),
        ("standard_conforming_strings", "off"),
        ("bytea_output", "escape"),
        ("plan_cache_mode", "force_generic_plan"),
    ] {
        let world = World::new(REQUEST).await;
        world.insert(6).await;
        let options = PgConnectOptions::from_str(world.database.url()).unwrap().options([(name, value)]);
        let pool = PgPoolOptions::new().max_connections(20).connect_with(options).await.unwrap();
        let claims = PgClaims::new(pool, request().build().unwrap()).timeout(LONG);
        if name.ends_with("read_only") {
            // The caller's own transactions keep these defaults.
            assert_eq!(take(&claims, 6).await.claims.len(), 6);
            continue;
        }
        everything(&world, &claims).await;
        world.insert(300).await;
        let mut workers = tokio::task::JoinSet::new();
        for _ in 0..8 {
            let claims = claims.clone();
            workers.spawn(async move {
                let mut count = 0;
                loop {
                    let taken = claims.take(&Take::up_to(3)).await.unwrap();
                    if taken.claims.is_empty() {
                        return count;
                    }
                    for claim in taken.claims {
                        settle(&claims, &claim.claim, Outcome::Done).await.unwrap();
                        count += 1;
                    }
                }
            });
        }
        let mut count = 0;
        while let Some(of_one) = bounded(workers.join_next()).await {
            count += of_one.unwrap();
        }
        // Includes the rows that `everything` left.
        assert_eq!(count, 303, "{name} = {value}");
        assert_eq!(
            world.number("SELECT count(*) FROM request WHERE status IN ('new', 'in-progress')").await,
            0
        );
    }
}

/// After a restart of the server during claims, each claim is either still valid or gone.
#[tokio::test(flavor = "multi_thread")]
async fn the_server_restarts_during_a_claim() {
    let cluster = Cluster::start(ClusterOptions::new());
    let database = cluster.fresh_database().await;
    let world = World { pool: pool(database.url(), 5).await, database };
    world.run(REQUEST).await;
    world.insert(3).await;
    let claims = world.claims(request());
    let taken = take(&claims, 2).await;
    let mut open = world.pool.begin().await.unwrap();
    claims.settle_in(&mut open, &taken.claims[1].claim, &Outcome::Done).await.unwrap();
    cluster.restart(StopMode::Immediate).await;
    let error = settle_open(&claims, open, &taken.claims[1].claim).await;
    assert!(error.is_retryable(), "{error}");
    // Several tries, because the pool detects its dead connections one by one.
    let mut tries = 0;
    let answer = loop {
        let one = (taken.claims[0].claim.clone(), Outcome::Done);
        match claims.settle(&[one]).await {
            Ok(mut answers) => break answers.remove(0),
            Err(error) => assert!(error.is_retryable(), "{error}"),
        }
        tries += 1;
        assert!(tries < 10, "never again");
    };
    answer.unwrap();
    assert_eq!(
        world.text("SELECT string_agg(status, ' ' ORDER BY id) FROM request").await,
        "complete in-progress new"
    );
    world.expire().await;
    assert_eq!(claims.sweep(9).await.unwrap().returned.len(), 1);
    assert_eq!(flat(&take(&claims, 9).await), [2, 3]);
}

async fn settle_open(
    claims: &PgClaims,
    mut open: sqlx::Transaction<'static, sqlx::Postgres>,
    claim: &leasehold_claim::ClaimRef,
) -> ClaimError {
    claims.settle_in(&mut open, claim, &Outcome::Done).await.unwrap_err()
}

/// The reply to a take is lost, so its rows are unknown. The store puts them back at once and restores their attempts.
#[tokio::test(flavor = "multi_thread")]
async fn a_take_with_an_unknown_outcome_is_put_back() {
    let grouped = request().group("entity").grouped();
    for (spec, limit) in [(request(), 1), (request(), 3), (beside(), 3), (grouped, 3)] {
        let world = World::private(&[REQUEST, SIDE].concat()).await;
        world.run("INSERT INTO request (document, entity, attempts_left) VALUES ('first', 'a', 5), ('x', 'b', 5), ('x', 'a', 5)").await;
        let proxy = Proxy::start(Cluster::shared().address()).await;
        let pool = pool(&proxy.url(world.database.url()), 3).await;
        let claims = PgClaims::new(pool, spec.build().unwrap()).timeout(LONG);
        // The first take reads the table's properties. The reply to the second one is lost.
        let known = take_one(&claims).await;
        settle(&claims, &known.claim, Outcome::PutBack).await.unwrap();
        proxy.drop_next_reply_with("first");
        let error = claims.take(&Take::up_to(limit)).await.unwrap_err();
        assert_eq!(proxy.traffic().dropped_replies, 1, "{error}");
        assert!(
            matches!(&error, ClaimError::Store(error) if error.kind() == ErrorKind::OutcomeUnknown),
            "{error}"
        );
        assert!(error.is_retryable());
        let rest =
            "SELECT count(*) FROM request WHERE status = 'new' AND owner IS NULL AND attempts_left = 5";
        assert_eq!(world.number(rest).await, 3, "limit {limit}");
        assert_eq!(world.number("SELECT count(*) FROM lease").await, 0);
        assert!(!take(&claims, 1).await.claims.is_empty());
    }
}

/// A call that ends by its time limit or by its caller returns no connection in an unknown state to the pool.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_doubtful_returns_to_the_pool() {
    let world = World::new(REQUEST).await;
    world.insert(2).await;
    let one = pool(world.database.url(), 1).await;
    let claims = PgClaims::new(one, request().build().unwrap()).timeout(LONG);
    let claim = take_one(&claims).await.claim;
    let mut other = world.pool.begin().await.unwrap();
    other.execute("SELECT FROM request WHERE id = 1 FOR UPDATE").await.unwrap();
    // The settlement waits for the row until its time limit.
    let hasty = claims.clone().timeout(Duration::from_millis(300));
    let error = hasty.settle(&[(claim.clone(), Outcome::PutBack)]).await.unwrap_err();
    assert!(error.to_string().contains("300ms"), "{error}");
    // Here the caller drops the future.
    let dropped = tokio::spawn({
        let (claims, claim) = (claims.clone(), claim.clone());
        async move { claims.settle(&[(claim, Outcome::PutBack)]).await.map(|_| ()) }
    });
    until_waiting(&world, 2).await;
    dropped.abort();
    assert!(dropped.await.unwrap_err().is_cancelled());
    // The pool of one connection serves the next call at once.
    assert_eq!(flat(&bounded(take(&claims, 9)).await), [2]);
    other.rollback().await.unwrap();
    until_waiting(&world, 0).await;
    assert_eq!(claims.pool().size(), 1);
}

/// Two versions of the spec are in use at once, with and without attempts and errors.
#[tokio::test(flavor = "multi_thread")]
async fn two_versions_of_the_spec_at_once() {
    let world = World::new(REQUEST).await;
    world.run("INSERT INTO request (attempts_left) SELECT 2 FROM generate_series(1, 40)").await;
    let old = world.claims(
        ClaimSpec::builder(Table::new("request").unwrap())
            .state("status", States::text(["new"], "complete").taken("in-progress"))
            .lease_columns("owner", "epoch", "lease_until"),
    );
    let new = world.claims(request());
    let [mine, theirs] = [take_one(&old).await, take_one(&new).await];
    // Each version respects the other's claims, sweeps its ended leases, and settles only its own claims.
    assert_ne!(mine.rows[0].key, theirs.rows[0].key);
    assert_eq!(new.renew(std::slice::from_ref(&mine.claim), LONG).await.unwrap(), [Renewal::Renewed]);
    world.expire().await;
    assert_eq!(old.sweep(1).await.unwrap().returned.len() + new.sweep(1).await.unwrap().returned.len(), 2);
    for late in [&mine, &theirs] {
        for claims in [&old, &new] {
            let answer = settle(claims, &late.claim, Outcome::Done).await;
            assert!(matches!(answer, Err(ClaimError::Superseded { .. })), "{answer:?}");
        }
    }
    let mut workers = tokio::task::JoinSet::new();
    for claims in [old.clone(), new.clone(), old, new] {
        workers.spawn(async move {
            let mut mine = Vec::new();
            while let Some(claim) = claims.take(&Take::up_to(1)).await.unwrap().claims.pop() {
                mine.push(claim.rows[0].key.clone());
                settle(&claims, &claim.claim, Outcome::Done).await.unwrap();
            }
            mine
        });
    }
    let mut all = Vec::new();
    while let Some(mine) = bounded(workers.join_next()).await {
        all.extend(mine.unwrap());
    }
    let count = all.len();
    all.sort();
    all.dedup();
    assert_eq!((count, all.len()), (40, 40));
    assert_eq!(
        world.number("SELECT count(*) FROM request WHERE status = 'complete' AND attempts_left >= 0").await,
        40
    );
}

/// A commit publishes the row together with the wake-up, and a rollback neither. A listener receives the wake-ups sent after it
/// began to listen, and learns that its connection has ended.
#[tokio::test(flavor = "multi_thread")]
async fn an_insert_and_its_wake_up_are_one_transaction() {
    let world = World::private(REQUEST).await;
    let proxy = Proxy::start(Cluster::shared().address()).await;
    // A pool of one connection, because the listener needs a separate connection.
    let through = pool(&proxy.url(world.database.url()), 1).await;
    let claims = PgClaims::new(through, request().build().unwrap());
    let mut wake = claims.listen().await.unwrap();
    assert!(take(&claims, 1).await.claims.is_empty());
    let insert = async |commits: bool| {
        let mut work = world.pool.begin().await.unwrap();
        work.execute("INSERT INTO request (document) VALUES ('x')").await.unwrap();
        claims.notify(&mut work).await.unwrap();
        if commits { work.commit().await } else { work.rollback().await }.unwrap();
    };
    // The first insert is rolled back and must give neither a row nor a wake-up. Notifications arrive in order.
    insert(false).await;
    insert(true).await;
    insert(true).await;
    bounded(wake.woken()).await.unwrap();
    assert_eq!(take(&claims, 9).await.claims.len(), 2);
    // Dropped waits lose no wake-up.
    for _ in 0..3 {
        let _ = tokio::time::timeout(Duration::from_millis(5), wake.woken()).await;
    }
    insert(true).await;
    bounded(wake.woken()).await.unwrap();
    assert_eq!(take(&claims, 9).await.claims.len(), 1);
    // The connection breaks, and a row is inserted during the break.
    proxy.cut();
    insert(true).await;
    proxy.restore();
    let error = bounded(wake.woken()).await.unwrap_err();
    assert!(error.is_retryable(), "{error}");
    let mut wake = bounded(claims.listen()).await.unwrap();
    let mut tries = 0;
    while bounded(claims.take(&Take::up_to(9))).await.map_or(true, |taken| taken.claims.is_empty()) {
        tries += 1;
        assert!(tries < 10, "the pool does not recover");
    }
    // Later inserts wake the new listener.
    insert(true).await;
    bounded(wake.woken()).await.unwrap();
}

/// Listening times out on a server that accepts connections but does not answer.
#[tokio::test(flavor = "multi_thread")]
async fn listening_has_a_bound() {
    let world = World::private(REQUEST).await;
    let proxy = Proxy::start(Cluster::shared().address()).await;
    let through = pool(&proxy.url(world.database.url()), 1).await;
    let claims = PgClaims::new(through, request().build().unwrap()).timeout(Duration::from_millis(200));
    proxy.stall();
    let error = bounded(claims.listen()).await.unwrap_err();
    assert!(error.is_retryable(), "{error}");
    proxy.restore();
}
