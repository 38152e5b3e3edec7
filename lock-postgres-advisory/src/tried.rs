//! What became of one request for one number.

use leasehold_api::{Error, FencingToken};
use leasehold_engine::{Attempt, Contended, Granted, Moment};

/// The answer to one try or wait. An error in its stead means that the outcome is not known: something was sent
/// and not answered.
#[derive(Debug)]
pub(crate) enum Tried {
    Granted(FencingToken),
    /// Somebody else holds the number.
    Contended,
    /// The request failed, and nothing of it is left at the server: it was not sent, or the server has answered
    /// and has given back what a failed statement took.
    Refused(Error),
}

impl From<Tried> for Attempt {
    fn from(tried: Tried) -> Self {
        match tried {
            Tried::Granted(token) => granted(token),
            Tried::Contended => contended(),
            Tried::Refused(error) => Self::Refused(error),
        }
    }
}

pub(crate) fn granted(token: FencingToken) -> Attempt {
    Attempt::Granted(Granted::with_token(Some(token)))
}

pub(crate) fn contended() -> Attempt {
    Attempt::Contended(Contended::new())
}

/// The grant, with the moment just before it was asked for.
pub(crate) fn dated(attempt: Attempt, asked_at: Option<Moment>) -> Attempt {
    match attempt {
        Attempt::Granted(mut granted) => {
            granted.asked_at = asked_at;
            Attempt::Granted(granted)
        }
        other => other,
    }
}
