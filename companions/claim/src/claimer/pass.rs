//! Passes, which are scans over the table, and the decision whether work is left.

use crate::store::{PassCursor, Taken};

/// A pass over the table in order, with a cursor. One pass consists of several calls of
/// [`take`](crate::ClaimStore::take). It offers each row at most once, so a row that is put back or skipped does not
/// block the rows behind it.
///
/// A worker must only idle after a whole pass *from the start* that found and skipped no rows. After any other pass it
/// starts a new one. Another reason for a new pass is that rows can become visible out of order, because a transaction
/// with a smaller id can commit later.
///
/// ```
/// use leasehold_claim::{Pass, PassEnd};
///
/// let mut pass = Pass::new();
/// // ... take with `pass.cursor()`, report with `pass.record(&taken)`, until nothing is taken:
/// assert_eq!(pass.end(false), PassEnd::Clean);
/// pass.skipped(1);
/// assert_eq!(pass.end(false), PassEnd::Skipped);
/// ```
#[derive(Clone, Debug, Default)]
pub struct Pass {
    cursor: Option<PassCursor>,
    found: u64,
    skipped: u64,
    returned: u64,
}

/// The result of a pass, which determines the worker's next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // A worker must handle each result, so a new one has to break its `match`.
pub enum PassEnd {
    /// The pass found work: start the next one at once.
    Found,
    /// The pass found no work but skipped rows that other workers have claimed: start the next one after a pause.
    Skipped,
    /// There is no work: idle until woken.
    Clean,
}

impl Pass {
    /// Builds a pass that starts before the first row.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the cursor, which is the position of the pass, or `None` at the start.
    #[must_use]
    pub fn cursor(&self) -> Option<PassCursor> {
        self.cursor.clone()
    }

    /// Adds the claims and the cursor of a reply of the store.
    pub fn record(&mut self, taken: &Taken) {
        self.found += taken.claims.len() as u64;
        self.skipped += taken.skipped;
        if let Some(cursor) = &taken.cursor {
            self.cursor = Some(cursor.clone());
        }
    }

    /// Returns whether the caller must query [`pending`](crate::ClaimStore::pending) before [`end`](Self::end). This is
    /// so only if the pass found and skipped no rows.
    #[must_use]
    pub fn must_ask(&self) -> bool {
        self.found == 0 && self.skipped == 0 && self.returned == 0
    }

    /// Records claims of this or an earlier pass that were put back since the last pass ended. A pass makes progress
    /// only if it finds more claims than were put back.
    pub fn returned(&mut self, claims: u64) {
        self.returned += claims;
    }

    /// Returns the number of claims that the pass found minus the number put back.
    #[must_use]
    pub fn net_claims(&self) -> u64 {
        self.found.saturating_sub(self.returned)
    }

    /// Adds rows that the caller put back, or could not take because they were locked.
    pub fn skipped(&mut self, rows: u64) {
        self.skipped += rows;
    }

    /// Ends the pass, whose last call found nothing behind the cursor, and starts the next one. `pending` states
    /// whether the store has rows that would be claimable if other workers had not claimed them.
    pub fn end(&mut self, pending: bool) -> PassEnd {
        let pass = std::mem::take(self);
        if pass.net_claims() > 0 {
            PassEnd::Found
        } else if pass.must_ask() && !pending {
            PassEnd::Clean
        } else {
            PassEnd::Skipped
        }
    }
}
