//! A consumer of recorded changes whose claims are open transactions.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use leasehold_claim::sqlx::PgPool;
use leasehold_claim::{Backoff, Claim, ClaimSpec, OnFailure, Outcome, PgHeld, States, Take};
use tokio::sync::mpsc;

use test_servers::sql::{try_run, until};

use super::*;

type AnyError = Box<dyn std::error::Error + Send + Sync>;

const AGAIN: OnFailure = OnFailure::Retry(Backoff::constant(Duration::ZERO));

const SUMMARY: &str = "INSERT INTO summary SELECT count(*) FROM orders";

/// Returns all committed data: the changes, the states of the recorded changes, and the summaries of the consumer.
const ALL: &str = "SELECT (SELECT count(*) FROM orders) || ' changed, ' ||
    (SELECT string_agg(status, ' ') FROM event) || ', ' || (SELECT count(*) FROM summary) || ' summed'";

/// One recorded change, and a consumer of it.
async fn recorded() -> (Database, PgPool, PgHeld) {
    let (db, pool, _) = made(Capture::into(table("event")).source(orders())).await;
    run(&pool, "CREATE TABLE summary (orders bigint CHECK (orders > 0)); INSERT INTO orders VALUES (1)")
        .await;
    let spec = ClaimSpec::builder(table("event")).state("status", States::text(["new"], "complete"));
    let held = PgHeld::new(pool.clone(), spec.build().unwrap());
    (db, pool, held)
}

/// However a consumer fails, the change stays recorded as it was, without an end and without the consumer's work. Then
/// the work and the end are one commit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_consumer_that_fails_leaves_the_change_recorded_and_unfinished() {
    let (_db, pool, held) = recorded().await;
    let (runs, (begins, mut begun)) = (Arc::new(AtomicU32::new(0)), mpsc::unbounded_channel());
    let claimer = held.claimer().on_failure(AGAIN).start().unwrap();
    let (running, outside) = (claimer.clone(), pool.clone());
    let handler = move |mut claim: Claim| {
        let (begins, outside, run) = (begins.clone(), outside.clone(), runs.fetch_add(1, Ordering::SeqCst));
        async move {
            begins.send(text(&outside, ALL).await)?;
            let work = claim.connection()?;
            super::run(&mut *work, SUMMARY).await;
            assert_eq!(text(&mut *work, "SELECT count(*) FROM summary").await, "1");
            match run {
                0 => return Err("the consumer fails".into()),
                1 => panic!("the consumer panics"),
                // Its session ends, as with its process.
                2 => drop(try_run(work, "SELECT pg_terminate_backend(pg_backend_pid())").await),
                _ => {}
            }
            Ok::<(), AnyError>(())
        }
    };
    let running = tokio::spawn(async move { running.run(1, handler).await });
    for run in 0..4 {
        let seen = within(LONG, "not run again", begun.recv()).await.unwrap();
        assert_eq!(seen, "1 changed, new, 0 summed", "before run {run}");
    }
    let mut observer = pool.acquire().await.unwrap();
    until(&mut observer, "SELECT status = 'complete' FROM event").await;
    assert_eq!(text(&pool, ALL).await, "1 changed, complete, 1 summed");
    within(LONG, "not closed", claimer.close()).await.unwrap();
    within(LONG, "not ended", running).await.unwrap().unwrap();
}

/// The end is written, and then the work fails in the same transaction: neither counts.
#[tokio::test]
async fn an_end_that_is_followed_by_failing_work_does_not_count() {
    let (_db, pool, held) = recorded().await;
    let mut hold = held.begin(&Take::up_to(1)).await.unwrap().unwrap();
    let claim = hold.taken().claims[0].claim.clone();
    hold.settle(&claim, &Outcome::Done).await.unwrap();
    assert_eq!(refused(hold.connection(), "INSERT INTO summary VALUES (0)").await, "23514");
    hold.commit().await.unwrap_err();
    assert_eq!(text(&pool, ALL).await, "1 changed, new, 0 summed");

    let mut hold = held.begin(&Take::up_to(1)).await.unwrap().unwrap();
    let claim = hold.taken().claims[0].claim.clone();
    run(hold.connection(), SUMMARY).await;
    hold.settle(&claim, &Outcome::Done).await.unwrap();
    hold.commit().await.unwrap();
    assert_eq!(text(&pool, ALL).await, "1 changed, complete, 1 summed");
}
