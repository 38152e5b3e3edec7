//! Takes rows under leases: in one statement, or for groups and tenants in a transaction of three statements.

use std::sync::Arc;

use sqlx::postgres::PgRow;

use super::PgClaims;
use super::server::Fault;
use crate::error::ClaimError;
use crate::search::{Candidate, Search};
use crate::spec::ids::RowKey;
use crate::statements::TAKE;
use crate::statements::order::RowOrder;
use crate::statements::pick::{TakeRequest, first};
use crate::statements::query::Query;
use crate::statements::row::{cursor_of, key_of, taken};
use crate::statements::take::{put_back, take_alone};
use crate::store::{Excluded, PassCursor, RefusedRow, Take, Taken};

/// The largest number of rows that are tried at once after the table refused a row.
const NARROWED: u32 = 128;

impl PgClaims {
    /// Takes rows after the table refused one. Halves the number of rows in each try, until some are taken or a single
    /// row is refused and skipped. The number of statements is logarithmic in the number of rows.
    pub(super) async fn take_narrowed(&self, take: &Take, mut fault: TakeFault) -> Result<Taken, ClaimError> {
        let mut narrowed = take.clone();
        while fault.is_of_row {
            if let [(key, group)] = fault.tried.as_slice() {
                let refused =
                    RefusedRow { key: key.clone(), group: group.clone(), error: Arc::new(fault.error) };
                let cursor = fault.cursor;
                return Ok(Taken { skipped: 1, cursor, refused: vec![refused], ..Taken::default() });
            }
            narrowed.limit = (narrowed.limit / 2).clamp(1, NARROWED);
            match self.try_take(&narrowed, true).await {
                Ok(taken) => return Ok(taken),
                Err(again) => fault = again,
            }
        }
        Err(fault.error)
    }

    /// Takes rows. If the reply was lost, puts them back. With `named`, reads the keys of the rows first, so a fault
    /// can list them.
    pub(super) async fn try_take(&self, take: &Take, named: bool) -> Result<Taken, TakeFault> {
        let order = self.order().await?;
        let request = TakeRequest::new(self.parts(), take)?;
        let inner = self.parts().inner();
        let taken = if inner.grouped || inner.limit.is_some() {
            self.take_selected(&request, order).await
        } else if named {
            self.take_named(&request, order).await
        } else {
            self.take_alone(&request, order).await
        };
        match taken {
            Ok(taken) => Ok(taken),
            Err(fault) => Err(fault.undone(self, &request).await),
        }
    }

    async fn take_alone(&self, request: &TakeRequest<'_>, order: &RowOrder) -> Result<Taken, TakeFault> {
        let single = request.take.limit == 1;
        let queue = request.take.queue.is_some();
        let rows = self.behind(request, order, |nulls| {
            let make = || take_alone(self.parts(), order, request, nulls, single);
            if request.is_special() {
                return make().into();
            }
            self.remembered(format!("take {single} {queue} {nulls:?} {:?}", request.take.from), make)
        });
        Ok(taken(self.parts(), &rows.await?, request, order)?)
    }

    /// Reads the keys of the first rows and takes the unlocked rows among them. The returned cursor is behind all of
    /// them.
    async fn take_named(&self, request: &TakeRequest<'_>, order: &RowOrder) -> Result<Taken, TakeFault> {
        let parts = self.parts();
        let rows = self.behind(request, order, |nulls| first(parts, order, request, nulls).into()).await?;
        let keys = rows.iter().map(|row| key_of(parts, row, TAKE)).collect::<Result<Vec<_>, _>>()?;
        let cursor = rows.last().map(|row| cursor_of(row, order)).transpose()?;
        let mut take = request.take.clone();
        (take.only, take.excluded) = (Some(keys.clone()), Excluded::default());
        // Keeps the batch number, because it identifies claims whose outcome is unknown.
        let request = TakeRequest { take: &take, from: request.from, batch: request.batch };
        let mut taken = match self.take_alone(&request, order).await {
            Ok(taken) => taken,
            Err(fault) => {
                let tried = keys.into_iter().map(|key| (key, None)).collect();
                return Err(TakeFault { tried, cursor, ..fault });
            }
        };
        taken.skipped += (keys.len() as u64).saturating_sub(taken.claims.len() as u64);
        taken.cursor = cursor;
        Ok(taken)
    }

    /// Puts back all rows that were taken under the batch number of this request.
    async fn put_back(&self, request: &TakeRequest<'_>) -> Result<(), ClaimError> {
        let Some(sql) = put_back(self.parts()) else { return Ok(()) };
        let query = Query::new(sql).bind(i64::from(request.take.limit))?.bind(request.batch.to_string())?;
        self.server().rows(&query).await.map(drop).map_err(|fault| fault.error(TAKE))
    }

    /// Runs a statement whose last parameters are the values of the cursor. `make` gets a flag for each value: whether
    /// it is NULL.
    async fn behind(
        &self,
        request: &TakeRequest<'_>,
        order: &RowOrder,
        make: impl FnOnce(Option<&[bool]>) -> Arc<str>,
    ) -> Result<Vec<PgRow>, TakeFault> {
        let cursor = request.take.after.as_ref().map(|cursor| order.values(cursor)).transpose()?;
        let nulls: Option<Vec<bool>> =
            cursor.as_ref().map(|cursor| cursor.iter().map(Option::is_none).collect());
        let mut query = request.bind(make(nulls.as_deref()), request.take.limit)?;
        for value in cursor.into_iter().flatten().flatten() {
            query = query.bind(value)?;
        }
        Ok(self.server().rows(&query).await?)
    }
}

/// The reason why no rows were taken.
pub(super) struct TakeFault {
    error: ClaimError,
    /// Whether the rows might have been taken despite the error.
    may_be_taken: bool,
    /// Whether the table refused to write one of the rows.
    is_of_row: bool,
    /// The rows that were tried, with their groups. Empty if they are unknown.
    tried: Vec<(RowKey, Option<Arc<str>>)>,
    /// The cursor behind the tried rows, from which the pass can go on.
    cursor: Option<PassCursor>,
}

impl From<ClaimError> for TakeFault {
    /// Converts an error from reading the reply. The rows were taken then.
    fn from(error: ClaimError) -> Self {
        Self { error, may_be_taken: true, is_of_row: false, tried: Vec::new(), cursor: None }
    }
}

impl From<Fault> for TakeFault {
    fn from(fault: Fault) -> Self {
        let (may_be_taken, is_of_row) = (fault.is_unknown(), fault.is_of_row());
        Self { error: fault.error(TAKE), may_be_taken, is_of_row, tried: Vec::new(), cursor: None }
    }
}

impl TakeFault {
    pub(super) fn is_of_row(&self) -> bool {
        self.is_of_row
    }

    pub(super) fn into_error(self) -> ClaimError {
        self.error
    }

    /// Builds a fault with the rows that were tried: the first row of each group, or rows of tenants.
    pub(super) fn with(fault: Fault, search: &Search<'_>, tried: &[Candidate]) -> Self {
        let group = |one: &Candidate| {
            one.group.as_deref().filter(|_| search.selection.parts.inner().grouped).map(Arc::from)
        };
        let keys = tried.iter().map(|one| Ok((one.key(search.selection.parts)?, group(one))));
        let tried = keys.collect::<Result<_, ClaimError>>().unwrap_or_default();
        Self { tried, cursor: search.cursor.clone(), ..Self::from(fault) }
    }

    /// If the rows might have been taken, puts them back. If that fails too, they are free when their lease ends.
    async fn undone(self, claims: &PgClaims, request: &TakeRequest<'_>) -> Self {
        if self.may_be_taken && claims.parts().inner().owner_sequence.is_none() {
            let undone = claims.put_back(request).await.is_ok();
            tracing::debug!(undone, "a claim whose outcome is unknown was looked for");
        }
        self
    }
}
