//! Renews the leases of all claims in one statement, and reports lost claims.
//!
//! Its loop does not wait for the store: calls are futures in a separate set, so a silent store cannot delay the report
//! of a loss or the next renewal.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use leasehold_api::{Error, ErrorKind, LossReason};
use leasehold_engine::Moment;
use tokio::time::{Instant, sleep_until, timeout};

use super::in_flight::InFlight;
use super::shared::ClaimerCore;
use crate::error::ClaimError;
use crate::store::{Outcome, Renewal};

/// The longest sleep of the keeper while claims are held, because leases also end while the machine is suspended and
/// the runtime's timers might stand still.
const GLANCE: Duration = Duration::from_secs(1);

/// The interval of checks if claims have a maximum hold, measured independently of the runtime's timers.
const PULSE: Duration = Duration::from_millis(250);

/// The interval of checks while a claim has been held for too long and has not ended.
const OVERDUE: Duration = Duration::from_millis(20);

pub(crate) async fn run(shared: Arc<ClaimerCore>) {
    let part = shared.config.renewal_part();
    if shared.config.is_bounded() {
        pulse(&shared);
    }
    Keeper { shared, calls: FuturesUnordered::new(), part }.run().await;
}

/// Wakes the keeper from a separate thread. A blocked worker of the runtime can stop the runtime's timers until an
/// outside event wakes another worker.
fn pulse(shared: &Arc<ClaimerCore>) {
    let shared = Arc::downgrade(shared);
    let pulse = move || {
        while let Some(shared) = shared.upgrade() {
            shared.new_holds.notify_one();
            drop(shared);
            std::thread::sleep(PULSE);
        }
    };
    let started = std::thread::Builder::new().name("leasehold-max-hold".to_owned()).spawn(pulse);
    if let Err(error) = started {
        tracing::error!(%error, "handlers that block their thread are not bounded: no thread can be started");
    }
}

struct Keeper {
    shared: Arc<ClaimerCore>,
    calls: FuturesUnordered<BoxFuture<'static, RenewalReply>>,
    /// The part of a lease after which it is renewed, for example a third.
    part: f64,
}

/// The reply to a renewal, or its error.
struct RenewalReply {
    holds: Vec<Arc<InFlight>>,
    sent: Moment,
    answers: Result<Vec<Renewal>, ClaimError>,
}

impl Keeper {
    async fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        let mut drained = std::pin::pin!(shared.drained());
        loop {
            let look = self.look();
            tokio::select! {
                biased;
                () = &mut drained => return,
                Some(call) = self.calls.next() => self.answered(call),
                () = shared.new_holds.notified() => {}
                () = at(look) => {}
            }
        }
    }

    /// Checks all held claims. Returns the time of the next check.
    fn look(&mut self) -> Option<Instant> {
        let now = self.shared.clock.now();
        self.return_unbegun();
        let mut holds = self.shared.held();
        for hold in &holds {
            self.shared.overdue(hold, now);
        }
        // The next check is at the first time at which a claim is held for too long, and then every `OVERDUE` until
        // such claims have ended.
        let over = holds.iter().filter_map(|hold| hold.over());
        let over = over.min().map(|over| over.since(now).min(GLANCE).max(OVERDUE));
        holds.retain(|hold| {
            if !hold.is_lost() && hold.deadline() <= now && hold.lose(LossReason::Expired) {
                tracing::warn!(claim = ?hold.claimed.claim, "a lease ended before the store renewed it");
            }
            !hold.is_lost() && hold.deadline() > now
        });
        self.renew(&holds, now);
        let next = |hold: &Arc<InFlight>| {
            if hold.renewing.load(Ordering::Acquire) {
                hold.deadline()
            } else {
                hold.due().min(hold.deadline())
            }
        };
        let left = holds.iter().map(next).min().map(|next| next.since(now).min(GLANCE));
        let stale = self.shared.ready_since().map(|since| since + self.shared.config.patience() * 2);
        let left = left.into_iter().chain(over).min();
        let look = left.map(|left| Instant::now() + left.max(Duration::from_millis(1)));
        look.into_iter().chain(stale).min()
    }

    /// Puts back claims that no worker has started for too long, because other processes can use them.
    fn return_unbegun(&self) {
        for hold in self.shared.unbegun(Some(self.shared.config.patience() * 2)) {
            self.shared.give_back(&hold, Outcome::PutBack);
        }
    }

    /// Renews due claims, together with those due soon, in one statement.
    fn renew(&mut self, holds: &[Arc<InFlight>], now: Moment) {
        let mut holds: Vec<_> =
            holds.iter().filter(|hold| !hold.renewing.load(Ordering::Acquire)).cloned().collect();
        if !holds.iter().any(|hold| hold.due() <= now) {
            return;
        }
        holds.retain(|hold| hold.due() <= now.after(hold.lease().mul_f64(self.part / 2.0)));
        for hold in &holds {
            hold.renewing.store(true, Ordering::Release);
        }
        let store = Arc::clone(&self.shared.store);
        let sent = self.shared.clock.now();
        let lease = self.shared.config.lease;
        // Limits the call to a quarter of the shortest lease, because an unanswered renewal must be retried on another
        // connection while the lease lasts.
        let shortest = holds.iter().map(|hold| hold.lease()).min().unwrap_or(lease);
        let limit = (shortest / 4).max(Duration::from_millis(10));
        self.calls.push(Box::pin(async move {
            let claims: Vec<_> = holds.iter().map(|hold| hold.claimed.claim.clone()).collect();
            let answers = match timeout(limit, store.renew(&claims, lease)).await {
                Ok(answers) => answers,
                Err(_) => Err(unanswered("the store did not answer in time whether the lease is renewed")),
            };
            let answers = answers.and_then(|answers| match answers.len() == claims.len() {
                true => Ok(answers),
                false => Err(unanswered("the store did not answer for each claim whether it is renewed")),
            });
            RenewalReply { holds, sent, answers }
        }));
    }

    fn answered(&mut self, call: RenewalReply) {
        let RenewalReply { holds, sent, answers } = call;
        let now = self.shared.clock.now();
        for hold in &holds {
            hold.renewing.store(false, Ordering::Release);
        }
        let answers = match answers {
            Ok(answers) => answers,
            Err(error) => {
                for hold in &holds {
                    self.again_soon(hold, now);
                }
                tracing::warn!(store = %self.shared.store, %error, "a renewal failed and is tried again");
                return;
            }
        };
        // All claims of the call get the same part, so they stay together but out of step with other processes.
        let part = self.part * (0.9 + fastrand::f64() / 10.0);
        for (hold, answer) in holds.iter().zip(answers) {
            match answer {
                Renewal::Renewed => hold.renewed(sent, part),
                Renewal::Busy => self.again_soon(hold, now),
                Renewal::Lost { row, current_epoch, .. } => {
                    // Asks again, because the store might report a loss only because this claim's own end is being
                    // written.
                    self.again_soon(hold, now);
                    if hold.lose(LossReason::Gone) {
                        tracing::warn!(%row, ?current_epoch, "a claim was lost to another worker");
                    }
                }
            }
        }
    }

    fn again_soon(&self, hold: &InFlight, now: Moment) {
        hold.due_at(now.after(hold.lease().mul_f64(self.part / 4.0).min(GLANCE)));
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.shared.abandon();
    }
}

async fn at(moment: Option<Instant>) {
    match moment {
        Some(moment) => sleep_until(moment).await,
        None => std::future::pending().await,
    }
}

fn unanswered(message: &'static str) -> ClaimError {
    Error::new(ErrorKind::OutcomeUnknown, message).into()
}
