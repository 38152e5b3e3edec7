//! A store of claims with one fault.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_claim::{
    ClaimError, ClaimRef, ClaimSpec, ClaimStore, Claimed, MemoryClaims, MemoryRow, Outcome, OwnerToken,
    Renewal, RowKey, Settled, State, Stats, Swept, Take, Taken, TakenRow,
};
use leasehold_claim::{Sealed, Upkeep, Wake};
use serde_json::{Value, json};

use super::hold::HoldStore;
use super::memory::Front;

macro_rules! faults {
    ($( $name:ident, )*) => {
        /// The fault of a mutant.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Fault { $( $name, )* }

        impl Fault {
            pub const ALL: &[Self] = &[$( Self::$name, )*];
        }
    };
}

faults! {
    TakesOneMore, IgnoresTheCursor, IgnoresTheQueue, GivesARowTwice, LosesAClaim, ReversesTheOrder, ReusesOwners,
    EpochNeverGrows, IgnoresPreconditions, TwoWorkersInAGroup, CountsNothingSkipped, DoesNotCountAttempts,
    TakesUsedUpRows, TakesBeforeItIsReady, NeverPending, AlwaysPending, SettleIgnoresTheEpoch,
    SettleIgnoresTheOwner, SettleIgnoresBoth, SettlesAPart, SettlesTwice, RefundsARetry, PutBackCounts,
    PutBackLosesTheRow, PutBackMeansDone, RetryForgetsThePause, ForgetsTheMessage, FailedMeansPutBack,
    KeepsTheOwner, AllowsEveryTransition, HidesTheEpoch, ExhaustedIsForgotten, RenewsEverything, RenewsNothing,
    SweepsLeasesThatLast, SweepKeepsTheEpoch, SweepIgnoresTheLimit, SweepReturnsUsedUpRows, ListsNothingTaken,
    ListsNothingBlocked, RequeuesEverything, RequeueLeavesTheState, RequeueAddsNoAttempt, RequeueKeepsTheTime,
    RequeueIgnoresTheLimit, CancelsSettledRows, CancelForgetsTheMessage, CancelSparesWhatIsTaken,
    CountsPastTheLimit, CountsOtherQueues, CountsNothingTaken, CountsForLaterAsReady,
    CountsBlockedAsWaiting, CountsNothingGivenUp, TellsNoAge, PurgesUnsettledRows, PurgesTooEarly,
    PurgeIgnoresTheLimit, LosesWakeUps, WakesAllTheTime, HoldCommitsOnDrop, HoldRollbackCommits,
    HoldCommitForgets, HoldRollbackUsesUpAttempts, HoldSettlesTwice, HoldChangesTheState, ForgetsWhoSettled,
    HoldForgetsWhoSettled, RemembersWhoSettledBefore,
}

/// A store that adds the fault in front of the table.
pub struct Mutant {
    fault: Fault,
    memory: Arc<Memory>,
}

/// State shared by the clients of one mutant.
#[derive(Debug, Default)]
struct Memory {
    /// The last claim, for faults that return a claim twice.
    given: Mutex<Option<Claimed>>,
    settled: Mutex<Option<Settled>>,
}

impl Mutant {
    pub fn new(fault: Fault) -> Self {
        Self { fault, memory: Arc::default() }
    }
}

impl Front for Mutant {
    fn client(&self, claims: &MemoryClaims) -> Arc<dyn ClaimStore> {
        Arc::new(Faulty { fault: self.fault, claims: claims.clone(), memory: self.memory.clone() })
    }

    fn holder(&self, claims: &MemoryClaims) -> Arc<dyn HoldStore> {
        Arc::new(Faulty { fault: self.fault, claims: claims.clone(), memory: self.memory.clone() })
    }
}

#[derive(Debug)]
pub(super) struct Faulty {
    pub(super) fault: Fault,
    pub(super) claims: MemoryClaims,
    memory: Arc<Memory>,
}

impl std::fmt::Display for Faulty {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} with the fault {:?}", self.claims, self.fault)
    }
}

impl Faulty {
    /// Writes a column of a row if the row exists and is not locked.
    fn write(&self, key: &RowKey, column: &str, value: impl Into<Value>) {
        let _ = self.claims.update(key, column, value.into());
    }

    fn add_attempts(&self, key: &RowKey, more: i32) {
        if let Some(left) = self.claims.row(key).and_then(|row| row.attempts_left()) {
            self.write(key, "attempts_left", left + more);
        }
    }

    /// Takes rows while this column is removed from the rows for which `hide` is true.
    async fn take_without(
        &self,
        take: &Take,
        column: &str,
        hide: impl Fn(&MemoryRow) -> bool,
    ) -> Result<Taken, ClaimError> {
        let before: Vec<MemoryRow> = self.claims.rows().into_iter().filter(hide).collect();
        for row in &before {
            self.write(row.key(), column, Value::Null);
        }
        let mut taken = self.claims.take(take).await?;
        for row in &before {
            let value = match column {
                "kind" => row.kind().map(Value::from),
                "entity" => row.group().map(|group| Value::from(&*group)),
                _ => None,
            };
            self.write(row.key(), column, value.unwrap_or_default());
            for claimed in taken.claims.iter_mut().flat_map(|claimed| &mut claimed.rows) {
                if claimed.key == *row.key() {
                    claimed.kind = row.kind().map(Into::into);
                }
            }
        }
        Ok(taken)
    }

    /// Returns the claim with the table's current owner or epoch.
    fn forged(&self, claim: &ClaimRef, owner: bool, epoch: bool) -> ClaimRef {
        let mut forged = claim.clone();
        let current = |key: &RowKey| self.claims.row(key);
        if owner && let Some(now) = claim.rows.first().and_then(|(key, _)| current(key)?.owner()) {
            forged.owner = now;
        }
        if epoch {
            let rows = claim.rows.iter();
            let now = |key: &RowKey, was: i64| current(key).map_or(was, |row| row.epoch());
            forged.rows = rows.map(|(key, was)| (key.clone(), now(key, *was))).collect();
        }
        forged
    }

    async fn settle_one(&self, claim: &ClaimRef, outcome: &Outcome) -> Result<Settled, ClaimError> {
        let settle = |claim: ClaimRef, outcome: Outcome| async move {
            let answers = self.claims.settle(&[(claim, outcome)]).await?;
            answers.into_iter().next().expect("one answer")
        };
        let outcome = match (self.fault, outcome) {
            (Fault::PutBackMeansDone, Outcome::PutBack) => Outcome::Done,
            (Fault::PutBackCounts, Outcome::PutBack) => Outcome::Retry { error: None, after: Duration::ZERO },
            (Fault::FailedMeansPutBack, Outcome::Failed(_)) => Outcome::PutBack,
            (Fault::RetryForgetsThePause, Outcome::Retry { error, .. }) => {
                Outcome::Retry { error: error.clone(), after: Duration::ZERO }
            }
            (_, outcome) => outcome.clone(),
        };
        let forged = match self.fault {
            Fault::SettleIgnoresTheEpoch => self.forged(claim, false, true),
            Fault::SettleIgnoresTheOwner => self.forged(claim, true, false),
            Fault::SettleIgnoresBoth => self.forged(claim, true, true),
            _ => claim.clone(),
        };
        let mut answer = settle(forged, outcome.clone()).await;
        match (self.fault, &outcome, &mut answer) {
            (Fault::SettlesAPart, _, Err(ClaimError::Superseded { .. })) if claim.rows.len() > 1 => {
                for row in claim.rows.iter() {
                    let mut part = claim.clone();
                    part.rows = [row.clone()].into();
                    let _ = settle(part, outcome.clone()).await;
                }
            }
            (Fault::SettlesTwice, _, Err(ClaimError::Superseded { .. })) => {
                if let Some(settled) = self.memory.settled.lock().unwrap().clone() {
                    answer = Ok(settled);
                }
            }
            (Fault::AllowsEveryTransition, _, Err(ClaimError::IllegalTransition { to, .. })) => {
                let to = to.to_string();
                answer = settle(claim.clone(), Outcome::PutBack).await;
                self.write(&claim.rows[0].0, "status", to);
            }
            (Fault::HidesTheEpoch, _, Err(ClaimError::Superseded { current_epoch, .. })) => {
                *current_epoch = None;
            }
            (Fault::RefundsARetry, Outcome::Retry { .. }, Ok(settled)) if settled.exhausted.is_empty() => {
                claim.rows.iter().for_each(|(key, _)| self.add_attempts(key, 1));
            }
            (Fault::PutBackLosesTheRow, Outcome::PutBack, Ok(_)) => {
                let _ = self.claims.delete(&claim.rows[0].0);
            }
            (Fault::ForgetsTheMessage, _, Ok(_)) => self.write(&claim.rows[0].0, "error", Value::Null),
            (Fault::KeepsTheOwner, _, Ok(_)) => {
                self.write(&claim.rows[0].0, "owner", claim.owner.to_string());
            }
            (Fault::ForgetsWhoSettled, _, Ok(_)) => {
                self.write(&claim.rows[0].0, "settled_by", Value::Null);
            }
            (Fault::ExhaustedIsForgotten, _, Ok(settled)) => {
                for key in std::mem::take(&mut settled.exhausted) {
                    self.write(&key, "status", "new");
                }
            }
            _ => {}
        }
        answer.iter().for_each(|settled| *self.memory.settled.lock().unwrap() = Some(settled.clone()));
        answer
    }
}

impl Sealed for Faulty {}

#[async_trait]
impl ClaimStore for Faulty {
    fn spec(&self) -> &ClaimSpec {
        ClaimStore::spec(&self.claims)
    }

    async fn take(&self, take: &Take) -> Result<Taken, ClaimError> {
        let rows = || self.claims.rows().into_iter();
        let mut taken = match self.fault {
            Fault::IgnoresTheCursor => self.claims.take(&take.clone().after(None)).await?,
            Fault::IgnoresTheQueue if take.limit() > 0 => {
                self.claims.take(&Take::up_to(take.limit())).await?
            }
            Fault::IgnoresPreconditions => self.take_without(take, "kind", |_| true).await?,
            Fault::TwoWorkersInAGroup => {
                self.take_without(take, "entity", |row| row.owner().is_some()).await?
            }
            Fault::TakesUsedUpRows => {
                let used = |row: &MemoryRow| {
                    row.attempts_left().is_some_and(|left| left <= 0) && row.owner().is_none()
                };
                rows().filter(used).for_each(|row| self.write(row.key(), "attempts_left", 1));
                self.claims.take(take).await?
            }
            Fault::TakesBeforeItIsReady => {
                rows().for_each(|row| self.write(row.key(), "ready_at", Value::Null));
                self.claims.take(take).await?
            }
            _ => self.claims.take(take).await?,
        };
        match self.fault {
            Fault::TakesOneMore if !taken.claims.is_empty() => {
                taken.claims.extend(self.claims.take(&Take::up_to(1)).await?.claims);
            }
            Fault::GivesARowTwice => {
                let mut given = self.memory.given.lock().unwrap();
                match (taken.claims.first(), given.take()) {
                    (Some(first), _) => *given = Some(first.clone()),
                    (None, Some(again)) if self.claims.row(&again.rows[0].key).is_some() => {
                        taken.claims.push(again);
                    }
                    _ => {}
                }
            }
            Fault::LosesAClaim if taken.claims.len() > 1 => drop(taken.claims.pop()),
            Fault::ReversesTheOrder => taken.claims.reverse(),
            Fault::CountsNothingSkipped => taken.skipped = 0,
            _ => {}
        }
        for claimed in &mut taken.claims {
            for row in &mut claimed.rows {
                match self.fault {
                    Fault::ReusesOwners => {
                        claimed.claim.owner = OwnerToken::Uuid(uuid::Uuid::nil());
                        self.write(&row.key, "owner", json!(uuid::Uuid::nil().to_string()));
                    }
                    Fault::EpochNeverGrows => {
                        row.epoch = 1;
                        self.write(&row.key, "epoch", 1);
                    }
                    Fault::DoesNotCountAttempts => {
                        self.add_attempts(&row.key, 1);
                        row.attempts_left = row.attempts_left.map(|left| left + 1);
                    }
                    _ => {}
                }
            }
            claimed.claim.rows = claimed.rows.iter().map(|row| (row.key.clone(), row.epoch)).collect();
        }
        Ok(taken)
    }

    async fn pending(&self, take: &Take) -> Result<bool, ClaimError> {
        match self.fault {
            Fault::NeverPending => Ok(false),
            Fault::AlwaysPending => Ok(true),
            _ => self.claims.pending(take).await,
        }
    }

    async fn renew(&self, claims: &[ClaimRef], lease: Duration) -> Result<Vec<Renewal>, ClaimError> {
        let before = self.claims.rows();
        let answers = self.claims.renew(claims, lease).await?;
        match self.fault {
            Fault::RenewsEverything => return Ok(vec![Renewal::Renewed; answers.len()]),
            Fault::RenewsNothing => {
                for row in before {
                    let _ = self.claims.delete(row.key());
                    let _ = self.claims.insert(row);
                }
            }
            _ => {}
        }
        Ok(answers)
    }

    async fn settle(
        &self,
        settlements: &[(ClaimRef, Outcome)],
    ) -> Result<Vec<Result<Settled, ClaimError>>, ClaimError> {
        let mut answers = Vec::new();
        for (claim, outcome) in settlements {
            answers.push(self.settle_one(claim, outcome).await);
        }
        Ok(answers)
    }

    async fn sweep(&self, limit: u32) -> Result<Swept, ClaimError> {
        if self.fault == Fault::SweepsLeasesThatLast {
            self.claims.rows().iter().for_each(|row| drop(self.claims.expire(row.key())));
        }
        let limit = if self.fault == Fault::SweepIgnoresTheLimit { 1000 } else { limit };
        let mut swept = self.claims.sweep(limit).await?;
        match self.fault {
            Fault::SweepKeepsTheEpoch => {
                for key in &swept.returned {
                    let epoch = self.claims.row(key).map_or(0, |row| row.epoch());
                    self.write(key, "epoch", epoch - 1);
                }
            }
            Fault::RemembersWhoSettledBefore => {
                for key in &swept.returned {
                    self.write(key, "settled_by", "somebody");
                }
            }
            Fault::SweepReturnsUsedUpRows => {
                for key in std::mem::take(&mut swept.exhausted) {
                    self.write(&key, "status", "new");
                    swept.returned.push(key);
                }
            }
            _ => {}
        }
        Ok(swept)
    }

    async fn taken(&self, limit: u32) -> Result<Vec<TakenRow>, ClaimError> {
        let taken = self.claims.taken(limit).await?;
        Ok(if self.fault == Fault::ListsNothingTaken { Vec::new() } else { taken })
    }

    async fn exhausted(&self, limit: u32) -> Result<Vec<RowKey>, ClaimError> {
        self.claims.exhausted(limit).await
    }

    async fn blocked(&self, limit: u32) -> Result<Vec<RowKey>, ClaimError> {
        let blocked = self.claims.blocked(limit).await?;
        Ok(if self.fault == Fault::ListsNothingBlocked { Vec::new() } else { blocked })
    }

    async fn stats(&self, take: &Take) -> Result<Stats, ClaimError> {
        let asked = match self.fault {
            Fault::CountsPastTheLimit => Take::up_to(1000),
            Fault::CountsOtherQueues => Take::up_to(take.limit()),
            _ => take.clone(),
        };
        let mut stats = self.claims.stats(&asked).await?;
        match self.fault {
            Fault::CountsNothingTaken => stats.taken = 0,
            Fault::CountsForLaterAsReady => stats.ready += std::mem::take(&mut stats.later),
            Fault::CountsBlockedAsWaiting => stats.waiting += std::mem::take(&mut stats.blocked),
            Fault::CountsNothingGivenUp => (stats.failed, stats.exhausted) = (0, 0),
            Fault::TellsNoAge => stats.oldest = None,
            _ => {}
        }
        Ok(stats)
    }

    async fn cancel(&self, rows: &[RowKey], message: &str) -> Result<u64, ClaimError> {
        let before: Vec<_> = rows.iter().filter_map(|key| self.claims.row(key)).collect();
        let count = self.claims.cancel(rows, message).await?;
        match self.fault {
            Fault::CancelsSettledRows => rows.iter().for_each(|key| self.write(key, "status", "error")),
            Fault::CancelForgetsTheMessage => {
                rows.iter().for_each(|key| self.write(key, "error", Value::Null));
            }
            Fault::CancelSparesWhatIsTaken => {
                for row in before.into_iter().filter(|row| row.owner().is_some()) {
                    let _ = self.claims.delete(row.key());
                    let _ = self.claims.insert(row);
                }
            }
            _ => {}
        }
        Ok(count)
    }

    async fn requeue(&self, rows: &[RowKey], attempts: u32) -> Result<u64, ClaimError> {
        let count = self.claims.requeue(rows, attempts).await?;
        match self.fault {
            Fault::RequeuesEverything => {
                rows.iter().for_each(|key| self.write(key, "attempts_left", attempts));
                return Ok(rows.len() as u64);
            }
            Fault::RequeueLeavesTheState => {
                rows.iter().for_each(|key| self.write(key, "status", "exhausted"));
            }
            Fault::RequeueAddsNoAttempt => {
                rows.iter().for_each(|key| self.write(key, "attempts_left", 0));
            }
            Fault::RequeueKeepsTheTime => rows.iter().for_each(|key| {
                self.write(key, "ready_at", "2999-01-01T00:00:00Z");
            }),
            _ => {}
        }
        Ok(count)
    }

    async fn requeue_all(&self, from: &State, limit: u32, attempts: u32) -> Result<u64, ClaimError> {
        let limit = if self.fault == Fault::RequeueIgnoresTheLimit { 1000 } else { limit };
        self.claims.requeue_all(from, limit, attempts).await
    }

    async fn purge(&self, limit: u32) -> Result<u64, ClaimError> {
        match self.fault {
            Fault::PurgesTooEarly => self.claims.clock().advance(Duration::from_secs(40 * 86_400)),
            Fault::PurgesUnsettledRows => {
                let waits = |row: &MemoryRow| row.state().map(State::as_str) == Some("new");
                let rows = self.claims.rows();
                rows.iter().filter(|row| waits(row)).for_each(|row| drop(self.claims.delete(row.key())));
            }
            _ => {}
        }
        self.claims.purge(if self.fault == Fault::PurgeIgnoresTheLimit { 1000 } else { limit }).await
    }

    async fn upkeep(&self, limit: u32) -> Result<Upkeep, ClaimError> {
        self.claims.upkeep(limit).await
    }

    async fn listen(&self) -> Result<Box<dyn Wake>, ClaimError> {
        let wake = self.claims.listen().await?;
        Ok(match self.fault {
            Fault::LosesWakeUps => Box::new(Deaf),
            Fault::WakesAllTheTime => Box::new(Nervous),
            _ => wake,
        })
    }
}

#[derive(Debug)]
struct Deaf;

#[async_trait]
impl Wake for Deaf {
    async fn woken(&mut self) -> Result<(), ClaimError> {
        std::future::pending().await
    }
}

#[derive(Debug)]
struct Nervous;

#[async_trait]
impl Wake for Nervous {
    async fn woken(&mut self) -> Result<(), ClaimError> {
        Ok(())
    }
}
