//! Interference with claimed rows: locks, references, and unreadable values.
use std::sync::Arc;
use std::time::Duration;

use crate::common::{REQUEST, World, bounded, flat, request, take, take_one};
use leasehold_claim::{
    ClaimError, ClaimSpec, ClaimStore, Claimer, Outcome, PgHeld, Renewal, Retention, States, Table, Take,
    Unmet,
};
use serde_json::json;
use sqlx::{Acquire as _, Executor as _};

/// A batch skips a locked row and settles the others at once.
#[tokio::test(flavor = "multi_thread")]
async fn a_locked_row_does_not_hold_up_the_others_of_a_batch() {
    let world = World::new(REQUEST).await;
    world.insert(3).await;
    let claims = world.claims(request());
    let taken = take(&claims, 3).await.claims;
    let mut other = world.pool.acquire().await.unwrap();
    let mut tx = other.begin().await.unwrap();
    tx.execute("UPDATE request SET document = 'mine' WHERE id = 2").await.unwrap();
    let all: Vec<_> = taken.iter().map(|row| (row.claim.clone(), Outcome::Done)).collect();
    let answers = bounded(claims.settle(&all)).await.unwrap();
    assert!(matches!(&answers[..], [Ok(_), Err(ClaimError::Busy { .. }), Ok(_)]), "{answers:?}");
    tx.commit().await.unwrap();
    bounded(claims.settle_one(&taken[1].claim, Outcome::Done)).await.unwrap();
    assert_eq!(world.number("SELECT count(*) FROM request WHERE status = 'complete'").await, 3);
    // Settled rows are not busy, but no longer belong to the claim.
    let again = bounded(claims.settle(&all)).await.unwrap();
    assert!(again.iter().all(|answer| matches!(answer, Err(ClaimError::Superseded { .. }))), "{again:?}");
}

/// The claimer retries a locked row until it is unlocked, without an error for the worker.
#[tokio::test(flavor = "multi_thread")]
async fn a_claimer_settles_a_locked_row_as_soon_as_it_is_free() {
    let world = World::new(REQUEST).await;
    world.insert(20).await;
    let claimer = Claimer::builder(Arc::new(world.claims(request()))).start().unwrap();
    let mut held = Vec::new();
    for _ in 0..20 {
        held.push(bounded(claimer.next()).await.unwrap());
    }
    let mut other = world.pool.acquire().await.unwrap();
    let mut tx = other.begin().await.unwrap();
    tx.execute("UPDATE request SET document = 'mine' WHERE id = 11").await.unwrap();
    let ends: Vec<_> = held.into_iter().map(|claim| tokio::spawn(claim.done())).collect();
    bounded(async {
        while world.number("SELECT count(*) FROM request WHERE status = 'complete'").await < 19 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
    tx.commit().await.unwrap();
    for end in ends {
        bounded(end).await.unwrap().unwrap();
    }
    bounded(claimer.close()).await.unwrap();
}

/// Rows that refer to a claimed row, in a long open transaction, block no operation of claims.
#[tokio::test(flavor = "multi_thread")]
async fn references_to_a_row_do_not_keep_it_from_being_renewed_settled_or_taken() {
    let world = World::new(REQUEST).await;
    world.run("CREATE TABLE result (request_id bigint REFERENCES request)").await;
    world.insert(3).await;
    let claims = world.claims(request());
    let taken = take(&claims, 2).await.claims;
    let mut other = world.pool.acquire().await.unwrap();
    let mut tx = other.begin().await.unwrap();
    tx.execute("INSERT INTO result VALUES (1), (3)").await.unwrap();
    let both: Vec<_> = taken.iter().map(|row| row.claim.clone()).collect();
    let renewed = bounded(claims.renew(&both, Duration::from_secs(30))).await.unwrap();
    assert_eq!(renewed, [Renewal::Renewed, Renewal::Renewed]);
    let all: Vec<_> = both.into_iter().map(|claim| (claim, Outcome::Done)).collect();
    let answers = bounded(claims.settle(&all)).await.unwrap();
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    assert_eq!(flat(&take(&claims, 5).await), [3]);
    world.expire().await;
    assert_eq!(bounded(claims.sweep(5)).await.unwrap().returned.len(), 1);
    tx.rollback().await.unwrap();
}

/// If the work of a row contains a number that cannot be read, the worker gets it as text. Other rows are unaffected.
#[tokio::test(flavor = "multi_thread")]
async fn unreadable_work_is_its_own_workers_business() {
    let world = World::new(
        "CREATE TABLE job (id bigint PRIMARY KEY, status text NOT NULL DEFAULT 'new', amount json,
            owner uuid, epoch bigint NOT NULL DEFAULT 0, lease_until timestamptz);
        INSERT INTO job (id, amount) VALUES (1, '7'), (2, '1e400'), (3, '8')",
    )
    .await;
    let spec = ClaimSpec::builder(Table::new("job").unwrap())
        .state("status", States::text(["new"], "complete").taken("in-progress"))
        .lease_columns("owner", "epoch", "lease_until")
        .work(["amount"]);
    let claims = world.claims(spec);
    let taken = take(&claims, 5).await;
    let work: Vec<_> = taken.claims.iter().map(|claim| &claim.rows[0].work).collect();
    assert_eq!((work[0], work[2]), (&json!({ "amount": 7 }), &json!({ "amount": 8 })));
    assert!(
        work[1].is_string() && taken.claims[1].rows[0].work::<serde_json::Map<_, _>>().is_err(),
        "{work:?}"
    );
    // The same for held claims.
    world.run("UPDATE job SET status = 'new', owner = NULL, lease_until = NULL").await;
    let held = PgHeld::new(world.pool.clone(), claims.spec().clone());
    let hold = bounded(held.begin(&Take::up_to(5))).await.unwrap().unwrap();
    let kinds: Vec<_> = hold.taken().claims.iter().map(|claim| claim.rows[0].work.is_string()).collect();
    assert_eq!(kinds, [false, true, false]);
    hold.rollback().await.unwrap();
}

/// A timeout of zero in the row is ignored, and the claim's own lease applies.
#[tokio::test(flavor = "multi_thread")]
async fn a_timeout_of_zero_is_none() {
    let world = World::new(REQUEST).await;
    world.run("INSERT INTO request (timeout_s) VALUES (0)").await;
    let claims = world.claims(request().timeout_seconds("timeout_s"));
    let claimed = bounded(claims.take(&Take::up_to(1).lease(Duration::from_secs(3600)))).await.unwrap();
    assert_eq!(claimed.claims[0].lease, Duration::from_secs(3600));
    let lasts = "SELECT bool_and(lease_until > clock_timestamp() + interval '50 minutes') FROM request";
    assert_eq!(world.text(lasts).await, "true");
    let renewed = claims.renew(&[claimed.claims[0].claim.clone()], Duration::from_secs(7200)).await.unwrap();
    assert_eq!(renewed, [Renewal::Renewed]);
    assert!(claims.sweep(5).await.unwrap().returned.is_empty());
}

/// `Duration::MAX` as an interval means never.
#[tokio::test(flavor = "multi_thread")]
async fn a_claimer_that_never_polls_goes_on() {
    let world = World::new(REQUEST).await;
    world.insert(1).await;
    let claims = Arc::new(world.claims(request()));
    let claimer = Claimer::builder(claims).poll(Duration::MAX).sweep_every(Duration::MAX).start().unwrap();
    bounded(claimer.next()).await.unwrap().done().await.unwrap();
    let waiting = tokio::spawn({
        let claimer = claimer.clone();
        async move { claimer.next().await }
    });
    // Lets the claimer idle before the next row is inserted.
    tokio::time::sleep(Duration::from_millis(50)).await;
    world.insert(1).await;
    claimer.wake();
    bounded(waiting).await.unwrap().unwrap().done().await.unwrap();
    bounded(claimer.close()).await.unwrap();
}

/// A row that other rows wait for, or that blocks them by its failure, must not be deleted.
#[test]
fn what_others_wait_for_is_not_deleted() {
    let spec = |retention, failed, missing| {
        request()
            .group("entity")
            .kind("kind")
            .waits("update", "create", failed, missing)
            .retention(retention)
            .build()
    };
    let day = Retention::KeepFor(Duration::from_secs(86_400));
    for (retention, failed, missing, is_good) in [
        (Retention::KeepAll, Unmet::Block, Unmet::Block, true),
        (Retention::DeleteOnSettle, Unmet::Block, Unmet::Run, true),
        (Retention::DeleteOnSettle, Unmet::Run, Unmet::Block, false),
        (day, Unmet::Run, Unmet::Run, true),
        (day, Unmet::Block, Unmet::Run, false),
        (day, Unmet::Run, Unmet::Block, false),
    ] {
        let built = spec(retention, failed, missing);
        assert_eq!(built.is_ok(), is_good, "{retention:?}, {failed:?}, {missing:?}: {built:?}");
    }
}

/// The last retry reports the row as exhausted, even if it changes nothing in the row itself.
#[tokio::test(flavor = "multi_thread")]
async fn the_last_retry_with_a_side_table_reports_the_row_exhausted() {
    let world = World::new(
        "CREATE TABLE job (id bigint PRIMARY KEY, processed boolean NOT NULL DEFAULT false, attempts_left int);
        INSERT INTO job VALUES (1, false, 1)",
    )
    .await;
    world.run(crate::common::SIDE).await;
    let spec = ClaimSpec::builder(Table::new("job").unwrap())
        .state("processed", States::boolean())
        .side_table(Table::new("lease").unwrap())
        .attempts("attempts_left");
    let claims = world.claims(spec);
    let claimed = take_one(&claims).await;
    let retry = Outcome::Retry { error: None, after: Duration::ZERO };
    let settled = claims.settle_one(&claimed.claim, retry).await.unwrap();
    assert_eq!(settled.exhausted, claims.exhausted(5).await.unwrap());
    assert_eq!(settled.exhausted.len(), 1);
}
