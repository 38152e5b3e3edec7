//! The one task of an engine: what must go on when no caller is there to do it.
//!
//! It never awaits the store itself; calls run as tasks of its own set, so a silent store delays
//! neither a loss nor the next renewal.

use std::panic::AssertUnwindSafe;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::FutureExt as _;
use leasehold_api::{Error, LossReason};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::backend::{HoldRef, Renewed, short_answer};
use crate::beat::Beat;
use crate::beats::Beats;
use crate::clock::{Clock, Moment, scaled};
use crate::counters::Event;
use crate::hold::Hold;
use crate::shared::{Command, Shared};
use crate::undo::{Means, Undo};

/// The longest the driver sleeps while holds can end: the clock of validity also runs during suspend,
/// the runtime's timers may not, so a loss during suspend is signalled this soon after resuming.
const GLANCE: Duration = Duration::from_secs(1);

/// How long a closing engine waits for callers that are not being polled to give up their turns.
const LAST_CALL: Duration = Duration::from_secs(1);

type Outcome = Option<Result<(), Arc<str>>>;
type Reply = oneshot::Sender<Result<(), Error>>;

pub(crate) struct Driver {
    shared: Weak<Shared>,
    means: Means,
    clock: Arc<dyn Clock>,
    beats: Arc<Beats>,
    inbox: mpsc::UnboundedReceiver<Command>,
    jobs: JoinSet<Done>,
    /// Renewals asked for while another one of the same hold was under way.
    waiting: Vec<(Arc<Hold>, Option<Duration>, Reply)>,
    close_limit: Duration,
    closed: watch::Sender<Outcome>,
    /// Whether the driver ended because it was asked to or nobody was left.
    ended_well: bool,
}

/// What a job reports.
enum Done {
    Renewed { sent: Moment, beats: Vec<Renewal>, answers: Option<Vec<Result<Renewed, Error>>> },
    Freed,
}

/// One hold in a renewal.
struct Renewal {
    hold: Arc<Hold>,
    window: Duration,
    reply: Option<Reply>,
}

impl Driver {
    pub(crate) fn new(
        shared: &Arc<Shared>,
        inbox: mpsc::UnboundedReceiver<Command>,
        closed: watch::Sender<Outcome>,
    ) -> Self {
        Self {
            shared: Arc::downgrade(shared),
            means: Means {
                backend: Arc::clone(&shared.backend),
                queues: Arc::clone(&shared.queues),
                tally: Arc::clone(&shared.tally),
                closing: shared.closing.clone(),
                limit: shared.timing.call,
            },
            clock: Arc::clone(&shared.clock),
            beats: Arc::clone(&shared.beats),
            inbox,
            jobs: JoinSet::new(),
            waiting: Vec::new(),
            close_limit: shared.timing.close,
            closed,
            ended_well: false,
        }
    }

    pub(crate) async fn run(mut self) {
        loop {
            let beats = Arc::clone(&self.beats);
            let wake = self.next_look();
            tokio::select! {
                biased;
                () = beats.changed.notified() => {}
                () = at(wake) => {}
                Some(done) = self.jobs.join_next() => {
                    // A call that panicked has said so; its holds are looked at when they are due.
                    if let Ok(done) = done {
                        self.settle(done);
                    }
                }
                command = self.inbox.recv() => match command {
                    Some(Command::Close { holds }) => return self.close(holds).await,
                    Some(command) => self.carry_out(command),
                    // Engine and guards are gone, and nothing is held.
                    None => return self.close(Vec::new()).await,
                },
            }
            self.look();
        }
    }

    /// When the next hold must be looked at.
    fn next_look(&self) -> Option<Instant> {
        let now = self.clock.now();
        let left = self.beats.next_look(now)?.since(now);
        Some(Instant::now() + left.min(GLANCE))
    }

    fn carry_out(&mut self, command: Command) {
        match command {
            Command::Undo { call, holds, turns } => {
                let undo = Undo::new(self.means.clone(), call, holds, turns);
                self.spawn(async move {
                    undo.run().await;
                    Done::Freed
                });
            }
            Command::Renew { hold, window, reply } => self.renew_for(hold, window, reply),
            Command::Close { .. } => {}
        }
    }

    fn spawn(&mut self, job: impl Future<Output = Done> + Send + 'static) {
        self.jobs.spawn(job);
    }

    /// Looks at every hold that is due: loses those past their deadline, renews the others in one call.
    fn look(&mut self) {
        let Some(shared) = self.shared.upgrade() else { return };
        let now = self.clock.now();
        let ahead = |hold: &Hold| hold.beat.as_ref().map_or(Duration::ZERO, |b| b.interval(&shared) / 2);
        let mut renewals = Vec::new();
        for hold in self.beats.take_due(now, ahead) {
            let Some(beat) = &hold.beat else { continue };
            if now >= beat.deadline() {
                hold.lose(LossReason::Expired);
            } else if beat.renewing.load(Ordering::Acquire) {
                self.beats.schedule(&hold, beat.deadline());
            } else {
                let window = beat.window();
                renewals.push(Renewal { hold, window, reply: None });
            }
        }
        if !renewals.is_empty() {
            self.renew(&shared, renewals);
        }
    }

    fn renew_for(&mut self, hold: Arc<Hold>, window: Option<Duration>, reply: Reply) {
        let (Some(shared), Some(beat)) = (self.shared.upgrade(), &hold.beat) else { return };
        if beat.renewing.load(Ordering::Acquire) {
            self.waiting.push((hold, window, reply));
        } else {
            let window = window.unwrap_or_else(|| beat.window());
            self.renew(&shared, vec![Renewal { hold, window, reply: Some(reply) }]);
        }
    }

    /// Sends one renewal for all of them. A hold is in at most one at a time.
    fn renew(&mut self, shared: &Arc<Shared>, renewals: Vec<Renewal>) {
        let mut shortest = shared.timing.call;
        let mut references = Vec::with_capacity(renewals.len());
        for renewal in &renewals {
            let hold = &renewal.hold;
            let mut reference = hold.reference();
            reference.ttl = reference.ttl.map(|_| renewal.window);
            references.push(reference);
            if let Some(beat) = &hold.beat {
                beat.renewing.store(true, Ordering::Release);
                // Leaves time for another try before the lease ends.
                shortest = shortest.min(renewal.window / 3);
                self.beats.schedule(hold, beat.deadline());
            }
        }
        let backend = Arc::clone(&self.means.backend);
        let sent = self.clock.now();
        self.spawn(async move {
            let call = timeout(shortest, backend.renew(references));
            // A backend that panics is one that did not answer.
            let answers = AssertUnwindSafe(call).catch_unwind().await.ok().and_then(Result::ok);
            Done::Renewed { sent, beats: renewals, answers }
        });
    }

    fn settle(&mut self, done: Done) {
        let Done::Renewed { sent, beats, answers } = done else { return };
        let Some(shared) = self.shared.upgrade() else { return };
        let mut answers = answers.map(Vec::into_iter);
        // One jitter for all, so that they stay together.
        let jitter = 1.0 - fastrand::f64() / 10.0;
        for renewal in beats {
            let answer = match &mut answers {
                Some(answers) => answers.next().unwrap_or_else(|| Err(short_answer())),
                None => Err(Error::new(
                    leasehold_api::ErrorKind::OutcomeUnknown,
                    "the store did not answer the renewal in time; it is repeated while the lease lasts",
                )),
            };
            let Renewal { hold, window, reply } = renewal;
            let Some(beat) = &hold.beat else { continue };
            beat.renewing.store(false, Ordering::Release);
            let outcome = self.settle_one(&shared, &hold, beat, (sent, window), jitter, answer);
            if let Some(reply) = reply {
                let _ = reply.send(outcome);
            }
        }
        for (hold, window, reply) in std::mem::take(&mut self.waiting) {
            self.renew_for(hold, window, reply);
        }
    }

    fn settle_one(
        &self,
        shared: &Shared,
        hold: &Arc<Hold>,
        beat: &Beat,
        (sent, window): (Moment, Duration),
        jitter: f64,
        answer: Result<Renewed, Error>,
    ) -> Result<(), Error> {
        let now = self.clock.now();
        match answer {
            Ok(Renewed::Extended) if now < beat.deadline() => {
                shared.tally.count(Event::Renewed);
                beat.confirmed(sent, window, shared);
                let next = sent.after(scaled(beat.interval(shared), jitter));
                self.beats.schedule(hold, next.min(beat.deadline()));
            }
            // The answer came after the grant was lost here: it stays lost.
            Ok(Renewed::Extended) => hold.lose(LossReason::Expired),
            Ok(Renewed::Gone(reason)) => hold.lose(reason),
            Err(error) => {
                shared.tally.count(Event::Failure);
                tracing::debug!(key = %hold.request.key, store = %shared.name, %error, "renewal failed; it is repeated while the hold lasts");
                beat.maybe_confirmed(sent, window);
                // Soon enough for a shorter lease that the store may count already.
                let pause = (beat.interval(shared).min(window / 3) / 8).max(Duration::from_millis(1));
                self.beats.schedule(hold, now.after(pause).min(beat.deadline()));
                return Err(error);
            }
        }
        hold.loss_reason().map_or(Ok(()), |reason| Err(Error::lost(reason)))
    }

    /// Frees everything, waits for what is under way, and ends the backend, all within the limit.
    async fn close(mut self, mut holds: Vec<HoldRef>) {
        let backend = Arc::clone(&self.means.backend);
        let (limit, begun) = (self.close_limit, Instant::now());
        let freed = timeout(limit - limit / 10, async {
            let mut last_call = std::pin::pin!(sleep(limit.min(LAST_CALL)));
            // Waits that the closing ends hand over what they had in the air, and then their turn.
            while self.means.queues.len() > 0 {
                tokio::select! {
                    biased;
                    command = self.inbox.recv() => match command {
                        Some(Command::Close { holds: more }) => holds.extend(more),
                        Some(command) => self.carry_out(command),
                        None => break,
                    },
                    Some(_) = self.jobs.join_next() => {}
                    () = sleep(Duration::from_millis(5)) => {}
                    () = &mut last_call => break,
                }
            }
            self.inbox.close();
            while let Some(command) = self.inbox.recv().await {
                match command {
                    Command::Close { holds: more } => holds.extend(more),
                    command => self.carry_out(command),
                }
            }
            // Callers that are not being polled: what they may have at the store is freed by holder id.
            self.means.queues.for_each(|seat| holds.push(seat.hold.reference()));
            let mut all = Undo::new(self.means.clone(), None, holds, Vec::new());
            all.run_until_freed().await;
            while self.jobs.join_next().await.is_some() {}
            // What was handed over is undone by now; the rest is in nobody's hands.
            let mut unpolled = 0;
            self.means.queues.for_each(|seat| unpolled += usize::from(seat.hold.is_asking()));
            unpolled
        })
        .await;
        let outcome = match freed {
            Ok(0) => Ok(()),
            Ok(n) => Err(format!("{n} requests were on their way to the store and nobody polled them")),
            Err(_) => Err(format!("the store did not confirm every release within {limit:?}")),
        };
        // The rest of the limit, and a moment in any case.
        let rest = limit.saturating_sub(begun.elapsed()).max(limit / 10);
        if timeout(rest, backend.close()).await.is_err() {
            backend.sever();
        }
        self.ended_well = true;
        self.closed.send_replace(Some(outcome.map_err(Arc::from)));
    }
}

async fn at(wake: Option<Instant>) {
    match wake {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if self.ended_well {
            return;
        }
        // The runtime has gone: nobody renews, watches or releases any more.
        if let Some(shared) = self.shared.upgrade() {
            shared.queues.close();
            shared.closing.cancel();
            shared.lose_all(LossReason::RuntimeGone);
        }
        self.means.backend.sever();
    }
}
