//! The marks and gates of this process's pollers, which other sessions check when they release or share a number.

use std::collections::HashSet;
use std::sync::{Arc, PoisonError};

use leasehold_api::Error;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, PgConnection, Row as _};

use super::{SharedSession, tolerate_refusal};

/// The shared locks of this session for pollers, by number.
#[derive(Default)]
pub(super) struct Marks {
    /// Numbers whose release notifies the poller.
    marked: HashSet<i64>,
    /// Numbers whose gate keeps readers of other clients out.
    closed: HashSet<i64>,
}

/// One lock of each kind to set or to remove, by number.
#[derive(Default)]
struct Changes {
    numbers: Vec<i64>,
    marks: Vec<bool>,
    gates: Vec<bool>,
}

impl Changes {
    fn add(&mut self, number: i64, mark: bool, gate: bool) {
        if mark || gate {
            self.numbers.push(number);
            self.marks.push(mark);
            self.gates.push(gate);
        }
    }
}

impl Marks {
    /// Forgets all marks, because their session has ended.
    pub(super) fn clear(&mut self) {
        self.marked.clear();
        self.closed.clear();
    }

    /// Returns whether this session keeps readers of the number out for a poller.
    pub(super) fn closes_gate(&self, number: i64) -> bool {
        self.closed.contains(&number)
    }
}

impl SharedSession {
    /// Sets or removes the marks and gates of pollers for `numbers`, in at most two statements because confirmations wait
    /// behind them. A lock that fails while another session tests it is tried again with the next poll.
    pub(super) async fn mark(
        &mut self,
        connection: &mut PgConnection,
        numbers: HashSet<i64>,
    ) -> Result<(), Error> {
        let (mut set, mut unset) = (Changes::default(), Changes::default());
        {
            let pollers = self.common.pollers.lock().unwrap_or_else(PoisonError::into_inner);
            for number in numbers {
                let poller = pollers.get(&number);
                // The gate is closed already while the session has permits of the number.
                let closes =
                    poller.is_some_and(|poller| poller.closes_gate) && !self.permits.contains_key(&number);
                let (marked, closed) =
                    (self.marks.marked.contains(&number), self.marks.closed.contains(&number));
                set.add(number, poller.is_some() && !marked, closes && !closed);
                unset.add(number, poller.is_none() && marked, !closes && closed);
            }
        }
        // Removes marks first, because this makes room in the server's lock table.
        if !unset.numbers.is_empty() {
            self.unmark(connection, unset).await?;
        }
        if set.numbers.is_empty() {
            return Ok(());
        }
        let query = sqlx::query(AssertSqlSafe(Arc::clone(&self.common.statements.mark)));
        let query = query.bind(&set.numbers).bind(self.process.pid).bind(&set.marks).bind(&set.gates);
        let rows = self.bounded(query.fetch_all(&mut *connection)).await;
        let read = |row: &PgRow| Ok((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?));
        let shown =
            rows.and_then(|rows| rows.iter().map(read).collect::<Result<Vec<(i64, bool, bool)>, _>>());
        match shown {
            Ok(shown) => {
                for (number, marked, closed) in shown {
                    self.marks.marked.extend(marked.then_some(number));
                    self.marks.closed.extend(closed.then_some(number));
                }
                Ok(())
            }
            Err(error) => {
                tolerate_refusal(Err(error))?;
                // Removes the locks set before the failure.
                self.unmark(connection, set).await
            }
        }
    }

    async fn unmark(&mut self, connection: &mut PgConnection, changes: Changes) -> Result<(), Error> {
        let Changes { numbers, marks, gates } = changes;
        for ((number, mark), gate) in numbers.iter().zip(&marks).zip(&gates) {
            if *mark {
                self.marks.marked.remove(number);
            }
            if *gate {
                self.marks.closed.remove(number);
            }
        }
        let query = sqlx::query(AssertSqlSafe(Arc::clone(&self.common.statements.unmark)));
        let query = query.bind(numbers).bind(self.process.pid).bind(marks).bind(gates);
        let done = self.bounded(query.execute(connection)).await;
        tolerate_refusal(done.map(drop))
    }
}
