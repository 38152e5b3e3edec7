//! The queue of local waiters under every interleaving that loom finds.
//!
//! The file under test is compiled here a second time, with loom's primitives in place of the
//! standard library's.

#![allow(dead_code, missing_docs, unreachable_pub, clippy::unwrap_used)]

#[path = "../src/clock.rs"]
mod clock;
#[path = "../src/acquire/queue.rs"]
mod queue;
#[path = "../src/store"]
mod store {
    pub(crate) mod hash;
}

// Not loom's own `Arc`, because it cannot be a receiver of methods. Leaks are checked with `len` instead.
mod sync {
    pub(crate) use loom::sync::{Mutex, MutexGuard};
}

use std::sync::Arc;

use leasehold_api::LockKey;
use loom::future::block_on;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;
use queue::{EnterResult, GrantOutcome, Permit, Queues, QueuesClosed, SlotOwner, TryEnterResult, Waiter};

type Plain = Queues<Name>;

struct Name(LockKey);

impl SlotOwner for Name {
    fn key(&self) -> &LockKey {
        &self.0
    }
}

fn name() -> Name {
    Name(key())
}

fn key() -> LockKey {
    LockKey::new("k").unwrap()
}

fn enter(queues: &Arc<Plain>) -> Result<EnterResult<Name>, QueuesClosed> {
    queues.enter_if(&key(), name(), |_, _| true).map(Option::unwrap)
}

async fn permit(queues: &Arc<Plain>) -> Result<Permit<Name>, QueuesClosed> {
    match enter(queues)? {
        EnterResult::Permit(permit) => Ok(permit),
        EnterResult::Waiter(waiter) => waiter.await,
    }
}

/// Returns a waiter for a permit that is taken.
fn waiter(queues: &Arc<Plain>) -> Waiter<Name> {
    match enter(queues).unwrap() {
        EnterResult::Waiter(waiter) => waiter,
        EnterResult::Permit(_) => panic!("the permit is taken"),
    }
}

/// Counts the concurrent holders of the permit.
#[derive(Default)]
struct Inside(AtomicUsize);

impl Inside {
    fn visit(&self) {
        assert_eq!(self.0.fetch_add(1, Ordering::AcqRel), 0, "two permits of one key");
        thread::yield_now();
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

fn model(f: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(f);
}

#[test]
fn permits_exclude_and_none_is_lost() {
    model(|| {
        let queues = Plain::new();
        let inside = Arc::new(Inside(AtomicUsize::new(0)));
        let others: Vec<_> = (0..2)
            .map(|_| {
                let (queues, inside) = (Arc::clone(&queues), Arc::clone(&inside));
                thread::spawn(move || {
                    // A lost wake-up would be a deadlock, which loom reports.
                    let permit = block_on(permit(&queues)).unwrap();
                    inside.visit();
                    drop(permit);
                })
            })
            .collect();
        for other in others {
            other.join().unwrap();
        }
        assert_eq!(queues.len(), 0, "a slot was left behind");
    });
}

#[test]
fn a_waiter_that_gives_up_hands_its_permit_on() {
    model(|| {
        let queues = Plain::new();
        let first = block_on(permit(&queues)).unwrap();
        let (quitter, stayer) = (waiter(&queues), waiter(&queues));
        // The quitter leaves while the permit might be passed to it.
        let leaving = thread::spawn(move || drop(quitter));
        let releasing = thread::spawn(move || drop(first));
        drop(block_on(stayer).unwrap());
        leaving.join().unwrap();
        releasing.join().unwrap();
        assert_eq!(queues.len(), 0);
    });
}

#[test]
fn closing_ends_every_wait() {
    model(|| {
        let queues = Plain::new();
        let first = block_on(permit(&queues)).unwrap();
        let waiting = {
            let queues = Arc::clone(&queues);
            thread::spawn(move || drop(block_on(permit(&queues))))
        };
        let releasing = thread::spawn(move || drop(first));
        queues.close();
        waiting.join().unwrap();
        releasing.join().unwrap();
        assert!(matches!(enter(&queues), Err(QueuesClosed)));
        assert_eq!(queues.len(), 0);
    });
}

#[test]
fn a_try_never_overtakes() {
    model(|| {
        let queues = Plain::new();
        let first = block_on(permit(&queues)).unwrap();
        let waiter = waiter(&queues);
        let trying = {
            let queues = Arc::clone(&queues);
            thread::spawn(move || queues.try_enter(&key(), |_| name()).unwrap() == TryEnterResult::Occupied)
        };
        drop(first);
        // No try succeeds before the waiter has had its permit.
        assert!(trying.join().unwrap());
        drop(block_on(waiter).unwrap());
        assert_eq!(queues.len(), 0);
    });
}

#[test]
fn who_looks_again_when_woken_is_woken() {
    model(|| {
        let queues = Plain::new();
        let first = block_on(permit(&queues)).unwrap();
        let told = Arc::new(loom::sync::atomic::AtomicBool::new(false));
        let telling = {
            let (queues, told) = (Arc::clone(&queues), Arc::clone(&told));
            thread::spawn(move || {
                told.store(true, Ordering::Release);
                queues.wake_waiters(&key());
            })
        };
        // Checks the flag after registering, as a caller that does not wait for a cooldown does. A lost wake-up would
        // be a deadlock, which loom reports.
        let mut waiting = waiter(&queues);
        block_on(std::future::poll_fn(|cx| {
            let pending = std::pin::Pin::new(&mut waiting).poll(cx).is_pending();
            assert!(pending, "the permit is out");
            if told.load(Ordering::Acquire) { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
        }));
        telling.join().unwrap();
        drop((waiting, first));
        assert_eq!(queues.len(), 0);
    });
}

#[test]
fn grants_are_counted_once_whoever_looks_when() {
    model(|| {
        let queues = Plain::new();
        assert!(matches!(queues.try_enter(&key(), |_| name()), Ok(TryEnterResult::Entered(None))));
        let looking = {
            let queues = Arc::clone(&queues);
            thread::spawn(move || {
                let (ended, live) = queues.count(|_| true);
                ended.all + live
            })
        };
        queues.pass_on(&key(), GrantOutcome::Released);
        assert_eq!(looking.join().unwrap(), 1);
        let (ended, live) = queues.count(|_| true);
        assert_eq!((ended.all, ended.released, live), (1, 1, 0));
    });
}
