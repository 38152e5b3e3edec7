//! Events from outside the small lock: operators' commands, events of the server, and the end of the runtime.

use std::sync::Weak;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_api::{Error, HolderId, KeyInfo, ListQuery, LockAdmin, LockKey, LossReason};
use tokio::time::Instant;

use super::super::server::EventSink;
use super::SmallLock;
use super::client::{SmallClient, lock};
use super::fault::LockFault as Fault;
use super::grant::Hold;

/// Interval between two looks of an observer.
const LOOK: Duration = Duration::from_millis(50);

#[async_trait]
impl LockAdmin for SmallLock {
    async fn inspect(&self, key: &LockKey) -> Result<KeyInfo, Error> {
        Ok(self.0.connection.server().inspect(key))
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<KeyInfo>, Error> {
        Ok(self.0.connection.server().list(query))
    }

    async fn changed(&self, seen: &KeyInfo, at_most: Duration) -> Result<Option<KeyInfo>, Error> {
        let client = &self.0;
        let until = Instant::now().checked_add(at_most);
        loop {
            if *client.closing.borrow() && client.fault != Fault::ObserverOutlivesClose {
                return Err(client.named(Error::closed(), &seen.key));
            }
            let now = self.inspect(&seen.key).await?;
            let hidden = client.fault == Fault::NoHolderIsNotTold && !now.is_held();
            if now.differs_from(seen) && !hidden {
                return Ok(Some(now));
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                return Ok(None);
            }
            let left = until.map_or(LOOK, |until| until - Instant::now());
            tokio::time::sleep(left.min(LOOK)).await;
        }
    }

    async fn force_release(&self, key: &LockKey, holder: HolderId) -> Result<bool, Error> {
        Ok(self.0.connection.server().end(key, Some(holder), LossReason::ForcedRelease, true))
    }

    async fn ask(&self, key: &LockKey, holder: HolderId) -> Result<bool, Error> {
        Ok(self.0.connection.server().ask(key, holder))
    }
}

/// Applies the server's events to this client.
#[derive(Debug)]
pub(super) struct Listener(pub(super) Weak<SmallClient>);

impl EventSink for Listener {
    fn lost(&self, key: &LockKey, holder: HolderId, reason: LossReason) {
        let Some(client) = self.0.upgrade() else { return };
        if let Some(hold) =
            client.live_hold(key).filter(|h| is_of(h, holder) || client.fault == Fault::LossEndsTheNext)
        {
            hold.lose(reason);
            if client.fault == Fault::LostToldToTheEarlierGuard {
                hold.tenure.tell_earlier(reason);
            }
        }
        // The caller that the hold was passing to calls the store.
        if let Some(baton) = client.permits.take_lost(key, holder) {
            baton.forget();
        }
    }

    fn awaited(&self, key: &LockKey) {
        let Some(client) = self.0.upgrade() else { return };
        if let Some(hold) = client.live_hold(key) {
            hold.tenure.note_awaited();
        }
        client.permits.note_awaited(key);
    }

    fn wake(&self, key: &LockKey) {
        let Some(client) = self.0.upgrade() else { return };
        let wakeup = lock(&client.wakeups).get(key).cloned();
        if let Some(wakeup) = wakeup {
            wakeup.notify_one();
        }
    }

    fn asked(&self, key: &LockKey, holder: HolderId) {
        let Some(client) = self.0.upgrade() else { return };
        let Some(hold) = client.live_hold(key).filter(|hold| hold.tenure.holder == holder) else {
            // The caller that the hold was passing to calls the store.
            return drop(client.permits.take_lost(key, holder));
        };
        let _ = hold.asked.set(());
        if client.fault != Fault::ChainIgnoresRequests {
            hold.tenure.note_awaited();
        }
    }
}

/// Returns whether the store knows `hold` as `holder`.
fn is_of(hold: &Hold, holder: HolderId) -> bool {
    let stored = match hold.client.fault {
        Fault::LossNotPassedOn => hold.holder,
        _ => hold.tenure.holder,
    };
    stored == holder
}

/// Ends all holds as lost when the runtime shuts down and drops this value with its task.
pub(super) struct RuntimeEnd(pub(super) Weak<SmallClient>);

impl Drop for RuntimeEnd {
    fn drop(&mut self) {
        let Some(client) = self.0.upgrade() else { return };
        client.closing.send_replace(true);
        if client.fault != Fault::RuntimeEndIsSilent {
            for hold in client.live_holds() {
                hold.lose(LossReason::RuntimeGone);
            }
        }
        client.connection.abort();
    }
}
