//! Requests for rows, and their results.

use std::sync::Arc;
use std::time::Duration;

use crate::error::ClaimError;
use crate::spec::Inner;
use crate::spec::ids::RowKey;
use crate::spec::states::State;
use crate::store::Claimed;

/// The largest number of rows, or groups, in one call.
const MOST: u32 = 10_000;

/// A request for rows.
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
    /// Rows and groups that are not taken, because the table refused to write them.
    pub(crate) excluded: Excluded,
    /// If set, only the rows with these keys are taken.
    pub(crate) only: Option<Vec<RowKey>>,
}

/// Rows, and groups if the spec groups rows, that a claimer skips for a time.
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
    /// The default lease of a claim.
    pub const DEFAULT_LEASE: Duration = Duration::from_secs(30);

    /// Requests at most `limit` rows, or groups if the spec groups rows. The maximum is 10,000.
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

    /// Sets the time after which the lease ends unless it is renewed, in whole milliseconds, at least one. If a row has
    /// its own timeout, the timeout is its lease.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// Restricts the request to one queue. The default is all queues.
    #[must_use]
    pub fn queue(mut self, queue: impl Into<Arc<str>>) -> Self {
        self.queue = Some(queue.into());
        self
    }

    /// Restricts the request to rows in one of these states, which the spec must allow to be taken.
    #[must_use]
    pub fn from<S: Into<State>>(mut self, states: impl IntoIterator<Item = S>) -> Self {
        self.from = states.into_iter().map(Into::into).collect();
        self
    }

    /// Restricts the request to rows behind `cursor`, which is the position of a pass over the table.
    #[must_use]
    pub fn after(mut self, cursor: Option<PassCursor>) -> Self {
        self.after = cursor;
        self
    }

    /// Returns the largest number of rows, or groups, to take.
    #[must_use]
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Returns an error if the request does not fit the spec.
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

/// The position of a pass over the table, in the order in which rows are taken. The pass does not offer earlier rows
/// again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassCursor(pub(crate) Arc<[String]>);

/// The result of a call that takes rows.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Taken {
    /// The claims in the order in which they are to be done.
    pub claims: Vec<Claimed>,
    /// The number of claimable rows or groups that the statement saw but that another transaction had locked.
    pub skipped: u64,
    /// The position of the pass, for [`after`](Take::after) of the next call. `None` if the statement saw no row.
    pub cursor: Option<PassCursor>,
    /// Claimable rows that the table refused to write. The cursor lies behind them, so the next call reaches the other
    /// rows.
    pub refused: Vec<RefusedRow>,
}

/// A row that the table refused to write, for example because it breaks a constraint that was added `NOT VALID`,
/// or because a trigger raised an error.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RefusedRow {
    /// The key of the row, or of the group's first row if the spec groups rows.
    pub key: RowKey,
    /// The group of the row, if the spec groups rows. No row of the group was taken.
    pub group: Option<Arc<str>>,
    /// The error of the server.
    pub error: Arc<ClaimError>,
}
