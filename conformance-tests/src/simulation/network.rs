//! The link between one client and the store. The fate of each call is drawn from the seed, the client and
//! the number of the call. If one class of disturbances is left out, the others stay the same.

mod plan;

use std::future::{Future, pending};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fastrand::Rng;
use leasehold_api::{Error, ErrorKind};
use leasehold_engine::{HoldRef, Op, ReleaseReply, Request, Waiting};
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, sleep};

pub(crate) use self::plan::CallFailure;
use self::plan::{CallPlan, Delivery};
use super::client::{ClientTurns, InTurn};
use super::coverage::{Coverage, Situation};
use super::disturbance::{Disturbance as D, Disturbances};
use super::modes::ScheduleModes;
use super::post::Post;
use super::requests::Requests;
use super::stores::Bounds;

tokio::task_local! {
    /// Set while the second copy of a request is carried out after the reply to the first was on its way.
    pub(super) static LATE_COPY: ();
}

/// Returns whether the store carries out a late copy of a request now.
pub(crate) fn is_late_copy() -> bool {
    LATE_COPY.try_with(|()| ()).is_ok()
}

/// The most calls of the store in a schedule. More calls show a loop without a pause.
const TOO_MANY: u64 = 5_000;

/// The state that all links of one schedule share.
#[derive(Debug)]
pub(crate) struct Network {
    pub(crate) seed: u64,
    /// The disturbances that can happen in this schedule.
    pub(crate) may: Disturbances,
    /// The divisor of the rate of disturbed calls.
    pub(crate) one_of: u64,
    /// Whether the second copy of a request can arrive after the reply to the first. Set only for stores with
    /// leases, because other stores must recognise the copy.
    pub(crate) late_copies: bool,
    /// Whether the clients of this schedule pass their holds from one caller to the next.
    pub(crate) hands_over: bool,
    /// The modes of the schedule, if it has others than exclusive.
    pub(crate) modes: Option<ScheduleModes>,
    /// The order and the faults of all messages, if a source of choices determines them.
    pub(crate) post: Option<Arc<Post>>,
    /// The limit of one call.
    pub(crate) call: Duration,
    pub(crate) coverage: Coverage,
    state: Mutex<NetworkState>,
    calls: AtomicU64,
    /// The most requests of this schedule: [`TOO_MANY`] times the average number of requests in one call.
    too_many: u64,
    /// Notified when there were too many calls.
    pub(crate) loops: Notify,
    /// The violations by requests, with their times and rules.
    violations: Mutex<Vec<(Instant, &'static str, String)>>,
}

#[derive(Debug, Default)]
struct NetworkState {
    /// When the disturbances ended. `None` before that.
    undisturbed_since: Option<Instant>,
    /// The disturbances that have happened.
    happened: Disturbances,
    /// When the store becomes unreachable for every client, and when this ends.
    outage: Option<(Instant, Instant)>,
}

impl Network {
    pub(crate) fn new(
        seed: u64,
        may: Disturbances,
        one_of: u64,
        hands_over: bool,
        modes: Option<ScheduleModes>,
        bounds: &Bounds,
    ) -> Self {
        Self {
            seed,
            may,
            one_of,
            hands_over,
            modes,
            post: None,
            late_copies: bounds.capabilities.lease.is_some(),
            call: bounds.call,
            coverage: Coverage::default(),
            state: Mutex::default(),
            calls: AtomicU64::new(0),
            too_many: TOO_MANY * bounds.requests,
            loops: Notify::new(),
            violations: Mutex::default(),
        }
    }

    /// Ends all disturbances.
    pub(crate) fn end_disturbances(&self) {
        self.lock().undisturbed_since = Some(Instant::now());
    }

    pub(crate) fn is_undisturbed(&self) -> bool {
        self.lock().undisturbed_since.is_some()
    }

    /// Returns how long ago the disturbances ended.
    pub(crate) fn undisturbed_for(&self) -> Duration {
        self.lock().undisturbed_since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Makes the store unreachable for every client from `from` to `until`.
    pub(crate) fn set_outage(&self, from: Instant, until: Instant) {
        self.lock().outage = Some((from, until));
    }

    fn has_outage(&self) -> bool {
        let now = Instant::now();
        let state = self.lock();
        state.undisturbed_since.is_none()
            && state.outage.is_some_and(|(from, until)| from <= now && now < until)
    }

    /// Returns whether a disturbance has happened that can slow or fail a call.
    pub(crate) fn disturbs_calls(&self) -> bool {
        let happened = self.happened();
        let others = [D::Cut, D::Pause, D::Away].into_iter().chain(D::OF_CLUSTERS);
        D::OF_CALLS.into_iter().chain(others).any(|one| happened.has(one))
    }

    /// Returns whether the disturbance `one` is possible now. If so, records that it happened.
    pub(crate) fn happens(&self, one: D) -> bool {
        let mut state = self.lock();
        let happens = self.may.has(one) && state.undisturbed_since.is_none();
        if happens {
            state.happened = state.happened.with(one);
        }
        happens
    }

    pub(crate) fn happened(&self) -> Disturbances {
        self.lock().happened
    }

    fn violation(&self, found: Option<(&'static str, String)>) {
        let Some((rule, what)) = found else { return };
        let mut violations = self.violations.lock().unwrap_or_else(PoisonError::into_inner);
        violations.push((Instant::now(), rule, what));
    }

    /// Returns the violations by requests as text, with their rules and the times since `start`.
    pub(crate) fn violations(&self, start: Instant) -> Vec<String> {
        let violations = self.violations.lock().unwrap_or_else(PoisonError::into_inner);
        let said = |(at, rule, what): &(Instant, &str, String)| {
            format!("{rule}, {:.3?}: {what}", at.duration_since(start))
        };
        violations.iter().map(said).collect()
    }

    fn lock(&self) -> MutexGuard<'_, NetworkState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns an independent stream of random numbers of `seed`, for a purpose and a number.
pub(crate) fn stream(seed: u64, which: u64, number: u64) -> Rng {
    let mixed = seed ^ which.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number.wrapping_mul(0xc2b2_ae3d_27d4_eb4f);
    let mut rng = Rng::with_seed(mixed);
    // Skips the first number, because it is similar for neighbouring seeds.
    rng.u64(..);
    rng
}

/// Never replies, except to a wait. The engine bounds its other calls itself, but waits can be long, so the backend must
/// notice that the store is unreachable.
async fn no_answer<T>(op: Op) -> Result<T, CallFailure> {
    if op != Op::Wait {
        return pending().await;
    }
    sleep(NOTICED).await;
    Err(CallFailure { kind: ErrorKind::OutcomeUnknown, refused: false })
}

/// The time after which a wait notices that the store is unreachable.
const NOTICED: Duration = Duration::from_secs(2);

/// The link between one client and the store, with its disturbances.
#[derive(Debug)]
pub struct NetworkLink {
    network: Arc<Network>,
    client: u64,
    calls: AtomicU64,
    turns: Arc<ClientTurns>,
    /// When the connection of the client returns.
    disconnected_until: Mutex<Option<Instant>>,
    /// When the last disturbance of a call ends.
    disturbed_until: Mutex<Instant>,
    requests: Requests,
    dead: std::sync::atomic::AtomicBool,
}

impl NetworkLink {
    pub(crate) fn new(network: &Arc<Network>, client: u64, turns: &Arc<ClientTurns>) -> Arc<Self> {
        Arc::new(Self {
            network: Arc::clone(network),
            client,
            calls: AtomicU64::new(0),
            turns: Arc::clone(turns),
            disconnected_until: Mutex::new(None),
            disturbed_until: Mutex::new(Instant::now()),
            requests: Requests::default(),
            dead: std::sync::atomic::AtomicBool::new(false),
        })
    }

    /// Returns whether clients can be stopped together with their clocks in this schedule.
    pub(crate) fn may_stop(&self) -> bool {
        self.network.may.has(D::Stop)
    }

    /// Returns whether a source of choices orders the messages of this schedule.
    pub(crate) fn is_ordered(&self) -> bool {
        self.network.post.is_some()
    }

    /// Returns whether clients pass their holds from one caller to the next in this schedule.
    pub(crate) fn hands_over(&self) -> bool {
        self.network.hands_over
    }

    /// Returns whether callers of this schedule take shared grants and permits.
    pub(crate) fn has_modes(&self) -> bool {
        self.network.modes.is_some()
    }

    /// Returns how long readers of a client join one hold of the store in this schedule.
    pub(crate) fn share_for(&self) -> Duration {
        self.network.modes.as_ref().map_or(Duration::ZERO, |modes| modes.share_for)
    }

    /// Returns the stream `which` of this client's random numbers. Each purpose has another stream.
    pub(crate) fn dice(&self, which: u64) -> Rng {
        stream(self.network.seed, which, self.client)
    }

    pub(crate) fn coverage(&self) -> &Coverage {
        &self.network.coverage
    }

    /// Disconnects the client until `end`.
    pub(crate) fn disconnect_until(&self, end: Instant) {
        *self.disconnected_until.lock().unwrap_or_else(PoisonError::into_inner) = Some(end);
        self.disturb_until(end);
    }

    fn disturb_until(&self, until: Instant) {
        let mut known = self.disturbed_until.lock().unwrap_or_else(PoisonError::into_inner);
        *known = until.max(*known);
    }

    /// Returns the time since which no call was disturbed.
    pub(crate) fn undisturbed_since(&self) -> Instant {
        let outage = self.network.lock().outage.filter(|(from, _)| *from <= Instant::now());
        let known = *self.disturbed_until.lock().unwrap_or_else(PoisonError::into_inner);
        outage.map_or(known, |(_, until)| until.max(known))
    }

    /// Checks the requests of an acquire or a wait, and records a violation.
    pub(crate) fn check_acquire(&self, requests: &[Request], waiting: Waiting) {
        self.network.violation(self.requests.asked(requests, waiting));
    }

    /// Notes that the store refused these requests.
    pub(crate) fn was_refused(&self, requests: &[Request]) {
        self.requests.refused(requests);
    }

    /// Checks the releases that the engine sends, and records a violation.
    pub(crate) fn check_release(&self, holds: &[HoldRef]) {
        self.network.violation(self.requests.releases(holds));
    }

    /// Notes the replies of the store to the releases.
    pub(crate) fn was_released(&self, holds: &[HoldRef], answers: &[Result<ReleaseReply, Error>]) {
        self.requests.released(holds, answers);
    }

    /// Cuts the link because the client has died. No further call or event passes it.
    pub(crate) fn die(&self) {
        self.dead.store(true, Ordering::Release);
    }

    fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    fn is_disconnected(&self) -> bool {
        let until = *self.disconnected_until.lock().unwrap_or_else(PoisonError::into_inner);
        self.is_dead()
            || self.network.has_outage()
            || (!self.network.is_undisturbed() && until.is_some_and(|until| Instant::now() < until))
    }

    fn plan(&self, op: Op) -> CallPlan {
        let number = self.calls.fetch_add(1, Ordering::Relaxed);
        if self.network.calls.fetch_add(1, Ordering::Relaxed) == self.network.too_many {
            self.network.loops.notify_one();
        }
        let mut dice = stream(self.network.seed, 1_000 + self.client, number);
        let ms = |dice: &mut Rng, most: u64| Duration::from_millis(dice.u64(..=most));
        let mut plan =
            CallPlan { before: ms(&mut dice, 3), after: ms(&mut dice, 3), delivery: Delivery::Delivered };
        let silent = dice.bool();
        if dice.u64(..self.network.one_of) != 0 {
            return plan;
        }
        let what = D::OF_CALLS[dice.usize(..D::OF_CALLS.len())];
        // The longest delay: short, or longer than the engine waits for a call.
        let long = [60, 400, 1_500, 4_000][dice.usize(..4)];
        let kinds = [ErrorKind::Unavailable, ErrorKind::OutcomeUnknown, ErrorKind::Capacity];
        let kind = kinds[dice.usize(..kinds.len())];
        if !self.network.happens(what) {
            return plan;
        }
        match what {
            D::SlowRequest => plan.before += ms(&mut dice, long),
            D::SlowAnswer => plan.after += ms(&mut dice, long),
            D::LostRequest => plan.delivery = Delivery::RequestLost,
            D::LostAnswer => plan.delivery = Delivery::AnswerLost { silent },
            D::LateRequest => {
                plan.before += Duration::from_millis(1_000) + ms(&mut dice, 2_500);
                plan.delivery = Delivery::AnswerLost { silent: true };
            }
            // A wait takes one place in the store's queue, so it does not run twice.
            D::Twice if op == Op::Wait => {}
            D::Twice => plan.delivery = Delivery::Twice { apart: ms(&mut dice, long) },
            D::Refusal if matches!(op, Op::Acquire | Op::Wait) => plan.delivery = Delivery::Refused(kind),
            _ => plan.delivery = Delivery::Failed(kind),
        }
        // A call without a reply lasts until its limit.
        self.disturb_until(Instant::now() + self.network.call + plan.before + plan.after);
        plan
    }

    /// Carries out `work` at the store according to the plan of this call, and returns its result. If
    /// dropped, a request that has left the client is still carried out.
    pub(crate) async fn send<T, W, F>(self: &Arc<Self>, op: Op, work: W) -> Result<T, CallFailure>
    where
        W: Fn() -> F + Send + 'static,
        F: Future<Output = T> + Send + 'static,
        T: Send + 'static,
    {
        if let Some(post) = &self.network.post {
            return match post.send(self.client, op, work).await {
                Some(answer) => answer,
                None => no_answer(op).await,
            };
        }
        let CallPlan { before, after, delivery } = self.plan(op);
        if self.is_disconnected() || matches!(delivery, Delivery::RequestLost) {
            return no_answer(op).await;
        }
        let (reply, answer) = oneshot::channel();
        let link = Arc::clone(self);
        tokio::spawn(async move {
            sleep(before).await;
            match delivery {
                Delivery::Failed(kind) => {
                    sleep(after).await;
                    let _ = reply.send(Err(CallFailure { kind, refused: false }));
                    return;
                }
                Delivery::Refused(kind) => {
                    sleep(after).await;
                    let _ = reply.send(Err(CallFailure { kind, refused: true }));
                    return;
                }
                _ => {}
            }
            if reply.is_closed() {
                link.coverage().note(Situation::ArrivedAfterTheCallEnded);
            }
            let answer = work().await;
            if let Delivery::Twice { apart } = delivery {
                link.coverage().note(Situation::CarriedOutTwice);
                // A copy of a renewal after its reply could shorten a later renewal. No transport in use
                // delivers one.
                if link.network.late_copies && op != Op::Renew {
                    tokio::spawn(async move {
                        sleep(apart).await;
                        LATE_COPY.scope((), work()).await;
                    });
                } else {
                    work().await;
                }
            }
            sleep(after).await;
            let answer = match delivery {
                Delivery::AnswerLost { silent: true } => return,
                Delivery::AnswerLost { silent: false } => {
                    Err(CallFailure { kind: ErrorKind::OutcomeUnknown, refused: false })
                }
                _ if link.is_disconnected() => return,
                _ => Ok(answer),
            };
            if reply.send(answer).is_err() {
                link.coverage().note(Situation::AnsweredAfterTheCallEnded);
            }
        });
        match answer.await {
            Ok(answer) => answer,
            Err(_) => no_answer(op).await,
        }
    }

    /// Sends one request to a member of a cluster. Uses [`Op::Wait`], because the link never repeats a wait and the
    /// clients of a cluster send the copies of their requests themselves.
    pub(crate) async fn request<T, W, F>(self: &Arc<Self>, work: W) -> Result<T, CallFailure>
    where
        W: Fn() -> F + Send + 'static,
        F: Future<Output = T> + Send + 'static,
        T: Send + 'static,
    {
        self.send(Op::Wait, work).await
    }

    /// Carries out `work` at the store and returns its result, unless a disturbance of the link prevents that.
    ///
    /// # Errors
    ///
    /// The kind of the failure that the link injects.
    ///
    /// # Cancel safety
    ///
    /// If dropped before `work` was carried out, `work` never runs.
    pub async fn call_inline<T>(&self, op: Op, work: impl FnOnce() -> T) -> Result<T, ErrorKind> {
        let CallPlan { before, after, delivery } = self.plan(op);
        if self.is_disconnected() || matches!(delivery, Delivery::RequestLost) {
            return no_answer(op).await.map_err(|failed| failed.kind);
        }
        sleep(before).await;
        if let Delivery::Failed(kind) | Delivery::Refused(kind) = delivery {
            sleep(after).await;
            return Err(kind);
        }
        let answer = work();
        sleep(after).await;
        match delivery {
            Delivery::AnswerLost { silent: true } => no_answer(op).await.map_err(|failed| failed.kind),
            Delivery::AnswerLost { silent: false } => Err(ErrorKind::OutcomeUnknown),
            _ if self.is_disconnected() => no_answer(op).await.map_err(|failed| failed.kind),
            _ => Ok(answer),
        }
    }

    /// Delivers an event of the store to the client, unless the event is lost.
    pub(crate) fn notify(self: &Arc<Self>, what: impl FnOnce() + Send + 'static) {
        let number = self.calls.fetch_add(1, Ordering::Relaxed);
        let mut dice = stream(self.network.seed, 5_000 + self.client, number);
        let (lost, late) = (dice.u8(..3) == 0, dice.u8(..3) == 0);
        let by = Duration::from_millis(dice.u64(..2_000));
        if self.is_disconnected() || (lost && self.network.happens(D::LostEvent)) {
            return;
        }
        let by = if late && self.network.happens(D::LateEvent) { by } else { Duration::ZERO };
        let link = Arc::clone(self);
        tokio::spawn(async move {
            sleep(by).await;
            if link.is_dead() {
                return;
            }
            InTurn::new(&link.turns, async move { what() }).await;
        });
    }
}
