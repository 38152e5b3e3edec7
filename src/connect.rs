//! Connects to the store that a URL names.

use std::fmt;
use std::sync::Arc;

use leasehold_api::{Error, Lock, LockKey};
use leasehold_engine::scheme::OpenOptions;

use crate::stores;

/// The options of [`connect_with`], beside the URL.
#[derive(Clone, Default)]
pub struct ConnectOptions {
    key_class: Option<fn(&LockKey) -> &str>,
    open: OpenOptions,
}

impl ConnectOptions {
    /// Makes empty options, which add nothing to the URL.
    #[must_use]
    pub const fn new() -> Self {
        Self { key_class: None, open: OpenOptions::new() }
    }

    /// Sets the function that puts keys into few classes for the label `key_class` of the metrics, instead of
    /// the part before the first `:`. See
    /// [`EngineBuilder::key_class`](crate::engine::EngineBuilder::key_class).
    #[must_use]
    pub fn key_class(mut self, class: fn(&LockKey) -> &str) -> Self {
        self.key_class = Some(class);
        self
    }

    /// Calls `credentials` whenever a session with a Postgres server is opened, for passwords that change. See
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

    /// Uses `credentials` whenever a login of etcd is needed, for passwords that change. Other stores never use them.
    #[cfg(feature = "etcd")]
    #[must_use]
    pub fn etcd_credentials(mut self, credentials: crate::etcd::EtcdCredentials) -> Self {
        self.open = self.open.with(credentials);
        self
    }

    /// Opens the store only for inspection, which does not create a directory of files. For the command, and
    /// not part of the interface.
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
/// ```
/// # #[tokio::main]
/// # async fn main() -> Result<(), leasehold::Error> {
/// use leasehold::LockExt as _;
/// let lock = leasehold::connect("memory:jobs?ttl=30s").await?;
/// let guard = lock.key("nightly-report").acquire().await?;
/// guard.release().await
/// # }
/// ```
///
/// | URL | Store |
/// |---|---|
/// | `memory:` | memory: a private store of this process, gone with the returned lock |
/// | `memory:NAME` | memory: the store of that name in this process, shared by all its clients |
/// | `file:///DIRECTORY` | file: the store in that directory, between the processes of this machine |
/// | `postgres://`, `postgres+advisory://` | session: advisory locks of sessions that leasehold opens |
/// | `postgres+advisory-xact://` | transaction: advisory locks, each in a separate transaction |
/// | `postgres+row://` | row: mutex rows, which stay locked when their holder dies |
/// | `postgres+ttl://` | lease: rows with a lease |
/// | `etcd://HOST,HOST,HOST/PREFIX`, `etcds://` with TLS | etcd: the keys below that prefix in a cluster of these members |
/// | a scheme of [`register_scheme`](crate::register_scheme) | a registered store |
///
/// A Postgres URL continues like libpq's, `//user:password@host:5432/database?sslmode=require`, also with
/// several hosts. Omitted parts come from `PGHOST`, `PGUSER`, `PGCONNECT_TIMEOUT` and the other variables of
/// libpq. Parameters of leasehold:
///
/// | Parameter | Stores | Meaning |
/// |---|---|---|
/// | `ttl=30s` | memory, lease, etcd | the default TTL of each lock taken through this connection |
/// | `poll=20ms` | file, row, lease | the poll interval of a waiter (file: if it cannot wait in the kernel) |
/// | `mode=0660` | file | lets the users of one group share a new directory (`0666`: all users) |
/// | `read-only=true` | file | allows only inspection |
/// | `handover=off` | file, session, row, lease, etcd | asks the store for each grant, also while callers of this client wait |
/// | `ca=FILE`, `cert=FILE`, `key=FILE` | etcd with TLS | the trusted authorities, and the client's certificate with its key |
/// | `schema=NAME`, `install=true` | Postgres | the schema, and whether connecting installs it |
/// | `pooler=transaction` | Postgres | the pooler in front of the server (or `none`, `detect`) |
/// | `connect_timeout=5s`, `statement_timeout=5s` | Postgres | time limits |
/// | `idle=10m` | Postgres | the time after which sessions of an unused client are closed |
/// | `lost_after=10s` | session, transaction, row | how long a holder without an answer counts as holding |
/// | `confirm_every=3s`, `server_gives_up=15s` | session, transaction | confirmations, and the server's limit for a silent client |
/// | `hash=fnv` | session, transaction | the hash of keys (or `sha256`, `raw`, `pair`, `djb2`, `djb2-reverse`, `sqlx`) |
///
/// Durations are written `250ms`, `30s`, `5m`, `1h`, `7d` or `1h30m`.
///
/// The returned type is [`Lock`] for every store. The cargo feature `metrics` publishes the engine's counters.
/// To read them in the program, connect by the store's own function (such as `memory::connect` or
/// `postgres_row::connect`), which returns the [`Engine`](crate::engine::Engine) with its
/// [`counters`](crate::engine::Engine::counters).
///
/// # Blocking
///
/// Connections and timers run on the current runtime. On a current-thread runtime, do not block its thread
/// while a lock is awaited. For example, `futures::executor::block_on` around `acquire()` in a task hangs
/// beyond the wait budget, because the server's reply is never read. Await instead, or connect on a runtime
/// with several workers.
///
/// # Errors
///
/// [`InvalidOption`](crate::ErrorKind::InvalidOption) for an unknown scheme or parameter, a parameter given
/// twice, and an unusable value. [`Unsupported`](crate::ErrorKind::Unsupported) with the cargo feature for a
/// store that was not compiled in. [`NoRuntime`](crate::ErrorKind::NoRuntime) outside a tokio runtime.
/// Otherwise the error of the store. No error repeats the URL, which may contain a password.
///
/// # Cancel safety
///
/// If dropped, the connection is dropped. The client holds no lock yet.
pub async fn connect(url: &str) -> Result<Arc<dyn Lock>, Error> {
    connect_with(url, ConnectOptions::new()).await
}

/// Connects like [`connect`], with `options` that a URL cannot contain.
///
/// # Errors
///
/// As [`connect`].
///
/// # Cancel safety
///
/// As [`connect`].
pub async fn connect_with(url: &str, options: ConnectOptions) -> Result<Arc<dyn Lock>, Error> {
    let mut engine = stores::read(url)?.open(&options.open).await?;
    if let Some(class) = options.key_class {
        engine = engine.key_class(class);
    }
    Ok(Arc::new(engine.start()?))
}
