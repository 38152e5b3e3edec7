//! Hears of new work. Notifications are hints: nothing is lost without them, only later.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use leasehold_api::{Error, ErrorKind};
use tokio::time::timeout;

use super::backoff::Backoff;
use super::shared::ClaimerCore;
use crate::error::ClaimError;

/// Between tries to listen.
const PAUSES: Backoff = Backoff::exponential(Duration::from_millis(400)).at_most(Duration::from_secs(60));

pub(crate) async fn run(shared: Arc<ClaimerCore>) {
    let mut failures = 0;
    loop {
        let error = tokio::select! {
            () = shared.stop.cancelled() => return,
            error = listen(&shared, &mut failures) => error,
        };
        // It is deaf for a while: what came until now is looked for, and from here on the poll finds it.
        shared.announced.store(false, Ordering::Release);
        shared.wake_now();
        if matches!(error, ClaimError::Unsupported(_)) {
            tracing::debug!(store = %shared.store, %error, "not listening; polling instead");
        } else {
            shared.report(&error);
        }
        failures += 1;
        if !shared.rest(PAUSES.after(failures)).await {
            return;
        }
    }
}

/// Listens until it cannot.
async fn listen(shared: &ClaimerCore, failures: &mut u32) -> ClaimError {
    let mut wake = match timeout(shared.config.call_limit(), shared.store.listen()).await {
        Ok(Ok(wake)) => wake,
        Ok(Err(error)) => return error,
        Err(_) => {
            let message = "the store did not begin to listen in time; it is tried again";
            return Error::new(ErrorKind::Unavailable, message).into();
        }
    };
    *failures = 0;
    loop {
        shared.announced.store(wake.announces(), Ordering::Release);
        // What came in before it listened was not heard of: first listen, then look. And again with each hint.
        shared.wake_now();
        if let Err(error) = wake.woken().await {
            return error;
        }
    }
}
