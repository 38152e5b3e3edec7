//! One key of an acquisition, and its stage at the store.

use std::sync::Arc;

use leasehold_api::{BoxFuture, Error, LockGuard};

use crate::acquire::owner::Permit;
use crate::clock::Moment;
use crate::hold::Hold;
use crate::store::backend::{Attempt, Granted};

/// A call of the backend. If its caller is dropped, the driver runs it to its end.
pub(crate) type StoreCall = BoxFuture<'static, Vec<Result<Attempt, Error>>>;

/// One key of an acquisition.
pub(crate) struct Entry {
    pub(crate) hold: Arc<Hold>,
    /// The key's permit, from the queue until the guard has it.
    pub(crate) permit: Option<Permit>,
    pub(crate) stage: Stage,
    /// Whether the last `Contended` reply may point to an unconfirmed attempt of this client.
    pub(crate) own_contention: bool,
    /// Whether the request has a place in the store's queue.
    pub(crate) is_queued: bool,
}

impl Entry {
    pub(crate) fn new(hold: Arc<Hold>, permit: Option<Permit>) -> Self {
        Self { hold, permit, stage: Stage::Idle, own_contention: false, is_queued: false }
    }

    /// Notes a reply without a grant. The store has at most a place of the request in its queue.
    pub(crate) fn answered_without_grant(&mut self) {
        // A request in the queue stays `Asked`, because a release has to take it out.
        if !self.is_queued {
            self.stage = Stage::Idle;
            self.hold.delivery.mark_answered();
        }
    }
}

/// The state of a key's request at the store.
pub(crate) enum Stage {
    /// The store knows nothing of this request.
    Idle,
    /// The request was sent. The store may have granted it or queued it.
    Asked,
    /// The store has granted the request, which was sent at this time.
    Granted(Granted, Moment),
    /// The hold is live, and is renewed while the acquisition waits for the next key.
    Taken(LockGuard),
}
