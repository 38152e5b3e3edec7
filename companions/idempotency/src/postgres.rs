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

/// Default retention: one day, as at Stripe.
pub(crate) const DEFAULT_RETENTION: Duration = Duration::from_secs(24 * 3600);
/// Limits of the retention. A shorter one would forget keys before clients repeat them.
const RETENTION: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(100 * 366 * 24 * 3600)];
pub(crate) const DEFAULT_RETRY_AFTER: Duration = Duration::from_secs(1);
pub(crate) const DEFAULT_MAX_BODY: usize = 64 * 1024;
pub(crate) const DEFAULT_MAX_IN_FLIGHT: usize = 10_000;
/// Maximum of [`PgIdempotency::join`], longer than any client waits.
const MAX_JOIN: Duration = Duration::from_secs(24 * 3600);
/// Rows per transaction of a purge. A caller that begins one of these keys again waits for that transaction.
const PURGE_BATCH: u64 = 500;

/// Isolation level of an owned transaction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // Exhaustive, because these are the levels of the SQL standard that the server distinguishes.
pub enum Isolation {
    /// The server's default: each statement sees all data committed before it began.
    #[default]
    ReadCommitted,
    /// All statements see the same snapshot of the data.
    RepeatableRead,
    /// The result is as if the transactions ran one after the other.
    Serializable,
}

/// Idempotency keys in Postgres. The effect and its record share one transaction. Cheap to clone. Create one per
/// process and clone it, because only clones share the table of keys in flight.
///
/// ```no_run
/// use leasehold_idempotency::{Begin, Ident, PgIdempotency, Stored, fingerprint};
///
/// # async fn pay(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
/// let keys = PgIdempotency::new(pool);
/// keys.migrate().await?;
/// let (ident, request) = (Ident::new("account:42", "key-1")?, fingerprint([b"pay 10".as_slice()]));
/// match keys.begin(&ident, &request).await? {
///     Begin::Fresh(mut tx) => {
///         sqlx::query("INSERT INTO payment VALUES (10)").execute(&mut *tx).await?;
///         tx.finish(Stored::done(200, "paid")).await?;
///     }
///     Begin::Replay(stored) => println!("paid before: {:?}", stored.body()),
///     Begin::InFlight { retry_after } => println!("try again after {retry_after:?}"),
///     Begin::Mismatch => println!("the key belongs to another request"),
/// }
/// # Ok(())
/// # }
/// ```
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
    /// Creates a store of keys in the database of `pool`, in the schema [`DEFAULT_SCHEMA`].
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

    /// Uses another schema, whose keys are separate.
    #[must_use]
    pub fn schema(mut self, schema: Identifier) -> Self {
        self.statements = Arc::new(KeyStatements::new(&schema));
        self.flights = Flights::default();
        self.schema = schema;
        self
    }

    /// Sets how long a key is remembered after it was begun: 1 second to 100 years, 1 day by default. If a request
    /// runs longer, its retention begins when it is finished.
    #[must_use]
    pub fn retention(mut self, retention: Duration) -> Self {
        self.retention = bounded_retention(retention);
        self
    }

    /// Sets the pause recommended to callers while the key is in flight: 1 second by default.
    #[must_use]
    pub const fn retry_after(mut self, pause: Duration) -> Self {
        self.retry_after = pause;
        self
    }

    /// Sets how long a second caller in this process waits for the first caller's result before it gets `InFlight`: 0
    /// by default, at most 1 day. If the first caller fails, one of the waiters takes over. The call never waits for
    /// requests in flight in other processes.
    #[must_use]
    pub fn join(mut self, wait: Duration) -> Self {
        self.join = wait.min(MAX_JOIN);
        self
    }

    /// Sets the size limit of a stored response, in bytes of body and headers: 64 KiB by default.
    #[must_use]
    pub const fn max_body(mut self, bytes: usize) -> Self {
        self.max_body = bytes;
        self
    }

    /// Sets how many keys can be in flight in this process, which bounds its memory: 10,000 by default.
    #[must_use]
    pub const fn max_in_flight(mut self, keys: usize) -> Self {
        self.max_in_flight = keys;
        self
    }

    /// Sets the isolation of the transactions that [`begin`](Self::begin) begins: READ COMMITTED by default. At
    /// higher levels, [`Retry`](IdempotencyError::Retry) is part of normal operation.
    #[must_use]
    pub const fn isolation(mut self, isolation: Isolation) -> Self {
        self.isolation = isolation;
        self
    }

    /// Prepares no statements, for a pool behind a pooler in transaction mode such as `PgBouncer`.
    #[must_use]
    pub const fn behind_pooler(mut self) -> Self {
        self.prepared = false;
        self
    }

    /// Begins the key `ident` for the request with this `fingerprint`, on a connection of the pool.
    ///
    /// A repetition of a key in flight in this process needs no connection. If the key is in flight in another
    /// process, the call takes one round trip. It never waits for another transaction. While the first request is in
    /// flight, a mismatching one gets `InFlight`, because its fingerprint is only compared with finished requests.
    ///
    /// # Errors
    ///
    /// As [`IdempotencyStore::begin`]. Kinds of [`Store`](IdempotencyError::Store):
    ///
    /// - [`Unavailable`](leasehold_api::ErrorKind::Unavailable) if the pool had no connection within its
    ///   `acquire_timeout`.
    /// - [`SchemaMissing`](leasehold_api::ErrorKind::SchemaMissing) before [`migrate`](Self::migrate).
    ///
    /// # Cancel safety
    ///
    /// If dropped, the transaction is rolled back. The connection returns to the pool once the server has confirmed
    /// it.
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
        // Awaits the rollback, because the pool must have the connection again when this function returns.
        let _ = answer(transaction.rollback(), "roll back").await;
        if let Ok(Begin::Replay(stored)) = &told {
            flight.known(*fingerprint, stored.clone());
        }
        told
    }

    /// Begins the key `ident` in an existing transaction, at any isolation, and leaves it open. Other callers in this
    /// process learn of the key only from the server. At READ COMMITTED the transaction stays usable after every
    /// outcome.
    ///
    /// The transaction holds an advisory lock and a savepoint until it ends. The server refuses the commit (23514)
    /// until the key is finished.
    ///
    /// ```no_run
    /// # use leasehold_idempotency::{Begin, Fingerprint, Ident, IdempotencyError, PgIdempotency, Stored};
    /// # async fn pay(
    /// #     keys: &PgIdempotency, tx: &mut sqlx::PgConnection, ident: &Ident, request: &Fingerprint,
    /// # ) -> Result<(), IdempotencyError> {
    /// // `tx` is your transaction, which you commit afterwards.
    /// if let Begin::Fresh(key) = keys.begin_in(tx, ident, request).await? {
    ///     // Write the effects through `tx`.
    ///     key.finish(tx, &Stored::done(200, "paid")).await?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// - [`Unfinished`](IdempotencyError::Unfinished) if this transaction has begun the key before.
    /// - [`Retry`](IdempotencyError::Retry) above READ COMMITTED. Roll back and run the transaction again.
    /// - Another error if the server reports one. Outside a transaction the call returns an error, because the key
    ///   would be committed unfinished.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the caller must roll back the transaction.
    pub async fn begin_in(
        &self,
        connection: &mut PgConnection,
        ident: &Ident,
        fingerprint: &Fingerprint,
    ) -> Result<Begin<OpenKey>, IdempotencyError> {
        open_key::begin(connection, &self.statements, &self.terms(ident, false), ident, fingerprint).await
    }

    /// Runs `body` under the key. Effects through the given connection are committed together with the returned
    /// response. An error of `body` rolls everything back, and the key can be begun again.
    ///
    /// # Errors
    ///
    /// The error of `body`, or as [`begin`](Self::begin) and [`KeyTransaction::finish`].
    ///
    /// # Cancel safety
    ///
    /// If dropped, the transaction is either committed or rolled back. Run it again with the same key to find out.
    pub async fn run<E: From<IdempotencyError>>(
        &self,
        ident: &Ident,
        fingerprint: &Fingerprint,
        body: impl AsyncFnOnce(&mut KeyTransaction) -> Result<Stored, E>,
    ) -> Result<RequestOutcome, E> {
        store::run(self, ident, fingerprint, body).await
    }

    /// Removes at most `limit` expired keys, the oldest first, in batches of 500 with one transaction each. Rows
    /// locked by other transactions are skipped and left for the next call. Returns the number of removed keys.
    ///
    /// # Errors
    ///
    /// [`Store`](IdempotencyError::Store) if the server reports an error, perhaps after removing some keys.
    ///
    /// # Cancel safety
    ///
    /// If dropped, some keys might have been removed.
    pub async fn purge(&self, limit: u64) -> Result<u64, IdempotencyError> {
        purge(&self.pool, &self.schema, "idempotency", limit).await
    }

    /// Creates the missing tables of keys and journeys. If all exist, it changes nothing and needs no privilege to
    /// create. Many processes can call it at once.
    ///
    /// # Errors
    ///
    /// [`PermissionDenied`](leasehold_api::ErrorKind::PermissionDenied) without the privilege to create, or another
    /// error of the server.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the tables are installed as a whole or not at all.
    pub async fn migrate(&self) -> Result<(), IdempotencyError> {
        let connection = self.pool.acquire().await;
        let mut connection =
            connection.map_err(|error| IdempotencyError::of(error, "get a connection of the pool"))?;
        let installed = TABLES.install(&mut connection, &self.schema).await;
        installed.map_err(|error| IdempotencyError::of(error, "install the tables of idempotency keys"))
    }

    /// Returns the SQL that [`migrate`](Self::migrate) runs, for `psql` and migration tools. It can be run again.
    #[must_use]
    pub fn schema_sql(schema: &Identifier) -> String {
        TABLES.script(schema)
    }

    /// Returns the SQL that grants `role` the use of keys and journeys, and no other privileges.
    #[must_use]
    pub fn grants_sql(schema: &Identifier, role: &Identifier) -> String {
        grants(schema, role, &["idempotency", "journey"])
    }

    /// Returns the pool.
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

/// Converts a duration to microseconds, for the server.
pub(crate) fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

/// Limits a retention as [`PgIdempotency::retention`] does.
pub(crate) fn bounded_retention(retention: Duration) -> Duration {
    retention.clamp(RETENTION[0], RETENTION[1])
}

/// A time before all others, including those before 1970.
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
