//! Limits per tenant during concurrent takes, with held and leased claims.
use std::sync::Arc;

use crate::common::{LONG, REQUEST, World, beside, bounded, flat, request, take};
use leasehold_claim::group_number;
use leasehold_claim::{ClaimSpecBuilder, ClaimStore as _, ClaimedRow, PgClaims, PgHeld, Take};
use sqlx::AssertSqlSafe;
use tokio::sync::Barrier;

const TAKERS: usize = 16;

/// Limit of claimed rows per tenant.
const MOST: i64 = 5;

fn limited(spec: ClaimSpecBuilder) -> ClaimSpecBuilder {
    spec.limit("entity", 5)
}

async fn world() -> World {
    let world = World::new(&format!("{REQUEST}{}", crate::common::SIDE)).await;
    world
        .run("INSERT INTO request (entity) SELECT CASE n % 2 WHEN 0 THEN 'a' ELSE 'b' END FROM generate_series(1, 60) n")
        .await;
    world
}

const AT_WORK: &str = "SELECT count(*) FROM request WHERE status = 'in-progress'";

async fn race(world: &World, spec: fn() -> ClaimSpecBuilder, held: usize) {
    for round in 0..3 {
        let barrier = Arc::new(Barrier::new(TAKERS));
        let mut takers = Vec::new();
        for taker in 0..TAKERS {
            let (barrier, pool) = (Arc::clone(&barrier), world.pool.clone());
            takers.push(tokio::spawn(async move {
                let spec = limited(spec()).build().unwrap();
                barrier.wait().await;
                if taker < held {
                    return PgHeld::new(pool, spec)
                        .timeout(LONG)
                        .begin(&Take::up_to(1 + taker as u32 % 3))
                        .await
                        .unwrap();
                }
                let claims = PgClaims::new(pool, spec).timeout(LONG);
                claims.take(&Take::up_to(1 + taker as u32 % 7)).await.unwrap();
                None
            }));
        }
        let mut holds = Vec::new();
        for taker in takers {
            holds.extend(bounded(taker).await.unwrap());
        }
        let by_hold = |tenant: &str| {
            let of = |row: &&ClaimedRow| row.work["entity"] == tenant;
            let rows = holds.iter().flat_map(|hold| hold.taken().claims.iter()).flat_map(|claim| &claim.rows);
            rows.filter(of).count() as i64
        };
        for tenant in ["a", "b"] {
            let leased = world.number(&format!("{AT_WORK} AND entity = '{tenant}'")).await;
            let all = leased + by_hold(tenant);
            assert!(all <= MOST, "round {round}: {all} of {tenant}, {leased} of them leased");
        }
        // No other worker takes now, so this loop takes all rows within the limit.
        let claims = world.claims(limited(spec()));
        while !take(&claims, 9).await.claims.is_empty() {}
        let all = world.number(AT_WORK).await + by_hold("a") + by_hold("b");
        assert!(if held == 0 { all == 2 * MOST } else { all <= 2 * MOST }, "round {round}: {all}");
        for hold in holds {
            bounded(hold.rollback()).await.unwrap();
        }
        world
            .run("UPDATE request SET status = 'new', owner = NULL, lease_until = NULL; TRUNCATE lease")
            .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn sixteen_takers_never_exceed_the_limit() {
    race(&world().await, request, 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nor_do_they_with_leases_in_a_side_table() {
    race(&world().await, beside, 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nor_do_held_and_leased_claims_together() {
    race(&world().await, request, 8).await;
}

/// The limit also applies to several takes of one transaction.
#[tokio::test]
async fn one_transaction_has_no_more_than_the_limit() {
    let world = world().await;
    let held = PgHeld::new(world.pool.clone(), request().limit("entity", 2).build().unwrap());
    let mut transaction = world.pool.begin().await.unwrap();
    let mut seen = Vec::new();
    for _ in 0..3 {
        seen.extend(flat(&held.take_in(&mut transaction, &Take::up_to(2)).await.unwrap()));
    }
    assert_eq!(seen, [1, 2, 3, 4]);
    let other = held.begin(&Take::up_to(9)).await.unwrap();
    assert!(other.is_none(), "{other:?}");
    transaction.rollback().await.unwrap();
    assert_eq!(held.begin(&Take::up_to(9)).await.unwrap().unwrap().taken().claims.len(), 4);
}

/// Concurrent takes exclude each other per tenant. The second take skips the tenant and takes rows of other tenants.
#[tokio::test]
async fn whoever_takes_keeps_others_from_the_tenant() {
    let world = world().await;
    let claims = world.claims(limited(request()));
    let number = group_number(world.number("'request'::regclass::oid").await, "limit of entity\0a");
    let mut other = world.pool.begin().await.unwrap();
    let lock = AssertSqlSafe(format!("SELECT pg_advisory_xact_lock({number})"));
    sqlx::raw_sql(lock).execute(&mut *other).await.unwrap();
    let taken = take(&claims, 9).await;
    assert_eq!(flat(&taken), [1, 3, 5, 7, 9]);
    assert!(taken.skipped > 0, "{taken:?}");
    let held = PgHeld::new(world.pool.clone(), limited(request()).build().unwrap());
    assert!(held.begin(&Take::up_to(9)).await.unwrap().is_none());
    other.rollback().await.unwrap();
    assert_eq!(flat(&take(&claims, 9).await), [2, 4, 6, 8, 10]);
}
