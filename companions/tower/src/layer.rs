//! The lock layer and its settings.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use leasehold_api::{AcquireOptions, Error, ErrorKind, Lock, LockExt as _, Mode, Requirements};
use tower_layer::Layer;

use crate::http::Http;
use crate::service::Locked;
use crate::settings::{LayerSettings, OnGone, OnLost, Until};
use crate::stats::{LayerCounters, LayerStats};

/// Puts a lock around a service. For each request it acquires the lock of the request's key, calls the service, and
/// releases the lock.
///
/// The [crate page](crate) explains where to place the layer and lists its responses. Each layer has its own
/// settings. Clones share their counters.
///
/// ```
/// use std::sync::Arc;
///
/// use leasehold_tower::{LockLayer, Template};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let lock = Arc::new(leasehold_memory::connect()?);
/// let layer = LockLayer::new(lock, Template::parse("user:{header.x-user}")?).fail_fast().label("api").check()?;
/// # let _ = layer;
/// # Ok(())
/// # }
/// ```
pub struct LockLayer<K, T = Http> {
    settings: Arc<LayerSettings<K, T>>,
}

const WAIT: Duration = Duration::from_secs(5);

impl<K> LockLayer<K> {
    /// Creates a layer for HTTP. `key` finds the key of a request.
    ///
    /// By default a request waits at most 5 seconds for the lock.
    pub fn new(lock: Arc<dyn Lock>, key: K) -> Self {
        Self::with(lock, key, Http::default())
    }

    /// Sets the status for a request that did not get the lock: 503 by default, often 409, 423 or 429. A success status
    /// is logged and ignored, because clients would believe that they were served.
    #[must_use]
    pub fn contended(self, status: StatusCode) -> Self {
        self.set(|settings| settings.transport.set_contended(status))
    }
}

impl<K, T: Clone> LockLayer<K, T> {
    /// Creates a layer for the responses of `transport`: [`Grpc`](crate::Grpc), [`Message`](crate::Message) or your
    /// own.
    ///
    /// By default a request waits at most 5 seconds for the lock.
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

    /// Sets the maximum wait for the lock: 5 seconds by default. The client waits as well.
    #[must_use]
    pub fn wait(self, budget: Duration) -> Self {
        self.set(|settings| {
            settings.options = std::mem::take(&mut settings.options).wait(budget);
            settings.fail_fast = false;
        })
    }

    /// Refuses a request at once if the lock is held, instead of waiting.
    #[must_use]
    pub fn fail_fast(self) -> Self {
        self.set(|settings| settings.fail_fast = true)
    }

    /// Takes each key as a reader: beside the requests of other layers and clients that share it, and never beside an
    /// exclusive request. For requests that only read. A waiting exclusive request comes before later readers.
    ///
    /// Put this layer on the routes that read, and one without it on the routes that write the same key. Inside a layer
    /// that holds the key already, in any mode, a request is refused, because it would wait for itself.
    #[must_use]
    pub fn shared(self) -> Self {
        self.set(|settings| settings.options.mode = Mode::Shared)
    }

    /// Takes one of `of` permits of each key, so at most `of` requests run with the same key at once, across all servers of
    /// the store. The handler gets the number of its permit from [`Held`](crate::Held).
    ///
    /// All servers name the same number. While a key is in use with another one, requests fail, as in a rolling deployment
    /// that changes it. Use another key for another number.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::sync::Arc;
    ///
    /// use leasehold_tower::{LockLayer, Template};
    ///
    /// let lock = Arc::new(leasehold_memory::connect()?);
    /// let layer = LockLayer::new(lock, Template::parse("render")?).permits(8).fail_fast().check()?;
    /// # let _ = layer;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn permits(self, of: u32) -> Self {
        self.set(|settings| settings.options.mode = Mode::Permit { of })
    }

    /// Requests leases with this TTL instead of the store's default.
    #[must_use]
    pub fn ttl(self, ttl: Duration) -> Self {
        self.set(|settings| settings.options.ttl = Some(ttl))
    }

    /// Sets a label that operators see with the hold.
    #[must_use]
    pub fn label(self, label: impl Into<Arc<str>>) -> Self {
        let label = label.into();
        self.set(|settings| settings.options.label = Some(label))
    }

    /// Ends the hold this long after the grant, even if the handler still runs. To the handler that is a loss. There
    /// is no limit by default, except one minute with [`Until::BodyEnd`].
    #[must_use]
    pub fn max_hold(self, limit: Duration) -> Self {
        self.set(|settings| settings.options.max_hold = Some(limit))
    }

    /// Sets the handling of a client that leaves while the handler runs: [`OnGone::Finish`] by default. A client that
    /// leaves while it waits for the lock gives up its place in any case. Inside another lock layer the outer setting
    /// applies, because the handler also needs the outer lock.
    #[must_use]
    pub fn on_gone(self, policy: OnGone) -> Self {
        self.set(|settings| settings.on_gone = policy)
    }

    /// Sets the handling of a lock lost while the handler runs: [`OnLost::Cancel`] by default.
    #[must_use]
    pub fn on_lost(self, policy: OnLost) -> Self {
        self.set(|settings| settings.on_lost = policy)
    }

    /// Sets how long the lock is held: [`Until::Response`] by default.
    #[must_use]
    pub fn until(self, end: Until) -> Self {
        self.set(|settings| settings.until = end)
    }

    /// Sets how many requests can wait at once, for all keys of the layer: 1,024 by default. Further requests are
    /// refused. This limit bounds the layer's memory, because the layer is always ready.
    #[must_use]
    pub fn max_waiters(self, limit: usize) -> Self {
        self.set(|settings| settings.max_waiters = limit)
    }

    /// Sets how long a response waits for the confirmation of the release: 1 second by default. Afterwards the
    /// release continues in the background.
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
    /// Checks the settings and returns the layer. Call it at start-up, because otherwise requests run into the error.
    ///
    /// # Errors
    ///
    /// - [`InvalidOption`](ErrorKind::InvalidOption) for settings that every store refuses: a TTL or maximum hold of
    ///   zero, a label that is too long, zero permits, or zero waiters.
    /// - [`Unsupported`](ErrorKind::Unsupported) for a TTL on a store without leases, and for shared grants or permits that
    ///   the store lacks.
    pub fn check(self) -> Result<Self, Error> {
        if self.settings.max_waiters == 0 {
            let message =
                "without waiters no request is served; use fail_fast to refuse requests instead of waiting";
            return Err(Error::new(ErrorKind::InvalidOption, message));
        }
        self.settings.options.check()?;
        if self.settings.options.ttl.is_some() && self.settings.lock.capabilities().lease.is_none() {
            return Err(Error::unsupported("leases, so no TTL").with_store(self.settings.lock.to_string()));
        }
        let needs = match self.settings.options.mode {
            Mode::Shared => Requirements::new().shared(),
            Mode::Permit { of } => Requirements::new().permits(of),
            _ => Requirements::new(),
        };
        self.settings.lock.require(&needs)?;
        Ok(self)
    }

    /// Returns the counters of the layer's requests.
    #[must_use]
    pub fn stats(&self) -> LayerStats {
        self.settings.counters.snapshot()
    }

    /// Resolves when no request holds the lock, including requests whose clients have left. Await it after the
    /// server's shutdown, which does not wait for them, and close the lock afterwards. Limit it with a timeout, or
    /// the handlers with [`max_hold`](Self::max_hold).
    ///
    /// # Cancel safety
    ///
    /// Safe, because it only waits.
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
