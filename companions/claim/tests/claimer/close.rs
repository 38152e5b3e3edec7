//! Closing and dropping a claimer, in memory.
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::Duration;

use crate::common::{Probe, count_in, insert, kind, paused, still_memory, until, with_attempts, within};
use leasehold_api::ErrorKind;
use leasehold_claim::MemoryRow;
use tokio::time::sleep;

/// A close puts prefetched claims back and waits for started ones.
#[tokio::test(start_paused = true)]
async fn closing_puts_back_what_nobody_has_begun_with_and_waits_for_the_rest() {
    let claims = still_memory();
    for id in 1..=20 {
        with_attempts(&claims, id, 3);
    }
    let store = Probe::of(claims.clone());
    let claimer = paused(&store).ahead(100).close_limit(Duration::from_secs(5)).start().unwrap();
    for _ in 0..10 {
        within("a quick one", claimer.next()).await.unwrap().done().await.unwrap();
    }
    let begun = within("one more", claimer.next()).await.unwrap();
    sleep(Duration::from_millis(100)).await;
    assert!(count_in(&claims, "in-progress") > 1, "some lie ready");
    let waiting = tokio::spawn({
        let claimer = claimer.clone();
        async move { claimer.next().await.is_some() }
    });

    let closing = tokio::spawn({
        let claimer = claimer.clone();
        async move { claimer.close().await }
    });
    sleep(Duration::from_secs(1)).await;
    assert_eq!(count_in(&claims, "in-progress"), 1, "what lay ready is back");
    let first_waiting = waiting.await.unwrap();
    assert!(claimer.next().await.is_none(), "nobody gets one any more");
    assert!(!closing.is_finished(), "it waits for the one that was begun");
    assert!(begun.is_valid());
    begun.done().await.unwrap();
    within("closing", closing).await.unwrap().unwrap();
    let left: Vec<_> = claims
        .rows()
        .iter()
        .filter(|row| row.state() == Some(&"new".into()))
        .map(MemoryRow::attempts_left)
        .collect();
    assert!(
        left.iter().filter(|left| **left == Some(3)).count() + 1 >= left.len(),
        "no attempt was used up: {left:?}"
    );
    assert!(first_waiting || count_in(&claims, "complete") == 11);
    within("closing again", claimer.close()).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn closing_waits_for_no_longer_than_it_may() {
    let claims = still_memory();
    insert(&claims, [1]);
    let claimer = paused(&Probe::of(claims.clone())).close_limit(Duration::from_secs(2)).start().unwrap();
    let begun = within("a claim", claimer.next()).await.unwrap();
    let before = tokio::time::Instant::now();
    let error = claimer.close().await.unwrap_err();
    assert_eq!(kind(&error), Some(ErrorKind::Timeout), "{error}");
    assert_eq!(before.elapsed().as_secs(), 2);
    // The started claim is still renewed and can be settled.
    sleep(Duration::from_secs(120)).await;
    assert!(begun.is_valid());
    begun.done().await.unwrap();
    within("closing again", claimer.close()).await.unwrap();
}

/// The rows of a take that is pending at the close are put back too, and not left to their leases.
#[tokio::test(start_paused = true)]
async fn closing_in_the_middle_of_a_take_loses_nothing() {
    let claims = still_memory();
    insert(&claims, 1..=3);
    let store = Probe::of(claims.clone());
    store.hold_takes(true);
    let claimer = paused(&store).start().unwrap();
    let waiting = tokio::spawn({
        let claimer = claimer.clone();
        async move { claimer.next().await.is_some() }
    });
    until("it takes", || count_in(&claims, "in-progress") > 0).await;
    let closing = tokio::spawn(async move { claimer.close().await });
    sleep(Duration::from_millis(100)).await;
    store.hold_takes(false);
    within("closing", closing).await.unwrap().unwrap();
    assert!(!waiting.await.unwrap());
    assert_eq!(count_in(&claims, "new"), 3);
}

/// The drop of the last handle ends the claimer, but claims of workers stay valid.
#[tokio::test(start_paused = true)]
async fn dropping_the_claimer_leaves_what_workers_have() {
    let claims = still_memory();
    insert(&claims, 1..=20);
    let store = Probe::of(claims.clone());
    let claimer = paused(&store).lease(Duration::from_secs(30)).start().unwrap();
    for _ in 0..10 {
        within("a quick one", claimer.next()).await.unwrap().done().await.unwrap();
    }
    let begun = within("one more", claimer.next()).await.unwrap();
    drop(claimer);
    until("what lay ready is back", || count_in(&claims, "in-progress") == 1).await;
    sleep(Duration::from_secs(100)).await;
    assert!(begun.is_valid(), "it is renewed");
    begun.done().await.unwrap();
    assert_eq!(count_in(&claims, "complete"), 11);
    // After that, no background task runs.
    let (sweeps, renews) = (store.sweeps.load(Ordering::SeqCst), store.renews.load(Ordering::SeqCst));
    sleep(Duration::from_secs(100)).await;
    assert_eq!(sweeps, store.sweeps.load(Ordering::SeqCst));
    assert_eq!(renews, store.renews.load(Ordering::SeqCst));
    assert_eq!(Arc::strong_count(&store), 1, "no task has it any more");
}

/// After the start of a close, no worker gets a claim, even if some are prefetched.
#[tokio::test(start_paused = true)]
async fn what_lies_ready_is_not_handed_out_after_closing() {
    let claims = still_memory();
    insert(&claims, 1..=20);
    let claimer = paused(&Probe::of(claims.clone())).ahead(100).start().unwrap();
    for _ in 0..10 {
        within("a quick one", claimer.next()).await.unwrap().done().await.unwrap();
    }
    sleep(Duration::from_millis(100)).await;
    assert!(count_in(&claims, "in-progress") > 0, "some lie ready");
    let mut closing = std::pin::pin!(claimer.close());
    let polled = std::future::poll_fn(|cx| Poll::Ready(closing.as_mut().poll(cx))).await;
    assert!(polled.is_pending());
    assert!(claimer.next().await.is_none());
    within("closing", closing).await.unwrap();
    assert_eq!(count_in(&claims, "new"), 10);
}
