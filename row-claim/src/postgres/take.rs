//! Taking rows: one statement, or for groups a transaction of two.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sqlx::Row as _;
use sqlx::postgres::PgRow;
use uuid::Uuid;

use super::line::Sequence;
use super::server::{Fault, Query, failed};
use super::tail::{Tail, owner_of_batch};
use super::words::{Words, column};
use super::{PgClaims, TAKE, millis};
use crate::error::ClaimError;
use crate::id::{OwnerToken, RowId, RowKey};
use crate::spec::Tracking;
use crate::state::State;
use crate::store::{ClaimRef, Claimed, ClaimedRow, Line, Take, Taken};
use crate::work;

/// The first parameter that is free: 1 is the limit, 2 the batch, 3 the lease, 4 the queue.
pub(super) const FREE: usize = 5;

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

/// What is asked for, checked.
pub(super) struct Asked<'a> {
    pub(super) take: &'a Take,
    pub(super) from: &'a [State],
    pub(super) line: Vec<Option<&'a str>>,
    pub(super) batch: Uuid,
}

impl PgClaims {
    pub(super) async fn take_rows(&self, take: &Take) -> Result<Taken, ClaimError> {
        self.spec_ref().needs_lease()?;
        take.check(self.words().inner())?;
        let order = self.order().await?;
        let line = take.after.as_ref().map_or(Ok(Vec::new()), |line| order.values(line))?;
        let from = if take.from.is_empty() { &self.words().inner().states.takeable } else { &take.from };
        let asked = Asked { take, from, line, batch: Uuid::new_v4() };
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
        let sql = self.made().get(self.words(), order, asked)?;
        let query = asked.bind(sql)?;
        let rows = self.server().rows(&query).await.map_err(Trouble::Fault)?;
        Ok(self.read(&rows, asked, order)?)
    }

    fn read(&self, rows: &[PgRow], asked: &Asked<'_>, order: &Sequence) -> Result<Taken, ClaimError> {
        let mut read = Vec::with_capacity(rows.len());
        for row in rows {
            read.push((self.claimed_row(row, asked)?, row));
        }
        read.sort_by_key(|(answer, _)| answer.place);
        let line = read.last().map(|(_, row)| line_of(row, order)).transpose()?;
        let claims = read.into_iter().map(|(row, _)| claim_of(vec![row], asked.take.lease)).collect();
        Ok(Taken { claims, skipped: 0, line })
    }

    pub(super) fn claimed_row(&self, row: &PgRow, asked: &Asked<'_>) -> Result<Answer, ClaimError> {
        let inner = self.words().inner();
        let text = |name: &str| row.try_get::<Option<String>, _>(name).map_err(|error| failed(error, TAKE));
        let number = |name: &str| row.try_get::<Option<i64>, _>(name).map_err(|error| failed(error, TAKE));
        let key = self.key_of(row, TAKE)?;
        let owner = self.owner_of(&text("owner")?.unwrap_or_default())?;
        let found = match text_if(row, "found", asked.from.len() > 1)? {
            Some(found) => State::new(found),
            None => asked.from.first().unwrap_or_else(|| inner.states.home()).clone(),
        };
        let work = work::read(&key, text_if(row, "work", !inner.work.is_empty())?);
        let attempts_left = match inner.attempts {
            Some(_) => row.try_get("attempts").map_err(|error| failed(error, TAKE))?,
            None => None,
        };
        let lease = match inner.timeout {
            Some(_) => number("lease")?.and_then(|millis| u64::try_from(millis).ok()),
            None => None,
        };
        Ok(Answer {
            row: ClaimedRow {
                key,
                epoch: number("epoch")?.unwrap_or_default(),
                found,
                kind: text_if(row, "kind", inner.kind.is_some())?.map(Arc::from),
                attempts_left,
                work,
            },
            owner,
            group: text_if(row, "grp", inner.group.is_some())?.map(Arc::from),
            lease: lease.map(Duration::from_millis),
            place: number("place")?.unwrap_or_default(),
            claim: number("claim")?.unwrap_or_default(),
        })
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

/// A row that was taken.
pub(super) struct Answer {
    pub(super) row: ClaimedRow,
    pub(super) owner: OwnerToken,
    pub(super) group: Option<Arc<str>>,
    pub(super) lease: Option<Duration>,
    pub(super) place: i64,
    pub(super) claim: i64,
}

pub(super) fn claim_of(rows: Vec<Answer>, asked: Duration) -> Claimed {
    let owner = rows.first().map_or(OwnerToken::Number(0), |row| row.owner);
    let group = rows.first().and_then(|row| row.group.clone());
    let lease = rows.iter().map(|row| row.lease.unwrap_or(asked)).min().unwrap_or(asked);
    let claim =
        ClaimRef { owner, rows: rows.iter().map(|row| (row.row.key.clone(), row.row.epoch)).collect() };
    Claimed { claim, rows: rows.into_iter().map(|row| row.row).collect(), group, lease }
}

pub(super) fn line_of(row: &PgRow, order: &Sequence) -> Result<Line, ClaimError> {
    let text = |name: &str| row.try_get::<Option<String>, _>(name).map_err(|error| failed(error, TAKE));
    let own = (0..order.own()).map(|at| text(&format!("l{at}"))).collect::<Result<Vec<_>, _>>()?;
    Ok(order.line(own, &text("id")?.unwrap_or_default(), text("queue")?.as_deref()))
}

fn text_if(row: &PgRow, name: &str, is_there: bool) -> Result<Option<String>, ClaimError> {
    if is_there { row.try_get(name).map_err(|error| failed(error, TAKE)) } else { Ok(None) }
}

impl Made {
    fn get(&self, words: &Words, order: &Sequence, asked: &Asked<'_>) -> Result<Arc<str>, ClaimError> {
        let shape = Shape {
            single: asked.take.limit == 1,
            in_queue: asked.take.queue.is_some(),
            line: asked.nulls(),
            from: asked.take.from.clone(),
        };
        let mut made = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(sql) = made.get(&shape) {
            return Ok(Arc::clone(sql));
        }
        let sql: Arc<str> = alone(words, order, asked, shape.single)?.into();
        made.insert(shape, Arc::clone(&sql));
        Ok(sql)
    }
}

impl Asked<'_> {
    fn nulls(&self) -> Option<Vec<bool>> {
        self.take.after.as_ref().map(|_| self.line.iter().map(Option::is_none).collect())
    }

    /// Which rows are wanted.
    pub(super) fn condition(&self, words: &Words, order: &Sequence) -> String {
        let mut condition = self.everywhere(words);
        if let Some(nulls) = self.nulls() {
            condition += &format!(" AND {}", order.behind(&nulls, FREE));
        }
        condition
    }

    /// The same, also before the line.
    pub(super) fn everywhere(&self, words: &Words) -> String {
        words.ready(self.from) + &self.in_queue(words)
    }

    /// The same, and rows that wait for others that somebody is at, or may be.
    pub(super) fn sooner_or_later(&self, words: &Words) -> String {
        words.sooner_or_later(self.from) + &self.in_queue(words)
    }

    fn in_queue(&self, words: &Words) -> String {
        match (&words.queue, &self.take.queue) {
            (Some(queue), Some(_)) => format!(" AND {queue} = $4::text"),
            _ => String::new(),
        }
    }

    /// The values, those of the line last.
    pub(super) fn bind(&self, sql: impl Into<Arc<str>>) -> Result<Query, ClaimError> {
        let mut query = self.bind_few(sql)?;
        for value in self.line.iter().flatten() {
            query = query.bind(*value)?;
        }
        Ok(query)
    }

    pub(super) fn bind_few(&self, sql: impl Into<Arc<str>>) -> Result<Query, ClaimError> {
        Query::new(sql)
            .bind(i64::from(self.take.limit))?
            .bind(self.batch.to_string())?
            .bind(millis(self.take.lease))?
            .bind(self.take.queue.as_deref())
    }
}

/// The statement that takes rows, each on its own.
pub(super) fn alone(
    words: &Words,
    order: &Sequence,
    asked: &Asked<'_>,
    single: bool,
) -> Result<String, ClaimError> {
    let tail = Tail { words, order, single, claim: "p.place", sequence: None };
    let picked = format!(
        "SELECT {}{} FROM {} t WHERE {} ORDER BY {} LIMIT {} FOR NO KEY UPDATE OF t SKIP LOCKED",
        words.key(),
        tail.carried(asked.from),
        words.table,
        asked.condition(words, order),
        order.order(),
        // Known when the server plans for all executions.
        if single { "1" } else { "$1" }
    );
    tail.statement(&format!("WITH picked AS MATERIALIZED ({picked})"), asked.from)
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

    pub(super) fn key_of(&self, row: &PgRow, doing: &'static str) -> Result<RowKey, ClaimError> {
        let text = |name: &str| row.try_get::<Option<String>, _>(name).map_err(|error| failed(error, doing));
        let id = RowId::parse(self.words().inner().id_type, &text("id")?.unwrap_or_default())?;
        Ok(RowKey { queue: text("queue")?.map(Arc::from), id })
    }

    pub(super) fn owner_of(&self, text: &str) -> Result<OwnerToken, ClaimError> {
        let owner = if self.words().inner().owner_sequence.is_some() {
            text.parse().ok().map(OwnerToken::Number)
        } else {
            text.parse().ok().map(OwnerToken::Uuid)
        };
        owner.ok_or_else(|| {
            ClaimError::spec(format!(
                "the owner {text:?} is no {}; check the column of the owner",
                self.words().owner_type()
            ))
        })
    }
}
