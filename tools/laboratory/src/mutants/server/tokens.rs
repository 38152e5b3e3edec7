//! The tokens that the server draws and reserves.

use std::time::Duration;

use leasehold_api::FencingToken;
use leasehold_engine::Granted;
use leasehold_engine::token::{self, Reserved};

use super::{Fault, MANY, Requester, ServerState};

const DAY: Duration = Duration::from_secs(24 * 3600);

impl ServerState {
    pub(super) fn draw(&mut self, fault: Fault, requester: Requester, last: u64) -> Option<FencingToken> {
        let idle =
            self.last_draw.replace(requester.now).map(|at| requester.now.saturating_duration_since(at));
        if fault == Fault::TokenRestartsAfterDay && idle.is_some_and(|idle| idle >= DAY) {
            self.drawn = 0;
        }
        self.drawn += 1;
        let own = self.drawn_by.entry(requester.client).or_default();
        *own += 1;
        let number = match fault {
            Fault::TokenMissing => return None,
            Fault::TokenConstant => 7,
            // The clock is coarse, so two grants within a tenth of a second have the same token.
            Fault::TokenFromClock => {
                let origin = *self.clock_origin.get_or_insert(requester.now);
                let tenths = requester.now.saturating_duration_since(origin).as_millis() / 100;
                u64::try_from(tenths).unwrap_or(0) + 1
            }
            Fault::TokenPerClient => *own,
            Fault::TokenRestartsAfterManyKeys if self.records.len() > MANY => 1,
            Fault::TokenRestartsWhenFree => (last >> token::LOCAL_BITS) % 3 + 1,
            _ => self.drawn,
        };
        token::from_store_number(number)
    }
}

/// Makes the grant of a token, with the tokens that the store never draws after it.
pub(super) fn granted(fault: Fault, token: Option<FencingToken>) -> Granted {
    let reserved = match (fault, token) {
        (_, None) => Reserved::default(),
        (Fault::ReservesTooFew, _) => Reserved::following(u64::MAX),
        (_, Some(token)) => Reserved::rest_of(token),
    };
    Granted::with_token(token).reserved(reserved)
}
