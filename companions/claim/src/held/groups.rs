//! Taking all outstanding rows of a group as one claim, and rows of tenants that have a limit.

use sqlx::PgConnection;
use sqlx::postgres::PgRow;

use super::PgHeld;
use super::run::Run;
use super::take::{judge, lasting, present, statement};
use crate::error::ClaimError;
use crate::statements::TAKE;
use crate::statements::groups::{self, Candidate, Locked, Search, members};
use crate::statements::order::Sequence;
use crate::statements::pick::Asked;
use crate::statements::query::{Query, get};
use crate::statements::row::claims;
use crate::statements::tenants::chosen;
use crate::store::{Line, Taken};

impl PgHeld {
    /// First the groups, then their locks, then, in a statement that sees what was committed before the locks
    /// were granted, the rows.
    pub(super) async fn pick_groups(
        &self,
        connection: &mut PgConnection,
        order: &Sequence,
        asked: &Asked<'_>,
        line: &Option<Line>,
        limit: u32,
        reached: &mut Option<Line>,
    ) -> Result<Taken, ClaimError> {
        let mut search = Search::new(self.words(), order, asked, line.clone(), limit)?;
        let (mut transaction, mut skipped) = (Within { connection, run: self.run() }, 0);
        loop {
            let (found, is_last) = search.look(&mut transaction).await?;
            let tried = found.len() as u64;
            let locked = search.lock(&mut transaction, found).await?;
            reached.clone_from(&search.line);
            let mut taken = self.take_groups(&mut transaction, &search, &locked).await?;
            skipped += tried.saturating_sub(taken.claims.len() as u64);
            if !taken.claims.is_empty() {
                (taken.skipped, taken.line) = (skipped, search.line);
                return Ok(lasting(taken));
            }
            if is_last {
                let line = search.line.filter(|_| skipped > 0);
                return Ok(Taken { skipped, line, ..Taken::default() });
            }
        }
    }

    /// All ready rows of the groups whose locks were granted, and rows of no group. A group of which somebody has a row
    /// locked is none; other rows are left out.
    async fn take_groups(
        &self,
        transaction: &mut Within<'_>,
        search: &Search<'_>,
        locked: &[Candidate],
    ) -> Result<Taken, ClaimError> {
        let (words, order, asked) = (self.words(), search.order, search.asked);
        let mut all = std::collections::BTreeMap::new();
        for how in [Locked::Refuse, Locked::Skip] {
            let of = |one: &&Candidate| one.group.is_some() == (how == Locked::Refuse);
            if !locked.iter().any(|one| of(&one)) {
                continue;
            }
            let picked = members(words, order, asked, search.group(), how);
            let sql = statement(words, order, asked, &picked, "n.claim");
            let rows = groups::Run::rows(transaction, &search.bind(sql, locked.iter().filter(of))?).await?;
            judge(rows.first())?;
            all.extend(claims(words, present(&rows), asked)?);
        }
        let mut taken = Taken { claims: all.into_values().collect(), ..Taken::default() };
        self.leave_leased(transaction.connection, &mut taken).await?;
        Ok(taken)
    }
}

impl PgHeld {
    /// Rows of tenants that have room, each with a place of its tenant until the transaction ends.
    pub(super) async fn pick_limited(
        &self,
        connection: &mut PgConnection,
        order: &Sequence,
        asked: &Asked<'_>,
        line: &Option<Line>,
        limit: u32,
        reached: &mut Option<Line>,
    ) -> Result<Taken, ClaimError> {
        let words = self.words();
        let mut search = Search::new(words, order, asked, line.clone(), limit)?;
        let (mut transaction, mut skipped) = (Within { connection, run: self.run() }, 0);
        loop {
            transaction.plain("SAVEPOINT leasehold_places").await?;
            let found = search.look_for_room(&mut transaction).await?;
            if found.is_empty() {
                skipped += search.passed();
                let line = search.line.filter(|_| skipped > 0);
                return Ok(Taken { skipped, line, ..Taken::default() });
            }
            reached.clone_from(&search.line);
            let (tried, mut placed) = (found.len() as u64, Vec::new());
            for one in found {
                if search.passed_over(&one) {
                    continue;
                } else if transaction.place(&search, &one, words.spec.has_lease()).await? {
                    placed.push(one);
                } else {
                    search.pass_over(&one);
                }
            }
            let mut taken = Taken::default();
            if !placed.is_empty() {
                let sql = statement(words, order, asked, &chosen(words, order, asked, &search), "n.claim");
                let query = search.bind_chosen(sql, &placed)?;
                let rows = groups::Run::rows(&mut transaction, &query).await?;
                judge(rows.first())?;
                taken.claims = claims(words, present(&rows), asked)?.into_values().collect();
                self.leave_leased(transaction.connection, &mut taken).await?;
            }
            skipped += tried.saturating_sub(taken.claims.len() as u64);
            if !taken.claims.is_empty() {
                (taken.skipped, taken.line) = (skipped + search.passed(), search.line);
                return Ok(lasting(taken));
            }
            transaction.plain("ROLLBACK TO SAVEPOINT leasehold_places").await?;
        }
    }
}

impl Within<'_> {
    async fn plain(&mut self, text: &str) -> Result<(), ClaimError> {
        self.run.plain(self.connection, text.to_owned(), TAKE).await.map(drop)
    }

    /// Takes a place of the candidate's tenant that leases leave free, if there is one. A row of no tenant needs none.
    async fn place(
        &mut self,
        search: &Search<'_>,
        one: &Candidate,
        with_leases: bool,
    ) -> Result<bool, ClaimError> {
        if one.group.is_none() {
            return Ok(true);
        }
        self.plain("SAVEPOINT leasehold_place").await?;
        let mut place: Option<i32> = None;
        if let Some(row) = groups::Run::rows(self, &search.place(one)?).await?.first() {
            place = Some(get(row, "place", TAKE)?);
        }
        if let Some(number) = place.filter(|_| with_leases) {
            // The tenant is locked while leases are counted, and free again at once: the place stays locked.
            self.plain("SAVEPOINT leasehold_counted").await?;
            let mut fits = false;
            if !search.lock(self, vec![one.clone()]).await?.is_empty()
                && let Some(row) = groups::Run::rows(self, &search.count(one)?).await?.first()
            {
                fits = i64::from(number) <= get::<i64>(row, "room", TAKE)?;
            }
            self.plain("ROLLBACK TO SAVEPOINT leasehold_counted").await?;
            place = place.filter(|_| fits);
        }
        if place.is_none() {
            self.plain("ROLLBACK TO SAVEPOINT leasehold_place").await?;
        }
        Ok(place.is_some())
    }
}

/// The transaction of the caller.
struct Within<'c> {
    connection: &'c mut PgConnection,
    run: Run,
}

impl groups::Run for Within<'_> {
    type Error = ClaimError;

    async fn rows(&mut self, query: &Query) -> Result<Vec<PgRow>, ClaimError> {
        self.run.rows(self.connection, query, TAKE).await
    }
}
