//! Passes over the table, and when there is nothing left to do.

use crate::store::{PassCursor, Taken};

/// A pass over the table in order, with a cursor: what was seen in this pass is not offered again
/// in it, so that a row which is put back or skipped does not keep the rows behind it waiting.
///
/// A worker may only idle after a whole pass *from the start* that found nothing and skipped nothing; after
/// any other pass it begins anew. Rows do not always become visible in order (a transaction that took the
/// smaller id may commit later), which is another reason to go back to the start.
///
/// ```
/// use leasehold_claim::{Pass, PassEnd};
///
/// let mut pass = Pass::new();
/// // ... take with `pass.cursor()`, tell `pass.record(&taken)`, until nothing is taken:
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

/// How a pass ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // What a worker has to tell apart.
pub enum PassEnd {
    /// It found work: begin anew at once.
    Found,
    /// It found none, but passed over some that others are at: begin anew after a pause.
    Skipped,
    /// There is none: idle until woken.
    Clean,
}

impl Pass {
    /// A pass that begins at the start.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Where it has got to; `None` at the start.
    #[must_use]
    pub fn cursor(&self) -> Option<PassCursor> {
        self.cursor.clone()
    }

    /// Takes note of what the store answered.
    pub fn record(&mut self, taken: &Taken) {
        self.found += taken.claims.len() as u64;
        self.skipped += taken.skipped;
        if let Some(cursor) = &taken.cursor {
            self.cursor = Some(cursor.clone());
        }
    }

    /// Whether the store has to be asked, before the end, if rows are pending: only after a pass that found
    /// nothing and knows of nothing that it passed over.
    #[must_use]
    pub fn must_ask(&self) -> bool {
        self.found == 0 && self.skipped == 0 && self.returned == 0
    }

    /// Takes note of claims that were found in this or an earlier pass and put back since the last one ended.
    /// A pass that found no more than that many got nothing done.
    pub fn returned(&mut self, claims: u64) {
        self.returned += claims;
    }

    /// How many more claims were found than were put back.
    #[must_use]
    pub fn net_claims(&self) -> u64 {
        self.found.saturating_sub(self.returned)
    }

    /// Takes note of rows that were claimed and put back, or found locked.
    pub fn skipped(&mut self, rows: u64) {
        self.skipped += rows;
    }

    /// Ends the pass, whose last call found nothing behind the cursor, and begins the next at the start.
    /// `pending` says whether the store sees rows that could be taken but for others who are at them.
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
