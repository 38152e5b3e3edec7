//! The life of a hold under every interleaving that loom finds. One transition wins, every watcher is notified, the
//! permit has one owner, and a lost hold without a guard is released once.
//!
//! The files under test are compiled here a second time, with loom's primitives in place of the standard
//! library's.

#![allow(dead_code, missing_docs, unreachable_pub, clippy::unwrap_used)]

#[path = "../src/hold/delivery.rs"]
mod delivery;
#[path = "../src/hold/state.rs"]
mod state;

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU8, Ordering};
    pub(crate) use loom::sync::{Mutex, MutexGuard};
}

use std::sync::Arc;

use delivery::Delivery;
use leasehold_api::{End, LossReason};
use loom::future::block_on;
use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;
use state::{AtomicPhase, LoseResult, Phase};

fn model(f: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(f);
}

fn in_thread<T: 'static>(
    state: &Arc<AtomicPhase>,
    f: impl FnOnce(&AtomicPhase) -> T + Send + 'static,
) -> thread::JoinHandle<T> {
    let state = Arc::clone(state);
    thread::spawn(move || f(&state))
}

#[test]
fn release_and_loss_have_one_winner_and_every_watcher_hears_of_it() {
    model(|| {
        let state = Arc::new(AtomicPhase::new(Phase::Live));
        // A missed signal would be a deadlock, which loom reports.
        let watching = in_thread(&state, |state| block_on(state.watch().ended()));
        let releasing = in_thread(&state, AtomicPhase::release);
        let lost = state.lose(LossReason::Expired);
        let (end, released) = (watching.join().unwrap(), releasing.join().unwrap());
        match lost {
            LoseResult::WasLive => {
                assert_eq!(end, End::Lost(LossReason::Expired));
                assert_eq!(released, Err(Phase::Lost(LossReason::Expired)));
            }
            LoseResult::HadEnded => assert_eq!((end, released), (End::Released, Ok(true))),
            LoseResult::WasPending | LoseResult::WasFast => panic!("it was live"),
        }
    });
}

#[test]
fn two_losses_are_one() {
    model(|| {
        let state = Arc::new(AtomicPhase::new(Phase::Live));
        let other = in_thread(&state, |state| state.lose(LossReason::Closed));
        let mine = state.lose(LossReason::Expired);
        let other = other.join().unwrap();
        // Only the winner passes the permit.
        assert_eq!([mine, other].iter().filter(|lose| **lose == LoseResult::WasLive).count(), 1);
        let reason = if mine == LoseResult::WasLive { LossReason::Expired } else { LossReason::Closed };
        assert_eq!(state.get(), Phase::Lost(reason));
        assert_eq!(state.watch().reason(), Some(reason));
    });
}

#[test]
fn the_permit_of_a_grant_that_meets_a_close_has_one_owner() {
    model(|| {
        let state = Arc::new(AtomicPhase::new(Phase::Pending));
        let closing = in_thread(&state, |state| state.lose(LossReason::Closed));
        let live = state.go_live();
        match closing.join().unwrap() {
            // The closer owns the permit, and the guard reads lost.
            LoseResult::WasLive => assert_eq!(live, Ok(())),
            // The caller still owns the permit and undoes the grant.
            LoseResult::WasPending => assert_eq!(live, Err(Phase::LostPending(LossReason::Closed))),
            LoseResult::WasFast | LoseResult::HadEnded => panic!("nobody else ends it"),
        }
    });
}

#[test]
fn a_grant_on_the_fast_path_that_meets_a_close_is_lost_or_never_was() {
    model(|| {
        let state = Arc::new(AtomicPhase::new(Phase::Fast));
        let closing = in_thread(&state, |state| state.lose(LossReason::Closed));
        let live = state.go_live();
        match closing.join().unwrap() {
            LoseResult::WasLive => assert_eq!((live, state.get()), (Ok(()), Phase::Lost(LossReason::Closed))),
            LoseResult::WasFast => assert_eq!(live, Err(Phase::LostFast(LossReason::Closed))),
            LoseResult::WasPending | LoseResult::HadEnded => panic!("nobody else ends it"),
        }
    });
}

#[test]
fn the_permit_of_a_fast_path_that_is_not_granted_has_one_owner() {
    model(|| {
        let state = Arc::new(AtomicPhase::new(Phase::Fast));
        let closing = in_thread(&state, |state| state.lose(LossReason::Closed));
        let asks = state.ask_store();
        let gives_up = asks.is_err() && state.give_up();
        match closing.join().unwrap() {
            LoseResult::WasFast => assert!(asks.is_err() && !gives_up, "the closer has handed it on"),
            LoseResult::WasPending => assert!(asks.is_ok(), "whoever asks hands it on"),
            LoseResult::WasLive | LoseResult::HadEnded => panic!("nobody granted or ended it"),
        }
    });
}

#[test]
fn whoever_gives_up_while_it_is_lost_keeps_the_permit_of_what_he_asked_for() {
    model(|| {
        let state = Arc::new(AtomicPhase::new(Phase::Pending));
        let closing = in_thread(&state, |state| state.lose(LossReason::Closed));
        assert!(state.give_up());
        assert_ne!(closing.join().unwrap(), LoseResult::WasLive, "nobody else may hand it on");
    });
}

/// A hold in a store that keeps a lost hold until an operator releases it, unless the engine releases it.
struct StickyHold {
    phase: AtomicPhase,
    delivery: Delivery,
}

impl StickyHold {
    fn live() -> Arc<Self> {
        Arc::new(Self { phase: AtomicPhase::new(Phase::Live), delivery: Delivery::new() })
    }

    /// Loses the hold as `Hold::lose` does. Returns whether it releases the hold at the store.
    fn lose(&self) -> bool {
        self.phase.lose(LossReason::Expired) == LoseResult::WasLive && self.delivery.claim_undelivered()
    }

    /// Drops the guard, as an acquisition does that fails after its grant. Returns whether it releases the hold at
    /// the store.
    fn abandon(&self) -> bool {
        if self.phase.get().loss().is_some() {
            self.delivery.claim_undelivered()
        } else {
            self.phase.release().is_ok()
        }
    }
}

#[test]
fn a_hold_that_is_lost_as_its_guard_is_delivered_has_a_caller_or_is_released_once() {
    model(|| {
        let hold = StickyHold::live();
        let losing = {
            let hold = Arc::clone(&hold);
            thread::spawn(move || hold.lose())
        };
        hold.delivery.deliver();
        let has_guard = hold.phase.get() == Phase::Live;
        let released_here = if has_guard {
            false
        } else {
            hold.delivery.take_back();
            hold.abandon()
        };
        let releases = usize::from(losing.join().unwrap()) + usize::from(released_here);
        assert_eq!(releases, usize::from(!has_guard), "has a guard: {has_guard}");
    });
}

#[test]
fn a_hold_that_is_lost_as_its_caller_fails_is_released_once() {
    model(|| {
        let hold = StickyHold::live();
        hold.delivery.deliver();
        let losing = {
            let hold = Arc::clone(&hold);
            thread::spawn(move || hold.lose())
        };
        // The call fails because another of its keys was lost.
        hold.delivery.take_back();
        let released_here = hold.abandon();
        let releases = usize::from(losing.join().unwrap()) + usize::from(released_here);
        assert_eq!(releases, 1);
    });
}

#[test]
fn a_hold_that_reads_unsent_has_nothing_under_way() {
    model(|| {
        let delivery = Arc::new(Delivery::new());
        let under_way = Arc::new(AtomicBool::new(false));
        let asking = {
            let (delivery, under_way) = (Arc::clone(&delivery), Arc::clone(&under_way));
            thread::spawn(move || {
                delivery.mark_sent();
                under_way.store(true, Ordering::Release);
                // The store replies that another client holds the key.
                under_way.store(false, Ordering::Relaxed);
                delivery.mark_answered();
            })
        };
        // Checks as a closing engine does that has seen the request.
        if under_way.load(Ordering::Acquire) && !delivery.is_sent() {
            assert!(!under_way.load(Ordering::Relaxed), "it was sent, and is not answered");
        }
        asking.join().unwrap();
    });
}

#[test]
fn a_hold_passes_on_or_has_an_extension_that_outlives_it_not_both() {
    model(|| {
        let state = Arc::new(AtomicPhase::new(Phase::Live));
        let extending = in_thread(&state, AtomicPhase::pin);
        let passes_on = state.release().unwrap();
        let has_extension = extending.join().unwrap();
        assert_eq!(passes_on, !has_extension);
        assert!(!state.pin(), "the hold has ended");
    });
}

#[test]
fn a_hold_passes_on_or_has_a_renewal_under_way_not_both() {
    model(|| {
        let state = Arc::new(AtomicPhase::new(Phase::Live));
        let answered = Arc::new(AtomicBool::new(false));
        let renewing = {
            let (state, answered) = (Arc::clone(&state), Arc::clone(&answered));
            thread::spawn(move || {
                let sends = state.begin_renewal();
                answered.store(true, Ordering::Release);
                state.end_renewal();
                sends
            })
        };
        let passes_on = state.release().unwrap();
        let knows_answer = answered.load(Ordering::Acquire);
        let sent = renewing.join().unwrap();
        assert!(!passes_on || !sent || knows_answer, "the next caller does not know the answer");
        assert!(!state.is_renewing());
        assert_eq!(state.get(), Phase::Released);
    });
}

#[test]
fn a_hold_is_lost_or_has_an_extension_but_the_loss_is_told() {
    model(|| {
        let state = Arc::new(AtomicPhase::new(Phase::Live));
        let watching = in_thread(&state, |state| block_on(state.watch().ended()));
        let extending = in_thread(&state, AtomicPhase::pin);
        assert_eq!(state.lose(LossReason::Expired), LoseResult::WasLive);
        assert_eq!(watching.join().unwrap(), End::Lost(LossReason::Expired));
        extending.join().unwrap();
        assert_eq!(state.get(), Phase::Lost(LossReason::Expired));
    });
}

#[test]
fn a_hold_is_given_out_or_lost_or_released_and_never_renewed_afterwards() {
    model(|| {
        let state = Arc::new(AtomicPhase::new(Phase::Live));
        let renewing = in_thread(&state, AtomicPhase::begin_renewal);
        let losing = in_thread(&state, |state| state.lose(LossReason::Closed));
        let given_out = state.give_out();
        let (sends, lost) = (renewing.join().unwrap(), losing.join().unwrap());
        match given_out {
            Ok(true) => {
                assert!(!sends, "a renewal is sent after the hold has left");
                assert_eq!((lost, state.get()), (LoseResult::HadEnded, Phase::GivenOut));
                assert!(state.release().is_err() && state.watch().reason().is_none());
            }
            Ok(false) => assert!(sends),
            Err(phase) => assert_eq!((phase, lost), (Phase::Lost(LossReason::Closed), LoseResult::WasLive)),
        }
    });
}

#[test]
fn a_hold_is_given_out_or_has_an_extension_not_both() {
    model(|| {
        let state = Arc::new(AtomicPhase::new(Phase::Live));
        let extending = in_thread(&state, AtomicPhase::pin);
        let given_out = state.give_out();
        match extending.join().unwrap() {
            true => assert_eq!((given_out, state.get()), (Err(Phase::Live), Phase::Live)),
            false => assert_eq!((given_out, state.get()), (Ok(true), Phase::GivenOut)),
        }
        assert_eq!(state.is_pinned(), given_out.is_err());
    });
}
