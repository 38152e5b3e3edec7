//! From a URL to a lock.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, Lock, LockKey};

#[cfg(any(feature = "postgres-advisory", feature = "postgres-row", feature = "postgres-ttl"))]
use crate::postgres::PgConfig;
use crate::target::Target;

/// What [`connect_with`] is told beside the URL.
#[derive(Clone, Default)]
pub struct ConnectOptions {
    key_class: Option<fn(&LockKey) -> &str>,
    #[cfg(any(feature = "postgres-advisory", feature = "postgres-row", feature = "postgres-ttl"))]
    credentials: Option<Arc<dyn Fn(PgConfig) -> PgConfig + Send + Sync>>,
}

impl ConnectOptions {
    /// As [`connect`].
    #[must_use]
    pub const fn new() -> Self {
        Self {
            key_class: None,
            #[cfg(any(feature = "postgres-advisory", feature = "postgres-row", feature = "postgres-ttl"))]
            credentials: None,
        }
    }

    /// Puts keys into few classes for the label `key_class` of the metrics, instead of by the part before the first
    /// `:`; see [`EngineBuilder::key_class`](crate::engine::EngineBuilder::key_class).
    #[must_use]
    pub fn key_class(mut self, class: fn(&LockKey) -> &str) -> Self {
        self.key_class = Some(class);
        self
    }

    /// Calls `credentials` whenever a session with a Postgres server is opened, for passwords that change; see
    /// [`PgConfig::credentials`]. Other stores never call it.
    #[cfg(any(feature = "postgres-advisory", feature = "postgres-row", feature = "postgres-ttl"))]
    #[must_use]
    pub fn credentials<F, C>(mut self, credentials: C) -> Self
    where
        F: Future<Output = Result<crate::postgres::Credentials, Error>> + Send + 'static,
        C: Fn() -> F + Send + Sync + 'static,
    {
        let credentials = Arc::new(credentials);
        self.credentials = Some(Arc::new(move |config: PgConfig| {
            let credentials = Arc::clone(&credentials);
            config.credentials(move || credentials())
        }));
        self
    }

    #[cfg(any(feature = "postgres-advisory", feature = "postgres-row", feature = "postgres-ttl"))]
    pub(crate) fn log_in(&self, config: PgConfig) -> PgConfig {
        match &self.credentials {
            Some(credentials) => credentials(config),
            None => config,
        }
    }

    #[cfg(any(
        feature = "memory",
        feature = "file",
        feature = "postgres-advisory",
        feature = "postgres-row",
        feature = "postgres-ttl"
    ))]
    pub(crate) fn start(self, mut engine: crate::engine::EngineBuilder) -> Result<Arc<dyn Lock>, Error> {
        if let Some(class) = self.key_class {
            engine = engine.key_class(class);
        }
        Ok(Arc::new(engine.start()?))
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
    if let Some(opening) = crate::schemes::opening(url) {
        return opening.await;
    }
    match Target::parse(url)? {
        Target::Memory { name, ttl } => open_memory(name.as_deref(), ttl, options),
        Target::File { directory, poll, mode, read_only } => {
            open_file(&directory, poll, mode, read_only, options)
        }
        Target::Postgres(target) => crate::postgres_connect::open(target, options).await,
    }
}

#[cfg(feature = "memory")]
fn open_memory(
    name: Option<&str>,
    ttl: Option<Duration>,
    options: ConnectOptions,
) -> Result<Arc<dyn Lock>, Error> {
    let mut store = name.map_or_else(crate::memory::MemoryStore::new, crate::memory::MemoryStore::named);
    if let Some(ttl) = ttl {
        store = store.default_ttl(ttl);
    }
    options.start(store.builder()?)
}

#[cfg(not(feature = "memory"))]
fn open_memory(_: Option<&str>, _: Option<Duration>, _: ConnectOptions) -> Result<Arc<dyn Lock>, Error> {
    Err(not_compiled_in("memory"))
}

#[cfg(feature = "file")]
fn open_file(
    directory: &Path,
    poll: Option<Duration>,
    mode: Option<u32>,
    read_only: bool,
    options: ConnectOptions,
) -> Result<Arc<dyn Lock>, Error> {
    let mut config = crate::file::FileConfig::new(directory);
    if let Some(poll) = poll {
        config = config.poll(poll);
    }
    if let Some(mode) = mode {
        config = config.mode(mode);
    }
    if read_only {
        config = config.read_only();
    }
    options.start(crate::engine::Engine::builder(config.backend()?))
}

#[cfg(not(feature = "file"))]
fn open_file(
    _: &Path,
    _: Option<Duration>,
    _: Option<u32>,
    _: bool,
    _: ConnectOptions,
) -> Result<Arc<dyn Lock>, Error> {
    Err(not_compiled_in("file"))
}

#[cfg(not(all(
    feature = "memory",
    feature = "file",
    feature = "postgres-advisory",
    feature = "postgres-row",
    feature = "postgres-ttl"
)))]
pub(crate) fn not_compiled_in(feature: &str) -> Error {
    Error::new(
        leasehold_api::ErrorKind::Unsupported,
        format!(
            "this program was compiled without the {feature} store; switch on the cargo feature `{feature}` of the crate leasehold"
        ),
    )
}
