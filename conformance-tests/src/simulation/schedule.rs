//! One schedule: clients come, work, stand still, die and go; then nothing goes wrong any more, all comes to rest, and
//! the judge looks at what is left.

use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use leasehold_api::{Error, Lock as _, LockExt as _, LockKey};
use tokio::runtime::{Builder, Handle};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::caller::Caller;
use super::client::{ClientClock, ClientTurns, InTurn};
use super::coverage::{Seen, Sometimes};
use super::disturbance::{Disturbance as D, Disturbances};
use super::judge::Book;
use super::lifecycle::{Client, close, drop_client, forget};
use super::network::{Weather, Wire, stream};
use super::stores::{ClientEnvironment, SimulatedClient, SimulatedStore};
use super::table::{EndedBy, Kind, Stay, Table};
use crate::history::{History, ViolationKind, check};

/// For how long things are begun.
const BUSY: Duration = Duration::from_secs(12);
/// How long it may take until all that was begun has ended, once nothing goes wrong any more.
const ENDS_WITHIN: Duration = Duration::from_secs(90);
/// How long it may take after that until nothing is held: a release that failed is repeated after pauses.
const RESTS_WITHIN: Duration = Duration::from_secs(30);
/// How long a key may be held by what came late, in all.
const LONGEST_WAIT: Duration = Duration::from_secs(15);
/// An operator comes this long after a client has died.
const OPERATOR: Duration = Duration::from_secs(2);

/// What a schedule came to.
#[derive(Debug)]
pub struct Played {
    /// What everything was drawn from.
    pub seed: u64,
    /// What was wrong, each with the rule that says so. Empty: nothing.
    pub violations: Vec<String>,
    /// What disturbed it.
    pub happened: Disturbances,
    /// What callers saw, in order.
    pub history: History,
    /// What the store did, one line for each hold; empty for a store that cannot be asked.
    pub record: Vec<String>,
    pub(crate) seen: Seen,
}

impl Played {
    /// What it ran into.
    #[must_use]
    pub const fn seen(&self) -> &Seen {
        &self.seen
    }
}

/// Opens a fresh store for a schedule. The simulator's own store is of this kind, and its table is returned as well.
pub(crate) type Open = dyn Fn(Kind) -> (Box<dyn SimulatedStore>, Option<Arc<Table>>) + Send + Sync;

/// Plays the schedule of `seed` without the disturbances `without`.
pub(crate) fn play(open: &Open, seed: u64, without: Disturbances) -> Played {
    // Tables are walked in the order of the hashes.
    LockKey::fix_hashes();
    fastrand::seed(seed);
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build();
    match runtime {
        Ok(runtime) => {
            let play = Play::new(open, seed, without);
            runtime.block_on(play.run())
        }
        Err(error) => panic!("there is no runtime for a simulation: {error}"),
    }
}

struct Play {
    seed: u64,
    dice: Rng,
    world: Box<dyn SimulatedStore>,
    /// What the store itself knows, if the simulator can read it.
    table: Option<Arc<Table>>,
    weather: Arc<Weather>,
    keys: Vec<LockKey>,
    cooldown: Duration,
    /// The first client that is not in the book.
    probe: u64,
}

impl Play {
    fn new(open: &Open, seed: u64, without: Disturbances) -> Self {
        let mut dice = stream(seed, 1, 0);
        let kind = [Kind::Lease, Kind::Lease, Kind::Session, Kind::Latch][dice.usize(..4)];
        let mut may = Disturbances::draw(&mut dice);
        if stream(seed, 4, 0).u8(..4) == 0 {
            may = may.with(D::Away);
        }
        let may = may.and(without.others());
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
        let (world, table) = open(kind);
        // Only of stores that are looked at often: else a guard reads held for as long as until its next renewal.
        let stops = world.bounds().look.is_some() && stream(seed, 6, 0).u8(..4) == 0;
        let may = if stops && !without.has(D::Stop) { may.with(D::Stop) } else { may };
        let weather = Weather::new(seed, may, one_of, &world.bounds());
        Self { seed, dice, world, table, weather, keys, cooldown, probe: u64::MAX }
    }

    async fn run(mut self) -> Played {
        let cooldown = if self.world.bounds().capabilities.cooldown { self.cooldown } else { Duration::ZERO };
        let table = self.table.clone();
        let book = Book::new(self.world.bounds(), &self.weather, cooldown, table.clone());
        let weather = Arc::clone(&self.weather);
        let looks = tokio::spawn(look_around(Arc::clone(&book)));
        let played = tokio::select! {
            biased;
            () = weather.loops.notified() => {
                book.wrong("C4", "the store is asked again and again without a pause");
                Ok(())
            }
            played = self.play(&book) => played,
        };
        looks.abort();
        if let Err(error) = played {
            book.wrong("C3", format!("no client without a fault could connect or work: {error}"));
        }
        self.judge(&book, table)
    }

    async fn play(&mut self, book: &Arc<Book>) -> Result<(), Error> {
        let begun = Instant::now();
        let end = begun + BUSY;
        if self.weather.happens(D::Away) {
            let mut dice = stream(self.seed, 5, 0);
            let from = begun + Duration::from_millis(dice.u64(..4_000));
            self.weather.goes_away(from, from + Duration::from_millis(dice.u64(500..9_500)));
        }
        let places = self.dice.usize(2..=4);
        let mut clients = Vec::new();
        let mut next = 0;
        for _ in 0..places {
            clients.push(Some(self.client(next, end, book)?));
            next += 1;
        }
        // What happens to whole clients, in the order of time.
        let mut happenings: Vec<(Instant, D, usize)> = Vec::new();
        for what in [D::Cut, D::Pause, D::Crash, D::Close, D::Drop, D::Force] {
            for _ in 0..self.dice.usize(..4) {
                let at = begun + Duration::from_millis(self.dice.u64(..11_000));
                happenings.push((at, what, self.dice.usize(..places)));
            }
        }
        if self.weather.may.has(D::Stop) {
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
            if !self.weather.happens(what) {
                continue;
            }
            match what {
                D::Force => {
                    if self.world.force_release(&self.keys[key]) {
                        book.forced(&self.keys[key]);
                    }
                    continue;
                }
                D::Cut | D::Pause | D::Stop => {
                    let Some(client) = &clients[place] else { continue };
                    if what == D::Cut {
                        client.seat.wire.cut(now + pause);
                        continue;
                    }
                    let turns = Arc::clone(&client.seat.turns);
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
            // Whoever is to be closed or dropped can act.
            client.seat.turns.resume();
            match what {
                D::Crash => self.crash(client, book, &mut ends),
                D::Close => ends.push(tokio::spawn(close(client, Arc::clone(book)))),
                _ => ends.push(tokio::spawn(drop_client(client, Arc::clone(book)))),
            }
            sleep(restart).await;
            clients[place] = Some(self.client(next, end, book)?);
            next += 1;
        }
        sleep_until(end).await;
        self.weather.calm_down();
        clients.iter().flatten().for_each(|client| client.seat.turns.resume());
        self.come_to_rest(clients.into_iter().flatten().collect(), ends, next, book).await
    }

    /// A new client, with callers of its own.
    fn client(&mut self, number: u64, end: Instant, book: &Arc<Book>) -> Result<Client, Error> {
        let seat = self.seat(number);
        book.comes(number, &seat.wire);
        let connection = self.world.connect(&seat)?;
        let mut dice = stream(self.seed, 3, number);
        let mut callers = Vec::new();
        for caller in 0..dice.u64(1..=3) {
            let caller = Caller {
                client: number,
                lock: Arc::clone(&connection.lock),
                book: Arc::clone(book),
                turns: Arc::clone(&seat.turns),
                keys: self.keys.clone(),
                dice: stream(self.seed, 100 + number, caller),
                // Not where something may stay in the store that nobody can release.
                long_leases: ![D::Crash, D::Twice, D::Close, D::Drop]
                    .iter()
                    .any(|one| self.weather.may.has(*one)),
                until: end,
            };
            callers.push(tokio::spawn(InTurn::new(&seat.turns, caller.run())));
        }
        Ok(Client { number, seat, connection, callers })
    }

    fn seat(&self, number: u64) -> ClientEnvironment {
        let may = |one| self.weather.may.has(one) && !self.weather.is_calm();
        let mut dice = stream(self.seed, 2, number);
        let turns = ClientTurns::new(dice.u64(..), may(D::Order));
        let wire = Wire::new(&self.weather, number, &turns);
        ClientEnvironment {
            number,
            clock: ClientClock::draw(&mut dice, may(D::ClockRate), &turns),
            turns,
            wire,
        }
    }

    fn crash(&self, client: Client, book: &Arc<Book>, ends: &mut Vec<JoinHandle<()>>) {
        client.seat.turns.die();
        client.seat.wire.die();
        book.died(client.number);
        let Some(table) = self.table.clone() else { return forget(client) };
        table.bury(client.number);
        forget(client);
        if table.kind == Kind::Latch {
            ends.push(tokio::spawn(async move {
                sleep(OPERATOR).await;
                operate(&table, |_, is_dead| is_dead);
            }));
        }
    }

    /// Nothing goes wrong any more: everything ends, and nothing is left.
    async fn come_to_rest(
        &mut self,
        mut clients: Vec<Client>,
        ends: Vec<JoinHandle<()>>,
        next: u64,
        book: &Arc<Book>,
    ) -> Result<(), Error> {
        let table = self.table.clone();
        let all = async {
            for end in ends {
                let _ = end.await;
            }
            for client in &mut clients {
                for caller in std::mem::take(&mut client.callers) {
                    if caller.await.is_err_and(|error| error.is_panic()) {
                        book.wrong("C7", "a caller panicked");
                    }
                }
            }
        };
        // What a latch keeps for one who lost it by silence is an operator's to end.
        let unlatch = async {
            loop {
                sleep(OPERATOR).await;
                if let Some(table) = table.as_ref().filter(|table| table.kind == Kind::Latch) {
                    operate(table, |holder, is_dead| {
                        is_dead || book.was_lost(holder) || book.has_gone(holder)
                    });
                }
            }
        };
        tokio::select! {
            biased;
            ended = timeout(ENDS_WITHIN, all) => if ended.is_err() {
                for open in book.open() {
                    book.wrong("C11", format!("not ended {ENDS_WITHIN:?} after the last fault: {open}"));
                }
                return Ok(());
            },
            () = unlatch => {}
        }
        // What is still on its way.
        sleep(Duration::from_secs(8)).await;
        self.rest(&clients, table.as_ref(), book).await;
        self.probe = next;
        self.probe(next, book).await?;
        let are_engines = clients.iter().all(|client| client.connection.engine.is_some());
        for client in clients {
            if self.dice.bool() {
                close(client, Arc::clone(book)).await;
            } else {
                drop_client(client, Arc::clone(book)).await;
            }
        }
        sleep(Duration::from_secs(8)).await;
        if are_engines && !self.weather.may.has(D::Crash) {
            // This one has no task, the look-out has one.
            let left = Handle::current().metrics().num_alive_tasks();
            if left > 1 {
                book.wrong("C17", format!("{} tasks are left when everything is closed", left - 1));
            }
        }
        Ok(())
    }

    /// Waits until nothing is held, and says what is.
    async fn rest(&self, clients: &[Client], table: Option<&Arc<Table>>, book: &Book) {
        let begun = Instant::now();
        loop {
            let engines = clients.iter().filter_map(|client| client.connection.engine.as_ref());
            let active: usize = engines.map(|engine| engine.active_keys()).sum();
            let held = table.map_or(Vec::new(), |table| table.held());
            if active == 0 && held.is_empty() {
                return;
            }
            if begun.elapsed() > RESTS_WITHIN {
                book.wrong(
                    "C5",
                    format!("at rest, {active} keys are active in engines, and the store has {held:?}"),
                );
                return;
            }
            if let Some(table) = table.filter(|table| table.kind == Kind::Latch) {
                operate(table, |holder, is_dead| is_dead || book.was_lost(holder) || book.has_gone(holder));
            }
            sleep(Duration::from_millis(250)).await;
        }
    }

    /// A client that nothing happens to is granted every key, and releases it.
    async fn probe(&self, number: u64, book: &Book) -> Result<(), Error> {
        let seat = self.seat(number);
        let SimulatedClient { lock, engine } = self.world.connect(&seat)?;
        for key in &self.keys {
            let wait = self.world.bounds().capabilities.handover + LONGEST_WAIT;
            let guard = lock.key(key).wait(wait).acquire().await?;
            if let Err(error) = guard.release().await {
                book.wrong("C6", format!("a release that nothing disturbed ended with {error}"));
            }
            if !self.cooldown.is_zero() {
                continue;
            }
            drop(lock.key(key).wait(wait).acquire().await?);
            let undo = self.world.bounds().capabilities.undo;
            if let Err(error) = lock.key(key).wait(undo).acquire().await.map(drop) {
                book.wrong("C7", format!("{undo:?} after a guard of {key} was dropped: {error}"));
            }
            sleep(undo).await;
            match lock.key(key).try_acquire().await? {
                Some(guard) => guard.release().await?,
                None => book.wrong("C6", format!("{key} was released, and a try finds it held")),
            }
        }
        lock.close().await?;
        drop(engine);
        Ok(())
    }

    fn judge(self, book: &Book, table: Option<Arc<Table>>) -> Played {
        book.look();
        let history = book.history();
        let mut violations = book.violations();
        violations.extend(self.weather.violations(book.start));
        // Where an operator ends holds, the live look has what the store knows and the history has not; and nobody sees
        // what a client that stands still has lost. One whose clocks stood still too may be told late of a grant that has
        // ended.
        let happened = self.weather.happened();
        let counts = |kind: ViolationKind| match kind {
            ViolationKind::Overlap => ![D::Force, D::Pause, D::Stop].iter().any(|one| happened.has(*one)),
            ViolationKind::TokenNotGreater => !happened.has(D::Force) && !happened.has(D::Stop),
            _ => true,
        };
        if let Err(found) = check(&history, &book.bounds.capabilities) {
            violations.extend(found.iter().filter(|v| counts(v.kind)).map(ToString::to_string));
        }
        let mut record = Vec::new();
        if let Some(table) = table {
            table.stays(|stays| {
                record.extend(stays.iter().map(|stay| stay.describe(book.start)));
                violations.extend(judge_stays(stays, self.probe, book));
            });
        }
        let seen = Seen::default();
        seen.add(&self.weather.seen);
        Played { seed: self.seed, violations, happened: self.weather.happened(), history, record, seen }
    }
}

/// What the store's own record says.
fn judge_stays(stays: &[Stay], probe: u64, book: &Book) -> Vec<String> {
    let mut wrong = Vec::new();
    for (at, stay) in stays.iter().enumerate().filter(|(_, stay)| stay.client < probe) {
        if matches!(stay.ended, Some((_, EndedBy::Release))) && !book.was_seen(stay.holder) {
            book.note(Sometimes::UndoneGrant);
        }
        let other = |earlier: &&Stay| {
            earlier.holder == stay.holder && (&earlier.key, earlier.client) != (&stay.key, stay.client)
        };
        if let Some(other) = stays[..at].iter().find(other) {
            wrong.push(format!("C2: {} of {} was granted for {} before", stay.holder, stay.key, other.key));
        }
    }
    wrong
}

/// An operator ends what `such` holds of the store.
fn operate(table: &Table, such: impl Fn(leasehold_api::HolderId, bool) -> bool) {
    for (key, holder, is_dead) in table.held() {
        if such(holder, is_dead) {
            table.force(&key);
        }
    }
}

/// Looks at all guards every now and then.
async fn look_around(book: Arc<Book>) {
    loop {
        sleep(Duration::from_millis(97)).await;
        book.look();
    }
}
