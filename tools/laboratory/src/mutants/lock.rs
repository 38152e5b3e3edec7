//! A small correct lock that implements the API without the engine, with one optional fault in the engine's part.

mod batch;
mod baton;
mod client;
mod events;
pub(crate) mod fault;
mod grant;
mod outage;
mod permits;
mod renewal;
mod undo;

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_api::{
    AcquireOptions, Capabilities, Error, ErrorKind, Lock, LockAdmin, LockGuard, LockKey, LossReason,
    MultiGuard, Wait,
};
use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout};

use self::batch::Batch;
use self::client::{AcquireFailure, CALL, SmallClient};
use self::events::{Listener, RuntimeEnd};
use self::fault::LockFault as Fault;
use self::grant::{Hold, SmallGrant};
use self::outage::Outages;
use self::permits::Permits;
use super::backend::capabilities;
use super::backend::fault::BackendFault;
use super::connection::Connection;

/// One client. Dropping it and its guards ends its tasks.
#[derive(Debug)]
pub(crate) struct SmallLock(Arc<SmallClient>);

impl SmallLock {
    /// Connects a client whose chains last for up to `handover_for`.
    pub(crate) fn connect(
        connection: &Arc<Connection>,
        fault: Fault,
        handover_for: Duration,
    ) -> Result<Self, Error> {
        let handle = Handle::try_current().map_err(|e| Error::closed().with_source(e))?;
        let mut capabilities = capabilities(BackendFault::None);
        capabilities.handover_for = handover_for;
        let client = Arc::new(SmallClient {
            fault,
            connection: Arc::clone(connection),
            handle,
            capabilities,
            permits: Permits::new(fault),
            holds: Mutex::default(),
            outages: Outages::default(),
            batch: Batch::default(),
            wakeups: Mutex::default(),
            windows: Notify::new(),
            closing: watch::Sender::new(false),
            closed_once: AtomicBool::new(false),
            undoing: watch::Sender::default(),
            instance: u128::from(fastrand::u64(..)) << 64 | u128::from(fastrand::u64(..)),
            serial: AtomicU64::new(0),
        });
        connection.listen(Arc::new(Listener(Arc::downgrade(&client))));
        let end = RuntimeEnd(Arc::downgrade(&client));
        let mut closing = client.closing.subscribe();
        client.handle.spawn(async move {
            let _end = end;
            // Ends when the client is dropped, because the client owns the sender.
            while closing.changed().await.is_ok() {}
        });
        Ok(Self(client))
    }
}

impl SmallLock {
    /// Releases in the background. The answer does not matter because the caller has no lock.
    fn give_back(&self, guards: Vec<(usize, LockGuard)>, holds: &[Arc<Hold>]) {
        holds.iter().for_each(|hold| hold.mark_unused());
        let guards: MultiGuard = guards.into_iter().map(|(_, guard)| guard).collect();
        self.0.handle.spawn(guards.release());
    }
}

#[async_trait]
impl Lock for SmallLock {
    async fn try_acquire(&self, key: &LockKey, options: &AcquireOptions) -> Result<Option<LockGuard>, Error> {
        let client = &self.0;
        let outcome = match client.fault {
            Fault::TryWaits => {
                let end = Some(Instant::now() + Duration::from_secs(1));
                client.obtain(key, options, end, false, None, None).await
            }
            _ => client.obtain(key, options, None, true, None, None).await,
        };
        match outcome {
            Ok(grant) => Ok(Some(LockGuard::new(Arc::new(grant)))),
            Err(AcquireFailure::Contended) if client.fault != Fault::ContendedIsTimeout => Ok(None),
            Err(refusal) => Err(client.refused(refusal, key)),
        }
    }

    async fn acquire(&self, key: &LockKey, options: &AcquireOptions) -> Result<LockGuard, Error> {
        let client = &self.0;
        let zero = options.wait == Wait::For(Duration::ZERO);
        if zero && client.fault == Fault::ZeroNeverAsks {
            return Err(client.refused(AcquireFailure::Contended, key));
        }
        let end = client.deadline(options.wait);
        let once = zero && client.fault != Fault::ZeroWaits;
        match client.obtain(key, options, end, once, None, None).await {
            Ok(grant) => Ok(LockGuard::new(Arc::new(grant))),
            Err(refusal) => Err(client.refused(refusal, key)),
        }
    }

    async fn try_acquire_all(
        &self,
        keys: &[LockKey],
        options: &AcquireOptions,
    ) -> Result<Option<MultiGuard>, Error> {
        match self.acquire_all(keys, &options.clone().wait(Duration::ZERO)).await {
            Ok(guards) => Ok(Some(guards)),
            Err(error) if error.kind() == ErrorKind::Timeout => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn acquire_all(&self, keys: &[LockKey], options: &AcquireOptions) -> Result<MultiGuard, Error> {
        let client = &self.0;
        let mut order: Vec<usize> = (0..keys.len()).collect();
        if client.fault != Fault::AllUnordered {
            order.sort_by_key(|i| &keys[*i]);
        }
        let twice = (0..keys.len()).find(|i| keys[..*i].contains(&keys[*i]));
        match (twice, client.fault) {
            (Some(_), Fault::AllKeepsDuplicates) => order.dedup_by_key(|i| &keys[*i]),
            (Some(i), _) => {
                let message = "the same key is given twice; it would wait for itself";
                return Err(client.named(Error::new(ErrorKind::InvalidOption, message), &keys[i]));
            }
            (None, _) => {}
        }
        let mut end = client.deadline(options.wait);
        let once = options.wait == Wait::For(Duration::ZERO);
        let holder = (client.fault == Fault::AllInOneHolder).then(|| client.mint());
        let mut queued = Vec::new();
        if client.fault == Fault::BatonKeptForTwoKeys {
            let keys: Vec<_> = order.iter().map(|i| &keys[*i]).collect();
            queued = client
                .permits_of(&keys, options)
                .await
                .map_err(|failure| client.refused(failure, keys[0]))?;
        }
        let mut queued = queued.into_iter();
        let (mut guards, mut holds) = (Vec::new(), Vec::new());
        let mut behind = None;
        for (at, i) in order.iter().copied().enumerate() {
            if client.fault == Fault::BudgetPerKey {
                end = client.deadline(options.wait);
            }
            if let (Fault::AllHoldsBehind, Some(next)) = (client.fault, order.get(at + 1)) {
                behind = client.obtain(&keys[*next], options, None, true, None, None).await.ok();
            }
            match client.obtain(&keys[i], options, end, once, holder, queued.next()).await {
                Ok(grant) => {
                    holds.push(Arc::clone(&grant.0));
                    guards.push((i, LockGuard::new(Arc::new(grant))));
                }
                Err(refusal) => {
                    if client.fault == Fault::AllNotUndone {
                        guards.into_iter().for_each(std::mem::forget);
                    } else {
                        self.give_back(guards, &holds);
                    }
                    let error = client.refused(refusal, &keys[i]);
                    return Err(match client.fault {
                        Fault::ErrorsNameTheFirst => error.replace_key(&keys[0]),
                        _ => error,
                    });
                }
            }
            drop(behind.take().map(|grant: SmallGrant| LockGuard::new(Arc::new(grant))));
        }
        // An early guard might have been lost during the wait for a later one.
        let lost = guards.iter().find_map(|(i, g)| Some((keys[*i].clone(), g.lost().reason()?)));
        if let Some((key, reason)) = lost {
            self.give_back(guards, &holds);
            return Err(client.named(Error::lost(reason), &key));
        }
        if client.fault != Fault::AllWrongOrder {
            guards.sort_by_key(|(i, _)| *i);
        }
        Ok(guards.into_iter().map(|(_, guard)| guard).collect())
    }

    async fn close(&self) -> Result<(), Error> {
        let client = Arc::clone(&self.0);
        let twice = client.closed_once.swap(true, Ordering::AcqRel);
        if twice && client.fault == Fault::CloseTwiceFails {
            return Err(Error::closed());
        }
        client.closing.send_replace(true);
        client.connection.server().leave_all(client.connection.client());
        let mut freeing = Vec::new();
        for hold in client.live_holds() {
            if client.fault == Fault::CloseIsSilent {
                hold.end_silently();
            } else {
                hold.lose(LossReason::Closed);
            }
            if client.fault != Fault::CloseLeavesHolds {
                let (client, reference) = (Arc::clone(&client), hold.reference());
                freeing.push(self.0.handle.spawn(async move { client.undo(reference).await }));
            }
        }
        for baton in client.permits.take_batons() {
            if client.fault == Fault::BatonLostOnClose {
                baton.forget();
            } else {
                let (client, reference) = (Arc::clone(&client), baton.into_reference());
                freeing.push(self.0.handle.spawn(async move { client.undo(reference).await }));
            }
        }
        if twice && client.fault == Fault::CloseTwiceEarly {
            return Ok(());
        }
        let mut left = client.undoing.subscribe();
        let all_left = async {
            for task in freeing {
                let _ = task.await;
            }
            // Lets tasks of a concurrent call register their undo first.
            tokio::task::yield_now().await;
            left.wait_for(Vec::is_empty).await.is_ok()
        };
        match timeout(CALL, all_left).await {
            Ok(_) => Ok(()),
            Err(_) if client.fault == Fault::CloseHangs => std::future::pending().await,
            Err(_) => Err(Error::new(ErrorKind::OutcomeUnknown, "the store did not confirm every release")),
        }
    }

    fn capabilities(&self) -> &Capabilities {
        &self.0.capabilities
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        Some(self)
    }
}

impl fmt::Display for SmallLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("small-lock")
    }
}
