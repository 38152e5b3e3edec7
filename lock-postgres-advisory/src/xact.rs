//! Locks inside your own transaction.
//!
//! The lock is held until the transaction ends, by commit or rollback, and goes with the connection. There
//! is no release: the work and the lock end in the same instant, so nobody sees one without the other.
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
//! # What to know
//!
//! - **READ COMMITTED only.** At REPEATABLE READ and SERIALIZABLE the transaction sees what was committed
//!   before it waited for the lock, so it would decide on old data. Such a transaction is refused. For the
//!   same reason the lock is a statement of its own: read in a later one.
//! - **A wait that fails leaves the transaction usable**: after `Timeout` and `Deadlock`, and when somebody
//!   cancelled the wait, nothing of the call is held, `lock_timeout` and `statement_timeout` are what they
//!   were, and the work so far is intact. Other errors may have ended the transaction.
//! - **A statement that fails ends the lock.** Unless a savepoint is in between, the server lets go with the
//!   error, before anybody has rolled back.
//! - **After a deadlock, roll back.** What earlier calls locked is still held, and the others wait for it.
//! - **Savepoints.** Rolling back to a savepoint that is older than the lock releases it;
//!   [`XactProof::check`] asks the server (docs/hazards.md H05). Wait for the `begin` of a savepoint: where
//!   its future is dropped half-way, as by a timeout, the driver rolls the whole transaction back, and later
//!   statements are carried out outside of any. [`XactGuard::commit`](crate::XactGuard::commit) then fails; a
//!   commit of your own does not.
//! - **Prepared transactions** (`PREPARE TRANSACTION`) keep the lock, without any connection and over a
//!   restart, until `COMMIT PREPARED` or `ROLLBACK PREPARED` (H06).
//! - **Re-entrant within the session.** The server grants a session what it holds already: the same key
//!   again in this transaction, or held by the same connection in session scope (H04). Everybody else
//!   is kept out by either scope, as both use the same number.
//! - **It does not outlive the transaction.** To commit twice under one lock, or to lock something that is
//!   not in this database, use the session scope or a lease.
//! - **Keep it short.** The connection is occupied, and `idle_in_transaction_session_timeout` ends it with
//!   the transaction and the lock. [`XactLocks::max_hold`] bounds transactions whose program hangs. Advisory
//!   locks alone do not hold back vacuum (H26).
//! - **Behind a pooler in transaction mode** everything here works: nothing is prepared, nothing is left
//!   behind in the session.
//! - **Waiting needs PL/pgSQL**, which every database has unless somebody removed it.
//!
//! If the lock is about one table as a whole, `LOCK TABLE entry IN EXCLUSIVE MODE` as the first statement
//! does without any of this: it lets readers pass and keeps all other writers out.

pub(crate) mod guard;
pub(crate) mod max_hold;
mod query;
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

const TAKE: &str = "take the lock";

/// Takes locks in transactions of the caller. Has no connection of its own; cheap to clone.
///
/// The [module](self) says what to know.
#[derive(Clone, Debug)]
pub struct XactLocks {
    schema: Identifier,
    numbers: Arc<dyn KeyNumber>,
    token: Arc<str>,
    max_hold: Option<MaxHold>,
}

impl XactLocks {
    /// Locks whose numbers are those of `schema`, which need not exist unless tokens are drawn.
    #[must_use]
    pub fn new(schema: Identifier) -> Self {
        let token = render(&sql::TOKEN.replace("{marked}", &token::marked()), &schema);
        Self { schema, numbers: Arc::new(Fnv1a64), token, max_hold: None }
    }

    /// Other numbers for keys than [`Fnv1a64`]'s.
    #[must_use]
    pub fn numbers(mut self, numbers: impl KeyNumber) -> Self {
        self.numbers = Arc::new(numbers);
        self
    }

    /// Bounds how long a transaction lasts that has taken a lock here: when `longest` has passed since the
    /// lock was granted and the transaction is still open, a connection of `pool` ends its session, and with
    /// it transaction and lock. The work is rolled back; the next statement on the connection fails. That
    /// also helps against a program that hangs, awaits for ever or blocks its thread, as long as another
    /// thread of its runtime is free. Behind a pooler too.
    ///
    /// Without it, a transaction that idles is bounded by the server's `idle_in_transaction_session_timeout`
    /// alone. It costs one statement more for each call that takes locks, and, unless a guard has seen the
    /// transaction end, another after `longest`. `pool` must not be used up by the transactions themselves.
    #[must_use]
    pub fn max_hold(mut self, longest: Duration, pool: PgPool) -> Self {
        self.max_hold = Some(MaxHold::new(longest, pool));
        self
    }

    /// Takes `key` in the transaction of `connection`, waiting at most `wait`.
    ///
    /// # Errors
    ///
    /// [`Timeout`](ErrorKind::Timeout) when others held it for that long, [`Deadlock`](ErrorKind::Deadlock)
    /// when they wait for this transaction in turn. [`InvalidOption`](ErrorKind::InvalidOption) outside a
    /// transaction and at another isolation than READ COMMITTED, [`Unavailable`](ErrorKind::Unavailable) on a
    /// standby: there nothing was done. [`InvalidKey`](ErrorKind::InvalidKey) for a key without a number.
    /// Else what the server answers.
    ///
    /// # Cancel safety
    ///
    /// A wait whose future is dropped goes on at the server for as long as it may, and the connection's next
    /// statement, or its rollback, waits for that. It may end with the lock held until the transaction
    /// ends. The transaction stays usable either way; to leave the queue at once, close the connection.
    pub async fn lock_in(
        &self,
        connection: &mut PgConnection,
        key: &LockKey,
        wait: Duration,
    ) -> Result<XactProof, Error> {
        self.lock_with(connection, key, LockWait::Block(wait)).await?.ok_or_else(|| contended().with_key(key))
    }

    /// Takes `key` in the transaction of `connection` if nobody else holds it or waits for it.
    ///
    /// # Errors
    ///
    /// As [`lock_in`](Self::lock_in), without `Timeout` and `Deadlock`.
    ///
    /// # Cancel safety
    ///
    /// When the future is dropped, the lock may be held until the transaction ends, which stays usable.
    pub async fn try_lock_in(
        &self,
        connection: &mut PgConnection,
        key: &LockKey,
    ) -> Result<Option<XactProof>, Error> {
        self.lock_with(connection, key, LockWait::Skip).await
    }

    /// Takes `key` in the transaction of `connection`. `None` with [`LockWait::Skip`] alone.
    ///
    /// # Errors
    ///
    /// As [`lock_in`](Self::lock_in).
    ///
    /// # Cancel safety
    ///
    /// As [`lock_in`](Self::lock_in).
    pub async fn lock_with(
        &self,
        connection: &mut PgConnection,
        key: &LockKey,
        wait: LockWait,
    ) -> Result<Option<XactProof>, Error> {
        let proof = self.proof(key)?;
        let attempt = sql::attempt(proof.number, proof.space);
        let granted =
            self.take(connection, &proof, attempt, wait).await.map_err(|error| error.with_key(key))?;
        if granted {
            self.watch(connection).await.map_err(|error| error.with_key(key))?;
        }
        Ok(granted.then_some(proof))
    }

    /// `attempt`, then waits if that was not enough. `false` with [`LockWait::Skip`] alone.
    pub(crate) async fn take(
        &self,
        connection: &mut PgConnection,
        proof: &XactProof,
        attempt: String,
        wait: LockWait,
    ) -> Result<bool, Error> {
        // An attempt never overtakes the server's queue, so it comes first: mostly it is enough.
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

    /// Takes all `keys`, or none, in the transaction of `connection`; `wait` is for all together. A key that
    /// is named twice is locked once. The proofs are in the order of `keys`.
    ///
    /// Locks are taken in the order of their numbers, so that two calls with the same keys in another order
    /// do not deadlock. Two calls one after the other have no such order.
    ///
    /// # Errors
    ///
    /// As [`lock_in`](Self::lock_in), naming the key that was not granted.
    ///
    /// # Cancel safety
    ///
    /// As [`lock_in`](Self::lock_in), for all keys at once.
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

    /// Sees to it that the transaction of `connection` ends in time.
    pub(crate) async fn watch(&self, connection: &mut PgConnection) -> Result<Option<MaxHoldWatch>, Error> {
        match &self.max_hold {
            Some(max_hold) => max_hold.watch(connection).await.map(Some),
            None => Ok(None),
        }
    }

    /// Draws a fencing token in the transaction of `connection`, larger than any that was drawn for the
    /// keys it holds before it held them.
    ///
    /// Draw it after the lock. It is durable only once the transaction has committed: send it to others
    /// after that, or together with what is written in the transaction.
    ///
    /// # Errors
    ///
    /// [`SchemaMissing`](ErrorKind::SchemaMissing) when the schema is not there (install it, it is checked by
    /// the other stores' connecting), [`Unsupported`](ErrorKind::Unsupported) where
    /// [numbers](KeyNumber::covers_schema) are shared by schemas, [`Unavailable`](ErrorKind::Unavailable)
    /// when the server has crashed since anybody made sure that tokens grow: see
    /// [`prepare_tokens`](Self::prepare_tokens). An error of the server ends the transaction.
    ///
    /// # Cancel safety
    ///
    /// Safe: a number may be left out.
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

    /// Makes sure that tokens grow, also if the server has crashed since. Once per server start is enough;
    /// all stores of this schema do it when they connect.
    ///
    /// # Errors
    ///
    /// As [`token::mark_incarnation`].
    ///
    /// # Cancel safety
    ///
    /// Safe: it is done as a whole or not at all.
    pub async fn prepare_tokens(&self, connection: &mut PgConnection) -> Result<(), Error> {
        token::mark_incarnation(connection, &self.schema).await
    }

    pub(crate) fn proof(&self, key: &LockKey) -> Result<XactProof, Error> {
        let number = self.numbers.number(&self.schema, key).map_err(|error| error.with_key(key))?;
        Ok(XactProof { key: key.clone(), number, space: self.numbers.space() })
    }

    /// In the server's queue, one after the other.
    async fn wait_for(
        &self,
        connection: &mut PgConnection,
        ordered: &[XactProof],
        budget: Duration,
    ) -> Result<(), Error> {
        let numbers: Vec<i64> = ordered.iter().map(|proof| proof.number).collect();
        let millis = i32::try_from(budget.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX);
        let statement = sql::wait(&numbers, self.numbers.space(), millis);
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
            (Some(state), Some(position), message) => {
                Err(named(state_error(state, message.unwrap_or_default(), TAKE), index(position)))
            }
            _ => Err(Error::new(ErrorKind::Corrupt, "the server's answer is not understood; roll back")),
        }
    }
}

/// Says that a transaction held a lock when this was made. It has no release: commit or roll back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XactProof {
    key: LockKey,
    number: i64,
    pub(crate) space: KeySpace,
}

impl XactProof {
    /// The key.
    #[must_use]
    pub const fn key(&self) -> &LockKey {
        &self.key
    }

    /// The number by which the server knows the lock, as in [`KeyNumber::number`].
    #[must_use]
    pub const fn number(&self) -> i64 {
        self.number
    }

    /// Asks the server whether the session of `connection` still holds the lock, for code that rolls back to
    /// savepoints. It looks through all locks of the server: not for every statement.
    ///
    /// # Errors
    ///
    /// [`Lost`](ErrorKind::Lost) when it does not; else what the server answers.
    ///
    /// # Cancel safety
    ///
    /// Safe: it only looks.
    pub async fn check(&self, connection: &mut PgConnection) -> Result<(), Error> {
        const LOOK: &str = "look for the lock";
        let row = last_row(connection, sql::held(self.number, self.space), ANSWER_LIMIT, LOOK).await?;
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

/// Whether the attempt was granted, or what is wrong with the transaction.
fn read_verdict(row: &PgRow) -> Result<bool, Error> {
    let verdict: String = row.try_get(0).map_err(|error| store_error(error, TAKE))?;
    let (kind, message) = match verdict.as_str() {
        "granted" | "fine" => return Ok(true),
        "contended" => return Ok(false),
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

fn index(position: &str) -> usize {
    position.parse::<usize>().unwrap_or_default().saturating_sub(1)
}
