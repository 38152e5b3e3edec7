//! Passes over the table with held claims.

use crate::error::ClaimError;
use crate::pass::{Pass, PassEnd};
use crate::store::Take;

use super::{PgHeld, PgHold};

/// The loop of a worker with held claims: each [`next`](Self::next) opens a transaction with the next rows
/// behind the line; what is locked, or waits for what is locked, is passed over and comes again in a later
/// pass.
///
/// ```no_run
/// use std::time::Duration;
/// use leasehold_claim::{HeldStep, Outcome, PassEnd, PgHeld, Take};
///
/// # async fn work(held: PgHeld) -> Result<(), leasehold_claim::ClaimError> {
/// let mut pass = held.passes(Take::up_to(1));
/// loop {
///     match pass.next().await? {
///         HeldStep::Hold(mut hold) => {
///             let claim = hold.taken().claims[0].claim.clone();
///             // ... the work, on `hold.connection()` ...
///             hold.settle(&claim, &Outcome::Done).await?;
///             hold.commit().await?;
///         }
///         HeldStep::End(PassEnd::Found) => {}
///         HeldStep::End(PassEnd::Skipped) => tokio::time::sleep(Duration::from_millis(50)).await,
///         HeldStep::End(PassEnd::Clean) => break, // Idle until woken.
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct HeldPass {
    held: PgHeld,
    take: Take,
    pass: Pass,
}

/// What comes next.
#[derive(Debug)]
#[allow(clippy::exhaustive_enums)] // What a worker has to tell apart.
pub enum HeldStep {
    /// Rows to work on, in their transaction.
    Hold(PgHold),
    /// Nothing is left behind the line: the pass has ended, and the next begins at the start.
    End(PassEnd),
}

impl PgHeld {
    /// Passes over the rows of `take`, whose own line does not count.
    #[must_use]
    pub fn passes(&self, take: Take) -> HeldPass {
        HeldPass { held: self.clone(), take, pass: Pass::new() }
    }
}

impl HeldPass {
    /// The next rows behind the line, or how the pass has ended. It ended clean only if nothing was found and
    /// nothing passed over since the start of the table, and there is no row that others are at: they may
    /// crash, and nobody would say so.
    ///
    /// # Errors
    ///
    /// As [`PgHeld::begin`], without `Busy`; the line stays where it was.
    ///
    /// # Cancel safety
    ///
    /// As [`PgHeld::begin`].
    pub async fn next(&mut self) -> Result<HeldStep, ClaimError> {
        let take = self.take.clone().after(self.pass.line());
        let (hold, taken) = self.held.begin_or_pass(&take).await?;
        if let Some(hold) = hold {
            self.pass.saw(hold.taken());
            return Ok(HeldStep::Hold(hold));
        }
        self.pass.saw(&taken);
        let pending = self.held.pending(&self.take).await?;
        Ok(HeldStep::End(self.pass.end(pending)))
    }

    /// Notes that rows of the last step were put back or given up, so that the pass does not end clean.
    pub fn skipped(&mut self, rows: u64) {
        self.pass.skipped(rows);
    }
}
