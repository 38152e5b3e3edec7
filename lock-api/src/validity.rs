//! Whether a grant still holds: validity, the reasons of a loss, and the signal that one happened.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// What is known of a grant at the moment of looking.
///
/// It is computed from the clock at each look, so it is right also when the process was stopped and
/// no task has run since. It goes from valid over in doubt to lost and never back from lost.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Validity {
    /// The store confirmed the hold recently enough: nobody else has it.
    Valid,
    /// A confirmation that was due has not come, but the store does not let go yet: nobody else has
    /// the lock, and it will be lost soon unless the store answers. Start nothing new under it.
    InDoubt,
    /// Somebody else may hold the lock. Final.
    Lost,
}

impl Validity {
    /// Whether nobody else can hold the lock: valid or in doubt.
    #[must_use]
    pub const fn is_held(self) -> bool {
        matches!(self, Self::Valid | Self::InDoubt)
    }
}

impl fmt::Display for Validity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Valid => "valid",
            Self::InDoubt => "in doubt",
            Self::Lost => "lost",
        })
    }
}

/// Why a grant ended without being released.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LossReason {
    /// The lease was not renewed in time, or the store did not confirm the hold in time.
    Expired,
    /// An operator released it by force.
    ForcedRelease,
    /// The store's session or the thing that kept the hold in the store ended.
    SessionLost,
    /// The store has no such hold, for a reason that it does not know: purged, restored, overtaken.
    Gone,
    /// The lock was closed while the guard was out.
    Closed,
    /// The runtime that renewed and watched the grant has ended.
    RuntimeGone,
}

impl fmt::Display for LossReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Expired => "expired without a confirmation from the store",
            Self::ForcedRelease => "released by force",
            Self::SessionLost => "the session with the store ended",
            Self::Gone => "the store does not have this hold any more",
            Self::Closed => "the lock was closed",
            Self::RuntimeGone => "the runtime has ended",
        })
    }
}

/// Resolves when the grant is lost, with the reason; at once if it is lost already.
///
/// It stays pending for ever after a normal release. It is `Clone + Send + 'static`, needs no
/// particular runtime, and outlives the guard.
///
/// # Cancel safety
///
/// Dropping it loses nothing; a later one still resolves.
#[must_use = "futures do nothing unless polled"]
pub struct Lost {
    signal: Arc<LossSignal>,
    // The slot of this future's waker, once it was polled.
    slot: Option<u64>,
}

impl Lost {
    /// The reason, if the loss has been signalled already.
    #[must_use]
    pub fn reason(&self) -> Option<LossReason> {
        self.signal.reason()
    }
}

impl Future for Lost {
    type Output = LossReason;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<LossReason> {
        let this = &mut *self;
        let mut state = this.signal.lock();
        if let Some(reason) = state.reason {
            return Poll::Ready(reason);
        }
        let waker = cx.waker().clone();
        let known = this.slot.and_then(|slot| state.wakers.iter_mut().find(|(id, _)| *id == slot));
        let old = match known {
            Some((_, old)) => Some(std::mem::replace(old, waker)),
            None => {
                state.next_slot += 1;
                let slot = state.next_slot;
                state.wakers.push((slot, waker));
                this.slot = Some(slot);
                None
            }
        };
        // Dropping a waker may drop a task, and with it another of these futures.
        drop(state);
        drop(old);
        Poll::Pending
    }
}

impl Clone for Lost {
    fn clone(&self) -> Self {
        self.signal.subscribe()
    }
}

impl Drop for Lost {
    fn drop(&mut self) {
        if let Some(slot) = self.slot {
            let mut state = self.signal.lock();
            let place = state.wakers.iter().position(|(id, _)| *id == slot);
            let old = place.map(|place| state.wakers.swap_remove(place));
            drop(state);
            drop(old);
        }
    }
}

impl fmt::Debug for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lost").field("reason", &self.reason()).finish()
    }
}

/// The sending side of [`Lost`], for those who build grants.
#[derive(Default)]
pub struct LossSignal {
    state: Mutex<SignalState>,
}

#[derive(Default)]
struct SignalState {
    reason: Option<LossReason>,
    wakers: Vec<(u64, Waker)>,
    next_slot: u64,
}

impl LossSignal {
    /// A signal that has not fired.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Fires once; later calls change nothing. Returns whether this call was the first.
    pub fn fire(&self, reason: LossReason) -> bool {
        let wakers = {
            let mut state = self.lock();
            if state.reason.is_some() {
                return false;
            }
            state.reason = Some(reason);
            std::mem::take(&mut state.wakers)
        };
        for (_, waker) in wakers {
            waker.wake();
        }
        true
    }

    /// The reason, once fired.
    #[must_use]
    pub fn reason(&self) -> Option<LossReason> {
        self.lock().reason
    }

    /// A future of this signal.
    pub fn subscribe(self: &Arc<Self>) -> Lost {
        Lost { signal: Arc::clone(self), slot: None }
    }

    fn lock(&self) -> MutexGuard<'_, SignalState> {
        // Nothing under this lock can panic half-way, so a poisoned state is whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for LossSignal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LossSignal").field("reason", &self.reason()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn wakes_everyone_who_listens_and_those_who_come_late() {
        let signal = LossSignal::new();
        let early = signal.subscribe();
        let cloned = early.clone();
        let waiting = tokio::spawn(async move { (early.await, cloned.await) });
        tokio::task::yield_now().await;
        assert!(signal.fire(LossReason::Expired));
        assert!(!signal.fire(LossReason::Closed), "the first reason stays");
        assert_eq!(waiting.await.unwrap(), (LossReason::Expired, LossReason::Expired));
        assert_eq!(signal.subscribe().await, LossReason::Expired);
    }

    #[tokio::test]
    async fn a_dropped_future_leaves_no_waker() {
        let signal = LossSignal::new();
        let mut lost = signal.subscribe();
        assert!(std::future::poll_fn(|cx| Poll::Ready(Pin::new(&mut lost).poll(cx))).await.is_pending());
        assert_eq!(signal.lock().wakers.len(), 1);
        drop(lost);
        assert!(signal.lock().wakers.is_empty());
    }
}
