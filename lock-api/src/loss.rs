//! The signal that a grant has ended.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::validity::LossReason;

/// How a grant ended.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum End {
    /// The guard was released or dropped. Only the result of the release shows whether the lock was held
    /// until then.
    Released,
    /// The grant was lost, for this reason.
    Lost(LossReason),
}

/// Resolves with the reason when the grant is lost, at once if it is lost already.
///
/// Stays pending indefinitely after a normal release. A task that watches the grant of another task awaits
/// [`ended`](Lost::ended), which resolves either way. The future is `Clone + Send + 'static`, needs no
/// particular runtime, and outlives the guard.
///
/// # Cancel safety
///
/// If dropped, nothing is lost. A later future still resolves.
#[derive(Clone)]
#[must_use = "futures do nothing unless polled"]
pub struct Lost(Ended);

impl Lost {
    /// Returns the reason, if the loss has been signalled.
    #[must_use]
    pub fn reason(&self) -> Option<LossReason> {
        self.0.signal.reason()
    }

    /// Returns a future that resolves when the grant has ended: released, dropped or lost.
    pub fn ended(&self) -> Ended {
        self.0.clone()
    }
}

impl Future for Lost {
    type Output = LossReason;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<LossReason> {
        match Pin::new(&mut self.0).poll(cx) {
            Poll::Ready(End::Lost(reason)) => Poll::Ready(reason),
            Poll::Ready(End::Released) | Poll::Pending => Poll::Pending,
        }
    }
}

impl fmt::Debug for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lost").field("reason", &self.reason()).finish()
    }
}

/// Resolves with the kind of end when a grant has ended, at once if it has ended already. Made by
/// [`Lost::ended`].
///
/// # Cancel safety
///
/// If dropped, nothing is lost. A later future still resolves.
#[must_use = "futures do nothing unless polled"]
pub struct Ended {
    signal: Arc<LossSignal>,
    /// The slot of this future's waker, once it was polled.
    slot: Option<u64>,
}

impl Future for Ended {
    type Output = End;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<End> {
        let this = &mut *self;
        let mut state = this.signal.lock();
        if let Some(end) = state.end {
            return Poll::Ready(end);
        }
        let known = this.slot.and_then(|slot| state.wakers.iter_mut().find(|(id, _)| *id == slot));
        let old = match known {
            Some((_, old)) if old.will_wake(cx.waker()) => None,
            Some((_, old)) => Some(std::mem::replace(old, cx.waker().clone())),
            None => {
                state.next_slot += 1;
                let slot = state.next_slot;
                state.wakers.push((slot, cx.waker().clone()));
                this.slot = Some(slot);
                None
            }
        };
        // Unlocks before the old waker is dropped, because dropping a waker can drop a task, and with it
        // another of these futures.
        drop(state);
        drop(old);
        Poll::Pending
    }
}

impl Clone for Ended {
    fn clone(&self) -> Self {
        Self { signal: Arc::clone(&self.signal), slot: None }
    }
}

impl Drop for Ended {
    fn drop(&mut self) {
        if let Some(slot) = self.slot {
            let mut state = self.signal.lock();
            let at = state.wakers.iter().position(|(id, _)| *id == slot);
            let old = at.map(|at| state.wakers.swap_remove(at));
            drop(state);
            drop(old);
        }
    }
}

impl fmt::Debug for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ended").field("end", &self.signal.lock().end).finish()
    }
}

/// The sender of [`Lost`], for implementations of a grant.
///
/// ```
/// # #[tokio::main]
/// # async fn main() -> Result<(), leasehold_api::Error> {
/// use leasehold_api::{LossReason, LossSignal};
/// let signal = LossSignal::new();
/// let lost = signal.subscribe();
/// assert!(signal.fire(LossReason::Expired));
/// assert_eq!(lost.await, LossReason::Expired);
/// # Ok(())
/// # }
/// ```
#[derive(Default)]
pub struct LossSignal {
    state: Mutex<SignalState>,
}

#[derive(Default)]
struct SignalState {
    end: Option<End>,
    wakers: Vec<(u64, Waker)>,
    next_slot: u64,
}

impl LossSignal {
    /// Makes a signal that has not fired.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Signals the loss of the grant. Returns whether this was the first call of this method and
    /// [`released`](Self::released), because later calls have no effect.
    pub fn fire(&self, reason: LossReason) -> bool {
        self.end(End::Lost(reason))
    }

    /// Signals a release by the holder. [`Lost`] then never resolves, and [`Ended`] does. Returns whether this
    /// was the first signal.
    pub fn released(&self) -> bool {
        self.end(End::Released)
    }

    fn end(&self, end: End) -> bool {
        let wakers = {
            let mut state = self.lock();
            if state.end.is_some() {
                return false;
            }
            state.end = Some(end);
            std::mem::take(&mut state.wakers)
        };
        for (_, waker) in wakers {
            waker.wake();
        }
        true
    }

    /// Returns the reason, once lost.
    #[must_use]
    pub fn reason(&self) -> Option<LossReason> {
        match self.lock().end {
            Some(End::Lost(reason)) => Some(reason),
            _ => None,
        }
    }

    /// Returns a future of this signal.
    pub fn subscribe(self: &Arc<Self>) -> Lost {
        Lost(Ended { signal: Arc::clone(self), slot: None })
    }

    fn lock(&self) -> MutexGuard<'_, SignalState> {
        // Ignores poisoning, because no code panics between two changes under this mutex.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for LossSignal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LossSignal").field("end", &self.lock().end).finish()
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
        assert_eq!(signal.subscribe().ended().await, End::Lost(LossReason::Expired));
    }

    #[tokio::test]
    async fn a_release_ends_those_who_watch_and_is_no_loss() {
        let signal = LossSignal::new();
        let (mut lost, ended) = (signal.subscribe(), signal.subscribe().ended());
        let watching = tokio::spawn(ended);
        tokio::task::yield_now().await;
        assert!(signal.released());
        assert!(!signal.fire(LossReason::Expired), "it had ended");
        assert_eq!(watching.await.unwrap(), End::Released);
        assert!(poll(&mut lost).is_pending() && lost.reason().is_none());
    }

    #[tokio::test]
    async fn a_dropped_future_leaves_no_waker() {
        let signal = LossSignal::new();
        let mut lost = signal.subscribe();
        assert!(poll(&mut lost).is_pending());
        assert!(poll(&mut lost).is_pending());
        assert_eq!(signal.lock().wakers.len(), 1);
        drop(lost);
        assert!(signal.lock().wakers.is_empty());
    }

    fn poll(lost: &mut Lost) -> Poll<LossReason> {
        Pin::new(lost).poll(&mut Context::from_waker(Waker::noop()))
    }
}
