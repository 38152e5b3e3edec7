//! Taking the outstanding rows of an entity at once, and rows of tenants that have a limit.

use leasehold_table_schema::Column;
use sqlx::postgres::PgRow;

use super::PgClaims;
use super::server::Session;
use super::take::Trouble;
use crate::statements::groups::{Locked, Run, Search, members};
use crate::statements::order::Sequence;
use crate::statements::parts::Words;
use crate::statements::pick::Asked;
use crate::statements::query::Query;
use crate::statements::row::claims;
use crate::statements::take::Tail;
use crate::statements::tenants::chosen;
use crate::store::Taken;

/// So many looks a call makes past entities that others are at. The pass goes on from there with the next call.
const LOOKS: usize = 8;

impl PgClaims {
    pub(super) async fn take_groups(&self, asked: &Asked<'_>, order: &Sequence) -> Result<Taken, Trouble> {
        let (words, line) = (self.words(), asked.take.after.clone());
        let mut search = Search::new(words, order, asked, line, asked.take.limit)?;
        let (mut session, mut skipped) = (self.server().begin().await?, 0);
        for _ in 0..LOOKS {
            let (found, is_last) = search.look(&mut session).await?;
            let tried = found.len() as u64;
            let locked = search.lock(&mut session, found).await?;
            let mut taken = Vec::new();
            if !locked.is_empty() {
                let sql = take_members(words, order, asked, search.group());
                let rows = session.rows(&search.bind(sql, &locked)?).await;
                let rows = rows.map_err(|fault| Trouble::with(fault, &search, &locked))?;
                taken.extend(claims(words, &rows, asked)?.into_values());
            }
            skipped += tried.saturating_sub(taken.len() as u64);
            if !taken.is_empty() {
                session.commit().await?;
                return Ok(Taken { claims: taken, skipped, line: search.line, ..Taken::default() });
            }
            if is_last {
                break;
            }
        }
        session.rollback().await?;
        Ok(Taken { skipped, line: search.line.filter(|_| skipped > 0), ..Taken::default() })
    }
}

impl PgClaims {
    pub(super) async fn take_limited(&self, asked: &Asked<'_>, order: &Sequence) -> Result<Taken, Trouble> {
        let (words, line) = (self.words(), asked.take.after.clone());
        let mut search = Search::new(words, order, asked, line, asked.take.limit)?;
        let (mut session, mut skipped) = (self.server().begin().await?, 0);
        for _ in 0..LOOKS {
            let found = search.look_for_room(&mut session).await?;
            if found.is_empty() {
                break;
            }
            let tried = found.len() as u64;
            let locked = search.lock_tenants(&mut session, found).await?;
            let mut taken = Vec::new();
            if !locked.is_empty() {
                let sql = take_chosen(words, order, asked, &search);
                let rows = session.rows(&search.bind_chosen(sql, &locked)?).await;
                let rows = rows.map_err(|fault| Trouble::with(fault, &search, &locked))?;
                taken.extend(claims(words, &rows, asked)?.into_values());
            }
            skipped += tried.saturating_sub(taken.len() as u64);
            if !taken.is_empty() {
                session.commit().await?;
                return Ok(Taken {
                    claims: taken,
                    skipped: skipped + search.passed(),
                    line: search.line,
                    ..Taken::default()
                });
            }
        }
        session.rollback().await?;
        skipped += search.passed();
        Ok(Taken { skipped, line: search.line.filter(|_| skipped > 0), ..Taken::default() })
    }
}

/// The statement that takes rows of tenants that are locked.
pub(super) fn take_chosen(words: &Words, order: &Sequence, asked: &Asked<'_>, search: &Search<'_>) -> String {
    let sequence = words.inner().owner_sequence.as_ref().map(|_| "p.owner");
    let tail = Tail { words, order, single: false, claim: "p.claim", sequence };
    tail.statement(&format!("WITH {}", chosen(words, order, asked, search)), asked.from)
}

impl Run for Session {
    type Error = Trouble;

    async fn rows(&mut self, query: &Query) -> Result<Vec<PgRow>, Trouble> {
        Ok(Self::rows(self, query).await?)
    }
}

/// The statement that takes the rows of entities whose keys are locked.
pub(super) fn take_members(words: &Words, order: &Sequence, asked: &Asked<'_>, group: &Column) -> String {
    let sequence = words.inner().owner_sequence.as_ref().map(|_| "p.owner");
    let tail = Tail { words, order, single: false, claim: "p.claim", sequence };
    tail.statement(&format!("WITH {}", members(words, order, asked, group, Locked::Skip)), asked.from)
}
