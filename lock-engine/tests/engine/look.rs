//! Checks of the store between two renewals. They bound how long a guard reads valid after its machine was stopped
//! together with its clocks.

use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use leasehold_api::{
    Capabilities, Error, ErrorKind, LeaseBounds, LockExt, LockGuard, LockKey, LossReason, Scope, Validity,
};
use leasehold_engine::{
    Attempt, Backend, Clock, Engine, Events, Granted, HoldRef, Moment, ReleaseReply, Renewed, Request, Timing,
};
use tokio::time::{Instant, advance, sleep};

/// A clock that the test stops, and a wall clock that the test sets.
#[derive(Debug)]
struct Machine {
    origin: Instant,
    state: Mutex<(Duration, Option<Instant>, Duration)>,
    /// Pause of the next reader after reading the wall clock, and the sum of earlier pauses.
    pause: Mutex<(Duration, Duration)>,
}

impl Machine {
    fn new() -> Arc<Self> {
        Arc::new(Self { origin: Instant::now(), state: Mutex::default(), pause: Mutex::default() })
    }

    fn stop(&self) {
        self.state.lock().unwrap().1 = Some(Instant::now());
    }

    fn go_on(&self) {
        let mut state = self.state.lock().unwrap();
        let stopped = state.1.take().map_or(Duration::ZERO, |at| at.elapsed());
        state.0 += stopped;
    }

    fn set_wall_clock_ahead(&self, by: Duration) {
        self.state.lock().unwrap().2 += by;
    }

    fn counted(&self) -> Duration {
        let state = self.state.lock().unwrap();
        let paused = self.pause.lock().unwrap().1;
        paused
            + self
                .origin
                .elapsed()
                .saturating_sub(state.0 + state.1.map_or(Duration::ZERO, |at| at.elapsed()))
    }
}

impl Clock for Machine {
    fn now(&self) -> Moment {
        Moment::from_nanos(u64::try_from(self.counted().as_nanos()).unwrap())
    }

    fn wall(&self) -> Option<Duration> {
        let read = self.counted() + self.state.lock().unwrap().2;
        let mut pause = self.pause.lock().unwrap();
        let stands_still = std::mem::take(&mut pause.0);
        pause.1 += stands_still;
        Some(read)
    }
}

/// Calls that a store of leases has received, and its state.
#[derive(Debug, Default)]
struct Asked {
    /// Number of holds of each check.
    looks: Vec<usize>,
    renewals: usize,
    ended: HashSet<LockKey>,
    silent: bool,
    /// How much older than its request an answer is, and how many further answers are.
    early: Duration,
    early_answers: usize,
}

#[derive(Debug)]
struct Store {
    asked: Arc<Mutex<Asked>>,
    capabilities: Capabilities,
    look: Option<Duration>,
    events: OnceLock<Events>,
}

impl Store {
    fn answers(&self, holds: &[HoldRef]) -> Vec<Result<Renewed, Error>> {
        let mut asked = self.asked.lock().unwrap();
        let mut extended = Renewed::Extended;
        if asked.early_answers > 0 {
            asked.early_answers -= 1;
            let (now, early) = (self.events.get().unwrap().now(), asked.early);
            let early = u64::try_from(early.as_nanos()).unwrap();
            extended = Renewed::ExtendedFrom(Moment::from_nanos(now.as_nanos() - early));
        }
        let answer = |hold: &HoldRef| match asked.ended.contains(&hold.key) {
            true => Renewed::Gone(LossReason::Gone),
            false => extended,
        };
        holds.iter().map(|hold| Ok(answer(hold))).collect()
    }

    async fn hears(&self) {
        if self.asked.lock().unwrap().silent {
            std::future::pending::<()>().await;
        }
    }
}

impl fmt::Display for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("counting")
    }
}

#[async_trait::async_trait]
impl Backend for Store {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn timing(&self) -> Timing {
        let mut timing = Timing::default();
        timing.look = self.look;
        timing
    }

    fn attach(&self, events: Events) {
        self.events.set(events).unwrap();
    }

    async fn acquire(&self, requests: Vec<Request>) -> Vec<Result<Attempt, Error>> {
        requests.iter().map(|_| Ok(Attempt::Granted(Granted::with_token(None)))).collect()
    }

    async fn renew(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>> {
        self.hears().await;
        self.asked.lock().unwrap().renewals += 1;
        self.answers(&holds)
    }

    async fn look(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>> {
        self.hears().await;
        self.asked.lock().unwrap().looks.push(holds.len());
        self.answers(&holds)
    }

    async fn release(&self, holds: Vec<HoldRef>) -> Vec<Result<ReleaseReply, Error>> {
        holds.iter().map(|_| Ok(ReleaseReply::new(true))).collect()
    }

    async fn close(&self) {}
}

const SECOND: Duration = Duration::from_secs(1);

fn engine(look: Option<Duration>, ttl: Duration) -> (Engine, Arc<Mutex<Asked>>, Arc<Machine>) {
    let (asked, machine) = (Arc::default(), Machine::new());
    let mut capabilities = Capabilities::new(Scope::Network);
    capabilities.lease = Some(LeaseBounds::new(Some(ttl), SECOND / 10, SECOND * 86_400));
    let store = Store { asked: Arc::clone(&asked), capabilities, look, events: OnceLock::new() };
    let engine = Engine::builder(store).clock(Arc::clone(&machine) as _).start().unwrap();
    (engine, asked, machine)
}

async fn hold(engine: &Engine, keys: usize) -> Vec<LockGuard> {
    let mut guards = Vec::new();
    for n in 0..keys {
        guards.push(engine.key(format!("k{n}")).acquire().await.unwrap());
        sleep(Duration::from_millis(3)).await;
    }
    guards
}

#[tokio::test(start_paused = true)]
async fn all_holds_are_looked_at_in_one_call_every_sixth_of_the_ttl_or_five_seconds() {
    // A renewal at a third of the TTL also serves as a check: three checks before each renewal of 60 s, one before
    // each of 6 s.
    for (ttl, looks, renewals) in [(60, 17..=22, 6..=7), (6, 58..=70, 58..=70)] {
        let (engine, asked, _machine) = engine(Some(SECOND * 5), SECOND * ttl);
        let guards = hold(&engine, 100).await;
        let before = asked.lock().unwrap().looks.len();
        sleep(SECOND * 120).await;
        {
            let asked = asked.lock().unwrap();
            let looked = &asked.looks[before..];
            assert!(looks.contains(&looked.len()), "TTL {ttl} s: {} looks", looked.len());
            assert!(looked[3..].iter().all(|holds| *holds == 100), "TTL {ttl} s: {looked:?}");
            assert!(renewals.contains(&asked.renewals), "TTL {ttl} s: {} renewals", asked.renewals);
        }
        assert!(guards.iter().all(|guard| guard.validity() == Validity::Valid));
        drop(guards);
    }
}

#[tokio::test(start_paused = true)]
async fn a_machine_stopped_with_its_clocks_finds_out_by_its_next_look() {
    for (ttl, bound) in [(60, 5_000), (6, 1_000), (1, 167)] {
        let (engine, asked, machine) = engine(Some(SECOND * 5), SECOND * ttl);
        let guard = hold(&engine, 1).await.remove(0);
        sleep(SECOND * 10).await;
        machine.stop();
        advance(SECOND * 3_600).await;
        machine.go_on();
        // The store has ended the hold during the stop. Set only now, because the driver can run while the simulated
        // machine is stopped.
        asked.lock().unwrap().ended.insert(guard.key().clone());
        assert_eq!(guard.validity(), Validity::Valid, "no clock tells");
        let went_on = Instant::now();
        guard.lost().await;
        let took = went_on.elapsed();
        assert!(took <= Duration::from_millis(bound + 5), "TTL {ttl} s: {took:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn without_looks_it_finds_out_by_its_next_renewal() {
    let (engine, asked, machine) = engine(None, SECOND * 60);
    let guard = hold(&engine, 1).await.remove(0);
    machine.stop();
    asked.lock().unwrap().ended.insert(guard.key().clone());
    advance(SECOND * 3_600).await;
    machine.go_on();
    let went_on = Instant::now();
    guard.lost().await;
    assert!(went_on.elapsed() <= SECOND * 20 + SECOND, "{:?}", went_on.elapsed());
    assert!(asked.lock().unwrap().looks.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_wall_clock_that_jumps_ahead_is_a_doubt_until_the_store_confirms() {
    for look in [Some(SECOND * 5), None] {
        let (engine, asked, machine) = engine(look, SECOND * 60);
        let guard = hold(&engine, 1).await.remove(0);
        sleep(SECOND * 2).await;
        asked.lock().unwrap().silent = true;
        machine.set_wall_clock_ahead(SECOND * 30);
        // The driver compares the clocks once a second.
        sleep(SECOND * 2).await;
        assert_eq!(guard.validity(), Validity::InDoubt, "{look:?}");
        asked.lock().unwrap().silent = false;
        // The engine repeats calls that hang.
        sleep(SECOND * 25).await;
        assert_eq!(guard.validity(), Validity::Valid, "{look:?}: confirmed");
        assert_eq!(guard.lost().reason(), None, "a clock that was set never means lost");
        guard.release().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_small_step_and_a_step_back_of_the_wall_clock_are_nothing() {
    let (engine, asked, machine) = engine(Some(SECOND * 5), SECOND * 60);
    let guard = hold(&engine, 1).await.remove(0);
    machine.set_wall_clock_ahead(SECOND * 100);
    sleep(SECOND * 6).await;
    asked.lock().unwrap().silent = true;
    machine.set_wall_clock_ahead(SECOND * 5);
    sleep(SECOND * 2).await;
    assert_eq!(guard.validity(), Validity::Valid, "less than the margin of a tenth");
    machine.state.lock().unwrap().2 = Duration::ZERO;
    sleep(SECOND * 2).await;
    assert_eq!(guard.validity(), Validity::Valid, "a clock that is set back hides no time");
    drop(guard);
}

#[tokio::test(start_paused = true)]
async fn a_thread_that_stands_still_between_two_clocks_doubts_nothing() {
    let (engine, asked, machine) = engine(Some(SECOND * 5), SECOND * 60);
    let guard = hold(&engine, 1).await.remove(0);
    sleep(SECOND * 2).await;
    asked.lock().unwrap().silent = true;
    machine.pause.lock().unwrap().0 = SECOND * 7;
    sleep(SECOND * 3).await;
    assert_eq!(machine.pause.lock().unwrap().1, SECOND * 7, "the wall clock was read");
    assert_eq!(guard.validity(), Validity::Valid);
    drop(guard);
}

#[tokio::test(start_paused = true)]
async fn a_confirmation_is_a_question_of_its_own() {
    for look in [Some(SECOND * 5), None] {
        let (engine, asked, machine) = engine(look, SECOND * 60);
        let guard = hold(&engine, 1).await.remove(0);
        guard.confirm().await.unwrap();
        machine.stop();
        advance(SECOND * 3_600).await;
        machine.go_on();
        // The store has ended the hold during the stop. Set only now, because the driver can run while the simulated
        // machine is stopped.
        asked.lock().unwrap().ended.insert(guard.key().clone());
        assert_eq!(guard.validity(), Validity::Valid, "no clock tells");
        let error = guard.confirm().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
        assert!(error.to_string().contains("k0"), "{error}");
        assert_eq!(guard.validity(), Validity::Lost);
    }
}

#[tokio::test(start_paused = true)]
async fn a_confirmation_that_is_not_answered_is_an_error_within_the_limit_of_a_call() {
    let (engine, asked, _machine) = engine(Some(SECOND * 5), SECOND * 600);
    let guard = hold(&engine, 1).await.remove(0);
    asked.lock().unwrap().silent = true;
    let begun = Instant::now();
    let error = guard.confirm().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.is_retryable());
    assert!(begun.elapsed() <= SECOND * 10, "{:?}", begun.elapsed());
    assert_eq!(guard.validity(), Validity::Valid, "it is not lost by that");
}

/// Sets how much older than their requests the next answers are.
fn answer_early(asked: &Mutex<Asked>, early: Duration, answers: usize) {
    let mut asked = asked.lock().unwrap();
    (asked.early, asked.early_answers) = (early, answers);
}

/// Returns the number of calls of both kinds.
fn calls(asked: &Mutex<Asked>) -> usize {
    let asked = asked.lock().unwrap();
    asked.looks.len() + asked.renewals
}

/// C9: the machine can have been stopped between the request that the answer is from and the doubt.
#[tokio::test(start_paused = true)]
async fn an_answer_that_is_older_than_a_doubt_leaves_it() {
    for look in [Some(SECOND * 5), None] {
        let (engine, asked, machine) = engine(look, SECOND * 60);
        let guard = hold(&engine, 1).await.remove(0);
        sleep(SECOND * 5).await;
        answer_early(&asked, SECOND * 3, usize::MAX);
        let before = calls(&asked);
        machine.set_wall_clock_ahead(SECOND * 30);
        // The driver compares the clocks once a second.
        sleep(SECOND * 2).await;
        assert!(calls(&asked) > before, "{look:?}: the store was asked");
        assert_eq!(guard.validity(), Validity::InDoubt, "{look:?}");
        sleep(SECOND * 8).await;
        assert_eq!(guard.validity(), Validity::Valid, "{look:?}: the answers are from after the doubt");
        let made = calls(&asked) - before;
        assert!(made <= 20, "{look:?}: {made} calls in ten seconds");
        guard.release().await.unwrap();
    }
}

/// C9: a confirmation is an answer to a request that was sent after the call.
#[tokio::test(start_paused = true)]
async fn an_answer_from_before_the_call_confirms_nothing() {
    for look in [Some(SECOND * 5), None] {
        let (engine, asked, _machine) = engine(look, SECOND * 600);
        let guard = hold(&engine, 1).await.remove(0);
        sleep(SECOND * 2).await;
        answer_early(&asked, SECOND, usize::MAX);
        let before = calls(&asked);
        let error = guard.confirm().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{look:?}: {error}");
        assert!(error.message().contains("from an earlier request"), "{look:?}: {error}");
        assert_eq!((calls(&asked) - before, guard.validity()), (2, Validity::Valid), "{look:?}");
        answer_early(&asked, SECOND, 1);
        guard.confirm().await.unwrap();
        assert_eq!(calls(&asked) - before, 4, "{look:?}: the second answer is from after the call");
        drop(guard);
    }
}
