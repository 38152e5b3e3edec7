//! Requests of several phases whose effects are outside the database. Each completed phase is recorded, and a resumed
//! request continues after the last recorded phase.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{AcquireOptions, Error, ErrorKind, FencingToken, Lock, LockGuard, LockKey, Validity};
use leasehold_postgres::{DEFAULT_SCHEMA, Identifier, sql::render};
use leasehold_postgres_ttl::LeaseGuardExt as _;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::postgres::PgArguments;
use sqlx::query::Query;
use sqlx::{AssertSqlSafe, PgPool, Postgres, Row as _};
use tokio::time::timeout;

use crate::begin::Begin;
use crate::error::IdempotencyError;
use crate::ident::{Fingerprint, Ident, fingerprint};
use crate::postgres::{
    DEFAULT_MAX_BODY, DEFAULT_RETENTION, DEFAULT_RETRY_AFTER, bounded_retention, micros, purge,
};
use crate::record::{KeyRecord, ResponseColumns};
use crate::sql;
use crate::stored::Stored;
use crate::transaction::{ANSWER, answer, begin};

const LOOK: &str = "look the journey up";

/// Idempotent requests of several phases, such as charging a card and then booking. Each runs under a lease, so two
/// processes do not work on one journey. Only an effect already under way can outlast the lease. Each record is
/// committed while the lease is held, or not at all.
///
/// A phase is carried out **at least once**, because a process might die between the effect and its record. Pass the
/// [key](PhaseKey) to the service that carries out the effect, which then does it once.
///
/// Cheap to clone. The lock must be one of `leasehold-postgres-ttl` in the database of the pool. Its TTL determines
/// how long after a crash another process can resume.
///
/// ```no_run
/// use leasehold_idempotency::{Begin, Ident, Journeys, Stored, fingerprint};
/// # use leasehold_idempotency::IdempotencyError;
/// # async fn charge(key: &str) -> Result<String, IdempotencyError> { Ok(key.to_owned()) }
/// # async fn order(pool: sqlx::PgPool, lock: std::sync::Arc<dyn leasehold_api::Lock>) -> Result<(), IdempotencyError> {
/// let journeys = Journeys::new(pool, lock);
/// let (ident, request) = (Ident::new("account:42", "order-1")?, fingerprint([b"order 1".as_slice()]));
/// if let Begin::Fresh(mut journey) = journeys.start(&ident, &request).await? {
///     let receipt: String = journey.phase("charge", async |key| charge(key.as_str()).await).await?;
///     journey.finish(Stored::done(201, receipt)).await?;
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Journeys {
    pool: PgPool,
    lock: Arc<dyn Lock>,
    schema: Identifier,
    statements: Arc<JourneyStatements>,
    retention: Duration,
    max_body: usize,
    prepared: bool,
}

struct JourneyStatements {
    look: Arc<str>,
    begin: Arc<str>,
    phase: Arc<str>,
    finish: Arc<str>,
}

impl JourneyStatements {
    fn new(schema: &Identifier) -> Self {
        Self {
            look: render(sql::JOURNEY_LOOK, schema),
            begin: render(sql::JOURNEY_BEGIN, schema),
            phase: render(sql::JOURNEY_PHASE, schema),
            finish: render(sql::JOURNEY_FINISH, schema),
        }
    }
}

impl Journeys {
    /// Creates journeys in the database of `pool`, under leases of `lock`.
    #[must_use]
    pub fn new(pool: PgPool, lock: Arc<dyn Lock>) -> Self {
        let schema = Identifier::known(DEFAULT_SCHEMA);
        Self {
            pool,
            lock,
            statements: Arc::new(JourneyStatements::new(&schema)),
            schema,
            retention: DEFAULT_RETENTION,
            max_body: DEFAULT_MAX_BODY,
            prepared: true,
        }
    }

    /// Uses another schema, whose journeys are separate. The lock's schema is independent of it.
    #[must_use]
    pub fn schema(mut self, schema: Identifier) -> Self {
        self.statements = Arc::new(JourneyStatements::new(&schema));
        self.schema = schema;
        self
    }

    /// Sets how long a journey is remembered after its last record or resumption: 1 second to 100 years, 1 day by
    /// default. A journey started after that begins from the first phase, with new keys for its phases.
    #[must_use]
    pub fn retention(mut self, retention: Duration) -> Self {
        self.retention = bounded_retention(retention);
        self
    }

    /// Sets the size limit of a response and of a phase's value, in bytes: 64 KiB by default.
    #[must_use]
    pub const fn max_body(mut self, bytes: usize) -> Self {
        self.max_body = bytes;
        self
    }

    /// Prepares no statements, as [`PgIdempotency::behind_pooler`](crate::PgIdempotency::behind_pooler).
    #[must_use]
    pub const fn behind_pooler(mut self) -> Self {
        self.prepared = false;
        self
    }

    /// Begins a journey, or resumes a journey that its process dropped or died in.
    ///
    /// # Errors
    ///
    /// As [`PgIdempotency::begin`](crate::PgIdempotency::begin), or an error of the lock.
    /// [`Unsupported`](ErrorKind::Unsupported) if the lock belongs to another store.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the lease is released in the background. The journey might have been begun and can be resumed.
    pub async fn start(
        &self,
        ident: &Ident,
        fingerprint: &Fingerprint,
    ) -> Result<Begin<Journey>, IdempotencyError> {
        // Looks the record up without a lease first, because a finished journey is replayed without one.
        if let Some(told) = self.look(ident, fingerprint).await?.and_then(FoundJourney::told) {
            return Ok(told);
        }
        let key = LockKey::from_parts(["journey", &hex::encode(ident.digest(&["leasehold-journey"]))])?;
        let Some(guard) = self.lock.try_acquire(&key, &AcquireOptions::default()).await? else {
            return Ok(Begin::InFlight { retry_after: DEFAULT_RETRY_AFTER });
        };
        let query = sqlx::query(AssertSqlSafe(Arc::clone(&self.statements.begin)))
            .bind(ident.scope().to_owned())
            .bind(ident.key().to_owned())
            .bind(fingerprint.as_bytes().to_vec())
            .bind(micros(self.retention));
        self.commit(&guard, query, None).await?;
        match self.look(ident, fingerprint).await? {
            None => {
                Err(Error::new(ErrorKind::Lost, "the journey was purged as it began; start it again").into())
            }
            // Returns the response, because another process finished the journey between the lookup and the lease.
            Some(FoundJourney::Told(told)) => Ok(told),
            Some(FoundJourney::Open { seed, phases }) => {
                let (journeys, ident) = (self.clone(), ident.clone());
                Ok(Begin::Fresh(Journey { journeys, ident, guard, seed, phases }))
            }
        }
    }

    /// Removes expired journeys, finished or not, as [`PgIdempotency::purge`](crate::PgIdempotency::purge).
    ///
    /// # Errors
    ///
    /// [`Store`](IdempotencyError::Store) if the server reports an error, perhaps after removing some journeys.
    ///
    /// # Cancel safety
    ///
    /// If dropped, some journeys might have been removed.
    pub async fn purge(&self, limit: u64) -> Result<u64, IdempotencyError> {
        purge(&self.pool, &self.schema, "journey", limit).await
    }

    async fn look(
        &self,
        ident: &Ident,
        fingerprint: &Fingerprint,
    ) -> Result<Option<FoundJourney>, IdempotencyError> {
        let failed = |error| IdempotencyError::of(error, LOOK);
        let connection = self.pool.acquire().await.map_err(failed)?;
        let mut transaction = begin(connection, sql::BEGIN_READ_COMMITTED).await?;
        let query = sqlx::query(AssertSqlSafe(Arc::clone(&self.statements.look)))
            .bind(ident.scope())
            .bind(ident.key())
            .persistent(self.prepared);
        let row = answer(query.fetch_optional(&mut *transaction), LOOK).await?;
        let _ = answer(transaction.rollback(), "roll back").await;
        let Some(row) = row else { return Ok(None) };
        let Some(record) = KeyRecord::read(&row)? else { return Ok(None) };
        if record.fingerprint != *fingerprint {
            return Ok(Some(FoundJourney::Told(Begin::Mismatch)));
        }
        if let Some(stored) = record.stored {
            return Ok(Some(FoundJourney::Told(Begin::Replay(stored))));
        }
        let phases: String = row.try_get("phases").map_err(failed)?;
        let phases = serde_json::from_str(&phases)
            .map_err(|error| IdempotencyError::Unreadable(format!("the phases: {error}")))?;
        Ok(Some(FoundJourney::Open { seed: row.try_get("seed").map_err(failed)?, phases }))
    }

    /// Runs one statement and commits it only while the lease is held. If `changes` is set, the statement must change
    /// exactly that many rows.
    async fn commit(
        &self,
        guard: &LockGuard,
        query: Query<'_, Postgres, PgArguments>,
        changes: Option<u64>,
    ) -> Result<(), IdempotencyError> {
        const DOING: &str = "record the journey";
        let connection = self.pool.acquire().await;
        let connection = connection.map_err(|error| IdempotencyError::of(error, DOING))?;
        let mut transaction = begin(connection, sql::BEGIN_READ_COMMITTED).await?;
        let query = query.persistent(self.prepared);
        let done = answer(query.execute(&mut *transaction), DOING).await?.rows_affected();
        if changes.is_some_and(|changes| changes != done) {
            let _ = answer(transaction.rollback(), "roll back").await;
            let message = "the journey no longer exists, or another process has finished it; start it again";
            return Err(Error::new(ErrorKind::Lost, message).into());
        }
        match timeout(ANSWER, guard.commit(transaction)).await {
            Ok(done) => Ok(done?),
            Err(_) => Err(IdempotencyError::commit_silent()),
        }
    }
}

enum FoundJourney {
    Told(Begin<Journey>),
    Open { seed: String, phases: serde_json::Map<String, serde_json::Value> },
}

impl FoundJourney {
    fn told(self) -> Option<Begin<Journey>> {
        match self {
            Self::Told(told) => Some(told),
            Self::Open { .. } => None,
        }
    }
}

/// A journey under its lease. If dropped, it can be resumed at once.
#[must_use = "if dropped, the journey stops until a process resumes it"]
pub struct Journey {
    journeys: Journeys,
    ident: Ident,
    guard: LockGuard,
    seed: String,
    phases: serde_json::Map<String, serde_json::Value>,
}

impl Journey {
    /// Returns the key.
    #[must_use]
    pub const fn ident(&self) -> &Ident {
        &self.ident
    }

    /// Returns the guard of the lease.
    pub const fn guard(&self) -> &LockGuard {
        &self.guard
    }

    /// Returns the recorded value of the phase `name`. If none is recorded, runs `effect` and records its value as
    /// JSON. An error of `effect` records nothing.
    ///
    /// # Errors
    ///
    /// - The error of `effect`.
    /// - [`Lost`](ErrorKind::Lost) if the lease was lost. Before the effect, nothing was done. After the effect,
    ///   nothing is recorded, and a resumed journey repeats the effect with the same key.
    /// - [`OutcomeUnknown`](ErrorKind::OutcomeUnknown) if the commit of the record was not confirmed.
    /// - [`Unreadable`](IdempotencyError::Unreadable) if the recorded value is not a `T`, or if the new value cannot
    ///   be written as JSON and read again.
    /// - [`TooLarge`](IdempotencyError::TooLarge) if the value exceeds the limit.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the effect might have taken place without a record.
    pub async fn phase<T: Serialize + DeserializeOwned, E: From<IdempotencyError>>(
        &mut self,
        name: &str,
        effect: impl AsyncFnOnce(PhaseKey) -> Result<T, E>,
    ) -> Result<T, E> {
        if let Some(recorded) = self.phases.get(name) {
            let recorded = serde_json::from_value(recorded.clone());
            return Ok(recorded.map_err(|error| unreadable(name, &error))?);
        }
        self.held()?;
        let value = effect(self.key(name)).await?;
        self.record(name, &value).await?;
        Ok(value)
    }

    /// Records the response, which ends the journey, and releases the lease. Returns the response, which can now be
    /// sent. A [rejected](Stored::rejected) response undoes nothing, because the effects are outside the database.
    ///
    /// # Errors
    ///
    /// As [`phase`](Self::phase). The journey can be resumed then.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the response might have been recorded. Start the journey again to find out.
    pub async fn finish(self, stored: Stored) -> Result<Stored, IdempotencyError> {
        stored.bounded(self.journeys.max_body)?;
        self.held()?;
        let columns = ResponseColumns::of(&stored)?;
        let query = sqlx::query(AssertSqlSafe(Arc::clone(&self.journeys.statements.finish)))
            .bind(self.ident.scope())
            .bind(self.ident.key())
            .bind(self.seed.as_str())
            .bind(columns.outcome)
            .bind(columns.status)
            .bind(columns.headers)
            .bind(columns.body)
            .bind(micros(self.journeys.retention));
        self.journeys.commit(&self.guard, query, Some(1)).await?;
        // Ignores a failed release, because the response is recorded and the lock retries the release in the
        // background.
        let _ = self.guard.release().await;
        Ok(stored)
    }

    async fn record<T: Serialize + DeserializeOwned>(
        &mut self,
        name: &str,
        value: &T,
    ) -> Result<(), IdempotencyError> {
        let value = serde_json::to_value(value).map_err(|error| unreadable(name, &error))?;
        // Checks that the value can be read, because an unreadable record would block every later try of the journey.
        T::deserialize(&value).map_err(|error| unreadable(name, &error))?;
        let text = value.to_string();
        // Removes escaped backslashes first, because `\\u0000` is not a zero character.
        if text.replace(r"\\", "").contains(r"\u0000") {
            return Err(unreadable(name, &"the server keeps no text with a zero character"));
        }
        let (size, limit) = (name.len() + text.len(), self.journeys.max_body);
        if size > limit {
            return Err(IdempotencyError::TooLarge { size, limit });
        }
        let query = sqlx::query(AssertSqlSafe(Arc::clone(&self.journeys.statements.phase)))
            .bind(self.ident.scope())
            .bind(self.ident.key())
            .bind(self.seed.as_str())
            .bind(name)
            .bind(text)
            .bind(micros(self.journeys.retention));
        self.journeys.commit(&self.guard, query, Some(1)).await?;
        self.phases.insert(name.to_owned(), value);
        Ok(())
    }

    fn held(&self) -> Result<(), IdempotencyError> {
        if self.guard.validity() == Validity::Lost {
            let reason = self.guard.lost().reason().unwrap_or(leasehold_api::LossReason::Expired);
            return Err(Error::lost(reason).with_key(self.guard.key()).into());
        }
        Ok(())
    }

    fn key(&self, name: &str) -> PhaseKey {
        let digest = fingerprint([self.seed.as_bytes(), name.as_bytes()]);
        PhaseKey { key: hex::encode(digest.as_bytes()), token: self.guard.token() }
    }
}

fn unreadable(name: &str, error: &dyn fmt::Display) -> IdempotencyError {
    IdempotencyError::Unreadable(format!("the value of the phase {name:?}: {error}"))
}

/// The key and token of a phase, to pass to the service that carries out its effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PhaseKey {
    key: String,
    token: Option<FencingToken>,
}

impl PhaseKey {
    /// Returns the idempotency key of this phase, 64 characters. It is the same for each try of this phase of this
    /// journey in every process, until the journey's retention ends.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.key
    }

    /// Returns the fencing token of the journey's lease, for services that refuse older tokens. It increases with
    /// each process that resumes the journey.
    #[must_use]
    pub const fn token(&self) -> Option<FencingToken> {
        self.token
    }
}

impl fmt::Debug for Journeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Journeys")
            .field("schema", &self.schema)
            .field("retention", &self.retention)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Journey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Journey").field("ident", &self.ident).finish_non_exhaustive()
    }
}
