//! The end of an engine's runtime. Guards can have been dropped just before it. Their holds are released on a
//! separate thread, and the end of the runtime waits for it.

use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use leasehold_api::LossReason;

use crate::core::Core;
use crate::driver::Driver;
use crate::driver::background;
use crate::driver::outbox::PendingRelease;

/// The longest that the end of a runtime waits for the releases.
const LIMIT: Duration = Duration::from_secs(1);

/// Runs `driver` outside the engine's runtime, and releases the remaining holds when that runtime has ended.
pub(crate) async fn run_elsewhere(mut driver: Driver) {
    driver.run().await;
    outlive(driver);
}

/// Releases the remaining holds after the engine's runtime has ended.
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

/// Sees the engine's runtime end, after which no task renews a hold. It lives in a task of that runtime and
/// acts when that task is dropped.
pub(crate) struct RuntimeWatch {
    core: Arc<Core>,
    /// A channel that is disconnected when the driver has ended.
    ended: Receiver<()>,
    /// The driver, if it runs on this runtime.
    driver: Option<Driver>,
}

impl RuntimeWatch {
    pub(crate) fn new(core: &Arc<Core>, ended: Receiver<()>) -> Self {
        Self { core: Arc::clone(core), ended, driver: None }
    }

    /// Runs `driver` on this runtime, and takes it along when the runtime ends.
    pub(crate) fn run(mut self, driver: Driver) -> impl Future<Output = ()> + Send {
        // Takes the driver before the first poll, because a runtime may end without polling this task.
        self.driver = Some(driver);
        async move {
            if let Some(driver) = &mut self.driver {
                driver.run().await;
            }
        }
    }

    /// Stays pending while the driver runs on another runtime.
    pub(crate) async fn watch(self) {
        let mut closed = self.core.closed.clone();
        let _ = closed.wait_for(Option::is_some).await;
    }
}

impl Drop for RuntimeWatch {
    fn drop(&mut self) {
        let core = &self.core;
        if core.closed.borrow().is_some() {
            return;
        }
        core.runtime_gone.cancel();
        core.queues.close();
        core.closing.cancel();
        for hold in core.lose_all(LossReason::RuntimeGone) {
            core.inbox.release(PendingRelease::lost(&hold));
        }
        match self.driver.take() {
            None => core.inbox.stop(),
            Some(driver) => outlive(driver),
        }
        // Waits for the driver. The end of a runtime waits for its tasks, and so for this drop, and so does
        // the end of the process.
        let _ = self.ended.recv_timeout(LIMIT + LIMIT / 10);
        self.core.backend.abort();
    }
}
