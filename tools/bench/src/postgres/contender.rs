//! Contenders that acquire and release locks: the library, and statements written by hand.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bench::report::Series;
use leasehold_api::{AcquireOptions, Lock, LockKey};
use sqlx::postgres::{PgAdvisoryLock, PgAdvisoryLockKey, PgPoolOptions};
use sqlx::{Connection as _, PgConnection, PgPool, Row as _};

/// Number of keys used in turn, by all tasks together.
const KEYS: usize = 4096;
/// The same for a shortened run. Each of the 512 tasks needs one.
const FEW_KEYS: usize = 512;

/// Number and length of the rounds. Contenders take turns.
#[derive(Clone, Copy)]
pub(crate) struct Rounds {
    count: usize,
    length: Duration,
}

/// For work that does not wait for a disk. Much shorter rounds find a virtual machine's processors awake. That halves
/// a round trip, unlike on an idle server.
pub(crate) const LONG: Rounds = Rounds { count: 7, length: Duration::from_millis(800) };

/// For a single task, which the scheduler's choices affect more.
pub(crate) const MANY_LONG: Rounds = Rounds { count: 15, ..LONG };

/// For a single task that waits for a disk. A scheduler keeps the task and its server on one processor, or on two
/// that wake each other up, for about a second, and the latter takes twice as long. Few long rounds would favour one
/// contender by luck, many short ones share it.
pub(crate) const SHORT: Rounds = Rounds { count: 31, length: Duration::from_millis(160) };

/// The largest number of connections that a program without this library opens here.
pub(crate) const MOST_CONNECTIONS: usize = 64;

/// One task's way to acquire and release a lock.
pub(crate) enum Worker {
    Library {
        lock: Arc<dyn Lock>,
        options: AcquireOptions,
    },
    /// Two prepared statements on a separate connection, by number.
    Numbers {
        connection: PgConnection,
    },
    /// sqlx's own lock over a pool shared by all tasks.
    Pool {
        pool: PgPool,
    },
    /// Two prepared statements on a separate connection, by text and holder.
    Rows {
        connection: PgConnection,
        statements: &'static Statements,
    },
}

/// Statements of a program without a library.
pub(crate) struct Statements {
    pub(crate) acquire: &'static str,
    pub(crate) release: &'static str,
}

/// The shortest pair that excludes, and a pair with the effects of ours. In the latter, a takeover waits for the
/// fence of the last holder, the row records holder and time, and a release notifies waiters that have left a mark.
pub(crate) struct ByHand {
    pub(crate) shortest: &'static Statements,
    pub(crate) same: &'static Statements,
}

pub(crate) const LEASES_BY_HAND: ByHand = ByHand { shortest: &LEASES, same: &FULL_LEASES };
pub(crate) const MUTEXES_BY_HAND: ByHand = ByHand { shortest: &MUTEXES, same: &FULL_MUTEXES };

pub(crate) const LEASES: Statements = Statements {
    acquire: "INSERT INTO hand.lease AS l (key, holder, token, expires_at)
        VALUES ($1, $2, nextval('hand.token'), now() + interval '30 s')
        ON CONFLICT (key) DO UPDATE SET holder = excluded.holder, token = nextval('hand.token'),
            expires_at = excluded.expires_at
        WHERE l.expires_at <= now() RETURNING l.token",
    release: "UPDATE hand.lease SET expires_at = '-infinity' WHERE key = $1 AND holder = $2",
};

const MUTEXES: Statements = Statements {
    acquire: "INSERT INTO hand.mutex AS m (key, holder, token, acquired)
        VALUES ($1, $2, nextval('hand.token'), true)
        ON CONFLICT (key) DO UPDATE SET holder = excluded.holder, token = nextval('hand.token'), acquired = true
        WHERE NOT m.acquired RETURNING m.token",
    release: "UPDATE hand.mutex SET acquired = false WHERE key = $1 AND holder = $2",
};

const FULL_LEASES: Statements = Statements {
    acquire: "INSERT INTO hand.full_lease AS l
            (key, holder, token, acquired_at, ttl_us, expires_at, released, label, owner)
        VALUES ($1, $2, nextval('hand.token'), clock_timestamp(), 30000000,
            clock_timestamp() + interval '30 s', false, NULL, 'bench')
        ON CONFLICT (key) DO UPDATE SET key = excluded.key, holder = excluded.holder,
            token = nextval('hand.token'), acquired_at = clock_timestamp(), ttl_us = excluded.ttl_us,
            expires_at = clock_timestamp() + interval '30 s', released = false, label = excluded.label,
            owner = excluded.owner, wake_until = NULL
        WHERE l.released OR l.expires_at <= clock_timestamp() RETURNING l.token",
    release: "UPDATE hand.full_lease AS l SET released = true
        WHERE l.key = $1 AND l.holder = $2 AND NOT l.released
        RETURNING l.expires_at > clock_timestamp(),
            CASE WHEN l.wake_until > clock_timestamp() THEN pg_notify('hand', l.key) END",
};

const FULL_MUTEXES: Statements = Statements {
    acquire: "INSERT INTO hand.full_mutex AS m (key, acquired, holder, token, acquired_at, label, owner)
        VALUES ($1, true, $2, nextval('hand.token'), clock_timestamp(), NULL, 'bench')
        ON CONFLICT (key) DO UPDATE SET key = excluded.key, acquired = true, holder = excluded.holder,
            token = nextval('hand.token'), acquired_at = clock_timestamp(), released_at = NULL,
            label = excluded.label, owner = excluded.owner, wake_until = NULL
        WHERE NOT m.acquired RETURNING m.token",
    release: "UPDATE hand.full_mutex AS m SET acquired = false, released_at = clock_timestamp()
        WHERE m.key = $1 AND m.holder = $2 AND m.acquired
        RETURNING CASE WHEN m.wake_until > clock_timestamp() THEN pg_notify('hand', m.key) END",
};

pub(crate) const TABLES: &str = "
    CREATE SCHEMA hand;
    CREATE SEQUENCE hand.token;
    CREATE TABLE hand.lease (key text PRIMARY KEY, holder text NOT NULL, token bigint NOT NULL,
        expires_at timestamptz NOT NULL) WITH (fillfactor = 50);
    CREATE TABLE hand.mutex (key text PRIMARY KEY, holder text NOT NULL, token bigint NOT NULL,
        acquired boolean NOT NULL) WITH (fillfactor = 50);
    CREATE TABLE hand.full_lease (key text COLLATE \"C\" PRIMARY KEY, holder text NOT NULL,
        token bigint NOT NULL, acquired_at timestamptz NOT NULL, ttl_us bigint NOT NULL,
        expires_at timestamptz NOT NULL, released boolean NOT NULL, label text, owner text,
        wake_until timestamptz) WITH (fillfactor = 50);
    CREATE TABLE hand.full_mutex (key text COLLATE \"C\" PRIMARY KEY, acquired boolean NOT NULL,
        holder text NOT NULL, token bigint NOT NULL, acquired_at timestamptz NOT NULL,
        released_at timestamptz, label text, owner text, wake_until timestamptz) WITH (fillfactor = 50)";

impl Worker {
    pub(crate) fn library(lock: &Arc<dyn Lock>) -> Self {
        Self::Library { lock: Arc::clone(lock), options: AcquireOptions::new() }
    }

    pub(crate) async fn numbers(url: &str) -> Self {
        Self::Numbers { connection: PgConnection::connect(url).await.unwrap() }
    }

    pub(crate) async fn rows(url: &str, statements: &'static Statements) -> Self {
        Self::Rows { connection: PgConnection::connect(url).await.unwrap(), statements }
    }

    /// Workers on one pool with default settings except its size, which is at most 64.
    pub(crate) async fn pool(url: &str, tasks: usize) -> Vec<Self> {
        let size = u32::try_from(tasks.min(MOST_CONNECTIONS)).unwrap();
        let pool = PgPoolOptions::new().max_connections(size).connect(url).await.unwrap();
        (0..tasks).map(|_| Self::Pool { pool: pool.clone() }).collect()
    }

    /// Acquires and releases one lock.
    pub(crate) async fn cycle(&mut self, key: &Key) {
        match self {
            Self::Library { lock, options } => {
                lock.acquire(&key.key, options).await.unwrap().release().await.unwrap();
            }
            Self::Numbers { connection } => {
                let row = sqlx::query("SELECT pg_try_advisory_lock($1)").bind(key.number);
                let held: bool = row.fetch_one(&mut *connection).await.unwrap().get(0);
                let row = sqlx::query("SELECT pg_advisory_unlock($1)").bind(key.number);
                let freed: bool = row.fetch_one(connection).await.unwrap().get(0);
                assert!(held && freed);
            }
            Self::Pool { pool } => {
                let guard = key.lock.acquire(pool.acquire().await.unwrap()).await.unwrap();
                drop(guard.release_now().await.unwrap());
            }
            Self::Rows { connection, statements } => {
                let query = sqlx::query(statements.acquire).bind(&key.text).bind(HOLDER);
                let row = query.fetch_optional(&mut *connection).await.unwrap();
                let token: i64 = row.unwrap().get(0);
                let query = sqlx::query(statements.release).bind(&key.text).bind(HOLDER);
                let done = query.execute(connection).await.unwrap();
                assert!(token > 0 && done.rows_affected() == 1);
            }
        }
    }
}

/// As long as a holder id of the library.
const HOLDER: &str = "0123456789abcdef-0123456789abcdef";

/// One key in the form of every contender.
pub(crate) struct Key {
    pub(crate) key: LockKey,
    pub(crate) text: String,
    number: i64,
    lock: PgAdvisoryLock,
}

/// Returns the keys of one task. Two tasks share none.
pub(crate) fn keys(task: usize, tasks: usize) -> Vec<Key> {
    let key = |index: usize| {
        let text = format!("ledger:{index}");
        // Spreads the numbers like hashes, because the server's lock table must be used evenly.
        let number = (index as i64 + 1).wrapping_mul(0x5851_f42d_4c95_7f2d);
        let lock = PgAdvisoryLock::with_key(PgAdvisoryLockKey::BigInt(number));
        Key { key: LockKey::new(&text).unwrap(), text, number, lock }
    };
    (task..bench::or_smoke(KEYS, FEW_KEYS)).step_by(tasks).map(key).collect()
}

/// A contender with one worker per task.
pub(crate) struct Contender {
    name: String,
    workers: Vec<(Worker, Vec<Key>)>,
}

impl Contender {
    pub(crate) fn new(name: &str, workers: impl IntoIterator<Item = Worker>) -> Self {
        let workers: Vec<_> = workers.into_iter().collect();
        let tasks = workers.len();
        let with_keys = |(task, worker)| (worker, keys(task, tasks));
        Self { name: name.to_owned(), workers: workers.into_iter().enumerate().map(with_keys).collect() }
    }

    /// Uses every key once, to create rows and prepare statements.
    async fn warm_up(&mut self) {
        self.each(|mut worker, keys| async move {
            for key in &keys {
                worker.cycle(key).await;
            }
            (worker, keys, 0)
        })
        .await;
    }

    /// Returns cycles per second.
    async fn round(&mut self, length: Duration) -> f64 {
        let begun = Instant::now();
        let deadline = begun + length;
        let cycles = self.each(move |mut worker, keys| async move {
            let mut cycles = 0;
            for key in keys.iter().cycle() {
                if Instant::now() >= deadline {
                    break;
                }
                worker.cycle(key).await;
                cycles += 1;
            }
            (worker, keys, cycles)
        });
        cycles.await as f64 / begun.elapsed().as_secs_f64()
    }

    /// Runs every worker in a separate task on the runtime's threads.
    async fn each<F>(&mut self, work: impl Fn(Worker, Vec<Key>) -> F) -> u64
    where
        F: Future<Output = (Worker, Vec<Key>, u64)> + Send + 'static,
    {
        let started = self.workers.drain(..).map(|(worker, keys)| tokio::spawn(work(worker, keys)));
        let tasks: Vec<_> = started.collect();
        let mut total = 0;
        for task in tasks {
            let (worker, keys, cycles) = task.await.unwrap();
            self.workers.push((worker, keys));
            total += cycles;
        }
        total
    }
}

/// Runs all contenders in turn, round after round.
pub(crate) async fn compete(rounds: Rounds, mut contenders: Vec<Contender>) -> Vec<Series> {
    for contender in &mut contenders {
        contender.warm_up().await;
    }
    let mut series: Vec<Series> = contenders
        .iter()
        .map(|contender| Series { name: contender.name.clone(), rounds: Vec::new() })
        .collect();
    let (count, length) = bench::or_smoke((rounds.count, rounds.length), (2, Duration::from_millis(50)));
    let all = contenders.len();
    for round in 0..count {
        // Each round starts with the next contender, because the first could find the processors asleep.
        for at in (0..all).map(|step| (round + step) % all) {
            let rate = contenders[at].round(length).await;
            series[at].rounds.push(rate);
        }
    }
    for series in &series {
        let rates: Vec<_> = series.rounds.iter().map(|rate| bench::report::thousands(*rate)).collect();
        println!("    {:44} {}", series.name, rates.join(" "));
    }
    series
}
