//! A transaction committed outside a lock layer, and the locks that must last until the commit.

use std::fmt;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use http::Extensions;
use leasehold_api::{Lock, LockKey, LossReason};

use crate::hold::RequestHold;

tokio::task_local! {
    /// The transaction around the running task, set by [`OpenCommit::scope`].
    static SCOPE: CommitSlot;
}

/// A transaction that a layer commits after the inner service has responded.
///
/// A lock layer inside such a layer would release its lock before the commit, and the next request would read the old
/// state. The lock layer therefore passes its lock to this value, and the committing layer releases it:
///
/// ```
/// use leasehold_tower::{OpenCommit, Reads};
///
/// # async fn serve(mut request: http::Request<()>) {
/// let open = OpenCommit::around(request.extensions_mut(), Reads::Committed);
/// // Call the service inside with `request`. Roll back if `open.lost()` returns a reason, otherwise commit.
/// open.end().await; // releases the locks
/// # }
/// ```
///
/// If dropped, it releases the locks in the background, so drop it after the transaction. `IdempotencyLayer` of
/// `leasehold-idempotency` and [`TxLayer`](crate::TxLayer) use it. Your own committing layer must use it too.
#[derive(Debug)]
#[must_use = "dropped, it releases the locks that were taken inside"]
pub struct OpenCommit {
    kept: Arc<KeptHolds>,
    /// The transaction around this one, which is committed later. `None` if there is none.
    outer: Option<CommitSlot>,
}

/// The commits of other transactions that the statements of an open transaction see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // Exhaustive, because a transaction reads with a snapshot or without.
pub enum Reads {
    /// READ COMMITTED: a statement sees everything that was committed before it began.
    Committed,
    /// REPEATABLE READ and SERIALIZABLE: all statements see the data committed before the first statement. A lock
    /// acquired later does not protect them from stale reads, so a lock layer inside responds with status 500.
    Snapshot,
}

/// The reference of a request or a task to the transaction. It is weak, because a surviving copy of the extensions must
/// not keep the locks.
#[derive(Clone)]
pub(crate) struct CommitSlot(Weak<KeptHolds>);

struct KeptHolds {
    reads: Reads,
    /// `None` once the transaction has ended.
    holds: Mutex<Option<Vec<RequestHold>>>,
}

impl OpenCommit {
    /// Marks the request with these extensions. Lock layers inside then pass their locks to the returned value.
    pub fn around(extensions: &mut Extensions, reads: Reads) -> Self {
        let outer = CommitSlot::of(Some(extensions));
        let kept = Arc::new(KeptHolds { reads, holds: Mutex::new(Some(Vec::new())) });
        extensions.insert(CommitSlot(Arc::downgrade(&kept)));
        Self { kept, outer }
    }

    /// Returns whether a transaction is open around the request with these extensions, or around the task.
    #[must_use]
    pub fn is_around(extensions: &Extensions) -> bool {
        CommitSlot::of(Some(extensions)).is_some()
    }

    /// Runs `work`. Each lock layer called in its task passes its lock to this value. Use it for messages, because only
    /// HTTP requests carry extensions. A task spawned by `work` is outside.
    ///
    /// # Cancel safety
    ///
    /// If dropped, `work` is dropped. The locks passed so far are kept.
    pub async fn scope<F: Future>(&self, work: F) -> F::Output {
        SCOPE.scope(CommitSlot(Arc::downgrade(&self.kept)), work).await
    }

    /// Returns the reason if a lock was lost whose layer stops work without its lock
    /// ([`OnLost::Cancel`](crate::OnLost::Cancel)). Roll back in that case.
    #[must_use]
    pub fn lost(&self) -> Option<LossReason> {
        self.kept.holds().as_ref()?.iter().find_map(RequestHold::stopped)
    }

    /// Releases the locks after the commit or rollback. For each lock it waits at most
    /// [`release_within`](crate::LockLayer::release_within) of the lock's layer for the confirmation.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the remaining locks are released in the background.
    pub async fn end(self) {
        for hold in self.take() {
            hold.release().await;
        }
    }

    /// Ends the passing of locks to this transaction, and returns the locks passed so far. Lock layers then release
    /// their locks themselves, or pass them to an outer transaction that is open.
    fn take(&self) -> Vec<RequestHold> {
        let mut holds = self.kept.holds().take().unwrap_or_default();
        holds.iter_mut().for_each(|hold| hold.pass_to(self.outer.clone()));
        holds
    }
}

impl Drop for OpenCommit {
    fn drop(&mut self) {
        drop(self.take());
    }
}

impl CommitSlot {
    /// Returns the innermost open transaction around the request with these extensions, or else around the task.
    pub(crate) fn of(extensions: Option<&Extensions>) -> Option<Self> {
        let is_open = |slot: &Self| slot.reads().is_some();
        let around_request = extensions.and_then(|extensions| extensions.get::<Self>()).cloned();
        around_request.filter(is_open).or_else(|| SCOPE.try_with(Self::clone).ok().filter(is_open))
    }

    /// Returns whether the transaction keeps `key` of `lock`. Waiting for the key inside would be a deadlock.
    pub(crate) fn keeps(&self, lock: &Arc<dyn Lock>, key: &LockKey) -> bool {
        let Some(kept) = self.0.upgrade() else { return false };
        kept.holds().iter().flatten().any(|hold| hold.is_of(lock, key))
    }

    /// Returns which commits the transaction's statements see, or `None` once it has ended.
    pub(crate) fn reads(&self) -> Option<Reads> {
        let kept = self.0.upgrade()?;
        let is_open = kept.holds().is_some();
        is_open.then_some(kept.reads)
    }

    /// Keeps `hold` until the transaction ends. Returns it if the transaction has already ended.
    pub(crate) fn keep(&self, hold: RequestHold) -> Option<RequestHold> {
        let Some(kept) = self.0.upgrade() else { return Some(hold) };
        match &mut *kept.holds() {
            Some(holds) => {
                holds.push(hold);
                None
            }
            None => Some(hold),
        }
    }
}

impl KeptHolds {
    fn holds(&self) -> MutexGuard<'_, Option<Vec<RequestHold>>> {
        self.holds.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for KeptHolds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeptHolds").field("reads", &self.reads).field("holds", &*self.holds()).finish()
    }
}

impl fmt::Debug for CommitSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CommitSlot")
    }
}
