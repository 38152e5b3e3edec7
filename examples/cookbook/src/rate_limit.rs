//! Calls a service that allows N calls in a window, each for a batch of rows: `docs/cookbook/rate-limit.md`.

use std::time::Duration;

use leasehold_claim::{
    ClaimError, ClaimSpec, ClaimStore as _, Claimed, Outcome, PgClaims, States, Table, Take,
};
use tokio::time::{Instant, sleep_until};

/// The page with this recipe and its SQL.
pub const PAGE: &str = include_str!("../../../docs/cookbook/rate-limit.md");

/// The limit of a service. The number of calls that it allows in a window is the number of rows in the table of slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // Exhaustive, because these three values say all.
pub struct RateLimit {
    /// The length of the window in which the service counts calls.
    pub window: Duration,
    /// The time for one call, from taking its slot to the answer.
    pub answer: Duration,
    /// The largest number of rows in one call.
    pub batch: u32,
}

/// The answer of the service.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // Exhaustive, because these three cases are complete.
pub enum Answer {
    /// All rows were accepted.
    Done,
    /// Status 429: nothing was accepted, try again after this time.
    TooMany(Duration),
    /// Any other failure.
    Failed(String),
}

/// A service that accepts batches.
pub trait Api: Sync {
    /// Sends the rows of `batch` in one call.
    fn call(&self, batch: &[Claimed]) -> impl Future<Output = Answer> + Send;
}

/// The result of [`call_once`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // Exhaustive, because these three cases are complete.
pub enum Called {
    /// One call was made, for this number of rows.
    Batch(usize),
    /// No call is allowed yet, because all slots are taken. Pause and try again.
    NoSlot,
    /// No row is ready. Pause and try again.
    NoRows,
}

/// Describes the table of slots. A call holds a slot while it runs and for a window afterwards. An ended lease needs no
/// sweep, because it counts as ended on each read.
///
/// # Errors
///
/// None that depends on the caller.
pub fn slots() -> Result<ClaimSpec, ClaimError> {
    ClaimSpec::builder(Table::new("api_slot")?)
        .state("state", States::text(["free"], "retired").taken("calling"))
        .lease_columns("owner", "epoch", "lease_until")
        .ready_at("ready_at")
        .expire_on_read()
        .notify_on_insert(false)
        .build()
}

/// Describes the work, which has five attempts.
///
/// # Errors
///
/// None that depends on the caller.
pub fn mails() -> Result<ClaimSpec, ClaimError> {
    ClaimSpec::builder(Table::new("mail")?)
        .state("state", States::text(["new"], "sent").taken("sending").exhausted("unsent"))
        .lease_columns("owner", "epoch", "lease_until")
        .attempts("attempts_left")
        .max_attempts(5)
        .ready_at("ready_at")
        .error("error")
        .work(["recipient"])
        .expire_on_read()
        .notify_on_insert(false)
        .build()
}

/// Makes at most one call, if a slot is free and rows are ready.
///
/// # Errors
///
/// - [`Store`](ClaimError::Store) if the database cannot answer. A slot and rows that were taken come back at the end of
///   their leases.
/// - [`Superseded`](ClaimError::Superseded) if the process was stopped for longer than the leases.
///
/// # Cancel safety
///
/// If dropped, the call might have been made. Slot and rows come back at the end of their leases.
pub async fn call_once(
    slots: &PgClaims,
    rows: &PgClaims,
    limit: &RateLimit,
    api: &impl Api,
) -> Result<Called, ClaimError> {
    // Before the lease of the slot begins: calls must not start in the last window of the lease.
    let until = Instant::now() + limit.answer;
    let lease = limit.answer + limit.window;
    let slot = slots.take(&Take::up_to(1).lease(lease)).await?.claims.into_iter().next();
    let Some(slot) = slot else { return Ok(Called::NoSlot) };
    let batch = rows.take(&Take::up_to(limit.batch).lease(lease)).await?.claims;
    if batch.is_empty() {
        slots.settle_one(&slot.claim, Outcome::PutBack).await?;
        return Ok(Called::NoRows);
    }
    let answer = tokio::select! {
        biased;
        () = sleep_until(until) => Answer::Failed(format!("no answer in {:?}", limit.answer)),
        answer = api.call(&batch) => answer,
    };
    let (end, pause) = match answer {
        Answer::Done => (Outcome::Done, limit.window),
        Answer::TooMany(pause) => (Outcome::Snooze(pause), limit.window.max(pause)),
        Answer::Failed(error) => (Outcome::Retry { error: Some(error), after: limit.window }, limit.window),
    };
    let freed = slots.settle_one(&slot.claim, Outcome::Snooze(pause)).await;
    let ends: Vec<_> = batch.iter().map(|claimed| (claimed.claim.clone(), end.clone())).collect();
    for (settled, (claim, end)) in rows.settle(&ends).await?.into_iter().zip(&ends) {
        match settled {
            // A batch skips a row that the take of another process has locked briefly. Alone, it waits.
            Err(ClaimError::Busy { .. }) => rows.settle_one(claim, end.clone()).await?,
            settled => settled?,
        };
    }
    freed?;
    Ok(Called::Batch(ends.len()))
}
