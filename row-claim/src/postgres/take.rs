//! Taking rows: one statement, or for groups a transaction of two.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::PgClaims;
use super::server::Fault;
use super::tail::Tail;
use crate::error::ClaimError;
use crate::spec::Tracking;
use crate::sql::TAKE;
use crate::sql::order::Sequence;
use crate::sql::pick::{Asked, alone};
use crate::sql::query::Query;
use crate::sql::row::taken;
use crate::sql::words::{Words, column, owner_of_batch};
use crate::state::State;
use crate::store::{Take, Taken};

/// What statements differ in.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Shape {
    single: bool,
    in_queue: bool,
    /// Which values of the line are NULL.
    line: Option<Vec<bool>>,
    from: Vec<State>,
}

/// The statements that were made.
#[derive(Debug, Default)]
pub(super) struct Made(Mutex<HashMap<Shape, Arc<str>>>);

impl PgClaims {
    pub(super) async fn take_rows(&self, take: &Take) -> Result<Taken, ClaimError> {
        self.spec_ref().needs_lease()?;
        let asked = Asked::new(self.words(), take)?;
        let order = self.order().await?;
        let taken = if self.words().inner().grouped {
            self.take_groups(&asked, order).await
        } else {
            self.take_alone(&asked, order).await
        };
        match taken {
            Ok(taken) => Ok(taken),
            Err(trouble) => trouble.undo(self, &asked).await,
        }
    }

    async fn take_alone(&self, asked: &Asked<'_>, order: &Sequence) -> Result<Taken, Trouble> {
        let line = asked.take.after.as_ref().map(|line| order.values(line)).transpose()?;
        let nulls = line.as_ref().map(|line| line.iter().map(Option::is_none).collect());
        let mut query = asked.bind(self.made().get(self.words(), order, asked, nulls)?, asked.take.limit)?;
        for value in line.into_iter().flatten().flatten() {
            query = query.bind(value)?;
        }
        let rows = self.server().rows(&query).await.map_err(Trouble::Fault)?;
        Ok(taken(self.words(), &rows, asked, order)?)
    }
}

/// Why rows were not taken.
pub(super) enum Trouble {
    Fault(Fault),
    Error(ClaimError),
}

impl From<ClaimError> for Trouble {
    fn from(error: ClaimError) -> Self {
        Self::Error(error)
    }
}

impl From<Fault> for Trouble {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

impl Trouble {
    /// Puts back what may have been taken without anybody knowing of it. If that fails too, the lease ends.
    async fn undo(self, claims: &PgClaims, asked: &Asked<'_>) -> Result<Taken, ClaimError> {
        let (may_be_taken, error) = match self {
            // The answer was not understood, after the rows were taken.
            Self::Error(error) => (true, error),
            Self::Fault(fault) => (fault.is_unknown(), fault.error(TAKE)),
        };
        if may_be_taken && claims.words().inner().owner_sequence.is_none() {
            let undone = match claims.put_back_query(asked) {
                Ok(query) => claims.server().rows(&query).await.is_ok(),
                Err(_) => false,
            };
            tracing::debug!(undone, "a claim whose outcome is unknown was looked for");
        }
        Err(error)
    }
}

impl Made {
    fn get(
        &self,
        words: &Words,
        order: &Sequence,
        asked: &Asked<'_>,
        nulls: Option<Vec<bool>>,
    ) -> Result<Arc<str>, ClaimError> {
        let shape = Shape {
            single: asked.take.limit == 1,
            in_queue: asked.take.queue.is_some(),
            line: nulls,
            from: asked.take.from.clone(),
        };
        let mut made = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(sql) = made.get(&shape) {
            return Ok(Arc::clone(sql));
        }
        let sql = statement(words, order, asked, shape.line.as_deref(), shape.single)?;
        let sql: Arc<str> = sql.into();
        made.insert(shape, Arc::clone(&sql));
        Ok(sql)
    }
}

/// The statement that takes rows, each on its own.
pub(super) fn statement(
    words: &Words,
    order: &Sequence,
    asked: &Asked<'_>,
    nulls: Option<&[bool]>,
    single: bool,
) -> Result<String, ClaimError> {
    let tail = Tail { words, order, single, claim: "p.place", sequence: None };
    tail.statement(&format!("WITH {}", alone(words, order, asked, nulls, single)), asked.from)
}

impl PgClaims {
    /// Puts back everything that a batch has taken.
    pub(super) fn put_back_query(&self, asked: &Asked<'_>) -> Result<Query, ClaimError> {
        let words = self.words();
        let inner = words.inner();
        let owners = format!(
            "SELECT $2::text::uuid UNION ALL SELECT {} FROM pg_catalog.generate_series(1, $1::bigint) n",
            owner_of_batch("$2::text", "n")
        );
        let mut set = words.let_go();
        if words.is_moved() {
            set.push(format!("{} = {}", inner.state.quoted(), words.home()));
        }
        set.extend(
            inner.attempts.iter().map(|left| format!("{} = {} + 1", left.quoted(), column("t", left))),
        );
        let sql = match (&inner.tracking, &words.side) {
            (Tracking::Columns { owner, .. }, _) => format!(
                "WITH mine AS MATERIALIZED (SELECT {key} FROM {table} t WHERE {taken} AND {owner} IN ({owners}) \
                 ORDER BY {order} FOR UPDATE OF t) \
                 UPDATE {table} AS t SET {set} FROM mine WHERE {same}",
                key = words.key(),
                table = words.table,
                taken = words.taken("t"),
                owner = column("t", owner),
                order = words.lock_order(),
                set = set.join(", "),
                same = words.same_row("mine")
            ),
            (_, Some(side)) => {
                let changed = if set.is_empty() {
                    String::new()
                } else {
                    format!(
                        ", changed AS (UPDATE {} AS t SET {} FROM mine WHERE {})",
                        words.table,
                        set.join(", "),
                        words.same_row("mine")
                    )
                };
                let queue = if inner.queue.is_some() { "mine.queue::text" } else { "''" };
                format!(
                    "WITH mine AS MATERIALIZED (SELECT {key} FROM {table} t JOIN {side} x ON {row} \
                     WHERE x.owner IN ({owners}) ORDER BY {order} FOR UPDATE OF t, x){changed} \
                     DELETE FROM {side} x USING mine WHERE x.tab = {tab} AND x.queue = {queue} AND x.id = mine.id::text",
                    key = words.key(),
                    table = words.table,
                    side = side.table,
                    row = words.side_row(side, "t"),
                    order = words.lock_order(),
                    tab = side.tab,
                )
            }
            _ => return words.spec.needs_lease().map(|()| Query::new("")),
        };
        Query::new(sql).bind(i64::from(asked.take.limit))?.bind(asked.batch.to_string())
    }
}
