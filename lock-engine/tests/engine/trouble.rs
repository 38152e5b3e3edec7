//! Faults of the store, the backend and the network, and the promises that hold in spite of them.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::common::{PlainNet, distant, plain, start};
use leasehold_api::{
    AcquireOptions, ErrorKind, Lock, LockExt, LockGuard, LockKey, LossReason, LossSignal, Lost, Validity,
};
use leasehold_engine::{Clock, Confirm, Engine, Moment, Timing, TokioClock, Waiting};
use leasehold_memory::{Client, ClientSetup, Fault, MemoryStore, Op};
use tokio::time::{Instant, sleep, timeout};
use tokio_test::{assert_pending, assert_ready_err, task};

fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

async fn is_free(store: &MemoryStore) -> bool {
    store.client().unwrap().key("k").try_acquire().await.unwrap().is_some()
}

/// Polls once and keeps the future without polling it again.
async fn poll_once<F: Future + Unpin>(future: &mut F) -> bool {
    poll_fn(|cx| Poll::Ready(std::pin::Pin::new(&mut *future).poll(cx).is_ready())).await
}

#[tokio::test(start_paused = true)]
async fn keys_that_are_held_already_are_renewed_while_others_are_waited_for() {
    for waiting in [Waiting::Store, Waiting::Poll { every: Duration::from_millis(100) }] {
        let store = MemoryStore::new().default_ttl(seconds(2)).waiting(waiting);
        let (x, y, z) = (store.client().unwrap(), store.client().unwrap(), store.client().unwrap());
        let b = x.key("b").acquire().await.unwrap();
        let taking = tokio::spawn(async move { y.keys(["a", "b"]).wait(seconds(60)).acquire().await });
        sleep(seconds(5)).await;
        assert!(z.key("a").try_acquire().await.unwrap().is_none(), "{waiting:?}: taken over meanwhile");
        b.release().await.unwrap();
        assert_eq!(taking.await.unwrap().unwrap().len(), 2);
    }
}

#[tokio::test(start_paused = true)]
async fn losing_one_key_ends_the_wait_for_the_others() {
    let store = MemoryStore::new();
    let (x, y) = (store.client().unwrap(), store.client().unwrap());
    let _b = x.key("b").acquire().await.unwrap();
    let taking = tokio::spawn(async move { y.keys(["a", "b"]).wait(seconds(60)).acquire().await });
    sleep(seconds(1)).await;
    assert!(store.lose(&LockKey::new("a").unwrap(), LossReason::ForcedRelease));
    let error = timeout(seconds(1), taking).await.unwrap().unwrap().unwrap_err();
    assert_eq!((error.kind(), error.loss()), (ErrorKind::Lost, Some(LossReason::ForcedRelease)));
}

#[tokio::test(start_paused = true)]
async fn several_keys_with_a_cooldown_do_not_meet_their_own() {
    let store = MemoryStore::new();
    let (x, y) = (store.client().unwrap(), store.client().unwrap());
    let a = x.key("a").acquire().await.unwrap();
    let options = AcquireOptions::new().wait(seconds(30)).cooldown(seconds(60));
    let taking =
        tokio::spawn(async move { y.keys(["a", "b"]).options(options).acquire().await.map(|g| g.len()) });
    sleep(seconds(1)).await;
    a.release().await.unwrap();
    assert_eq!(timeout(seconds(2), taking).await.unwrap().unwrap().unwrap(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_waiter_learns_when_the_lease_ends_of_one_who_was_granted_before_it() {
    let store = MemoryStore::new();
    let (a, c) = (store.client().unwrap(), store.client().unwrap());
    let Client { lock: b, faults } = store.client_with(ClientSetup::new()).unwrap();
    let held = a.key("k").ttl(seconds(3600)).acquire().await.unwrap();
    let first = tokio::spawn(async move { (b.key("k").ttl(seconds(1)).wait_forever().acquire().await, b) });
    sleep(Duration::from_millis(10)).await;
    let second = tokio::spawn(async move { c.key("k").wait(seconds(600)).acquire().await.map(drop) });
    sleep(Duration::from_millis(10)).await;
    held.release().await.unwrap();
    let _first = first.await.unwrap();
    faults.silence(true);
    timeout(seconds(3), second).await.unwrap().unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_short_renewal_that_arrives_late_is_reckoned_with() {
    let store = MemoryStore::new().default_ttl(seconds(60));
    let (builder, net) = distant(&store);
    let lock = builder.start().unwrap();
    let guard = lock.key("k").acquire().await.unwrap();
    sleep(seconds(1)).await;
    *net.renewals_take.lock().unwrap() = vec![Duration::from_millis(9500)];
    assert_eq!(guard.renew_for(seconds(20)).await.unwrap_err().kind(), ErrorKind::OutcomeUnknown);
    sleep(seconds(5)).await;
    net.hang_renew.store(true, SeqCst);
    let next = store.client().unwrap().key("k").wait(seconds(600)).acquire().await.unwrap();
    assert_eq!((guard.validity(), next.validity()), (Validity::Lost, Validity::Valid));
}

#[tokio::test(start_paused = true)]
async fn a_shorter_renewal_that_fails_is_tried_again() {
    let store = MemoryStore::new().default_ttl(seconds(60));
    let client = store.client_with(ClientSetup::new()).unwrap();
    let guard = client.lock.key("k").acquire().await.unwrap();
    client.faults.script(Op::Renew, Fault::Error(ErrorKind::Unavailable));
    assert!(guard.renew_for(seconds(2)).await.is_err());
    sleep(seconds(60)).await;
    assert_eq!(guard.validity(), Validity::Valid);
}

#[tokio::test(start_paused = true)]
async fn a_hold_without_a_lease_cannot_be_given_one_by_renewing() {
    let store = MemoryStore::new();
    let (builder, net) = distant(&store);
    let mut timing = Timing::default();
    timing.confirm = Some(Confirm::new(seconds(1), seconds(3)));
    let lock = builder.timing(timing).start().unwrap();
    let guard = lock.key("k").acquire().await.unwrap();
    assert_eq!(guard.renew_for(seconds(3600)).await.unwrap_err().kind(), ErrorKind::InvalidOption);
    net.hang_renew.store(true, SeqCst);
    sleep(seconds(4)).await;
    assert_eq!(guard.validity(), Validity::Lost);
}

#[tokio::test(start_paused = true)]
async fn a_renewal_that_panics_costs_nothing_else() {
    let store = MemoryStore::new().default_ttl(seconds(30));
    let (builder, net) = distant(&store);
    let lock = builder.start().unwrap();
    let guard = lock.key("k").acquire().await.unwrap();
    net.panic_renew.store(1, SeqCst);
    // A renewal by hand during the automatic one is answered.
    sleep(seconds(10)).await;
    timeout(seconds(30), guard.renew()).await.unwrap().unwrap();
    sleep(seconds(60)).await;
    assert_eq!(guard.validity(), Validity::Valid);
    let alive = Arc::downgrade(&net);
    drop((net, guard, lock));
    sleep(seconds(60)).await;
    assert!(alive.upgrade().is_none(), "the engine outlives its last handle");
}

#[tokio::test(start_paused = true)]
async fn an_acquire_that_panics_is_undone() {
    let store = MemoryStore::new();
    let (builder, net) = distant(&store);
    let lock = Arc::new(builder.start().unwrap());
    net.panic_acquire.store(true, SeqCst);
    let panicking = Arc::clone(&lock);
    assert!(tokio::spawn(async move { panicking.key("k").acquire().await.map(drop) }).await.is_err());
    sleep(seconds(1)).await;
    assert!(is_free(&store).await);
}

#[tokio::test(start_paused = true)]
async fn a_release_that_panics_is_repeated() {
    let store = MemoryStore::new();
    let (builder, net) = distant(&store);
    let lock = builder.start().unwrap();
    let guard = lock.key("k").acquire().await.unwrap();
    net.panic_release.store(1, SeqCst);
    drop(guard);
    sleep(seconds(1)).await;
    assert!(is_free(&store).await);
}

#[tokio::test(start_paused = true)]
async fn a_release_that_hangs_does_not_keep_others_here_from_an_expired_lease() {
    let store = MemoryStore::new().default_ttl(seconds(3));
    let (builder, net) = distant(&store);
    let lock = builder.start().unwrap();
    let guard = lock.key("k").acquire().await.unwrap();
    net.hang_renew.store(true, SeqCst);
    net.hang_release.store(true, SeqCst);
    let begun = Instant::now();
    let _next = lock.key("k").wait(seconds(60)).acquire().await.unwrap();
    assert!(begun.elapsed() <= seconds(4), "{:?}", begun.elapsed());
    assert_eq!(guard.validity(), Validity::Lost);
}

#[tokio::test(start_paused = true)]
async fn an_attempt_without_io_that_panics_is_undone() {
    let net = Arc::new(PlainNet::default());
    let lock = Arc::new(start(plain(&net)));
    net.panic_try.store(true, SeqCst);
    let trying = Arc::clone(&lock);
    tokio::spawn(async move { trying.key("k").acquire().await.map(drop) }).await.unwrap_err();
    sleep(seconds(1)).await;
    assert!(net.is_free(), "what it was granted is left");
    assert_eq!(lock.active_keys(), 0);
    lock.key("k").acquire().await.unwrap().release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_release_without_io_that_panics_is_carried_out_with_it() {
    let net = Arc::new(PlainNet::default());
    let lock = start(plain(&net));
    for drops in [true, false] {
        let guard = lock.key("k").acquire().await.unwrap();
        net.panic_release.store(true, SeqCst);
        if drops {
            drop(guard);
        } else {
            assert!(tokio::spawn(guard.release()).await.unwrap_err().is_panic());
        }
        assert!(!net.panic_release.load(SeqCst), "it was tried");
        sleep(seconds(1)).await;
        assert_eq!((net.is_free(), lock.active_keys()), (true, 0), "dropped: {drops}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_undoing_without_io_that_panics_is_done_with_it() {
    let net = Arc::new(PlainNet::default());
    let lock = start(plain(&net));
    *net.fail_acquire.lock().unwrap() = Some(ErrorKind::Unavailable);
    net.panic_release.store(true, SeqCst);
    let error = lock.key("k").give_up_on_failure().acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(!net.panic_release.load(SeqCst), "it was tried");
    sleep(seconds(1)).await;
    assert_eq!(lock.active_keys(), 0);
    assert_eq!(net.releases.lock().unwrap().len(), 1, "what may have been granted is released with I/O");
}

#[tokio::test(start_paused = true)]
async fn a_release_that_finds_nothing_is_a_loss_however_it_is_done() {
    let net = Arc::new(PlainNet::default());
    let lock = start(plain(&net));
    let forget = || net.rows.lock().unwrap().clear();
    let guard = lock.key("k").acquire().await.unwrap();
    forget();
    let error = guard.release().await.unwrap_err();
    assert_eq!((error.kind(), error.loss()), (ErrorKind::Lost, Some(LossReason::Gone)));
    assert_eq!(lock.counters().lost, 1);

    let guard = lock.key("k").acquire().await.unwrap();
    forget();
    drop(guard);
    sleep(seconds(1)).await;
    assert_eq!(lock.counters().lost, 2, "of a guard that was dropped");

    let guards = lock.keys(["a", "b"]).acquire().await.unwrap();
    forget();
    assert_eq!(guards.release().await.unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!((lock.counters().lost, lock.counters().released), (4, 0));
}

#[tokio::test(start_paused = true)]
async fn a_renewal_that_waits_for_another_one_hears_of_the_loss() {
    let net = Arc::new(PlainNet::default());
    let lock = start(plain(&net).leases(seconds(30)));
    let guard = lock.key("k").acquire().await.unwrap();
    net.hang.store(true, SeqCst);
    let begun = Instant::now();
    let renewals = (0..3).map(|i| guard.renew_for(seconds(30 - i)));
    let ended = timeout(seconds(60), futures_util::future::join_all(renewals)).await.unwrap();
    assert!(ended.iter().all(Result::is_err), "{ended:?}");
    assert!(begun.elapsed() <= seconds(30), "{:?}", begun.elapsed());
}

/// Counts readings of the clock, because the driver reads it at each wake-up.
#[derive(Debug)]
struct CountingClock(TokioClock, AtomicUsize);

impl Clock for CountingClock {
    fn now(&self) -> Moment {
        self.1.fetch_add(1, SeqCst);
        self.0.now()
    }
}

#[tokio::test(start_paused = true)]
async fn the_driver_sleeps_while_nothing_can_end() {
    let net = Arc::new(PlainNet::default());
    let clock = Arc::new(CountingClock(TokioClock::new(), AtomicUsize::new(0)));
    let lock = Engine::builder(plain(&net)).clock(Arc::clone(&clock) as _).start().unwrap();
    let reads_of_an_hour = async || {
        sleep(seconds(1)).await;
        let before = clock.1.load(SeqCst);
        sleep(seconds(3600)).await;
        clock.1.load(SeqCst) - before
    };
    assert_eq!(reads_of_an_hour().await, 0, "before the first grant");
    let held = lock.key("k").acquire().await.unwrap();
    assert_eq!(reads_of_an_hour().await, 0, "with a hold that does not end by itself");
    held.release().await.unwrap();
    drop(lock.key("k").max_hold(seconds(60)).acquire().await.unwrap());
    assert!(reads_of_an_hour().await <= 2, "after the last one that does");
}

#[tokio::test(start_paused = true)]
async fn close_waits_for_what_is_on_its_way() {
    let store = MemoryStore::new();
    let (builder, net) = distant(&store);
    // Longer than a closing engine waits for callers to hand over their attempts.
    *net.acquire_takes.lock().unwrap() = seconds(3);
    let lock = Arc::new(builder.start().unwrap());
    let acquiring = Arc::clone(&lock);
    let acquiring = tokio::spawn(async move { acquiring.key("k").acquire().await.map(drop) });
    sleep(Duration::from_millis(50)).await;
    lock.close().await.unwrap();
    assert_eq!(acquiring.await.unwrap().unwrap_err().kind(), ErrorKind::Closed);
    sleep(seconds(1)).await;
    assert!(is_free(&store).await, "closed, and the grant came after");
}

#[tokio::test(start_paused = true)]
async fn close_says_when_it_cannot_know() {
    let store = MemoryStore::new();
    let (builder, net) = distant(&store);
    *net.acquire_takes.lock().unwrap() = Duration::from_millis(500);
    let lock = builder.start().unwrap();
    let mut acquiring = Box::pin(lock.key("k").acquire());
    assert!(!poll_once(&mut acquiring).await);
    assert_eq!(lock.close().await.unwrap_err().kind(), ErrorKind::OutcomeUnknown);
    assert_eq!(acquiring.await.unwrap_err().kind(), ErrorKind::Closed);
}

#[tokio::test(start_paused = true)]
async fn close_repeats_a_release_that_failed() {
    let store = MemoryStore::new();
    let (builder, net) = distant(&store);
    let lock = builder.start().unwrap();
    let _guard = lock.key("k").acquire().await.unwrap();
    net.fail_release.store(3, SeqCst);
    lock.close().await.unwrap();
    assert!(is_free(&store).await);
}

#[tokio::test(start_paused = true)]
async fn close_goes_on_with_what_is_repeated_in_the_background() {
    let store = MemoryStore::new();
    let (builder, net) = distant(&store);
    let lock = builder.start().unwrap();
    let guard = lock.key("k").acquire().await.unwrap();
    net.fail_release.store(20, SeqCst);
    assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Unavailable);
    lock.close().await.unwrap();
    assert!(is_free(&store).await);
}

#[tokio::test(start_paused = true)]
async fn close_says_so_when_a_release_is_never_confirmed() {
    let store = MemoryStore::new();
    let (builder, net) = distant(&store);
    let lock = builder.start().unwrap();
    let guard = lock.key("k").acquire().await.unwrap();
    net.fail_release.store(u64::MAX, SeqCst);
    guard.release().await.unwrap_err();
    let begun = Instant::now();
    assert_eq!(lock.close().await.unwrap_err().kind(), ErrorKind::OutcomeUnknown);
    assert!(begun.elapsed() <= Timing::default().close, "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn close_keeps_its_limit() {
    let store = MemoryStore::new();
    let (builder, net) = distant(&store);
    let lock = builder.start().unwrap();
    let _guard = lock.key("k").acquire().await.unwrap();
    net.hang_release.store(true, SeqCst);
    net.hang_close.store(true, SeqCst);
    let begun = Instant::now();
    assert_eq!(lock.close().await.unwrap_err().kind(), ErrorKind::OutcomeUnknown);
    assert!(begun.elapsed() <= Timing::default().close, "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_close_ends_is_told_which_key() {
    let store = MemoryStore::new().waiting(Waiting::Poll { every: seconds(1) });
    let (x, y) = (store.client().unwrap(), Arc::new(store.client().unwrap()));
    let _held = x.key("k").acquire().await.unwrap();
    let waiting = Arc::clone(&y);
    let waiting = tokio::spawn(async move { waiting.key("k").acquire().await.map(drop) });
    sleep(Duration::from_millis(100)).await;
    y.close().await.unwrap();
    let error = waiting.await.unwrap().unwrap_err();
    assert_eq!((error.kind(), error.key().map(LockKey::as_str)), (ErrorKind::Closed, Some("k")));
}

#[test]
fn a_release_whose_runtime_ends_is_answered() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (lock, net) = runtime.block_on(async {
        let (builder, net) = distant(&MemoryStore::new());
        (builder.start().unwrap(), net)
    });
    let guard = runtime.block_on(lock.key("k").acquire()).unwrap();
    net.hang_release.store(true, SeqCst);
    let mut releasing = task::spawn(guard.release());
    assert_pending!(releasing.poll());
    drop(runtime);
    assert_eq!(assert_ready_err!(releasing.poll()).kind(), ErrorKind::OutcomeUnknown);
}

#[tokio::test(start_paused = true)]
async fn yielding_leaves_time_for_an_attempt() {
    let store = MemoryStore::new().waiting(Waiting::Poll { every: seconds(1) });
    let (x, y) = (store.client().unwrap(), store.client().unwrap());
    let guard = x.key("k").acquire().await.unwrap();
    y.key("k").wait(Duration::from_millis(100)).acquire().await.unwrap_err();
    guard.release().await.unwrap();
    let _guard = x.key("k").wait(Duration::from_millis(500)).acquire().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn absurd_timing_is_no_reason_to_panic() {
    let store = MemoryStore::new().waiting(Waiting::Poll { every: seconds(1) });
    let mut timing = Timing::default();
    (timing.request_timeout, timing.waiting) = (Duration::MAX, Waiting::Poll { every: Duration::MAX });
    let clock = Arc::new(TokioClock::new());
    let y = Engine::builder(store.backend()).timing(timing).clock(clock).start().unwrap();
    let x = store.client().unwrap();
    let held = x.key("k").acquire().await.unwrap();
    assert_eq!(y.key("k").wait(seconds(1)).acquire().await.unwrap_err().kind(), ErrorKind::Timeout);
    held.release().await.unwrap();
    let guard = y.key("k").acquire().await.unwrap();
    x.key("k").wait(seconds(1)).acquire().await.unwrap_err();
    drop(guard);
    // The try yields to the waiter of the other client, for ten seconds at most.
    let begun = Instant::now();
    assert!(y.key("k").try_acquire().await.unwrap().is_some());
    assert_eq!(begun.elapsed(), seconds(10));
}

/// A waker that is the last owner of a value, as a task's waker can be.
struct Owner<T>(std::sync::Mutex<Option<T>>);

impl<T: Send + 'static> std::task::Wake for Owner<T> {
    fn wake(self: Arc<Self>) {}
}

impl<T: Send + 'static> Owner<T> {
    fn waker(value: T) -> Waker {
        Waker::from(Arc::new(Self(std::sync::Mutex::new(Some(value)))))
    }
}

/// Fails instead of hanging when `scene` deadlocks.
fn ends(scene: impl FnOnce() + Send + 'static) {
    let (done, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        scene();
        done.send(()).unwrap();
    });
    ended.recv_timeout(seconds(30)).expect("a deadlock");
}

#[test]
fn a_waker_that_owns_the_guard_is_dropped_outside_the_queue() {
    ends(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let lock = leasehold_memory::connect().unwrap();
            let guard: LockGuard = lock.key("k").acquire().await.unwrap();
            let mut waiting = Box::pin(lock.key("k").wait_forever().acquire());
            let owner = Owner::waker(guard);
            assert!(waiting.as_mut().poll(&mut Context::from_waker(&owner)).is_pending());
            drop(owner);
            // Polling in another task drops the first waker, and with it the guard.
            let _guard = waiting.await.unwrap();
        });
    });
}

#[test]
fn a_waker_that_owns_a_loss_is_dropped_outside_the_signal() {
    ends(|| {
        let signal = LossSignal::new();
        let polled = |mut lost: Lost, waker: &Waker| {
            assert!(std::pin::Pin::new(&mut lost).poll(&mut Context::from_waker(waker)).is_pending());
            lost
        };
        let owned = polled(signal.subscribe(), Waker::noop());
        let owner = Owner::waker(owned);
        let lost = polled(signal.subscribe(), &owner);
        drop(owner);
        drop(lost);
        assert!(signal.fire(LossReason::Closed));
    });
}
