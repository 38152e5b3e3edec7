//! Undo of grants that no caller received.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use leasehold_engine::{Granted, HoldRef, Request};
use tokio::time::{Instant, sleep, timeout};

use super::client::{CALL, SmallClient};
use super::fault::LockFault as Fault;
use leasehold_conformance::Op;

/// A grant on its way to the caller. The drop undoes it unless `taken` is set.
pub(super) struct UndeliveredGrant {
    pub(super) client: Arc<SmallClient>,
    pub(super) request: Request,
    pub(super) granted: Granted,
    pub(super) sent: Instant,
    pub(super) taken: bool,
}

impl UndeliveredGrant {
    /// Returns the TTL of the grant. Every hold has one because the store has a default.
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

/// An attempt whose caller waits for it. If dropped before the attempt is over, it counts as unconfirmed until its task
/// has undone it.
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
    /// Records that the store might have the hold and that it must be released.
    pub(super) fn begin_undo(&self, hold: &HoldRef) {
        self.undoing.send_modify(|left| {
            if left.iter().all(|other| other.holder != hold.holder) {
                left.push(hold.clone());
            }
        });
    }

    /// Records that the store does not have the hold.
    pub(super) fn end_undo(&self, hold: &HoldRef) {
        self.undoing.send_modify(|left| left.retain(|other| other.holder != hold.holder));
    }

    /// Releases `hold` and retries until the store confirms the release or the lease is over.
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
            // A shorter timeout, so a closing client has time for a retry.
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
