//! The traits for authors of stores: [`Backend`](backend::Backend), or [`SingleKey`](single::SingleKey) for a
//! store that handles one key per call.

pub(crate) mod backend;
pub(crate) mod events;
#[cfg(feature = "test-util")]
pub(crate) mod fault;
pub(crate) mod hash;
pub(crate) mod late;
pub mod scheme;
pub(crate) mod single;
pub mod token;

use leasehold_api::{Error, ErrorKind};

/// Returns the error of a request for which the backend returned no reply.
pub(crate) fn missing_replies_error() -> Error {
    Error::new(
        ErrorKind::OutcomeUnknown,
        "the store answered fewer requests than it was sent; this is a bug of the backend",
    )
}
