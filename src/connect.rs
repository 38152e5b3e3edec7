//! From a URL to a lock.

use std::fmt;
use std::sync::Arc;

use leasehold_api::{Error, Lock, LockKey};
use leasehold_engine::scheme::OpenOptions;

use crate::{schemes, stores};

/// What [`connect_with`] is told beside the URL.
#[derive(Clone, Default)]
pub struct ConnectOptions {
    key_class: Option<fn(&LockKey) -> &str>,
    open: OpenOptions,
}

impl ConnectOptions {
    /// As [`connect`].
    #[must_use]
    pub const fn new() -> Self {
        Self { key_class: None, open: OpenOptions::new() }
    }

    /// Puts keys into few classes for the label `key_class` of the metrics, instead of by the part before the first
    /// `:`; see [`EngineBuilder::key_class`](crate::engine::EngineBuilder::key_class).
    #[must_use]
    pub fn key_class(mut self, class: fn(&LockKey) -> &str) -> Self {
        self.key_class = Some(class);
        self
    }

    /// Calls `credentials` whenever a session with a Postgres server is opened, for passwords that change; see
    /// [`PgConfig::credentials`](crate::postgres::PgConfig::credentials). Other stores never call it.
    #[cfg(any(feature = "postgres-advisory", feature = "postgres-row", feature = "postgres-ttl"))]
    #[must_use]
    pub fn credentials<F, C>(mut self, credentials: C) -> Self
    where
        F: Future<Output = Result<crate::postgres::Credentials, Error>> + Send + 'static,
        C: Fn() -> F + Send + Sync + 'static,
    {
        self.open = self.open.with(crate::postgres::scheme::ProgramCredentials::new(credentials));
        self
    }

    /// Opens the store to look at it: a directory of files is not made. For the command, and not part of the interface.
    #[doc(hidden)]
    #[must_use]
    pub fn look_only(mut self) -> Self {
        self.open = self.open.look_only();
        self
    }
}

impl fmt::Debug for ConnectOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectOptions").field("key_class", &self.key_class).finish_non_exhaustive()
    }
}

/// Connects to the store that `url` names.
///
/// | URL | Store |
/// |---|---|
/// | `memory:` | a private store of this process, gone with the returned lock |
/// | `memory:NAME` | the store of that name in this process, shared by all that connect to it |
/// | `file:///DIRECTORY` | the store in that directory, between the processes of this machine |
/// | `postgres://`, `postgres+advisory://` | advisory locks, kept by sessions of our own |
/// | `postgres+advisory-xact://` | advisory locks, each kept by a transaction of its own |
/// | `postgres+row://` | mutex rows, which stay shut when their holder dies |
/// | `postgres+ttl://` | lease rows |
/// | a scheme of [`register_scheme`](crate::register_scheme) | a store of your own |
///
/// Parameters: `memory:NAME?ttl=30s` gives every lock taken through this connection a lease of that
/// TTL unless the call names another; `file:///DIRECTORY?poll=20ms` sets how often a waiter asks where it cannot
/// wait in the kernel,
/// `?mode=0660` lets the users of one group share a new directory (`0666`: everybody), and `?read-only=true` looks only.
/// A Postgres URL goes on like libpq's, `//user:password@host:5432/database?sslmode=require`, also with several hosts; what
/// it leaves out comes from `PGHOST`, `PGUSER`, `PGCONNECT_TIMEOUT` and so on. Parameters of our own: `schema=NAME`,
/// `install=true` (install the schema when connecting), `pooler=transaction` (or `none`, `detect`),
/// `connect_timeout=5s` and `statement_timeout=5s`, `idle=10m` (close the sessions of a client that is not used); for rows `poll=500ms`, for leases `ttl=30s` as well; for rows and
/// advisory locks `lost_after=10s`, how long a holder that gets no answer counts as holding; for advisory locks also
/// `confirm_every=3s`, `server_gives_up=15s`, and
/// `hash=fnv` (or `sha256`, `raw`, `pair`, `djb2`, `djb2-reverse`, `sqlx`), how keys become numbers.
/// Durations are written `250ms`, `30s`, `5m`, `1h`, `7d` or `1h30m`.
///
/// The type says only [`Lock`], whatever the store. What the store's engine counts is published by the cargo
/// feature `metrics`; to read it in the program, connect with the store's own function (such as `memory::connect`
/// or `postgres_row::connect`), which returns the [`Engine`](crate::engine::Engine) with its
/// [`counters`](crate::engine::Engine::counters).
///
/// # Blocking
///
/// Connections and timers run on the runtime on which this is called. On a current-thread runtime nothing may block its
/// thread while a lock is awaited: `futures::executor::block_on` around `acquire()`, called from a task there, hangs
/// beyond the wait's budget, because the server's answer is never read. Await instead, or connect on a runtime with several
/// workers.
///
/// # Errors
///
/// [`InvalidOption`](crate::ErrorKind::InvalidOption) for an unknown scheme or parameter, a parameter
/// given twice and a value that cannot be used; [`Unsupported`](crate::ErrorKind::Unsupported) for a
/// store that was not compiled in, naming the cargo feature; [`NoRuntime`](crate::ErrorKind::NoRuntime)
/// outside a tokio runtime; and what the store answers. No error repeats the URL, which may hold a
/// password.
///
/// # Cancel safety
///
/// Dropping the future drops the connection; nothing is held yet.
pub async fn connect(url: &str) -> Result<Arc<dyn Lock>, Error> {
    connect_with(url, ConnectOptions::new()).await
}

/// As [`connect`], with what a URL cannot say.
///
/// # Errors
///
/// As [`connect`].
///
/// # Cancel safety
///
/// As [`connect`].
pub async fn connect_with(url: &str, options: ConnectOptions) -> Result<Arc<dyn Lock>, Error> {
    if let Some(opening) = schemes::opening(url) {
        return opening.await;
    }
    let mut engine = stores::read(url)?.open(&options.open).await?;
    if let Some(class) = options.key_class {
        engine = engine.key_class(class);
    }
    Ok(Arc::new(engine.start()?))
}
