//! Listens for new work. Notifications are only hints: without them work is found later.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use leasehold_api::{Error, ErrorKind};
use tokio::time::timeout;

use super::backoff::Backoff;
use super::shared::ClaimerCore;
use crate::error::ClaimError;

/// The pauses between tries to listen.
const PAUSES: Backoff = Backoff::exponential(Duration::from_millis(400)).at_most(Duration::from_secs(60));

pub(crate) async fn run(shared: Arc<ClaimerCore>) {
    let mut failures = 0;
    loop {
        let error = tokio::select! {
            () = shared.stop.cancelled() => return,
            error = listen(&shared, &mut failures) => error,
        };
        // Not listening: check once for missed work, then rely on polls.
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

/// Listens until an error.
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
        // Earlier notifications were missed, so listen first and then check. Check again at each notification.
        shared.wake_now();
        if let Err(error) = wake.woken().await {
            return error;
        }
    }
}
