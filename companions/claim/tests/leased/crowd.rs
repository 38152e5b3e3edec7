//! Many workers at once on one table in Postgres.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::common::*;
use leasehold_claim::{
    ClaimError, ClaimRef, ClaimSpec, ClaimStore as _, Outcome, PgClaims, PgHeld, Renewal, RowKey, Sql,
    States, Table, Take,
};
use leasehold_claim::{Pass, PassEnd};
use sqlx::Executor as _;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use tokio::task::JoinSet;

const WORKERS: u32 = 16;

/// Opens a pool whose sessions fail if they wait for a lock for a minute.
async fn impatient(world: &World) -> sqlx::PgPool {
    let options: PgConnectOptions = world.database.url().parse().unwrap();
    let pool = PgPoolOptions::new().max_connections(WORKERS).acquire_timeout(LONG);
    let pool = pool.connect_with(options.options([("lock_timeout", "1min")])).await.unwrap();
    let set: String = sqlx::query_scalar("SHOW lock_timeout").fetch_one(&pool).await.unwrap();
    assert_eq!(set, "1min");
    pool
}

/// Opens a transaction that has locked the first row and stays idle.
async fn idle(world: &World) -> sqlx::Transaction<'static, sqlx::Postgres> {
    let mut idle = world.pool.begin().await.unwrap();
    assert_eq!(idle.execute("SELECT FROM request WHERE id = 1 FOR UPDATE").await.unwrap().rows_affected(), 1);
    idle
}

/// Runs `work`, which takes rows, in sixteen workers until they have taken `wanted` rows. Returns all of them, sorted.
async fn by_sixteen<W: Future<Output = Vec<i64>> + Send + 'static>(
    wanted: u32,
    work: impl Fn(Take) -> W + Clone + Send + Sync + 'static,
) -> Vec<i64> {
    let left = Arc::new(AtomicI64::new(wanted.into()));
    let mut workers = JoinSet::new();
    for worker in 0..WORKERS {
        let (left, work) = (Arc::clone(&left), work.clone());
        // Some workers take single rows, others batches.
        let limit = [1, 7, 20, 50][worker as usize % 4];
        workers.spawn(async move {
            let mut mine = Vec::new();
            while left.load(Ordering::Relaxed) > 0 {
                let some = work(Take::up_to(limit)).await;
                assert!(some.len() <= limit as usize);
                left.fetch_sub(some.len() as i64, Ordering::Relaxed);
                mine.extend(some);
            }
            mine
        });
    }
    let mut all = Vec::new();
    while let Some(mine) = bounded(workers.join_next()).await {
        all.extend(mine.unwrap());
    }
    all.sort_unstable();
    all
}

/// An idle transaction has locked the first row, which every take reads, for the whole run. A worker that waited for it would
/// get 55P03 after a minute. The workers take each other row exactly once, and the first row after the rollback.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn sixteen_workers_take_each_row_once_beside_an_idle_transaction() {
    for (spec, rows) in [(request(), 10_000), (beside(), 4_000)] {
        let world = World::new(&[REQUEST, SIDE].concat()).await;
        world.insert(rows).await;
        world.run("ANALYZE request").await;
        let idle = idle(&world).await;
        let claims = PgClaims::new(impatient(&world).await, spec.build().unwrap()).timeout(LONG);
        let taking = claims.clone();
        let taken = by_sixteen(rows - 1, move |take| {
            let claims = taking.clone();
            async move { flat(&claims.take(&take).await.unwrap()) }
        });
        assert_eq!(taken.await, (2..=i64::from(rows)).collect::<Vec<_>>());
        let taken = "SELECT count(*) FROM request WHERE status = 'in-progress'";
        assert_eq!(world.number(taken).await, i64::from(rows) - 1);
        assert!(flat(&take(&claims, 1).await).is_empty());
        idle.rollback().await.unwrap();
        assert_eq!(flat(&take(&claims, 2).await), [1]);
    }
}

/// The same with held claims: each transaction locks its rows during the work, and other workers wait for neither.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn held_claims_take_each_row_once_beside_an_idle_transaction() {
    const ROWS: u32 = 1_000;
    let world = World::new(REQUEST).await;
    world.insert(ROWS).await;
    world.run("ANALYZE request").await;
    let idle = idle(&world).await;
    let held = PgHeld::new(impatient(&world).await, request().build().unwrap()).timeout(LONG);
    let holding = held.clone();
    let taken = by_sixteen(ROWS - 1, move |take| {
        let held = holding.clone();
        async move {
            let Some(mut hold) = held.begin(&take).await.unwrap() else { return Vec::new() };
            // The work, in the same transaction.
            sqlx::query("SELECT pg_sleep(0.001)").execute(hold.connection()).await.unwrap();
            let mine = flat(hold.taken());
            for claimed in hold.taken().claims.clone() {
                hold.settle(&claimed.claim, &Outcome::Done).await.unwrap();
            }
            hold.commit().await.unwrap();
            mine
        }
    });
    assert_eq!(taken.await, (2..=i64::from(ROWS)).collect::<Vec<_>>());
    let done = "SELECT count(*) FROM request WHERE status = 'complete'";
    assert_eq!(world.number(done).await, i64::from(ROWS) - 1);
    assert!(held.begin(&Take::up_to(1)).await.unwrap().is_none());
    idle.rollback().await.unwrap();
    assert_eq!(flat(held.begin(&Take::up_to(2)).await.unwrap().unwrap().taken()), [1]);
}

/// A claim whose statement started before another claim's commit must not take the same row. The statement's snapshot shows
/// the old row, so it checks the state again after the lock. If a take does not change the row, only the key of the side
/// table prevents a second claim.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_with_an_old_snapshot_takes_no_row_twice() {
    let plain = "CREATE TABLE plain (id bigint PRIMARY KEY, done boolean NOT NULL DEFAULT false, owner uuid, epoch bigint,
            lease_until timestamptz);
        INSERT INTO plain VALUES (1), (2);";
    let slow = || Sql::trusted("pg_catalog.pg_advisory_xact_lock_shared(7) IS NOT NULL");
    let spec = || ClaimSpec::builder(Table::new("plain").unwrap()).state("done", States::boolean());
    let columns = || spec().lease_columns("owner", "epoch", "lease_until");
    let side = || spec().side_table(Table::new("lease").unwrap());
    for is_side in [false, true] {
        for limit in [1, 2] {
            let world = World::new(&[plain, SIDE].concat()).await;
            let spec = || if is_side { side() } else { columns() };
            let (quick, slow) = (world.claims(spec()), world.claims(spec().filter(slow())));
            let mut gate = world.pool.begin().await.unwrap();
            gate.execute("SELECT pg_advisory_xact_lock(7)").await.unwrap();
            let late = tokio::spawn(async move { take(&slow, limit).await });
            until_waiting(&world, 1).await;
            let first = take_one(&quick).await;
            assert_eq!(first.rows[0].key, RowKey::new(1));
            gate.rollback().await.unwrap();
            let late = bounded(late).await.unwrap();
            assert!(!flat(&late).contains(&1), "taken twice: {late:?}");
            settle(&quick, &first.claim, Outcome::Done).await.unwrap();
        }
    }
}

/// Sixteen workers on one hot entity, never two at once. Every round makes progress, and all rows are done in bounded time,
/// although workers only try.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn sixteen_workers_on_a_hot_group_finish_it_one_at_a_time() {
    const ROUNDS: u32 = 40;
    for spec in [request().group("hot"), beside().group("hot")] {
        let world =
            World::new(&[REQUEST, SIDE, "ALTER TABLE request ADD hot text DEFAULT 'one';"].concat()).await;
        world.insert(1).await;
        let claims = world.claims(spec.grouped());
        let inside = Arc::new(AtomicU32::new(0));
        let rounds = Arc::new(AtomicU32::new(0));
        let skipped = Arc::new(AtomicU32::new(0));
        let began = Instant::now();
        let mut workers = JoinSet::new();
        for _ in 0..WORKERS {
            let (claims, inside, rounds) = (claims.clone(), Arc::clone(&inside), Arc::clone(&rounds));
            let skipped = Arc::clone(&skipped);
            workers.spawn(async move {
                let mut pass = Pass::new();
                loop {
                    let taken = claims.take(&Take::up_to(2).after(pass.cursor())).await.unwrap();
                    pass.record(&taken);
                    for claim in &taken.claims {
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two at one entity");
                        if rounds.fetch_add(1, Ordering::SeqCst) < ROUNDS {
                            // More work for the same entity during the claim.
                            sqlx::query("INSERT INTO request (document) VALUES ('more'), ('and more')")
                                .execute(claims.pool())
                                .await
                                .unwrap();
                        }
                        // Keeps the claim until another worker has skipped the group.
                        while skipped.load(Ordering::SeqCst) == 0 {
                            tokio::time::sleep(Duration::from_millis(1)).await;
                        }
                        inside.fetch_sub(1, Ordering::SeqCst);
                        settle(&claims, &claim.claim, Outcome::Done).await.unwrap();
                    }
                    if taken.claims.is_empty() && taken.cursor.is_none() {
                        let pending = claims.pending(&Take::up_to(1)).await.unwrap();
                        match pass.end(pending) {
                            PassEnd::Clean => return,
                            PassEnd::Found => {}
                            PassEnd::Skipped => {
                                skipped.fetch_add(1, Ordering::SeqCst);
                                tokio::time::sleep(Duration::from_millis(fastrand::u64(1..5))).await;
                            }
                        }
                    }
                }
            });
        }
        while let Some(of_one) = bounded(workers.join_next()).await {
            of_one.unwrap();
        }
        assert_eq!(
            world.number("SELECT count(*) FROM request WHERE status <> 'complete'").await,
            0,
            "stranded"
        );
        assert_eq!(world.number("SELECT count(*) FROM request").await, i64::from(2 * ROUNDS) + 1);
        let all = rounds.load(Ordering::SeqCst);
        assert!(all > ROUNDS, "{all} rounds");
        assert!(began.elapsed() < LONG, "{:?} for {all} rounds", began.elapsed());
    }
}

/// Settles, renewals, sweeps and requeues of the same rows in opposite orders. All of them lock rows in one order or do not
/// wait, so there is no deadlock, and each claim ends once.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn crossing_batches_do_not_deadlock() {
    for spec in [request(), beside()] {
        let world = World::new(&[REQUEST, SIDE].concat()).await;
        world.insert(120).await;
        let claims = world.claims(spec);
        let mut ended: BTreeMap<&str, u32> = BTreeMap::new();
        for _ in 0..6 {
            let taken = take(&claims, 120).await;
            let all: Vec<ClaimRef> = taken.claims.iter().map(|claim| claim.claim.clone()).collect();
            world
                .run(
                    "UPDATE request SET lease_until = '-infinity' WHERE id % 2 = 0;
                UPDATE lease SET lease_until = '-infinity' WHERE id::int % 2 = 0",
                )
                .await;
            let mut work: JoinSet<(&str, u32)> = JoinSet::new();
            for turn in 0..4 {
                let (claims, mut all) = (claims.clone(), all.clone());
                if turn % 2 == 1 {
                    all.reverse();
                }
                work.spawn(async move { ("settled", put_back(&claims, &all).await) });
            }
            for turn in 0..2 {
                let (renewing, mut all) = (claims.clone(), all.clone());
                if turn % 2 == 1 {
                    all.reverse();
                }
                work.spawn(async move {
                    let renewals = renewing.renew(&all, LONG).await.unwrap();
                    ("renewed", renewals.iter().filter(|one| **one == Renewal::Renewed).count() as u32)
                });
                let claims = claims.clone();
                work.spawn(async move { ("swept", claims.sweep(120).await.unwrap().returned.len() as u32) });
            }
            let mut this: BTreeMap<&str, u32> = BTreeMap::new();
            while let Some(done) = bounded(work.join_next()).await {
                let (what, count) = done.unwrap();
                *this.entry(what).or_default() += count;
            }
            assert_eq!(this["settled"] + this["swept"], 120, "{this:?}");
            for (what, count) in this {
                *ended.entry(what).or_default() += count;
            }
        }
        assert_eq!(world.number("SELECT count(*) FROM request WHERE status = 'new'").await, 120);
        let deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
        world.run("SELECT pg_stat_clear_snapshot()").await;
        assert_eq!(world.number(deadlocks).await, 0, "{ended:?}");
    }
}

/// Puts back all claims, and retries rows that another batch has locked. Returns the number of claims put back.
async fn put_back(claims: &PgClaims, all: &[ClaimRef]) -> u32 {
    let mut left: Vec<_> = all.iter().map(|claim| (claim.clone(), Outcome::PutBack)).collect();
    let mut count = 0;
    while !left.is_empty() {
        let answers = bounded(claims.settle(&left)).await.unwrap();
        let mut busy = Vec::new();
        for (one, answer) in left.into_iter().zip(answers) {
            match answer {
                Ok(_) => count += 1,
                Err(ClaimError::Superseded { .. }) => {}
                Err(ClaimError::Busy { .. }) => busy.push(one),
                Err(error) => panic!("{error}"),
            }
        }
        left = busy;
    }
    count
}
