//! The claimer on real servers: load, faults, poolers, frozen and killed workers.
use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::{Probe, within};
use crate::pg::{COMPLETE, id, insert, number, pool, prepare, spec, until_number};
use leasehold_claim::api::LossReason;
use leasehold_claim::sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use leasehold_claim::sqlx::query;
use leasehold_claim::{Claim, ClaimError, Claimer, Outcome, PgClaims};
use test_servers::{Cluster, ClusterOptions, PgBouncer, StopMode, fresh_database};
use tokio::time::sleep;

/// With one claimer, then eight, then one under load, no row is lost or settled twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_row_is_lost_or_settled_twice_while_workers_come_and_go() {
    let database = fresh_database().await;
    let admin = prepare(database.url()).await;
    let pool = pool(database.url(), 12).await;
    let done: Arc<Mutex<HashMap<i64, u32>>> = Arc::default();
    let start = || {
        let store = PgClaims::new(pool.clone(), spec().build().unwrap());
        let claimer = Claimer::builder(Arc::new(store))
            .batch(20)
            .ahead(20)
            .poll(Duration::from_secs(1))
            .start()
            .unwrap();
        let workers: Vec<_> = (0..4)
            .map(|_| {
                let (claimer, done) = (claimer.clone(), Arc::clone(&done));
                tokio::spawn(async move {
                    while let Some(claim) = claimer.next().await {
                        let id = id(&claim);
                        claim.done().await.unwrap();
                        *done.lock().unwrap().entry(id).or_default() += 1;
                    }
                })
            })
            .collect();
        (claimer, workers)
    };
    let load = tokio::spawn({
        let admin = admin.clone();
        async move {
            for _ in 0..30 {
                insert(&admin, 100).await;
                sleep(Duration::from_millis(20)).await;
            }
        }
    });
    let first = start();
    sleep(Duration::from_millis(150)).await;
    let mut others: Vec<_> = (0..7).map(|_| start()).collect();
    sleep(Duration::from_millis(300)).await;
    for (n, (claimer, workers)) in others.drain(..).enumerate() {
        if n % 2 == 0 {
            within("closing", claimer.close()).await.unwrap();
        }
        // The other claimers are only dropped during their work, and their rows are returned.
        drop(claimer);
        for worker in workers {
            if n % 2 == 0 {
                within("a worker", worker).await.unwrap();
            } else {
                worker.abort();
            }
        }
    }
    within("the load", load).await.unwrap();
    until_number("all is done", &admin, COMPLETE, 3000).await;
    within("closing", first.0.close()).await.unwrap();
    for worker in first.1 {
        within("a worker", worker).await.unwrap();
    }
    let done = done.lock().unwrap().clone();
    assert!(done.values().all(|times| *times == 1), "no row is settled twice");
    // An aborted worker might have settled a row without counting it, but counts only settled rows.
    assert!((2900..=3000).contains(&done.len()), "{} were counted", done.len());
    assert_eq!(
        number(&admin, "SELECT count(*) FROM request WHERE owner IS NOT NULL AND status = 'new'").await,
        0
    );
}

/// Sixteen claimers share one hot group, never two at once, and all rows are done soon.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixteen_claimers_on_one_hot_group_make_progress() {
    let database = fresh_database().await;
    let admin = prepare(database.url()).await;
    let pool = pool(database.url(), 16).await;
    let (inside, runs) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let mut claimers = Vec::new();
    for _ in 0..16 {
        let spec = spec().group("entity").grouped().build().unwrap();
        // The next poll is far away, so only passes and local settlements can find the rows.
        let claimer = Claimer::builder(Arc::new(PgClaims::new(pool.clone(), spec)))
            .poll(Duration::from_secs(600))
            .start()
            .unwrap();
        claimers.push(claimer.clone());
        let (inside, runs) = (Arc::clone(&inside), Arc::clone(&runs));
        tokio::spawn(async move {
            let handler = move |claim: Claim| {
                let (inside, runs) = (Arc::clone(&inside), Arc::clone(&runs));
                async move {
                    assert_eq!(claim.group(), Some("hot"));
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two at one entity");
                    runs.fetch_add(claim.rows().len(), Ordering::SeqCst);
                    sleep(Duration::from_millis(2)).await;
                    inside.fetch_sub(1, Ordering::SeqCst);
                    Ok::<(), String>(())
                }
            };
            claimer.run(2, handler).await.unwrap();
        });
    }
    for round in 1..=20 {
        let rows = query("INSERT INTO request (entity) SELECT 'hot' FROM generate_series(1, 10)");
        rows.execute(&admin).await.unwrap();
        for claimer in &claimers {
            claimer.wake();
        }
        // Long before the next poll.
        until_number("a round", &admin, COMPLETE, round * 10).await;
    }
    assert_eq!(runs.load(Ordering::SeqCst), 200, "each row was worked on once");
    for claimer in &claimers {
        within("closing", claimer.close()).await.unwrap();
    }
}

/// On a real server, an announcement wakes the claimer at once, and it scans again after its listener was cut off.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claimer_scans_again_after_its_listener_was_cut_off() {
    let database = fresh_database().await;
    let admin = prepare(database.url()).await;
    let claims = PgClaims::new(admin.clone(), spec().build().unwrap());
    let store = Probe::of(claims.clone());
    let claimer = Claimer::builder(store.clone()).poll(Duration::from_secs(600)).start().unwrap();
    let next = || {
        let claimer = claimer.clone();
        tokio::spawn(async move { claimer.next().await.unwrap().done().await })
    };

    let announced = next();
    // Waits until the claimer sends no more queries before its next poll.
    within("an idle claimer", async {
        let mut before = 0;
        while before == 0 || store.claim_queries() != before {
            before = store.claim_queries();
            sleep(Duration::from_millis(1500)).await;
        }
    })
    .await;
    let mut transaction = admin.begin().await.unwrap();
    query("INSERT INTO request DEFAULT VALUES").execute(&mut *transaction).await.unwrap();
    claims.notify(&mut transaction).await.unwrap();
    transaction.commit().await.unwrap();
    // Long before the next poll.
    within("the announced row", announced).await.unwrap().unwrap();

    let unannounced = next();
    sleep(Duration::from_millis(500)).await;
    let cut = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
               WHERE datname = current_database() AND query ILIKE 'LISTEN%'";
    let mut cut_off = 0;
    // Inserts the row during the cut, so the row exists before the claimer listens again.
    let mut transaction = admin.begin().await.unwrap();
    query("INSERT INTO request DEFAULT VALUES").execute(&mut *transaction).await.unwrap();
    cut_off += number(&admin, cut).await;
    transaction.commit().await.unwrap();
    assert!(cut_off >= 1, "somebody listened");
    within("the row that nobody announced", unannounced).await.unwrap().unwrap();
    claimer.close().await.unwrap();
}

/// A claim and its claimer survive a restart of the server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_of_the_server_in_the_middle_of_a_claim() {
    let cluster = Cluster::start(ClusterOptions::new());
    let url = cluster.url("postgres");
    let admin = prepare(&url).await;
    insert(&admin, 2).await;
    let store = PgClaims::new(pool(&url, 4).await, spec().build().unwrap());
    let claimer = Claimer::builder(Arc::new(store))
        .lease(Duration::from_secs(600))
        .ahead(0)
        .poll(Duration::from_secs(2))
        .start()
        .unwrap();
    let first = within("a claim", claimer.next()).await.unwrap();
    let second = within("a claim", claimer.next()).await.unwrap();
    cluster.stop(StopMode::Immediate).await;
    let ending = tokio::spawn(first.done());
    sleep(Duration::from_millis(500)).await;
    assert!(!ending.is_finished(), "it is tried for as long as the lease lasts");
    cluster.start_again().await;
    within("the end of the first", ending).await.unwrap().unwrap();
    assert!(second.is_valid());
    second.done().await.unwrap();

    let next = tokio::spawn({
        let claimer = claimer.clone();
        async move { claimer.next().await.unwrap().done().await }
    });
    let admin = pool(&url, 1).await;
    insert(&admin, 1).await;
    within("a new row", next).await.unwrap().unwrap();
    assert_eq!(number(&admin, COMPLETE).await, 3);
    assert_eq!(number(&admin, "SELECT max(epoch) FROM request").await, 1, "each was taken once");
}

/// Behind `PgBouncer` in transaction mode, leases work, and polls find new rows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn behind_a_pooler_leases_work_and_polls_find_the_work() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let admin = prepare(database.url()).await;
    let bouncer = PgBouncer::transaction_mode(cluster);
    let options = bouncer.url(database.name()).parse::<PgConnectOptions>().unwrap();
    // The pooler refuses this option by default.
    let options = options.extra_float_digits(None);
    let pool = PgPoolOptions::new().max_connections(4).connect_with(options).await.unwrap();
    let store = Probe::of(PgClaims::new(pool, spec().build().unwrap()).behind_pooler());
    let claimer = Claimer::builder(store.clone())
        .lease(Duration::from_secs(12))
        .poll(Duration::from_millis(500))
        .start()
        .unwrap();
    let next = tokio::spawn({
        let claimer = claimer.clone();
        async move { claimer.next().await.unwrap() }
    });
    within("a first query", async {
        while store.claim_queries() == 0 {
            sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    insert(&admin, 1).await;
    let claim = within("found by a poll", next).await.unwrap();
    assert!(store.listens.load(Ordering::SeqCst) >= 1);
    let until = "SELECT extract(epoch FROM lease_until)::bigint FROM request";
    let first = number(&admin, until).await;
    within("a renewal", async {
        while number(&admin, until).await <= first {
            sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
    assert!(claim.is_valid());
    claim.done().await.unwrap();
    assert_eq!(number(&admin, COMPLETE).await, 1);
    claimer.close().await.unwrap();
}

/// A claim is settled in the worker's own transaction, so effect and settlement are committed together or not at all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_ends_in_the_callers_transaction() {
    let database = fresh_database().await;
    let admin = prepare(database.url()).await;
    insert(&admin, 2).await;
    let claims = PgClaims::new(admin.clone(), spec().build().unwrap());
    let claimer = Claimer::builder(Arc::new(claims.clone())).ahead(0).start().unwrap();
    let mut claim = within("a claim", claimer.next()).await.unwrap();
    let lost = claim.lost();
    let begin = async |id: i64| {
        let mut transaction = admin.begin().await.unwrap();
        let effect = query("INSERT INTO effect VALUES ($1, 1)").bind(id);
        effect.execute(&mut *transaction).await.unwrap();
        transaction
    };
    // A refused settlement: nothing is written, and the claim stays valid.
    let refused = claim.settle_with(&claims, begin(1).await, Outcome::To("unheard-of".into())).await;
    assert!(refused.is_err());
    assert_eq!(number(&admin, "SELECT count(*) FROM effect").await, 0);
    assert!(claim.is_valid());
    claim.settle_with(&claims, begin(1).await, Outcome::Done).await.unwrap();
    assert_eq!((number(&admin, "SELECT count(*) FROM effect").await, number(&admin, COMPLETE).await), (1, 1));
    // After its end, the claim cannot be settled again, and its drop changes nothing.
    assert!(matches!(
        claim.settle_with(&claims, begin(1).await, Outcome::Done).await,
        Err(ClaimError::Unsupported(_))
    ));
    drop(claim);
    assert!(lost.reason().is_none());

    // The settlement of a lost claim: the effect is rolled back.
    let mut claim = within("a claim", claimer.next()).await.unwrap();
    query("UPDATE request SET epoch = epoch + 1 WHERE id = 2").execute(&admin).await.unwrap();
    let error = claim.settle_with(&claims, begin(2).await, Outcome::Done).await.unwrap_err();
    assert!(matches!(error, ClaimError::Superseded { epoch: 1, current_epoch: Some(2), .. }), "{error}");
    assert_eq!(within("the loss", claim.lost()).await, LossReason::Gone);
    drop(claim);
    assert_eq!((number(&admin, "SELECT count(*) FROM effect").await, number(&admin, COMPLETE).await), (1, 1));
    within("closing", claimer.close()).await.unwrap();
}

/// The same in a handler, whose outcome counts only if the claim was not settled in the transaction.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_ends_its_claim_in_its_transaction() {
    let database = fresh_database().await;
    let admin = prepare(database.url()).await;
    insert(&admin, 10).await;
    let claims = PgClaims::new(admin.clone(), spec().build().unwrap());
    let claimer = Claimer::builder(Arc::new(claims.clone())).start().unwrap();
    let running = tokio::spawn({
        let claimer = claimer.clone();
        async move {
            let handler = |mut claim: Claim| {
                let claims = claims.clone();
                async move {
                    let id = id(&claim);
                    let mut transaction = claims.pool().begin().await?;
                    let effect = query("INSERT INTO effect VALUES ($1, $2)").bind(id).bind(claim.epoch());
                    effect.execute(&mut *transaction).await?;
                    let end = if id == 3 { Outcome::To("unheard-of".into()) } else { Outcome::Done };
                    claim.settle_with(&claims, transaction, end).await?;
                    Err::<(), Box<dyn std::error::Error + Send + Sync>>("this counts no more".into())
                }
            };
            claimer.run(4, handler).await.unwrap();
        }
    });
    until_number("nine are done", &admin, COMPLETE, 9).await;
    let failed =
        "SELECT count(*) FROM request WHERE id = 3 AND status = 'error' AND error LIKE '%unheard-of%'";
    until_number("the third has failed", &admin, failed, 1).await;
    let effects = "SELECT count(*) FROM effect JOIN request ON id = request WHERE status = 'complete' AND error IS NULL";
    assert_eq!(number(&admin, effects).await, 9);
    assert_eq!(number(&admin, "SELECT count(*) FROM effect").await, 9);
    within("closing", claimer.close()).await.unwrap();
    within("the handlers", running).await.unwrap();
}

/// Many workers behind one claimer need far fewer statements than as many claimers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_workers_share_statements() {
    let database = fresh_database().await;
    let admin = prepare(database.url()).await;
    insert(&admin, 2000).await;
    let store = Probe::of(PgClaims::new(pool(database.url(), 8).await, spec().build().unwrap()));
    let claimer = Claimer::builder(store.clone()).ahead(100).start().unwrap();
    let left = Arc::new(AtomicI64::new(2000));
    let workers: Vec<_> = (0..32)
        .map(|_| {
            let (claimer, left) = (claimer.clone(), Arc::clone(&left));
            tokio::spawn(async move {
                while let Some(claim) = claimer.next().await {
                    claim.done().await.unwrap();
                    if left.fetch_sub(1, Ordering::SeqCst) == 1 {
                        let _ = claimer.close().await;
                    }
                }
            })
        })
        .collect();
    for worker in workers {
        within("a worker", worker).await.unwrap();
    }
    assert_eq!(number(&admin, COMPLETE).await, 2000);
    let (takes, settles) = (store.takes.load(Ordering::SeqCst), store.settles.load(Ordering::SeqCst));
    assert!(takes <= 200, "{takes} takes for 2000 rows");
    assert!(settles <= 700, "{settles} settles for 2000 rows");
}
