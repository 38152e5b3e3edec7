//! Settings of a lock layer.

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{AcquireOptions, Lock};

use crate::stats::LayerCounters;

/// Default limit of a hold with [`Until::BodyEnd`].
const BODY_MAX_HOLD: Duration = Duration::from_secs(60);

/// The handling of a running handler whose caller leaves. The caller leaves if the client closes its connection or a
/// timeout around the layer passes.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnGone {
    /// Completes the handler in a task and then releases the lock. A retry waits for that.
    #[default]
    Finish,
    /// Drops the handler at its next await and releases the lock. A statement already sent might still be carried
    /// out, so a retry can run beside a `COMMIT`. For handlers that only read, are idempotent, or are fenced.
    Cancel,
}

/// The handling of a running handler whose lock is lost.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnLost {
    /// Drops the handler at its next await and reports to the client that the outcome is unknown.
    #[default]
    Cancel,
    /// Continues the handler, which can see the loss in its [`Held`](crate::Held).
    Tell,
}

/// The end of a hold.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Until {
    /// The handler has returned its response. The body is sent without the lock.
    #[default]
    Response,
    /// The body was sent, failed or was dropped. A slow client holds the lock, so
    /// [`LockLayer::max_hold`](crate::LockLayer::max_hold) limits it, by default to one minute.
    BodyEnd,
}

/// The settings and the counters that all services of a layer share.
pub(crate) struct LayerSettings<K, T> {
    pub(crate) lock: Arc<dyn Lock>,
    pub(crate) key: Arc<K>,
    pub(crate) transport: T,
    pub(crate) options: AcquireOptions,
    pub(crate) fail_fast: bool,
    pub(crate) on_gone: OnGone,
    pub(crate) on_lost: OnLost,
    pub(crate) until: Until,
    pub(crate) max_waiters: usize,
    pub(crate) release_within: Duration,
    pub(crate) counters: Arc<LayerCounters>,
}

impl<K, T: Clone> LayerSettings<K, T> {
    /// Returns the settings with the implied maximum hold.
    pub(crate) fn effective(&self) -> Self {
        let mut settings = self.clone();
        if settings.until == Until::BodyEnd && settings.options.max_hold.is_none() {
            settings.options.max_hold = Some(BODY_MAX_HOLD);
        }
        settings
    }
}

impl<K, T: Clone> Clone for LayerSettings<K, T> {
    fn clone(&self) -> Self {
        Self {
            lock: Arc::clone(&self.lock),
            key: Arc::clone(&self.key),
            transport: self.transport.clone(),
            options: self.options.clone(),
            fail_fast: self.fail_fast,
            on_gone: self.on_gone,
            on_lost: self.on_lost,
            until: self.until,
            max_waiters: self.max_waiters,
            release_within: self.release_within,
            counters: Arc::clone(&self.counters),
        }
    }
}
