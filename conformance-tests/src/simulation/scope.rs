//! Small scopes: schedules of two clients and one key, whose messages, faults and drops come in the order that a source
//! of choices determines. An enumerator plays all schedules of a scope.
//!
//! The reductions, by which a scope has fewer schedules than there are:
//! - A reply, an event of the store, a release and a renewal arrive at once, unless a fault delays or loses them.
//! - Time passes only while all possible steps are faults, and [`Scope::pauses`] times before other steps. A step itself
//!   takes a millisecond.
//! - A late request arrives after its call has ended, and before more time passes.
//! - A caller drops its call between two steps, and its guard instead of a release. It drops no release.
//! - Callers wait, with one TTL and without options. The store has leases and no queue, and waiters poll once a second.
//! - The first step is of the first client, if both clients make the same calls.
//! - Clocks have the same rate, ready tasks run in order, and no client ends.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{AcquireOptions, Error, ErrorKind, FencingToken, Lock, LockKey, Mode, Validity};
use tokio::runtime::Builder;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use super::Simulation;
use super::caller::{CallOptions, HeldGuard, PendingCall};
use super::choices::{Choices, Enumerator};
use super::client::{ClientClock, ClientTurns};
use super::disturbance::{Disturbance as D, Disturbances};
use super::judge::Judge;
use super::modes::ScheduleModes;
use super::network::{Network, NetworkLink, stream};
use super::post::{Fate, LATE, Post, Step, Way};
use super::schedule::check_records;
use super::stores::{ClientEnvironment, OpenedStore, SimulatedClient};
use super::table::{HoldKind, Table};
use crate::history::{History, check};

/// The seed of the pauses of the engine, the same in all schedules.
const SEED: u64 = 0;
/// The key of all calls.
const KEY: &str = "a";
/// The budget of each call, longer than all leases that faults can leave.
const BUDGET: Duration = Duration::from_secs(30);
/// The time of one step, after which all ready tasks have run.
const STEP: Duration = Duration::from_millis(1);
/// The longest time until a waiting caller posts a step.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// The most steps of a schedule. More steps show a loop.
const MOST_STEPS: usize = 500;
/// The limit after the last call until no key is held.
const RESTS_WITHIN: Duration = Duration::from_secs(30);
/// The disturbances that a fault can be.
const FAULTS: [D; 6] = [D::LostRequest, D::LostAnswer, D::LateRequest, D::Twice, D::Failure, D::Cancel];

/// The calls and the most faults of a small scope.
#[derive(Clone, Debug)]
pub struct Scope {
    /// The modes of the calls of each client, in order.
    calls: [[Mode; 2]; 2],
    /// Whether both calls of a client start at the beginning, instead of one after the other.
    together: bool,
    faults: usize,
    pauses: usize,
    share_for: Duration,
    hands_over: bool,
}

impl Scope {
    /// Makes the scope in which each client makes its two calls one after the other, without faults.
    #[must_use]
    pub const fn new(calls: [[Mode; 2]; 2]) -> Self {
        let share_for = Duration::ZERO;
        Self { calls, together: false, faults: 0, pauses: 0, share_for, hands_over: false }
    }

    /// Starts both calls of a client at the beginning.
    #[must_use]
    pub const fn together(self) -> Self {
        Self { together: true, ..self }
    }

    /// Sets the most faults of a schedule. A dropped call or guard is a fault.
    #[must_use]
    pub const fn faults(self, faults: usize) -> Self {
        Self { faults, ..self }
    }

    /// Returns the most faults of a schedule.
    #[must_use]
    pub const fn most_faults(&self) -> usize {
        self.faults
    }

    /// Sets how often time passes before a step that could happen.
    #[must_use]
    pub const fn pauses(self, pauses: usize) -> Self {
        Self { pauses, ..self }
    }

    /// Sets how long readers of one client share a hold of the store.
    #[must_use]
    pub const fn share_for(self, share_for: Duration) -> Self {
        Self { share_for, ..self }
    }

    /// Makes clients pass their exclusive holds from one caller to the next.
    #[must_use]
    pub const fn hands_over(self) -> Self {
        Self { hands_over: true, ..self }
    }
}

/// The result of one schedule of a scope.
#[derive(Debug)]
pub struct ScopeReport {
    /// The violations, each with its rule. Empty if the schedule is correct.
    pub violations: Vec<String>,
    /// The faults that happened.
    pub happened: Disturbances,
    /// The choices, which repeat the schedule as [`ByteChoices`](super::ByteChoices).
    pub choices: Vec<u8>,
    /// One line for each step.
    pub steps: Vec<String>,
    /// The observations of the callers, in order.
    pub history: History,
    /// One line for each hold of the store.
    pub holds: Vec<String>,
}

/// The result of all schedules that start with the same choices.
#[derive(Debug, Default)]
pub struct Enumeration {
    /// The number of schedules that were played.
    pub schedules: u64,
    /// The faults that happened in some of them.
    pub happened: Disturbances,
    /// The first schedule with a violation, after which no further one was played.
    pub found: Option<Box<ScopeReport>>,
    /// Whether all schedules were played, each once.
    pub is_complete: bool,
}

impl fmt::Display for ScopeReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for step in &self.steps {
            writeln!(f, "{step}")?;
        }
        for event in &self.history.events {
            writeln!(f, "{event}")?;
        }
        for hold in &self.holds {
            writeln!(f, "{hold}")?;
        }
        for violation in &self.violations {
            writeln!(f, "WRONG  {violation}")?;
        }
        write!(f, "choices: {:?}", self.choices)
    }
}

impl Simulation {
    /// Plays one schedule of `scope`.
    pub fn play_scope(&self, scope: &Scope, choices: &mut dyn Choices) -> ScopeReport {
        play(self, scope, choices)
    }

    /// Plays the schedules of `scope` whose first choices are `fixed`, while `goes_on` returns true and none has a
    /// violation.
    #[must_use]
    pub fn enumerate(&self, scope: &Scope, fixed: &[usize], goes_on: impl Fn() -> bool) -> Enumeration {
        let (mut choices, mut all) = (Enumerator::after(fixed), Enumeration::default());
        while choices.starts() {
            if !goes_on() {
                return all;
            }
            let played = self.play_scope(scope, &mut choices);
            all.schedules += 1;
            all.happened = played.happened.iter().fold(all.happened, Disturbances::with);
            if !played.violations.is_empty() {
                all.found = Some(Box::new(played));
                return all;
            }
        }
        all.is_complete = !choices.has_diverged();
        all
    }

    /// Returns the first choices that divide the schedules of `scope` into parts: each has `depth` choices, or is a
    /// whole schedule.
    #[must_use]
    pub fn parts(&self, scope: &Scope, depth: usize) -> Vec<Vec<usize>> {
        let mut parts = vec![Vec::new()];
        for _ in 0..depth {
            let mut longer = Vec::new();
            for part in parts {
                let mut choices = Enumerator::after(&part);
                choices.starts();
                self.play_scope(scope, &mut choices);
                match choices.ways_after_fixed() {
                    Some(ways) => longer.extend((0..ways).map(|way| [&part[..], &[way]].concat())),
                    None => longer.push(part),
                }
            }
            parts = longer;
        }
        parts
    }
}

fn play(simulation: &Simulation, scope: &Scope, choices: &mut dyn Choices) -> ScopeReport {
    // Makes the iteration over hash tables the same in every process.
    LockKey::fix_hashes();
    fastrand::seed(SEED);
    match Builder::new_current_thread().enable_time().start_paused(true).build() {
        // Opens the store within the runtime, because the store may read its clock.
        Ok(runtime) => runtime.block_on(async { ScopeRun::new(simulation, scope).run(choices).await }),
        Err(error) => panic!("there is no runtime for a simulation: {error}"),
    }
}

/// The caller of one or two calls.
#[derive(Clone)]
struct ScopeCaller {
    client: u64,
    key: LockKey,
    lock: Arc<dyn Lock>,
    judge: Arc<Judge>,
    turns: Arc<ClientTurns>,
    post: Arc<Post>,
}

impl ScopeCaller {
    async fn run(self, modes: Vec<Mode>) {
        for mode in modes {
            self.call(mode).await;
            self.post.poke();
        }
    }

    /// Makes one call and ends its hold.
    async fn call(&self, mode: Mode) {
        let options = AcquireOptions::new().wait(BUDGET).mode(mode);
        let asked = CallOptions {
            budget: Some(BUDGET),
            cooldown: false,
            not_due: false,
            gives_up: false,
            max_hold: None,
            tries: false,
            ttl: self.lock.capabilities().lease.and_then(|lease| lease.default),
            keys: 1,
            mode,
        };
        let call = self.judge.ask(self.client, &self.key, asked, &self.turns);
        let pending = PendingCall { judge: Arc::clone(&self.judge), calls: vec![call] };
        let dropped = self.post.turn(self.client, Step::Call);
        let outcome = tokio::select! {
            biased;
            outcome = self.lock.acquire(&self.key, &options) => Some(outcome),
            Ok(_) = dropped => None,
        };
        match outcome {
            Some(Ok(guard)) => {
                pending.granted(std::slice::from_ref(&guard));
                self.hold(HeldGuard::new(&self.judge, guard)).await;
            }
            Some(Err(error)) => {
                pending.failed(&error);
                if error.kind() == ErrorKind::Timeout {
                    self.judge.violation("C11", format!("a call has waited for {BUDGET:?} in vain"));
                }
            }
            None => {}
        }
    }

    /// Holds the key until the hold ends, and writes under it if it is exclusive.
    async fn hold(&self, mut held_guard: HeldGuard) {
        let Some(guard) = held_guard.guard.take() else { return };
        let (holder, token, is_exclusive) = (guard.holder(), guard.token(), guard.mode() == Mode::Exclusive);
        let read = self.judge.read(&guard);
        held_guard.guard = Some(guard);
        let mut fate = self.post.turn(self.client, Step::End).await;
        while fate == Ok(Fate::Late) {
            sleep(LATE).await;
            fate = self.post.turn(self.client, Step::End).await;
        }
        let Some(guard) = held_guard.guard.take() else { return };
        if is_exclusive && guard.validity() == Validity::Valid {
            self.judge.write(&self.key, token.map_or(0, FencingToken::as_u64), read);
        }
        if fate == Ok(Fate::Dropped) {
            held_guard.guard = Some(guard);
            return;
        }
        self.judge.releasing(&guard.handle());
        let answer = guard.release().await;
        self.judge.released(holder, &answer);
    }
}

struct ScopeRun<'a> {
    scope: &'a Scope,
    open: OpenedStore,
    post: Arc<Post>,
    network: Arc<Network>,
    steps: Vec<String>,
    taken: Vec<u8>,
}

impl<'a> ScopeRun<'a> {
    fn new(simulation: &Simulation, scope: &'a Scope) -> Self {
        let open = (simulation.open)(HoldKind::Lease);
        let may = FAULTS.into_iter().fold(Disturbances::none(), Disturbances::with);
        let modes = ScheduleModes { share_for: scope.share_for, permits: 1 };
        let post = Arc::new(Post::default());
        let mut network = Network::new(SEED, may, 1, scope.hands_over, Some(modes), &open.store.bounds());
        network.post = Some(Arc::clone(&post));
        Self { scope, open, post, network: Arc::new(network), steps: Vec::new(), taken: Vec::new() }
    }

    async fn run(mut self, choices: &mut dyn Choices) -> ScopeReport {
        let (bounds, table) = (self.open.store.bounds(), self.open.table.clone());
        let judge = Judge::new(bounds, &self.network, Duration::ZERO, table.clone());
        if let Err(error) = self.play(&judge, choices).await {
            judge.violation("C3", format!("a client could not connect or close: {error}"));
        }
        self.report(&judge, table.as_deref())
    }

    async fn play(&mut self, judge: &Arc<Judge>, choices: &mut dyn Choices) -> Result<(), Error> {
        let key = LockKey::new(KEY)?;
        let (mut connections, mut callers) = (Vec::new(), Vec::new());
        for (number, modes) in (0..).zip(self.scope.calls) {
            let turns = ClientTurns::new(number, false);
            let link = NetworkLink::new(&self.network, number, &turns);
            judge.client_started(number, &link);
            let clock = ClientClock::draw(&mut stream(SEED, 2, number), false, &turns);
            let environment = ClientEnvironment { number, turns: Arc::clone(&turns), link, clock };
            let connection = self.open.store.connect(&environment)?;
            let caller = ScopeCaller {
                client: number,
                key: key.clone(),
                lock: Arc::clone(&connection.lock),
                judge: Arc::clone(judge),
                turns,
                post: Arc::clone(&self.post),
            };
            let parts = if self.scope.together {
                modes.map(|mode| vec![mode]).to_vec()
            } else {
                vec![modes.to_vec()]
            };
            callers.extend(parts.into_iter().map(|modes| tokio::spawn(caller.clone().run(modes))));
            connections.push(connection);
        }
        self.drive(&callers, judge, choices).await;
        self.network.end_disturbances();
        self.post.open();
        for caller in callers {
            if timeout(BUDGET, caller).await.is_ok_and(|ended| ended.is_err()) {
                judge.violation("C7", "a caller panicked");
            }
        }
        self.rest(&connections, judge).await;
        for (number, connection) in (0..).zip(connections) {
            connection.lock.close().await?;
            judge.closed(number);
        }
        Ok(())
    }

    /// Lets one step happen after another, as `choices` determine, until all calls have ended.
    async fn drive(&mut self, callers: &[JoinHandle<()>], judge: &Judge, choices: &mut dyn Choices) {
        let (mut faults, mut pauses) = (self.scope.faults, self.scope.pauses);
        let are_alike = self.scope.calls[0] == self.scope.calls[1];
        for taken in 0..MOST_STEPS {
            // The clock moves only if no task is ready.
            sleep(STEP).await;
            judge.check_guards();
            if callers.iter().all(JoinHandle::is_finished) {
                return;
            }
            let seen = self.post.changes();
            let mut ways = self.post.ways(faults > 0, pauses > 0);
            if taken == 0 && are_alike {
                ways.retain(|way| self.post.client_of(*way) != Some(1));
            }
            let could_step = ways.iter().any(|way| matches!(way, Way::Step(_, Fate::Happens)));
            match ways[self.choose(ways.len(), choices)] {
                Way::Time => {
                    pauses -= usize::from(could_step);
                    self.steps.push("time passes".to_owned());
                    self.post.changed(seen, Instant::now() + LONGEST_PAUSE).await;
                }
                Way::Step(at, fate) => {
                    faults -= usize::from(fate.is_fault());
                    let (client, step) = self.post.carry_out(at, fate);
                    if let Some(disturbance) = fate.disturbance(step) {
                        self.network.happens(disturbance);
                    }
                    self.steps.push(format!("client {client}: {step:?} {fate:?}"));
                }
            }
        }
        let open = judge.open();
        judge.violation("C11", format!("not ended after {MOST_STEPS} steps: {open:?}"));
    }

    fn choose(&mut self, ways: usize, choices: &mut dyn Choices) -> usize {
        if ways == 1 {
            return 0;
        }
        let way = choices.choose(ways);
        self.taken.push(u8::try_from(way).unwrap_or(u8::MAX));
        way
    }

    /// Waits until no key is held. Reports a violation if this takes too long.
    async fn rest(&self, connections: &[SimulatedClient], judge: &Judge) {
        let begun = Instant::now();
        loop {
            let engines = connections.iter().filter_map(|connection| connection.engine.as_ref());
            let active: usize = engines.map(|engine| engine.active_keys()).sum();
            let held = self.open.table.as_ref().map_or(Vec::new(), |table| table.held());
            if active == 0 && held.is_empty() {
                return;
            }
            if begun.elapsed() > RESTS_WITHIN {
                let what =
                    format!("at rest, {active} keys are active in engines, and the store has {held:?}");
                judge.violation("C5", what);
                return;
            }
            sleep(Duration::from_millis(250)).await;
        }
    }

    fn report(self, judge: &Judge, table: Option<&Table>) -> ScopeReport {
        judge.check_guards();
        let history = judge.history();
        let mut violations = judge.violations();
        violations.extend(self.network.violations(judge.start));
        if let Err(found) = check(&history, &judge.bounds.capabilities) {
            violations.extend(found.iter().map(ToString::to_string));
        }
        let mut holds = Vec::new();
        if let Some(table) = table {
            table.records(|records| {
                holds.extend(records.iter().map(|record| record.describe(judge.start)));
                violations.extend(check_records(records, u64::MAX, judge));
            });
        }
        let (happened, choices, steps) = (self.network.happened(), self.taken, self.steps);
        ScopeReport { violations, happened, choices, steps, history, holds }
    }
}
