//! Hears of new work. Notifications are hints: nothing is lost without them, only later.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use tokio::time::{sleep, timeout};

use super::shared::Shared;
use crate::error::ClaimError;

pub(crate) async fn run(shared: Arc<Shared>) {
    let mut failures = failures();
    loop {
        let error = tokio::select! {
            () = shared.stop.cancelled() => return,
            error = listen(&shared, &mut failures) => error,
        };
        // It is deaf for a while: what came until now is looked for, and from here on the poll finds it.
        shared.announced.store(false, Ordering::Release);
        shared.wake_now();
        tracing::debug!(store = %shared.store, %error, "not listening; polling instead");
        let pause = failures.next().unwrap_or(Duration::from_secs(30));
        tokio::select! {
            () = shared.stop.cancelled() => return,
            () = sleep(pause) => {}
        }
    }
}

/// Listens until it cannot.
async fn listen(shared: &Shared, failures: &mut ExponentialBackoff) -> ClaimError {
    let mut wake = match timeout(shared.config.call_limit(), shared.store.listen()).await {
        Ok(Ok(wake)) => wake,
        Ok(Err(error)) => return error,
        Err(_) => return ClaimError::unsupported("the store did not begin to listen in time"),
    };
    *failures = self::failures();
    loop {
        shared.announced.store(wake.announces(), Ordering::Release);
        // What came in before it listened was not heard of: first listen, then look. And again with each hint.
        shared.wake_now();
        if let Err(error) = wake.woken().await {
            return error;
        }
    }
}

fn failures() -> ExponentialBackoff {
    ExponentialBuilder::default()
        .with_jitter()
        .with_min_delay(Duration::from_millis(200))
        .with_max_delay(Duration::from_secs(30))
        .without_max_times()
        .build()
}
