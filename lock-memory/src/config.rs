//! Stores and how to connect to them.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};
use std::time::Duration;

use leasehold_api::{Error, ErrorKind};
use leasehold_engine::{Engine, EngineBuilder, Waiting};

use crate::backend::MemoryBackend;
use crate::store::Store;

/// The shortest TTL: renewal at a third of it must survive a busy machine.
pub(crate) const MIN_TTL: Duration = Duration::from_millis(100);

/// The longest TTL: a hundred years.
pub(crate) const MAX_TTL: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// A new private store and its only client.
///
/// # Errors
///
/// [`NoRuntime`](ErrorKind::NoRuntime) outside of a tokio runtime.
pub fn connect() -> Result<Engine, Error> {
    MemoryStore::new().client()
}

/// A store in the memory of this process. Clones are the same store; each [`client`](Self::client) is
/// an independent client of it, with an engine of its own, as if in another process.
#[derive(Clone)]
pub struct MemoryStore {
    pub(crate) store: Arc<Store>,
    pub(crate) settings: Settings,
}

/// How clients of a store behave.
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
    /// A new store that nobody else has.
    #[must_use]
    pub fn new() -> Self {
        Self { store: Store::new("memory".into()), settings: Settings::default() }
    }

    /// The store of this name in this process; it lives as long as somebody has it or a client of it.
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

    /// Gives every grant of clients made from here on a lease of `ttl`, unless the caller names another.
    /// Without this, holds last until released.
    #[must_use]
    pub fn default_ttl(mut self, ttl: Duration) -> Self {
        self.settings.default_ttl = Some(ttl);
        self
    }

    /// How clients made from here on wait: in the store's queue (the default), or by polling, as with
    /// stores that have no queue.
    #[must_use]
    pub fn waiting(mut self, waiting: Waiting) -> Self {
        self.settings.waiting = waiting;
        self
    }

    /// Whether polling clients made from here on are told when a key may be free. On by default.
    #[must_use]
    pub fn hints(mut self, hints: bool) -> Self {
        self.settings.hints = hints;
        self
    }

    /// One more client of this store.
    ///
    /// # Errors
    ///
    /// [`NoRuntime`](ErrorKind::NoRuntime) outside of a tokio runtime, [`InvalidOption`](ErrorKind::InvalidOption)
    /// for a default TTL that is out of bounds.
    pub fn client(&self) -> Result<Engine, Error> {
        self.start(self.backend())
    }

    /// The engine of one more client before it starts, for settings of its own.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption) for a default TTL that is out of bounds.
    pub fn builder(&self) -> Result<EngineBuilder, Error> {
        self.engine_of(self.backend())
    }

    /// The client before its engine, for those who start an engine with settings of their own.
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
