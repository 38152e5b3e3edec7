//! Requests of several phases whose effects are elsewhere: each phase is recorded when it is done, and a request that
//! is resumed goes on behind the last one.

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

/// Idempotent requests of several phases, such as charging a card and then booking. Each runs under a lease, so that
/// two processes do not work on one, but for what an effect still does after the lease was lost; every record is
/// committed while the lease is held, or not at all.
///
/// A phase is carried out **at least once**: a process may die between the effect and its record. Pass the
/// [key](PhaseKey) on to whoever carries it out, who then does it once.
///
/// Cheap to clone. The lock is one of `leasehold-postgres-ttl` in the database of the pool; its TTL says how long
/// after a crash another process can go on.
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
    /// Journeys in the database of `pool`, under leases of `lock`.
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

    /// Journeys in another schema, which are others. That of the lock is its own.
    #[must_use]
    pub fn schema(mut self, schema: Identifier) -> Self {
        self.statements = Arc::new(JourneyStatements::new(&schema));
        self.schema = schema;
        self
    }

    /// How long a journey is remembered, from its last record or when it was resumed: a day unless set, a second to a
    /// hundred years. One that is taken up again later begins anew, with other keys for its phases.
    #[must_use]
    pub fn retention(mut self, retention: Duration) -> Self {
        self.retention = bounded_retention(retention);
        self
    }

    /// The largest response, and the largest value of a phase, that is stored, in bytes: 64 KiB unless set.
    #[must_use]
    pub const fn max_body(mut self, bytes: usize) -> Self {
        self.max_body = bytes;
        self
    }

    /// As [`PgIdempotency::behind_pooler`](crate::PgIdempotency::behind_pooler).
    #[must_use]
    pub const fn behind_pooler(mut self) -> Self {
        self.prepared = false;
        self
    }

    /// Begins a journey, or goes on with one whose process has died or given up.
    ///
    /// # Errors
    ///
    /// As [`PgIdempotency::begin`](crate::PgIdempotency::begin), and what the lock answers.
    /// [`Unsupported`](ErrorKind::Unsupported) with a lock of another store.
    ///
    /// # Cancel safety
    ///
    /// The lease is released in the background; the journey may have been begun, and can be resumed.
    pub async fn start(
        &self,
        ident: &Ident,
        fingerprint: &Fingerprint,
    ) -> Result<Begin<Journey>, IdempotencyError> {
        // What is finished is replayed without a lease.
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
            // Somebody finished it between the look and the lease.
            Some(FoundJourney::Told(told)) => Ok(told),
            Some(FoundJourney::Open { seed, phases }) => {
                let (journeys, ident) = (self.clone(), ident.clone());
                Ok(Begin::Fresh(Journey { journeys, ident, guard, seed, phases }))
            }
        }
    }

    /// As [`PgIdempotency::purge`](crate::PgIdempotency::purge), of journeys that expired, finished or not.
    ///
    /// # Errors
    ///
    /// What the server answers; some may have been removed.
    ///
    /// # Cancel safety
    ///
    /// Safe: some may have been removed.
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

    /// One statement, committed while the lease is held or not at all. `changes` rows, if that matters.
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
            let message =
                "the journey is not there any more, or somebody else has finished it; start it again";
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

/// A journey under its lease. Dropped, it can be resumed at once.
#[must_use = "dropped, it is given up until somebody resumes it"]
pub struct Journey {
    journeys: Journeys,
    ident: Ident,
    guard: LockGuard,
    seed: String,
    phases: serde_json::Map<String, serde_json::Value>,
}

impl Journey {
    /// The key.
    #[must_use]
    pub const fn ident(&self) -> &Ident {
        &self.ident
    }

    /// The guard of the lease.
    pub const fn guard(&self) -> &LockGuard {
        &self.guard
    }

    /// What the phase `name` returned when it was recorded, or else runs `effect` and records what it returns, as
    /// JSON. An error of `effect` records nothing.
    ///
    /// # Errors
    ///
    /// The effect's. [`Lost`](ErrorKind::Lost) when the lease is not held any more: before the effect, nothing was
    /// done; after it, it is not recorded, and whoever resumes the journey does it again with the same key. Of kind
    /// [`OutcomeUnknown`](ErrorKind::OutcomeUnknown) when the record's commit was not confirmed.
    /// [`Unreadable`](IdempotencyError::Unreadable) when what is recorded is not a `T`, or when what `effect` returned
    /// cannot be written as JSON or read again, [`TooLarge`](IdempotencyError::TooLarge) beyond the bound.
    ///
    /// # Cancel safety
    ///
    /// The effect may have taken place without being recorded.
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

    /// Records the response, which ends the journey, and releases the lease. Gives the response back, now that it may
    /// be sent. A [rejected](Stored::rejected) one undoes nothing: the effects are elsewhere.
    ///
    /// # Errors
    ///
    /// As [`phase`](Self::phase); the journey can be resumed then.
    ///
    /// # Cancel safety
    ///
    /// It may have been recorded; start it again to find out.
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
        // It is recorded: a release that fails is repeated in the background.
        let _ = self.guard.release().await;
        Ok(stored)
    }

    async fn record<T: Serialize + DeserializeOwned>(
        &mut self,
        name: &str,
        value: &T,
    ) -> Result<(), IdempotencyError> {
        let value = serde_json::to_value(value).map_err(|error| unreadable(name, &error))?;
        // Recorded all the same, it would keep everybody from going on with the journey.
        T::deserialize(&value).map_err(|error| unreadable(name, &error))?;
        let text = value.to_string();
        // Without the backslashes that stand for themselves.
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

/// What a phase passes on to whoever carries out its effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PhaseKey {
    key: String,
    token: Option<FencingToken>,
}

impl PhaseKey {
    /// An idempotency key of its own, 64 characters: the same for each try of this phase of this journey, in every
    /// process, until the journey's retention ends.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.key
    }

    /// The fencing token of the journey's lease, greater for each process that resumes it, for effects that can refuse
    /// an older one.
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
