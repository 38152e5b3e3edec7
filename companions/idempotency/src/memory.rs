//! Keys in memory, for tests.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::begin::{Begin, RequestOutcome};
use crate::error::IdempotencyError;
use crate::flight::{Flight, FlightEntry, Flights};
use crate::ident::{Fingerprint, Ident};
use crate::postgres::{
    DEFAULT_MAX_BODY, DEFAULT_MAX_IN_FLIGHT, DEFAULT_RETENTION, DEFAULT_RETRY_AFTER, Isolation,
    bounded_retention,
};
use crate::store::{self, IdempotencyStore, Sealed};
use crate::stored::Stored;

/// Idempotency keys in memory, with the results of [`PgIdempotency`](crate::PgIdempotency) within one process. Clones
/// share everything. Uses the clock of `tokio::time`, which a test can advance.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leasehold_idempotency::IdempotencyError> {
/// use leasehold_idempotency::{Begin, Ident, MemoryIdempotency, Stored, fingerprint};
///
/// let idem = MemoryIdempotency::new();
/// let (ident, request) = (Ident::new("account:42", "key-1")?, fingerprint([b"spend 10".as_slice()]));
/// if let Begin::Fresh(tx) = idem.begin(&ident, &request).await? {
///     tx.finish(Stored::done(200, "spent")).await?;
/// }
/// assert!(matches!(idem.begin(&ident, &request).await?, Begin::Replay(stored) if stored.body() == "spent"));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct MemoryIdempotency {
    rows: KeyRows,
    flights: Flights,
    retention: Duration,
    join: Duration,
    max_body: usize,
}

#[derive(Clone, Default)]
struct KeyRows(Arc<Mutex<HashMap<Ident, KeyRow>>>);

struct KeyRow {
    fingerprint: Fingerprint,
    stored: Stored,
    expires: Instant,
}

impl Default for MemoryIdempotency {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryIdempotency {
    /// Creates an empty store with the default settings of [`PgIdempotency`](crate::PgIdempotency).
    #[must_use]
    pub fn new() -> Self {
        Self {
            rows: KeyRows::default(),
            flights: Flights::default(),
            retention: DEFAULT_RETENTION,
            join: Duration::ZERO,
            max_body: DEFAULT_MAX_BODY,
        }
    }

    /// Sets the retention, as [`PgIdempotency::retention`](crate::PgIdempotency::retention).
    #[must_use]
    pub fn retention(mut self, retention: Duration) -> Self {
        self.retention = bounded_retention(retention);
        self
    }

    /// Sets the wait for the first caller, as [`PgIdempotency::join`](crate::PgIdempotency::join).
    #[must_use]
    pub fn join(mut self, wait: Duration) -> Self {
        self.join = wait.min(DEFAULT_RETENTION);
        self
    }

    /// Sets the size limit, as [`PgIdempotency::max_body`](crate::PgIdempotency::max_body).
    #[must_use]
    pub const fn max_body(mut self, bytes: usize) -> Self {
        self.max_body = bytes;
        self
    }

    /// Begins the key `ident`, as [`PgIdempotency::begin`](crate::PgIdempotency::begin).
    ///
    /// # Errors
    ///
    /// Only [`Overloaded`](IdempotencyError::Overloaded).
    ///
    /// # Cancel safety
    ///
    /// If dropped, nothing was begun.
    pub async fn begin(
        &self,
        ident: &Ident,
        fingerprint: &Fingerprint,
    ) -> Result<Begin<MemoryKeyTransaction>, IdempotencyError> {
        let flight = match self.flights.enter(ident, self.join, DEFAULT_MAX_IN_FLIGHT).await? {
            FlightEntry::Lead(flight) => flight,
            FlightEntry::InFlight => return Ok(Begin::InFlight { retry_after: DEFAULT_RETRY_AFTER }),
            FlightEntry::Known(known, stored) if known == *fingerprint => return Ok(Begin::Replay(stored)),
            FlightEntry::Known(..) => return Ok(Begin::Mismatch),
        };
        let found = self.rows.get().get(ident).filter(|row| row.expires > Instant::now()).map(|row| {
            if row.fingerprint == *fingerprint { Begin::Replay(row.stored.clone()) } else { Begin::Mismatch }
        });
        if let Some(found) = found {
            return Ok(found);
        }
        flight.running();
        let expires = Instant::now() + self.retention;
        Ok(Begin::Fresh(MemoryKeyTransaction {
            rows: self.rows.clone(),
            ident: ident.clone(),
            fingerprint: *fingerprint,
            retention: self.retention,
            expires,
            max_body: self.max_body,
            effects: Vec::new(),
            flight,
        }))
    }

    /// Runs `body` under the key, as [`PgIdempotency::run`](crate::PgIdempotency::run).
    ///
    /// # Errors
    ///
    /// The error of `body`, or as [`begin`](Self::begin) and [`MemoryKeyTransaction::finish`].
    ///
    /// # Cancel safety
    ///
    /// If dropped, nothing was done.
    pub async fn run<E: From<IdempotencyError>>(
        &self,
        ident: &Ident,
        fingerprint: &Fingerprint,
        body: impl AsyncFnOnce(&mut MemoryKeyTransaction) -> Result<Stored, E>,
    ) -> Result<RequestOutcome, E> {
        store::run(self, ident, fingerprint, body).await
    }

    /// Removes expired keys, as [`PgIdempotency::purge`](crate::PgIdempotency::purge).
    ///
    /// # Errors
    ///
    /// None.
    ///
    /// # Cancel safety
    ///
    /// Never waits.
    pub async fn purge(&self, limit: u64) -> Result<u64, IdempotencyError> {
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let mut rows = self.rows.get();
        let now = Instant::now();
        let mut old: Vec<_> = rows
            .iter()
            .filter(|(_, row)| row.expires <= now)
            .map(|(ident, row)| (row.expires, ident.clone()))
            .collect();
        old.sort_by_key(|(expires, _)| *expires);
        old.truncate(limit);
        for (_, ident) in &old {
            rows.remove(ident);
        }
        Ok(old.len() as u64)
    }
}

/// A new key in memory. Pass effects that depend on the key's record to [`on_commit`](Self::on_commit).
#[must_use = "dropped, it is rolled back"]
pub struct MemoryKeyTransaction {
    rows: KeyRows,
    ident: Ident,
    fingerprint: Fingerprint,
    retention: Duration,
    expires: Instant,
    max_body: usize,
    effects: Vec<Box<dyn FnOnce() + Send>>,
    flight: Flight,
}

impl MemoryKeyTransaction {
    /// Registers an effect. It runs if the request is finished as done, but not after a rejection or rollback.
    pub fn on_commit(&mut self, effect: impl FnOnce() + Send + 'static) {
        self.effects.push(Box::new(effect));
    }

    /// Records the response and runs the effects, as [`KeyTransaction::finish`](crate::KeyTransaction::finish).
    ///
    /// # Errors
    ///
    /// Only [`TooLarge`](IdempotencyError::TooLarge). Nothing was done then.
    ///
    /// # Cancel safety
    ///
    /// Never waits.
    pub async fn finish(self, stored: Stored) -> Result<Stored, IdempotencyError> {
        stored.bounded(self.max_body)?;
        if !stored.is_rejected() {
            self.effects.into_iter().for_each(|effect| effect());
        }
        let now = Instant::now();
        let expires = if self.expires > now { self.expires } else { now + self.retention };
        let row = KeyRow { fingerprint: self.fingerprint, stored: stored.clone(), expires };
        self.rows.get().insert(self.ident, row);
        self.flight.known(self.fingerprint, stored.clone());
        Ok(stored)
    }

    /// Discards the key, as [`KeyTransaction::rollback`](crate::KeyTransaction::rollback).
    ///
    /// # Errors
    ///
    /// None.
    ///
    /// # Cancel safety
    ///
    /// Never waits.
    pub async fn rollback(self) -> Result<(), IdempotencyError> {
        Ok(())
    }
}

impl KeyRows {
    fn get(&self) -> MutexGuard<'_, HashMap<Ident, KeyRow>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Sealed for MemoryIdempotency {}

impl IdempotencyStore for MemoryIdempotency {
    type KeyTransaction = MemoryKeyTransaction;

    async fn begin(
        &self,
        ident: &Ident,
        fingerprint: &Fingerprint,
    ) -> Result<Begin<MemoryKeyTransaction>, IdempotencyError> {
        self.begin(ident, fingerprint).await
    }

    async fn finish(fresh: MemoryKeyTransaction, stored: Stored) -> Result<Stored, IdempotencyError> {
        fresh.finish(stored).await
    }

    async fn rollback(fresh: MemoryKeyTransaction) -> Result<(), IdempotencyError> {
        fresh.rollback().await
    }

    async fn purge(&self, limit: u64) -> Result<u64, IdempotencyError> {
        self.purge(limit).await
    }

    fn max_body(&self) -> usize {
        self.max_body
    }

    fn isolation(&self) -> Isolation {
        Isolation::ReadCommitted
    }
}

impl fmt::Debug for KeyRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("KeyRows").field(&self.get().len()).finish()
    }
}

impl fmt::Debug for MemoryKeyTransaction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryKeyTransaction").field("ident", &self.ident).finish_non_exhaustive()
    }
}
