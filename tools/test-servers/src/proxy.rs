//! A TCP proxy that breaks connections as networks do.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;

use crate::{admin, or_panic, port::Port};

/// Maximum number of chunks in transit in one direction of one connection.
const IN_FLIGHT: usize = 64;

/// Maximum time that our own port can be in use when we reopen it.
const IN_USE: Duration = Duration::from_secs(10);

/// A proxy on loopback. It runs on its own threads, so the test's runtime can be paused or single threaded. Its
/// methods take effect before they return. If dropped, it ends with all its connections.
#[derive(Debug)]
pub struct Proxy {
    shared: Arc<Shared>,
    port: Port,
    /// `None` while new connections are refused.
    accepting: Mutex<Option<AbortHandle>>,
}

/// Counters of a proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Traffic {
    /// Connections that are open now.
    pub open: u64,
    /// Accepted connections in total.
    pub accepted: u64,
    /// Bytes forwarded to the server.
    pub bytes_to_server: u64,
    /// Bytes forwarded to the clients.
    pub bytes_to_client: u64,
    /// Replies that followed a request, over all connections.
    pub round_trips: u64,
    /// Replies that were discarded.
    pub dropped_replies: u64,
    /// Chunks or ends of connections that were held.
    pub held: u64,
    /// Places in requests that were rewritten.
    pub rewritten: u64,
}

#[derive(Debug)]
struct Shared {
    target: Mutex<String>,
    faults: watch::Sender<Faults>,
    /// Patterns of the replies to discard.
    traps: Mutex<VecDeque<Vec<u8>>>,
    /// The words after which [`Proxy::stall_open_after`] holds requests.
    words: Mutex<Vec<u8>>,
    /// Pairs of pattern and replacement in requests.
    rewrites: Mutex<Vec<(Vec<u8>, Vec<u8>)>>,
    counters: Counters,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Faults {
    holds_requests: bool,
    holds_replies: bool,
    /// Holds the requests of the connections with smaller numbers.
    holds_requests_before: u64,
    /// Whether these connections pass requests until one contains the words.
    awaits_words: bool,
    delay: Duration,
    /// Pause after each chunk for the server that was held longer than this.
    gap: Duration,
}

#[derive(Debug, Default)]
struct Counters {
    open: AtomicU64,
    accepted: AtomicU64,
    to_server: AtomicU64,
    to_client: AtomicU64,
    round_trips: AtomicU64,
    dropped_replies: AtomicU64,
    held: AtomicU64,
    rewritten: AtomicU64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    ToServer,
    ToClient,
}

impl Proxy {
    /// Starts a proxy in front of a server, such as `127.0.0.1:5432`.
    ///
    /// # Panics
    ///
    /// If no port is free.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn start(target: impl Into<String>) -> Self {
        let target = Mutex::new(target.into());
        let (traps, words, rewrites) = (Mutex::default(), Mutex::default(), Mutex::default());
        let (faults, counters) = (watch::Sender::new(Faults::default()), Counters::default());
        let shared = Arc::new(Shared { target, faults, traps, words, rewrites, counters });
        let listening = admin::blocking(|| {
            for _ in 0..10 {
                let port = Port::reserve();
                // Another process might have taken the port first.
                if let Ok(listener) = listen(port.number()) {
                    return Ok((listener, port));
                }
            }
            Err("ten random ports were taken one after the other".to_owned())
        });
        let (listener, port) = or_panic(listening.await);
        let proxy = Self { shared, port, accepting: Mutex::new(None) };
        *proxy.accepting() = Some(accept_all(listener, proxy.shared.clone()));
        proxy
    }

    /// Returns the same URL through this proxy.
    ///
    /// # Panics
    ///
    /// If it is not a URL with a host.
    #[must_use]
    pub fn url(&self, url: &str) -> String {
        let mut parsed =
            or_panic(url::Url::parse(url).map_err(|error| format!("{error}: no URL for a proxy")));
        let is_set =
            parsed.set_host(Some("127.0.0.1")).is_ok() && parsed.set_port(Some(self.port.number())).is_ok();
        assert!(is_set, "a URL without a host cannot go through a proxy");
        parsed.into()
    }

    /// Returns the proxy's port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// Sends new connections to another server, as a failover does.
    pub fn retarget(&self, target: impl Into<String>) {
        *lock(&self.shared.target) = target.into();
    }

    /// Closes all connections and refuses new ones.
    pub fn cut(&self) {
        self.stop_accepting();
    }

    /// Closes all connections and accepts new ones.
    pub fn reset(&self) {
        self.stop_accepting();
        self.listen_again();
    }

    /// Undoes [`Self::cut`], [`Self::stall`], [`Self::stall_replies`], [`Self::stall_open`],
    /// [`Self::stall_open_after`], [`Self::delay`] and pending discards of replies. Held data is forwarded.
    pub fn restore(&self) {
        lock(&self.shared.traps).clear();
        self.shared.faults.send_replace(Faults::default());
        self.listen_again();
    }

    /// Restores as [`Self::restore`] does, with this pause after each held piece of a request. A client that gives up
    /// cancels its request, and the server must not read both at once.
    pub fn restore_apart(&self, gap: Duration) {
        lock(&self.shared.traps).clear();
        self.shared.faults.send_replace(Faults { gap, ..Faults::default() });
        self.listen_again();
    }

    /// Holds all data both ways, including the end of a connection. New connections are accepted and held.
    pub fn stall(&self) {
        self.shared.faults.send_modify(|faults| (faults.holds_requests, faults.holds_replies) = (true, true));
    }

    /// Holds the server's replies. Requests still reach the server.
    pub fn stall_replies(&self) {
        self.shared.faults.send_modify(|faults| faults.holds_replies = true);
    }

    /// Holds the requests on the connections that are open now, including the end of a connection. Later connections
    /// work.
    pub fn stall_open(&self) {
        let accepted = self.shared.counters.accepted.load(Ordering::SeqCst);
        self.shared.faults.send_modify(|faults| faults.holds_requests_before = accepted);
    }

    /// Holds as [`Self::stall_open`] does, but on each connection only after a request with these words, such as `BEGIN`.
    pub fn stall_open_after(&self, words: impl AsRef<[u8]>) {
        let words = words.as_ref().to_vec();
        *lock(&self.shared.words) = words;
        let accepted = self.shared.counters.accepted.load(Ordering::SeqCst);
        self.shared.faults.send_modify(|faults| {
            (faults.holds_requests_before, faults.awaits_words) = (accepted, true);
        });
    }

    /// Delays every byte by this much, each way.
    pub fn delay(&self, delay: Duration) {
        self.shared.faults.send_modify(|faults| faults.delay = delay);
    }

    /// Discards the server's next reply on any connection and closes that connection. The work was done, but the
    /// client does not learn of it. A prepared statement takes two replies the first time.
    pub fn drop_next_reply(&self) {
        self.drop_next_reply_with("");
    }

    /// Discards as [`Self::drop_next_reply`] does, for the next reply that contains these bytes, such as `COMMIT`.
    pub fn drop_next_reply_with(&self, bytes: impl AsRef<[u8]>) {
        lock(&self.shared.traps).push_back(bytes.as_ref().to_owned());
    }

    /// Replaces these words in every later request, as if the server did not know their meaning. Spaces fill up a
    /// shorter replacement.
    ///
    /// # Panics
    ///
    /// If the replacement is longer, which would change the length of messages.
    pub fn rewrite(&self, words: &str, by: &str) {
        assert!(by.len() <= words.len(), "{by:?} is longer than {words:?}");
        let by = format!("{by:width$}", width = words.len());
        lock(&self.shared.rewrites).push((words.into(), by.into()));
    }

    /// Returns the counters.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        let counters = &self.shared.counters;
        let read = |counter: &AtomicU64| counter.load(Ordering::SeqCst);
        Traffic {
            open: read(&counters.open),
            accepted: read(&counters.accepted),
            bytes_to_server: read(&counters.to_server),
            bytes_to_client: read(&counters.to_client),
            round_trips: read(&counters.round_trips),
            dropped_replies: read(&counters.dropped_replies),
            held: read(&counters.held),
            rewritten: read(&counters.rewritten),
        }
    }

    fn stop_accepting(&self) {
        let Some(task) = self.accepting().take() else { return };
        task.abort();
        // Waits, because the port must be free and the sockets closed on return.
        while !task.is_finished() || self.traffic().open > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn listen_again(&self) {
        let mut accepting = self.accepting();
        if accepting.is_none() {
            let begun = std::time::Instant::now();
            let listener = loop {
                match listen(self.port.number()) {
                    // Retries, because a child process being started elsewhere in these tests holds a copy of our
                    // socket until its exec.
                    Err(error) if error.kind() == io::ErrorKind::AddrInUse && begun.elapsed() < IN_USE => {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    outcome => break outcome.map_err(|error| format!("cannot listen again: {error}")),
                }
            };
            *accepting = Some(accept_all(or_panic(listener), self.shared.clone()));
        }
    }

    fn accepting(&self) -> MutexGuard<'_, Option<AbortHandle>> {
        lock(&self.accepting)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop_accepting();
    }
}

fn contains(bytes: &[u8], words: &[u8]) -> bool {
    words.is_empty() || bytes.windows(words.len()).any(|window| window == words)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Listens with the standard library, because a runtime must not block on another.
fn listen(port: u16) -> io::Result<std::net::TcpListener> {
    let listener = std::net::TcpListener::bind(("127.0.0.1", port))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Accepts connections in a new task. All connections end with that task.
fn accept_all(listener: std::net::TcpListener, shared: Arc<Shared>) -> AbortHandle {
    let task = async move {
        let Ok(listener) = TcpListener::from_std(listener) else { return };
        let mut connections = JoinSet::new();
        loop {
            tokio::select! {
                accepted = listener.accept() => {
                    if let Ok((client, _)) = accepted {
                        let number = shared.counters.accepted.fetch_add(1, Ordering::SeqCst);
                        connections.spawn(connection(Open::new(&shared), number, client, shared.clone()));
                    }
                }
                Some(_) = connections.join_next() => {}
            }
        }
    };
    admin::runtime().spawn(task).abort_handle()
}

/// Counts an open connection.
struct Open(Arc<Shared>);

impl Open {
    fn new(shared: &Arc<Shared>) -> Self {
        shared.counters.open.fetch_add(1, Ordering::SeqCst);
        Self(shared.clone())
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.counters.open.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Serves a connection. `_open` is the first parameter because it is dropped last, after the sockets are closed.
async fn connection(_open: Open, number: u64, client: TcpStream, shared: Arc<Shared>) {
    shared.pass(Way::ToServer, number, false).await;
    let target = lock(&shared.target).clone();
    let Ok(server) = TcpStream::connect(target).await else { return };
    // Disables Nagle's algorithm, because it would add an unwanted delay.
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
    let is_asked = AtomicBool::new(false);
    // The first failure drops both directions, which closes both sockets.
    let _ = tokio::try_join!(
        shared.pipe((Way::ToServer, number), from_client, to_server, &is_asked),
        shared.pipe((Way::ToClient, number), from_server, to_client, &is_asked),
    );
}

/// Bytes with the time of their earliest arrival.
struct Chunk(Instant, Vec<u8>);

impl Shared {
    async fn pipe(
        &self,
        (way, number): (Way, u64),
        reader: OwnedReadHalf,
        writer: OwnedWriteHalf,
        is_asked: &AtomicBool,
    ) -> io::Result<()> {
        let (sender, receiver) = mpsc::channel(IN_FLIGHT);
        tokio::join!(self.read(reader, sender), self.write((way, number), receiver, writer, is_asked)).1
    }

    /// Reads to the end or to an error, which counts as an end. The other side learns of it only once it can pass.
    async fn read(&self, mut reader: OwnedReadHalf, chunks: mpsc::Sender<Chunk>) {
        let mut buffer = vec![0; 16 * 1024];
        while let Ok(length @ 1..) = reader.read(&mut buffer).await {
            let due = Instant::now() + self.faults.borrow().delay;
            if chunks.send(Chunk(due, buffer[..length].to_vec())).await.is_err() {
                return;
            }
        }
    }

    async fn write(
        &self,
        (way, number): (Way, u64),
        mut chunks: mpsc::Receiver<Chunk>,
        mut writer: OwnedWriteHalf,
        is_asked: &AtomicBool,
    ) -> io::Result<()> {
        // Whether a request had the words since requests are held after them.
        let mut has_words = false;
        while let Some(Chunk(due, bytes)) = chunks.recv().await {
            tokio::time::sleep_until(due).await;
            self.pass(way, number, has_words).await;
            has_words = self.faults.borrow().awaits_words && (has_words || self.has_words(&bytes));
            if way == Way::ToClient && self.is_trapped(&bytes) {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            let bytes = if way == Way::ToServer { self.rewritten(bytes) } else { bytes };
            self.counters.count(way, bytes.len(), is_asked);
            writer.write_all(&bytes).await?;
            let gap = self.faults.borrow().gap;
            if way == Way::ToServer && due.elapsed() > gap {
                tokio::time::sleep(gap).await;
            }
        }
        self.pass(way, number, has_words).await;
        writer.shutdown().await
    }

    /// Returns whether these bytes contain the words of [`Proxy::stall_open_after`].
    fn has_words(&self, bytes: &[u8]) -> bool {
        contains(bytes, &lock(&self.words))
    }

    /// Waits while this direction of the connection `number` is held. `has_words` is whether an earlier request had the
    /// words after which requests are held.
    async fn pass(&self, way: Way, number: u64, has_words: bool) {
        let mut faults = self.faults.subscribe();
        let is_open = |faults: &Faults| match way {
            Way::ToServer => {
                let is_early = faults.awaits_words && !has_words;
                !faults.holds_requests && (number >= faults.holds_requests_before || is_early)
            }
            Way::ToClient => !faults.holds_replies,
        };
        if !is_open(&faults.borrow()) {
            self.counters.held.fetch_add(1, Ordering::SeqCst);
        }
        // Cannot fail, because `self` owns the sender.
        let _ = faults.wait_for(is_open).await;
    }

    fn rewritten(&self, mut bytes: Vec<u8>) -> Vec<u8> {
        for (words, by) in &*lock(&self.rewrites) {
            let mut at = 0;
            while let Some(found) = bytes[at..].windows(words.len()).position(|window| window == words) {
                at += found;
                bytes[at..at + by.len()].copy_from_slice(by);
                at += by.len();
                at += by.len();
                self.counters.rewritten.fetch_add(1, Ordering::SeqCst);
            }
        }
        bytes
    }

    fn is_trapped(&self, bytes: &[u8]) -> bool {
        let mut traps = lock(&self.traps);
        let is_trapped = traps.front().is_some_and(|wanted| contains(bytes, wanted));
        if is_trapped {
            traps.pop_front();
            self.counters.dropped_replies.fetch_add(1, Ordering::SeqCst);
        }
        is_trapped
    }
}

impl Counters {
    fn count(&self, way: Way, length: usize, is_asked: &AtomicBool) {
        let bytes = match way {
            Way::ToServer => &self.to_server,
            Way::ToClient => &self.to_client,
        };
        bytes.fetch_add(length as u64, Ordering::SeqCst);
        let was_asked = is_asked.swap(way == Way::ToServer, Ordering::SeqCst);
        if way == Way::ToClient && was_asked {
            self.round_trips.fetch_add(1, Ordering::SeqCst);
        }
    }
}
