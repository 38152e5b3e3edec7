//! Order of callers: cooldowns within one client, clients that re-acquire in a loop, silent stores.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use crate::common::{PlainNet, plain, start};
use leasehold_api::{ErrorKind, Lock as _, LockExt as _, WindowOutcome};
use leasehold_engine::{Clock, Confirm, Engine, Moment, TokioClock, Waiting};
use leasehold_memory::{Client, ClientSetup, Fault, MemoryStore, Op};
use tokio::time::{Instant, sleep, timeout};

fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

async fn due_in(lock: &Engine, window: Duration) -> (Option<Duration>, Duration) {
    let begun = Instant::now();
    let outcome = lock.key("k").at_most_once_per(window).acquire().await.unwrap();
    match outcome {
        WindowOutcome::Due(_) => (None, begun.elapsed()),
        WindowOutcome::NotDue { retry_after } => (Some(retry_after), begun.elapsed()),
    }
}

#[tokio::test(start_paused = true)]
async fn a_window_is_not_due_for_the_client_that_began_it_while_its_job_runs() {
    let store = MemoryStore::new();
    let (a, b) = (store.client().unwrap(), store.client().unwrap());
    let hour = seconds(3600);
    let WindowOutcome::Due(_job) = a.key("k").at_most_once_per(hour).acquire().await.unwrap() else {
        panic!("not due")
    };
    sleep(seconds(60)).await;
    for lock in [&a, &b] {
        let (left, took) = due_in(lock, hour).await;
        assert_eq!((left, took), (Some(hour - seconds(60)), Duration::ZERO));
    }
    let tried = a.key("k").at_most_once_per(hour).try_acquire().await.unwrap();
    assert!(matches!(tried, Some(WindowOutcome::NotDue { .. })), "{tried:?}");
    // A job that outlasts its window still holds the key.
    sleep(hour).await;
    let waiting = a.key("k").at_most_once_per(hour).wait(seconds(1)).acquire().await.unwrap_err();
    assert_eq!(waiting.kind(), ErrorKind::Timeout);
}

#[tokio::test(start_paused = true)]
async fn a_window_is_not_due_behind_a_waiter_of_the_same_client() {
    let store = MemoryStore::new();
    let lock = Arc::new(store.client().unwrap());
    let hour = seconds(3600);
    lock.key("k").cooldown(hour).acquire().await.unwrap().release().await.unwrap();
    let waiting = {
        let lock = Arc::clone(&lock);
        tokio::spawn(async move { lock.key("k").wait(seconds(60)).acquire().await.map(drop) })
    };
    sleep(ms(10)).await;
    let (left, took) = due_in(&lock, hour).await;
    assert!(left.is_some_and(|left| left <= hour) && took.is_zero(), "{left:?} after {took:?}");
    assert_eq!(waiting.await.unwrap().unwrap_err().kind(), ErrorKind::Timeout);
}

/// A caller that is queued when the window starts gets `NotDue` at that moment.
#[tokio::test(start_paused = true)]
async fn those_who_queued_before_the_window_began_are_told_when_it_does() {
    let net = Arc::new(PlainNet::default());
    *net.acquire_takes.lock().unwrap() = seconds(2);
    let mut store = plain(&net);
    store.caps.cooldown = true;
    let lock = Arc::new(start(store));
    let hour = seconds(3600);
    let first = {
        let lock = Arc::clone(&lock);
        tokio::spawn(async move { lock.key("k").at_most_once_per(hour).acquire().await })
    };
    sleep(ms(10)).await;
    let (left, took) = due_in(&lock, hour).await;
    assert_eq!((left.is_some(), took), (true, ms(1990)));
    assert!(matches!(first.await.unwrap().unwrap(), WindowOutcome::Due(_)));
}

/// Call by which the looping client re-acquires the key.
#[derive(Clone, Copy, Debug)]
enum Loop {
    Try,
    ZeroWait,
    Window,
}

#[tokio::test(start_paused = true)]
async fn nobody_starves_behind_a_client_that_takes_the_key_again_and_again() {
    for hints in [true, false] {
        for how in [Loop::Try, Loop::ZeroWait, Loop::Window] {
            let store = MemoryStore::new().waiting(Waiting::Poll { every: ms(100) }).hints(hints);
            let (hot, patient) = (store.client().unwrap(), store.client().unwrap());
            let first = hot.key("k").acquire().await.unwrap();
            let waiting =
                tokio::spawn(async move { patient.key("k").wait(seconds(30)).acquire().await.map(drop) });
            sleep(ms(10)).await;
            first.release().await.unwrap();
            let mut grants = 0;
            while !waiting.is_finished() {
                let guard = match how {
                    Loop::Try => hot.key("k").try_acquire().await.unwrap(),
                    Loop::ZeroWait => hot.key("k").wait(Duration::ZERO).acquire().await.ok(),
                    Loop::Window => match hot.key("k").at_most_once_per(ms(1)).acquire().await.unwrap() {
                        WindowOutcome::Due(guard) => Some(guard),
                        WindowOutcome::NotDue { .. } => None,
                    },
                };
                match guard {
                    Some(guard) => {
                        grants += 1;
                        sleep(ms(10)).await;
                        guard.release().await.unwrap();
                    }
                    None => sleep(ms(1)).await,
                }
            }
            waiting.await.unwrap().unwrap();
            assert!(grants <= 3, "{how:?}, hints {hints}: {grants} grants before the one who waited");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_wait_on_a_silent_store_blames_nobody() {
    let net = Arc::new(PlainNet::default());
    let lock = start(plain(&net));
    net.hang.store(true, SeqCst);
    let error = lock.key("k").wait(seconds(1)).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.message().contains("before the store answered"), "{error}");
    assert!(!error.message().contains("somebody else held"), "{error}");
    // If another caller holds the key, the error names contention as the cause.
    net.hang.store(false, SeqCst);
    sleep(seconds(20)).await;
    let _held = lock.key("k").acquire().await.unwrap();
    let error = lock.key("k").wait(seconds(1)).acquire().await.unwrap_err();
    assert!(error.message().contains("somebody else held"), "{error}");
}

/// A reader's hold is outside of its key's slot, so the slot does not show that only its release is left.
#[tokio::test(start_paused = true)]
async fn a_writer_behind_a_release_of_its_client_without_a_reply_blames_no_holder() {
    let net = Arc::new(PlainNet::default());
    let mut store = plain(&net);
    store.caps.modes.shared = true;
    let lock = start(store);
    let reader = lock.key("k").shared().acquire().await.unwrap();
    let error = lock.key("k").wait(seconds(1)).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "the reader holds it: {error}");
    net.hang.store(true, SeqCst);
    drop(reader);
    let error = lock.key("k").wait(seconds(1)).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
}

/// The second attempt runs into the first one, whose grant had no reply. That first attempt is undone before the
/// second reply arrives, and the store is silent after that.
#[tokio::test(start_paused = true)]
async fn a_late_reply_about_an_attempt_that_is_undone_blames_no_holder() {
    let store = MemoryStore::new().waiting(Waiting::Poll { every: ms(100) });
    let Client { lock, faults } = store.client_with(ClientSetup::new()).unwrap();
    for fault in [Fault::LoseReply, Fault::DelayReply(seconds(2)), Fault::Hang] {
        faults.script(Op::Acquire, fault);
    }
    faults.script(Op::Release, Fault::Delay(seconds(1)));
    let error = lock.key("k").wait(seconds(3)).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert_eq!(faults.calls(Op::Acquire), 3);
}

#[tokio::test(start_paused = true)]
async fn a_try_after_a_drop_on_a_silent_store_is_an_error() {
    let net = Arc::new(PlainNet::default());
    let lock = start(plain(&net));
    let guard = lock.key("k").acquire().await.unwrap();
    net.hang.store(true, SeqCst);
    drop(guard);
    let tried = timeout(seconds(25), lock.key("k").try_acquire()).await.unwrap();
    assert_eq!(tried.unwrap_err().kind(), ErrorKind::Unavailable);
    let several = timeout(seconds(25), lock.keys(["k", "l"]).try_acquire()).await.unwrap();
    assert_eq!(several.unwrap_err().kind(), ErrorKind::Unavailable);
    // After the silence the key is free, and a try is granted.
    net.hang.store(false, SeqCst);
    sleep(seconds(60)).await;
    assert!(lock.key("k").try_acquire().await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn a_try_right_after_a_drop_waits_for_the_release_only() {
    let net = Arc::new(PlainNet::default());
    *net.release_takes.lock().unwrap() = ms(20);
    let lock = start(plain(&net));
    drop(lock.key("k").acquire().await.unwrap());
    let begun = Instant::now();
    let guard = lock.key("k").try_acquire().await.unwrap();
    assert_eq!((guard.is_some(), begun.elapsed()), (true, ms(20)));
    // A try on a held key returns at once.
    assert!(lock.key("k").try_acquire().await.unwrap().is_none());
}

/// The window of a grant without a caller can outlast its lease, so it is undone even after the lease has ended.
#[tokio::test(start_paused = true)]
async fn a_window_that_nobody_used_is_undone_also_after_its_lease() {
    let store = MemoryStore::new().default_ttl(seconds(2));
    let Client { lock, faults } = store.client_with(ClientSetup::new()).unwrap();
    let hour = seconds(3600);
    faults.script(Op::Acquire, Fault::LoseReply);
    faults.script(Op::Release, Fault::Hang);
    let error = lock.key("k").at_most_once_per(hour).try_acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutcomeUnknown);
    sleep(seconds(30)).await;
    assert_eq!(
        due_in(&store.client().unwrap(), hour).await.0,
        None,
        "{} releases",
        faults.calls(Op::Release)
    );
}

/// A delivered guard uses up its window, even if it is lost by closing or its release is repeated.
#[tokio::test(start_paused = true)]
async fn a_window_that_was_used_stays_spent() {
    let hour = seconds(3600);
    for (closes, fault) in [false, true].into_iter().flat_map(|c| [(c, Fault::Pass), (c, Fault::LoseReply)]) {
        let store = MemoryStore::new().default_ttl(seconds(2));
        let Client { lock, faults } = store.client_with(ClientSetup::new()).unwrap();
        let granted = lock.key("k").at_most_once_per(hour).acquire().await.unwrap();
        assert!(matches!(granted, WindowOutcome::Due(_)), "{granted:?}");
        faults.script(Op::Release, fault);
        if closes {
            lock.close().await.unwrap();
        }
        drop(granted);
        sleep(seconds(30)).await;
        let (left, _) = due_in(&store.client().unwrap(), hour).await;
        assert!(left.is_some(), "closes: {closes}, {fault:?}");
    }
}

/// The engine closes after the store's grant and before the caller gets the guard.
#[tokio::test(start_paused = true)]
async fn a_window_of_a_grant_that_met_the_closing_is_undone() {
    let net = Arc::new(PlainNet::default());
    let mut store = plain(&net);
    store.caps.cooldown = true;
    let lock = Arc::new(start(store));
    *net.closes.lock().unwrap() = Some(Arc::clone(&lock));
    let error = lock.key("k").cooldown(seconds(3600)).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    lock.close().await.unwrap();
    assert_eq!(*net.unused.lock().unwrap(), [true]);
}

/// A clock that is ten seconds ahead from the n-th reading, as if the thread had been stopped there.
#[derive(Debug)]
struct StandsStill(TokioClock, AtomicUsize);

impl Clock for StandsStill {
    fn now(&self) -> Moment {
        let before = self.1.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1));
        self.0.now().after(if before.is_ok() { Duration::ZERO } else { seconds(10) })
    }
}

/// A late grant is requested again if the caller has budget left, also without I/O.
#[tokio::test(start_paused = true)]
async fn a_grant_that_came_too_late_is_asked_for_again() {
    let mut late = 0;
    for look in 0..8 {
        let lock = || {
            let clock = Arc::new(StandsStill(TokioClock::new(), AtomicUsize::new(look)));
            let store = MemoryStore::new().default_ttl(seconds(2));
            Engine::builder(store.backend()).clock(clock).start().unwrap()
        };
        let tried = lock().key("k").try_acquire().await;
        late +=
            usize::from(tried.is_err_and(|error| error.message().contains("took longer to grant the lease")));
        let acquired = lock().key("k").acquire().await;
        assert!(acquired.is_ok(), "at look {look}: {acquired:?}");
    }
    assert!(late > 0, "no look was between the grant and its guard");
}

/// A late grant gives up its key's permit, and must give up the permits of later keys too. Otherwise the next caller
/// waits for one of these while it holds the first key.
#[tokio::test(start_paused = true)]
async fn a_late_grant_does_not_have_two_callers_of_several_keys_wait_for_each_other() {
    let net = Arc::new(PlainNet::default());
    let lock = Arc::new(grants_too_late(&net));
    let callers = [(); 3].map(|()| {
        let lock = Arc::clone(&lock);
        tokio::spawn(async move { lock.keys(["a", "b", "c"]).acquire().await.map(drop) })
    });
    sleep(seconds(1)).await;
    *net.acquire_takes.lock().unwrap() = Duration::ZERO;
    for caller in callers {
        timeout(seconds(60), caller).await.expect("nobody waits for ever").unwrap().unwrap();
    }
}

/// Keys behind a late grant are released as well. A try waits for that release, because no other client holds them.
#[tokio::test(start_paused = true)]
async fn a_try_behind_a_late_grant_meets_no_holder() {
    let net = Arc::new(PlainNet::default());
    *net.release_takes.lock().unwrap() = seconds(2);
    let lock = Arc::new(grants_too_late(&net));
    let caller = {
        let lock = Arc::clone(&lock);
        tokio::spawn(async move { lock.keys(["a", "b"]).acquire().await.map(drop) })
    };
    sleep(ms(3001)).await;
    *net.acquire_takes.lock().unwrap() = Duration::ZERO;
    assert_eq!(net.rows.lock().unwrap().len(), 2, "neither is released yet");
    let tried = lock.key("b").try_acquire().await.unwrap();
    drop(tried.expect("nobody else has it"));
    caller.await.unwrap().unwrap();
}

/// The hold that the store reports can be the client's own unanswered attempt. So a caller that does not wait gets an
/// error, not "held".
#[tokio::test(start_paused = true)]
async fn a_try_that_meets_an_attempt_of_its_own_client_meets_no_holder() {
    let net = Arc::new(PlainNet::default());
    net.travels.store(true, SeqCst);
    *net.acquire_takes.lock().unwrap() = seconds(12);
    *net.release_takes.lock().unwrap() = seconds(5);
    let lock = start(plain(&net));
    let unanswered = lock.key("k").try_acquire().await.unwrap_err();
    assert_eq!(unanswered.kind(), ErrorKind::Unavailable);
    *net.acquire_takes.lock().unwrap() = Duration::ZERO;
    sleep(seconds(3)).await;
    assert_eq!(net.rows.lock().unwrap().len(), 1, "granted, and not let go of yet");
    let errors = [
        lock.key("k").try_acquire().await.unwrap_err(),
        lock.key("k").wait(Duration::ZERO).acquire().await.unwrap_err(),
        lock.keys(["k", "l"]).try_acquire().await.unwrap_err(),
    ];
    for error in errors {
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(error.message().contains("an earlier attempt of this client"), "{error}");
    }
    sleep(seconds(20)).await;
    let guard = lock.key("k").try_acquire().await.unwrap();
    assert!(guard.is_some());
    // A key that is really held still reads held.
    assert!(lock.key("k").try_acquire().await.unwrap().is_none());
    assert!(start(plain(&net)).key("k").try_acquire().await.unwrap().is_none());
}

/// The reply to the release can arrive between two checks of the try.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_try_after_a_drop_never_says_held() {
    let net = Arc::new(PlainNet::default());
    let lock = Engine::builder(plain(&net)).start().unwrap();
    // The bug shows within a tenth of a second. A busy machine makes fewer turns.
    let until = std::time::Instant::now() + seconds(3);
    for turn in (0..20_000).take_while(|_| std::time::Instant::now() < until) {
        let guard = lock.key("k").try_acquire().await.unwrap();
        assert!(guard.is_some(), "nobody holds it, after {turn} turns");
        drop(guard);
        // Varies the moment of the release at which the next try starts.
        (0..turn % 2_000).for_each(|_| std::hint::spin_loop());
    }
}

/// After a late grant of the second key, another caller holds its permit. The call must still notice the loss of its
/// first key.
#[tokio::test(start_paused = true)]
async fn a_key_that_is_lost_ends_the_wait_for_the_permit_of_the_next() {
    let net = Arc::new(PlainNet::default());
    let lock = Arc::new(grants_too_late(&net));
    *net.acquire_takes.lock().unwrap() = Duration::ZERO;
    let elsewhere = start(plain(&net)).key("b").acquire().await.unwrap();
    let acquires = |keys: &'static [&'static str]| {
        let lock = Arc::clone(&lock);
        tokio::spawn(async move { lock.keys(keys.iter().copied()).acquire().await })
    };
    let both = acquires(&["a", "b"]);
    sleep(ms(10)).await;
    let second = acquires(&["b"]);
    sleep(ms(10)).await;
    *net.acquire_takes.lock().unwrap() = seconds(3);
    sleep(seconds(1)).await;
    elsewhere.release().await.unwrap();
    sleep(seconds(2)).await;
    *net.acquire_takes.lock().unwrap() = Duration::ZERO;
    let _held = timeout(seconds(60), second).await.expect("the late grant is let go of").unwrap().unwrap();
    assert!(!both.is_finished());
    net.rows.lock().unwrap().retain(|key, _| key.as_str() != "a");
    let error =
        timeout(seconds(60), both).await.expect("it is told that it has lost a key").unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
}

/// Starts an engine on a store that grants only after the confirmation limit.
fn grants_too_late(net: &Arc<PlainNet>) -> Engine {
    *net.acquire_takes.lock().unwrap() = seconds(3);
    let mut store = plain(net);
    store.timing.confirm = Some(Confirm::new(ms(500), ms(2500)));
    start(store)
}
