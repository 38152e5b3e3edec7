//! The life of a hold: maximum hold, handles, dropped renewals, counters, bodies that block their thread.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use crate::common::{Plain, PlainNet, plain, start};
use leasehold_api::{
    End, ErrorKind, Lock as _, LockExt as _, LockGuard, LockKey, LossReason, Operation, RunError, Validity,
};
use leasehold_engine::{Confirm, Counters, Engine};
use leasehold_memory::{ClientSetup, Fault, MemoryStore, Op};
use tokio::time::{Instant, sleep, timeout};
use tokio_test::task;

fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// Returns stores with and without leases, confirmations and sticky holds.
fn stores() -> Vec<(&'static str, Arc<PlainNet>, Plain)> {
    let make = |change: fn(Plain) -> Plain| {
        let net = Arc::new(PlainNet::default());
        (Arc::clone(&net), change(plain(&net)))
    };
    let confirmed = |sticky: bool| {
        let (net, mut store) = make(|store| store);
        let confirm = Confirm::new(seconds(1), seconds(5));
        store.timing.confirm = Some(if sticky { confirm.sticky() } else { confirm });
        (net, store)
    };
    [
        ("nothing ends it", make(|store| store)),
        ("leases", make(|store| store.leases(seconds(3)))),
        ("long leases", make(|store| store.leases(seconds(600)))),
        ("confirmed", confirmed(false)),
        ("sticky", confirmed(true)),
    ]
    .into_iter()
    .map(|(name, (net, store))| (name, net, store))
    .collect()
}

#[tokio::test(start_paused = true)]
async fn a_maximum_hold_ends_the_hold_on_each_kind_of_store() {
    for (name, net, store) in stores() {
        let lock = start(store);
        let guard = lock.key("k").max_hold(seconds(10)).acquire().await.unwrap();
        let lost = guard.lost();
        sleep(ms(9_900)).await;
        assert_eq!(guard.validity(), Validity::Valid, "{name}");
        assert!(guard.remaining().is_some_and(|left| left <= ms(100)), "{name}: {:?}", guard.remaining());
        sleep(ms(101)).await;
        assert_eq!(guard.validity(), Validity::Lost, "{name}");
        assert_eq!(timeout(ms(1), lost).await.unwrap(), LossReason::HeldTooLong, "{name}");
        sleep(ms(1)).await;
        assert!(net.is_free(), "{name}: the store still has it");
        let renewals = net.renewals.lock().unwrap().len();
        let error = guard.release().await.unwrap_err();
        assert_eq!((error.kind(), error.loss()), (ErrorKind::Lost, Some(LossReason::HeldTooLong)), "{name}");
        // Another grant succeeds, and the old hold is no longer renewed.
        let _next = lock.key("k").try_acquire().await.unwrap().expect(name);
        assert!(net.renewals.lock().unwrap().len() <= renewals + 1, "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_maximum_hold_stops_the_body() {
    let net = Arc::new(PlainNet::default());
    let lock = start(plain(&net));
    let begun = Instant::now();
    let outcome = lock.key("k").max_hold(seconds(2)).run(async |_| sleep(seconds(60)).await).await;
    let Err(RunError::Stopped(error)) = outcome else { panic!("{outcome:?}") };
    assert_eq!((error.loss(), error.is_retryable()), (Some(LossReason::HeldTooLong), false));
    assert!(begun.elapsed() <= ms(2010), "{:?}", begun.elapsed());
    let zero = lock.key("k").max_hold(Duration::ZERO).acquire().await.unwrap_err();
    assert_eq!(zero.kind(), ErrorKind::InvalidOption);
}

#[tokio::test(start_paused = true)]
async fn one_key_of_several_that_is_held_too_long_ends_alone() {
    let net = Arc::new(PlainNet::default());
    let lock = start(plain(&net).leases(seconds(3)));
    let guards = lock.keys(["a", "b"]).max_hold(seconds(5)).acquire().await.unwrap();
    let other = lock.key("c").acquire().await.unwrap();
    let (key, reason) = guards.lost().await;
    assert_eq!((key.as_str(), reason), ("a", LossReason::HeldTooLong));
    assert_eq!((guards.validity(), other.validity()), (Validity::Lost, Validity::Valid));
}

#[tokio::test(start_paused = true)]
async fn a_retry_never_runs_a_body_twice() {
    let net = Arc::new(PlainNet::default());
    let lock = start(plain(&net));
    let ran = std::cell::Cell::new(0);
    let run = async || {
        lock.key("k")
            .run(async |_| {
                ran.set(ran.get() + 1);
                *net.fail_release.lock().unwrap() = Some(ErrorKind::Unavailable);
                "receipt"
            })
            .await
    };
    let mut outcome = run().await;
    while outcome.as_ref().is_err_and(RunError::is_retryable) {
        outcome = run().await;
    }
    let Err(RunError::Unconfirmed { value, error }) = outcome else { panic!("{outcome:?}") };
    assert_eq!((ran.get(), value, error.operation()), (1, "receipt", Some(Operation::Release)));
    assert!(error.kind().is_transient() && !error.is_retryable(), "{error}");
    // A body that has not run can be retried.
    *net.refuse.lock().unwrap() = Some(ErrorKind::Unavailable);
    let outcome = lock.key("l").run(async |_| ()).await;
    assert!(matches!(&outcome, Err(RunError::NotRun(_))) && outcome.unwrap_err().is_retryable());
}

#[tokio::test(start_paused = true)]
async fn a_handle_sees_the_end() {
    let net = Arc::new(PlainNet::default());
    let lock = start(plain(&net));
    let guard = lock.key("k").acquire().await.unwrap();
    let handle = guard.handle();
    let watching = tokio::spawn({
        let handle = handle.clone();
        async move { handle.ended().await }
    });
    sleep(ms(1)).await;
    assert_eq!(handle.validity(), Validity::Valid);
    drop(guard);
    assert_eq!(watching.await.unwrap(), End::Released);
    assert_eq!((handle.validity(), handle.remaining()), (Validity::Ended, Some(Duration::ZERO)));
    assert!(futures_util::poll!(handle.lost()).is_pending(), "it was not lost");
}

#[tokio::test(start_paused = true)]
async fn renewals_that_nobody_waits_for_are_not_carried_out() {
    let store = MemoryStore::new().default_ttl(seconds(30));
    let client = store.client_with(ClientSetup::new()).unwrap();
    let guard = client.lock.key("k").acquire().await.unwrap();
    for _ in 0..5 {
        client.faults.script(Op::Renew, Fault::DelayReply(seconds(1)));
    }
    for _ in 0..500 {
        timeout(ms(1), guard.renew()).await.unwrap_err();
    }
    let begun = Instant::now();
    guard.renew().await.unwrap();
    assert!(begun.elapsed() <= seconds(2), "behind 500 others: {:?}", begun.elapsed());
    // Concurrent renewals are served by one call.
    for _ in 0..2 {
        client.faults.script(Op::Renew, Fault::DelayReply(seconds(1)));
    }
    let before = client.faults.calls(Op::Renew);
    let renewed = futures_util::future::join_all((0..50).map(|_| guard.renew())).await;
    assert!(renewed.iter().all(Result::is_ok));
    assert!(client.faults.calls(Op::Renew) - before <= 2);
    for _ in 0..500 {
        let _ = timeout(ms(1), guard.renew()).await;
    }
    guard.release().await.unwrap();
    sleep(seconds(5)).await;
    let before = client.faults.calls(Op::Renew);
    sleep(seconds(600)).await;
    assert_eq!(client.faults.calls(Op::Renew), before, "renewed after its release");
}

#[tokio::test(start_paused = true)]
async fn one_short_lease_does_not_hurry_the_long_ones() {
    let net = Arc::new(PlainNet::default());
    let lock = start(plain(&net).leases(seconds(30)));
    let mut guards = Vec::new();
    for i in 0..10 {
        guards.push(lock.key(format!("long{i}")).acquire().await.unwrap());
    }
    guards.push(lock.key("short").ttl(seconds(1)).acquire().await.unwrap());
    sleep(seconds(30)).await;
    let renewals = net.renewals.lock().unwrap().clone();
    assert!(renewals.iter().any(|(holds, ttl)| (*holds, *ttl) == (10, Some(seconds(30)))), "{renewals:?}");
    assert!(renewals.iter().all(|(holds, ttl)| *holds == 1 || *ttl == Some(seconds(30))), "{renewals:?}");
    assert!(guards.iter().all(|guard| guard.validity() == Validity::Valid));
}

#[tokio::test(start_paused = true)]
async fn a_backend_that_panics_before_its_first_await_costs_one_renewal() {
    let net = Arc::new(PlainNet::default());
    let lock = start(plain(&net).leases(seconds(30)));
    let guard = lock.key("k").acquire().await.unwrap();
    net.panic_renew.store(true, SeqCst);
    sleep(seconds(120)).await;
    assert_eq!(guard.validity(), Validity::Valid);
    assert!(!net.panic_renew.load(SeqCst), "it was asked");
}

#[tokio::test(start_paused = true)]
async fn counters_only_grow() {
    let net = Arc::new(PlainNet::default());
    let lock = start(plain(&net));
    let of = |lock: &Engine| {
        let Counters { granted, released, lost, .. } = lock.counters();
        (granted, released, lost)
    };
    for n in 1..=10 {
        drop(lock.key("k").acquire().await.unwrap());
        assert_eq!(of(&lock), (n, n - 1, 0), "not confirmed yet");
        sleep(ms(1)).await;
        assert_eq!(of(&lock), (n, n, 0));
    }
    let guard = lock.key("k").acquire().await.unwrap();
    assert_eq!(of(&lock), (11, 10, 0));
    *net.release_takes.lock().unwrap() = seconds(1);
    let releasing = tokio::spawn(guard.release());
    sleep(ms(10)).await;
    assert_eq!(of(&lock), (11, 10, 0), "under way");
    releasing.await.unwrap().unwrap();
    assert_eq!(of(&lock), (11, 11, 0));
    // A release that fails at first is counted when a retry succeeds.
    *net.release_takes.lock().unwrap() = Duration::ZERO;
    let guard = lock.key("k").acquire().await.unwrap();
    *net.fail_release.lock().unwrap() = Some(ErrorKind::Unavailable);
    guard.release().await.unwrap_err();
    assert_eq!(of(&lock), (12, 11, 0));
    sleep(ms(10)).await;
    *net.fail_release.lock().unwrap() = None;
    sleep(seconds(10)).await;
    assert_eq!(of(&lock), (12, 12, 0));
    // A lost grant ended without a release.
    let _guard = lock.key("k").max_hold(seconds(1)).acquire().await.unwrap();
    sleep(seconds(2)).await;
    assert_eq!(of(&lock), (13, 12, 1), "the store has let go of it, its holder has not");
}

#[tokio::test(start_paused = true)]
async fn closing_twice_at_the_same_time_closes_once() {
    let net = Arc::new(PlainNet::default());
    let lock = start(plain(&net));
    let guards = lock.keys((0..8).map(|i| format!("k{i}"))).acquire().await.unwrap();
    let (first, second) = tokio::join!(lock.close(), lock.close());
    assert!(first.is_ok() && second.is_ok(), "{first:?} {second:?}");
    assert!(net.is_free() && guards.validity() == Validity::Lost);
}

/// Two threads close at once. The second must not take holds that the first is about to release.
#[test]
fn closing_from_two_threads_leaves_nothing() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    for _ in 0..50 {
        let net = Arc::new(PlainNet::default());
        let lock = Arc::new(runtime.block_on(async { Engine::start(plain(&net)) }).unwrap());
        let keys = (0..8).map(|i| format!("k{i}"));
        let _guards = runtime.block_on(lock.keys(keys).acquire()).unwrap();
        let together = Arc::new(std::sync::Barrier::new(2));
        let closers = [(); 2].map(|()| {
            let (lock, handle, together) =
                (Arc::clone(&lock), runtime.handle().clone(), Arc::clone(&together));
            std::thread::spawn(move || {
                together.wait();
                handle.block_on(lock.close())
            })
        });
        for closer in closers {
            closer.join().unwrap().unwrap();
        }
        assert!(net.is_free());
    }
}

/// Two threads close at once, and the first blocks in its log. The second must not leave the holds that the first has
/// started to release.
#[test]
fn a_close_that_is_held_up_leaves_nothing() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let net = Arc::new(PlainNet::default());
    let lock = Arc::new(runtime.block_on(async { Engine::start(plain(&net)) }).unwrap());
    let _guards = runtime.block_on(lock.keys((0..8).map(|i| format!("k{i}"))).acquire()).unwrap();
    let ((begun, has_begun), (ended, has_ended)) = (channel(), channel());
    let (slow, handle) = (Arc::clone(&lock), runtime.handle().clone());
    let first = std::thread::spawn(move || {
        let log = SlowLog { begun: begun.clone(), ended: Mutex::new(has_ended), events: AtomicUsize::new(0) };
        tracing::subscriber::with_default(log, || {
            let mut closing = task::spawn(slow.close());
            let polled = closing.poll();
            // Sent again, in case the first close did not block.
            let _ = begun.send(());
            if let Poll::Ready(outcome) = polled { outcome } else { handle.block_on(closing) }
        })
    });
    has_begun.recv().unwrap();
    runtime.block_on(lock.close()).unwrap();
    let _ = ended.send(());
    first.join().unwrap().unwrap();
    assert!(net.is_free(), "both closings were Ok");
}

/// A log that blocks at its second event until the other close has ended.
struct SlowLog {
    begun: Sender<()>,
    ended: Mutex<Receiver<()>>,
    events: AtomicUsize,
}

impl tracing::Subscriber for SlowLog {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, _: &tracing::Event<'_>) {
        if self.events.fetch_add(1, SeqCst) == 1 {
            let _ = self.begun.send(());
            let _ = self.ended.lock().unwrap().recv();
        }
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

/// A body blocks its worker thread right after the grant, and the other workers renew the lease.
#[test]
fn a_body_that_blocks_its_thread_keeps_its_lease() {
    for workers in [2, 8] {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(workers).enable_all().build().unwrap();
        let net = Arc::new(PlainNet::default());
        let store = plain(&net).leases(seconds(6));
        let lock = Arc::new(runtime.block_on(async { Engine::start(store) }).unwrap());
        let renewed = Arc::clone(&net);
        let body = async move {
            let blocked = lock.key("k").run(async |guard| {
                let begun = std::time::Instant::now();
                while renewed.renewals.lock().unwrap().len() < 2 && begun.elapsed() < seconds(60) {
                    std::thread::sleep(ms(10));
                }
                (guard.validity(), renewed.renewals.lock().unwrap().len())
            });
            blocked.await
        };
        let outcome = runtime.block_on(async move { tokio::spawn(body).await.unwrap() });
        assert_eq!(outcome.unwrap(), (Validity::Valid, 2), "{workers} workers");
    }
}

/// With a single thread no renewal can run, and the guard reads lost.
#[test]
fn a_body_that_blocks_the_only_thread_loses_its_lease_and_is_told() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let net = Arc::new(PlainNet::default());
    let outcome = runtime.block_on(async {
        let lock = Engine::start(plain(&net).leases(ms(300))).unwrap();
        let blocked = lock.key("k").run(async |guard| {
            std::thread::sleep(ms(600));
            guard.validity()
        });
        blocked.await
    });
    let Err(RunError::Unconfirmed { value, error }) = outcome else { panic!("{outcome:?}") };
    assert_eq!((value, error.loss()), (Validity::Lost, Some(LossReason::Expired)));
}

#[tokio::test(start_paused = true)]
async fn a_renewal_that_hangs_does_not_cost_its_neighbours_their_leases() {
    let net = Arc::new(PlainNet::default());
    let lock = start(plain(&net).leases(seconds(30)));
    let mut guards = Vec::new();
    for i in 0..500 {
        guards.push(lock.key(format!("k{i}")).acquire().await.unwrap());
    }
    *net.stuck.lock().unwrap() = Some("k250");
    sleep(seconds(120)).await;
    let lost: Vec<_> =
        guards.iter().filter(|guard| !guard.validity().is_held()).map(LockGuard::key).collect();
    assert_eq!(lost, [&LockKey::new("k250").unwrap()]);
    // The other renewals are batched again.
    let before = net.renewals.lock().unwrap().len();
    sleep(seconds(100)).await;
    let renewals = net.renewals.lock().unwrap()[before..].to_vec();
    assert!(renewals.len() < 20 && renewals.iter().any(|(holds, _)| *holds > 400), "{renewals:?}");
}

#[tokio::test(start_paused = true)]
async fn an_outage_is_not_filled_with_renewals() {
    let net = Arc::new(PlainNet::default());
    let lock = start(plain(&net).leases(seconds(30)));
    let mut guards = Vec::new();
    for i in 0..5_000 {
        guards.push(lock.key(format!("k{i}")).acquire().await.unwrap());
    }
    net.hang.store(true, SeqCst);
    sleep(seconds(60)).await;
    assert!(guards.iter().all(|guard| guard.validity() == Validity::Lost));
    let renewals = net.renewals.lock().unwrap();
    assert!(renewals.len() < 100, "{}", renewals.len());
}
