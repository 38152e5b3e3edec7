//! Outcomes of claims.

use std::time::Duration;

use crate::spec::ids::RowKey;
use crate::spec::states::State;

/// The way in which a claim ends.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The work is done. The rows are settled, or deleted, depending on the spec's retention.
    Done,
    /// The work has failed for good. The rows are settled, with a message.
    Failed(String),
    /// The work has failed this time. The row is claimable again after a pause, and the attempt counts. After the last
    /// attempt the row is exhausted. A pause needs the column `ready_at`.
    Retry {
        /// The message of the failure.
        error: Option<String>,
        /// The time during which the row is not taken.
        after: Duration,
    },
    /// The work was not tried. The row is claimable again, and the attempt does not count.
    PutBack,
    /// The work was not tried and is postponed, for example because a service that it needs was unavailable. The
    /// attempt does not count, as for [`PutBack`](Self::PutBack). A pause above zero needs the column `ready_at`.
    Snooze(Duration),
    /// The row changes to another state of the spec, along an allowed transition.
    To(State),
}

/// Lets a handler return `()`, which means that the work is done.
impl From<()> for Outcome {
    fn from((): ()) -> Self {
        Self::Done
    }
}

/// The report on a claim whose rows were all settled.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Settled {
    /// Rows that are exhausted and will not be taken again.
    pub exhausted: Vec<RowKey>,
}
