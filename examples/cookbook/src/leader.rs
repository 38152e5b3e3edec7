//! Elects a leader among replicas: `docs/cookbook/leader.md`.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::routing::{get, post};
use leasehold_api::{Error, FencingToken, Lock};
use leasehold_election::{BodyError, Election, ElectionHandle, Observer};
use tokio::sync::mpsc::UnboundedSender;

/// The key of the election.
pub const KEY: &str = "inbox";

/// Pause between two rounds of the work.
const PAUSE: Duration = Duration::from_millis(100);

/// Rest of a replica that has stepped down.
const REST: Duration = Duration::from_secs(60);

/// The work of the leader. Here a round only reports its token.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Inbox {
    rounds: UnboundedSender<Option<FencingToken>>,
}

impl Inbox {
    /// Makes an inbox that reports each round.
    #[must_use]
    pub fn new(rounds: UnboundedSender<Option<FencingToken>>) -> Self {
        Self { rounds }
    }

    /// Processes the messages that have arrived. Each write takes the token along.
    ///
    /// # Errors
    ///
    /// If the inbox is closed.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the round is done or not begun.
    pub async fn poll(&self, token: Option<FencingToken>) -> Result<(), BodyError> {
        Ok(self.rounds.send(token)?)
    }
}

/// Works whenever this replica leads, until the lock is closed.
///
/// # Errors
///
/// Returns the reason why this replica will not lead again.
///
/// # Cancel safety
///
/// If dropped, the work is dropped at an await, and the lock is released in the background.
pub async fn lead(election: &Election<Arc<dyn Lock>>, inbox: &Inbox) -> Result<(), Error> {
    let campaign = election.lead_boxed(|term| {
        let inbox = inbox.clone();
        Box::pin(async move {
            loop {
                inbox.poll(term.token()).await?; // an error campaigns again, after a pause
                tokio::time::sleep(PAUSE).await;
            }
        })
    });
    campaign.await
}

/// A replica, as its pages see it.
#[derive(Clone, Debug)]
struct Replica {
    election: ElectionHandle,
    lock: Arc<dyn Lock>,
}

/// Returns the pages of a replica.
pub fn pages(election: ElectionHandle, lock: Arc<dyn Lock>) -> Router {
    let pages = Router::new().route("/leader", get(leader)).route("/leader/step-down", post(step_down));
    pages.with_state(Replica { election, lock })
}

async fn leader(State(replica): State<Replica>) -> Result<String, String> {
    let seen = Observer::new(replica.lock, KEY).changed().await.map_err(|error| error.to_string())?;
    let leader = seen.and_then(|hold| hold.label).unwrap_or_else(|| "nobody".into());
    Ok(format!("leader: {leader}\nthis replica: {}\n", replica.election.state()))
}

async fn step_down(State(replica): State<Replica>) {
    replica.election.step_down(REST);
}
