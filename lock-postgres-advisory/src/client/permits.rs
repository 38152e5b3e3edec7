//! Permits of a client in session scope. All permits of a key are on one shared session.

use leasehold_api::{Error, HolderId};
use leasehold_engine::{Attempt, ReleaseReply, Request};
use tokio::sync::oneshot;

use crate::client::{Client, StartedRelease};
use crate::registry::{Location, Reservation};
use crate::reply::ask;
use crate::shared_session::job::{PermitRequest, SharedJob};
use crate::try_outcome::{TryOutcome, contended, granted_again};

impl Client {
    /// Makes one attempt at one of `of` permits. A caller whose server process `turn` has the turn of the key overtakes no
    /// waiter.
    pub(crate) async fn try_permit(
        &self,
        request: &Request,
        of: u32,
        turn: Option<i32>,
    ) -> Result<Attempt, Error> {
        let (common, holder) = (&self.common, request.holder);
        let number = match common.number(&request.key) {
            Ok(number) => number,
            Err(error) => return Ok(Attempt::Refused(error)),
        };
        let index = common.shared_session_of(number);
        match common.registry.reserve(number, request, Location::Shared(index)) {
            Ok(Reservation::Ours) => {}
            // The session shares the number already, so the server would let it pass a waiting writer.
            Ok(Reservation::Beside(_)) => {
                let refused = match self.or_by_lock_table(self.probe(number, false), number, index).await {
                    Ok(true) => None,
                    Ok(false) => Some(contended()),
                    Err(error) => Some(Attempt::Refused(error)),
                };
                if let Some(refused) = refused {
                    common.registry.forget(number, holder);
                    return Ok(refused);
                }
            }
            Ok(Reservation::Again(grant)) => return Ok(granted_again(grant)),
            Ok(Reservation::Leaving | Reservation::Busy) => return Ok(contended()),
            Err(error) => return Ok(Attempt::Refused(error)),
        }
        let request_of = |answer| PermitRequest { number, holder, of, turn, answer };
        let outcome = ask(&common.queues[index], |answer| SharedJob::Permit(request_of(answer))).await?;
        if let TryOutcome::Refused(error) = outcome {
            // A request that was skipped or not sent is still reserved in this process.
            common.registry.forget(number, holder);
            return Ok(Attempt::Refused(error.with_key(&request.key)));
        }
        Ok(outcome.into())
    }

    /// Begins the release of a permit.
    pub(super) fn start_permit_release(
        &self,
        number: i64,
        holder: HolderId,
        jobs: &mut [Vec<SharedJob>],
    ) -> StartedRelease {
        match self.common.registry.leave_permit(number, holder) {
            Some(Location::Shared(index)) => {
                let (answer, answered) = oneshot::channel();
                jobs[index].push(SharedJob::ReleasePermit { number, holder, answer });
                StartedRelease::Asked(answered)
            }
            Some(_) | None => StartedRelease::Done(Ok(ReleaseReply::new(false))),
        }
    }
}
