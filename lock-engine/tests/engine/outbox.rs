//! Pending releases: few calls, no task per release, and none forgotten.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use crate::common::{PlainNet, plain, start};
use leasehold_api::{ErrorKind, Lock as _, LockExt as _, Mode, MultiGuard, Validity};
use leasehold_engine::Confirm;
use tokio::time::{Instant, sleep, timeout};

fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

fn tasks() -> usize {
    tokio::runtime::Handle::current().metrics().num_alive_tasks()
}

#[tokio::test(start_paused = true)]
async fn refused_requests_leave_no_task_and_no_call() {
    let net = Arc::new(PlainNet::default());
    *net.refuse.lock().unwrap() = Some(ErrorKind::PermissionDenied);
    let lock = start(plain(&net));
    sleep(ms(1)).await;
    let before = tasks();
    for _ in 0..1000 {
        let error = lock.key("k").give_up_on_failure().acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PermissionDenied);
    }
    sleep(seconds(60)).await;
    assert_eq!((tasks(), net.calls(), lock.active_keys()), (before, 0, 0));
    let begun = Instant::now();
    lock.close().await.unwrap();
    assert_eq!(begun.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn requests_that_may_have_arrived_at_a_store_that_refuses_everything_are_given_up_slowly() {
    for kind in [ErrorKind::PermissionDenied, ErrorKind::SchemaMissing] {
        let net = Arc::new(PlainNet::default());
        *net.fail_acquire.lock().unwrap() = Some(kind);
        *net.fail_release.lock().unwrap() = Some(kind);
        let lock = start(plain(&net));
        sleep(ms(1)).await;
        let before = tasks();
        for _ in 0..1000 {
            lock.key("k").give_up_on_failure().acquire().await.unwrap_err();
        }
        sleep(seconds(3600)).await;
        assert_eq!(tasks(), before);
        let calls = net.calls();
        sleep(seconds(600)).await;
        // Every five minutes, two batches of holds.
        assert!(net.calls() - calls <= 6, "{kind}: {} calls in ten minutes", net.calls() - calls);
        // Without any grant, closing neither waits nor reports a hold that is left.
        let begun = Instant::now();
        lock.close().await.unwrap();
        assert!(begun.elapsed() < seconds(1), "{:?}", begun.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn an_outage_costs_a_few_calls_and_no_tasks_whatever_is_tried_meanwhile() {
    let net = Arc::new(PlainNet::default());
    *net.fail_acquire.lock().unwrap() = Some(ErrorKind::Unavailable);
    *net.fail_release.lock().unwrap() = Some(ErrorKind::Unavailable);
    let lock = start(plain(&net).leases(seconds(30)));
    sleep(ms(1)).await;
    let before = tasks();
    for i in 0..6_000 {
        lock.key(format!("k{}", i % 500)).give_up_on_failure().acquire().await.unwrap_err();
        sleep(ms(10)).await;
    }
    assert!(tasks() <= before + 5, "{} tasks", tasks());
    let calls = net.calls();
    lock.key("k").give_up_on_failure().acquire().await.unwrap_err();
    sleep(seconds(1)).await;
    // One call for the latest failure, the others every few seconds with 500 holds per call.
    assert!(net.calls() - calls <= 5, "{} calls in one second", net.calls() - calls);
    // When the store is back, all holds are released, and then the calls stop.
    *net.fail_release.lock().unwrap() = None;
    sleep(seconds(30)).await;
    let calls = net.calls();
    sleep(seconds(600)).await;
    assert_eq!((net.calls() - calls, tasks()), (0, before));
}

/// A backend replies so if its tasks end with their runtime, shortly before the engine's.
#[tokio::test(start_paused = true)]
async fn a_release_is_repeated_if_the_backend_is_closed_and_the_engine_is_not() {
    let net = Arc::new(PlainNet::default());
    let lock = start(plain(&net));
    let guard = lock.key("k").acquire().await.unwrap();
    *net.fail_release.lock().unwrap() = Some(ErrorKind::Closed);
    drop(guard);
    sleep(seconds(1)).await;
    *net.fail_release.lock().unwrap() = None;
    sleep(seconds(60)).await;
    assert!(net.is_free());
}

#[tokio::test(start_paused = true)]
async fn a_hold_that_cannot_be_freed_does_not_keep_others() {
    let net = Arc::new(PlainNet::default());
    let lock = start(plain(&net));
    let (stuck, other) =
        (lock.key("stuck").acquire().await.unwrap(), lock.key("other").acquire().await.unwrap());
    net.hang.store(true, SeqCst);
    drop(stuck);
    sleep(ms(1)).await;
    net.hang.store(false, SeqCst);
    // The first call hangs until its limit, but this release does not wait for it.
    drop(other);
    sleep(ms(1)).await;
    let left: Vec<_> = net.rows.lock().unwrap().keys().map(ToString::to_string).collect();
    assert_eq!(left, ["stuck"]);
    sleep(seconds(11)).await;
    assert!(net.is_free());
}

/// A closing or dropped engine keeps retrying for the time limit of a close.
#[tokio::test(start_paused = true)]
async fn a_server_that_is_away_for_a_while_leaves_nothing_held_whether_closed_or_dropped() {
    for closes in [true, false] {
        let net = Arc::new(PlainNet::default());
        let lock = start(plain(&net));
        let guard = lock.key("k").acquire().await.unwrap();
        *net.fail_release.lock().unwrap() = Some(ErrorKind::Unavailable);
        drop(guard);
        let back = {
            let net = Arc::clone(&net);
            async move {
                // Late enough that a pause of several seconds would miss it.
                sleep(ms(8500)).await;
                *net.fail_release.lock().unwrap() = None;
            }
        };
        let back = tokio::spawn(back);
        if closes {
            lock.close().await.unwrap();
        } else {
            drop(lock);
            sleep(seconds(9)).await;
        }
        back.await.unwrap();
        assert!(net.is_free(), "closed: {closes}");
    }
}

#[tokio::test(start_paused = true)]
async fn many_guards_are_released_in_one_call() {
    let net = Arc::new(PlainNet::default());
    let lock = start(plain(&net));
    let keys: Vec<_> = (0..64).map(|i| format!("k{i:02}")).collect();
    *net.release_takes.lock().unwrap() = ms(10);
    let guards = lock.keys(&keys).acquire().await.unwrap();
    let begun = Instant::now();
    guards.release().await.unwrap();
    assert_eq!((begun.elapsed(), net.releases.lock().unwrap().clone()), (ms(10), vec![64]));
    assert_eq!(net.states.load(SeqCst), 64, "what the store gave along comes back");
    assert_eq!((net.is_free(), lock.counters().released, lock.active_keys()), (true, 64, 0));

    // On a silent store one time limit applies to all releases, and their outcome is unknown.
    let guards = lock.keys(&keys).acquire().await.unwrap();
    net.hang.store(true, SeqCst);
    let begun = Instant::now();
    assert_eq!(guards.release().await.unwrap_err().kind(), ErrorKind::OutcomeUnknown);
    assert_eq!(begun.elapsed(), ms(10_000));
    net.hang.store(false, SeqCst);
    sleep(seconds(6)).await;
    assert!(net.is_free(), "it goes on in the background");
}

#[tokio::test(start_paused = true)]
async fn guards_that_are_dropped_together_are_freed_together() {
    let net = Arc::new(PlainNet::default());
    let lock = start(plain(&net));
    let guards = lock.keys((0..64).map(|i| format!("k{i:02}"))).acquire().await.unwrap();
    drop(guards);
    sleep(ms(1)).await;
    assert_eq!(net.releases.lock().unwrap().clone(), vec![64]);
    assert!(net.is_free());
    // The same for guards whose release is dropped.
    let guards: MultiGuard = lock.keys(["a", "b"]).acquire().await.unwrap();
    let mut releasing = Box::pin(guards.release());
    assert!(futures_util::poll!(&mut releasing).is_pending());
    drop(releasing);
    sleep(ms(1)).await;
    assert!(net.is_free() && lock.active_keys() == 0);
}

/// On a sticky store, lost holds stay until an operator ends them.
#[tokio::test(start_paused = true)]
async fn a_grant_that_comes_too_late_on_a_sticky_store_is_freed() {
    let net = Arc::new(PlainNet::default());
    *net.acquire_takes.lock().unwrap() = seconds(3);
    let mut store = plain(&net);
    store.timing.confirm = Some(Confirm::new(ms(500), ms(2500)).sticky());
    let lock = start(store);
    let error = lock.key("k").give_up_on_failure().acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(!error.to_string().contains("TTL"), "there is none: {error}");
    sleep(ms(1)).await;
    assert_eq!((net.is_free(), net.calls()), (true, 1));
    *net.acquire_takes.lock().unwrap() = Duration::ZERO;
    // A lost hold of a caller stays, because an operator must check its work first.
    let guard = lock.key("k").acquire().await.unwrap();
    net.hang.store(true, SeqCst);
    sleep(seconds(3)).await;
    net.hang.store(false, SeqCst);
    sleep(seconds(60)).await;
    assert_eq!((guard.validity(), net.is_free(), net.calls()), (Validity::Lost, false, 1));
}

/// A call for several keys loses its first key while it waits for the next. The lost hold is released, because no
/// caller had its guard.
#[tokio::test(start_paused = true)]
async fn a_key_that_is_lost_before_its_call_has_the_others_is_freed_on_a_sticky_store() {
    for mode in [Mode::Exclusive, Mode::Shared] {
        let net = Arc::new(PlainNet::default());
        let sticky = || {
            let mut store = plain(&net);
            store.caps.modes.shared = true;
            store.timing.confirm = Some(Confirm::new(ms(500), ms(2500)).sticky());
            start(store)
        };
        let (lock, other) = (sticky(), sticky());
        let held = other.key("b").mode(mode).acquire().await.unwrap();
        let waiting =
            tokio::spawn(async move { lock.keys(["a", "b"]).mode(mode).acquire().await.unwrap_err().kind() });
        sleep(seconds(1)).await;
        net.hang.store(true, SeqCst);
        sleep(seconds(4)).await;
        net.hang.store(false, SeqCst);
        assert_eq!(waiting.await.unwrap(), ErrorKind::Lost);
        sleep(seconds(60)).await;
        // The other client's hold stays for an operator, because its caller had the guard.
        assert_eq!(held.validity(), Validity::Lost);
        let left: Vec<_> = net.rows.lock().unwrap().keys().map(ToString::to_string).collect();
        assert_eq!(left, ["b"], "{mode:?}");
    }
}

/// A call for several keys that is not polled loses its first key. The hold is released, and closing does not
/// wait for the call.
#[tokio::test(start_paused = true)]
async fn a_key_of_a_call_that_nobody_polls_is_freed_when_it_is_lost_on_a_sticky_store() {
    let net = Arc::new(PlainNet::default());
    let mut store = plain(&net);
    store.timing.confirm = Some(Confirm::new(ms(500), ms(2500)).sticky());
    let (lock, other) = (start(store), start(plain(&net)));
    let held = other.key("b").acquire().await.unwrap();
    let mut waiting = Box::pin(lock.keys(["a", "b"]).acquire());
    assert!(timeout(seconds(1), &mut waiting).await.is_err(), "b is held");
    net.hang.store(true, SeqCst);
    sleep(seconds(4)).await;
    net.hang.store(false, SeqCst);
    lock.close().await.unwrap();
    let left: Vec<_> = net.rows.lock().unwrap().keys().map(ToString::to_string).collect();
    assert_eq!((left, held.validity()), (vec!["b".to_owned()], Validity::Valid));
    assert_eq!(waiting.await.unwrap_err().kind(), ErrorKind::Closed);
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_is_dropped_while_the_server_is_away_ends() {
    let net = Arc::new(PlainNet::default());
    let lock = start(plain(&net));
    let guards = lock.keys(["a", "b"]).acquire().await.unwrap();
    net.hang.store(true, SeqCst);
    drop(guards);
    drop(lock);
    // One call limit for the first try, and one for the close.
    sleep(seconds(21)).await;
    assert_eq!((tasks(), Arc::strong_count(&net)), (0, 1));
}

/// Releases of ended leases are dropped without a call, and delay no other release.
#[tokio::test(start_paused = true)]
async fn what_is_over_costs_no_call_and_keeps_nobody() {
    let net = Arc::new(PlainNet::default());
    let lock = start(plain(&net).leases(seconds(2)));
    let live = lock.key("live").ttl(seconds(300)).acquire().await.unwrap();
    *net.fail_acquire.lock().unwrap() = Some(ErrorKind::Unavailable);
    *net.fail_release.lock().unwrap() = Some(ErrorKind::Unavailable);
    for i in 0..20_000 {
        lock.key(format!("k{i}")).give_up_on_failure().acquire().await.unwrap_err();
        sleep(ms(2)).await;
    }
    drop(live);
    sleep(seconds(10)).await;
    *net.fail_release.lock().unwrap() = None;
    // The longest pause between two retries, with its jitter.
    sleep(seconds(11)).await;
    assert!(net.is_free(), "the live one is behind 20,000 that are over");
    assert!(!net.releases.lock().unwrap().contains(&0), "a call for nothing");
    let calls = net.calls();
    sleep(seconds(600)).await;
    assert_eq!(net.calls(), calls);
}

/// The failures of leases that have ended do not lengthen the pauses of a later release.
#[tokio::test(start_paused = true)]
async fn a_release_that_fails_after_an_earlier_outage_is_repeated_soon() {
    for (kind, soon) in [(ErrorKind::Unavailable, ms(250)), (ErrorKind::PermissionDenied, seconds(11))] {
        let net = Arc::new(PlainNet::default());
        let lock = start(plain(&net).leases(seconds(30)));
        for round in 0..2 {
            let guard = lock.key("k").acquire().await.unwrap();
            *net.fail_release.lock().unwrap() = Some(kind);
            drop(guard);
            sleep(ms(1)).await;
            let calls = net.calls();
            sleep(soon).await;
            assert!(net.calls() > calls, "{kind}, outage {round}: no second call within {soon:?}");
            sleep(seconds(600)).await;
            *net.fail_release.lock().unwrap() = None;
            net.rows.lock().unwrap().clear();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn one_release_that_hangs_keeps_its_neighbours_for_two_calls() {
    for closes in [false, true] {
        let net = Arc::new(PlainNet::default());
        let lock = start(plain(&net));
        let mut guards = Vec::new();
        for i in 0..500 {
            guards.push(lock.key(format!("k{i}")).acquire().await.unwrap());
        }
        *net.stuck.lock().unwrap() = Some("k250");
        if closes {
            lock.close().await.unwrap_err();
        } else {
            drop(guards);
            // The limit of one call for all holds, one for a part of them, and the pauses.
            sleep(seconds(21)).await;
            assert!(net.rows.lock().unwrap().len() < 20, "{}", net.rows.lock().unwrap().len());
            sleep(seconds(11)).await;
        }
        let left: Vec<_> = net.rows.lock().unwrap().keys().map(ToString::to_string).collect();
        assert_eq!(left, ["k250"], "closed: {closes}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_silent_store_is_asked_with_few_calls_at_a_time() {
    let net = Arc::new(PlainNet::default());
    let lock = start(plain(&net));
    let mut guards = Vec::new();
    for i in 0..5_000 {
        guards.push(lock.key(format!("k{i}")).acquire().await.unwrap());
    }
    net.hang.store(true, SeqCst);
    drop(guards);
    sleep(seconds(300)).await;
    // Ten calls for the first try, then 32 calls every ten seconds.
    assert!(net.calls() < 10 + 32 * 31, "{}", net.calls());
    assert!(tasks() < 40, "{}", tasks());
    net.hang.store(false, SeqCst);
    sleep(seconds(21)).await;
    assert!(net.is_free(), "{} left", net.rows.lock().unwrap().len());
}

/// C17: closing reports a granted hold that the store refuses to release, even if its caller never had or polled it.
#[tokio::test(start_paused = true)]
async fn closing_says_what_it_leaves_also_of_what_nobody_had_or_polls() {
    let net = Arc::new(PlainNet::default());
    *net.acquire_takes.lock().unwrap() = seconds(3);
    *net.fail_release.lock().unwrap() = Some(ErrorKind::PermissionDenied);
    let mut store = plain(&net);
    store.timing.confirm = Some(Confirm::new(ms(500), ms(2500)));
    let lock = start(store);
    lock.key("too late").give_up_on_failure().acquire().await.unwrap_err();
    assert!(!net.is_free());
    lock.close().await.unwrap_err();

    let net = Arc::new(PlainNet::default());
    let lock = start(plain(&net));
    let guard = lock.key("unpolled").acquire().await.unwrap();
    *net.release_takes.lock().unwrap() = seconds(1);
    *net.fail_release.lock().unwrap() = Some(ErrorKind::PermissionDenied);
    let mut releasing = Box::pin(guard.release());
    assert!(futures_util::poll!(&mut releasing).is_pending());
    lock.close().await.unwrap_err();
    drop(releasing);
}

/// The key is blocked until the release, so the release does not wait for long after the repair.
#[tokio::test(start_paused = true)]
async fn a_release_that_waits_for_an_operator_follows_the_repair_soon() {
    let net = Arc::new(PlainNet::default());
    let lock = start(plain(&net));
    let guard = lock.key("k").acquire().await.unwrap();
    *net.fail_release.lock().unwrap() = Some(ErrorKind::NeedsOperator);
    drop(guard);
    sleep(seconds(600)).await;
    assert!(!net.is_free());
    *net.fail_release.lock().unwrap() = None;
    // The longest pause between two retries, with its jitter.
    sleep(seconds(11)).await;
    assert!(net.is_free());
}

/// A store can refuse the release of a request for as long as a copy of it can arrive. A closing engine cannot stop that
/// copy, but a hold of a caller is released within the limit, or is an error.
#[tokio::test(start_paused = true)]
async fn closing_does_not_wait_for_a_request_that_can_still_arrive() {
    let net = Arc::new(PlainNet::default());
    net.late_copies.store(true, SeqCst);
    *net.fail_acquire.lock().unwrap() = Some(ErrorKind::Unavailable);
    let lock = start(plain(&net));
    lock.key("k").give_up_on_failure().acquire().await.unwrap_err();
    sleep(seconds(60)).await;
    assert!(net.calls() > 5, "the release is repeated: {} calls", net.calls());
    let begun = Instant::now();
    lock.close().await.unwrap();
    assert!(begun.elapsed() < seconds(1), "{:?}", begun.elapsed());

    *net.fail_acquire.lock().unwrap() = None;
    let lock = start(plain(&net));
    drop(lock.key("held").acquire().await.unwrap());
    lock.close().await.unwrap_err();
}

/// A request that was sent can arrive after a release that failed. So the time after which its lease has certainly ended
/// counts from the last answer, and the store can say that it does not know that time.
#[tokio::test(start_paused = true)]
async fn the_release_of_a_request_that_can_still_arrive_is_repeated_for_longer_than_its_lease() {
    for (ttl, says_so) in [(1, true), (10, false)] {
        let net = Arc::new(PlainNet::default());
        net.late_copies.store(says_so, SeqCst);
        *net.fail_release.lock().unwrap() = (!says_so).then_some(ErrorKind::Unavailable);
        *net.fail_acquire.lock().unwrap() = Some(ErrorKind::Unavailable);
        let lock = start(plain(&net).leases(seconds(ttl)));
        lock.key("k").give_up_on_failure().acquire().await.unwrap_err();
        sleep(seconds(120)).await;
        let calls = net.calls();
        sleep(seconds(11)).await;
        assert!(net.calls() > calls, "a TTL of {ttl} s");
        net.late_copies.store(false, SeqCst);
        *net.fail_release.lock().unwrap() = None;
        sleep(seconds(11)).await;
        let calls = net.calls();
        sleep(seconds(600)).await;
        assert_eq!(net.calls(), calls, "a TTL of {ttl} s: it was answered");
    }
}
