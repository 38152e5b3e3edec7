//! One side of a hand-over: the library, and the usual ways without a library.

use std::time::Duration;

use leasehold_api::{AcquireOptions, Lock, LockGuard, LockKey};
use leasehold_postgres::PgConfig;
use leasehold_postgres_advisory::AdvisoryConfig;
use leasehold_postgres_row::RowConfig;
use leasehold_postgres_ttl::TtlConfig;
use sqlx::postgres::PgListener;
use sqlx::{Connection as _, PgConnection};

use crate::postgres::contender::LEASES;
use crate::postgres::handover::Key;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Advisory,
    Blocking,
    Lease,
    Mutex,
    Notified,
    Polling,
}

impl Kind {
    pub(crate) const ALL: [Self; 6] =
        [Self::Advisory, Self::Blocking, Self::Lease, Self::Mutex, Self::Notified, Self::Polling];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Advisory => "leasehold advisory",
            Self::Blocking => "bare pg_advisory_lock",
            Self::Lease => "leasehold lease row",
            Self::Mutex => "leasehold mutex row",
            Self::Notified => "bare lease row, NOTIFY and try",
            Self::Polling => "bare lease row, a try every 100 ms",
        }
    }

    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

pub(crate) enum Side {
    Library { lock: Box<dyn Lock>, held: Option<LockGuard> },
    Blocking(PgConnection),
    Notified { connection: PgConnection, listener: PgListener },
    Polling(PgConnection),
}

const CHANNEL: &str = "hand";
const POLL: Duration = Duration::from_millis(100);
const HOLDER: &str = "me";

const RELEASE_AND_NOTIFY: &str =
    "UPDATE hand.lease SET expires_at = '-infinity' WHERE key = $1 AND holder = $2
    RETURNING pg_notify($3, key)";

impl Side {
    pub(crate) async fn connect(url: &str, kind: Kind) -> Self {
        let config = || PgConfig::from_url(url).unwrap();
        let connect = || async { PgConnection::connect(url).await.unwrap() };
        let lock: Box<dyn Lock> = match kind {
            Kind::Advisory => Box::new(AdvisoryConfig::new(config()).connect().await.unwrap()),
            Kind::Lease => Box::new(TtlConfig::new(config()).connect().await.unwrap()),
            Kind::Mutex => Box::new(RowConfig::new(config()).connect().await.unwrap()),
            Kind::Blocking => return Self::Blocking(connect().await),
            Kind::Polling => return Self::Polling(connect().await),
            Kind::Notified => {
                let mut listener = PgListener::connect(url).await.unwrap();
                listener.listen(CHANNEL).await.unwrap();
                return Self::Notified { connection: connect().await, listener };
            }
        };
        Self::Library { lock, held: None }
    }

    pub(crate) async fn acquire(&mut self, key: &Key) {
        match self {
            Self::Library { lock, held } => {
                let options = AcquireOptions::new().wait_forever();
                *held = Some(lock.acquire(&LockKey::new(&key.text).unwrap(), &options).await.unwrap());
            }
            Self::Blocking(connection) => {
                let query = sqlx::query("SELECT pg_advisory_lock($1)").bind(key.number);
                query.execute(connection).await.unwrap();
            }
            Self::Notified { connection, listener } => {
                while !try_row(connection, key).await {
                    while listener.recv().await.unwrap().payload() != key.text {}
                }
            }
            Self::Polling(connection) => {
                while !try_row(connection, key).await {
                    tokio::time::sleep(POLL).await;
                }
            }
        }
    }

    pub(crate) async fn release(&mut self, key: &Key) {
        match self {
            Self::Library { held, .. } => held.take().unwrap().release().await.unwrap(),
            Self::Blocking(connection) => {
                let query = sqlx::query("SELECT pg_advisory_unlock($1)").bind(key.number);
                query.execute(connection).await.unwrap();
            }
            Self::Notified { connection, .. } => {
                let query = sqlx::query(RELEASE_AND_NOTIFY).bind(&key.text).bind(HOLDER).bind(CHANNEL);
                query.execute(connection).await.unwrap();
            }
            Self::Polling(connection) => {
                let query = sqlx::query(LEASES.release).bind(&key.text).bind(HOLDER);
                query.execute(connection).await.unwrap();
            }
        }
    }

    pub(crate) async fn close(self) {
        if let Self::Library { lock, .. } = self {
            lock.close().await.unwrap();
        }
    }
}

async fn try_row(connection: &mut PgConnection, key: &Key) -> bool {
    let query = sqlx::query(LEASES.acquire).bind(&key.text).bind(HOLDER);
    query.fetch_optional(connection).await.unwrap().is_some()
}
