//! Background work: releases grants whose reply was lost, checks holds reported as ended, and removes old rows.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use leasehold_api::{Error, LossReason};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::common::Common;
use super::job::{PurgeRequest, PurgedPage, TableJob, ask, only};
use super::registry::{HoldId, ReleaseRequest};
use super::values::micros;
use crate::job_queue::JobQueue;
use crate::upkeep::{Note, Watch};

/// Interval between attempts to release grants whose outcome is unknown.
const AGAIN: Duration = Duration::from_secs(1);

/// Average interval between checks for old rows. All clients of a table check, and one of them removes the rows.
const PURGE_EVERY: Duration = Duration::from_secs(600);

/// Number of pages after which the position of a purge is stored.
const PAGES_PER_NOTE: u32 = 10;

/// The upkeep task, which runs until the backend closes.
pub(super) struct Upkeep {
    pub(super) common: Arc<Common>,
    pub(super) queue: JobQueue<TableJob>,
    pub(super) closed: CancellationToken,
    pub(super) purge_after: Option<Duration>,
}

impl Upkeep {
    pub(super) async fn run(self) {
        let closed = self.closed.clone();
        tokio::select! {
            () = closed.cancelled() => {}
            _ = async {
                tokio::join!(self.free(), self.look_at_suspects(), self.purge())
            } => {}
        }
    }

    async fn free(&self) {
        loop {
            if self.common.registry.needs_cleanup() {
                free(&self.common, &self.queue).await;
                sleep_until(Instant::now() + AGAIN).await;
            } else {
                self.common.registry.changed.notified().await;
            }
        }
    }

    /// Checks holds that a notification reported as ended. The check is needed because any role can send a
    /// notification.
    async fn look_at_suspects(&self) {
        loop {
            self.common.registry.suspected.notified().await;
            let mut suspects = self.common.registry.take_suspects();
            while !suspects.is_empty() {
                let answers = ask(&self.queue, TableJob::Confirm, suspects.clone()).await;
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

    /// Reports a lost hold, unless it was released in the meantime.
    fn tell_lost(&self, hold: &HoldId, reason: LossReason) {
        if self.common.registry.is_held(hold.holder) {
            self.common.registry.ended(hold.holder);
            self.common.events(|events| events.lost(&hold.key, hold.holder, reason));
        }
    }

    async fn purge(&self) {
        let Some(age) = self.purge_after else { return };
        let mut watch = Watch::new(self.common.statements.kind);
        loop {
            sleep_until(Instant::now() + PURGE_EVERY.mul_f64(0.5 + fastrand::f64())).await;
            // An idle client leaves the removal to other clients, because it would open a session.
            let is_asleep = self.common.config.idle.is_some() && !self.queue.is_served();
            if is_asleep || self.common.may_only_read.load(Ordering::Relaxed) {
                continue;
            }
            let outcome = self.round(age, &mut watch).await;
            watch.ended(&self.common.config, &outcome);
        }
    }

    /// Removes old rows from the last stored position on, if the run is due and no other client has claimed
    /// it.
    async fn round(&self, age: Duration, watch: &mut Watch) -> Result<(), Error> {
        let Some(progress) = only(ask(&self.queue, TableJob::ClaimUpkeep, vec![()]).await)? else {
            return Ok(());
        };
        let taken = Instant::now();
        let mut next = Some(progress.after);
        let mut pages = 0;
        while let Some(after) = next {
            let asked = Instant::now();
            let purged = purge_page(&self.queue, age, after).await?;
            next = purged.next;
            pages += 1;
            if next.is_none() || pages % PAGES_PER_NOTE == 0 {
                let note = Note { after: next.clone().unwrap_or_default(), pause: PURGE_EVERY };
                only(ask(&self.queue, TableJob::NoteUpkeep, vec![note]).await)?;
                watch.warn_if_overdue(&self.common.config, progress.running + taken.elapsed());
            }
            // Sleeps, to use at most a fifth of one session's time.
            sleep_until(Instant::now() + asked.elapsed() * 4).await;
        }
        Ok(())
    }
}

/// Ends abandoned sessions and releases grants in doubt, because only a release after the session's end is final.
/// Undecided grants stay in doubt. Returns `false` if any release failed, unless a pooler hides the session, because such
/// a release fails until the doubt period is over.
pub(super) async fn free(common: &Common, queue: &JobQueue<TableJob>) -> bool {
    let sessions = common.registry.sessions();
    if !sessions.is_empty() {
        let answers = ask(queue, TableJob::End, sessions.clone()).await;
        let ended = sessions.into_iter().zip(answers).filter(|(_, answer)| matches!(answer, Ok(true)));
        common.registry.gone(&ended.map(|(session, _)| session).collect::<Vec<_>>());
    }
    let asked = Instant::now();
    let grants = common.registry.unconfirmed();
    let releases: Vec<ReleaseRequest> = grants.iter().map(|grant| grant.release.clone()).collect();
    if releases.is_empty() {
        common.registry.settle(&[], asked);
        return true;
    }
    let answers = ask(queue, TableJob::Release, releases.clone()).await;
    let all = grants.iter().zip(&answers).all(|(grant, answer)| answer.is_ok() || grant.is_hidden_at(asked));
    let freed = releases.into_iter().zip(answers).filter(|(_, answer)| answer.is_ok());
    common.registry.settle(&freed.map(|(release, _)| release.hold).collect::<Vec<_>>(), asked);
    all
}

/// Removes old rows, from the first page to the last.
pub(super) async fn purge(queue: &JobQueue<TableJob>, age: Duration) -> Result<u64, Error> {
    let (mut removed, mut next) = (0, Some(String::new()));
    while let Some(after) = next {
        let purged = purge_page(queue, age, after).await?;
        removed += purged.removed;
        next = purged.next;
    }
    Ok(removed)
}

async fn purge_page(queue: &JobQueue<TableJob>, age: Duration, after: String) -> Result<PurgedPage, Error> {
    only(ask(queue, TableJob::Purge, vec![PurgeRequest { age: micros(age), after }]).await)
}

#[cfg(test)]
mod tests;
