//! Handlers of held claims: the work and its settlement are one transaction.
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::common::*;
use leasehold_claim::{
    Backoff, Claim, ClaimError, ClaimStore as _, Claimer, ClaimerBuilder, OnFailure, Outcome, PgClaims,
    PgHeld,
};
use sqlx::{AssertSqlSafe, PgConnection};
use test_servers::{Database, fresh_database};
use tokio::sync::{Barrier, Notify, mpsc};
use tokio::task::JoinHandle;

const AGAIN: OnFailure = OnFailure::Retry(Backoff::constant(Duration::ZERO));

/// Query of the rows' id, state, attempts left and message.
const ENDS: &str =
    "SELECT string_agg(concat_ws(' ', id, status, attempts, message), ', ' ORDER BY id) FROM request";
const DONE: &str = "SELECT string_agg(payment::text, ' ' ORDER BY payment) FROM booking";

async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    test_bounds::within(LONG, format!("not in time: {what}"), future).await
}

/// Does the work of a claim: inserts a row into another table.
async fn book(claim: &mut Claim) -> Result<(), ClaimError> {
    let sql = format!("INSERT INTO booking VALUES ({})", claim.row().id::<i64>()?);
    let done = sqlx::raw_sql(AssertSqlSafe(sql)).execute(claim.connection()?).await;
    done.map(drop).map_err(|error| ClaimError::of(error, "book"))
}

async fn prepared(db: &Database) -> (PgHeld, PgConnection) {
    let (held, mut observer) = payment(db).await;
    run(&mut observer, "CREATE TABLE booking (payment bigint PRIMARY KEY)").await;
    (held, observer)
}

async fn requested(db: &Database, rows: &str) -> (PgHeld, PgConnection) {
    let (held, mut observer) = request(db, requests().build().unwrap()).await;
    run(&mut observer, "CREATE TABLE booking (payment bigint PRIMARY KEY)").await;
    run(&mut observer, &format!("INSERT INTO request (id, attempts) VALUES {rows}")).await;
    (held, observer)
}

fn start(builder: ClaimerBuilder) -> Claimer {
    builder.start().unwrap()
}

fn spawn<H, F, O, E>(claimer: &Claimer, workers: usize, handler: H) -> JoinHandle<()>
where
    H: Fn(Claim) -> F + Send + Sync + 'static,
    F: Future<Output = Result<O, E>> + Send + 'static,
    O: Into<Outcome> + Send + 'static,
    E: std::fmt::Display + Send + 'static,
{
    let claimer = claimer.clone();
    tokio::spawn(async move { claimer.run(workers, handler).await.unwrap() })
}

async fn close(claimer: Claimer, running: JoinHandle<()>) {
    within("closing", claimer.close()).await.unwrap();
    within("the handlers", running).await.unwrap();
}

/// The table has no columns for claims. Four handlers run at once, each in a separate transaction.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handlers_work_and_settlement_are_one_commit() {
    let db = fresh_database().await;
    let (held, mut observer) = prepared(&db).await;
    run(&mut observer, "DELETE FROM payment WHERE id = 5").await;
    let claimer = start(held.claimer().on_failure(AGAIN));
    let (together, go) = (Arc::new(Barrier::new(5)), Arc::new(Barrier::new(5)));
    let (met, gone) = (Arc::clone(&together), Arc::clone(&go));
    let running = spawn(&claimer, 4, move |mut claim| {
        let (met, gone) = (Arc::clone(&met), Arc::clone(&gone));
        async move {
            book(&mut claim).await?;
            met.wait().await;
            gone.wait().await;
            Ok::<_, ClaimError>(())
        }
    });
    within("four at once", together.wait()).await;
    assert_eq!(text(&mut observer, DONE).await, "NULL", "nobody sees it yet");
    assert_eq!(text(&mut observer, "SELECT bool_or(processed) FROM payment").await, "false");
    within("going on", go.wait()).await;
    until(&mut observer, "SELECT bool_and(processed) FROM payment").await;
    assert_eq!(text(&mut observer, DONE).await, "1 2 3 4");
    close(claimer, running).await;
}

/// An error, a panic and an unsuccessful outcome undo the work of their own claim only.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_work_is_undone_and_its_outcome_is_written() {
    let db = fresh_database().await;
    let (held, mut observer) = requested(&db, "(1, 3), (2, 1), (3, 2), (4, 3), (5, 3), (6, 3)").await;
    let claimer = start(held.claimer());
    let (seen, mut attempts) = mpsc::unbounded_channel();
    let running = spawn(&claimer, 3, move |mut claim| {
        let seen = seen.clone();
        async move {
            let id = claim.row().id::<i64>().unwrap();
            seen.send(id).unwrap();
            book(&mut claim).await.unwrap();
            let hour = Duration::from_secs(3600);
            match id {
                1 => Err("broken".to_owned()),
                2 | 3 => panic!("in the middle of {id}"),
                4 => Ok(Outcome::Snooze(hour)),
                // The transaction has failed, so the settlement fails too, with an error.
                5 => book(&mut claim).await.map(|()| Outcome::Done).map_err(|error| error.to_string()),
                _ => claim.done().await.map(|_| Outcome::PutBack).map_err(|error| error.to_string()),
            }
        }
    });
    until(&mut observer, "SELECT count(*) = 5 FROM request WHERE status <> 'new'").await;
    until(&mut observer, "SELECT ready_at > now() + interval '30 minutes' FROM request WHERE id = 4").await;
    let ends = text(&mut observer, &ENDS.replace("FROM request", "FROM request WHERE id <> 5")).await;
    let panicked = "exhausted 0 the handler panicked: in the middle of";
    assert_eq!(ends, format!("1 error 2 broken, 2 {panicked} 2, 3 {panicked} 3, 4 new 3, 6 complete 2"));
    let failed = text(&mut observer, "SELECT status || message FROM request WHERE id = 5").await;
    assert!(failed.starts_with("error") && failed.contains("booking_pkey"), "{failed}");
    assert_eq!(text(&mut observer, DONE).await, "6", "of all others the work was undone");
    close(claimer, running).await;
    let mut all = Vec::new();
    while let Some(id) = attempts.recv().await {
        all.push(id);
    }
    all.sort_unstable();
    assert_eq!(all, [1, 2, 3, 3, 4, 5, 6], "row 3 had two attempts");
}

/// A worker that is cut off leaves its row unchanged, and other workers continue.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_row_of_a_handler_whose_session_ended_is_done_by_another() {
    let db = fresh_database().await;
    let (held, mut observer) = prepared(&db).await;
    let errors = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&errors);
    let builder = held.claimer().on_failure(AGAIN).on_error(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
    });
    let claimer = start(builder);
    let tries = Arc::new(AtomicUsize::new(0));
    let (begun, mut pids) = mpsc::unbounded_channel();
    let go = Arc::new(Notify::new());
    let (wait, tried) = (Arc::clone(&go), Arc::clone(&tries));
    let running = spawn(&claimer, 2, move |mut claim| {
        let (wait, tried, begun) = (Arc::clone(&wait), Arc::clone(&tried), begun.clone());
        async move {
            book(&mut claim).await?;
            if claim.row().id::<i64>()? == 3 && tried.fetch_add(1, Ordering::SeqCst) == 0 {
                begun.send(text(claim.connection()?, "SELECT pg_backend_pid()").await).unwrap();
                wait.notified().await;
            }
            Ok::<_, ClaimError>(())
        }
    });
    let pid = within("row 3", pids.recv()).await.unwrap();
    until(&mut observer, "SELECT count(*) = 4 FROM payment WHERE processed").await;
    run(&mut observer, &format!("SELECT pg_terminate_backend({pid})")).await;
    // The other worker finishes the row while the first one does not know of its loss.
    until(&mut observer, "SELECT bool_and(processed) FROM payment").await;
    assert_eq!(text(&mut observer, DONE).await, "1 2 3 4 5");
    go.notify_one();
    close(claimer, running).await;
    assert_eq!(errors.load(Ordering::SeqCst), 1, "its end was refused");
    assert_eq!(text(&mut observer, DONE).await, "1 2 3 4 5");
}

/// If a handler passes its claim out, the claim's transaction is rolled back and cannot be used.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_outlives_its_handler_is_rolled_back() {
    let db = fresh_database().await;
    let (held, mut observer) = prepared(&db).await;
    run(&mut observer, "DELETE FROM payment WHERE id > 1").await;
    let (kept, mut claims) = mpsc::unbounded_channel();
    let (told, mut errors) = mpsc::unbounded_channel();
    let builder =
        held.claimer().on_failure(AGAIN).on_error(move |error| told.send(error.to_string()).unwrap());
    let claimer = start(builder);
    let running = spawn(&claimer, 1, move |mut claim| {
        let kept = kept.clone();
        async move {
            book(&mut claim).await?;
            kept.send(claim).map_err(|_| ClaimError::Unsupported("nobody is there".to_owned()))
        }
    });
    let claim = within("the claim", claims.recv()).await.unwrap();
    let error = within("the error", errors.recv()).await.unwrap();
    assert!(error.contains("was taken from this claim"), "{error}");
    within("closing", claimer.close()).await.unwrap();
    drop(claim);
    until(&mut observer, "SELECT count(*) = 1 FROM (SELECT FROM payment FOR UPDATE SKIP LOCKED) p").await;
    assert_eq!(text(&mut observer, "SELECT bool_or(processed) FROM payment").await, "false");
    assert_eq!(text(&mut observer, DONE).await, "NULL");
    within("the handlers", running).await.unwrap();
}

/// `next` returns held claims one by one, new rows are announced, and a claim under a lease has no transaction.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn held_claims_one_by_one() {
    let db = fresh_database().await;
    let (held, mut observer) = requested(&db, "(1, 3)").await;
    let claimer = start(held.claimer().poll(LONG * 2));
    let mut claim = within("the first", claimer.next()).await.unwrap();
    book(&mut claim).await.unwrap();
    assert_eq!(text(claim.connection().unwrap(), DONE).await, "1");
    let waiting = tokio::spawn({
        let claimer = claimer.clone();
        async move { claimer.next().await.unwrap() }
    });
    claim.fail("no").await.unwrap();
    assert_eq!(text(&mut observer, DONE).await, "NULL");
    run(&mut observer, "INSERT INTO request (id) VALUES (2)").await;
    PgClaims::new(held.pool().clone(), held.spec().clone()).notify(&mut observer).await.unwrap();
    let mut second = within("the second", waiting).await.unwrap();
    assert_eq!(second.row().id::<i64>().unwrap(), 2);
    // A dropped claim returns its row, and the attempt counts.
    book(&mut second).await.unwrap();
    drop(second);
    until(&mut observer, "SELECT attempts = 2 AND status = 'new' FROM request WHERE id = 2").await;
    let again = within("again", claimer.next()).await.unwrap();
    assert_eq!(again.row().attempts_left, Some(1));
    again.settle(Outcome::To("parked".into())).await.unwrap();
    assert_eq!(text(&mut observer, ENDS).await, "1 error 2 no, 2 parked 1 dropped");
    assert_eq!(text(&mut observer, DONE).await, "NULL");
    within("closing", claimer.close()).await.unwrap();

    let mut other = db.connect().await;
    run(&mut other, "CREATE TABLE leased (id int PRIMARY KEY, done boolean NOT NULL DEFAULT false, o uuid, e bigint, u timestamptz)").await;
    run(&mut other, "INSERT INTO leased (id) VALUES (1)").await;
    let spec = leasehold_claim::ClaimSpec::builder(leasehold_claim::Table::new("leased").unwrap())
        .state("done", leasehold_claim::States::boolean())
        .lease_columns("o", "e", "u");
    let leases = PgClaims::new(held.pool().clone(), spec.build().unwrap());
    let claimer = start(Claimer::builder(Arc::new(leases.clone())));
    let mut claim = within("a lease", claimer.next()).await.unwrap();
    assert!(matches!(claim.connection(), Err(ClaimError::Unsupported(_))));
    assert_eq!(leases.stats(&leasehold_claim::Take::up_to(5)).await.unwrap().taken, 1);
    claim.done().await.unwrap();
}
