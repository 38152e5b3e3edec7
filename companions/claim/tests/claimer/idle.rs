//! Calls of an idle claimer to the store, in memory.
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use crate::common::{Probe, builder, insert, paused, state, still_memory, within};
use leasehold_claim::{ClaimStore as _, Claimer, MemoryClaims, MemoryClock, Retention, RowKey, Take};
use tokio::task::JoinHandle;
use tokio::time::sleep;

const MINUTE: Duration = Duration::from_secs(60);

/// Starts a worker that finishes all claims.
fn worker(claimer: &Claimer) -> JoinHandle<()> {
    let claimer = claimer.clone();
    tokio::spawn(async move {
        while let Some(claim) = claimer.next().await {
            claim.done().await.unwrap();
        }
    })
}

/// After the first announcement of new work, an idle process sends at most one statement in ten seconds.
#[tokio::test(start_paused = true)]
async fn an_idle_claimer_calls_the_store_at_most_once_in_ten_seconds() {
    let claims = still_memory();
    let store = Probe::of(claims.clone());
    let claimer = paused(&store).start().unwrap();
    let worker = worker(&claimer);
    sleep(Duration::from_secs(1)).await;
    insert(&claims, [1]);
    sleep(MINUTE).await;
    assert_eq!(state(&claims, 1), "complete");
    let before = store.calls();
    sleep(MINUTE * 60).await;
    let calls = store.calls() - before;
    assert!((200..=360).contains(&calls), "{calls} calls in an hour");
    worker.abort();
}

/// Without announcements, new work is found soon too.
#[tokio::test(start_paused = true)]
async fn a_claimer_polls_often_until_the_first_announcement() {
    let claims = still_memory();
    let store = Probe::of(claims.clone());
    claims.lose_wake_ups(true);
    let claimer = paused(&store).start().unwrap();
    let worker = worker(&claimer);
    sleep(Duration::from_secs(5)).await;
    for id in 1..=10 {
        insert(&claims, [id]);
        sleep(Duration::from_millis(2_100)).await;
        assert_eq!(state(&claims, id), "complete", "found by the next poll");
    }
    let before = store.claim_queries();
    sleep(MINUTE).await;
    let polls = store.claim_queries() - before;
    assert!((29..=38).contains(&polls), "{polls} polls in a minute: each is one question");

    claims.lose_wake_ups(false);
    insert(&claims, [11]);
    sleep(MINUTE).await;
    let before = store.claim_queries();
    sleep(MINUTE * 10).await;
    let polls = store.claim_queries() - before;
    assert!((19..=26).contains(&polls), "{polls} polls in ten minutes");
    worker.abort();
}

/// If the listener knows from the start that new work is announced, the claimer polls rarely at once. It polls often without
/// a listener, and with a next listener that does not know it.
#[tokio::test(start_paused = true)]
async fn a_claimer_polls_rarely_while_its_listener_knows_of_announcements() {
    let store = Probe::of(still_memory());
    let claimer = paused(&store).start().unwrap();
    let worker = worker(&claimer);
    let polls = async |what: &str, minutes: u32, expected: RangeInclusive<usize>| {
        sleep(MINUTE).await;
        let before = store.claim_queries();
        sleep(MINUTE * minutes).await;
        let polls = store.claim_queries() - before;
        assert!(expected.contains(&polls), "{what}: {polls} polls in {minutes} minutes");
    };
    let set = |flag: &AtomicBool, value: bool| {
        flag.store(value, Ordering::SeqCst);
        store.break_listeners();
    };
    polls("nobody knows", 1, 29..=38).await;
    set(&store.proven, true);
    polls("proven", 10, 19..=26).await;
    set(&store.deaf, true);
    polls("nobody listens", 1, 29..=38).await;
    set(&store.deaf, false);
    polls("proven again", 10, 19..=26).await;
    set(&store.proven, false);
    polls("the next listener knows nothing", 1, 29..=38).await;
    worker.abort();
}

/// Each loss of a listener is reported once. Failures to listen are not reported.
#[tokio::test(start_paused = true)]
async fn a_listener_that_is_lost_is_reported() {
    let store = Probe::of(still_memory());
    let told = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&told);
    let tell = move |_: &_| {
        count.fetch_add(1, Ordering::SeqCst);
    };
    let claimer = paused(&store).on_error(tell).start().unwrap();
    let worker = worker(&claimer);
    for losses in 0..3 {
        sleep(MINUTE * 2).await;
        assert_eq!(told.load(Ordering::SeqCst), losses);
        store.break_listeners();
    }
    sleep(MINUTE * 2).await;
    store.deaf.store(true, Ordering::SeqCst);
    store.break_listeners();
    sleep(MINUTE * 10).await;
    assert_eq!(told.load(Ordering::SeqCst), 4, "the last connection, and not that there is none");
    worker.abort();
}

/// The sweep sleeps until the first lease ends, even if its interval is shorter.
#[tokio::test(start_paused = true)]
async fn a_claimer_sleeps_until_the_first_lease_ends() {
    let claims = MemoryClaims::with_clock(builder().build().unwrap(), MemoryClock::stopped()).unwrap();
    insert(&claims, [1]);
    let lease = Duration::from_secs(20);
    assert_eq!(claims.take(&Take::up_to(1).lease(lease)).await.unwrap().claims.len(), 1);
    let store = Probe::of(claims.clone());
    store.dumb.store(true, Ordering::SeqCst);
    let claimer = paused(&store).poll(MINUTE * 60).start().unwrap();
    let waiting = tokio::spawn(async move { (claimer.next().await.unwrap(), claimer) });
    sleep(Duration::from_secs(19)).await;
    assert_eq!(store.sweeps.load(Ordering::SeqCst), 1, "one look has told when it ends");
    claims.clock().advance(lease);
    let (claim, _claimer) =
        tokio::time::timeout(Duration::from_secs(2), waiting).await.expect("a second after its end").unwrap();
    assert_eq!(claim.epoch(), Some(3));
}

/// Rows that a sweep cannot return yet are retried with growing pauses.
#[tokio::test(start_paused = true)]
async fn what_cannot_be_swept_is_tried_again_with_growing_pauses() {
    let claims = still_memory();
    insert(&claims, [1]);
    claims.take(&Take::up_to(1)).await.unwrap();
    claims.expire(&RowKey::new(1)).unwrap();
    let locked = claims.lock(&RowKey::new(1)).unwrap();
    let store = Probe::of(claims.clone());
    let claimer = paused(&store).start().unwrap();
    let waiting = tokio::spawn(async move { (claimer.next().await.unwrap(), claimer) });
    sleep(MINUTE).await;
    let looks = store.sweeps.load(Ordering::SeqCst);
    assert!((15..=40).contains(&looks), "{looks} looks in a minute");
    drop(locked);
    let swept = tokio::time::timeout(Duration::from_secs(5), waiting).await;
    assert_eq!(swept.expect("soon after it was let go").unwrap().0.epoch(), Some(3));
}

/// Rows past their retention are deleted in the background while the claimer lives.
#[tokio::test(start_paused = true)]
async fn settled_rows_are_purged_in_the_background() {
    const DAY: Duration = Duration::from_secs(86_400);
    let spec = builder().settled_at("settled_at").retention(Retention::KeepFor(DAY)).build().unwrap();
    let claims = MemoryClaims::with_clock(spec, MemoryClock::stopped()).unwrap();
    insert(&claims, 1..=1200);
    let store = Probe::of(claims.clone());
    let claimer = paused(&store).start().unwrap();
    let worker = worker(&claimer);
    sleep(MINUTE).await;
    claims.clock().advance(DAY / 2);
    insert(&claims, [5000]);
    sleep(MINUTE * 120).await;
    assert_eq!(claims.rows().len(), 1201, "all are kept for a day");
    claims.clock().advance(DAY / 2);
    sleep(MINUTE * 120).await;
    assert_eq!(claims.rows().len(), 1, "but for the one that was settled later");
    let purges = store.purges.load(Ordering::SeqCst);
    assert!(purges <= 15, "about one an hour, and three for all of them: {purges}");
    within("closing", claimer.close()).await.unwrap();
    worker.await.unwrap();
    sleep(MINUTE * 120).await;
    assert_eq!(store.purges.load(Ordering::SeqCst), purges);
}

/// Without a retention, no purge is sent.
#[tokio::test(start_paused = true)]
async fn without_a_retention_nothing_is_purged() {
    let store = Probe::of(still_memory());
    let claimer = paused(&store).start().unwrap();
    sleep(MINUTE * 300).await;
    assert_eq!(store.purges.load(Ordering::SeqCst), 0);
    drop(claimer);
}
