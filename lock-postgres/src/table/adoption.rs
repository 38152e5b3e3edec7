//! Adoption of holds that another client has given out.

use leasehold_api::{Error, LossReason};
use leasehold_engine::Attempt;
use tokio::time::Instant;

use super::common::Common;
use super::db::{Db, Statement, StatementFailure};
use super::grants::{Drawn, Requester, deliver, granted, name, ttl};
use super::job::{Adoption, PendingCall};
use super::registry::DoubtPeriod;
use super::values::HolderText;

/// Takes over a hold for each request of `call`, and replies as a grant does. A request without an answer is repeated
/// or released by the engine alone.
pub(super) async fn adopt(
    db: &mut Db<'_>,
    common: &Common,
    requester: &Requester,
    call: PendingCall<Adoption, Attempt>,
) -> Result<(), Error> {
    let Some(text) = common.statements.adopt.as_ref().filter(|_| !common.is_closing()) else {
        call.fail(&Error::closed());
        return Ok(());
    };
    let mut answers = Vec::with_capacity(call.items.len());
    for Adoption { request, holder, number } in &call.items {
        let period = DoubtPeriod { left_to_engine: true, ..requester.doubt_period };
        let in_flight = common.registry.in_flight(vec![name(request)], period);
        let asked = Instant::now();
        let bind = |query: Statement| {
            let query = query.bind(request.key.as_str()).bind(HolderText(*holder)).bind(*number);
            query.bind(HolderText(request.holder)).bind(ttl(request)).bind(&*requester.owner)
        };
        let row = db.row_drawing_token("adopt", text, &common.config.schema, &bind).await;
        let drawn = row.and_then(|row| row.map(|row| Drawn::read(&row, 0, false)).transpose());
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
