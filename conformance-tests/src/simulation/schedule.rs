//! One schedule. Clients start, work, pause, die and end under disturbances. Then the disturbances end, all
//! work ends, and the judge checks the rest.

mod probe;

use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use leasehold_api::{Error, LockKey};
use tokio::runtime::{Builder, Handle};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::Simulation;
use super::caller::Caller;
use super::candidates::{Candidate, ask_at_times};
use super::client::{ClientClock, ClientTurns};
use super::cluster::{self, Cluster};
use super::coverage::{Coverage, Situation};
use super::disturbance::{Disturbance as D, Disturbances};
use super::judge::Judge;
use super::lifecycle::{RunningClient, close, drop_client, force_release_where, forget};
use super::modes::ScheduleModes;
use super::network::{Network, NetworkLink, stream};
use super::stores::{ClientEnvironment, OpenedStore, SimulatedStore};
use super::table::{EndedBy, HoldKind, HoldRecord, Table};
use crate::history::{History, ViolationKind, check};

/// How long callers start new work and disturbances happen.
const BUSY: Duration = Duration::from_secs(12);
/// The limit for the end of all work after the last disturbance.
const ENDS_WITHIN: Duration = Duration::from_secs(90);
/// The further limit until no key is held, because failed releases are repeated after pauses.
const RESTS_WITHIN: Duration = Duration::from_secs(30);
/// The longest total time for which late requests can hold a key.
const LONGEST_WAIT: Duration = Duration::from_secs(15);
/// The delay until an operator ends the holds of dead clients.
const OPERATOR: Duration = Duration::from_secs(2);

/// The stream that selects schedules with hand-overs. It leaves out the seeds that once have shown a fault, to keep
/// their schedules as they were.
const HANDS_OVER: u64 = 12;
/// The stream that selects schedules with elections, without those seeds.
const ELECTS: u64 = 20;

/// The result of a schedule.
#[derive(Debug)]
pub struct ScheduleReport {
    /// The seed of the schedule.
    pub seed: u64,
    /// The violations, each with its rule. Empty if the schedule is correct.
    pub violations: Vec<String>,
    /// The disturbances that happened.
    pub happened: Disturbances,
    /// The observations of callers, in order.
    pub history: History,
    /// One line for each hold of the store. Empty for a store without a readable record.
    pub holds: Vec<String>,
    pub(crate) coverage: Coverage,
}

impl ScheduleReport {
    /// Returns the situations that the schedule encountered.
    #[must_use]
    pub const fn coverage(&self) -> &Coverage {
        &self.coverage
    }
}

/// Opens a fresh store for a schedule.
pub(crate) type OpenStore = dyn Fn(HoldKind) -> OpenedStore + Send + Sync;

/// Plays the schedule of `seed` without the disturbances `without`.
pub(crate) fn play(simulation: &Simulation, seed: u64, without: Disturbances) -> ScheduleReport {
    // Makes the iteration over hash tables the same in every process.
    LockKey::fix_hashes();
    fastrand::seed(seed);
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build();
    match runtime {
        Ok(runtime) => {
            // Opens the store within the runtime, because the store may read its clock.
            runtime.block_on(async { ScheduleRun::new(simulation, seed, without).run().await })
        }
        Err(error) => panic!("there is no runtime for a simulation: {error}"),
    }
}

struct ScheduleRun {
    seed: u64,
    dice: Rng,
    store: Box<dyn SimulatedStore>,
    /// The store's own record, if the simulator can read it.
    table: Option<Arc<Table>>,
    cluster: Option<Arc<Cluster>>,
    network: Arc<Network>,
    keys: Vec<LockKey>,
    cooldown: Duration,
    /// The election of the callers that campaign.
    candidate: Option<Arc<dyn Candidate>>,
    /// The number of the first client that the judge does not watch.
    probe: u64,
}

impl ScheduleRun {
    fn new(simulation: &Simulation, seed: u64, without: Disturbances) -> Self {
        let mut dice = stream(seed, 1, 0);
        let kind = [HoldKind::Lease, HoldKind::Lease, HoldKind::Session, HoldKind::Latch][dice.usize(..4)];
        let mut may = Disturbances::draw(&mut dice);
        if stream(seed, 4, 0).u8(..4) == 0 {
            may = may.with(D::Away);
        }
        may = may.and(without.others());
        let one_of = [3, 8, 30][dice.usize(..3)];
        let mut names = ["a", "b", "c"];
        if dice.u8(..4) == 0 {
            let alike = ["a", "A", "a ", "a:b", "ab", "\u{e9}", "e\u{301}"];
            names = [(); 3].map(|()| alike[dice.usize(..alike.len())]);
        }
        let mut keys: Vec<_> =
            names[..dice.usize(1..=3)].iter().filter_map(|name| LockKey::new(*name).ok()).collect();
        keys.sort();
        keys.dedup();
        let cooldown = Duration::from_secs(if dice.u8(..4) == 0 { 2 } else { 0 });
        let OpenedStore { store, table, cluster } = (simulation.open)(kind);
        if cluster.is_some() {
            may = cluster::disturbances(seed, may).and(without.others());
        }
        // Stops clients only if they look at the store often, because otherwise a guard reads held until its next
        // renewal.
        let stops = store.bounds().look.is_some() && stream(seed, 6, 0).u8(..4) == 0;
        let may = if stops && !without.has(D::Stop) { may.with(D::Stop) } else { may };
        let hands_over = match table {
            Some(_) => stream(seed, HANDS_OVER, 0).u8(..3) == 0,
            None => !store.bounds().capabilities.handover_for.is_zero(),
        };
        let has_modes = store.bounds().capabilities.modes.shared;
        let modes = ScheduleModes::draw(seed).filter(|_| has_modes);
        let network = Arc::new(Network::new(seed, may, one_of, hands_over, modes, &store.bounds()));
        let candidate = simulation.candidate.clone().filter(|_| stream(seed, ELECTS, 0).u8(..4) == 0);
        Self { seed, dice, store, table, cluster, network, keys, cooldown, candidate, probe: u64::MAX }
    }

    async fn run(mut self) -> ScheduleReport {
        let cooldown = if self.store.bounds().capabilities.cooldown { self.cooldown } else { Duration::ZERO };
        let table = self.table.clone();
        let judge = Judge::new(self.store.bounds(), &self.network, cooldown, table.clone());
        let network = Arc::clone(&self.network);
        let looks = tokio::spawn(Arc::clone(&judge).check_periodically());
        if let Some(table) = table.clone().filter(|_| self.candidate.is_some()) {
            let dice = stream(self.seed, ELECTS, 1);
            tokio::spawn(ask_at_times(table, self.keys.clone(), dice, Instant::now() + BUSY));
        }
        if let Some(cluster) = &self.cluster {
            cluster::disturb(cluster, &judge, Instant::now() + BUSY);
        }
        let played = tokio::select! {
            biased;
            () = network.loops.notified() => {
                judge.violation("C4", "the store is asked again and again without a pause");
                Ok(())
            }
            played = self.play(&judge) => played,
        };
        looks.abort();
        if let Err(error) = played {
            judge.violation("C3", format!("no client without a fault could connect or work: {error}"));
        }
        self.report(&judge, table)
    }

    async fn play(&mut self, judge: &Arc<Judge>) -> Result<(), Error> {
        let begun = Instant::now();
        let end = begun + BUSY;
        if self.network.happens(D::Away) {
            let mut dice = stream(self.seed, 5, 0);
            let from = begun + Duration::from_millis(dice.u64(..4_000));
            self.network.set_outage(from, from + Duration::from_millis(dice.u64(500..9_500)));
        }
        let places = self.dice.usize(2..=4);
        let mut clients = Vec::new();
        let mut next = 0;
        for _ in 0..places {
            clients.push(Some(self.client(next, end, judge)?));
            next += 1;
        }
        // The disturbances of whole clients, in the order of their times.
        let mut happenings: Vec<(Instant, D, usize)> = Vec::new();
        for what in [D::Cut, D::Pause, D::Crash, D::Close, D::Drop, D::Force] {
            for _ in 0..self.dice.usize(..4) {
                let at = begun + Duration::from_millis(self.dice.u64(..11_000));
                happenings.push((at, what, self.dice.usize(..places)));
            }
        }
        if self.network.may.has(D::Stop) {
            let mut dice = stream(self.seed, 7, 0);
            for _ in 0..dice.usize(1..4) {
                let at = begun + Duration::from_millis(dice.u64(..11_000));
                happenings.push((at, D::Stop, dice.usize(..places)));
            }
        }
        happenings.sort();
        let mut ends = Vec::new();
        for (at, what, place) in happenings {
            sleep_until(at).await;
            let (how_long, key) = (self.dice.u64(200..9_000), self.dice.usize(..self.keys.len()));
            let (pause, now) = (Duration::from_millis(how_long), Instant::now());
            let restart = Duration::from_millis(self.dice.u64(..1_500));
            if !self.network.happens(what) {
                continue;
            }
            match what {
                D::Force => {
                    if self.store.force_release(&self.keys[key]) {
                        judge.forced(&self.keys[key]);
                    }
                    continue;
                }
                D::Cut | D::Pause | D::Stop => {
                    let Some(client) = &clients[place] else { continue };
                    if what == D::Cut {
                        client.environment.link.disconnect_until(now + pause);
                        continue;
                    }
                    let turns = Arc::clone(&client.environment.turns);
                    if what == D::Stop {
                        turns.stop();
                    } else {
                        turns.pause();
                    }
                    ends.push(tokio::spawn(async move {
                        sleep(pause).await;
                        turns.resume();
                    }));
                    continue;
                }
                _ => {}
            }
            let Some(client) = clients[place].take() else { continue };
            // Resumes the client, because a paused client could neither close nor be dropped.
            client.environment.turns.resume();
            match what {
                D::Crash => self.crash(client, judge, &mut ends),
                D::Close => ends.push(tokio::spawn(close(client, Arc::clone(judge)))),
                _ => ends.push(tokio::spawn(drop_client(client, Arc::clone(judge)))),
            }
            sleep(restart).await;
            clients[place] = Some(self.client(next, end, judge)?);
            next += 1;
        }
        sleep_until(end).await;
        self.network.end_disturbances();
        clients.iter().flatten().for_each(|client| client.environment.turns.resume());
        self.settle(clients.into_iter().flatten().collect(), ends, next, judge).await
    }

    /// Starts a new client and its callers.
    fn client(&mut self, number: u64, end: Instant, judge: &Arc<Judge>) -> Result<RunningClient, Error> {
        let environment = self.environment(number);
        judge.client_started(number, &environment.link);
        let connection = self.store.connect(&environment)?;
        let mut dice = stream(self.seed, 3, number);
        let mut callers = Vec::new();
        // Local waiters are frequent if holds can pass to them.
        let more = if self.network.hands_over && self.table.is_some() { 2 } else { 0 };
        for caller in 0..dice.u64(1..=3) + more {
            // At most one campaign of a client and key, because a second one is refused.
            let campaigns = stream(self.seed, 20_000 + number, caller).bool();
            let key = usize::try_from(caller).ok().and_then(|at| self.keys.get(at)).filter(|_| campaigns);
            let candidacy = self.candidate.clone().zip(key.cloned());
            let caller = Caller {
                client: number,
                lock: Arc::clone(&connection.lock),
                judge: Arc::clone(judge),
                turns: Arc::clone(&environment.turns),
                keys: self.keys.clone(),
                dice: stream(self.seed, 100 + number, caller),
                hand_over_dice: stream(self.seed, 10_000 + number, caller),
                mode_dice: stream(self.seed, 30_000 + number, caller),
                // No long leases if a hold can stay at the store that no client can release.
                long_leases: ![D::Crash, D::Twice, D::Close, D::Drop]
                    .iter()
                    .any(|one| self.network.may.has(*one)),
                until: end,
            };
            callers.push(caller.spawn(candidacy));
        }
        Ok(RunningClient { number, environment, connection, callers })
    }

    fn environment(&self, number: u64) -> ClientEnvironment {
        let may = |one| self.network.may.has(one) && !self.network.is_undisturbed();
        let mut dice = stream(self.seed, 2, number);
        let turns = ClientTurns::new(dice.u64(..), may(D::Order));
        let link = NetworkLink::new(&self.network, number, &turns);
        ClientEnvironment {
            number,
            clock: ClientClock::draw(&mut dice, may(D::ClockRate), &turns),
            turns,
            link,
        }
    }

    fn crash(&self, client: RunningClient, judge: &Arc<Judge>, ends: &mut Vec<JoinHandle<()>>) {
        client.environment.turns.die();
        client.environment.link.die();
        judge.died(client.number);
        let Some(table) = self.table.clone() else { return forget(client) };
        table.client_died(client.number);
        forget(client);
        if table.kind == HoldKind::Latch {
            ends.push(tokio::spawn(async move {
                sleep(OPERATOR).await;
                force_release_where(&table, |_, is_dead| is_dead);
            }));
        }
    }

    /// Waits until all work has ended after the last disturbance, and checks that nothing is left.
    async fn settle(
        &mut self,
        mut clients: Vec<RunningClient>,
        ends: Vec<JoinHandle<()>>,
        next: u64,
        judge: &Arc<Judge>,
    ) -> Result<(), Error> {
        let table = self.table.clone();
        let all = async {
            for end in ends {
                let _ = end.await;
            }
            for client in &mut clients {
                for caller in std::mem::take(&mut client.callers) {
                    if caller.await.is_err_and(|error| error.is_panic()) {
                        judge.violation("C7", "a caller panicked");
                    }
                }
            }
        };
        // An operator ends each latch (a hold without lease or session) that its holder has lost, because no client
        // releases it.
        let unlatch = async {
            loop {
                sleep(OPERATOR).await;
                if let Some(table) = table.as_ref().filter(|table| table.kind == HoldKind::Latch) {
                    force_release_where(table, |holder, is_dead| {
                        is_dead || judge.was_lost(holder) || judge.is_gone(holder)
                    });
                }
            }
        };
        tokio::select! {
            biased;
            ended = timeout(ENDS_WITHIN, all) => if ended.is_err() {
                for open in judge.open() {
                    judge.violation("C11", format!("not ended {ENDS_WITHIN:?} after the last fault: {open}"));
                }
                return Ok(());
            },
            () = unlatch => {}
        }
        // Waits for late requests.
        sleep(Duration::from_secs(8)).await;
        self.wait_until_free(&clients, table.as_ref(), judge).await;
        self.probe = next;
        self.probe(next, judge).await?;
        let are_engines = clients.iter().all(|client| client.connection.engine.is_some());
        for client in clients {
            if self.dice.bool() {
                close(client, Arc::clone(judge)).await;
            } else {
                drop_client(client, Arc::clone(judge)).await;
            }
        }
        sleep(Duration::from_secs(8)).await;
        if are_engines && !self.network.may.has(D::Crash) {
            // One task is `check_periodically`. This future is not a task.
            let left = Handle::current().metrics().num_alive_tasks();
            if left > 1 {
                judge.violation("C17", format!("{} tasks are left when everything is closed", left - 1));
            }
        }
        Ok(())
    }

    /// Waits until no key is held. Reports a violation if this takes too long.
    async fn wait_until_free(&self, clients: &[RunningClient], table: Option<&Arc<Table>>, judge: &Judge) {
        let begun = Instant::now();
        loop {
            let engines = clients.iter().filter_map(|client| client.connection.engine.as_ref());
            let active: usize = engines.map(|engine| engine.active_keys()).sum();
            let held = match &self.cluster {
                Some(cluster) => cluster.held(),
                None => table.map_or(Vec::new(), |table| table.held()),
            };
            if active == 0 && held.is_empty() {
                return;
            }
            if begun.elapsed() > RESTS_WITHIN {
                judge.violation(
                    "C5",
                    format!("at rest, {active} keys are active in engines, and the store has {held:?}"),
                );
                return;
            }
            if let Some(table) = table.filter(|table| table.kind == HoldKind::Latch) {
                force_release_where(table, |holder, is_dead| {
                    is_dead || judge.was_lost(holder) || judge.is_gone(holder)
                });
            }
            sleep(Duration::from_millis(250)).await;
        }
    }

    fn report(self, judge: &Judge, table: Option<Arc<Table>>) -> ScheduleReport {
        judge.check_guards();
        let history = judge.history();
        let mut violations = judge.violations();
        violations.extend(self.network.violations(judge.start));
        // Some violations do not count after some disturbances. The history misses holds that an operator
        // ended and losses during a pause, but the periodic checks cover these. A client whose clocks stopped
        // can receive a grant that has already ended.
        let happened = self.network.happened();
        let counts = |kind: ViolationKind| match kind {
            ViolationKind::Overlap | ViolationKind::TooManyPermits => {
                ![D::Force, D::Pause, D::Stop, D::Restore].iter().any(|one| happened.has(*one))
            }
            ViolationKind::TokenNotGreater => !happened.has(D::Force) && !happened.has(D::Stop),
            _ => true,
        };
        if let Err(found) = check(&history, &judge.bounds.capabilities) {
            violations.extend(found.iter().filter(|v| counts(v.kind)).map(ToString::to_string));
        }
        violations.extend(self.cluster.iter().flat_map(|cluster| cluster.violations(judge.start)));
        let mut holds = Vec::new();
        if let Some(table) = table {
            table.records(|records| {
                holds.extend(records.iter().map(|record| record.describe(judge.start)));
                violations.extend(check_records(records, self.probe, judge));
            });
        }
        let coverage = Coverage::default();
        coverage.add(&self.network.coverage);
        ScheduleReport {
            seed: self.seed,
            violations,
            happened: self.network.happened(),
            history,
            holds,
            coverage,
        }
    }
}

/// Checks the store's own record. Returns the violations.
pub(super) fn check_records(records: &[HoldRecord], probe: u64, judge: &Judge) -> Vec<String> {
    let mut wrong = Vec::new();
    for (at, record) in records.iter().enumerate().filter(|(_, record)| record.client < probe) {
        if matches!(record.ended, Some((_, EndedBy::Release))) && !judge.was_granted(record.holder) {
            judge.note(Situation::UndoneGrant);
        }
        let other = |earlier: &&HoldRecord| {
            earlier.holder == record.holder && (&earlier.key, earlier.client) != (&record.key, record.client)
        };
        if let Some(other) = records[..at].iter().find(other) {
            wrong.push(format!(
                "C2: {} of {} was granted for {} before",
                record.holder, record.key, other.key
            ));
        }
    }
    wrong
}
