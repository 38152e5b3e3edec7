//! The peers, with their promises.

use std::sync::Arc;

use leasehold_api::{AcquireOptions, Lock, LockKey};
use leasehold_postgres::PgConfig;
use leasehold_postgres_advisory::AdvisoryConfig;
use leasehold_postgres_row::RowConfig;
use leasehold_postgres_ttl::TtlConfig;

use super::by_hand;
use super::redis::Redis;
use crate::contest::{Contender, Worker};
use crate::postgres::contender::{self, Key, LEASES_BY_HAND};

/// A way to lock between processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    PgAdvisoryLock,
    Session,
    LeaseByHand,
    Lease,
    ForUpdate,
    Mutex,
    SetNx,
    Rslock,
}

impl Peer {
    /// All peers, with the baseline first.
    pub(crate) const ALL: [Self; 8] = [
        Self::PgAdvisoryLock,
        Self::Session,
        Self::LeaseByHand,
        Self::Lease,
        Self::ForUpdate,
        Self::Mutex,
        Self::SetNx,
        Self::Rslock,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::PgAdvisoryLock => "sqlx PgAdvisoryLock",
            Self::Session => "leasehold session",
            Self::LeaseByHand => "lease row by hand",
            Self::Lease => "leasehold lease row",
            Self::ForUpdate => "SELECT FOR UPDATE by hand",
            Self::Mutex => "leasehold mutex row",
            Self::SetNx => "redis SET NX PX by hand",
            Self::Rslock => "rslock, one Redis",
        }
    }

    pub(crate) fn promise(self) -> &'static str {
        match self {
            Self::PgAdvisoryLock => {
                "ends with its connection, which it needs alone; lacks timeouts and fencing"
            }
            Self::Session => "ends with its connection; timeouts, fencing, loss is noticed, inspection",
            Self::LeaseByHand => "ends after 30 s; fencing; lacks renewal and waiting",
            Self::Lease => {
                "ends after its TTL unless renewed; timeouts, fencing, waiting with notification, inspection"
            }
            Self::ForUpdate => "ends with its transaction, which it keeps open; lacks timeouts and fencing",
            Self::Mutex => "lasts until released; timeouts, fencing, waiting with notification, inspection",
            Self::SetNx => "ends after 30 s, lost if Redis restarts; lacks fencing, renewal and waiting",
            Self::Rslock => {
                "ends after 30 s, lost if Redis restarts; waits by polling; lacks fencing and renewal"
            }
        }
    }

    pub(crate) fn is_postgres(self) -> bool {
        !matches!(self, Self::SetNx | Self::Rslock)
    }

    /// Returns a contender with this many tasks. `None` if its server is missing.
    pub(crate) async fn contender(self, url: &str, redis: Option<&Redis>, tasks: usize) -> Option<Contender> {
        let config = || PgConfig::from_url(url).unwrap();
        let contender = match self {
            Self::Session => {
                self.library(AdvisoryConfig::new(config()).connections(2).connect().await.unwrap(), tasks)
            }
            Self::Lease => self.library(TtlConfig::new(config()).connect().await.unwrap(), tasks),
            Self::Mutex => self.library(RowConfig::new(config()).connect().await.unwrap(), tasks),
            Self::PgAdvisoryLock => {
                let workers = contender::Worker::pool(url, tasks).await;
                let numbered = workers.into_iter().enumerate();
                self.of(numbered
                    .map(|(task, worker)| Pooled { worker, keys: Keys::of(task, tasks) })
                    .collect())
            }
            Self::LeaseByHand => self.of(by_hand::leases(url, LEASES_BY_HAND.shortest, tasks).await),
            Self::ForUpdate => self.of(by_hand::transactions(url, tasks).await),
            Self::SetNx => self.of(redis?.set_nx(tasks).await),
            Self::Rslock => self.of(redis?.rslock(tasks).await),
        };
        Some(contender)
    }

    fn of<W: Worker>(self, workers: Vec<W>) -> Contender {
        Contender::new(self.name(), self.promise(), workers)
    }

    fn library(self, lock: impl Lock, tasks: usize) -> Contender {
        let lock: Arc<dyn Lock> = Arc::new(lock);
        let worker = |task| Library {
            lock: Arc::clone(&lock),
            options: AcquireOptions::new(),
            keys: Keys::of(task, tasks),
        };
        self.of((0..tasks).map(worker).collect())
    }
}

/// The keys of one task, used in turn.
pub(crate) struct Keys {
    keys: Vec<Key>,
    next: usize,
}

impl Keys {
    pub(crate) fn of(task: usize, tasks: usize) -> Self {
        Self { keys: contender::keys(task, tasks), next: 0 }
    }

    pub(crate) fn next(&mut self) -> &Key {
        self.next = (self.next + 1) % self.keys.len();
        &self.keys[self.next]
    }
}

struct Pooled {
    worker: contender::Worker,
    keys: Keys,
}

impl Worker for Pooled {
    async fn cycle(&mut self) {
        self.worker.cycle(self.keys.next()).await;
    }
}

struct Library {
    lock: Arc<dyn Lock>,
    options: AcquireOptions,
    keys: Keys,
}

impl Worker for Library {
    async fn cycle(&mut self) {
        let key: &LockKey = &self.keys.next().key;
        self.lock.acquire(key, &self.options).await.unwrap().release().await.unwrap();
    }
}
