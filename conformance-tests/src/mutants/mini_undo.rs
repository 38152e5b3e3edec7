//! Undoing what the store may have granted and nobody wants any more.

use std::sync::Arc;
use std::time::Duration;

use leasehold_engine::{Granted, HoldRef, Request};
use tokio::time::{Instant, sleep, timeout};

use super::lock_fault::LockFault as Fault;
use super::mini_client::{CALL, Client};
use crate::harness::Op;

/// A grant on its way to the caller. Dropped on the way, it is undone.
pub(super) struct Fresh {
    pub(super) client: Arc<Client>,
    pub(super) request: Request,
    pub(super) granted: Granted,
    pub(super) sent: Instant,
    pub(super) taken: bool,
}

impl Fresh {
    /// The store has a default, so every hold here is a lease.
    pub(super) fn ttl(&self) -> Duration {
        self.request.ttl.unwrap_or(Duration::from_secs(10))
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        if !self.taken {
            let (client, mut hold) = (Arc::clone(&self.client), self.request.hold());
            hold.unused = true;
            self.client.handle.spawn(async move { client.undo(hold).await });
        }
    }
}

impl Client {
    /// Frees what may be held, again and again until the store has confirmed it or the lease is over.
    pub(super) async fn undo(&self, hold: HoldRef) {
        self.leaving.send_modify(|left| left.push(hold.clone()));
        self.undo_until_confirmed(&hold).await;
        self.leaving.send_modify(|left| left.retain(|other| other.holder != hold.holder));
    }

    async fn undo_until_confirmed(&self, hold: &HoldRef) {
        if self.fault == Fault::WaiterLeaksGrant {
            return;
        }
        let start = Instant::now();
        let mut pause = Duration::from_millis(50);
        loop {
            let call = self.link.call(Op::Release, |server, asker| server.release(asker, hold));
            if let Ok(Ok(_)) = timeout(CALL, call).await {
                return;
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
