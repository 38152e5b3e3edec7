//! The queue of local waiters under every interleaving that loom finds.
//!
//! The file under test is compiled here a second time, with loom's primitives in place of the
//! standard library's.

#![allow(dead_code, missing_docs, unreachable_pub, clippy::unwrap_used)]

#[path = "../src/clock.rs"]
mod clock;
#[path = "../src/acquire"]
mod acquire {
    pub(crate) mod queue;
}
#[path = "../src/store"]
mod store {
    pub(crate) mod hash;
}

// Not loom's own `Arc`, because it cannot be a receiver of methods. Leaks are checked with `len` instead.
mod sync {
    pub(crate) use loom::sync::{Mutex, MutexGuard};
}

#[path = "queue_model/modes.rs"]
mod modes;

use std::sync::Arc;

use acquire::queue::{
    EnterResult, GrantOutcome, Permit, Queues, QueuesClosed, SlotOwner, TryEnterResult, Waiter,
};
use leasehold_api::{LockKey, Mode};
use loom::future::block_on;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;

type Plain = Queues<Name>;

/// The caller of one request.
struct Name {
    key: LockKey,
    mode: Mode,
    serial: u64,
}

impl SlotOwner for Name {
    type Baton = Baton;
    type Share = Arc<Readers>;

    fn joins(&self, share: &Arc<Readers>) -> bool {
        share.add()
    }

    fn suits(&self, _: &Baton) -> bool {
        true
    }

    fn pick_up(&self, _: &Baton) {}

    fn keep(mut baton: Baton) {
        baton.owners.take();
    }

    fn free(baton: Baton, permit: Permit<Self>) {
        drop((baton, permit));
    }

    fn key(&self) -> &LockKey {
        &self.key
    }

    fn mode(&self) -> Mode {
        self.mode
    }

    fn serial(&self) -> u64 {
        self.serial
    }

    fn is_ending(&self) -> bool {
        false
    }

    fn is_try(&self) -> bool {
        false
    }
}

/// A store's hold on its way. Counts where it ended.
struct Baton {
    owners: Option<Arc<Owners>>,
}

/// How often a store's hold was released because no caller has it, and how often it was picked up.
#[derive(Default)]
struct Owners {
    freed: AtomicUsize,
    picked_up: AtomicUsize,
}

impl Owners {
    fn baton(self: &Arc<Self>) -> Baton {
        Baton { owners: Some(Arc::clone(self)) }
    }

    fn counts(&self) -> (usize, usize) {
        (self.freed.load(Ordering::Acquire), self.picked_up.load(Ordering::Acquire))
    }

    /// Takes the hold over with the permit, as the caller of a called waiter does.
    fn pick_up(&self, permit: &mut Permit<Name>) -> bool {
        let Some(mut baton) = permit.take_baton() else { return false };
        baton.owners.take();
        self.picked_up.fetch_add(1, Ordering::AcqRel);
        true
    }
}

impl Drop for Baton {
    fn drop(&mut self) {
        if let Some(owners) = self.owners.take() {
            owners.freed.fetch_add(1, Ordering::AcqRel);
        }
    }
}

/// The readers of one hold of the store. Changed under the queue's lock, so plain counters are enough.
#[derive(Default)]
struct Readers {
    now: std::sync::atomic::AtomicUsize,
    is_over: std::sync::atomic::AtomicBool,
}

impl Readers {
    /// Adds a reader, unless the last one has left.
    fn add(&self) -> bool {
        let joins = !self.is_over.load(Ordering::Acquire);
        self.now.fetch_add(usize::from(joins), Ordering::AcqRel);
        joins
    }

    /// Takes a reader out, or closes the hold if it is the last one.
    fn remove(&self) -> bool {
        let is_last = self.now.load(Ordering::Acquire) == 1;
        self.is_over.fetch_or(is_last, Ordering::AcqRel);
        self.now.fetch_sub(usize::from(!is_last), Ordering::AcqRel);
        !is_last
    }
}

fn name() -> Name {
    named(Mode::Exclusive, 0)
}

fn named(mode: Mode, serial: u64) -> Name {
    Name { key: key(), mode, serial }
}

fn key() -> LockKey {
    LockKey::new("k").unwrap()
}

fn enter(queues: &Arc<Plain>) -> Result<EnterResult<Name>, QueuesClosed> {
    enter_as(queues, name())
}

fn enter_as(queues: &Arc<Plain>, name: Name) -> Result<EnterResult<Name>, QueuesClosed> {
    queues.enter_if(&key(), name, |_, _| true).map(Option::unwrap)
}

async fn permit(queues: &Arc<Plain>) -> Result<Permit<Name>, QueuesClosed> {
    permit_as(queues, name()).await
}

async fn permit_as(queues: &Arc<Plain>, name: Name) -> Result<Permit<Name>, QueuesClosed> {
    match enter_as(queues, name)? {
        EnterResult::Permit(permit) => Ok(permit),
        EnterResult::Waiter(waiter) => waiter.await,
    }
}

/// Returns a waiter for a permit that is taken.
fn waiter(queues: &Arc<Plain>) -> Waiter<Name> {
    waiter_as(queues, name())
}

fn waiter_as(queues: &Arc<Plain>, name: Name) -> Waiter<Name> {
    match enter_as(queues, name).unwrap() {
        EnterResult::Waiter(waiter) => waiter,
        EnterResult::Permit(_) => panic!("the permit is taken, or another mode is in use"),
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
            thread::spawn(move || {
                queues.try_enter(&key(), Mode::Exclusive, |_| name()).unwrap() == TryEnterResult::Occupied
            })
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
        assert!(matches!(
            queues.try_enter(&key(), Mode::Exclusive, |_| name()),
            Ok(TryEnterResult::Entered(None))
        ));
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

/// Passes the hold on as a released hold does: to a waiter, or it is released at the store.
fn hand_over(queues: &Plain, owners: &Arc<Owners>) {
    if !queues.hand_over(&key(), || Some(owners.baton()), || ()) {
        owners.freed.fetch_add(1, Ordering::AcqRel);
        queues.pass_on(&key(), GrantOutcome::Released);
    }
}

#[test]
fn a_hold_that_is_passed_on_to_a_waiter_who_gives_up_goes_to_the_next() {
    model(|| {
        let (queues, owners) = (Plain::new(), Arc::new(Owners::default()));
        block_on(permit(&queues)).unwrap().give_to_hold();
        let (quitter, stayer) = (waiter(&queues), waiter(&queues));
        let leaving = thread::spawn(move || drop(quitter));
        let releasing = {
            let (queues, owners) = (Arc::clone(&queues), Arc::clone(&owners));
            thread::spawn(move || hand_over(&queues, &owners))
        };
        let mut permit = block_on(stayer).unwrap();
        assert!(owners.pick_up(&mut permit), "the stayer has the hold with the permit");
        leaving.join().unwrap();
        releasing.join().unwrap();
        drop(permit);
        assert_eq!((owners.counts(), queues.len()), ((0, 1), 0));
    });
}

/// An event of the store finds the hold with an owner or on its way, also while a called waiter gives up.
#[test]
fn a_hold_on_its_way_is_found_while_its_caller_gives_up() {
    model(|| {
        let (queues, owners) = (Plain::new(), Arc::new(Owners::default()));
        block_on(permit(&queues)).unwrap().give_to_hold();
        let (quitter, stayer) = (waiter(&queues), waiter(&queues));
        hand_over(&queues, &owners);
        let leaving = thread::spawn(move || drop(quitter));
        let found = queues.with_baton(&key(), |_, baton| baton.take()).flatten();
        assert!(found.is_some(), "nobody has picked it up");
        drop(found);
        leaving.join().unwrap();
        let mut permit = block_on(stayer).unwrap();
        assert!(!owners.pick_up(&mut permit));
        drop(permit);
        assert_eq!((owners.counts(), queues.len()), ((1, 0), 0));
    });
}

#[test]
fn a_hold_whose_waiters_all_give_up_is_released_once() {
    model(|| {
        let (queues, owners) = (Plain::new(), Arc::new(Owners::default()));
        block_on(permit(&queues)).unwrap().give_to_hold();
        let waiters = [waiter(&queues), waiter(&queues)];
        let leaving: Vec<_> = waiters.into_iter().map(|waiter| thread::spawn(move || drop(waiter))).collect();
        hand_over(&queues, &owners);
        leaving.into_iter().for_each(|leaving| leaving.join().unwrap());
        assert_eq!((owners.counts(), queues.len()), ((1, 0), 0));
    });
}

#[test]
fn a_hold_that_is_passed_on_while_the_queues_close_has_one_owner() {
    model(|| {
        let (queues, owners) = (Plain::new(), Arc::new(Owners::default()));
        block_on(permit(&queues)).unwrap().give_to_hold();
        let waiting = {
            let (queues, owners, waiter) = (Arc::clone(&queues), Arc::clone(&owners), waiter(&queues));
            thread::spawn(move || {
                let mut permit = block_on(waiter).ok();
                let has_hold = permit.as_mut().is_some_and(|permit| owners.pick_up(permit));
                drop((permit, queues));
                has_hold
            })
        };
        let closing = {
            let queues = Arc::clone(&queues);
            thread::spawn(move || queues.close())
        };
        hand_over(&queues, &owners);
        closing.join().unwrap();
        let has_hold = waiting.join().unwrap();
        let (freed, picked_up) = owners.counts();
        assert_eq!((freed + picked_up, picked_up), (1, usize::from(has_hold)));
        assert_eq!(queues.len(), 0);
    });
}

#[test]
fn a_hold_that_nobody_picks_up_is_taken_from_its_waiter_once() {
    model(|| {
        let (queues, owners) = (Plain::new(), Arc::new(Owners::default()));
        block_on(permit(&queues)).unwrap().give_to_hold();
        let waiter = waiter(&queues);
        let ending = {
            let queues = Arc::clone(&queues);
            thread::spawn(move || drop(queues.with_baton(&key(), |_, baton| baton.take())))
        };
        hand_over(&queues, &owners);
        let mut permit = block_on(waiter).unwrap();
        let has_hold = owners.pick_up(&mut permit);
        ending.join().unwrap();
        assert_eq!(owners.counts(), (usize::from(!has_hold), usize::from(has_hold)));
        drop(permit);
        assert_eq!(queues.len(), 0);
    });
}
