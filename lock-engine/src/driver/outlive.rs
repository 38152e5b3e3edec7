//! The end of an engine's runtime, which may come with guards just dropped: what they held is released on a thread of
//! its own, and the runtime's end waits for that.

use std::sync::mpsc::Receiver;
use std::sync::{Arc, Weak};
use std::time::Duration;

use leasehold_api::LossReason;
use tokio::sync::watch;

use crate::driver::Driver;
use crate::driver::background;
use crate::driver::inbox::Inbox;
use crate::driver::outbox::PendingRelease;
use crate::shared::{CloseOutcome, Shared};
use crate::store::backend::Backend;

/// How long the end of a runtime waits for the releases at the most.
const LIMIT: Duration = Duration::from_secs(1);

/// Runs `driver`, which is not on the engine's runtime, and takes over what is left when that runtime has ended.
pub(crate) async fn run_elsewhere(mut driver: Driver) {
    driver.run().await;
    outlive(driver);
}

/// Releases what is left after the runtime has ended.
fn outlive(driver: Driver) {
    if driver.closed.borrow().is_some() {
        return;
    }
    if driver.has_unreleased() {
        background::run_on_own_thread(driver.outlive(LIMIT));
    } else {
        driver.closed.send_replace(Some(Ok(())));
    }
}

/// Sees the engine's runtime end: nobody renews or watches then. It lives in a task of that runtime and does its work
/// when that is dropped.
pub(crate) struct RuntimeWatch {
    shared: Weak<Shared>,
    backend: Arc<dyn Backend>,
    inbox: Arc<Inbox>,
    runtime_gone: tokio_util::sync::CancellationToken,
    closed: watch::Receiver<CloseOutcome>,
    /// Fails when the driver has ended.
    ended: Receiver<()>,
    /// The driver, if it runs on this runtime.
    driver: Option<Driver>,
}

impl RuntimeWatch {
    pub(crate) fn new(shared: &Arc<Shared>, ended: Receiver<()>) -> Self {
        Self {
            shared: Arc::downgrade(shared),
            backend: Arc::clone(&shared.backend),
            inbox: Arc::clone(&shared.inbox),
            runtime_gone: shared.runtime_gone.clone(),
            closed: shared.closed.clone(),
            ended,
            driver: None,
        }
    }

    /// Runs `driver` on this runtime. The driver survives it.
    pub(crate) fn run(mut self, driver: Driver) -> impl Future<Output = ()> + Send {
        // Before the first poll, because a runtime may end without one.
        self.driver = Some(driver);
        async move {
            if let Some(driver) = &mut self.driver {
                driver.run().await;
            }
        }
    }

    /// Waits for the driver, which runs elsewhere.
    pub(crate) async fn watch(mut self) {
        let _ = self.closed.wait_for(Option::is_some).await;
    }
}

impl Drop for RuntimeWatch {
    fn drop(&mut self) {
        if self.closed.borrow().is_some() {
            return;
        }
        self.runtime_gone.cancel();
        if let Some(shared) = self.shared.upgrade() {
            shared.queues.close();
            shared.closing.cancel();
            for hold in shared.lose_all(LossReason::RuntimeGone) {
                self.inbox.release(PendingRelease::lost(&hold));
            }
        }
        match self.driver.take() {
            None => self.inbox.stop(),
            Some(driver) => outlive(driver),
        }
        // Whoever ends the runtime waits for its tasks, and so for this one: a process that ends goes on until then.
        let _ = self.ended.recv_timeout(LIMIT + LIMIT / 10);
        self.backend.abort();
    }
}
