//! An engine is closed by the next waiter at the moment at which a caller passes its permit, or while a reader joins others.
//! The hold must still be released.

use std::fmt;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::task::{Context, Wake, Waker};
use std::thread::{self, ThreadId};
use std::time::Duration;

use crate::common::relay::{Relay, RelayNet};
use crate::common::{PlainNet, plain};
use futures_util::FutureExt as _;
use leasehold_api::{ErrorKind, Lock as _, LockExt as _, Validity};
use leasehold_engine::{Clock, Engine, Moment, TokioClock};
use tokio::runtime::Handle;
use tokio::time::sleep;
use tokio_test::{assert_pending, task};

/// The way in which a caller passes its permit before the store has confirmed the release.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// The caller reads the validity of a guard whose lease has ended.
    Lost,
    /// The caller's release has an unknown outcome.
    Unknown,
    /// The store did not reply to the caller's attempt in time.
    TimedOut,
}

/// A clock that jumps ahead by an hour without waking any timer.
#[derive(Debug)]
struct Leaping(TokioClock, AtomicBool);

impl Clock for Leaping {
    fn now(&self) -> Moment {
        let ahead = if self.1.load(SeqCst) { Duration::from_secs(3600) } else { Duration::ZERO };
        self.0.now().after(ahead)
    }
}

/// A waker that closes the engine before it returns, if the test's own thread wakes it.
struct Closes {
    engine: Arc<Engine>,
    net: Arc<PlainNet>,
    runtime: Handle,
    thread: ThreadId,
    has_closed: AtomicBool,
}

impl Wake for Closes {
    fn wake(self: Arc<Self>) {
        if thread::current().id() != self.thread || self.has_closed.swap(true, SeqCst) {
            return;
        }
        *self.net.fail_release.lock().unwrap() = None;
        let (tell, told) = channel();
        let engine = Arc::clone(&self.engine);
        self.runtime.spawn(async move { tell.send(engine.close().await) });
        told.recv_timeout(Duration::from_secs(60)).expect("closing is bounded").unwrap();
    }
}

/// Runs one turn. Returns whether the waiter closed the engine as it got the permit.
async fn is_closed_as_the_permit_goes(way: Way) -> bool {
    let net = Arc::new(PlainNet::default());
    let clock = Arc::new(Leaping(TokioClock::new(), AtomicBool::new(false)));
    let mut store = plain(&net).leases(Duration::from_secs(10));
    store.timing.request_timeout = Duration::from_secs(1);
    let engine = Arc::new(Engine::builder(store).clock(Arc::clone(&clock) as _).start().unwrap());
    let held = match way {
        Way::Lost | Way::Unknown => Some(engine.key("k").acquire().await.unwrap()),
        Way::TimedOut => None,
    };
    // The request arrives, and is granted after its limit.
    net.travels.store(true, SeqCst);
    *net.acquire_takes.lock().unwrap() = Duration::from_millis(1_500);
    let mut trying = task::spawn(engine.key("k").try_acquire());
    let mut next = pin!(engine.key("k").acquire());
    let (runtime, thread) = (Handle::current(), thread::current().id());
    let closes = Closes {
        engine: Arc::clone(&engine),
        net: Arc::clone(&net),
        runtime,
        thread,
        has_closed: AtomicBool::new(false),
    };
    let closes = Arc::new(closes);
    if held.is_none() {
        assert_pending!(trying.poll());
    }
    let waker = Waker::from(Arc::clone(&closes));
    assert!(next.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    match (way, held) {
        (Way::Lost, Some(guard)) => {
            clock.1.store(true, SeqCst);
            assert_eq!(guard.validity(), Validity::Lost);
        }
        (Way::Unknown, Some(guard)) => {
            *net.fail_release.lock().unwrap() = Some(ErrorKind::OutcomeUnknown);
            assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::OutcomeUnknown);
        }
        _ => {
            match trying.await {
                Err(error) => assert_eq!(error.kind(), ErrorKind::Unavailable),
                // A process that stood still reads the reply before its limit. Such a turn shows nothing.
                Ok(_) => return false,
            }
            sleep(Duration::from_secs(1)).await;
        }
    }
    let has_closed = closes.has_closed.load(SeqCst);
    assert!(!has_closed || net.is_free(), "{way:?}: {:?}", net.rows);
    has_closed
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_let_go_of_while_the_engine_closes_is_freed() {
    for way in [Way::Lost, Way::Unknown, Way::TimedOut] {
        let mut turns = 0;
        // Repeated, because the driver can find the loss before the caller does.
        while !is_closed_as_the_permit_goes(way).await {
            turns += 1;
            assert!(turns < 100, "{way:?}: the permit was never handed on by the caller");
        }
    }
}

/// A clock that calls a function at one of its readings by the test's own thread.
struct Calling(TokioClock, Mutex<Option<AtReading>>);

struct AtReading {
    thread: ThreadId,
    /// The number of readings until the call.
    left: u32,
    call: Box<dyn FnOnce() + Send>,
}

impl fmt::Debug for Calling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Calling")
    }
}

impl Clock for Calling {
    fn now(&self) -> Moment {
        let mut at = self.1.lock().unwrap();
        let is_due = at.as_mut().is_some_and(|at| {
            at.left -= u32::from(at.thread == thread::current().id());
            at.left == 0
        });
        let due = if is_due { at.take() } else { None };
        // The function reads the clock too.
        drop(at);
        if let Some(due) = due {
            (due.call)();
        }
        self.0.now()
    }
}

/// A reader has joined the others and has no guard yet. The others leave it the store's hold, and the engine closes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_that_a_reader_joins_while_the_engine_closes_is_released() {
    for reading in 1..=3 {
        let net = Arc::new(RelayNet::default());
        let mut relay = Relay::new(&net);
        relay.capabilities.modes.shared = true;
        relay.timing.share_for = Duration::from_secs(3600);
        let clock = Arc::new(Calling(TokioClock::new(), Mutex::new(None)));
        let engine = Arc::new(Engine::builder(relay).clock(Arc::clone(&clock) as _).start().unwrap());
        let first = engine.key("k").shared().acquire().await.unwrap();
        let (runtime, closes) = (Handle::current(), Arc::clone(&engine));
        let call = move || {
            let (tell, told) = channel();
            runtime.spawn(async move {
                drop(first);
                tell.send(closes.close().await)
            });
            // One of the readings is under a lock that closing needs, and goes on without it.
            drop(told.recv_timeout(Duration::from_secs(2)));
        };
        let at = AtReading { thread: thread::current().id(), left: reading, call: Box::new(call) };
        *clock.1.lock().unwrap() = Some(at);
        let joined = engine.key("k").shared().acquire().now_or_never();
        let unused = clock.1.lock().unwrap().take();
        drop((joined, unused));
        drop(engine.close().await);
        assert!(net.is_free(), "closed at reading {reading}: {:?}", net.calls());
    }
}
