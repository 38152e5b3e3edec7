//! The state of a campaign, as its process sees it.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold_api::{Error, FencingToken, GrantHandle, LossReason, Validity};
use tokio::sync::watch;

/// The state of a campaign. `token` is the fencing token of the term, if the store has tokens.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub enum State {
    /// No campaign runs, because [`lead`](crate::Election::lead) was not called, has returned or was dropped.
    Idle,
    /// Waits to be elected.
    Candidate,
    /// Leads. No other candidate does.
    Leading {
        /// The token of the term.
        token: Option<FencingToken>,
    },
    /// Leads, but a confirmation of the store is overdue. The term will be lost unless the store answers.
    InDoubt {
        /// The token of the term.
        token: Option<FencingToken>,
    },
    /// Has stepped down, or ended a term within a second, and does not campaign before `until`.
    Resting {
        /// The end of the rest.
        until: Instant,
    },
    /// The store, the body or the term has failed. Campaigns again at `next_try`. After a loss the body can
    /// still run if the election only notifies it ([`OnLoss::Tell`](crate::OnLoss::Tell)).
    Failed {
        /// The failure.
        error: Failure,
        /// The time of the next attempt.
        next_try: Instant,
    },
}

impl State {
    /// Returns whether the campaign leads without a doubt.
    #[must_use]
    pub fn is_leading(&self) -> bool {
        matches!(self, Self::Leading { .. })
    }

    fn lost(reason: LossReason) -> Self {
        Self::Failed { error: Failure::Lock(Error::lost(reason)), next_try: Instant::now() }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let left = |until: &Instant| until.saturating_duration_since(Instant::now());
        let with = |token: &Option<FencingToken>| token.map(|token| format!(" with token {token}"));
        match self {
            Self::Idle => f.write_str("no candidate"),
            Self::Candidate => f.write_str("candidate"),
            Self::Leading { token } => write!(f, "leading{}", with(token).unwrap_or_default()),
            Self::InDoubt { token } => write!(f, "leading in doubt{}", with(token).unwrap_or_default()),
            Self::Resting { until } => write!(f, "resting for {:.1?}", left(until)),
            Self::Failed { error, next_try } => match left(next_try) {
                Duration::ZERO => write!(f, "failed: {error}"),
                left => write!(f, "failed, next try in {left:.1?}: {error}"),
            },
        }
    }
}

/// The failure of an attempt, a term or its body.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub enum Failure {
    /// The store failed, or the term was lost ([`ErrorKind::Lost`](leasehold_api::ErrorKind::Lost)).
    Lock(Error),
    /// The body returned this error.
    Body(Arc<dyn StdError + Send + Sync>),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lock(error) => error.fmt(f),
            Self::Body(error) => error.fmt(f),
        }
    }
}

/// The present state: a term, whose validity each look computes from the clock, or another state.
#[derive(Debug)]
enum Standing {
    Term(GrantHandle),
    Other(State),
}

impl Standing {
    fn state(&self) -> State {
        let grant = match self {
            Self::Other(state) => return state.clone(),
            Self::Term(grant) => grant,
        };
        match grant.validity() {
            Validity::Valid => State::Leading { token: grant.token() },
            Validity::InDoubt => State::InDoubt { token: grant.token() },
            _ => State::lost(grant.lost().reason().unwrap_or(LossReason::Expired)),
        }
    }
}

/// The state that a campaign shares with its handles.
#[derive(Debug)]
pub(crate) struct Shared {
    standing: watch::Sender<Standing>,
    /// The pause of the last request to step down.
    resign: watch::Sender<Duration>,
}

impl Shared {
    pub(crate) fn new() -> Arc<Self> {
        let standing = watch::Sender::new(Standing::Other(State::Idle));
        Arc::new(Self { standing, resign: watch::Sender::new(Duration::ZERO) })
    }

    pub(crate) fn set(&self, state: State) {
        tracing::debug!(%state, "election");
        self.standing.send_replace(Standing::Other(state));
    }

    pub(crate) fn resigned(&self) -> watch::Receiver<Duration> {
        self.resign.subscribe()
    }

    pub(crate) fn step_down(&self, pause: Duration) {
        self.resign.send_replace(pause);
    }

    /// Shows the term of `grant`.
    pub(crate) fn leads(&self, grant: GrantHandle) {
        self.standing.send_replace(Standing::Term(grant));
    }

    /// Notifies watchers when the doubt about the term of `grant` begins or ends, and when the term is lost.
    pub(crate) async fn follow(&self, grant: GrantHandle) {
        let mut now = grant.validity();
        while now.is_held() {
            now = grant.validity_changed(now).await;
            self.standing.send_modify(|_| ());
        }
    }
}

/// Watches a campaign of this process and ends its terms. `Clone + Send + 'static`, made by
/// [`Election::handle`](crate::Election::handle).
///
/// ```
/// # #[tokio::main]
/// # async fn main() -> Result<(), leasehold_api::Error> {
/// use std::sync::Arc;
/// use std::time::Duration;
/// use leasehold_election::{Election, State};
/// let lock = Arc::new(leasehold_memory::connect()?);
/// let election = Election::new(lock.clone(), "scheduler");
/// let mut handle = election.handle();
/// let campaign = tokio::spawn(async move { election.lead(async |_| std::future::pending().await).await });
/// while !handle.changed().await.is_leading() {}
/// handle.step_down(Duration::from_secs(60));
/// while !matches!(handle.changed().await, State::Resting { .. }) {}
/// # campaign.abort();
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct ElectionHandle {
    shared: Arc<Shared>,
    seen: watch::Receiver<Standing>,
}

impl ElectionHandle {
    pub(crate) fn new(shared: &Arc<Shared>) -> Self {
        Self { shared: Arc::clone(shared), seen: shared.standing.subscribe() }
    }

    /// Returns the present state. While the campaign leads, it is computed from the clock.
    #[must_use]
    pub fn state(&self) -> State {
        self.seen.borrow().state()
    }

    /// Waits for the next change since the last call, and returns the state. States that last only briefly can
    /// be skipped.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the next call returns the change.
    pub async fn changed(&mut self) -> State {
        // Fails only if the sender is gone, but `shared` has it.
        let _ = self.seen.changed().await;
        self.seen.borrow().state()
    }

    /// Ends the term, or the candidacy, of this campaign. It campaigns again after `pause`, which starts when
    /// the body has ended. Without a campaign this does nothing. See [`Term::step_down`](crate::Term::step_down).
    pub fn step_down(&self, pause: Duration) {
        self.shared.step_down(pause);
    }
}
