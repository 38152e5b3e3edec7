//! Takes rows in an open transaction: all ready rows of a group as one claim, or rows of tenants. A tenant is a value
//! of the column by which the spec limits the rows in progress.

use std::collections::BTreeMap;

use sqlx::PgConnection;
use sqlx::postgres::PgRow;

use super::PgHeld;
use super::take::{check_transaction, taken_rows, until_transaction_ends};
use crate::error::ClaimError;
use crate::search::{Candidate, Search, SearchTransaction};
use crate::statements::TAKE;
use crate::statements::groups::Locked;
use crate::statements::hold::hold;
use crate::statements::order::RowOrder;
use crate::statements::pick::TakeRequest;
use crate::statements::query::{Query, get};
use crate::statements::row::claims;
use crate::statements::with::With;
use crate::store::{Claimed, PassCursor, Taken};

impl PgHeld {
    /// Takes rows of groups, or rows of tenants that are below their limit. Each row of a tenant takes one of its
    /// places (numbered advisory locks) until the transaction ends. Sets `reached` to the position of the search, also
    /// after an error.
    pub(super) async fn pick_selected(
        &self,
        connection: &mut PgConnection,
        order: &RowOrder,
        request: &TakeRequest<'_>,
        cursor: &Option<PassCursor>,
        limit: u32,
        reached: &mut Option<PassCursor>,
    ) -> Result<Taken, ClaimError> {
        let mut search = Search::new(self.parts(), order, request, cursor.clone(), limit)?;
        let mut transaction = HeldSearch { held: self, connection, reached };
        Ok(until_transaction_ends(search.take(&mut transaction, usize::MAX).await?))
    }
}

/// A search in the transaction of the caller.
struct HeldSearch<'c> {
    held: &'c PgHeld,
    connection: &'c mut PgConnection,
    reached: &'c mut Option<PassCursor>,
}

impl SearchTransaction for HeldSearch<'_> {
    type Error = ClaimError;

    async fn rows(&mut self, query: &Query) -> Result<Vec<PgRow>, ClaimError> {
        self.held.executor().rows(self.connection, query, TAKE).await
    }

    async fn take(
        &mut self,
        search: &mut Search<'_>,
        found: Vec<Candidate>,
    ) -> Result<Vec<Claimed>, ClaimError> {
        self.reached.clone_from(&search.cursor);
        let mut all = BTreeMap::new();
        if search.selection.is_limited() {
            let placed = self.place_all(search, found).await?;
            if !placed.is_empty() {
                all = self.hold(search, search.selection.chosen(), &placed).await?;
            }
        } else {
            let locked = search.lock(self, found).await?;
            // For a group, takes all rows or fails. Locked rows without a group are skipped.
            let (grouped, alone): (Vec<_>, Vec<_>) = locked.into_iter().partition(|one| one.group.is_some());
            for (of, how) in [(grouped, Locked::Refuse), (alone, Locked::Skip)] {
                if !of.is_empty() {
                    all.extend(self.hold(search, search.selection.members(how), &of).await?);
                }
            }
        }
        let mut taken = Taken { claims: all.into_values().collect(), ..Taken::default() };
        self.held.drop_leased(self.connection, &mut taken).await?;
        Ok(taken.claims)
    }

    async fn begin_look(&mut self) -> Result<(), ClaimError> {
        self.plain_if_limited("SAVEPOINT leasehold_places").await
    }

    async fn undo_look(&mut self) -> Result<(), ClaimError> {
        self.plain_if_limited("ROLLBACK TO SAVEPOINT leasehold_places").await
    }
}

impl HeldSearch<'_> {
    /// Runs the statement that locks and takes the rows `picked`. Returns the claims by their number in the batch.
    async fn hold(
        &mut self,
        search: &Search<'_>,
        picked: With,
        of: &[Candidate],
    ) -> Result<BTreeMap<i64, Claimed>, ClaimError> {
        let (parts, request) = (self.held.parts(), search.selection.request);
        let sql = hold(parts, search.selection.order, request, picked, "n.claim");
        let rows = self.rows(&search.bind(sql, of)?).await?;
        check_transaction(rows.first())?;
        claims(parts, taken_rows(&rows), request)
    }

    async fn plain(&mut self, text: &str) -> Result<(), ClaimError> {
        self.held.executor().plain(self.connection, text.to_owned(), TAKE).await.map(drop)
    }

    /// Runs a statement about a savepoint if tenants have a limit, because a search that takes no row must release the
    /// places that it took.
    async fn plain_if_limited(&mut self, text: &str) -> Result<(), ClaimError> {
        if self.held.parts().inner().limit.is_some() { self.plain(text).await } else { Ok(()) }
    }

    /// Takes one of the tenant's places for each candidate of `found`. Returns the candidates that got a place. The
    /// other tenants are skipped in the rest of the search.
    async fn place_all(
        &mut self,
        search: &mut Search<'_>,
        found: Vec<Candidate>,
    ) -> Result<Vec<Candidate>, ClaimError> {
        let mut placed = Vec::new();
        for one in found {
            if search.passed_over(&one) {
                continue;
            } else if self.place(search, &one).await? {
                placed.push(one);
            } else {
                search.pass_over(&one);
            }
        }
        Ok(placed)
    }

    /// Takes a place of the candidate's tenant, if one is left beside the rows under leases. Returns whether the
    /// candidate can be taken. Only a row with a tenant needs a place.
    async fn place(&mut self, search: &Search<'_>, one: &Candidate) -> Result<bool, ClaimError> {
        if one.group.is_none() {
            return Ok(true);
        }
        self.plain("SAVEPOINT leasehold_place").await?;
        let mut place: Option<i32> = None;
        if let Some(row) = self.rows(&search.place(one)?).await?.first() {
            place = Some(get(row, "place", TAKE)?);
        }
        if let Some(number) = place.filter(|_| self.held.spec().has_lease()) {
            // Locks the tenant only while its leases are counted. The place stays locked.
            self.plain("SAVEPOINT leasehold_counted").await?;
            let mut fits = false;
            if !search.lock(self, vec![one.clone()]).await?.is_empty()
                && let Some(row) = self.rows(&search.count(one)?).await?.first()
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
