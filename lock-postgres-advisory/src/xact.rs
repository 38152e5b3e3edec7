//! Locks inside the caller's transaction.
//!
//! The lock is held until the transaction ends, by commit or rollback, and ends with the connection. There is no
//! release. The work becomes visible at the same instant as the lock ends.
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use leasehold_postgres::Identifier;
//! use leasehold_postgres_advisory::XactLocks;
//! use sqlx::PgPool;
//!
//! # async fn spend(pool: PgPool) -> Result<(), Box<dyn std::error::Error>> {
//! let locks = XactLocks::new(Identifier::new("leasehold")?);
//!
//! // In a transaction that is there already. `BEGIN` alone may mean another isolation, see below.
//! let mut tx = pool.begin_with("BEGIN ISOLATION LEVEL READ COMMITTED").await?;
//! locks.lock_in(&mut tx, &"ledger:42".parse()?, Duration::from_secs(2)).await?;
//! let balance: i64 =
//!     sqlx::query_scalar("SELECT sum(amount)::bigint FROM entry WHERE holder = 42").fetch_one(&mut *tx).await?;
//! if balance >= 10 {
//!     sqlx::query("INSERT INTO entry VALUES (42, -10)").execute(&mut *tx).await?;
//! }
//! tx.commit().await?;
//!
//! // Or with its transaction, in one go.
//! let mut tx = locks.begin(&pool, &"ledger:42".parse()?, Duration::from_secs(2)).await?;
//! sqlx::query("INSERT INTO entry VALUES (42, 10)").execute(&mut *tx).await?;
//! tx.commit().await?;
//! # Ok(())
//! # }
//! ```
//!
//! # Rules
//!
//! - **READ COMMITTED only.** A transaction at REPEATABLE READ or SERIALIZABLE reads rows committed before the lock
//!   wait, so it would decide on old data. Such a transaction is refused. For the same reason, read the data in a later
//!   statement than the lock.
//! - **A failed wait leaves the transaction usable.** After `Timeout`, `Deadlock` and a cancelled wait, the call holds
//!   no lock, `lock_timeout` and `statement_timeout` are restored, and earlier work is intact. Other errors might have
//!   ended the transaction.
//! - **A failed statement ends the lock.** The server releases it with the error, before the rollback, unless a
//!   savepoint was set after the lock.
//! - **After a deadlock, roll back.** Locks of earlier calls are still held, and the other transactions wait for them.
//! - **Savepoints.** A rollback to a savepoint older than the lock releases it. [`XactProof::check`] checks this on the
//!   server (docs/hazards.md H05). Do not drop the future of a savepoint's `begin`, for example by a timeout. The
//!   driver would roll the whole transaction back, and later statements would run outside of any.
//!   [`XactGuard::commit`](crate::XactGuard::commit) then fails, but a plain commit does not.
//! - **Prepared transactions** (`PREPARE TRANSACTION`) keep the lock, without any connection and over a
//!   restart, until `COMMIT PREPARED` or `ROLLBACK PREPARED` (H06).
//! - **Re-entrant within the session.** The server grants a lock again to the session that holds it: the same key in
//!   this transaction, or in session scope on the same connection (H04). Other sessions are excluded by either scope,
//!   because both use the same number.
//! - **It does not outlive the transaction.** To commit twice under one lock, or to lock a resource outside this
//!   database, use the session scope or a lease.
//! - **Keep it short.** The connection is occupied, and `idle_in_transaction_session_timeout` ends it with the
//!   transaction and the lock. [`XactLocks::max_hold`] bounds the transactions of a hung program. Advisory locks alone
//!   do not hold back vacuum (H26).
//! - **A pooler in transaction mode** is supported: no statement is prepared, and no setting is left in the session.
//! - **Waiting needs PL/pgSQL**, which every database has by default.
//!
//! For a lock on a whole table, `LOCK TABLE entry IN EXCLUSIVE MODE` as the first statement suffices. It admits readers
//! and blocks all other writers.

pub(crate) mod guard;
pub(crate) mod max_hold;
mod query;
mod shared;
pub(crate) mod sql;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, ErrorKind, FencingToken, LockKey, LossReason};
use leasehold_postgres::{
    DEFAULT_SCHEMA, Fnv1a64, Identifier, KeyNumber, KeySpace, LockWait, sql::render, state_error,
    store_error, token,
};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Executor as _, PgConnection, PgPool, Row as _, raw_sql};

use self::max_hold::{MaxHold, MaxHoldWatch};
use self::query::{ANSWER_LIMIT, last_row, within};
use self::sql::XactMode;

const TAKE: &str = "take the lock";

/// Takes locks in transactions of the caller. Has no connection, and is cheap to clone.
///
/// See the [module](self) for the rules.
#[derive(Clone, Debug)]
pub struct XactLocks {
    schema: Identifier,
    numbers: Arc<dyn KeyNumber>,
    token: Arc<str>,
    max_hold: Option<MaxHold>,
}

impl XactLocks {
    /// Creates locks with the numbers of `schema`, which must exist only if tokens are drawn.
    #[must_use]
    pub fn new(schema: Identifier) -> Self {
        let token = render(&sql::TOKEN.replace("{marked}", &token::marked()), &schema);
        Self { schema, numbers: Arc::new(Fnv1a64), token, max_hold: None }
    }

    /// Sets another mapping from keys to numbers than [`Fnv1a64`].
    #[must_use]
    pub fn numbers(mut self, numbers: impl KeyNumber) -> Self {
        self.numbers = Arc::new(numbers);
        self
    }

    /// Limits the duration of a transaction that takes a lock here. If the transaction is still open `longest` after
    /// the grant, a connection of `pool` ends its session, which releases the lock and rolls the work back. The next
    /// statement on the connection fails. This also works if the program hangs or blocks its thread, if another thread
    /// of its runtime is free. Also works behind a pooler.
    ///
    /// Without it, only the server's `idle_in_transaction_session_timeout` limits an idle transaction. Each call that
    /// takes locks costs one more statement. Another follows after `longest`, unless a guard has seen the transaction
    /// end. `pool` must have a connection beyond the transactions' own.
    #[must_use]
    pub fn max_hold(mut self, longest: Duration, pool: PgPool) -> Self {
        self.max_hold = Some(MaxHold::new(longest, pool));
        self
    }

    /// Takes `key` in the transaction of `connection`, waiting at most `wait`.
    ///
    /// # Errors
    ///
    /// - [`Timeout`](ErrorKind::Timeout) if other transactions held the key for that long.
    /// - [`Deadlock`](ErrorKind::Deadlock) if they wait for this transaction.
    /// - [`InvalidOption`](ErrorKind::InvalidOption), with nothing done, outside a transaction or at another isolation
    ///   level than READ COMMITTED.
    /// - [`Unsupported`](ErrorKind::Unsupported), with nothing done, if the transaction holds the key shared.
    /// - [`Unavailable`](ErrorKind::Unavailable), with nothing done, on a standby.
    /// - [`InvalidKey`](ErrorKind::InvalidKey) if the key has no number.
    /// - Otherwise the server's error.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the wait continues on the server until its limit, and the connection's next statement or rollback
    /// waits for it. The lock might then be held until the transaction ends. The transaction stays usable. To leave the
    /// queue at once, close the connection.
    pub async fn lock_in(
        &self,
        connection: &mut PgConnection,
        key: &LockKey,
        wait: Duration,
    ) -> Result<XactProof, Error> {
        self.lock_with(connection, key, LockWait::Block(wait)).await?.ok_or_else(|| contended().with_key(key))
    }

    /// Takes `key` in the transaction of `connection` if no other session holds it or waits for it.
    ///
    /// # Errors
    ///
    /// See [`lock_in`](Self::lock_in), without `Timeout` and `Deadlock`.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the lock might be held until the transaction ends, which stays usable.
    pub async fn try_lock_in(
        &self,
        connection: &mut PgConnection,
        key: &LockKey,
    ) -> Result<Option<XactProof>, Error> {
        self.lock_with(connection, key, LockWait::Skip).await
    }

    /// Takes `key` in the transaction of `connection`. Returns `None` only with [`LockWait::Skip`].
    ///
    /// # Errors
    ///
    /// See [`lock_in`](Self::lock_in).
    ///
    /// # Cancel safety
    ///
    /// See [`lock_in`](Self::lock_in).
    pub async fn lock_with(
        &self,
        connection: &mut PgConnection,
        key: &LockKey,
        wait: LockWait,
    ) -> Result<Option<XactProof>, Error> {
        self.lock_proven(connection, self.proof(key)?, wait).await
    }

    /// Takes the lock of `proof` in the transaction of `connection`. Returns `None` only with [`LockWait::Skip`].
    async fn lock_proven(
        &self,
        connection: &mut PgConnection,
        proof: XactProof,
        wait: LockWait,
    ) -> Result<Option<XactProof>, Error> {
        let attempt = sql::attempt(proof.number, proof.space, proof.mode);
        let named = |error: Error| error.with_key(&proof.key);
        let granted = self.take(connection, &proof, attempt, wait).await.map_err(named)?;
        if granted {
            self.watch(connection).await.map_err(named)?;
        }
        Ok(granted.then_some(proof))
    }

    /// Runs `attempt`, then waits if it was not granted. Returns `false` only with [`LockWait::Skip`].
    pub(crate) async fn take(
        &self,
        connection: &mut PgConnection,
        proof: &XactProof,
        attempt: String,
        wait: LockWait,
    ) -> Result<bool, Error> {
        // Makes an attempt before waiting, because it never overtakes the server's queue, and usually
        // suffices.
        if read_verdict(&last_row(connection, attempt, ANSWER_LIMIT, TAKE).await?)? {
            return Ok(true);
        }
        match wait {
            LockWait::Skip => Ok(false),
            LockWait::Block(budget) if !budget.is_zero() => {
                self.wait_for(connection, std::slice::from_ref(proof), budget).await.map(|()| true)
            }
            LockWait::NoWait | LockWait::Block(_) => Err(contended()),
        }
    }

    /// Takes all `keys`, or none, in the transaction of `connection`. `wait` is the total limit. A repeated key is
    /// locked once. The proofs are in the order of `keys`.
    ///
    /// Locks are taken in the order of their numbers, which prevents deadlocks between calls with the same keys in
    /// another order. Two successive calls have no such order.
    ///
    /// # Errors
    ///
    /// See [`lock_in`](Self::lock_in). The error names the key that was not granted.
    ///
    /// # Cancel safety
    ///
    /// See [`lock_in`](Self::lock_in), for all keys at once.
    pub async fn lock_all_in(
        &self,
        connection: &mut PgConnection,
        keys: &[LockKey],
        wait: LockWait,
    ) -> Result<Option<Vec<XactProof>>, Error> {
        let proofs: Vec<_> = keys.iter().map(|key| self.proof(key)).collect::<Result<_, _>>()?;
        read_verdict(&last_row(connection, sql::checks(), ANSWER_LIMIT, TAKE).await?)?;
        let mut ordered = proofs.clone();
        ordered.sort_by_key(|proof| proof.number);
        ordered.dedup_by_key(|proof| proof.number);
        if ordered.is_empty() {
            return Ok(Some(proofs));
        }
        let budget = match wait {
            LockWait::Block(budget) => budget,
            LockWait::NoWait | LockWait::Skip => Duration::ZERO,
        };
        match self.wait_for(connection, &ordered, budget).await {
            Err(error) if error.kind() == ErrorKind::Timeout && wait == LockWait::Skip => Ok(None),
            outcome => {
                outcome?;
                self.watch(connection).await?;
                Ok(Some(proofs))
            }
        }
    }

    /// Starts the maximum hold of the transaction of `connection`, if configured.
    pub(crate) async fn watch(&self, connection: &mut PgConnection) -> Result<Option<MaxHoldWatch>, Error> {
        match &self.max_hold {
            Some(max_hold) => max_hold.watch(connection).await.map(Some),
            None => Ok(None),
        }
    }

    /// Draws a fencing token in the transaction of `connection`, larger than all tokens drawn for its keys before it
    /// held them.
    ///
    /// Draw it after the lock. It is durable only after the commit. Send it to other systems after the commit, or
    /// together with the data written in the transaction.
    ///
    /// # Errors
    ///
    /// - [`SchemaMissing`](ErrorKind::SchemaMissing) if the schema is missing, which this type does not check earlier.
    /// - [`Unsupported`](ErrorKind::Unsupported) if several schemas share the [numbers](KeyNumber::covers_schema).
    /// - [`Unavailable`](ErrorKind::Unavailable) if the server has crashed since tokens were last prepared: see
    ///   [`prepare_tokens`](Self::prepare_tokens).
    /// - A server error ends the transaction.
    ///
    /// # Cancel safety
    ///
    /// If dropped, a number might be skipped.
    pub async fn token(&self, connection: &mut PgConnection) -> Result<FencingToken, Error> {
        const DRAW: &str = "draw a fencing token";
        if !self.numbers.covers_schema() && self.schema.as_str() != DEFAULT_SCHEMA {
            let message = format!(
                "these numbers are shared by all schemas of the database, and tokens of the schema {:?} do not grow from one to the other; use the schema {DEFAULT_SCHEMA:?}, or numbers that cover the schema",
                self.schema.as_str()
            );
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        let rows =
            within(connection.fetch_all(raw_sql(AssertSqlSafe(Arc::clone(&self.token)))), ANSWER_LIMIT, DRAW)
                .await?;
        let Some(row) = rows.first() else {
            let message = "the server has crashed or was promoted, and tokens might repeat; call prepare_tokens on a connection that is not in a transaction, then start again";
            return Err(Error::new(ErrorKind::Unavailable, message));
        };
        let number: i64 = row.try_get(0).map_err(|error| store_error(error, DRAW))?;
        u64::try_from(number).ok().and_then(leasehold_engine::token::from_store_number).ok_or_else(|| {
            Error::new(ErrorKind::Capacity, "the sequence of fencing tokens is used up; install a new schema")
        })
    }

    /// Ensures that tokens grow even after a server crash. Once per server start is enough. All stores of this schema
    /// also do this when they connect.
    ///
    /// # Errors
    ///
    /// See [`token::mark_incarnation`].
    ///
    /// # Cancel safety
    ///
    /// If dropped, it is done completely or not at all.
    pub async fn prepare_tokens(&self, connection: &mut PgConnection) -> Result<(), Error> {
        token::mark_incarnation(connection, &self.schema).await
    }

    pub(crate) fn proof(&self, key: &LockKey) -> Result<XactProof, Error> {
        let number = self.numbers.number(&self.schema, key).map_err(|error| error.with_key(key))?;
        Ok(XactProof { key: key.clone(), number, space: self.numbers.space(), mode: XactMode::Exclusive })
    }

    /// Waits for the locks in the server's queue, one after the other.
    async fn wait_for(
        &self,
        connection: &mut PgConnection,
        ordered: &[XactProof],
        budget: Duration,
    ) -> Result<(), Error> {
        let numbers: Vec<i64> = ordered.iter().map(|proof| proof.number).collect();
        let mode = ordered.first().map_or(XactMode::Exclusive, |proof| proof.mode);
        let millis = i32::try_from(budget.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX);
        let statement = sql::wait(&numbers, self.numbers.space(), mode, millis);
        let named = |error: Error, position: usize| match ordered.get(position) {
            Some(proof) => error.with_key(&proof.key),
            None => error,
        };
        let row = last_row(connection, statement, budget.saturating_add(ANSWER_LIMIT), TAKE).await;
        let row = row.map_err(|error| named(error, 0))?;
        let outcome: String = row.try_get(0).map_err(|error| store_error(error, TAKE))?;
        let mut parts = outcome.splitn(3, ' ');
        match (parts.next(), parts.next(), parts.next()) {
            (Some("granted"), None, None) => Ok(()),
            (Some("55P03"), Some(position), _) => Err(named(contended(), index(position))),
            (Some(sql::UPGRADE), Some(position), _) => Err(named(upgrade(), index(position))),
            (Some(state), Some(position), message) => {
                Err(named(state_error(state, message.unwrap_or_default(), TAKE), index(position)))
            }
            _ => Err(Error::new(ErrorKind::Corrupt, "the server's answer is not understood; roll back")),
        }
    }
}

/// Proves that a transaction held a lock when this value was created. It has no release: commit or roll back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XactProof {
    key: LockKey,
    number: i64,
    pub(crate) space: KeySpace,
    mode: XactMode,
}

impl XactProof {
    /// Returns the key.
    #[must_use]
    pub const fn key(&self) -> &LockKey {
        &self.key
    }

    /// Returns the server's number for the lock, as in [`KeyNumber::number`].
    #[must_use]
    pub const fn number(&self) -> i64 {
        self.number
    }

    /// Checks on the server whether the session of `connection` still holds the lock, for code that rolls back to
    /// savepoints. It scans all locks of the server, so do not call it for every statement.
    ///
    /// # Errors
    ///
    /// [`Lost`](ErrorKind::Lost) if the lock is not held. Otherwise the server's error.
    ///
    /// # Cancel safety
    ///
    /// The call only reads.
    pub async fn check(&self, connection: &mut PgConnection) -> Result<(), Error> {
        const LOOK: &str = "look for the lock";
        let row =
            last_row(connection, sql::held(self.number, self.space, self.mode), ANSWER_LIMIT, LOOK).await?;
        match row.try_get(0) {
            Ok(true) => Ok(()),
            Ok(false) => Err(Error::lost(LossReason::Gone).with_key(&self.key)),
            Err(error) => Err(store_error(error, LOOK)),
        }
    }
}

impl fmt::Display for XactProof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (number {})", self.key, self.number)
    }
}

/// Returns whether the attempt was granted, or the error if the transaction is unsuitable.
fn read_verdict(row: &PgRow) -> Result<bool, Error> {
    let verdict: String = row.try_get(0).map_err(|error| store_error(error, TAKE))?;
    let (kind, message) = match verdict.as_str() {
        "granted" | "fine" => return Ok(true),
        "contended" => return Ok(false),
        "shared" => return Err(upgrade()),
        "standby" => (
            ErrorKind::Unavailable,
            "this server is a standby, whose locks exclude nobody on the primary; connect to the primary",
        ),
        "outside" => (
            ErrorKind::InvalidOption,
            "the connection is not in a transaction, so the lock would be gone at once; begin one first",
        ),
        "isolation" => (
            ErrorKind::InvalidOption,
            "at REPEATABLE READ and SERIALIZABLE the transaction would see data from before the lock; begin it with BEGIN ISOLATION LEVEL READ COMMITTED",
        ),
        _ => (ErrorKind::Corrupt, "the server's answer is not understood; roll back"),
    };
    Err(Error::new(kind, message))
}

pub(crate) fn contended() -> Error {
    Error::new(
        ErrorKind::Timeout,
        "others hold the lock or wait for it; try again, wait longer, or look who it is with `leasehold list`",
    )
}

fn upgrade() -> Error {
    let message = "this transaction holds the lock shared, which is not made exclusive, because two that did so would wait for each other; take it exclusively at first, or commit and take it again";
    Error::new(ErrorKind::Unsupported, message)
}

fn index(position: &str) -> usize {
    position.parse::<usize>().unwrap_or_default().saturating_sub(1)
}
