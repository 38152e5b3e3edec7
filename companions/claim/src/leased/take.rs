//! Taking rows: one statement, or for groups a transaction of two.

use std::sync::Arc;

use sqlx::postgres::PgRow;

use super::PgClaims;
use super::server::Fault;
use crate::error::ClaimError;
use crate::spec::ids::RowKey;
use crate::statements::TAKE;
use crate::statements::expression::{column, owner_of_batch};
use crate::statements::groups::{Candidate, Search};
use crate::statements::order::Sequence;
use crate::statements::parts::Words;
use crate::statements::pick::{Asked, alone, first};
use crate::statements::query::Query;
use crate::statements::row::{key_of, line_of, taken};
use crate::statements::take::Tail;
use crate::store::{Apart, Line, RefusedRow, Take, Taken};

/// How many rows are looked at, at the most, when some cannot be taken.
const NARROWED: u32 = 128;

impl PgClaims {
    /// Takes rows. Where the table does not allow one of them to be written, half as many are tried, and half of those,
    /// until some are taken or one is left, which is passed over: so many statements as the number of rows has bits, whatever
    /// stands in the table.
    pub(super) async fn take_rows(&self, take: &Take) -> Result<Taken, ClaimError> {
        self.spec().needs_lease()?;
        take.check(self.words().inner())?;
        let order = self.order().await?;
        let mut trouble = match self.attempt(take, order, false).await {
            Err(trouble) if trouble.is_of_row => trouble,
            answer => return answer.map_err(|trouble| trouble.error),
        };
        let mut narrowed = take.clone();
        while trouble.is_of_row {
            if let [(key, group)] = trouble.tried.as_slice() {
                let refused =
                    RefusedRow { key: key.clone(), group: group.clone(), error: Arc::new(trouble.error) };
                let line = trouble.line;
                return Ok(Taken { skipped: 1, line, refused: vec![refused], ..Taken::default() });
            }
            narrowed.limit = (narrowed.limit / 2).clamp(1, NARROWED);
            match self.attempt(&narrowed, order, true).await {
                Ok(taken) => return Ok(taken),
                Err(again) => trouble = again,
            }
        }
        Err(trouble.error)
    }

    /// `named`: the rows are looked for first, so that it is known which the table refuses.
    async fn attempt(&self, take: &Take, order: &Sequence, named: bool) -> Result<Taken, Trouble> {
        let asked = Asked::new(self.words(), take)?;
        let taken = if self.words().inner().grouped {
            self.take_groups(&asked, order).await
        } else if self.words().inner().limit.is_some() {
            self.take_limited(&asked, order).await
        } else if named {
            self.take_named(&asked, order).await
        } else {
            self.take_alone(&asked, order).await
        };
        match taken {
            Ok(taken) => Ok(taken),
            Err(trouble) => Err(trouble.undone(self, &asked).await),
        }
    }

    async fn take_alone(&self, asked: &Asked<'_>, order: &Sequence) -> Result<Taken, Trouble> {
        let single = asked.take.limit == 1;
        let queue = asked.take.queue.is_some();
        let rows = self.behind(asked, order, |nulls| {
            let make = || statement(self.words(), order, asked, nulls, single);
            if asked.is_special() {
                return make().into();
            }
            self.remembered(format!("take {single} {queue} {nulls:?} {:?}", asked.take.from), make)
        });
        Ok(taken(self.words(), &rows.await?, asked, order)?)
    }

    /// Takes those of the first rows that nobody has locked. The line is past all of them.
    async fn take_named(&self, asked: &Asked<'_>, order: &Sequence) -> Result<Taken, Trouble> {
        let words = self.words();
        let rows = self.behind(asked, order, |nulls| first(words, order, asked, nulls).into()).await?;
        let keys = rows.iter().map(|row| key_of(words, row, TAKE)).collect::<Result<Vec<_>, _>>()?;
        let line = rows.last().map(|row| line_of(row, order)).transpose()?;
        let mut take = asked.take.clone();
        (take.only, take.apart) = (Some(keys.clone()), Apart::default());
        // Under the same batch, by which claims are found whose outcome is unknown.
        let asked = Asked { take: &take, from: asked.from, batch: asked.batch };
        let mut taken = match self.take_alone(&asked, order).await {
            Ok(taken) => taken,
            Err(trouble) => {
                let tried = keys.into_iter().map(|key| (key, None)).collect();
                return Err(Trouble { tried, line, ..trouble });
            }
        };
        taken.skipped += (keys.len() as u64).saturating_sub(taken.claims.len() as u64);
        taken.line = line;
        Ok(taken)
    }

    /// The rows of a statement with the values of the line at its end; `make` is told which of them are NULL.
    async fn behind(
        &self,
        asked: &Asked<'_>,
        order: &Sequence,
        make: impl FnOnce(Option<&[bool]>) -> Arc<str>,
    ) -> Result<Vec<PgRow>, Trouble> {
        let line = asked.take.after.as_ref().map(|line| order.values(line)).transpose()?;
        let nulls: Option<Vec<bool>> = line.as_ref().map(|line| line.iter().map(Option::is_none).collect());
        let mut query = asked.bind(make(nulls.as_deref()), asked.take.limit)?;
        for value in line.into_iter().flatten().flatten() {
            query = query.bind(value)?;
        }
        Ok(self.server().rows(&query).await?)
    }
}

/// Why rows were not taken.
pub(super) struct Trouble {
    error: ClaimError,
    /// Whether they may be all the same.
    may_be_taken: bool,
    /// Whether the table does not allow one of them to be written.
    is_of_row: bool,
    /// Which were to be taken, with their groups, where that is known.
    tried: Vec<(RowKey, Option<Arc<str>>)>,
    /// How far the pass had got.
    line: Option<Line>,
}

impl From<ClaimError> for Trouble {
    /// The answer was not understood, after the rows were taken.
    fn from(error: ClaimError) -> Self {
        Self { error, may_be_taken: true, is_of_row: false, tried: Vec::new(), line: None }
    }
}

impl From<Fault> for Trouble {
    fn from(fault: Fault) -> Self {
        let (may_be_taken, is_of_row) = (fault.is_unknown(), fault.is_of_row());
        Self { error: fault.error(TAKE), may_be_taken, is_of_row, tried: Vec::new(), line: None }
    }
}

impl Trouble {
    /// The first rows of groups, or rows of tenants, were tried.
    pub(super) fn with(fault: Fault, search: &Search<'_>, tried: &[Candidate]) -> Self {
        let group =
            |one: &Candidate| one.group.as_deref().filter(|_| search.words.inner().grouped).map(Arc::from);
        let keys = tried.iter().map(|one| Ok((one.key(search.words)?, group(one))));
        let tried = keys.collect::<Result<_, ClaimError>>().unwrap_or_default();
        Self { tried, line: search.line.clone(), ..Self::from(fault) }
    }

    /// Puts back what may have been taken without anybody knowing of it. If that fails too, the lease ends.
    async fn undone(self, claims: &PgClaims, asked: &Asked<'_>) -> Self {
        if self.may_be_taken && claims.words().inner().owner_sequence.is_none() {
            let undone = match claims.put_back_query(asked) {
                Ok(query) => claims.server().rows(&query).await.is_ok(),
                Err(_) => false,
            };
            tracing::debug!(undone, "a claim whose outcome is unknown was looked for");
        }
        self
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
