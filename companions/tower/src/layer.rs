//! The layer and its settings.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use leasehold_api::{AcquireOptions, Error, ErrorKind, Lock};
use tower_layer::Layer;

use crate::http::Http;
use crate::service::Locked;
use crate::stats::{Counters, Stats};

/// Puts a lock around a service: it takes the lock of the request's key, calls the service, and releases.
///
/// The [crate's page](crate) says where it goes and what is answered when. Settings are per layer; clones count
/// together.
pub struct LockLayer<K, T = Http> {
    shared: Arc<Shared<K, T>>,
}

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
    /// is a limit: [`LockLayer::max_hold`], by default one minute.
    BodyEnd,
}

/// What all services of a layer share.
pub(crate) struct Shared<K, T> {
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
    pub(crate) counters: Arc<Counters>,
}

const WAIT: Duration = Duration::from_secs(5);
const BODY_MAX_HOLD: Duration = Duration::from_secs(60);

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
        self.set(|shared| shared.transport.set_contended(status))
    }
}

impl<K, T: Clone> LockLayer<K, T> {
    /// A layer for whatever `transport` answers: [`Grpc`](crate::Grpc), [`Message`](crate::Message), your own.
    ///
    /// It waits 5 seconds at the most.
    pub fn with(lock: Arc<dyn Lock>, key: K, transport: T) -> Self {
        let counters = Counters::new(&lock);
        Self {
            shared: Arc::new(Shared {
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
        self.set(|shared| {
            shared.options = std::mem::take(&mut shared.options).wait(budget);
            shared.fail_fast = false;
        })
    }

    /// Does not wait for the lock: a request that meets another one is refused at once.
    #[must_use]
    pub fn fail_fast(self) -> Self {
        self.set(|shared| shared.fail_fast = true)
    }

    /// Asks for a lease of this TTL instead of the store's default.
    #[must_use]
    pub fn ttl(self, ttl: Duration) -> Self {
        self.set(|shared| shared.options.ttl = Some(ttl))
    }

    /// Shows operators this text beside the hold.
    #[must_use]
    pub fn label(self, label: impl Into<Arc<str>>) -> Self {
        let label = label.into();
        self.set(|shared| shared.options.label = Some(label))
    }

    /// Ends the hold this long after the grant, whatever the handler does; to the handler that is a loss. There
    /// is no limit by default, but one minute with [`Until::BodyEnd`].
    #[must_use]
    pub fn max_hold(self, limit: Duration) -> Self {
        self.set(|shared| shared.options.max_hold = Some(limit))
    }

    /// What happens when the client goes away while the handler runs. The default is [`OnGone::Finish`]. One that
    /// leaves while it waits for the lock gives its place up in any case. Inside of another lock layer that one decides, because
    /// the handler must not go on without its lock.
    #[must_use]
    pub fn on_gone(self, policy: OnGone) -> Self {
        self.set(|shared| shared.on_gone = policy)
    }

    /// What happens when the lock is lost while the handler runs. The default is [`OnLost::Cancel`].
    #[must_use]
    pub fn on_lost(self, policy: OnLost) -> Self {
        self.set(|shared| shared.on_lost = policy)
    }

    /// How long the lock is held. The default is [`Until::Response`].
    #[must_use]
    pub fn until(self, end: Until) -> Self {
        self.set(|shared| shared.until = end)
    }

    /// How many requests may wait for the lock at once, for all keys of the layer; further ones are refused. The
    /// default is 1,024. The layer is always ready, so this is what bounds its memory.
    #[must_use]
    pub fn max_waiters(self, limit: usize) -> Self {
        self.set(|shared| shared.max_waiters = limit)
    }

    /// How long a response waits for the release to be confirmed; after that it goes on in the background. The
    /// default is 1 second.
    #[must_use]
    pub fn release_within(self, limit: Duration) -> Self {
        self.set(|shared| shared.release_within = limit)
    }

    fn set(mut self, change: impl FnOnce(&mut Shared<K, T>)) -> Self {
        change(Arc::make_mut(&mut self.shared));
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
        if self.shared.max_waiters == 0 {
            let message = "without waiters no request is served; fail_fast is what makes none of them wait";
            return Err(Error::new(ErrorKind::InvalidOption, message));
        }
        self.shared.options.check()?;
        if self.shared.options.ttl.is_some() && self.shared.lock.capabilities().lease.is_none() {
            return Err(Error::unsupported("leases, so no TTL").with_store(self.shared.lock.to_string()));
        }
        Ok(self)
    }

    /// What its requests have met so far.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.shared.counters.snapshot()
    }

    /// Resolves when no request holds the lock, also none whose client has gone: await it after the server has
    /// shut down, which does not wait for those, and close the lock then. Bound it with a timeout, or the
    /// handlers with [`max_hold`](Self::max_hold).
    ///
    /// # Cancel safety
    ///
    /// Safe: it only looks.
    pub async fn idle(&self) {
        self.shared.counters.idle().await;
    }
}

impl<K, T: Clone> Shared<K, T> {
    /// With what the other settings imply.
    fn effective(&self) -> Self {
        let mut shared = self.clone();
        if shared.until == Until::BodyEnd && shared.options.max_hold.is_none() {
            shared.options.max_hold = Some(BODY_MAX_HOLD);
        }
        shared
    }
}

impl<S, K, T: Clone> Layer<S> for LockLayer<K, T> {
    type Service = Locked<S, K, T>;

    fn layer(&self, inner: S) -> Self::Service {
        Locked::new(inner, Arc::new(self.shared.effective()))
    }
}

impl<K, T> Clone for LockLayer<K, T> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<K, T: Clone> Clone for Shared<K, T> {
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

impl<K, T> fmt::Debug for LockLayer<K, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockLayer")
            .field("lock", &self.shared.lock)
            .field("options", &self.shared.options)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}
