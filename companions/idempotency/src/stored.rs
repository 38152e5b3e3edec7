//! What is kept of a response.

use std::sync::Arc;

use bytes::Bytes;

use crate::error::IdempotencyError;

/// The response to a request: what is stored under its key, and given again to whoever repeats it. Cheap to clone.
///
/// Whether it was [done](Self::done) or [rejected](Self::rejected) decides about the effects: those of a rejected
/// request are rolled back, and only the response stays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    pub(crate) rejected: bool,
    pub(crate) status: u16,
    pub(crate) headers: Arc<Vec<(String, String)>>,
    pub(crate) body: Bytes,
}

impl Stored {
    /// The response to a request that was carried out. `status` is HTTP's, or a number of your own.
    #[must_use]
    pub fn done(status: u16, body: impl Into<Bytes>) -> Self {
        Self { rejected: false, status, headers: Arc::default(), body: body.into() }
    }

    /// The response to a request that was refused for good, such as a payment without funds: whoever repeats it is
    /// refused the same way. Its effects are rolled back.
    #[must_use]
    pub fn rejected(status: u16, body: impl Into<Bytes>) -> Self {
        Self { rejected: true, ..Self::done(status, body) }
    }

    /// Adds a header, or another line of text to keep beside the body.
    #[must_use]
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        Arc::make_mut(&mut self.headers).push((name.into(), value.into()));
        self
    }

    /// Whether the request was refused, and its effects rolled back.
    #[must_use]
    pub const fn is_rejected(&self) -> bool {
        self.rejected
    }

    /// The status.
    #[must_use]
    pub const fn status(&self) -> u16 {
        self.status
    }

    /// The headers, in order.
    #[must_use]
    pub fn headers(&self) -> &[(String, String)] {
        &self.headers
    }

    /// The body.
    #[must_use]
    pub const fn body(&self) -> &Bytes {
        &self.body
    }

    /// Refuses what is larger than `limit` bytes.
    pub(crate) fn bounded(&self, limit: usize) -> Result<(), IdempotencyError> {
        let headers: usize = self.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
        let size = self.body.len() + headers;
        if size > limit { Err(IdempotencyError::TooLarge { size, limit }) } else { Ok(()) }
    }
}
