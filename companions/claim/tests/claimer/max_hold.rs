//! Workers that hang: the maximum hold ends their claims, the attempt counts, and other workers get the rows.
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use crate::common::{builder, paused, state, still_memory, until, with_attempts, within};
use crate::pg::{id, pool, spec};
use crate::refused::{run, until_number};
use leasehold_claim::api::{ErrorKind, LossReason};
use leasehold_claim::sqlx::{AssertSqlSafe, PgPool, raw_sql};
use leasehold_claim::{
    Claim, ClaimError, ClaimSpecBuilder, Claimer, ClaimerBuilder, MemoryClaims, MemoryClock, MemoryRow,
    Outcome, PgClaims, PgHeld, RowKey,
};
use test_servers::sql::text;
use test_servers::{Database, fresh_database};

const SECOND: Duration = Duration::from_secs(1);

/// More attempts than a busy machine uses up, because a handler that waits for a processor can lose its claim too.
const ATTEMPTS: i64 = 1000;

/// Creates requests.
async fn table(db: &Database, rows: i64) -> PgPool {
    let pool = crate::pg::prepare(db.url()).await;
    run(
        &pool,
        &format!(
            "ALTER TABLE request ADD settled_by text, ADD timeout integer;
            INSERT INTO request (attempts_left) SELECT {ATTEMPTS} FROM generate_series(1, {rows})"
        ),
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
    let spec = if held { held_spec() } else { spec() };
    let spec = spec.timeout_seconds("timeout").settled_by("settled_by").build().unwrap();
    if held {
        PgHeld::new(pool.clone(), spec).claimer()
    } else {
        Claimer::builder(Arc::new(PgClaims::new(pool.clone(), spec)))
    }
}

/// A handler that awaits indefinitely, itself or in a statement of its transaction, is dropped, and its attempt counts.
/// Its write is rolled back, and the end names its claim. It closes its own claimer, so no claim of another worker comes
/// between the loss and the end that writes the attempt.
async fn hangs(held: bool, statement: Option<&'static str>) {
    let what = format!("held {held}, {statement:?}");
    let db = fresh_database().await;
    table(&db, 1).await;
    let pool = pool(db.url(), 6).await;
    let errors: Arc<Mutex<Vec<String>>> = Arc::default();
    let told = Arc::clone(&errors);
    let builder = claimer(&pool, held).max_hold(SECOND / 2).close_limit(SECOND * 120);
    let first = builder.on_error(move |error| told.lock().unwrap().push(error.to_string())).start().unwrap();
    let (runs, worker) = (Arc::new(AtomicUsize::new(0)), first.clone());
    let counted = Arc::clone(&runs);
    let owner = Arc::new(Mutex::new(String::new()));
    let claimed_by = Arc::clone(&owner);
    let handler = move |mut claim: Claim| {
        counted.fetch_add(1, Ordering::SeqCst);
        *claimed_by.lock().unwrap() = claim.owner().to_string();
        let worker = worker.clone();
        async move {
            let hanging = async {
                if let Some(sql) = statement {
                    raw_sql(sql).execute(claim.connection().unwrap()).await.unwrap();
                }
                std::future::pending::<()>().await;
            };
            let (closed, ()) = tokio::join!(worker.close(), hanging);
            closed.map_err(|error| error.to_string())
        }
    };
    within("the handler", first.run(1, handler)).await.unwrap();
    within("closing", first.close()).await.unwrap();
    assert_eq!(runs.load(Ordering::SeqCst), 1, "{what}");
    let errors = errors.lock().unwrap().clone();
    assert!(errors.iter().any(|error| error.starts_with("row ")), "{what}: {errors:?}");
    let row =
        text(&pool, "SELECT concat_ws(' ', status, attempts_left, settled_by, error) FROM request").await;
    let (left, owner) = (ATTEMPTS - 1, owner.lock().unwrap().clone());
    assert_eq!(row, format!("new {left} {owner} its worker had it for longer than 500ms"), "{what}");
    assert_eq!(text(&pool, "SELECT count(*) FROM effect").await, "0", "{what}");

    let second = claimer(&pool, held).start().unwrap();
    let claim = within("the row", second.next()).await.unwrap();
    assert_eq!(claim.row().attempts_left.map(i64::from), Some(ATTEMPTS - 2), "{what}");
    claim.done().await.unwrap();
    within("closing", second.close()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn a_handler_that_awaits_for_ever_loses_its_claim() {
    tokio::join!(
        hangs(false, None),
        hangs(true, Some("INSERT INTO effect VALUES (1, 1)")),
        // The server's time limit passes before another session ends the one that sleeps.
        hangs(true, Some("INSERT INTO effect VALUES (1, 1); SELECT pg_sleep(3600)")),
    );
}

/// A handler that blocks its thread, in its claim's transaction or in its own, with a maximum of all rows or the timeout of
/// its row. Its future cannot be dropped, and its write does not count.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_handler_that_blocks_its_thread_loses_its_claim() {
    // The row's timeout is also the length of its lease, whose renewals a busy machine must not miss.
    for (held, timeout) in [(false, None), (true, None), (false, Some(10)), (true, Some(1))] {
        let what = format!("held {held}, timeout {timeout:?}");
        let db = fresh_database().await;
        let pool = table(&db, 1).await;
        if let Some(timeout) = timeout {
            run(&pool, &format!("UPDATE request SET timeout = {timeout}")).await;
        }
        let pool = self::pool(db.url(), 6).await;
        let (release, blocked) = mpsc::channel::<()>();
        let blocked = Arc::new(Mutex::new(Some(blocked)));
        let (told, ended) = mpsc::channel();
        let leases = (!held).then(|| PgClaims::new(pool.clone(), spec().build().unwrap()));
        let claimer = claimer(&pool, held);
        let claimer =
            if timeout.is_some() { claimer.timeout_is_max_hold() } else { claimer.max_hold(SECOND / 2) };
        let claimer = claimer.start().unwrap();
        let (worker, runs) = (claimer.clone(), Arc::new(AtomicUsize::new(0)));
        let running = tokio::spawn(async move {
            let handler = move |mut claim: Claim| {
                let (blocked, told, leases) = (Arc::clone(&blocked), told.clone(), leases.clone());
                let run = runs.fetch_add(1, Ordering::SeqCst) + 1;
                async move {
                    let write = raw_sql(AssertSqlSafe(format!("INSERT INTO effect VALUES (1, {run})")));
                    let mut own = None;
                    if let Some(leases) = &leases {
                        let own = own.insert(leases.pool().begin().await.unwrap());
                        write.execute(&mut **own).await.unwrap();
                    } else {
                        write.execute(claim.connection().unwrap()).await.unwrap();
                    }
                    let blocked = blocked.lock().unwrap().take();
                    if let Some(blocked) = &blocked {
                        let _ = blocked.recv();
                    }
                    let is_valid = claim.is_valid();
                    let settled = match (leases, own) {
                        (Some(leases), Some(own)) => claim.settle_with(&leases, own, Outcome::Done).await,
                        _ => claim.done().await,
                    };
                    if blocked.is_some() {
                        told.send((is_valid, settled)).unwrap();
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
        let (is_valid, settled) = within("the first", async {
            loop {
                match ended.try_recv() {
                    Ok(answer) => return answer,
                    Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
                }
            }
        })
        .await;
        assert!(!is_valid, "{what}");
        let Err(ClaimError::Store(error)) = settled else { panic!("{what}: {settled:?}") };
        assert_eq!((error.kind(), error.loss()), (ErrorKind::Lost, Some(LossReason::HeldTooLong)));
        within("closing", claimer.close()).await.unwrap();
        within("the handlers", running).await.unwrap();
        let writes = "SELECT concat_ws(' ', count(*), min(epoch) > 1) FROM effect";
        assert_eq!(text(&pool, writes).await, "1 t", "{what}: only the later run's write counts");
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
        tokio::time::sleep(SECOND * 19).await;
        assert!(first.is_valid(), "before its timeout");
        tokio::time::sleep(SECOND * 2).await;
        assert_eq!(first.is_valid(), !bounds, "after its timeout");
        tokio::time::sleep(SECOND * 300).await;
        assert_eq!(first.is_valid(), !bounds);
        assert!(second.is_valid(), "it has no timeout");
        until("it is back", || (state(&claims, 1) == "new") == bounds).await;
        assert_eq!(claims.row(&RowKey::new(1)).unwrap().attempts_left(), Some(4));
    }
}

/// A handler that hangs is dropped at the timeout of its row, and the row's next run is another attempt.
#[tokio::test(start_paused = true)]
async fn the_timeout_of_a_row_ends_its_handler() {
    let spec = builder().timeout_seconds("timeout").build().unwrap();
    let claims = MemoryClaims::with_clock(spec, MemoryClock::stopped()).unwrap();
    claims.insert(MemoryRow::new(1).with_attempts(5).with_timeout_seconds(20)).unwrap();
    let store = crate::common::Probe::of(claims.clone());
    let claimer = paused(&store).timeout_is_max_hold().start().unwrap();
    let (begun, mut runs) = tokio::sync::mpsc::unbounded_channel();
    let worker = claimer.clone();
    let running = tokio::spawn(async move {
        let handler = move |claim: Claim| {
            begun.send(tokio::time::Instant::now()).unwrap();
            let is_first = claim.row().attempts_left == Some(4);
            async move {
                if is_first {
                    std::future::pending::<()>().await;
                }
                Ok::<(), String>(())
            }
        };
        worker.run(1, handler).await.unwrap();
    });
    let first = within("a run", runs.recv()).await.unwrap();
    let second = tokio::time::timeout(SECOND * 60, runs.recv()).await.unwrap().unwrap();
    let between = second - first;
    assert!((SECOND * 20..SECOND * 22).contains(&between), "{between:?}");
    until("it is done", || state(&claims, 1) == "complete").await;
    assert_eq!(claims.row(&RowKey::new(1)).unwrap().attempts_left(), Some(3));
    within("closing", claimer.close()).await.unwrap();
    within("the handlers", running).await.unwrap();
}

/// On a server, in either mode: the claim of the row with a timeout is lost, and its attempt counts. The claim of the
/// other row, which is older, goes on.
#[tokio::test]
async fn the_timeout_of_a_row_bounds_its_leased_or_held_claim() {
    // The timeout is also the length of the lease, whose renewals a busy machine must not miss.
    for (held, timeout) in [(false, 6), (true, 1)] {
        let db = fresh_database().await;
        let pool = table(&db, 1).await;
        let row = format!("INSERT INTO request (attempts_left, timeout) VALUES ({ATTEMPTS}, {timeout})");
        run(&pool, &row).await;
        let claimer = claimer(&pool, held).timeout_is_max_hold().start().unwrap();
        let unbounded = within("a claim", claimer.next()).await.unwrap();
        let bounded = within("a claim", claimer.next()).await.unwrap();
        assert_eq!((id(&unbounded), id(&bounded)), (1, 2));
        assert_eq!(within("the loss", bounded.lost()).await, LossReason::HeldTooLong, "held {held}");
        assert!(unbounded.is_valid(), "held {held}");
        let again = within("the row again", claimer.next()).await.unwrap();
        assert_eq!((id(&again), again.row().attempts_left.map(i64::from)), (2, Some(ATTEMPTS - 2)));
        let error = bounded.done().await.unwrap_err();
        let ClaimError::Store(error) = error else { panic!("held {held}: {error}") };
        assert_eq!(error.loss(), Some(LossReason::HeldTooLong));
        unbounded.done().await.unwrap();
        drop(again);
        within("closing", claimer.close()).await.unwrap();
    }
}
