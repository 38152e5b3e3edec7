//! The stored response.

use std::sync::Arc;

use bytes::Bytes;

use crate::error::IdempotencyError;

/// The response to a request, stored under its key and replayed to each repetition. Cheap to clone.
///
/// Effects of a [done](Self::done) request are committed with the response. Effects of a [rejected](Self::rejected)
/// request are rolled back, and only the response stays.
///
/// ```
/// use leasehold_idempotency::Stored;
///
/// let stored = Stored::done(201, "created").header("location", "/payments/7");
/// assert!(!stored.is_rejected());
/// assert!(Stored::rejected(402, "no funds").is_rejected());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    pub(crate) rejected: bool,
    pub(crate) status: u16,
    pub(crate) headers: Arc<Vec<(String, String)>>,
    pub(crate) body: Bytes,
}

impl Stored {
    /// Creates the response of a request that was carried out. `status` is an HTTP status or a number of your choice.
    #[must_use]
    pub fn done(status: u16, body: impl Into<Bytes>) -> Self {
        Self { rejected: false, status, headers: Arc::default(), body: body.into() }
    }

    /// Creates the response of a finally refused request, such as a payment without funds. Its effects are rolled
    /// back, and each repetition gets the same refusal.
    #[must_use]
    pub fn rejected(status: u16, body: impl Into<Bytes>) -> Self {
        Self { rejected: true, ..Self::done(status, body) }
    }

    /// Adds a header, or another line of text to store beside the body.
    #[must_use]
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        Arc::make_mut(&mut self.headers).push((name.into(), value.into()));
        self
    }

    /// Returns whether the request was rejected and its effects rolled back.
    #[must_use]
    pub const fn is_rejected(&self) -> bool {
        self.rejected
    }

    /// Returns the status.
    #[must_use]
    pub const fn status(&self) -> u16 {
        self.status
    }

    /// Returns the headers, in order.
    #[must_use]
    pub fn headers(&self) -> &[(String, String)] {
        &self.headers
    }

    /// Returns the body.
    #[must_use]
    pub const fn body(&self) -> &Bytes {
        &self.body
    }

    /// Returns `TooLarge` if headers and body exceed `limit` bytes.
    pub(crate) fn bounded(&self, limit: usize) -> Result<(), IdempotencyError> {
        let headers: usize = self.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
        let size = self.body.len() + headers;
        if size > limit { Err(IdempotencyError::TooLarge { size, limit }) } else { Ok(()) }
    }
}
