//! Converts responses to table rows and back.

use std::sync::Arc;

use sqlx::Row as _;
use sqlx::postgres::PgRow;

use crate::error::IdempotencyError;
use crate::ident::Fingerprint;
use crate::stored::Stored;

/// The record of a key.
pub(crate) struct KeyRecord {
    pub(crate) fingerprint: Fingerprint,
    /// `None` if the request is not finished.
    pub(crate) stored: Option<Stored>,
}

const READ: &str = "read what is recorded";

impl KeyRecord {
    /// Reads the record of a key from a row. Returns `None` if the row has none, and an error if another version wrote
    /// it.
    pub(crate) fn read(row: &PgRow) -> Result<Option<Self>, IdempotencyError> {
        let failed = |error| IdempotencyError::of(error, READ);
        let Some(fingerprint) = row.try_get::<Option<Vec<u8>>, _>("fingerprint").map_err(failed)? else {
            return Ok(None);
        };
        let fingerprint = fingerprint
            .try_into()
            .map_err(|_| IdempotencyError::Unreadable("the fingerprint has another length".to_owned()))?;
        Ok(Some(Self { fingerprint: Fingerprint(fingerprint), stored: stored(row)? }))
    }
}

fn stored(row: &PgRow) -> Result<Option<Stored>, IdempotencyError> {
    let failed = |error| IdempotencyError::of(error, READ);
    let unreadable = |what: String| Err(IdempotencyError::Unreadable(what));
    let rejected = match row.try_get::<Option<String>, _>("outcome").map_err(failed)?.as_deref() {
        None => return Ok(None),
        Some("done") => false,
        Some("rejected") => true,
        Some(other) => return unreadable(format!("the outcome {other:?} is not known")),
    };
    let status = row.try_get::<Option<i32>, _>("status").map_err(failed)?;
    let Some(status) = status.and_then(|status| u16::try_from(status).ok()) else {
        return unreadable(format!("the status is {status:?}"));
    };
    let headers = match row.try_get::<Option<String>, _>("headers").map_err(failed)? {
        None => Vec::new(),
        Some(text) => serde_json::from_str::<Vec<(String, String)>>(&text)
            .map_err(|error| IdempotencyError::Unreadable(format!("the headers: {error}")))?,
    };
    let body = row.try_get::<Option<Vec<u8>>, _>("body").map_err(failed)?.unwrap_or_default();
    Ok(Some(Stored { rejected, status, headers: Arc::new(headers), body: body.into() }))
}

/// The column values of a response.
pub(crate) struct ResponseColumns {
    pub(crate) outcome: &'static str,
    pub(crate) status: i32,
    pub(crate) headers: Option<String>,
    pub(crate) body: Vec<u8>,
}

impl ResponseColumns {
    pub(crate) fn of(stored: &Stored) -> Result<Self, IdempotencyError> {
        let headers = if stored.headers.is_empty() {
            None
        } else {
            let text = serde_json::to_string(&*stored.headers);
            Some(text.map_err(|error| IdempotencyError::Unreadable(error.to_string()))?)
        };
        Ok(Self {
            outcome: if stored.rejected { "rejected" } else { "done" },
            status: stored.status.into(),
            headers,
            body: stored.body.to_vec(),
        })
    }
}
