//! Keys in Postgres.

use std::sync::Arc;
use std::time::Duration;

use leasehold_postgres::{DEFAULT_SCHEMA, Identifier, sql::render};
use leasehold_table_schema::grants;
use sqlx::{AssertSqlSafe, Executor as _, PgConnection, PgPool, Row as _, raw_sql};

use crate::begin::{Begin, RequestOutcome};
use crate::error::IdempotencyError;
use crate::flight::{Flight, FlightEntry, Flights};
use crate::ident::{Fingerprint, Ident};
use crate::key_transaction::KeyTransaction;
use crate::open_key::{self, KeyStatements, OpenKey, Terms};
use crate::schema::TABLES;
use crate::sql;
use crate::store::{self, IdempotencyStore, Sealed};
use crate::stored::Stored;
use crate::transaction::{self, answer};

/// Retention that is not asked for: a day, as Stripe's.
pub(crate) const DEFAULT_RETENTION: Duration = Duration::from_secs(24 * 3600);
/// The bounds of what can be asked for: shorter and a key would be gone before it is repeated.
const RETENTION: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(100 * 366 * 24 * 3600)];
pub(crate) const DEFAULT_RETRY_AFTER: Duration = Duration::from_secs(1);
pub(crate) const DEFAULT_MAX_BODY: usize = 64 * 1024;
pub(crate) const DEFAULT_MAX_IN_FLIGHT: usize = 10_000;
/// Longer than any client waits.
const MAX_JOIN: Duration = Duration::from_secs(24 * 3600);
/// Rows per transaction of a purge: whoever begins one of these keys anew waits for it.
const PURGE_BATCH: u64 = 500;

/// How an owned transaction is isolated from others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // Those of the SQL standard that the server tells apart.
pub enum Isolation {
    /// The server's own default.
    #[default]
    ReadCommitted,
    /// One snapshot for all statements.
    RepeatableRead,
    /// As if the transactions ran one after the other.
    Serializable,
}

/// Idempotency keys in Postgres: the effect and its record share one transaction. Cheap to clone; clones share their
/// flights, so that one process makes one and clones it.
#[derive(Clone, Debug)]
pub struct PgIdempotency {
    pool: PgPool,
    schema: Identifier,
    statements: Arc<KeyStatements>,
    flights: Flights,
    retention: Duration,
    retry_after: Duration,
    join: Duration,
    max_body: usize,
    max_in_flight: usize,
    isolation: Isolation,
    prepared: bool,
}

impl PgIdempotency {
    /// Keys in the database of `pool`, in the schema [`DEFAULT_SCHEMA`].
    #[must_use]
    pub fn new(pool: PgPool) -> Self {
        let schema = Identifier::known(DEFAULT_SCHEMA);
        Self {
            pool,
            statements: Arc::new(KeyStatements::new(&schema)),
            schema,
            flights: Flights::default(),
            retention: DEFAULT_RETENTION,
            retry_after: DEFAULT_RETRY_AFTER,
            join: Duration::ZERO,
            max_body: DEFAULT_MAX_BODY,
            max_in_flight: DEFAULT_MAX_IN_FLIGHT,
            isolation: Isolation::default(),
            prepared: true,
        }
    }

    /// Keys in another schema, which are others.
    #[must_use]
    pub fn schema(mut self, schema: Identifier) -> Self {
        self.statements = Arc::new(KeyStatements::new(&schema));
        self.flights = Flights::default();
        self.schema = schema;
        self
    }

    /// How long a key is remembered, from when it was begun: a day unless set, a second to a hundred years. One that
    /// took longer than that is remembered as long from when it was finished.
    #[must_use]
    pub fn retention(mut self, retention: Duration) -> Self {
        self.retention = bounded_retention(retention);
        self
    }

    /// What a caller is told to wait while the first is in flight: a second unless set.
    #[must_use]
    pub const fn retry_after(mut self, pause: Duration) -> Self {
        self.retry_after = pause;
        self
    }

    /// How long a second caller in this process waits for the first one's result, instead of being told that it is
    /// in flight: not at all unless set, a day at most. If the first fails, one of those who wait goes on. Whoever
    /// serves the key in another process is not waited for.
    #[must_use]
    pub fn join(mut self, wait: Duration) -> Self {
        self.join = wait.min(MAX_JOIN);
        self
    }

    /// The largest response that is stored, in bytes of body and headers: 64 KiB unless set.
    #[must_use]
    pub const fn max_body(mut self, bytes: usize) -> Self {
        self.max_body = bytes;
        self
    }

    /// How many keys may be in flight in this process, which bounds its memory: 10,000 unless set.
    #[must_use]
    pub const fn max_in_flight(mut self, keys: usize) -> Self {
        self.max_in_flight = keys;
        self
    }

    /// The isolation of the transactions that [`begin`](Self::begin) begins: READ COMMITTED unless set. At the others,
    /// [`Retry`](IdempotencyError::Retry) is part of normal operation.
    #[must_use]
    pub const fn isolation(mut self, isolation: Isolation) -> Self {
        self.isolation = isolation;
        self
    }

    /// The pool leads to a pooler in transaction mode, such as `PgBouncer`: no statement is kept prepared.
    #[must_use]
    pub const fn behind_pooler(mut self) -> Self {
        self.prepared = false;
        self
    }

    /// Begins `ident` for the request that `fingerprint` stands for, on a connection of the pool.
    ///
    /// Whoever repeats a key that is in flight in this process is told so before a connection is asked for, and one
    /// that is in flight elsewhere in one round trip; nobody waits for another transaction. Of a request in flight
    /// the fingerprint is not compared: a mismatch is told once the first has finished.
    ///
    /// # Errors
    ///
    /// As [`IdempotencyStore::begin`]. [`Unavailable`](leasehold_api::ErrorKind::Unavailable) when the pool had no
    /// connection in its `acquire_timeout`, [`SchemaMissing`](leasehold_api::ErrorKind::SchemaMissing) before
    /// [`migrate`](Self::migrate).
    ///
    /// # Cancel safety
    ///
    /// Safe: what was begun is rolled back, and the connection goes back to the pool when the server has confirmed it.
    pub async fn begin(
        &self,
        ident: &Ident,
        fingerprint: &Fingerprint,
    ) -> Result<Begin<KeyTransaction>, IdempotencyError> {
        let flight = match self.flights.enter(ident, self.join, self.max_in_flight).await? {
            FlightEntry::Lead(flight) => flight,
            FlightEntry::InFlight => return Ok(Begin::InFlight { retry_after: self.retry_after }),
            FlightEntry::Known(known, stored) if known == *fingerprint => return Ok(Begin::Replay(stored)),
            FlightEntry::Known(..) => return Ok(Begin::Mismatch),
        };
        let mut transaction = self.transaction(&flight).await?;
        let begun =
            open_key::begin(&mut transaction, &self.statements, &self.terms(ident, true), ident, fingerprint)
                .await;
        let told = match begun {
            Ok(Begin::Fresh(key)) => {
                flight.running();
                return Ok(Begin::Fresh(KeyTransaction::new(transaction, key, *fingerprint, flight)));
            }
            Ok(Begin::Replay(stored)) => Ok(Begin::Replay(stored)),
            Ok(Begin::InFlight { retry_after }) => Ok(Begin::InFlight { retry_after }),
            Ok(Begin::Mismatch) => Ok(Begin::Mismatch),
            Err(error) => Err(error),
        };
        // Done when the caller is told, so that the pool has the connection again.
        let _ = answer(transaction.rollback(), "roll back").await;
        if let Ok(Begin::Replay(stored)) = &told {
            flight.known(*fingerprint, stored.clone());
        }
        told
    }

    /// Begins `ident` in a transaction that is there, at any isolation, without ending it. Others in this process are
    /// not told before they ask the server. At READ COMMITTED the transaction stays usable whatever the answer.
    ///
    /// A transaction that begins a key holds an advisory lock and a savepoint until it ends. The commit is refused
    /// (23514) until the key is finished.
    ///
    /// # Errors
    ///
    /// [`Unfinished`](IdempotencyError::Unfinished) when this transaction has begun the key before,
    /// [`Retry`](IdempotencyError::Retry) above READ COMMITTED: roll back and run it again. Else what the server
    /// answers. Outside a transaction the key would be committed unfinished, which the server refuses.
    ///
    /// # Cancel safety
    ///
    /// A dropped call leaves the transaction to be rolled back.
    pub async fn begin_in(
        &self,
        connection: &mut PgConnection,
        ident: &Ident,
        fingerprint: &Fingerprint,
    ) -> Result<Begin<OpenKey>, IdempotencyError> {
        open_key::begin(connection, &self.statements, &self.terms(ident, false), ident, fingerprint).await
    }

    /// Runs `body` under the key: its effects, through the connection that it is given, are committed together with
    /// the response that it returns. An error of its own rolls everything back, and the key can be begun again.
    ///
    /// # Errors
    ///
    /// The body's, or as [`begin`](Self::begin) and [`KeyTransaction::finish`].
    ///
    /// # Cancel safety
    ///
    /// Dropped in between, it is committed or rolled back; run it again with the same key.
    pub async fn run<E: From<IdempotencyError>>(
        &self,
        ident: &Ident,
        fingerprint: &Fingerprint,
        body: impl AsyncFnOnce(&mut KeyTransaction) -> Result<Stored, E>,
    ) -> Result<RequestOutcome, E> {
        store::run(self, ident, fingerprint, body).await
    }

    /// Removes expired keys, `limit` at most, the oldest first, in batches of 500 with a transaction each. It waits
    /// for nobody: what others have locked stays for the next time. Says how many there were.
    ///
    /// # Errors
    ///
    /// What the server answers; some may have been removed.
    ///
    /// # Cancel safety
    ///
    /// Safe: some may have been removed.
    pub async fn purge(&self, limit: u64) -> Result<u64, IdempotencyError> {
        purge(&self.pool, &self.schema, "idempotency", limit).await
    }

    /// Creates the tables of keys and journeys, or what is missing of them. Where everything is there it changes
    /// nothing and needs no privilege to create. May be called by many at once.
    ///
    /// # Errors
    ///
    /// [`PermissionDenied`](leasehold_api::ErrorKind::PermissionDenied) without the privilege to create; else what the
    /// server answers.
    ///
    /// # Cancel safety
    ///
    /// They are installed as a whole or not at all.
    pub async fn migrate(&self) -> Result<(), IdempotencyError> {
        let connection = self.pool.acquire().await;
        let mut connection =
            connection.map_err(|error| IdempotencyError::of(error, "get a connection of the pool"))?;
        let installed = TABLES.install(&mut connection, &self.schema).await;
        installed.map_err(|error| IdempotencyError::of(error, "install the tables of idempotency keys"))
    }

    /// The SQL that [`migrate`](Self::migrate) runs, for `psql` and migration tools. It can be run again.
    #[must_use]
    pub fn schema_sql(schema: &Identifier) -> String {
        TABLES.script(schema)
    }

    /// The SQL that lets `role` use keys and journeys, and nothing else.
    #[must_use]
    pub fn grants_sql(schema: &Identifier, role: &Identifier) -> String {
        grants(schema, role, &["idempotency", "journey"])
    }

    /// The pool.
    #[must_use]
    pub const fn pool(&self) -> &PgPool {
        &self.pool
    }

    async fn transaction(
        &self,
        flight: &Flight,
    ) -> Result<sqlx::Transaction<'static, sqlx::Postgres>, IdempotencyError> {
        let most = self.pool.options().get_max_connections();
        if self.pool.num_idle() == 0 && self.pool.size() >= most {
            flight.queued();
        }
        let connection = self.pool.acquire().await;
        let connection =
            connection.map_err(|error| IdempotencyError::of(error, "get a connection of the pool"))?;
        flight.looking();
        let begin = match self.isolation {
            Isolation::ReadCommitted => sql::BEGIN_READ_COMMITTED,
            Isolation::RepeatableRead => sql::BEGIN_REPEATABLE_READ,
            Isolation::Serializable => sql::BEGIN_SERIALIZABLE,
        };
        transaction::begin(connection, begin).await
    }

    fn terms(&self, ident: &Ident, owned: bool) -> Terms {
        Terms {
            number: ident.number(&self.schema),
            retention_us: micros(self.retention),
            retry_after: self.retry_after,
            max_body: self.max_body,
            prepared: self.prepared,
            owned,
        }
    }
}

/// As the server calculates.
pub(crate) fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

/// As [`PgIdempotency::retention`] takes it.
pub(crate) fn bounded_retention(retention: Duration) -> Duration {
    retention.clamp(RETENTION[0], RETENTION[1])
}

/// Before all times, also those before 1970.
const FIRST: &str = "-infinity";

pub(crate) async fn purge(
    pool: &PgPool,
    schema: &Identifier,
    table: &str,
    limit: u64,
) -> Result<u64, IdempotencyError> {
    const DOING: &str = "purge expired keys";
    let template = sql::PURGE.replace("{table}", table);
    let (mut purged, mut from) = (0, FIRST.to_owned());
    while purged < limit {
        let batch = PURGE_BATCH.min(limit - purged);
        let statement = template.replace("{limit}", &batch.to_string()).replace("{from}", &from);
        let statement = render(&statement, schema);
        let connection = pool.acquire().await;
        let mut connection = connection.map_err(|error| IdempotencyError::of(error, DOING))?;
        let row = answer(connection.fetch_one(raw_sql(AssertSqlSafe(statement))), DOING).await?;
        let number =
            |name| row.try_get::<Option<i64>, _>(name).map_err(|error| IdempotencyError::of(error, DOING));
        let done = number("gone")?.unwrap_or_default().unsigned_abs();
        purged += done;
        if done < batch {
            break;
        }
        from = number("last")?.map_or(FIRST.to_owned(), |last| last.to_string());
    }
    Ok(purged)
}

impl Sealed for PgIdempotency {}

impl IdempotencyStore for PgIdempotency {
    type KeyTransaction = KeyTransaction;

    async fn begin(
        &self,
        ident: &Ident,
        fingerprint: &Fingerprint,
    ) -> Result<Begin<KeyTransaction>, IdempotencyError> {
        self.begin(ident, fingerprint).await
    }

    async fn finish(fresh: KeyTransaction, stored: Stored) -> Result<Stored, IdempotencyError> {
        fresh.finish(stored).await
    }

    async fn rollback(fresh: KeyTransaction) -> Result<(), IdempotencyError> {
        fresh.rollback().await
    }

    async fn purge(&self, limit: u64) -> Result<u64, IdempotencyError> {
        self.purge(limit).await
    }

    fn max_body(&self) -> usize {
        self.max_body
    }

    fn isolation(&self) -> Isolation {
        self.isolation
    }
}
