//! The queue of local waiters under every interleaving that loom finds.
//!
//! The file under test is compiled here a second time, with loom's primitives in place of the
//! standard library's.

#![allow(dead_code, missing_docs, unreachable_pub, clippy::unwrap_used)]

#[path = "../src/queue.rs"]
mod queue;

// Loom's own `Arc` cannot be a receiver of methods; what it would check, leaks, `len` checks here.
mod sync {
    pub(crate) use loom::sync::{Mutex, MutexGuard};
}

use std::sync::Arc;

use leasehold_api::LockKey;
use loom::future::block_on;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;
use queue::{Closed, Entered, Queues, Seated, Turn};

type Plain = Queues<Name>;

struct Name(LockKey);

impl Seated for Name {
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

async fn turn(queues: &Arc<Plain>) -> Result<Turn<Name>, Closed> {
    match queues.enter(&key(), name())? {
        Entered::Turn(turn) => Ok(turn),
        Entered::Place(place) => place.await,
    }
}

/// Counts how many are inside at once.
#[derive(Default)]
struct Inside(AtomicUsize);

impl Inside {
    fn visit(&self) {
        assert_eq!(self.0.fetch_add(1, Ordering::AcqRel), 0, "two turns at once");
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
fn turns_exclude_and_none_is_lost() {
    model(|| {
        let queues = Plain::new();
        let inside = Arc::new(Inside(AtomicUsize::new(0)));
        let others: Vec<_> = (0..2)
            .map(|_| {
                let (queues, inside) = (Arc::clone(&queues), Arc::clone(&inside));
                thread::spawn(move || {
                    // A wake that got lost would be a deadlock, which loom reports.
                    let turn = block_on(turn(&queues)).unwrap();
                    inside.visit();
                    drop(turn);
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
fn a_waiter_that_gives_up_passes_its_turn_on() {
    model(|| {
        let queues = Plain::new();
        let first = block_on(turn(&queues)).unwrap();
        let Ok(Entered::Place(quitter)) = queues.enter(&key(), name()) else { panic!("the turn is taken") };
        let Ok(Entered::Place(stayer)) = queues.enter(&key(), name()) else { panic!("the turn is taken") };
        // The quitter leaves while the turn may be on its way to it.
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
        let first = block_on(turn(&queues)).unwrap();
        let waiting = {
            let queues = Arc::clone(&queues);
            thread::spawn(move || drop(block_on(turn(&queues))))
        };
        let releasing = thread::spawn(move || drop(first));
        queues.close();
        waiting.join().unwrap();
        releasing.join().unwrap();
        assert!(matches!(queues.enter(&key(), name()), Err(Closed)));
        assert_eq!(queues.len(), 0);
    });
}

#[test]
fn a_try_never_overtakes() {
    model(|| {
        let queues = Plain::new();
        let first = block_on(turn(&queues)).unwrap();
        let Ok(Entered::Place(waiter)) = queues.enter(&key(), name()) else { panic!("the turn is taken") };
        let trying = {
            let queues = Arc::clone(&queues);
            thread::spawn(move || queues.try_enter(&key(), |_| name()).unwrap())
        };
        drop(first);
        // From before the first turn ends until the waiter has had its own, no try succeeds.
        assert!(!trying.join().unwrap());
        drop(block_on(waiter).unwrap());
        assert_eq!(queues.len(), 0);
    });
}
