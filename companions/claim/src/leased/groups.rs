//! Takes rows of groups, and rows of tenants. A tenant is a value of the column by which the spec limits the rows in
//! progress.

use sqlx::postgres::PgRow;

use super::PgClaims;
use super::server::PooledSession;
use super::take::TakeFault;
use crate::search::{Candidate, Search, SearchTransaction};
use crate::statements::order::RowOrder;
use crate::statements::pick::TakeRequest;
use crate::statements::query::Query;
use crate::statements::row::claims;
use crate::statements::take::take_selected;
use crate::store::{Claimed, Taken};

/// How often, at most, one call searches on after it found only groups that other workers have claimed. The next call
/// of the same pass continues behind those groups.
const LOOKS: usize = 8;

impl PgClaims {
    pub(super) async fn take_selected(
        &self,
        request: &TakeRequest<'_>,
        order: &RowOrder,
    ) -> Result<Taken, TakeFault> {
        let (cursor, limit) = (request.take.after.clone(), request.take.limit);
        let mut search = Search::new(self.parts(), order, request, cursor, limit)?;
        let mut session = self.server().begin().await?;
        let taken = search.take(&mut session, LOOKS).await?;
        if taken.claims.is_empty() {
            session.rollback().await?;
        } else {
            session.commit().await?;
        }
        Ok(taken)
    }
}

impl SearchTransaction for PooledSession {
    type Error = TakeFault;

    async fn rows(&mut self, query: &Query) -> Result<Vec<PgRow>, TakeFault> {
        Ok(Self::rows(self, query).await?)
    }

    async fn take(
        &mut self,
        search: &mut Search<'_>,
        found: Vec<Candidate>,
    ) -> Result<Vec<Claimed>, TakeFault> {
        let locked = search.lock_or_pass_over(self, found).await?;
        if locked.is_empty() {
            return Ok(Vec::new());
        }
        let query = search.bind(take_selected(&search.selection), &locked)?;
        let rows = Self::rows(self, &query).await.map_err(|fault| TakeFault::with(fault, search, &locked))?;
        Ok(claims(search.selection.parts, &rows, search.selection.request)?.into_values().collect())
    }

    async fn begin_look(&mut self) -> Result<(), TakeFault> {
        Ok(())
    }

    async fn undo_look(&mut self) -> Result<(), TakeFault> {
        Ok(())
    }
}
