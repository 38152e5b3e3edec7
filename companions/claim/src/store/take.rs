//! What is to be taken, and what was.

use std::sync::Arc;
use std::time::Duration;

use crate::error::ClaimError;
use crate::spec::Inner;
use crate::spec::ids::RowKey;
use crate::spec::states::State;
use crate::store::Claimed;

/// The most rows, or groups, that one call takes.
const MOST: u32 = 10_000;

/// What is to be taken.
///
/// ```
/// use std::time::Duration;
/// use leasehold_claim::Take;
///
/// let take = Take::up_to(100).lease(Duration::from_secs(60)).queue("mail");
/// assert_eq!(take.limit(), 100);
/// ```
#[derive(Clone, Debug)]
pub struct Take {
    pub(crate) limit: u32,
    pub(crate) lease: Duration,
    pub(crate) queue: Option<Arc<str>>,
    pub(crate) from: Vec<State>,
    pub(crate) after: Option<PassCursor>,
    /// Left out, because they could not be written.
    pub(crate) excluded: Excluded,
    /// These rows alone.
    pub(crate) only: Option<Vec<RowKey>>,
}

/// Rows, and groups where the spec groups rows, that a claimer leaves alone for a time.
#[derive(Clone, Debug, Default)]
pub(crate) struct Excluded {
    pub(crate) rows: Vec<RowKey>,
    pub(crate) groups: Vec<Arc<str>>,
}

impl Excluded {
    pub(crate) fn is_empty(&self) -> bool {
        self.rows.is_empty() && self.groups.is_empty()
    }
}

impl Take {
    /// The lease that a claim asks for by default.
    pub const DEFAULT_LEASE: Duration = Duration::from_secs(30);

    /// At most `limit` rows, or at most `limit` groups where the spec groups rows; 10,000 at the most.
    #[must_use]
    pub fn up_to(limit: u32) -> Self {
        Self {
            limit,
            lease: Self::DEFAULT_LEASE,
            queue: None,
            from: Vec::new(),
            after: None,
            excluded: Excluded::default(),
            only: None,
        }
    }

    /// How long the lease lasts unless it is renewed; of rows with a timeout of their own, that one counts.
    /// In whole milliseconds, at least one.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// Only rows of this queue. Without it, of all queues.
    #[must_use]
    pub fn queue(mut self, queue: impl Into<Arc<str>>) -> Self {
        self.queue = Some(queue.into());
        self
    }

    /// Only rows in one of these states, which must be among those that the spec allows to be taken.
    #[must_use]
    pub fn from<S: Into<State>>(mut self, states: impl IntoIterator<Item = S>) -> Self {
        self.from = states.into_iter().map(Into::into).collect();
        self
    }

    /// Only rows behind `cursor`, where a pass has got to.
    #[must_use]
    pub fn after(mut self, cursor: Option<PassCursor>) -> Self {
        self.after = cursor;
        self
    }

    /// The most rows, or groups, that are taken.
    #[must_use]
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Refuses what no table could answer.
    pub(crate) fn check(&self, spec: &Inner) -> Result<(), ClaimError> {
        if self.limit == 0 {
            return Err(ClaimError::spec("a claim takes at least one row; give a limit of 1 or more"));
        }
        if self.limit > MOST {
            return Err(ClaimError::spec(format!(
                "a claim takes at most {MOST} rows at once; give a smaller limit"
            )));
        }
        check_lease(self.lease)?;
        if let Some(state) = self.from.iter().find(|state| !spec.states.takeable.contains(state)) {
            return Err(ClaimError::spec(format!(
                "rows in the state {state} may not be taken; add it to the states of the spec that may"
            )));
        }
        if self.queue.is_some() && spec.queue.is_none() {
            return Err(ClaimError::spec(
                "the spec has no queues; name the column of the queue, or none in `Take`",
            ));
        }
        Ok(())
    }
}

pub(crate) fn check_lease(lease: Duration) -> Result<(), ClaimError> {
    if lease < Duration::from_millis(1) {
        return Err(ClaimError::spec("a lease lasts a millisecond or longer"));
    }
    Ok(())
}

/// How far a pass over the table has got, in the order in which rows are taken. What lies
/// before it is not offered again in this pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassCursor(pub(crate) Arc<[String]>);

/// What was taken.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Taken {
    /// In the order in which they are to be done.
    pub claims: Vec<Claimed>,
    /// Rows or groups that could have been taken but for somebody else who is at them at this moment, as far
    /// as the statement has seen them.
    pub skipped: u64,
    /// How far the pass has got; `None` where nothing was seen.
    pub cursor: Option<PassCursor>,
    /// Rows that could have been taken, but that the table does not allow to be written. The cursor is past them, so that the
    /// others get their turn.
    pub refused: Vec<RefusedRow>,
}

/// A row that the table does not allow to be written, for example because it breaks a constraint that was added
/// `NOT VALID`, or because a trigger raises an error.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RefusedRow {
    /// Which row; the first that was to be taken, where the spec groups rows.
    pub key: RowKey,
    /// Its group, where the spec groups rows. None of the group's rows was taken then.
    pub group: Option<Arc<str>>,
    /// What the server said.
    pub error: Arc<ClaimError>,
}
