//! The turn of a key on a wait session.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use leasehold_api::Error;
use leasehold_postgres::{ends_session, store_error};
use sqlx::{AssertSqlSafe, PgConnection, Row as _};

use crate::derived::Turn;
use crate::error::{elsewhere, is_cancelled};
use crate::reply::ask;
use crate::try_outcome::TryOutcome;
use crate::wait_session::work::{WaitSessionWork, last_row};
use crate::wait_session::{WaitJob, WaitSession};

impl WaitSession {
    /// Waits in the server's queue for the turn.
    pub(crate) async fn take_turn(&self, turn: Turn) -> Result<TryOutcome<()>, Error> {
        ask(&self.queue, |answer| WaitJob::TakeTurn { turn, answer }).await
    }

    /// Ends the turn. After an error the session must be dropped.
    pub(crate) async fn end_turn(&self, turn: Turn) -> Result<(), Error> {
        ask(&self.queue, |answer| WaitJob::EndTurn { turn, answer }).await
    }
}

impl WaitSessionWork {
    /// Returns the outcome of a wait for a turn. An error closes the session, which might have the turn.
    pub(super) async fn take_turn(
        &self,
        connection: &mut PgConnection,
        turn: Turn,
    ) -> Result<TryOutcome<()>, sqlx::Error> {
        self.state.has_turn.store(true, Ordering::Release);
        self.state.number.store(turn.number, Ordering::Release);
        let text = self.common.statements.wait_for_turn(turn, self.state.process().pid);
        let answered = self.answered(last_row(&mut *connection, text)).await?;
        match answered.and_then(|row| row.try_get::<i32, _>(0)) {
            Ok(1) => Ok(TryOutcome::Granted(())),
            // A cancelled wait might have been granted just before.
            Ok(0) => self.clean_turn(connection, turn).await.map(|()| TryOutcome::Contended),
            Ok(_) => Err(elsewhere()),
            Err(error) if is_cancelled(&error) => {
                self.clean_turn(connection, turn).await.map(|()| TryOutcome::Contended)
            }
            Err(error) if ends_session(&error) => Err(error),
            Err(error) => {
                self.clean_turn(connection, turn).await?;
                Ok(TryOutcome::Refused(store_error(error, "wait for a permit")))
            }
        }
    }

    /// Ends the turn with its gate, and the limit that the server had set for it.
    pub(super) async fn end_turn(
        &self,
        connection: &mut PgConnection,
        turn: Turn,
    ) -> Result<(), sqlx::Error> {
        let pid = self.state.process().pid;
        let row = last_row(connection, self.common.statements.permits.end_turn(turn, pid)).await?;
        match row.try_get(0)? {
            true => Ok(()),
            false => Err(elsewhere()),
        }
    }

    async fn clean_turn(&self, connection: &mut PgConnection, turn: Turn) -> Result<(), sqlx::Error> {
        let query = sqlx::query(AssertSqlSafe(Arc::clone(&self.common.statements.permits.clean_turn)));
        let pid = self.state.process().pid;
        let numbers: Vec<i64> = [turn.number].into_iter().chain(turn.gate).collect();
        let shared: Vec<bool> = [false].into_iter().chain(turn.gate.map(|_| true)).collect();
        let locks = numbers.len() as u64;
        let freed = query.bind(numbers).bind(pid).bind(shared).execute(connection).await?;
        // Fails with fewer rows, because then another process replied, behind a pooler.
        if freed.rows_affected() == locks { Ok(()) } else { Err(elsewhere()) }
    }
}
