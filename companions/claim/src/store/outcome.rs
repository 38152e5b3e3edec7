//! How claims end.

use std::time::Duration;

use crate::spec::ids::RowKey;
use crate::spec::states::State;

/// How a claim ends.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The work is done: the rows are settled (or deleted, as the spec's retention says).
    Done,
    /// The work was tried and failed for good: settled too, with a message.
    Failed(String),
    /// The work failed this time: back to where it can be taken, after a pause. The attempt counts; if it was
    /// the last one, the row is exhausted. A pause needs a column for the time.
    Retry {
        /// The message of the failure.
        error: Option<String>,
        /// How long it is left alone.
        after: Duration,
    },
    /// Not tried: back to where it can be taken, and the attempt does not count.
    PutBack,
    /// Not tried and put off: as [`PutBack`](Self::PutBack), but left alone for this long, because a service that
    /// it needs said "later" for example. A pause above zero needs a column for the time.
    Snooze(Duration),
    /// To another state of the spec, along one of its transitions.
    To(State),
}

/// For handlers that have nothing more to say: the work is done.
impl From<()> for Outcome {
    fn from((): ()) -> Self {
        Self::Done
    }
}

/// A claim has ended: all of its rows at once.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Settled {
    /// Rows that are exhausted now instead of taken again.
    pub exhausted: Vec<RowKey>,
}
