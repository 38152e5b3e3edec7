//! Claims that an open transaction holds.
//!
//! The take locks rows and writes nothing; the work is done in the same transaction; settling writes how it
//! ended; the commit shows all of it at once. See [`PgHeld`].

mod groups;
mod lock;
mod run;
mod settle;
mod store;
mod take;
mod transaction;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use sqlx::{PgConnection, PgPool};
use tokio::sync::OnceCell;

pub(crate) use store::HeldStore;
pub use transaction::PgHold;

use crate::error::ClaimError;
use crate::leased::PgClaims;
use crate::spec::ClaimSpec;
use crate::statements::order::RowOrder;
use crate::statements::parts::SqlParts;
use crate::store::{Take, Taken};

/// Claims held by a transaction: on a table as it is, without a column for a lease.
///
/// ```no_run
/// use leasehold_claim::{ClaimSpec, Outcome, PgHeld, States, Table, Take};
/// use leasehold_claim::sqlx::{self, PgPool};
///
/// # async fn work(pool: PgPool) -> Result<(), Box<dyn std::error::Error>> {
/// // create table payment (id bigint primary key, processed boolean not null default false)
/// let spec = ClaimSpec::builder(Table::new("payment")?).state("processed", States::boolean()).build()?;
/// let held = PgHeld::new(pool, spec);
/// if let Some(mut hold) = held.begin(&Take::up_to(10)).await? {
///     for claimed in hold.taken().claims.clone() {
///         sqlx::query("INSERT INTO booking (payment) VALUES ($1::bigint)")
///             .bind(claimed.rows[0].key.id.to_string())
///             .execute(hold.connection())
///             .await?;
///         hold.settle(&claimed.claim, &Outcome::Done).await?;
///     }
///     hold.commit().await?;
/// }
/// # Ok(())
/// # }
/// ```
///
/// # What to know
///
/// - **A take writes nothing** but the lock on the row. Whatever ends the transaction without a commit (an
///   error, a crash of the worker, of its machine or of the server) leaves the row as it was and free, as soon
///   as the server notices. Nobody has to clean up.
/// - **Attempts roll back too.** The attempt is written when the claim is settled, so a crash does not count;
///   a row that kills its worker is tried for ever. Where a crash must count, use a lease.
/// - **An epoch needs a sequence** ([`epoch_sequence`](crate::ClaimSpecBuilder::epoch_sequence)), as a number
///   in the row would be rolled back. It is drawn when the row is taken, so a second try has a greater one,
///   under the same [`dedupe_key`](crate::ClaimedRow::dedupe_key): pass both to whatever is not in this
///   database, because that is not rolled back. The sequence must not cache (`CACHE 1`, the default). When the
///   server itself crashes, numbers that no commit has made durable may be drawn again.
/// - **Nobody sees that a row is taken**: not in the table, whose row looks as before until the commit, because
///   others see what is committed (not because of the lock: readers never wait for it). Look at `pg_locks`, or
///   use a lease.
/// - **Others who write to the row wait**, or get 55P03 if they asked for it.
/// - **READ COMMITTED only.** At REPEATABLE READ and SERIALIZABLE every row that somebody settled since the
///   transaction's first statement would fail the take (40001), and a group would be judged by data from
///   before its lock. Such a transaction is refused.
/// - **Keep it short.** The connection is occupied, vacuum is held back, and
///   `idle_in_transaction_session_timeout` ends the transaction while the work goes on. For long work, use a
///   lease.
/// - **NULL is no state.** A row whose `processed` is NULL is never taken; make the column NOT NULL.
/// - **Behind a pooler in transaction mode** use [`behind_pooler`](Self::behind_pooler).
#[derive(Clone, Debug)]
pub struct PgHeld {
    /// Leases on the same table, and all that does not depend on what keeps a row.
    table: PgClaims,
    sql: Arc<HeldSql>,
}

/// What follows from the spec and the table.
#[derive(Debug)]
struct HeldSql {
    parts: SqlParts,
    order: OnceCell<RowOrder>,
}

impl PgHeld {
    /// Claims as `spec` says, in transactions on connections of `pool`.
    #[must_use]
    pub fn new(pool: PgPool, spec: ClaimSpec) -> Self {
        let sql = HeldSql { parts: SqlParts::held(&spec), order: OnceCell::new() };
        Self { table: PgClaims::new(pool, spec), sql: Arc::new(sql) }
    }

    /// For a pooler in transaction mode (`PgBouncer`): no prepared statement is left on a connection, which
    /// costs a little.
    #[must_use]
    pub fn behind_pooler(mut self) -> Self {
        self.table = self.table.behind_pooler();
        self
    }

    /// How long the server has for each answer; 10 seconds by default. A connection that was too slow is
    /// closed.
    #[must_use]
    pub fn timeout(mut self, answer: Duration) -> Self {
        self.table = self.table.timeout(answer);
        self
    }

    /// Takes rows in the transaction of `connection`, which holds them until it ends. Rows that others have
    /// locked, or that wait for one that is locked or not done yet, count as
    /// [`skipped`](Taken::skipped); the [`cursor`](Taken::cursor) is past them. Rows that this transaction holds
    /// already are not offered again.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](ClaimError::Unsupported) outside a transaction and at another isolation than READ
    /// COMMITTED, [`InvalidSpec`](ClaimError::InvalidSpec) for a limit of zero or states that may not be taken.
    /// Else what the server answers, which ends the transaction.
    ///
    /// # Cancel safety
    ///
    /// Rows may be locked until the transaction ends.
    pub async fn take_in(&self, connection: &mut PgConnection, take: &Take) -> Result<Taken, ClaimError> {
        Ok(self.try_take(connection, take).await?.taken)
    }

    /// Whether there is a row that could be taken but for others who are at it, wherever the pass has got to.
    /// Rows that others hold look like this until they commit.
    ///
    /// # Errors
    ///
    /// What keeps the server from answering.
    ///
    /// # Cancel safety
    ///
    /// It only looks.
    pub async fn pending(&self, take: &Take) -> Result<bool, ClaimError> {
        self.table.is_any_pending(take).await
    }
}

impl fmt::Display for PgHeld {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "held {}", self.spec())
    }
}
