//! Claims that an open transaction holds.
//!
//! Taking a claim locks rows and writes nothing. The work and its end are written in the same transaction, and the
//! commit makes all of it visible at once. See [`PgHeld`].

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

/// Claims that a transaction holds, on an existing table without lease columns.
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
/// - **A take writes nothing** except the row lock. If the transaction ends without a commit (an error, a crash of the
///   worker, its machine or the server), the row is unchanged and free once the server notices. No cleanup is needed.
/// - **Attempts roll back too.** The attempt is written at the end of the claim, so a crash does not count, and a row
///   that kills its worker is tried indefinitely. If crashes must count, use a lease.
/// - **An epoch needs a sequence** ([`epoch_sequence`](crate::ClaimSpecBuilder::epoch_sequence)), because a number in
///   the row would be rolled back. It is drawn at the take, so a second try has a greater epoch under the same
///   [`dedupe_key`](crate::ClaimedRow::dedupe_key). Pass both to resources outside this database, which do not roll
///   back. The sequence must not cache (`CACHE 1`, the default). After a crash of the server, numbers without a
///   durable commit can be drawn again.
/// - **A taken row looks free in the table**, because readers see only committed data and never wait for the lock.
///   Query `pg_locks`, or use a lease.
/// - **Other writers of the row wait**, or get 55P03 if they use NOWAIT.
/// - **READ COMMITTED only.** At REPEATABLE READ and SERIALIZABLE every row settled since the transaction's first
///   statement would fail the take (40001), and a group would be judged by data from before its lock. Such a
///   transaction is refused.
/// - **Keep it short.** The transaction occupies the connection and holds back vacuum, and
///   `idle_in_transaction_session_timeout` can end it during the work. For long work, use a lease.
/// - **NULL is no state.** A row whose `processed` is NULL is never taken. Make the column NOT NULL.
/// - **Behind a pooler in transaction mode** use [`behind_pooler`](Self::behind_pooler).
#[derive(Clone, Debug)]
pub struct PgHeld {
    /// The same table under leases, for all calls that do not depend on the kind of claim.
    table: PgClaims,
    sql: Arc<HeldSql>,
}

/// A cache of SQL built from the spec and the table's columns.
#[derive(Debug)]
struct HeldSql {
    parts: SqlParts,
    order: OnceCell<RowOrder>,
}

impl PgHeld {
    /// Builds claims for `spec`, in transactions on connections of `pool`.
    #[must_use]
    pub fn new(pool: PgPool, spec: ClaimSpec) -> Self {
        let sql = HeldSql { parts: SqlParts::held(&spec), order: OnceCell::new() };
        Self { table: PgClaims::new(pool, spec), sql: Arc::new(sql) }
    }

    /// Adapts the claims to a pooler in transaction mode (PgBouncer). No prepared statement stays on a connection,
    /// which is a little slower.
    #[must_use]
    pub fn behind_pooler(mut self) -> Self {
        self.table = self.table.behind_pooler();
        self
    }

    /// Sets the time limit of each reply of the server. The default is 10 seconds. A connection that exceeds it is
    /// closed.
    #[must_use]
    pub fn timeout(mut self, answer: Duration) -> Self {
        self.table = self.table.timeout(answer);
        self
    }

    /// Takes rows in the transaction of `connection`, which holds them until it ends. Rows that are locked, or that
    /// depend on a locked or unfinished row, count as [`skipped`](Taken::skipped), and the returned
    /// [`cursor`](Taken::cursor) lies behind them. Rows that this transaction already holds are not offered again.
    ///
    /// # Errors
    ///
    /// - [`Unsupported`](ClaimError::Unsupported) outside a transaction, and at an isolation level other than READ
    ///   COMMITTED.
    /// - [`InvalidSpec`](ClaimError::InvalidSpec) for a limit of zero or states that cannot be taken.
    /// - The errors of the server, which end the transaction.
    ///
    /// # Cancel safety
    ///
    /// If dropped, rows might be locked until the transaction ends.
    pub async fn take_in(&self, connection: &mut PgConnection, take: &Take) -> Result<Taken, ClaimError> {
        Ok(self.try_take(connection, take).await?.taken)
    }

    /// Returns whether a row could be taken if other workers had not claimed it. The cursor in `take` does not matter.
    /// Rows that other transactions hold count until their commit.
    ///
    /// # Errors
    ///
    /// [`Store`](ClaimError::Store) if the server cannot answer.
    ///
    /// # Cancel safety
    ///
    /// The call changes nothing.
    pub async fn pending(&self, take: &Take) -> Result<bool, ClaimError> {
        self.table.is_any_pending(take).await
    }
}

impl fmt::Display for PgHeld {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "held {}", self.spec())
    }
}
