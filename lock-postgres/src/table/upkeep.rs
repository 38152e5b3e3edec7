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
use super::registry::{Named, Process};
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
    pub(super) closed: CancellationToken,
    pub(super) check_every: Option<Duration>,
    pub(super) purge_after: Option<Duration>,
}

impl Upkeep {
    pub(super) async fn run(self) {
        let closed = self.closed.clone();
        tokio::select! {
            () = closed.cancelled() => {}
            _ = async {
                tokio::join!(self.free(), self.check(), self.look_at_suspects(), self.purge())
            } => {}
        }
    }

    async fn free(&self) {
        loop {
            if self.common.registry.has_doubts() {
                free(&self.common, &self.lane).await;
                sleep_until(Instant::now() + AGAIN).await;
            } else {
                self.common.registry.changed.notified().await;
            }
        }
    }

    /// Looks at holds of which somebody said that they were ended: anybody may say so.
    async fn look_at_suspects(&self) {
        loop {
            self.common.registry.suspected.notified().await;
            let mut suspects = self.common.registry.take_suspects();
            while !suspects.is_empty() {
                let answers = ask(&self.lane, TableJob::Confirm, suspects.clone()).await;
                let mut unknown = Vec::new();
                for (hold, answer) in suspects.into_iter().zip(answers) {
                    match answer {
                        Ok(true) => {}
                        Ok(false) => self.tell_lost(&hold, LossReason::ForcedRelease),
                        Err(_) => unknown.push(hold),
                    }
                }
                if !unknown.is_empty() {
                    sleep_until(Instant::now() + AGAIN).await;
                }
                suspects = unknown;
            }
        }
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
                    self.tell_lost(&hold, LossReason::Gone);
                }
            }
        }
    }

    /// A hold that was released meanwhile is not in the registry any more.
    fn tell_lost(&self, hold: &Named, reason: LossReason) {
        if self.common.registry.is_held(hold.holder) {
            self.common.registry.ended(hold.holder);
            self.common.events(|events| events.lost(&hold.key, hold.holder, reason));
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

/// Releases what is in doubt, and ends the sessions that may still acquire it: only a release after their
/// end decides. What could not be decided stays in doubt. `false` if the store did not answer all of it.
pub(super) async fn free(common: &Common, lane: &Lane<TableJob>) -> bool {
    let doubts = common.registry.doubts();
    let mut sessions: Vec<Process> = Vec::new();
    for doubt in &doubts {
        if let Some(process) = doubt.session
            && !sessions.contains(&process)
        {
            sessions.push(process);
        }
    }
    let mut gone = Vec::new();
    if !sessions.is_empty() {
        let answers = ask(lane, TableJob::End, sessions.clone()).await;
        let ended = sessions.into_iter().zip(answers).filter(|(_, answer)| matches!(answer, Ok(true)));
        gone = ended.map(|(process, _)| process).collect();
    }
    let asked = Instant::now();
    let holds: Vec<Named> = doubts.into_iter().map(|doubt| doubt.hold).collect();
    let answers = ask(lane, TableJob::Release, holds.clone()).await;
    let all = answers.iter().all(Result::is_ok);
    let freed = holds.into_iter().zip(answers).filter(|(_, answer)| answer.is_ok());
    common.registry.settle(&freed.map(|(hold, _)| hold).collect::<Vec<_>>(), asked, &gone);
    all
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
