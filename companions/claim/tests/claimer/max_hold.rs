//! Workers that hang: the maximum hold ends their claims, the attempt counts, and other workers get the rows.
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use crate::common::{builder, paused, state, still_memory, until, with_attempts, within};
use crate::pg::{pool, spec};
use crate::refused::{number, run, until_number};
use leasehold_claim::api::{ErrorKind, LossReason};
use leasehold_claim::sqlx::{PgPool, raw_sql};
use leasehold_claim::{
    Claim, ClaimError, ClaimSpecBuilder, Claimer, ClaimerBuilder, MemoryClaims, MemoryClock, MemoryRow,
    PgClaims, PgHeld, RowKey,
};
use test_servers::{Database, fresh_database};

const SECOND: Duration = Duration::from_secs(1);

/// More attempts than a busy machine uses up, because a handler that waits for a processor can lose its claim too.
const ATTEMPTS: i64 = 1000;

/// Creates requests. The first run of each hangs, and later runs succeed.
async fn table(db: &Database, rows: i64) -> PgPool {
    let pool = crate::pg::prepare(db.url()).await;
    run(
        &pool,
        &format!("INSERT INTO request (attempts_left) SELECT {ATTEMPTS} FROM generate_series(1, {rows})"),
    )
    .await;
    pool
}

fn held_spec() -> ClaimSpecBuilder {
    let states = leasehold_claim::States::text(["new"], "complete")
        .taken("in-progress")
        .failed("error")
        .exhausted("exhausted");
    leasehold_claim::ClaimSpec::builder(leasehold_claim::Table::new("request").unwrap())
        .state("status", states)
        .attempts("attempts_left")
        .error("error")
}

fn claimer(pool: &PgPool, held: bool) -> ClaimerBuilder {
    if held {
        PgHeld::new(pool.clone(), held_spec().build().unwrap()).claimer()
    } else {
        Claimer::builder(Arc::new(PgClaims::new(pool.clone(), spec().build().unwrap())))
    }
}

/// Runs a statement of the work if the claim has a transaction.
async fn work(claim: &mut Claim, sql: &'static str) {
    if let Ok(connection) = claim.connection() {
        raw_sql(sql).execute(connection).await.unwrap();
    }
}

/// A handler that awaits indefinitely, itself or in a statement, is dropped, and the next run finishes the row.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn a_handler_that_awaits_for_ever_loses_its_claim() {
    for (held, statement) in
        [false, true].into_iter().flat_map(|held| [(held, "SELECT 1"), (held, "SELECT pg_sleep(3600)")])
    {
        // Several tries, because a held claim writes its attempt at its end. On a busy machine the server can be too late
        // for that, and then the claim counts as a crash.
        let tries = if held { 3 } else { 1 };
        let mut is_counted = false;
        for _ in 0..tries {
            let db = fresh_database().await;
            table(&db, 2).await;
            let pool = pool(db.url(), 6).await;
            let errors: Arc<Mutex<Vec<String>>> = Arc::default();
            let told = Arc::clone(&errors);
            let limit = Duration::from_secs(3);
            let builder = if held {
                PgHeld::new(pool.clone(), held_spec().build().unwrap()).timeout(limit).claimer()
            } else {
                claimer(&pool, held)
            };
            let builder = builder.max_hold(SECOND / 2).on_error(move |error| {
                told.lock().unwrap().push(error.to_string());
            });
            let claimer = builder.start().unwrap();
            let (worker, runs) = (claimer.clone(), Arc::new(AtomicUsize::new(0)));
            let counted = Arc::clone(&runs);
            let running = tokio::spawn(async move {
                let handler = move |mut claim: Claim| {
                    let is_first = counted.fetch_add(1, Ordering::SeqCst) < 2;
                    async move {
                        if is_first {
                            work(&mut claim, statement).await;
                            std::future::pending::<()>().await;
                        }
                        Ok::<(), String>(())
                    }
                };
                worker.run(2, handler).await.unwrap();
            });
            let done = "SELECT count(*) FROM request WHERE status = 'complete'";
            until_number("they are done", &pool, done, 2).await;
            let left = number(&pool, "SELECT sum(attempts_left) FROM request").await;
            let runs = i64::try_from(runs.load(Ordering::SeqCst)).unwrap();
            assert!(runs >= 4, "held {held}, {statement}: {runs} runs");
            is_counted = 2 * ATTEMPTS - left >= runs;
            let errors = errors.lock().unwrap().clone();
            assert!(errors.iter().any(|error| error.starts_with("row ")), "{errors:?}");
            within("closing", claimer.close()).await.unwrap();
            within("the handlers", running).await.unwrap();
            if is_counted {
                break;
            }
        }
        assert!(is_counted, "held {held}, {statement}: each run counts as an attempt");
    }
}

/// A handler that blocks its thread, and holds its transaction if it has one. Its future cannot be dropped.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_handler_that_blocks_its_thread_loses_its_claim() {
    for held in [false, true] {
        let db = fresh_database().await;
        table(&db, 1).await;
        let pool = pool(db.url(), 6).await;
        let (release, blocked) = mpsc::channel::<()>();
        let blocked = Arc::new(Mutex::new(Some(blocked)));
        let (told, ended) = mpsc::channel();
        let claimer = claimer(&pool, held).max_hold(SECOND / 2).start().unwrap();
        let worker = claimer.clone();
        let running = tokio::spawn(async move {
            let handler = move |mut claim: Claim| {
                let (blocked, told) = (Arc::clone(&blocked), told.clone());
                async move {
                    work(&mut claim, "UPDATE request SET entity = 'late'").await;
                    let blocked = blocked.lock().unwrap().take();
                    if let Some(blocked) = blocked {
                        let _ = blocked.recv();
                        let after = claim.is_valid();
                        let error = claim.done().await.unwrap_err();
                        told.send((after, error)).unwrap();
                    }
                    Ok::<(), String>(())
                }
            };
            worker.run(2, handler).await.unwrap();
        });
        let done = format!(
            "SELECT count(*) FROM request WHERE status = 'complete' AND attempts_left <= {}",
            ATTEMPTS - 2
        );
        until_number("another does it", &pool, &done, 1).await;
        release.send(()).unwrap();
        let (is_valid, error) = within("the first", async {
            loop {
                match ended.try_recv() {
                    Ok(answer) => return answer,
                    Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
                }
            }
        })
        .await;
        assert!(!is_valid, "held {held}");
        let ClaimError::Store(error) = error else { panic!("held {held}: {error}") };
        assert_eq!((error.kind(), error.loss()), (ErrorKind::Lost, Some(LossReason::HeldTooLong)));
        within("closing", claimer.close()).await.unwrap();
        within("the handlers", running).await.unwrap();
    }
}

/// The maximum hold also applies to workers without handlers. A claim that ends in time is not affected.
#[tokio::test(start_paused = true)]
async fn whoever_asks_for_claims_one_by_one_loses_them_too() {
    let claims = still_memory();
    with_attempts(&claims, 1, 5);
    let claimer = paused(&crate::common::Probe::of(claims.clone())).max_hold(SECOND * 60).start().unwrap();
    let begun = tokio::time::Instant::now();
    let claim = within("a claim", claimer.next()).await.unwrap();
    let lost = tokio::time::timeout(SECOND * 600, claim.lost()).await.unwrap();
    assert_eq!(lost, LossReason::HeldTooLong);
    assert!((SECOND * 60..SECOND * 62).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    let again = within("again", claimer.next()).await.unwrap();
    assert_eq!(again.row().attempts_left, Some(3));
    let error = claim.done().await.unwrap_err();
    assert!(matches!(&error, ClaimError::Store(error) if error.kind() == ErrorKind::Lost), "{error}");
    tokio::time::sleep(SECOND * 59).await;
    again.done().await.unwrap();
    assert_eq!(state(&claims, 1), "complete");
}

/// If the program drops `run` after the limit of `close`, the row is put back at once, and its attempt does not count.
#[tokio::test(start_paused = true)]
async fn what_is_dropped_after_close_is_put_back_uncounted() {
    for closed in [true, false] {
        let claims = still_memory();
        with_attempts(&claims, 1, 5);
        let claimer = paused(&crate::common::Probe::of(claims.clone())).close_limit(SECOND).start().unwrap();
        let worker = claimer.clone();
        let handler = |_: Claim| async {
            std::future::pending::<()>().await;
            Ok::<(), String>(())
        };
        let running = tokio::spawn(async move { worker.run(1, handler).await });
        until("it is begun", || state(&claims, 1) == "in-progress").await;
        if closed {
            let error = within("closing", claimer.close()).await.unwrap_err();
            assert_eq!(crate::common::kind(&error), Some(ErrorKind::Timeout));
            assert!(!running.is_finished(), "`run` goes on");
        }
        running.abort();
        let left = if closed { 5 } else { 4 };
        let row = || claims.row(&RowKey::new(1)).unwrap();
        until("it is back", || row().state().unwrap().as_str() == "new").await;
        assert_eq!(row().attempts_left(), Some(left));
        within("closing", claimer.close()).await.unwrap();
    }
}

/// A row's timeout bounds the claim if the claimer is configured so. Otherwise the lease is renewed.
#[tokio::test(start_paused = true)]
async fn the_timeout_of_a_row_can_bound_its_claim() {
    for bounds in [false, true] {
        let spec = builder().timeout_seconds("timeout").build().unwrap();
        let claims = MemoryClaims::with_clock(spec, MemoryClock::stopped()).unwrap();
        claims.insert(MemoryRow::new(1).with_attempts(5).with_timeout_seconds(20)).unwrap();
        claims.insert(MemoryRow::new(2).with_attempts(5)).unwrap();
        let builder = paused(&crate::common::Probe::of(claims.clone()));
        let builder = if bounds { builder.timeout_is_max_hold() } else { builder };
        let claimer = builder.start().unwrap();
        let first = within("a claim", claimer.next()).await.unwrap();
        let second = within("a claim", claimer.next()).await.unwrap();
        tokio::time::sleep(SECOND * 300).await;
        assert_eq!(first.is_valid(), !bounds);
        assert!(second.is_valid(), "it has no timeout");
        until("it is back", || (state(&claims, 1) == "new") == bounds).await;
        assert_eq!(claims.row(&RowKey::new(1)).unwrap().attempts_left(), Some(4));
    }
}
