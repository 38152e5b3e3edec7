//! The settings of a lock layer.

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{AcquireOptions, Lock};

use crate::stats::LayerCounters;

/// The default limit of a hold with [`Until::BodyEnd`].
const BODY_MAX_HOLD: Duration = Duration::from_secs(60);

/// What the caller's leaving does to a handler that has begun: the client has closed its connection, or a
/// timeout around the layer has passed.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnGone {
    /// The handler runs to its end in a task, and the lock is released then. A retry waits for it.
    #[default]
    Finish,
    /// The handler is dropped at its next await and the lock released, while what it has sent is still on its
    /// way: a retry may run beside a `COMMIT` that is being carried out. For handlers that only read, are
    /// idempotent, or are fenced.
    Cancel,
}

/// What a loss of the lock does to a handler that has begun.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnLost {
    /// The handler is dropped at its next await, and the client told that what was done is not known.
    #[default]
    Cancel,
    /// The handler goes on; it sees the loss in its [`Held`](crate::Held).
    Tell,
}

/// How long the lock is held.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Until {
    /// Until the handler has returned its response; the body is sent without the lock.
    #[default]
    Response,
    /// Until the body was sent, has failed or was dropped. A client that reads slowly holds the lock, so there
    /// is a limit: [`LockLayer::max_hold`](crate::LockLayer::max_hold), by default one minute.
    BodyEnd,
}

/// The settings, and what all services of a layer count together.
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
    /// With what the other settings imply.
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
