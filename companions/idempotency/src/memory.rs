//! The twin in memory, for tests of what is built on keys.

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

/// Idempotency keys in memory: the same answers as [`PgIdempotency`](crate::PgIdempotency) in one process. Clones
/// share everything. Time is that of `tokio::time`, so that a test can move it.
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
    /// Empty, with the settings of [`PgIdempotency`](crate::PgIdempotency).
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

    /// As [`PgIdempotency::retention`](crate::PgIdempotency::retention).
    #[must_use]
    pub fn retention(mut self, retention: Duration) -> Self {
        self.retention = bounded_retention(retention);
        self
    }

    /// As [`PgIdempotency::join`](crate::PgIdempotency::join).
    #[must_use]
    pub fn join(mut self, wait: Duration) -> Self {
        self.join = wait.min(DEFAULT_RETENTION);
        self
    }

    /// As [`PgIdempotency::max_body`](crate::PgIdempotency::max_body).
    #[must_use]
    pub const fn max_body(mut self, bytes: usize) -> Self {
        self.max_body = bytes;
        self
    }

    /// As [`PgIdempotency::begin`](crate::PgIdempotency::begin).
    ///
    /// # Errors
    ///
    /// [`Overloaded`](IdempotencyError::Overloaded) alone.
    ///
    /// # Cancel safety
    ///
    /// Safe: nothing was begun.
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

    /// As [`PgIdempotency::run`](crate::PgIdempotency::run).
    ///
    /// # Errors
    ///
    /// The body's, or as [`begin`](Self::begin) and [`MemoryKeyTransaction::finish`].
    ///
    /// # Cancel safety
    ///
    /// Dropped in between, nothing was done.
    pub async fn run<E: From<IdempotencyError>>(
        &self,
        ident: &Ident,
        fingerprint: &Fingerprint,
        body: impl AsyncFnOnce(&mut MemoryKeyTransaction) -> Result<Stored, E>,
    ) -> Result<RequestOutcome, E> {
        store::run(self, ident, fingerprint, body).await
    }

    /// As [`PgIdempotency::purge`](crate::PgIdempotency::purge).
    ///
    /// # Errors
    ///
    /// None.
    ///
    /// # Cancel safety
    ///
    /// Safe.
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

/// A key that is new, in memory. Effects that must not be there without the key's record are given to
/// [`on_commit`](Self::on_commit).
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
    /// An effect, which takes place when the request is finished as done, and not if it is rejected or rolled back.
    pub fn on_commit(&mut self, effect: impl FnOnce() + Send + 'static) {
        self.effects.push(Box::new(effect));
    }

    /// As [`KeyTransaction::finish`](crate::KeyTransaction::finish).
    ///
    /// # Errors
    ///
    /// [`TooLarge`](IdempotencyError::TooLarge) alone; nothing was done then.
    ///
    /// # Cancel safety
    ///
    /// It does not wait for anything.
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

    /// As [`KeyTransaction::rollback`](crate::KeyTransaction::rollback).
    ///
    /// # Errors
    ///
    /// None.
    ///
    /// # Cancel safety
    ///
    /// Safe.
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
