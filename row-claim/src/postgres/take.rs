//! Taking rows: one statement, or for groups a transaction of two.

use super::PgClaims;
use super::server::Fault;
use super::tail::Tail;
use crate::error::ClaimError;
use crate::sql::TAKE;
use crate::sql::expression::{column, owner_of_batch};
use crate::sql::order::Sequence;
use crate::sql::pick::{Asked, alone};
use crate::sql::query::Query;
use crate::sql::row::taken;
use crate::sql::words::Words;
use crate::store::{Take, Taken};

impl PgClaims {
    pub(super) async fn take_rows(&self, take: &Take) -> Result<Taken, ClaimError> {
        self.spec().needs_lease()?;
        let asked = Asked::new(self.words(), take)?;
        let order = self.order().await?;
        let taken = if self.words().inner().grouped {
            self.take_groups(&asked, order).await
        } else if self.words().inner().limit.is_some() {
            self.take_limited(&asked, order).await
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
        let nulls: Option<Vec<bool>> = line.as_ref().map(|line| line.iter().map(Option::is_none).collect());
        let (single, queue) = (asked.take.limit == 1, asked.take.queue.is_some());
        let what = format!("take {single} {queue} {nulls:?} {:?}", asked.take.from);
        let sql = self.remembered(what, || statement(self.words(), order, asked, nulls.as_deref(), single));
        let mut query = asked.bind(sql, asked.take.limit)?;
        for value in line.into_iter().flatten().flatten() {
            query = query.bind(value)?;
        }
        let rows = self.server().rows(&query).await?;
        Ok(taken(self.words(), &rows, asked, order)?)
    }
}

/// Why rows were not taken.
pub(super) struct Trouble {
    error: ClaimError,
    /// Whether they may be all the same.
    may_be_taken: bool,
}

impl From<ClaimError> for Trouble {
    /// The answer was not understood, after the rows were taken.
    fn from(error: ClaimError) -> Self {
        Self { error, may_be_taken: true }
    }
}

impl From<Fault> for Trouble {
    fn from(fault: Fault) -> Self {
        Self { may_be_taken: fault.is_unknown(), error: fault.error(TAKE) }
    }
}

impl Trouble {
    /// Puts back what may have been taken without anybody knowing of it. If that fails too, the lease ends.
    async fn undo(self, claims: &PgClaims, asked: &Asked<'_>) -> Result<Taken, ClaimError> {
        if self.may_be_taken && claims.words().inner().owner_sequence.is_none() {
            let undone = match claims.put_back_query(asked) {
                Ok(query) => claims.server().rows(&query).await.is_ok(),
                Err(_) => false,
            };
            tracing::debug!(undone, "a claim whose outcome is unknown was looked for");
        }
        Err(self.error)
    }
}

/// The statement that takes rows, each on its own.
pub(super) fn statement(
    words: &Words,
    order: &Sequence,
    asked: &Asked<'_>,
    nulls: Option<&[bool]>,
    single: bool,
) -> String {
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
        let Some(lease) = &words.lease else {
            return words.spec.needs_lease().map(|()| Query::new(""));
        };
        let due = format!(
            "SELECT {} FROM {} WHERE {} AND {} IN ({owners}) ORDER BY {} FOR UPDATE",
            words.key(),
            words.with_lease(),
            words.taken("t"),
            lease.owner,
            words.lock_order(),
        );
        let sql = words.change(&due, true, &set, "1");
        Query::new(sql).bind(i64::from(asked.take.limit))?.bind(asked.batch.to_string())
    }
}
