//! The outcome of one request for one number.

use leasehold_api::{Error, FencingToken};
use leasehold_engine::token::{self as store_token, Reserved};
use leasehold_engine::{Attempt, Contended, Granted, Moment};

use crate::registry::GrantInfo;

/// The result of one attempt or wait. An error instead means an unknown outcome, because a request was sent but not
/// answered.
#[derive(Debug)]
pub(crate) enum TryOutcome<T = FencingToken> {
    Granted(T),
    /// Another client holds the number.
    Contended,
    /// The request failed and left no lock: it was not sent, or a failed statement was cleaned up.
    Refused(Error),
}

/// A permit: its number, and the token of the grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PermitGrant {
    pub(crate) permit: u32,
    pub(crate) token: FencingToken,
}

impl<T> TryOutcome<T> {
    /// Returns the reply to the engine, with the grant that `granted` makes.
    pub(crate) fn attempt(self, granted: impl FnOnce(T) -> Attempt) -> Attempt {
        match self {
            Self::Granted(grant) => granted(grant),
            Self::Contended => contended(),
            Self::Refused(error) => Attempt::Refused(error),
        }
    }
}

impl From<TryOutcome> for Attempt {
    fn from(outcome: TryOutcome) -> Self {
        outcome.attempt(granted)
    }
}

impl From<TryOutcome<PermitGrant>> for Attempt {
    fn from(outcome: TryOutcome<PermitGrant>) -> Self {
        outcome.attempt(granted_permit)
    }
}

pub(crate) fn granted(token: FencingToken) -> Attempt {
    Attempt::Granted(Granted::with_token(Some(token)).reserved(Reserved::rest_of(token)))
}

fn granted_permit(grant: PermitGrant) -> Attempt {
    let mut granted = Granted::with_token(Some(grant.token));
    granted.permit = Some(grant.permit);
    Attempt::Granted(granted)
}

/// Returns the grant that a repeated request has already.
pub(crate) fn granted_again(grant: GrantInfo) -> Attempt {
    let GrantInfo { token, permit, .. } = grant;
    permit.map_or_else(|| granted(token), |permit| granted_permit(PermitGrant { permit, token }))
}

pub(crate) fn contended() -> Attempt {
    Attempt::Contended(Contended::new())
}

/// Returns the grant with the time just before its request.
pub(crate) fn dated(attempt: Attempt, asked_at: Option<Moment>) -> Attempt {
    match attempt {
        Attempt::Granted(mut granted) => {
            granted.asked_at = asked_at;
            Attempt::Granted(granted)
        }
        other => other,
    }
}

/// Returns the token of the `i`th grant of a statement that drew `number`.
pub(crate) fn token_of(number: i64, i: u64) -> Result<Option<FencingToken>, sqlx::Error> {
    if number <= 0 {
        return Ok(None);
    }
    let base = u64::try_from(number).ok().and_then(store_token::from_store_number);
    let base = base.ok_or_else(|| sqlx::Error::Protocol("the sequence of tokens is exhausted".into()))?;
    Ok(Some(FencingToken::from_u64(base.as_u64() + i)))
}
