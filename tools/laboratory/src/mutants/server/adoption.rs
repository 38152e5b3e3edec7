//! Holds that change clients, with faults.

use leasehold_api::{Error, FencingToken, LossReason};
use leasehold_engine::{Attempt, HoldRef, Renewed, Request};

use super::record::{StoredHold, ends};
use super::tokens::granted;
use super::{Fault, Requester, Server};

/// The client of a hold that was given out.
const NOBODY: u64 = 0;

impl Server {
    /// Renews the hold, and keeps it for no client. Afterwards the end of its client does not end it.
    pub(crate) fn give_out(&self, requester: Requester, hold: &HoldRef) -> Renewed {
        let renewed = self.renew(requester, hold);
        let name = self.name(requester.client, &hold.key);
        let mut state = self.lock();
        let stored = state.records.get_mut(&name).and_then(|record| record.hold.as_mut());
        if let Some(stored) = stored.filter(|stored| stored.holder == hold.holder) {
            stored.given_out = true;
            if self.fault != Fault::OldProcessEnds {
                stored.client = NOBODY;
            }
        }
        renewed
    }

    /// Grants the request if the hold `given` has the key and is given out.
    pub(crate) fn adopt(&self, requester: Requester, request: &Request, given: &HoldRef) -> Attempt {
        let fault = self.fault;
        let mut state = self.lock();
        let name = self.name(requester.client, &request.key);
        let is_live = |hold: &StoredHold| hold.is_live(fault, requester.now) || fault == Fault::AdoptsExpired;
        let hold = state.records.get_mut(&name).and_then(|record| record.hold.as_mut());
        let Some(hold) = hold.filter(|hold| is_live(hold)) else {
            return Attempt::Refused(Error::lost(LossReason::Gone));
        };
        let token = FencingToken::from_u64(hold.token);
        if hold.holder == request.holder && !hold.given_out {
            let again = request.ttl.and_then(|ttl| ends(fault, requester.now, ttl));
            hold.ends = match fault {
                Fault::AdoptionAgainShortens => {
                    request.ttl.and_then(|ttl| ends(fault, requester.now, ttl / 2))
                }
                _ => hold.ends.zip(again).map(|(before, again)| before.max(again)),
            };
            return Attempt::Granted(granted(fault, Some(token)));
        }
        let (is_holder, is_token) = (hold.holder == given.holder, Some(token) == given.token);
        let is_given = match fault {
            Fault::AdoptsTwice => true,
            Fault::AdoptsByKey => hold.given_out,
            Fault::AdoptsByHolder => hold.given_out && is_holder,
            Fault::AdoptsByToken => hold.given_out && is_token,
            Fault::AdoptsHeld => is_holder && is_token,
            _ => hold.given_out && is_holder && is_token,
        };
        if !is_given {
            return Attempt::Refused(Error::lost(LossReason::Gone));
        }
        let token = match fault {
            Fault::TokenKept => Some(token),
            _ => state.draw(fault, requester, token.as_u64()),
        };
        let record = state.records.entry(name).or_default();
        let number = token.map_or(0, FencingToken::as_u64);
        record.last_token = number;
        record.hold = Some(StoredHold::new(fault, requester, request, number));
        Attempt::Granted(granted(fault, token))
    }
}
