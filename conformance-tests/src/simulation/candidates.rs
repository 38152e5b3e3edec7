//! Candidates: callers whose sections are terms of an election.

mod watched;

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use leasehold_api::{BoxFuture, Error, ErrorKind, Lock, LockKey};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use self::watched::WatchedLock;
use super::caller::Caller;
use super::client::InTurn;
use super::coverage::Situation;
use super::disturbance::Disturbance as D;
use super::judge::{BodyState, Judge};
use super::table::Table;

/// An election whose candidates take part in schedules. This package knows no election, so that authors of stores
/// depend on none.
pub trait Candidate: Send + Sync {
    /// Campaigns for the environment's key until a term ends the campaign.
    ///
    /// # Errors
    ///
    /// The error of the lock that ended the campaign, or of the release after the last term.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the candidacy or the term ends. The simulation drops some campaigns.
    fn campaign(&self, environment: CandidateEnvironment) -> BoxFuture<'static, Result<(), Error>>;
}

/// The environment of one campaign: its lock and key, and the judge, to which it reports. Drop it after the election,
/// because the judge stops watching the campaign then.
pub struct CandidateEnvironment {
    lock: Arc<dyn Lock>,
    key: LockKey,
    seed: u64,
    until: Instant,
    judge: Arc<Judge>,
    campaign: u64,
}

impl CandidateEnvironment {
    /// Returns the lock of the client. The judge watches `acquire`. The other calls for a grant are unsupported.
    #[must_use]
    pub fn lock(&self) -> Arc<dyn Lock> {
        Arc::clone(&self.lock)
    }

    /// Returns the key.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        &self.key
    }

    /// Returns the seed of the decisions of this campaign.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Returns whether the disturbances have ended. The next term must then end the campaign. The judge reports a
    /// candidate that is not elected in time.
    #[must_use]
    pub fn is_over(&self) -> bool {
        Instant::now() >= self.until
    }

    /// Sets the function by which the judge checks whether the campaign shows that it leads.
    pub fn shows(&self, is_leading: impl Fn() -> bool + Send + 'static) {
        self.judge.campaign_shows(self.campaign, Box::new(is_leading));
    }

    /// Makes the judge check that a request to release ends each term whose body is dropped.
    pub fn steps_down_if_asked(&self) {
        self.judge.campaign_steps_down_if_asked(self.campaign);
    }

    /// Runs the body of a term, which the judge checks before each step. `is_dropped` is set if the end of the term
    /// must drop the body.
    ///
    /// # Errors
    ///
    /// The error of the body.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the body is dropped where it is.
    pub async fn body<T, E>(
        &self,
        is_dropped: bool,
        body: impl Future<Output = Result<T, E>>,
    ) -> Result<T, E> {
        let mut running = RunningBody { environment: self, ends_as: BodyState::Dropped };
        let mut body = pin!(body);
        let result = poll_fn(|cx| {
            self.judge.body_steps(self.campaign, is_dropped);
            body.as_mut().poll(cx)
        });
        let result = result.await;
        running.ends_as = BodyState::Returned;
        if result.is_err() {
            self.judge.note(Situation::TermFailed);
        }
        result
    }
}

impl fmt::Debug for CandidateEnvironment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CandidateEnvironment").field("key", &self.key).finish_non_exhaustive()
    }
}

impl Drop for CandidateEnvironment {
    fn drop(&mut self) {
        self.judge.campaign_ended(self.campaign);
    }
}

/// A body that was polled. Its end is recorded.
struct RunningBody<'a> {
    environment: &'a CandidateEnvironment,
    ends_as: BodyState,
}

impl Drop for RunningBody<'_> {
    fn drop(&mut self) {
        self.environment.judge.body_ended(self.environment.campaign, self.ends_as);
    }
}

impl Caller {
    /// Starts the caller: as a candidate for a key, or with direct calls.
    pub(super) fn spawn(self, candidacy: Option<(Arc<dyn Candidate>, LockKey)>) -> JoinHandle<()> {
        let turns = Arc::clone(&self.turns);
        match candidacy {
            Some((candidate, key)) => {
                tokio::spawn(InTurn::new(&turns, async move { self.campaign(&*candidate, &key).await }))
            }
            None => tokio::spawn(InTurn::new(&turns, self.run())),
        }
    }

    async fn campaign(mut self, candidate: &dyn Candidate, key: &LockKey) {
        for _ in 0..self.dice.u8(1..4) {
            let pause = self.ms(&[0, 30, 300, 2_000]);
            sleep(pause).await;
            if Instant::now() >= self.until {
                return;
            }
            let patience = (self.dice.u8(..4) == 0).then(|| self.ms(&[120, 1_200, 6_000]));
            let patience = patience.filter(|_| self.judge.network.happens(D::Cancel));
            let number = self.judge.campaign(self.client, key, &self.turns);
            let environment = CandidateEnvironment {
                lock: Arc::new(WatchedLock::new(&self, number)),
                key: key.clone(),
                seed: self.dice.u64(..),
                until: self.until,
                judge: Arc::clone(&self.judge),
                campaign: number,
            };
            let campaign = candidate.campaign(environment);
            let ended = match patience {
                None => campaign.await,
                Some(patience) => match timeout(patience, campaign).await {
                    Ok(ended) => ended,
                    Err(_) => continue,
                },
            };
            match ended.map_err(|error| error.kind()) {
                Ok(()) => {}
                Err(ErrorKind::Closed) => return,
                // The judge has checked the release of the last term.
                Err(
                    ErrorKind::Lost
                    | ErrorKind::Unavailable
                    | ErrorKind::OutcomeUnknown
                    | ErrorKind::Capacity,
                ) => {}
                Err(kind) => self.judge.violation("C15", format!("a campaign ended with {kind:?}")),
            }
        }
    }
}

/// Sends requests to release to the holders of the keys.
pub(super) async fn ask_at_times(table: Arc<Table>, keys: Vec<LockKey>, mut dice: Rng, until: Instant) {
    while Instant::now() < until {
        sleep(Duration::from_millis(dice.u64(..2_000))).await;
        table.ask(&keys[dice.usize(..keys.len())]);
    }
}
