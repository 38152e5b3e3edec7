//! Handlers of claims: what they answer, what they do themselves, and how they fail, in memory.
#![allow(clippy::unwrap_used, clippy::expect_used)] // What fails here fails the test.

mod claimer;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use claimer::{Probe, paused, state, still_memory, until, with_attempts, within};
use leasehold_claim::{
    Claim, ClaimError, ClaimSpec, Claimer, MemoryClaims, MemoryClock, OnFailure, Outcome, RowId, RowKey,
    States, Table,
};
use tokio::task::JoinHandle;

fn id(claim: &Claim) -> i64 {
    match claim.row().key.id {
        RowId::Int(id) => id,
        ref other => panic!("{other} is no number"),
    }
}

/// State, attempts left and message of a row.
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

/// A handler may end its claim in any way there is; then its answer, be it an error, counts for nothing.
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

/// What it answers ends the claim where it has not, also if it has dropped its handle.
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

/// A handler that panics before it has made a future is a crash of that claim, and nobody else's.
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

/// Whoever ends a claim that was lost hears so, and may clean up: only a handler that works on is dropped.
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

/// A spec with the states of `states`, and with the column `ready_at` if it is to have one.
fn store(states: States, later: bool) -> Arc<Probe> {
    let spec = ClaimSpec::builder(Table::new("job").unwrap())
        .state("status", states)
        .lease_columns("owner", "epoch", "lease_until")
        .attempts("attempts_left");
    let spec = if later { spec.ready_at("ready_at") } else { spec };
    Probe::of(MemoryClaims::with_clock(spec.build().unwrap(), MemoryClock::stopped()).unwrap())
}

fn unsupported(error: &ClaimError, advice: &str) {
    assert!(matches!(error, ClaimError::Unsupported(_)), "{error:?}");
    assert!(error.to_string().contains(advice), "{error}");
}

/// What could only go wrong once a handler has failed is refused before anything is taken.
#[tokio::test(start_paused = true)]
async fn a_policy_that_the_spec_has_nothing_for_is_refused_at_the_start() {
    let plain = || States::text(["new"], "done").taken("taken");
    let whole = || plain().failed("error");
    let start = |states, later, policy| paused(&store(states, later)).on_failure(policy).start().map(drop);
    let minute = OnFailure::Retry(Duration::from_secs(60));
    unsupported(&start(whole(), false, minute).unwrap_err(), "name one with `ready_at`");
    unsupported(&start(plain(), true, OnFailure::Fail).unwrap_err(), "name one with `States::failed`");
    start(plain(), true, minute).unwrap();
    start(plain(), false, OnFailure::Retry(Duration::ZERO)).unwrap();
    start(whole(), false, OnFailure::Fail).unwrap();

    // Nothing was said: who asks for claims one by one needs no policy, and handlers are not begun with.
    let store = store(plain(), false);
    let claimer = paused(&store).start().unwrap();
    let handler = async |_claim: Claim| Ok::<(), String>(());
    unsupported(&within("the refusal", claimer.run(1, handler)).await.unwrap_err(), "`States::failed`");
    assert_eq!(store.claim_queries(), 0, "nothing was taken");
}
