//! The error of a release whose request can still arrive at the store.

use std::error::Error as StdError;
use std::fmt;

use leasehold_api::{Error, ErrorKind, LockKey};

/// Returns the error for [`Backend::release`](crate::Backend::release) while an earlier copy of the holder's request for
/// `key` can still be granted, and the store cannot stop that copy. Its kind is
/// [`Unavailable`](ErrorKind::Unavailable). If the store can stop the copy, for example by the end of a session, it returns
/// another error until it has.
///
/// The engine repeats the release. An engine that closes counts an attempt whose grant it has not seen as done, and names
/// its key in a warning. Waiting would not stop the copy.
#[must_use]
pub fn late_copy_error(key: &LockKey) -> Error {
    let message = "an earlier request for this hold can still arrive at the store and be granted, so the release is repeated until it cannot";
    Error::new(ErrorKind::Unavailable, message).with_source(LateCopy).with_key(key)
}

/// Returns whether a release failed with [`late_copy_error`].
pub(crate) fn is_late_copy(error: &Error) -> bool {
    StdError::source(error).is_some_and(<dyn StdError>::is::<LateCopy>)
}

/// The source by which the engine recognizes the error.
#[derive(Debug)]
struct LateCopy;

impl fmt::Display for LateCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the reply to an earlier request is missing")
    }
}

impl StdError for LateCopy {}
