//! Memory stores and their settings.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};
use std::time::Duration;

use leasehold_api::{Error, ErrorKind};
use leasehold_engine::{Engine, EngineBuilder, Waiting};

use crate::backend::MemoryBackend;
use crate::store::Store;

/// The shortest TTL, because renewal at a third of it must survive a busy machine.
pub(crate) const MIN_TTL: Duration = Duration::from_millis(100);

/// The longest TTL: a hundred years.
pub(crate) const MAX_TTL: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Makes a new private store, and returns its only client.
///
/// # Errors
///
/// [`NoRuntime`](ErrorKind::NoRuntime) outside of a tokio runtime.
pub fn connect() -> Result<Engine, Error> {
    MemoryStore::new().client()
}

/// A store in the memory of this process. Clones are the same store. Each [`client`](Self::client) is
/// independent, with a separate engine, as if in another process.
///
/// ```
/// # #[tokio::main]
/// # async fn main() -> Result<(), leasehold_api::Error> {
/// use std::time::Duration;
/// use leasehold_api::LockExt as _;
/// use leasehold_memory::MemoryStore;
/// let store = MemoryStore::new().default_ttl(Duration::from_secs(30));
/// let (one, other) = (store.client()?, store.client()?);
/// let guard = one.key("nightly-report").acquire().await?;
/// assert!(other.key("nightly-report").try_acquire().await?.is_none());
/// guard.release().await
/// # }
/// ```
#[derive(Clone)]
pub struct MemoryStore {
    pub(crate) store: Arc<Store>,
    pub(crate) settings: Settings,
}

/// The settings of the clients of a store.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) default_ttl: Option<Duration>,
    pub(crate) waiting: Waiting,
    pub(crate) hints: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self { default_ttl: None, waiting: Waiting::Store, hints: true }
    }
}

impl MemoryStore {
    /// Makes a new private store.
    #[must_use]
    pub fn new() -> Self {
        Self { store: Store::new("memory".into()), settings: Settings::default() }
    }

    /// Returns the store of this name in this process. It lives until its last handle and client are dropped.
    #[must_use]
    pub fn named(name: &str) -> Self {
        static NAMED: LazyLock<Mutex<HashMap<String, Weak<Store>>>> = LazyLock::new(Mutex::default);
        let mut named = NAMED.lock().unwrap_or_else(PoisonError::into_inner);
        named.retain(|_, store| store.strong_count() > 0);
        let store = named.get(name).and_then(Weak::upgrade).unwrap_or_else(|| {
            let store = Store::new(format!("memory:{name}"));
            named.insert(name.to_owned(), Arc::downgrade(&store));
            store
        });
        Self { store, settings: Settings::default() }
    }

    /// Sets the TTL of grants for which the caller sets none. Applies to clients made afterwards. Without a
    /// default TTL, holds last until released.
    #[must_use]
    pub fn default_ttl(mut self, ttl: Duration) -> Self {
        self.settings.default_ttl = Some(ttl);
        self
    }

    /// Sets how waiters wait, in the store's queue (the default) or by polling, like stores without a queue.
    /// Applies to clients made afterwards.
    #[must_use]
    pub fn waiting(mut self, waiting: Waiting) -> Self {
        self.settings.waiting = waiting;
        self
    }

    /// Sets whether polling clients get a hint when a key may be free. On by default. Applies to clients made
    /// afterwards.
    #[must_use]
    pub fn hints(mut self, hints: bool) -> Self {
        self.settings.hints = hints;
        self
    }

    /// Makes a client of this store.
    ///
    /// # Errors
    ///
    /// [`NoRuntime`](ErrorKind::NoRuntime) outside of a tokio runtime, [`InvalidOption`](ErrorKind::InvalidOption)
    /// for a default TTL that is out of bounds.
    pub fn client(&self) -> Result<Engine, Error> {
        self.start(self.backend())
    }

    /// Makes the engine of a client without starting it, for other settings of the engine.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption) for a default TTL that is out of bounds.
    pub fn builder(&self) -> Result<EngineBuilder, Error> {
        self.engine_of(self.backend())
    }

    /// Makes the backend of a client without an engine, for programs that build the engine.
    #[must_use]
    pub fn backend(&self) -> MemoryBackend {
        MemoryBackend::new(self, 0)
    }

    pub(crate) fn start(&self, backend: MemoryBackend) -> Result<Engine, Error> {
        self.engine_of(backend)?.start()
    }

    fn engine_of(&self, backend: MemoryBackend) -> Result<EngineBuilder, Error> {
        if self.settings.default_ttl.is_some_and(|ttl| ttl < MIN_TTL || ttl > MAX_TTL) {
            let message = format!("a default TTL must be between {MIN_TTL:?} and {MAX_TTL:?}");
            return Err(Error::new(ErrorKind::InvalidOption, message).with_store(self.to_string()));
        }
        let clock = backend.clock();
        Ok(Engine::builder(backend).clock(clock))
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Display for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.store.name)
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore")
            .field("name", &self.store.name)
            .field("settings", &self.settings)
            .finish()
    }
}
