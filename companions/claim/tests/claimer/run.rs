//! Handlers of claims: their outcomes, their own settlements, and their failures, in memory.
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::{Probe, builder, insert, paused, state, still_memory, until, with_attempts, within};
use leasehold_claim::{
    Backoff, Claim, ClaimError, ClaimSpec, Claimer, MemoryClaims, MemoryClock, OnFailure, Outcome, RowId,
    RowKey, States, Table,
};
use tokio::task::JoinHandle;

fn id(claim: &Claim) -> i64 {
    match claim.row().key.id {
        RowId::Int(id) => id,
        ref other => panic!("{other} is no number"),
    }
}

/// Returns the state, the attempts left and the message of a row.
fn row(claims: &MemoryClaims, id: i64) -> (String, i32, Option<String>) {
    let row = claims.row(&RowKey::new(id)).unwrap();
    (state(claims, id), row.attempts_left().unwrap(), row.error().map(str::to_owned))
}

fn expected(state: &str, left: i32, message: Option<&str>) -> (String, i32, Option<String>) {
    (state.to_owned(), left, message.map(str::to_owned))
}

fn run<H, F, O>(claimer: &Claimer, handler: H) -> JoinHandle<()>
where
    H: Fn(Claim) -> F + Send + Sync + 'static,
    F: Future<Output = Result<O, String>> + Send + 'static,
    O: Into<Outcome> + Send + 'static,
{
    let claimer = claimer.clone();
    tokio::spawn(async move { claimer.run(4, handler).await.unwrap() })
}

/// A handler can settle its claim itself in every way. Then its outcome is ignored, even an error.
#[tokio::test(start_paused = true)]
async fn a_handler_may_end_its_claim_itself() {
    let claims = still_memory();
    for id in 1..=4 {
        with_attempts(&claims, id, 3);
    }
    let claimer = paused(&Probe::of(claims.clone())).start().unwrap();
    let ended = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&ended);
    let running = run(&claimer, move |claim| {
        let count = Arc::clone(&count);
        async move {
            match id(&claim) {
                1 => claim.done().await.unwrap(),
                2 => claim.fail("broken").await.unwrap(),
                3 => claim.retry("later", Duration::from_secs(3600)).await.unwrap(),
                _ if count.load(Ordering::SeqCst) < 4 => claim.put_back().await.unwrap(),
                _ => std::future::pending().await,
            };
            count.fetch_add(1, Ordering::SeqCst);
            Err::<(), _>("this counts no more".to_owned())
        }
    });
    until("all four were ended", || ended.load(Ordering::SeqCst) >= 4).await;
    until("the fourth is taken again", || state(&claims, 4) == "in-progress").await;
    assert_eq!(row(&claims, 1), expected("complete", 2, None));
    assert_eq!(row(&claims, 2), expected("error", 2, Some("broken")));
    assert_eq!(row(&claims, 3), expected("new", 2, Some("later")));
    assert_eq!(row(&claims, 4), expected("in-progress", 2, None), "only the try under way has counted");
    running.abort();
    within("nothing is left", claimer.close()).await.unwrap();
}

/// The handler's outcome settles the claim if the handler has not, even if it dropped its handle.
#[tokio::test(start_paused = true)]
async fn a_handler_s_answer_is_an_outcome() {
    let claims = still_memory();
    for id in 1..=4 {
        with_attempts(&claims, id, 3);
    }
    let claimer = paused(&Probe::of(claims.clone())).start().unwrap();
    let running = run(&claimer, |claim| async move {
        let id = id(&claim);
        drop(claim);
        match id {
            1 => Ok(Outcome::from(())),
            2 => Ok(Outcome::Failed("broken".to_owned())),
            3 => Ok(Outcome::Retry { error: Some("later".to_owned()), after: Duration::from_secs(3600) }),
            _ => Err("an error".to_owned()),
        }
    });
    until("all are ended", || {
        (1..=4).all(|id| row(&claims, id) != expected("new", 3, None) && state(&claims, id) != "in-progress")
    })
    .await;
    assert_eq!(row(&claims, 1), expected("complete", 2, None));
    assert_eq!(row(&claims, 2), expected("error", 2, Some("broken")));
    assert_eq!(row(&claims, 3), expected("new", 2, Some("later")));
    assert_eq!(row(&claims, 4), expected("error", 2, Some("an error")));
    running.abort();
}

/// A handler that panics before it returns a future crashes only its own claim.
#[tokio::test(start_paused = true)]
async fn a_handler_that_panics_when_it_is_called_harms_no_other() {
    let claims = still_memory();
    with_attempts(&claims, 1, 3);
    with_attempts(&claims, 2, 3);
    let claimer = paused(&Probe::of(claims.clone())).start().unwrap();
    let calls = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&calls);
    let running = run(&claimer, move |claim| {
        let is_second = id(&claim) == 2;
        if is_second && count.fetch_add(1, Ordering::SeqCst) == 0 {
            panic!("a bug");
        }
        async move {
            if !is_second {
                std::future::pending::<()>().await;
            }
            Ok::<(), _>(())
        }
    });
    until("it is tried again, and done", || state(&claims, 2) == "complete").await;
    assert_eq!(row(&claims, 2), expected("complete", 1, Some("the handler panicked: a bug")));
    assert_eq!(row(&claims, 1), expected("in-progress", 2, None), "the other works on");
    assert!(!running.is_finished());
    running.abort();
    until("it is back", || row(&claims, 1) == expected("new", 2, Some("dropped"))).await;
}

/// A handler whose settlement is refused gets the error and can clean up. Only a handler that works on is dropped.
#[tokio::test(start_paused = true)]
async fn a_handler_that_is_refused_goes_on() {
    let claims = still_memory();
    with_attempts(&claims, 1, 3);
    let claimer = paused(&Probe::of(claims.clone())).lease(Duration::from_secs(3600)).start().unwrap();
    let cleaned = Arc::new(AtomicUsize::new(0));
    let (count, table) = (Arc::clone(&cleaned), claims.clone());
    let running = run(&claimer, move |claim| {
        let (count, table) = (Arc::clone(&count), table.clone());
        async move {
            if claim.epoch() == Some(1) {
                table.update(&RowKey::new(1), "epoch", 7.into()).unwrap();
                let refused = claim.done().await.unwrap_err();
                assert!(matches!(refused, ClaimError::Superseded { .. }), "{refused}");
                tokio::time::sleep(Duration::from_secs(5)).await;
                count.fetch_add(1, Ordering::SeqCst);
            }
            Err::<(), _>("too late".to_owned())
        }
    });
    until("it cleaned up", || cleaned.load(Ordering::SeqCst) == 1).await;
    assert_eq!(row(&claims, 1), expected("in-progress", 2, None), "its error was written to nobody's row");
    running.abort();
}

/// Creates a table with these states, and with the column `ready_at` if `later`.
fn table(states: States, later: bool) -> MemoryClaims {
    let spec = ClaimSpec::builder(Table::new("job").unwrap())
        .state("status", states)
        .lease_columns("owner", "epoch", "lease_until")
        .attempts("attempts_left")
        .error("error");
    let spec = if later { spec.ready_at("ready_at") } else { spec };
    MemoryClaims::with_clock(spec.build().unwrap(), MemoryClock::stopped()).unwrap()
}

fn unsupported(error: &ClaimError, advice: &str) {
    assert!(matches!(error, ClaimError::Unsupported(_)), "{error:?}");
    assert!(error.to_string().contains(advice), "{error}");
}

/// A failure policy that the spec does not support is refused before any row is taken.
#[tokio::test(start_paused = true)]
async fn a_policy_that_the_spec_has_nothing_for_is_refused_at_the_start() {
    let plain = || States::text(["new"], "done").taken("taken");
    let whole = || plain().failed("error");
    let start =
        |states, later, policy| paused(&Probe::of(table(states, later))).on_failure(policy).start().map(drop);
    let minute = OnFailure::Retry(Backoff::constant(Duration::from_secs(60)));
    unsupported(&start(whole(), false, minute).unwrap_err(), "name one with `ready_at`");
    unsupported(&start(plain(), true, OnFailure::Fail).unwrap_err(), "name one with `States::failed`");
    start(plain(), true, minute).unwrap();
    start(plain(), false, OnFailure::Retry(Backoff::constant(Duration::ZERO))).unwrap();
    start(whole(), false, OnFailure::Fail).unwrap();

    // Without a policy, `next` works, but `run` is refused before any handler starts.
    let store = Probe::of(table(plain(), false));
    let claimer = paused(&store).start().unwrap();
    let handler = async |_claim: Claim| Ok::<(), String>(());
    unsupported(&within("the refusal", claimer.run(1, handler)).await.unwrap_err(), "`States::failed`");
    assert_eq!(store.claim_queries(), 0, "nothing was taken");
}

/// Returns the time until the row is ready.
fn pause(claims: &MemoryClaims, id: i64) -> Option<Duration> {
    let ready = claims.row(&RowKey::new(id)).unwrap().ready_at()?;
    Some(ready.duration_since(claims.clock().now()).unwrap())
}

/// The pause grows with each attempt, after errors and panics, until no attempt is left.
#[tokio::test(start_paused = true)]
async fn the_pause_grows_with_each_attempt() {
    const FIRST: Duration = Duration::from_secs(10);
    let spec = builder().max_attempts(4).build().unwrap();
    let claims = MemoryClaims::with_clock(spec, MemoryClock::stopped()).unwrap();
    with_attempts(&claims, 1, 4);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let attempts = Arc::clone(&seen);
    let claimer = paused(&Probe::of(claims.clone()))
        .on_failure(OnFailure::Retry(Backoff::exponential(FIRST).at_most(FIRST * 3)))
        .start()
        .unwrap();
    let running = run(&claimer, move |claim| {
        let attempt = claim.attempt().unwrap();
        attempts.lock().unwrap().push(attempt);
        assert!(attempt != 2, "the second is a panic");
        async { Err::<(), _>("not yet".to_owned()) }
    });
    for (attempt, longest) in [(1, FIRST), (2, FIRST * 2), (3, FIRST * 3)] {
        until("the attempt has failed", || {
            row(&claims, 1).0 == "new" && seen.lock().unwrap().len() == attempt && pause(&claims, 1).is_some()
        })
        .await;
        let left = pause(&claims, 1).unwrap();
        assert!(left >= longest / 2 && left <= longest, "{left:?} after attempt {attempt}");
        claims.clock().advance(left);
    }
    until("none is left", || state(&claims, 1) == "exhausted").await;
    assert_eq!(*seen.lock().unwrap(), [1, 2, 3, 4]);
    running.abort();
}

/// Without numbered attempts, the pause grows with each claim of the row.
#[tokio::test(start_paused = true)]
async fn the_pause_grows_also_where_attempts_have_no_limit() {
    let claims = still_memory();
    insert(&claims, [1]);
    let first = Duration::from_secs(1);
    let retry = OnFailure::Retry(Backoff::exponential(first));
    let claimer = paused(&Probe::of(claims.clone())).on_failure(retry).start().unwrap();
    let running = run(&claimer, |claim| async move {
        assert_eq!(claim.attempt(), None);
        Err::<(), _>("not yet".to_owned())
    });
    for epoch in 1..=8 {
        until("it has failed", || {
            state(&claims, 1) == "new" && pause(&claims, 1).is_some_and(|p| !p.is_zero())
        })
        .await;
        assert_eq!(claims.row(&RowKey::new(1)).unwrap().epoch(), epoch);
        let (left, whole) =
            (pause(&claims, 1).unwrap(), first * 2_u32.pow(u32::try_from(epoch).unwrap() - 1));
        assert!(left >= whole / 2 && left <= whole, "{left:?} after claim {epoch}");
        claims.clock().advance(left);
    }
    running.abort();
}

/// A snoozed claim returns later with all its attempts.
#[tokio::test(start_paused = true)]
async fn a_snoozed_claim_returns_after_its_pause() {
    let claims = still_memory();
    with_attempts(&claims, 1, 1);
    let store = Probe::of(claims.clone());
    store.dumb.store(true, Ordering::SeqCst);
    let claimer = paused(&store).poll(Duration::from_secs(3600)).start().unwrap();
    let running = run(&claimer, |claim| async move {
        Ok(if claim.epoch() == Some(1) { Outcome::Snooze(Duration::from_secs(5)) } else { Outcome::Done })
    });
    until("it is put off", || pause(&claims, 1).is_some()).await;
    assert_eq!(
        (row(&claims, 1), pause(&claims, 1)),
        (expected("new", 1, None), Some(Duration::from_secs(5)))
    );
    claims.clock().advance(Duration::from_secs(5));
    let begun = tokio::time::Instant::now();
    until("it is done", || state(&claims, 1) == "complete").await;
    assert!(begun.elapsed() < Duration::from_secs(10), "without poll or announcement");
    assert_eq!(row(&claims, 1), expected("complete", 0, None));
    running.abort();
}

/// A pause without a column in the spec is refused, and the row is claimable again at once, with its message.
#[tokio::test(start_paused = true)]
async fn a_refused_pause_does_not_leave_the_row_to_its_lease() {
    let claims = table(States::text(["new"], "done").taken("taken"), false);
    let claimer = paused(&Probe::of(claims.clone())).lease(Duration::from_secs(3600)).start().unwrap();
    let minute = Duration::from_secs(60);
    let retry = Outcome::Retry { error: Some("no".to_owned()), after: minute };
    for (id, ending, after) in [(1, Outcome::Snooze(minute), (3, None)), (2, retry, (2, Some("no")))] {
        with_attempts(&claims, id, 3);
        let begun = tokio::time::Instant::now();
        let claim = within("the row", claimer.next()).await.unwrap();
        unsupported(&claim.settle(ending).await.unwrap_err(), "`ready_at`");
        let again = within("the row is back", claimer.next()).await.unwrap();
        assert!(begun.elapsed() < minute / 2);
        again.done().await.unwrap();
        assert_eq!(row(&claims, id), expected("done", after.0 - 1, after.1));
    }
}
