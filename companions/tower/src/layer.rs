//! The layer and its settings.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use leasehold_api::{AcquireOptions, Error, ErrorKind, Lock};
use tower_layer::Layer;

use crate::http::Http;
use crate::service::Locked;
use crate::settings::{LayerSettings, OnGone, OnLost, Until};
use crate::stats::{LayerCounters, LayerStats};

/// Puts a lock around a service: it takes the lock of the request's key, calls the service, and releases.
///
/// The [crate's page](crate) says where it goes and what is answered when. Settings are per layer; clones count
/// together.
pub struct LockLayer<K, T = Http> {
    settings: Arc<LayerSettings<K, T>>,
}

const WAIT: Duration = Duration::from_secs(5);

impl<K> LockLayer<K> {
    /// A layer for HTTP: `key` finds the key of a request.
    ///
    /// It waits 5 seconds at the most.
    pub fn new(lock: Arc<dyn Lock>, key: K) -> Self {
        Self::with(lock, key, Http::default())
    }

    /// Answers a request that did not get the lock with `status` instead of 503: 409, 423 and 429 are usual. A
    /// status that is no error is logged and not used, as it would tell clients that they were served.
    #[must_use]
    pub fn contended(self, status: StatusCode) -> Self {
        self.set(|settings| settings.transport.set_contended(status))
    }
}

impl<K, T: Clone> LockLayer<K, T> {
    /// A layer for whatever `transport` answers: [`Grpc`](crate::Grpc), [`Message`](crate::Message), your own.
    ///
    /// It waits 5 seconds at the most.
    pub fn with(lock: Arc<dyn Lock>, key: K, transport: T) -> Self {
        let counters = LayerCounters::new(&lock);
        Self {
            settings: Arc::new(LayerSettings {
                lock,
                key: Arc::new(key),
                transport,
                options: AcquireOptions::new().wait(WAIT),
                fail_fast: false,
                on_gone: OnGone::default(),
                on_lost: OnLost::default(),
                until: Until::default(),
                max_waiters: 1024,
                release_within: Duration::from_secs(1),
                counters,
            }),
        }
    }

    /// Waits at most this long for the lock. The default is 5 seconds; clients wait with it.
    #[must_use]
    pub fn wait(self, budget: Duration) -> Self {
        self.set(|settings| {
            settings.options = std::mem::take(&mut settings.options).wait(budget);
            settings.fail_fast = false;
        })
    }

    /// Does not wait for the lock: a request that meets another one is refused at once.
    #[must_use]
    pub fn fail_fast(self) -> Self {
        self.set(|settings| settings.fail_fast = true)
    }

    /// Asks for a lease of this TTL instead of the store's default.
    #[must_use]
    pub fn ttl(self, ttl: Duration) -> Self {
        self.set(|settings| settings.options.ttl = Some(ttl))
    }

    /// Shows operators this text beside the hold.
    #[must_use]
    pub fn label(self, label: impl Into<Arc<str>>) -> Self {
        let label = label.into();
        self.set(|settings| settings.options.label = Some(label))
    }

    /// Ends the hold this long after the grant, whatever the handler does; to the handler that is a loss. There
    /// is no limit by default, but one minute with [`Until::BodyEnd`].
    #[must_use]
    pub fn max_hold(self, limit: Duration) -> Self {
        self.set(|settings| settings.options.max_hold = Some(limit))
    }

    /// What happens when the client goes away while the handler runs. The default is [`OnGone::Finish`]. One that
    /// leaves while it waits for the lock gives its place up in any case. Inside of another lock layer that one decides, because
    /// the handler must not go on without its lock.
    #[must_use]
    pub fn on_gone(self, policy: OnGone) -> Self {
        self.set(|settings| settings.on_gone = policy)
    }

    /// What happens when the lock is lost while the handler runs. The default is [`OnLost::Cancel`].
    #[must_use]
    pub fn on_lost(self, policy: OnLost) -> Self {
        self.set(|settings| settings.on_lost = policy)
    }

    /// How long the lock is held. The default is [`Until::Response`].
    #[must_use]
    pub fn until(self, end: Until) -> Self {
        self.set(|settings| settings.until = end)
    }

    /// How many requests may wait for the lock at once, for all keys of the layer; further ones are refused. The
    /// default is 1,024. The layer is always ready, so this is what bounds its memory.
    #[must_use]
    pub fn max_waiters(self, limit: usize) -> Self {
        self.set(|settings| settings.max_waiters = limit)
    }

    /// How long a response waits for the release to be confirmed; after that it goes on in the background. The
    /// default is 1 second.
    #[must_use]
    pub fn release_within(self, limit: Duration) -> Self {
        self.set(|settings| settings.release_within = limit)
    }

    fn set(mut self, change: impl FnOnce(&mut LayerSettings<K, T>)) -> Self {
        change(Arc::make_mut(&mut self.settings));
        self
    }
}

impl<K, T> LockLayer<K, T> {
    /// The layer, if its settings can be used: call it at start-up, or requests meet the error.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption) for settings that no store takes: a TTL or maximum hold of
    /// zero, a label that is too long, no waiter at all. [`Unsupported`](ErrorKind::Unsupported) for a TTL on a
    /// store without leases.
    pub fn check(self) -> Result<Self, Error> {
        if self.settings.max_waiters == 0 {
            let message = "without waiters no request is served; fail_fast is what makes none of them wait";
            return Err(Error::new(ErrorKind::InvalidOption, message));
        }
        self.settings.options.check()?;
        if self.settings.options.ttl.is_some() && self.settings.lock.capabilities().lease.is_none() {
            return Err(Error::unsupported("leases, so no TTL").with_store(self.settings.lock.to_string()));
        }
        Ok(self)
    }

    /// What its requests have met so far.
    #[must_use]
    pub fn stats(&self) -> LayerStats {
        self.settings.counters.snapshot()
    }

    /// Resolves when no request holds the lock, also none whose client has gone: await it after the server has
    /// shut down, which does not wait for those, and close the lock then. Bound it with a timeout, or the
    /// handlers with [`max_hold`](Self::max_hold).
    ///
    /// # Cancel safety
    ///
    /// Safe: it only looks.
    pub async fn idle(&self) {
        self.settings.counters.idle().await;
    }
}

impl<S, K, T: Clone> Layer<S> for LockLayer<K, T> {
    type Service = Locked<S, K, T>;

    fn layer(&self, inner: S) -> Self::Service {
        Locked::new(inner, Arc::new(self.settings.effective()))
    }
}

impl<K, T> Clone for LockLayer<K, T> {
    fn clone(&self) -> Self {
        Self { settings: Arc::clone(&self.settings) }
    }
}

impl<K, T> fmt::Debug for LockLayer<K, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockLayer")
            .field("lock", &self.settings.lock)
            .field("options", &self.settings.options)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}
