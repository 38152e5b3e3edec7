//! Requests to the server to cancel a wait.
//!
//! A cancel request reaches a process during any statement. A late request would cancel the next statement or, behind a
//! pooler, another client's. So requests are only made during a wait. After a wait, the next statement waits until the
//! last request has arrived, because an idle process ignores it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// The cancel requests for one session, with at most one under way.
#[derive(Default)]
pub(crate) struct Cancels {
    state: Mutex<CancelState>,
    changed: Notify,
}

#[derive(Clone, Copy, Default)]
struct CancelState {
    waiting: bool,
    under_way: bool,
    /// Whether the session has no user any longer.
    given_up: bool,
    /// Whether a cancel request might still arrive, because its outcome is unknown.
    stray: bool,
}

impl Cancels {
    /// Records the start of a wait.
    pub(crate) fn wait_begins(&self) {
        self.state().waiting = true;
    }

    /// Records the end of a wait, and waits until a cancel request under way has arrived. Returns `false` if
    /// a request might still arrive, so the session is unusable.
    pub(crate) async fn wait_is_over(&self) -> bool {
        self.state().waiting = false;
        self.until(|state| !state.under_way).await;
        !self.state().stray
    }

    /// Records that the session has no user, so it ends its current work.
    pub(crate) fn give_up(&self) {
        self.state().given_up = true;
        self.changed.notify_waiters();
    }

    /// Waits until the session has no user.
    pub(crate) async fn given_up(&self) {
        self.until(|state| state.given_up).await;
    }

    /// Returns a cancel request to make now. `None` if there is no wait, or if a request is under way.
    pub(crate) fn request(self: &Arc<Self>) -> Option<Cancel> {
        let mut state = self.state();
        if !state.waiting || state.under_way {
            return None;
        }
        state.under_way = true;
        Some(Cancel { cancels: Arc::clone(self), has_arrived: false })
    }

    async fn until(&self, is: impl Fn(&CancelState) -> bool) {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            if is(&self.state()) {
                return;
            }
            changed.await;
        }
    }

    fn state(&self) -> MutexGuard<'_, CancelState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A cancel request under way. If dropped without [`Cancel::arrived`], it might still arrive.
pub(crate) struct Cancel {
    cancels: Arc<Cancels>,
    has_arrived: bool,
}

impl Cancel {
    /// Records the server's reply, after which the request cannot affect a later statement.
    pub(crate) fn arrived(mut self) {
        self.has_arrived = true;
    }
}

impl Drop for Cancel {
    fn drop(&mut self) {
        let mut state = self.cancels.state();
        state.under_way = false;
        state.stray |= !self.has_arrived;
        drop(state);
        self.cancels.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[test]
    fn a_request_is_made_during_a_wait_only_and_one_at_a_time() {
        let cancels = Arc::new(Cancels::default());
        assert!(cancels.request().is_none());
        cancels.wait_begins();
        let first = cancels.request().unwrap();
        assert!(cancels.request().is_none());
        first.arrived();
        cancels.request().unwrap().arrived();
        assert_eq!(cancels.wait_is_over().now_or_never(), Some(true));
        assert!(cancels.request().is_none());
    }

    #[test]
    fn a_wait_is_not_over_while_a_request_is_under_way() {
        let cancels = Arc::new(Cancels::default());
        cancels.wait_begins();
        let request = cancels.request().unwrap();
        let mut over = std::pin::pin!(cancels.wait_is_over());
        assert_eq!(over.as_mut().now_or_never(), None);
        assert!(cancels.request().is_none());
        request.arrived();
        assert_eq!(over.as_mut().now_or_never(), Some(true));
    }

    #[test]
    fn what_is_given_up_is_told_also_later() {
        let cancels = Cancels::default();
        let mut early = std::pin::pin!(cancels.given_up());
        assert_eq!(early.as_mut().now_or_never(), None);
        cancels.give_up();
        assert_eq!(early.as_mut().now_or_never(), Some(()));
        assert_eq!(cancels.given_up().now_or_never(), Some(()));
    }

    #[test]
    fn after_a_lost_request_the_session_is_of_no_use() {
        let cancels = Arc::new(Cancels::default());
        cancels.wait_begins();
        let request = cancels.request().unwrap();
        let mut over = std::pin::pin!(cancels.wait_is_over());
        assert_eq!(over.as_mut().now_or_never(), None);
        drop(request);
        assert_eq!(over.as_mut().now_or_never(), Some(false));
    }
}
