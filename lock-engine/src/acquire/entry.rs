//! One key of an acquisition, and what the store may have of it.

use std::sync::Arc;

use leasehold_api::{BoxFuture, Error, LockGuard};

use crate::acquire::owner::Permit;
use crate::clock::Moment;
use crate::hold::Hold;
use crate::store::backend::{Attempt, Granted};

/// A call of the backend that runs to its end whoever drops it.
pub(crate) type StoreCall = BoxFuture<'static, Vec<Result<Attempt, Error>>>;

/// One key of an acquisition.
pub(crate) struct Entry {
    pub(crate) hold: Arc<Hold>,
    /// The key's permit: from the queue until a guard has it.
    pub(crate) permit: Option<Permit>,
    pub(crate) stage: Stage,
}

/// What the store may have of it.
pub(crate) enum Stage {
    /// The store knows nothing of it.
    Idle,
    /// It may be held, or queued for.
    Asked,
    Granted(Granted, Moment),
    /// Ours, renewed like any other while the next key is waited for.
    Taken(LockGuard),
}
