//! A transaction that is committed outside of a lock layer, and the locks that have to last until then.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use http::Extensions;
use leasehold_api::LossReason;

use crate::hold::RequestHold;

/// A transaction that a layer commits after the service inside of it has answered.
///
/// A lock layer inside of such a layer would release its lock before the commit, and the next request would read what was
/// there before it. So the lock layer passes its lock to this value, and the layer that commits releases it:
///
/// ```
/// use leasehold_tower::{OpenCommit, Reads};
///
/// # async fn serve(mut request: http::Request<()>) {
/// let open = OpenCommit::around(request.extensions_mut(), Reads::Committed);
/// // Call the service inside with `request`. Then, unless `open.lost()` says that a lock is gone, commit; or roll back.
/// open.end().await; // releases the locks
/// # }
/// ```
///
/// Dropped, it releases the locks in the background: drop it after the transaction. `IdempotencyLayer` of
/// `leasehold-idempotency` and [`TxLayer`](crate::TxLayer) do all this. A layer of your own that commits has to.
#[derive(Debug)]
#[must_use = "dropped, it releases the locks that were taken inside"]
pub struct OpenCommit {
    kept: Arc<KeptHolds>,
    /// The transaction around this one, which is committed later still.
    outer: Option<CommitSlot>,
}

/// What the statements of an open transaction see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // With a snapshot or without.
pub enum Reads {
    /// READ COMMITTED: a statement sees everything that was committed before it began.
    Committed,
    /// REPEATABLE READ and SERIALIZABLE: all statements see what was committed before the first of them. A lock that is
    /// taken later protects nothing that they read, so a lock layer inside of such a transaction answers with 500.
    Snapshot,
}

/// What a request carries. Weak, because a copy of the extensions that outlives the request must not keep the locks.
#[derive(Clone)]
pub(crate) struct CommitSlot(Weak<KeptHolds>);

struct KeptHolds {
    reads: Reads,
    /// `None` once the transaction has ended.
    holds: Mutex<Option<Vec<RequestHold>>>,
}

impl OpenCommit {
    /// Marks the request with these extensions: lock layers inside pass their locks to this value.
    pub fn around(extensions: &mut Extensions, reads: Reads) -> Self {
        let outer = CommitSlot::of(extensions);
        let kept = Arc::new(KeptHolds { reads, holds: Mutex::new(Some(Vec::new())) });
        extensions.insert(CommitSlot(Arc::downgrade(&kept)));
        Self { kept, outer }
    }

    /// Returns whether a transaction is open around the request with these extensions.
    #[must_use]
    pub fn is_around(extensions: &Extensions) -> bool {
        CommitSlot::of(extensions).is_some()
    }

    /// Returns why one of the locks was lost, if its layer stops work that has lost its lock
    /// ([`OnLost::Cancel`](crate::OnLost::Cancel)): roll back instead of committing.
    #[must_use]
    pub fn lost(&self) -> Option<LossReason> {
        self.kept.holds().as_ref()?.iter().find_map(RequestHold::stopped)
    }

    /// Releases the locks, now that the transaction was committed or rolled back. Waits for each confirmation as long as
    /// the lock's layer says ([`LockLayer::release_within`](crate::LockLayer::release_within)).
    ///
    /// # Cancel safety
    ///
    /// If dropped, the remaining locks are released in the background.
    pub async fn end(self) {
        for hold in self.take() {
            hold.release().await;
        }
    }

    /// From now on lock layers release by themselves. The locks go to the transaction around this one, if one is open.
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
    /// The innermost open transaction around the request with these extensions.
    pub(crate) fn of(extensions: &Extensions) -> Option<Self> {
        extensions.get::<Self>().filter(|slot| slot.reads().is_some()).cloned()
    }

    /// `None` once the transaction has ended.
    pub(crate) fn reads(&self) -> Option<Reads> {
        let kept = self.0.upgrade()?;
        let is_open = kept.holds().is_some();
        is_open.then_some(kept.reads)
    }

    /// Keeps `hold` until the transaction has ended, or returns it if that is so already.
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
