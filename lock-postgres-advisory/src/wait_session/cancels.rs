//! Requests to the server to end a wait.
//!
//! Such a request reaches a process, whatever that is doing by then: one that is still under way when the
//! wait is over ends the next statement, and behind a pooler somebody else's. So none is made outside of a
//! wait, and after a wait nothing more is sent until the last one has arrived: an idle process ignores it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// The requests to end the waits of one session, of which one at a time is under way.
#[derive(Default)]
pub(crate) struct Cancels {
    state: Mutex<CancelState>,
    changed: Notify,
}

#[derive(Clone, Copy, Default)]
struct CancelState {
    waiting: bool,
    under_way: bool,
    /// Nobody wants the session any more.
    given_up: bool,
    /// Nobody knows what became of a request.
    stray: bool,
}

impl Cancels {
    /// A wait begins.
    pub(crate) fn wait_begins(&self) {
        self.state().waiting = true;
    }

    /// The wait was answered. Resolves when no request is under way any more: `false` if one may still
    /// arrive, so that the session is of no use.
    pub(crate) async fn wait_is_over(&self) -> bool {
        self.state().waiting = false;
        self.until(|state| !state.under_way).await;
        !self.state().stray
    }

    /// Nobody wants the session any more: it ends what it is doing by itself.
    pub(crate) fn give_up(&self) {
        self.state().given_up = true;
        self.changed.notify_waiters();
    }

    /// Resolves when nobody wants the session any more.
    pub(crate) async fn given_up(&self) {
        self.until(|state| state.given_up).await;
    }

    /// A request to be made now, unless there is no wait to end or one is under way.
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

/// A request that is under way. Dropped otherwise than by [`Cancel::arrived`], it may still arrive.
pub(crate) struct Cancel {
    cancels: Arc<Cancels>,
    has_arrived: bool,
}

impl Cancel {
    /// The server has answered: it comes to no later statement.
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
