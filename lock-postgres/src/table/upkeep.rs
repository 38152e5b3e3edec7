//! What goes on beside the calls: freeing what lost answers left behind, looking whether holds are still
//! there, removing old rows.

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, LossReason};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::backend::{ask, only};
use super::grants::micros;
use super::job::TableJob;
use super::registry::Named;
use super::simple::PURGED;
use super::work::Common;
use crate::lane::Lane;

/// How often to free again what may still be granted.
const AGAIN: Duration = Duration::from_secs(1);

/// How often to look for old rows, on average: all clients of a table do.
const PURGE_EVERY: Duration = Duration::from_secs(600);

/// The task that does it, until the backend closes.
pub(super) struct Upkeep {
    pub(super) common: Arc<Common>,
    pub(super) lane: Lane<TableJob>,
    pub(super) closing: CancellationToken,
    pub(super) check_every: Option<Duration>,
    pub(super) purge_after: Option<Duration>,
}

impl Upkeep {
    pub(super) async fn run(self) {
        let closing = self.closing.clone();
        tokio::select! {
            () = closing.cancelled() => {}
            ((), (), ()) = async { tokio::join!(self.free(), self.check(), self.purge()) } => {}
        }
    }

    async fn free(&self) {
        loop {
            if self.common.registry.has_doubts() {
                self.free_once().await;
                sleep_until(Instant::now() + AGAIN).await;
            } else {
                self.common.registry.changed.notified().await;
            }
        }
    }

    /// Releases what is in doubt. What the server may still carry out, and what could not be released,
    /// stays in doubt.
    async fn free_once(&self) {
        let doubts = self.common.registry.take_doubts();
        let asked = Instant::now();
        let holds = doubts.iter().map(|doubt| doubt.hold.clone()).collect();
        let answers = ask(&self.lane, TableJob::Release, holds).await;
        let open = doubts.into_iter().zip(answers);
        let open = open.filter(|(doubt, answer)| answer.is_err() || doubt.until > asked);
        self.common.registry.doubt_again(open.map(|(doubt, _)| doubt).collect());
    }

    async fn check(&self) {
        let Some(every) = self.check_every else { return };
        loop {
            sleep_until(Instant::now() + every).await;
            let holds = self.common.registry.held();
            if holds.is_empty() {
                continue;
            }
            let answers = ask(&self.lane, TableJob::Confirm, holds.clone()).await;
            for (hold, answer) in holds.into_iter().zip(answers) {
                if matches!(answer, Ok(false)) {
                    self.tell_lost(&hold);
                }
            }
        }
    }

    /// A hold that was released meanwhile is not in the registry any more.
    fn tell_lost(&self, hold: &Named) {
        if self.common.registry.is_held(hold.holder) {
            self.common.registry.ended(hold.holder);
            self.common.events(|events| events.lost(&hold.key, hold.holder, LossReason::Gone));
        }
    }

    async fn purge(&self) {
        let Some(after) = self.purge_after else { return };
        loop {
            sleep_until(Instant::now() + PURGE_EVERY.mul_f64(0.5 + fastrand::f64())).await;
            if let Err(error) = purge(&self.lane, after).await {
                tracing::debug!(store = %self.common.config, %error, "cannot remove old rows; it is tried again later");
            }
        }
    }
}

/// Removes old rows until there are no more.
pub(super) async fn purge(lane: &Lane<TableJob>, age: Duration) -> Result<u64, Error> {
    let mut removed = 0;
    loop {
        let batch = only(ask(lane, TableJob::Purge, vec![micros(age)]).await)?;
        removed += batch;
        if batch < PURGED.unsigned_abs() {
            return Ok(removed);
        }
    }
}
