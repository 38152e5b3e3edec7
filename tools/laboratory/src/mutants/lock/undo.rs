//! Undoing what the store may have granted and nobody wants any more.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use leasehold_engine::{Granted, HoldRef, Request};
use tokio::time::{Instant, sleep, timeout};

use super::client::{CALL, SmallClient};
use super::fault::LockFault as Fault;
use leasehold_conformance::Op;

/// A grant on its way to the caller. Dropped on the way, it is undone.
pub(super) struct UndeliveredGrant {
    pub(super) client: Arc<SmallClient>,
    pub(super) request: Request,
    pub(super) granted: Granted,
    pub(super) sent: Instant,
    pub(super) taken: bool,
}

impl UndeliveredGrant {
    /// The store has a default, so every hold here is a lease.
    pub(super) fn ttl(&self) -> Duration {
        self.request.ttl.unwrap_or(Duration::from_secs(10))
    }
}

impl Drop for UndeliveredGrant {
    fn drop(&mut self) {
        if !self.taken && self.client.fault != Fault::UndoIsSentAtOnce {
            let (client, mut hold) = (Arc::clone(&self.client), self.request.hold());
            hold.unused = true;
            client.begin_undo(&hold);
            self.client.handle.spawn(async move { client.undo(hold).await });
        }
    }
}

/// An attempt that its caller waits for. Dropped before its task is over, it counts as one that is being undone until the task
/// has seen to that.
pub(super) struct AwaitedAttempt {
    pub(super) client: Arc<SmallClient>,
    pub(super) hold: HoldRef,
    pub(super) over: Arc<AtomicBool>,
}

impl Drop for AwaitedAttempt {
    fn drop(&mut self) {
        if self.over.load(Ordering::Acquire) {
            return;
        }
        if self.client.fault != Fault::CloseForgetsAbandoned {
            self.client.begin_undo(&self.hold);
        }
        if self.client.fault == Fault::UndoIsSentAtOnce {
            let (client, hold) = (Arc::clone(&self.client), self.hold.clone());
            self.client.handle.spawn(async move { client.undo(hold).await });
        }
    }
}

impl SmallClient {
    /// The store may have the hold, and is not to keep it.
    pub(super) fn begin_undo(&self, hold: &HoldRef) {
        self.undoing.send_modify(|left| {
            if left.iter().all(|other| other.holder != hold.holder) {
                left.push(hold.clone());
            }
        });
    }

    /// The store has not got the hold.
    pub(super) fn end_undo(&self, hold: &HoldRef) {
        self.undoing.send_modify(|left| left.retain(|other| other.holder != hold.holder));
    }

    /// Frees what may be held, again and again until the store has confirmed it or the lease is over.
    pub(super) async fn undo(&self, hold: HoldRef) {
        self.begin_undo(&hold);
        self.undo_until_confirmed(&hold).await;
        self.end_undo(&hold);
    }

    async fn undo_until_confirmed(&self, hold: &HoldRef) {
        if self.fault == Fault::WaiterLeaksGrant {
            return;
        }
        let start = Instant::now();
        let mut pause = Duration::from_millis(50);
        loop {
            let call =
                self.connection.call(Op::Release, |_, requester| self.connection.release(requester, hold));
            // Whoever closes has time to ask again.
            let hurries = *self.closing.borrow() && self.fault != Fault::CloseAsksOnce;
            if let Ok(Ok(Ok(_))) = timeout(if hurries { CALL / 4 } else { CALL }, call).await {
                return;
            }
            if self.fault == Fault::FailedUndoIsForgotten {
                self.end_undo(hold);
            }
            let over = hold.ttl.is_some_and(|ttl| start.elapsed() > ttl) && self.fault != Fault::UndoForEver;
            if over || self.fault == Fault::UndoOnlyOnce {
                return;
            }
            sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(5));
        }
    }
}
