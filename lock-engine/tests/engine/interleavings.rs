//! Interleavings of two events: late renewals, closing during calls, and releases that are blocked.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::task::Poll;
use std::time::Duration;

use crate::common::{PlainNet, distant, plain, start};
use leasehold_api::{ErrorKind, Lock as _, LockExt as _, Validity};
use leasehold_memory::MemoryStore;
use tokio::time::{Instant, sleep, timeout};

fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// C1: the first request can arrive after the second and shorten the lease at the store.
#[tokio::test(start_paused = true)]
async fn a_short_renewal_of_unknown_outcome_binds_also_after_a_longer_one() {
    let store = MemoryStore::new().default_ttl(seconds(60));
    let (builder, net) = distant(&store);
    let lock = builder.start().unwrap();
    let guard = lock.key("k").acquire().await.unwrap();
    sleep(ms(100)).await;
    *net.renewals_take.lock().unwrap() = vec![ms(3000)];
    guard.renew_for(seconds(2)).await.unwrap_err();
    guard.renew_for(seconds(60)).await.unwrap();
    let next = store.client().unwrap().key("k").wait(seconds(15)).acquire().await;
    assert!(next.is_err() || guard.validity() == Validity::Lost, "two valid guards");
}

/// C6: the store can keep the hold longer than the last renewal requested.
#[tokio::test(start_paused = true)]
async fn a_release_is_repeated_for_as_long_as_the_longest_lease_that_was_asked_for() {
    for (ttl, asked, away) in
        [(seconds(3600), seconds(1), seconds(5)), (seconds(10), seconds(3600), seconds(60))]
    {
        let net = Arc::new(PlainNet::default());
        let lock = start(plain(&net).leases(ttl));
        let guard = lock.key("k").acquire().await.unwrap();
        net.hang.store(true, SeqCst);
        guard.renew_for(asked).await.unwrap_err();
        net.hang.store(false, SeqCst);
        *net.fail_release.lock().unwrap() = Some(ErrorKind::Unavailable);
        drop(guard);
        sleep(away).await;
        *net.fail_release.lock().unwrap() = None;
        sleep(seconds(600)).await;
        assert!(net.is_free(), "{ttl:?}, then {asked:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_leases_have_ended_is_not_carried_through_an_outage() {
    let net = Arc::new(PlainNet::default());
    *net.fail_acquire.lock().unwrap() = Some(ErrorKind::Unavailable);
    *net.fail_release.lock().unwrap() = Some(ErrorKind::Unavailable);
    let lock = start(plain(&net).leases(seconds(1)));
    for i in 0..5_000 {
        lock.key(format!("k{}", i % 500)).give_up_on_failure().acquire().await.unwrap_err();
        sleep(ms(1)).await;
    }
    sleep(seconds(120)).await;
    *net.fail_release.lock().unwrap() = None;
    net.releases.lock().unwrap().clear();
    sleep(seconds(60)).await;
    assert!(net.releases.lock().unwrap().iter().sum::<usize>() < 500);
}

/// C17: a caller whose queued future is not polled, as in a `select!` with a shutdown signal, has no request at the
/// store.
#[tokio::test(start_paused = true)]
async fn closing_beside_a_parked_acquire_is_clean_and_quick() {
    let net = Arc::new(PlainNet::default());
    let lock = start(plain(&net));
    let _guard = lock.key("k").acquire().await.unwrap();
    let mut parked = Box::pin(lock.key("k").acquire());
    assert!(futures_util::poll!(&mut parked).is_pending());
    let begun = Instant::now();
    lock.close().await.unwrap();
    assert!(net.is_free() && begun.elapsed() < ms(100), "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn closing_says_that_a_granted_hold_is_left_also_if_its_caller_had_gone() {
    let net = Arc::new(PlainNet::default());
    *net.acquire_takes.lock().unwrap() = seconds(1);
    let lock = start(plain(&net));
    timeout(ms(500), lock.key("k").acquire()).await.unwrap_err();
    *net.fail_release.lock().unwrap() = Some(ErrorKind::PermissionDenied);
    sleep(seconds(2)).await;
    assert_eq!(lock.close().await.unwrap_err().kind(), ErrorKind::OutcomeUnknown);
}

/// The first release arrives before the grant, so the engine must release again after the grant.
#[tokio::test(start_paused = true)]
async fn a_hold_that_is_granted_while_it_is_released_is_released_again() {
    let net = Arc::new(PlainNet::default());
    *net.acquire_takes.lock().unwrap() = seconds(3);
    *net.release_replies_take.lock().unwrap() = seconds(4);
    let lock = start(plain(&net));
    timeout(ms(100), lock.key("k").acquire()).await.unwrap_err();
    let closed = lock.close().await;
    assert!(closed.is_err() || net.is_free(), "{closed:?}");
}

#[tokio::test(start_paused = true)]
async fn a_request_that_is_given_up_while_the_engine_closes_is_undone() {
    let net = Arc::new(PlainNet::default());
    net.travels.store(true, SeqCst);
    *net.acquire_takes.lock().unwrap() = seconds(6);
    let lock = Arc::new(start(plain(&net)));
    let mut parked = Box::pin(lock.key("k").acquire());
    assert!(futures_util::poll!(&mut parked).is_pending());
    *net.release_replies_take.lock().unwrap() = seconds(3);
    let closing = {
        let lock = Arc::clone(&lock);
        tokio::spawn(async move { lock.close().await })
    };
    sleep(seconds(2)).await;
    drop(parked);
    let closed = closing.await.unwrap();
    sleep(seconds(60)).await;
    assert!(closed.is_err() || net.is_free(), "{closed:?}");
}

#[tokio::test(start_paused = true)]
async fn closing_tries_again_what_had_no_answer_and_all_that_was_refused() {
    // One reply is lost, but the store works.
    let net = Arc::new(PlainNet::default());
    let lock = start(plain(&net));
    let guard = lock.key("k").acquire().await.unwrap();
    net.hang.store(true, SeqCst);
    drop(guard);
    sleep(ms(1)).await;
    net.hang.store(false, SeqCst);
    lock.close().await.unwrap();
    assert!(net.is_free());
    // More releases than fit in one call were refused, and the cause is fixed.
    let net = Arc::new(PlainNet::default());
    let lock = start(plain(&net));
    let guards = lock.keys((0..1200).map(|i| format!("k{i:04}"))).acquire().await.unwrap();
    *net.fail_release.lock().unwrap() = Some(ErrorKind::PermissionDenied);
    drop(guards);
    sleep(seconds(2)).await;
    *net.fail_release.lock().unwrap() = None;
    lock.close().await.unwrap();
    assert!(net.is_free());
}

/// A retry that hangs at the start of a close does not block other retries.
#[tokio::test(start_paused = true)]
async fn closing_retries_beside_a_retry_that_hangs() {
    let net = Arc::new(PlainNet::default());
    let lock = start(plain(&net));
    let guard = lock.key("k").acquire().await.unwrap();
    *net.fail_release.lock().unwrap() = Some(ErrorKind::Unavailable);
    drop(guard);
    sleep(ms(1)).await;
    net.hang.store(true, SeqCst);
    sleep(seconds(1)).await;
    assert_eq!(net.calls(), 2, "the retry hangs");
    net.hang.store(false, SeqCst);
    let back = {
        let net = Arc::clone(&net);
        tokio::spawn(async move {
            sleep(seconds(1)).await;
            *net.fail_release.lock().unwrap() = None;
        })
    };
    lock.close().await.unwrap();
    back.await.unwrap();
    assert!(net.is_free());
}

/// C6: the closing engine releases the hold itself, which is no loss.
#[tokio::test(start_paused = true)]
async fn a_release_that_meets_a_close_is_not_told_that_it_was_lost() {
    let net = Arc::new(PlainNet::default());
    let lock = Arc::new(start(plain(&net)));
    let guard = lock.key("k").acquire().await.unwrap();
    *net.release_takes.lock().unwrap() = seconds(3);
    let releasing = tokio::spawn(guard.release());
    sleep(ms(100)).await;
    *net.release_takes.lock().unwrap() = Duration::ZERO;
    lock.close().await.unwrap();
    let released = releasing.await.unwrap();
    assert!(released.is_ok() || released.unwrap_err().kind() == ErrorKind::OutcomeUnknown);
}

/// C5: the caller had no cooperative budget left at its first poll, so its request was never polled.
#[tokio::test(start_paused = true)]
async fn a_request_that_was_never_polled_is_not_sent_after_its_caller_has_gone() {
    let (builder, net) = distant(&MemoryStore::new());
    let lock = Arc::new(builder.start().unwrap());
    let caller = tokio::spawn(async move {
        let mut acquiring = Box::pin(lock.key("k").acquire());
        std::future::poll_fn(|cx| {
            while let Poll::Ready(left) = tokio::task::coop::poll_proceed(cx) {
                left.made_progress();
            }
            assert!(acquiring.as_mut().poll(cx).is_pending());
            Poll::Ready(())
        })
        .await;
        drop(acquiring);
        sleep(seconds(1)).await;
    });
    caller.await.unwrap();
    assert_eq!(net.acquires.load(SeqCst), 0);
}

#[tokio::test(start_paused = true)]
async fn a_hold_that_hangs_keeps_its_neighbours_for_a_while_only() {
    let net = Arc::new(PlainNet::default());
    let lock = start(plain(&net));
    let guards = lock.keys(["stuck", "x", "y"]).acquire().await.unwrap();
    *net.stuck.lock().unwrap() = Some("stuck");
    drop(guards);
    sleep(seconds(120)).await;
    let left: Vec<_> = net.rows.lock().unwrap().keys().map(ToString::to_string).collect();
    assert_eq!(left, ["stuck"]);
}

#[tokio::test(start_paused = true)]
async fn what_came_with_a_grant_comes_back_also_if_its_caller_had_gone() {
    let net = Arc::new(PlainNet::default());
    *net.acquire_takes.lock().unwrap() = seconds(1);
    let lock = start(plain(&net));
    timeout(ms(500), lock.key("k").acquire()).await.unwrap_err();
    sleep(seconds(2)).await;
    assert_eq!((net.states.load(SeqCst), net.is_free()), (1, true));
}
