//! The claims of a claimer: their ends and drops, in memory.
use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use crate::common::{
    Probe, builder, count_in, insert, kind, paused, state, still_memory, until, with_attempts, within,
};
use leasehold_api::ErrorKind;
use leasehold_claim::api::LossReason;
use leasehold_claim::{
    Backoff, Claim, ClaimError, ClaimSpec, Claimer, MemoryClaims, MemoryClock, MemoryRow, OnFailure, Outcome,
    RowKey, States, Table,
};
use tokio::time::sleep;

fn attempts(claims: &MemoryClaims, id: i64) -> Option<i32> {
    claims.row(&RowKey::new(id)).unwrap().attempts_left()
}

fn message(claims: &MemoryClaims, id: i64) -> Option<String> {
    claims.row(&RowKey::new(id)).unwrap().error().map(str::to_owned)
}

/// An error settles the row with a message. A panic is a crash, after which the row can be taken again.
#[tokio::test(start_paused = true)]
async fn an_error_settles_the_row_and_a_panic_does_not() {
    let claims = still_memory();
    for id in 1..=3 {
        with_attempts(&claims, id, 5);
    }
    let store = Probe::of(claims.clone());
    let claimer = paused(&store).start().unwrap();
    let panics = Arc::new(AtomicUsize::new(0));
    let running = tokio::spawn({
        let (claimer, panics) = (claimer.clone(), Arc::clone(&panics));
        async move {
            let handler = move |claim: Claim| {
                let panics = Arc::clone(&panics);
                async move {
                    match claim.row().key {
                        ref key if *key == RowKey::new(1) => Ok(()),
                        ref key if *key == RowKey::new(2) => Err("the document is broken"),
                        _ if panics.fetch_add(1, Ordering::SeqCst) == 0 => panic!("a bug"),
                        _ => {
                            std::future::pending::<()>().await;
                            Ok(())
                        }
                    }
                }
            };
            claimer.run(3, handler).await.unwrap();
        }
    });
    let times = || panics.load(Ordering::SeqCst);
    until("the third row is tried again", || times() == 2).await;
    assert_eq!((state(&claims, 1).as_str(), message(&claims, 1)), ("complete", None));
    assert_eq!(state(&claims, 2), "error");
    assert_eq!(message(&claims, 2).as_deref(), Some("the document is broken"));
    // The first attempt has counted, and the running one counts too.
    assert_eq!((state(&claims, 3).as_str(), attempts(&claims, 3)), ("in-progress", Some(3)));

    // A drop of the workers is a crash too, and makes the row claimable.
    running.abort();
    until("the row is back", || state(&claims, 3) == "new").await;
    assert_eq!(attempts(&claims, 3), Some(3));
    assert_eq!(message(&claims, 3).as_deref(), Some("dropped"));
    within("nothing is left", claimer.close()).await.unwrap();
}

/// With the policy `Retry`, errors are retried until no attempt is left.
#[tokio::test(start_paused = true)]
async fn errors_can_be_retried_until_no_attempt_is_left() {
    let claims = still_memory();
    with_attempts(&claims, 1, 3);
    let exhausted = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&exhausted);
    let store = Probe::of(claims.clone());
    let claimer = paused(&store)
        .on_failure(OnFailure::Retry(Backoff::constant(Duration::ZERO)))
        .on_exhausted(move |rows| told.lock().unwrap().extend(rows.to_vec()))
        .start()
        .unwrap();
    let tries = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&tries);
    let running = tokio::spawn(async move {
        let handler = |_claim| {
            count.fetch_add(1, Ordering::SeqCst);
            async { Err::<(), _>("not today") }
        };
        claimer.run(1, handler).await.unwrap();
    });
    until("the row is exhausted", || state(&claims, 1) == "exhausted").await;
    assert_eq!(tries.load(Ordering::SeqCst), 3);
    assert_eq!((attempts(&claims, 1), message(&claims, 1).as_deref()), (Some(0), Some("not today")));
    until("it was told", || !exhausted.lock().unwrap().is_empty()).await;
    assert_eq!(*exhausted.lock().unwrap(), [RowKey::new(1)]);
    running.abort();
}

/// Rows that a sweep finds exhausted are passed to the callback, even if the callback panics.
#[tokio::test(start_paused = true)]
async fn the_sweep_tells_what_is_exhausted() {
    let claims = still_memory();
    with_attempts(&claims, 1, 1);
    let told = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&told);
    let claimer = paused(&Probe::of(claims.clone()))
        .on_exhausted(move |rows| {
            count.fetch_add(rows.len(), Ordering::SeqCst);
            panic!("a careless callback");
        })
        .start()
        .unwrap();
    let claim = within("the row", claimer.next()).await.unwrap();
    claims.expire(&RowKey::new(1)).unwrap();
    until("the row is exhausted", || told.load(Ordering::SeqCst) == 1).await;
    assert_eq!(state(&claims, 1), "exhausted");
    assert!(matches!(claim.done().await, Err(ClaimError::Superseded { .. })));
}

#[tokio::test(start_paused = true)]
async fn each_way_to_end_a_claim() {
    let claims = still_memory();
    for id in 1..=5 {
        with_attempts(&claims, id, 3);
    }
    let claimer = paused(&Probe::of(claims.clone())).start().unwrap();
    let next = async || within("a claim", claimer.next()).await.unwrap();
    next().await.done().await.unwrap();
    next().await.fail("no").await.unwrap();
    next().await.retry("later", Duration::from_secs(60)).await.unwrap();
    next().await.put_back().await.unwrap();
    drop(next().await);
    until("the dropped one is back", || message(&claims, 5).is_some()).await;
    let states: Vec<_> =
        (1..=5).map(|id| (state(&claims, id), attempts(&claims, id), message(&claims, id))).collect();
    let row =
        |state: &str, left, message: Option<&str>| (state.to_owned(), Some(left), message.map(str::to_owned));
    assert_eq!(states[0], row("complete", 2, None));
    assert_eq!(states[1], row("error", 2, Some("no")));
    assert_eq!(states[2], row("new", 2, Some("later")));
    assert_eq!(states[3], row("new", 3, None));
    assert_eq!(states[4], row("new", 2, Some("dropped")));
    claimer.close().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_claim_says_what_it_is_of() {
    #[derive(serde::Deserialize)]
    struct Work {
        document: String,
    }
    let spec = builder().group("entity").work(["document"]).build().unwrap();
    let claims = MemoryClaims::with_clock(spec, MemoryClock::stopped()).unwrap();
    claims.insert(MemoryRow::new(7).with_group("a").with_column("document", "text".into())).unwrap();
    let claimer = paused(&Probe::of(claims.clone())).lease(Duration::from_secs(10)).start().unwrap();
    let claim = within("the row", claimer.next()).await.unwrap();
    assert_eq!((claim.rows().len(), &claim.row().key, claim.group()), (1, &RowKey::new(7), Some("a")));
    assert_eq!(claim.work::<Work>().unwrap().document, "text");
    assert!(matches!(claim.work::<i32>(), Err(ClaimError::InvalidSpec(_))));
    assert_eq!(Some(claim.owner()), claims.row(&RowKey::new(7)).unwrap().owner());
    assert_eq!(claim.epoch(), Some(1));
    assert!(claim.is_valid());
    assert!(claim.remaining() <= Duration::from_secs(9) && claim.remaining() > Duration::from_secs(5));
    let lost = claim.lost();
    claim.done().await.unwrap();
    assert!(lost.reason().is_none(), "a claim that was settled is not lost");
}

#[test]
fn it_does_not_start_without_a_runtime_or_with_nonsense() {
    let error = Claimer::builder(Probe::of(still_memory())).start().unwrap_err();
    assert_eq!(kind(&error), Some(ErrorKind::NoRuntime), "{error}");

    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _inside = runtime.enter();
    let store = || Claimer::builder(Probe::of(still_memory()));
    let none = Duration::ZERO;
    for wrong in [
        store().batch(0),
        store().lease(none),
        store().poll(none),
        store().renew_every(none),
        store().sweep_every(none),
    ] {
        let error = wrong.start().unwrap_err();
        assert_eq!(kind(&error), Some(ErrorKind::InvalidOption), "{error}");
    }
    let plain =
        ClaimSpec::builder(Table::new("plain").unwrap()).state("processed", States::boolean()).build();
    let held_only = Claimer::builder(Arc::new(MemoryClaims::new(plain.unwrap()).unwrap())).start();
    assert!(matches!(held_only, Err(ClaimError::Unsupported(_))));
}

/// Drops `next` after each possible number of polls, and checks that no claim is lost.
#[tokio::test(start_paused = true)]
async fn waits_may_be_dropped_at_any_moment() {
    let claims = still_memory();
    insert(&claims, 1..=50);
    let store = Probe::of(claims.clone());
    let claimer = paused(&store).lease(Duration::from_secs(3600)).start().unwrap();
    let mut done = 0;
    let mut polls = 0_u64;
    while done < 50 {
        let mut next = pin!(claimer.next());
        for _ in 0..polls % 5 {
            let polled = poll_fn(|cx| Poll::Ready(next.as_mut().poll(cx))).await;
            if let Poll::Ready(claim) = polled {
                claim.unwrap().done().await.unwrap();
                done += 1;
                break;
            }
            tokio::task::yield_now().await;
        }
        polls += 1;
        assert!(polls < 10_000, "rows are stuck: {done} are done");
        sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(count_in(&claims, "complete"), 50);
    within("nothing is left", claimer.close()).await.unwrap();
}

/// The same for many workers that are dropped at once during their waits.
#[tokio::test(start_paused = true)]
async fn a_waiter_that_is_dropped_takes_no_claim_from_the_others() {
    let claims = still_memory();
    let claimer = paused(&Probe::of(claims.clone())).start().unwrap();
    let stay = tokio::spawn({
        let claimer = claimer.clone();
        async move { claimer.next().await.unwrap().done().await }
    });
    let go: Vec<_> = (0..20)
        .map(|_| {
            let claimer = claimer.clone();
            tokio::spawn(async move { claimer.next().await })
        })
        .collect();
    sleep(Duration::from_secs(2)).await;
    for waiter in &go {
        waiter.abort();
    }
    insert(&claims, [1]);
    within("the one that stays", stay).await.unwrap().unwrap();
}

/// If a settlement is dropped after its start, it continues. If it is dropped before, the claim is returned.
#[tokio::test(start_paused = true)]
async fn ends_may_be_dropped_at_any_moment() {
    let claims = still_memory();
    insert(&claims, 1..=2);
    let store = Probe::of(claims.clone());
    let claimer = paused(&store).start().unwrap();
    let first = within("a claim", claimer.next()).await.unwrap();
    drop(first.done());
    until("it was returned", || message(&claims, 1).as_deref() == Some("dropped")).await;

    let claim = loop {
        let claim = within("a claim", claimer.next()).await.unwrap();
        if claim.row().key == RowKey::new(2) {
            break claim;
        }
    };
    store.hold_settles(true);
    let settling = tokio::spawn(claim.done());
    sleep(Duration::from_millis(10)).await;
    settling.abort();
    store.hold_settles(false);
    until("it was settled all the same", || state(&claims, 2) == "complete").await;
}

/// A single settlement is sent at once. Settlements that arrive during a call are batched.
#[tokio::test(start_paused = true)]
async fn ends_are_written_together() {
    let claims = still_memory();
    insert(&claims, 1..=100);
    let store = Probe::of(claims.clone());
    let claimer = paused(&store).ahead(0).start().unwrap();
    let mut takers = Vec::new();
    for _ in 0..100 {
        let claimer = claimer.clone();
        takers.push(tokio::spawn(async move { claimer.next().await.unwrap() }));
    }
    let mut held = Vec::new();
    for taker in takers {
        held.push(within("a claim", taker).await.unwrap());
    }
    let before = tokio::time::Instant::now();
    held.pop().unwrap().done().await.unwrap();
    assert_eq!(store.settles.load(Ordering::SeqCst), 1);
    assert_eq!(before.elapsed(), Duration::ZERO, "it waited for nothing");

    store.hold_settles(true);
    let ending: Vec<_> = held.into_iter().map(|claim| tokio::spawn(claim.done())).collect();
    sleep(Duration::from_millis(10)).await;
    store.hold_settles(false);
    for end in ending {
        within("an end", end).await.unwrap().unwrap();
    }
    assert_eq!(store.settled.load(Ordering::SeqCst), 100);
    let calls = store.settles.load(Ordering::SeqCst);
    assert!(calls <= 5, "{calls} calls for a hundred ends");
}

/// After a lost answer, the claimer reads the row to find out that the settlement was written.
#[tokio::test(start_paused = true)]
async fn an_end_whose_answer_was_lost_is_asked_for_again() {
    let claims = still_memory();
    insert(&claims, 1..=4);
    let store = Probe::of(claims.clone());
    let claimer = paused(&store).start().unwrap();
    let next = async || within("a claim", claimer.next()).await.unwrap();
    let outcomes = [
        Outcome::Done,
        Outcome::Failed("no".to_owned()),
        Outcome::Retry { error: None, after: Duration::from_secs(60) },
    ];
    for outcome in outcomes {
        let claim = next().await;
        store.lose_answer.store(true, Ordering::SeqCst);
        claim.settle(outcome).await.unwrap();
    }
    // But not if another worker has the row.
    let claim = next().await;
    let key = claim.row().key.clone();
    claims.expire(&key).unwrap();
    until("it was swept and taken again", || claims.row(&key).unwrap().epoch() > 1).await;
    store.lose_answer.store(true, Ordering::SeqCst);
    assert!(matches!(claim.done().await, Err(ClaimError::Superseded { current_epoch: Some(2..), .. })));
}

/// While the store is down, a settlement is retried until the lease ends.
#[tokio::test(start_paused = true)]
async fn ends_outlive_a_store_that_is_down_for_a_while() {
    let claims = still_memory();
    insert(&claims, 1..=2);
    let store = Probe::of(claims.clone());
    let claimer = paused(&store).lease(Duration::from_secs(30)).start().unwrap();
    let first = within("a claim", claimer.next()).await.unwrap();
    store.down.store(true, Ordering::SeqCst);
    let ending = tokio::spawn(first.done());
    sleep(Duration::from_secs(10)).await;
    assert!(!ending.is_finished());
    store.down.store(false, Ordering::SeqCst);
    within("the end", ending).await.unwrap().unwrap();
    assert_eq!(state(&claims, 1), "complete");

    let second = within("a claim", claimer.next()).await.unwrap();
    let lost = second.lost();
    store.down.store(true, Ordering::SeqCst);
    let before = tokio::time::Instant::now();
    let error = within("an answer", second.done()).await.unwrap_err();
    assert_eq!(kind(&error), Some(ErrorKind::OutcomeUnknown), "{error}");
    assert!(std::error::Error::source(&error).is_some(), "it says why");
    assert!(before.elapsed() <= Duration::from_secs(31), "bounded by the lease");
    assert_eq!(within("the loss", lost).await, LossReason::Expired);
}

/// If the store refuses a settlement, the claim fails with the reason, if that is the policy.
#[tokio::test(start_paused = true)]
async fn an_end_that_is_refused_is_a_failure() {
    let claims = still_memory();
    with_attempts(&claims, 1, 5);
    let claimer = paused(&Probe::of(claims.clone())).start().unwrap();
    let claim = within("a claim", claimer.next()).await.unwrap();
    let error = claim.settle(Outcome::To("unheard-of".into())).await.unwrap_err();
    assert!(!matches!(error, ClaimError::Superseded { .. } | ClaimError::Store(_)), "{error}");
    until("it has failed", || state(&claims, 1) == "error").await;
    assert_eq!(message(&claims, 1), Some(error.to_string()));
    assert_eq!(attempts(&claims, 1), Some(4));
}

/// A handler whose claim is lost is dropped at its current await, and nothing is written.
#[tokio::test(start_paused = true)]
async fn a_handler_is_dropped_when_its_claim_is_lost() {
    struct Dropped(Arc<AtomicUsize>);
    impl Drop for Dropped {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let claims = still_memory();
    insert(&claims, [1]);
    let claimer = paused(&Probe::of(claims.clone())).lease(Duration::from_secs(3)).start().unwrap();
    let (begun, dropped) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let running = tokio::spawn({
        let (begun, dropped) = (Arc::clone(&begun), Arc::clone(&dropped));
        async move {
            let handler = |_claim| {
                begun.fetch_add(1, Ordering::SeqCst);
                let guard = Dropped(Arc::clone(&dropped));
                async move {
                    std::future::pending::<()>().await;
                    drop(guard);
                    Ok::<(), String>(())
                }
            };
            claimer.run(1, handler).await.unwrap();
        }
    });
    until("it begins", || begun.load(Ordering::SeqCst) == 1).await;
    claims.expire(&RowKey::new(1)).unwrap();
    until("it is dropped and the row begun anew", || begun.load(Ordering::SeqCst) == 2).await;
    assert_eq!(dropped.load(Ordering::SeqCst), 1);
    assert!(claims.row(&RowKey::new(1)).unwrap().epoch() > 1);
    running.abort();
}

/// A kill costs each claimed row of a process one attempt, so by default a process claims no rows ahead of its workers.
#[tokio::test(start_paused = true)]
async fn nothing_is_taken_ahead_by_default() {
    let claims = still_memory();
    insert(&claims, 1..=50);
    let claimer = paused(&Probe::of(claims.clone())).start().unwrap();
    for _ in 0..40 {
        let claim = within("a claim", claimer.next()).await.unwrap();
        assert_eq!(count_in(&claims, "in-progress"), 1);
        claim.done().await.unwrap();
    }
}
