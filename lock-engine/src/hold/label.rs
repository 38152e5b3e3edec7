//! The change of a hold's label at the store.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures_util::FutureExt as _;
use leasehold_api::{Error, ErrorKind, Operation};
use tokio::time::timeout;

use crate::hold::Hold;
use crate::store::backend::{Backend, Renewed};

impl Hold {
    pub(crate) async fn relabel_now(self: Arc<Self>, label: Arc<str>) -> Result<(), Error> {
        let named = |error: Error| self.named(error).with_operation(Operation::Relabel);
        let ended = || named(self.loss_reason().map_or_else(Error::closed, Error::lost));
        if !self.core.capabilities.relabel {
            return Err(named(Error::unsupported("label that can be changed")));
        }
        self.current_validity();
        // The next caller of the key here has another label, so the hold must not pass to it.
        if !self.phase.pin() {
            return Err(ended());
        }
        let (backend, limit) = (Arc::clone(&self.core.backend), self.core.timing.request_timeout);
        let reference = self.reference();
        // Calls the store in a separate task, because the caller can drop this future half-way.
        let call = self.core.tasks.spawn(async move {
            let call =
                async { timeout(limit, Arc::<dyn Backend>::clone(&backend).relabel(reference, label)).await };
            AssertUnwindSafe(call).catch_unwind().await.ok().and_then(Result::ok)
        });
        let lost = self.phase.watch();
        let answer = tokio::select! {
            biased;
            answer = call => answer.map_err(|_| ended())?,
            reason = lost => return Err(named(Error::lost(reason))),
        };
        match answer {
            Some(Ok(Renewed::Extended | Renewed::ExtendedFrom(_))) => {}
            Some(Ok(Renewed::Gone(reason))) => self.lose(reason),
            Some(Err(error)) => return Err(named(error)),
            None => {
                let message = "the store did not answer in time, so the hold has the old label or the new one; change it again";
                return Err(named(Error::new(ErrorKind::OutcomeUnknown, message)));
            }
        }
        // Checks the clock again, because an answer that came after the hold had ended here changes nothing.
        self.current_validity();
        if self.is_live() { Ok(()) } else { Err(ended()) }
    }
}
