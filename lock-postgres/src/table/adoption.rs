//! Adoption of holds that another client has given out.

use leasehold_api::{Error, LossReason};
use leasehold_engine::Attempt;
use tokio::time::Instant;

use super::common::Common;
use super::db::{Db, Statement, StatementFailure, locked_error};
use super::grants::{Drawn, FEW, Requester, deliver, granted, name, ttl};
use super::job::{Adoption, PendingCall};
use super::values::HolderText;

/// Takes over a hold for each request of `call`, and replies as a grant does. A request without an answer is repeated
/// or released by the engine, if its caller still waits. `locked_in_a_row` counts the locked rows that the last adoptions
/// of the batch ran into.
pub(super) async fn adopt(
    db: &mut Db<'_>,
    common: &Common,
    requester: &Requester,
    call: PendingCall<Adoption, Attempt>,
    locked_in_a_row: &mut usize,
) -> Result<(), Error> {
    let Some(text) = common.statements.adopt.as_ref().filter(|_| !common.is_closing()) else {
        call.refuse(&Error::closed(), |adoption| &adoption.request);
        return Ok(());
    };
    if *locked_in_a_row >= FEW {
        call.refuse(&locked_error(), |adoption| &adoption.request);
        return Ok(());
    }
    let is_awaited = || !call.caller_gone();
    let mut answers = Vec::with_capacity(call.items.len());
    for Adoption { request, holder, number } in &call.items {
        let in_flight = common.registry.in_flight(vec![name(request)], requester.doubt_period);
        let in_flight = in_flight.left_to_engine_if(&is_awaited);
        let asked = Instant::now();
        let bind = |query: Statement| {
            let query = query.bind(request.key.as_str()).bind(HolderText(*holder)).bind(*number);
            query.bind(HolderText(request.holder)).bind(ttl(request)).bind(&*requester.owner)
        };
        let row = db.row_drawing_token("adopt", text, &common.config.schema, &bind).await;
        let drawn = row.and_then(|row| row.map(|row| Drawn::read(&row, 0, false)).transpose());
        let is_locked = matches!(drawn, Err(StatementFailure::Locked { .. }));
        *locked_in_a_row = if is_locked { *locked_in_a_row + 1 } else { 0 };
        answers.push(match drawn {
            Ok(Some(drawn)) => {
                common.registry.granted(name(request), asked);
                granted(common, request, &drawn)
            }
            Ok(None) => Ok(Attempt::Refused(Error::lost(LossReason::Gone).with_key(&request.key))),
            Err(StatementFailure::ConnectionUnusable(error)) => return Err(error),
            Err(StatementFailure::OutcomeUnknown(error)) => Err(error.with_key(&request.key)),
            Err(failure) => Ok(Attempt::Refused(failure.into_error().with_key(&request.key))),
        });
        in_flight.answered();
    }
    deliver(db, common, vec![call], answers, |adoption| &adoption.request).await
}
