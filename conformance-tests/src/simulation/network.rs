//! The way between one client and the store: what happens to each call is drawn from the seed, the client and the
//! number of the call, so that leaving one class of disturbances out leaves the others where they were.

use std::future::{Future, pending};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fastrand::Rng;
use leasehold_api::{Error, ErrorKind};
use leasehold_engine::{HoldRef, Op, ReleaseReply, Request, Waiting};
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, sleep};

use super::client::{ClientTurns, InTurn};
use super::coverage::{Seen, Sometimes};
use super::disturbance::{Disturbance as D, Disturbances};
use super::judge::Bounds;
use super::requests::Requests;

/// More calls than this in one schedule are not work but a loop.
const TOO_MANY: u64 = 5_000;

/// What is common to the wires of one schedule.
#[derive(Debug)]
pub(crate) struct Weather {
    pub(crate) seed: u64,
    /// What may happen in this schedule.
    pub(crate) may: Disturbances,
    /// One call of so many is disturbed.
    pub(crate) one_of: u64,
    /// Whether the second copy of a request may come when the first was answered: a store whose holds do not end by
    /// themselves has to tell the two apart.
    pub(crate) late_copies: bool,
    /// The longest that one call may take.
    pub(crate) call: Duration,
    pub(crate) seen: Seen,
    state: Mutex<State>,
    calls: AtomicU64,
    /// There were too many calls.
    pub(crate) loops: Notify,
    /// What was wrong with requests, and when.
    violations: Mutex<Vec<(Instant, &'static str, String)>>,
}

#[derive(Debug, Default)]
struct State {
    /// From when on nothing goes wrong.
    calm: Option<Instant>,
    /// What did happen.
    happened: Disturbances,
    /// From when to when no client can reach the store.
    away: Option<(Instant, Instant)>,
}

impl Weather {
    pub(crate) fn new(seed: u64, may: Disturbances, one_of: u64, bounds: &Bounds) -> Arc<Self> {
        Arc::new(Self {
            seed,
            may,
            one_of,
            late_copies: bounds.capabilities.lease.is_some(),
            call: bounds.call,
            seen: Seen::default(),
            state: Mutex::default(),
            calls: AtomicU64::new(0),
            loops: Notify::new(),
            violations: Mutex::default(),
        })
    }

    /// From here on nothing goes wrong.
    pub(crate) fn calm_down(&self) {
        self.lock().calm = Some(Instant::now());
    }

    pub(crate) fn is_calm(&self) -> bool {
        self.lock().calm.is_some()
    }

    /// For how long nothing has gone wrong.
    pub(crate) fn calm_for(&self) -> Duration {
        self.lock().calm.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// The store cannot be reached by anybody for a while.
    pub(crate) fn goes_away(&self, from: Instant, until: Instant) {
        self.lock().away = Some((from, until));
    }

    fn is_away(&self) -> bool {
        let now = Instant::now();
        let state = self.lock();
        state.calm.is_none() && state.away.is_some_and(|(from, until)| from <= now && now < until)
    }

    /// Whether any call could be other than quick and carried out.
    pub(crate) fn disturbs_calls(&self) -> bool {
        let happened = self.happened();
        D::OF_CALLS.into_iter().chain([D::Cut, D::Pause, D::Away]).any(|one| happened.has(one))
    }

    /// Whether `one` may happen now. Then it is taken to happen.
    pub(crate) fn happens(&self, one: D) -> bool {
        let mut state = self.lock();
        let happens = self.may.has(one) && state.calm.is_none();
        if happens {
            state.happened = state.happened.with(one);
        }
        happens
    }

    pub(crate) fn happened(&self) -> Disturbances {
        self.lock().happened
    }

    fn wrong(&self, found: Option<(&'static str, String)>) {
        let Some((rule, what)) = found else { return };
        let mut violations = self.violations.lock().unwrap_or_else(PoisonError::into_inner);
        violations.push((Instant::now(), rule, what));
    }

    /// What was wrong with requests, each with the rule that says so, with times since `start`.
    pub(crate) fn violations(&self, start: Instant) -> Vec<String> {
        let violations = self.violations.lock().unwrap_or_else(PoisonError::into_inner);
        let said = |(at, rule, what): &(Instant, &str, String)| {
            format!("{rule}, {:.3?}: {what}", at.duration_since(start))
        };
        violations.iter().map(said).collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One of `seed`'s streams of numbers, apart from all others.
pub(crate) fn stream(seed: u64, which: u64, number: u64) -> Rng {
    let mixed = seed ^ which.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number.wrapping_mul(0xc2b2_ae3d_27d4_eb4f);
    let mut rng = Rng::with_seed(mixed);
    // The first number of neighbouring seeds is similar.
    rng.u64(..);
    rng
}

/// No answer. The engine bounds its calls itself; that nothing can come of a wait, which may be long, is the
/// backend's to notice.
async fn silence<T>(op: Op) -> Result<T, Failed> {
    if op != Op::Wait {
        return pending().await;
    }
    sleep(NOTICED).await;
    Err(Failed { kind: ErrorKind::OutcomeUnknown, refused: false })
}

/// How soon it is noticed that the store cannot be reached by a wait.
const NOTICED: Duration = Duration::from_secs(2);

/// The link between one client and the store, with its disturbances.
#[derive(Debug)]
pub struct Wire {
    weather: Arc<Weather>,
    client: u64,
    calls: AtomicU64,
    turns: Arc<ClientTurns>,
    /// Until then nothing arrives.
    cut_until: Mutex<Option<Instant>>,
    /// Until then calls may not be what they should be.
    troubled_until: Mutex<Instant>,
    requests: Requests,
    dead: std::sync::atomic::AtomicBool,
}

/// What happens to one call.
#[derive(Debug)]
struct Plan {
    before: Duration,
    after: Duration,
    fate: Fate,
}

#[derive(Debug)]
enum Fate {
    Carried,
    Lost,
    AnswerLost { silent: bool },
    Twice { apart: Duration },
    Failed(ErrorKind),
    Refused(ErrorKind),
}

/// A call that the store did not answer as asked.
#[derive(Clone, Debug)]
pub(crate) struct Failed {
    pub(crate) kind: ErrorKind,
    pub(crate) refused: bool,
}

impl Failed {
    pub(crate) fn error(&self) -> Error {
        Error::new(self.kind, "the simulated store was told to answer so")
    }
}

impl Wire {
    pub(crate) fn new(weather: &Arc<Weather>, client: u64, turns: &Arc<ClientTurns>) -> Arc<Self> {
        Arc::new(Self {
            weather: Arc::clone(weather),
            client,
            calls: AtomicU64::new(0),
            turns: Arc::clone(turns),
            cut_until: Mutex::new(None),
            troubled_until: Mutex::new(Instant::now()),
            requests: Requests::default(),
            dead: std::sync::atomic::AtomicBool::new(false),
        })
    }

    /// Whether clients may be stopped together with their clocks in this schedule.
    pub(crate) fn may_stop(&self) -> bool {
        self.weather.may.has(D::Stop)
    }

    pub(crate) fn seen(&self) -> &Seen {
        &self.weather.seen
    }

    /// Nothing arrives until `end`.
    pub(crate) fn cut(&self, end: Instant) {
        *self.cut_until.lock().unwrap_or_else(PoisonError::into_inner) = Some(end);
        self.is_troubled(end);
    }

    fn is_troubled(&self, until: Instant) {
        let mut known = self.troubled_until.lock().unwrap_or_else(PoisonError::into_inner);
        *known = until.max(*known);
    }

    /// From when on every call was what it should be.
    pub(crate) fn untroubled_since(&self) -> Instant {
        let away = self.weather.lock().away.filter(|(from, _)| *from <= Instant::now());
        let known = *self.troubled_until.lock().unwrap_or_else(PoisonError::into_inner);
        away.map_or(known, |(_, until)| until.max(known))
    }

    /// The engine asks for these.
    pub(crate) fn asks(&self, requests: &[Request], waiting: Waiting) {
        self.weather.wrong(self.requests.asked(requests, waiting));
    }

    /// It was told that these were turned down.
    pub(crate) fn turned_down(&self, requests: &[Request]) {
        self.requests.refused(requests);
    }

    /// The engine releases these.
    pub(crate) fn releases(&self, holds: &[HoldRef]) {
        self.weather.wrong(self.requests.releases(holds));
    }

    /// It was told what came of that.
    pub(crate) fn has_released(&self, holds: &[HoldRef], answers: &[Result<ReleaseReply, Error>]) {
        self.requests.released(holds, answers);
    }

    /// The client has died: nothing more comes from it, and nothing arrives at it.
    pub(crate) fn die(&self) {
        self.dead.store(true, Ordering::Release);
    }

    fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    fn is_cut(&self) -> bool {
        let until = *self.cut_until.lock().unwrap_or_else(PoisonError::into_inner);
        self.is_dead()
            || self.weather.is_away()
            || (!self.weather.is_calm() && until.is_some_and(|until| Instant::now() < until))
    }

    fn plan(&self, op: Op) -> Plan {
        let number = self.calls.fetch_add(1, Ordering::Relaxed);
        if self.weather.calls.fetch_add(1, Ordering::Relaxed) == TOO_MANY {
            self.weather.loops.notify_one();
        }
        let mut dice = stream(self.weather.seed, 1_000 + self.client, number);
        let ms = |dice: &mut Rng, most: u64| Duration::from_millis(dice.u64(..=most));
        let mut plan = Plan { before: ms(&mut dice, 3), after: ms(&mut dice, 3), fate: Fate::Carried };
        let silent = dice.bool();
        if dice.u64(..self.weather.one_of) != 0 {
            return plan;
        }
        let what = D::OF_CALLS[dice.usize(..D::OF_CALLS.len())];
        // Longer than the engine waits for a call, or the same with what that means for a short lease.
        let long = [60, 400, 1_500, 4_000][dice.usize(..4)];
        let kinds = [ErrorKind::Unavailable, ErrorKind::OutcomeUnknown, ErrorKind::Capacity];
        let kind = kinds[dice.usize(..kinds.len())];
        if !self.weather.happens(what) {
            return plan;
        }
        match what {
            D::SlowRequest => plan.before += ms(&mut dice, long),
            D::SlowAnswer => plan.after += ms(&mut dice, long),
            D::LostRequest => plan.fate = Fate::Lost,
            D::LostAnswer => plan.fate = Fate::AnswerLost { silent },
            D::LateRequest => {
                plan.before += Duration::from_millis(1_000) + ms(&mut dice, 2_500);
                plan.fate = Fate::AnswerLost { silent: true };
            }
            // A wait is one stay in the store's queue.
            D::Twice if op == Op::Wait => {}
            D::Twice => plan.fate = Fate::Twice { apart: ms(&mut dice, long) },
            D::Refusal if matches!(op, Op::Acquire | Op::Wait) => plan.fate = Fate::Refused(kind),
            _ => plan.fate = Fate::Failed(kind),
        }
        // Whoever has no answer waits for as long as a call may take.
        self.is_troubled(Instant::now() + self.weather.call + plan.before + plan.after);
        plan
    }

    /// Carries `work` to the store and its answer back. What has left the client goes its way, whoever drops this.
    pub(crate) async fn carry<T, W, F>(self: &Arc<Self>, op: Op, work: W) -> Result<T, Failed>
    where
        W: Fn() -> F + Send + 'static,
        F: Future<Output = T> + Send + 'static,
        T: Send + 'static,
    {
        let Plan { before, after, fate } = self.plan(op);
        if self.is_cut() || matches!(fate, Fate::Lost) {
            return silence(op).await;
        }
        let (reply, answer) = oneshot::channel();
        let wire = Arc::clone(self);
        tokio::spawn(async move {
            sleep(before).await;
            match fate {
                Fate::Failed(kind) => {
                    sleep(after).await;
                    let _ = reply.send(Err(Failed { kind, refused: false }));
                    return;
                }
                Fate::Refused(kind) => {
                    sleep(after).await;
                    let _ = reply.send(Err(Failed { kind, refused: true }));
                    return;
                }
                _ => {}
            }
            if reply.is_closed() {
                wire.seen().note(Sometimes::ArrivedAfterTheCallEnded);
            }
            let answer = work().await;
            if let Fate::Twice { apart } = fate {
                wire.seen().note(Sometimes::CarriedOutTwice);
                // A copy of an answered renewal could shorten a later one; no transport in use does that.
                if wire.weather.late_copies && op != Op::Renew {
                    tokio::spawn(async move {
                        sleep(apart).await;
                        work().await;
                    });
                } else {
                    work().await;
                }
            }
            sleep(after).await;
            let answer = match fate {
                Fate::AnswerLost { silent: true } => return,
                Fate::AnswerLost { silent: false } => {
                    Err(Failed { kind: ErrorKind::OutcomeUnknown, refused: false })
                }
                _ if wire.is_cut() => return,
                _ => Ok(answer),
            };
            if reply.send(answer).is_err() {
                wire.seen().note(Sometimes::AnsweredAfterTheCallEnded);
            }
        });
        match answer.await {
            Ok(answer) => answer,
            Err(_) => silence(op).await,
        }
    }

    /// Carries out `work` at the store and returns its result, unless a disturbance of the link prevents that. If dropped
    /// before `work` was carried out, it never is.
    ///
    /// # Errors
    ///
    /// The kind of the failure that the link was told to report.
    pub async fn carry_here<T>(&self, op: Op, work: impl FnOnce() -> T) -> Result<T, ErrorKind> {
        let Plan { before, after, fate } = self.plan(op);
        if self.is_cut() || matches!(fate, Fate::Lost) {
            return silence(op).await.map_err(|failed| failed.kind);
        }
        sleep(before).await;
        if let Fate::Failed(kind) | Fate::Refused(kind) = fate {
            sleep(after).await;
            return Err(kind);
        }
        let answer = work();
        sleep(after).await;
        match fate {
            Fate::AnswerLost { silent: true } => silence(op).await.map_err(|failed| failed.kind),
            Fate::AnswerLost { silent: false } => Err(ErrorKind::OutcomeUnknown),
            _ if self.is_cut() => silence(op).await.map_err(|failed| failed.kind),
            _ => Ok(answer),
        }
    }

    /// Tells the client something, unless that is lost on the way.
    pub(crate) fn tell(self: &Arc<Self>, what: impl FnOnce() + Send + 'static) {
        let number = self.calls.fetch_add(1, Ordering::Relaxed);
        let mut dice = stream(self.weather.seed, 5_000 + self.client, number);
        let (lost, late) = (dice.u8(..3) == 0, dice.u8(..3) == 0);
        let by = Duration::from_millis(dice.u64(..2_000));
        if self.is_cut() || (lost && self.weather.happens(D::LostEvent)) {
            return;
        }
        let by = if late && self.weather.happens(D::LateEvent) { by } else { Duration::ZERO };
        let wire = Arc::clone(self);
        tokio::spawn(async move {
            sleep(by).await;
            if wire.is_dead() {
                return;
            }
            InTurn::new(&wire.turns, async move { what() }).await;
        });
    }
}
