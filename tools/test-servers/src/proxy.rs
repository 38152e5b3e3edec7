//! A TCP proxy that breaks connections in the ways networks do.

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

use crate::{admin, or_panic, port};

/// How many chunks may be on their way in one direction of one connection.
const IN_FLIGHT: usize = 64;

/// How long our own port may be in use when we want it back.
const IN_USE: Duration = Duration::from_secs(10);

/// A proxy on loopback. It runs on its own threads, so the test's runtime may be paused or single threaded.
/// Its methods take effect before they return. It ends, with all its connections, when dropped.
#[derive(Debug)]
pub struct Proxy {
    shared: Arc<Shared>,
    port: u16,
    /// `None` while new connections are refused.
    accepting: Mutex<Option<AbortHandle>>,
}

/// What has gone through a proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Traffic {
    /// Connections that are open now.
    pub open: u64,
    /// Connections that were ever accepted.
    pub accepted: u64,
    /// Bytes that were forwarded to the server.
    pub bytes_to_server: u64,
    /// Bytes that were forwarded to the clients.
    pub bytes_to_client: u64,
    /// How often an answer followed a request, over all connections.
    pub round_trips: u64,
    /// Replies that were swallowed.
    pub dropped_replies: u64,
    /// Bytes, or the end of a connection, that had to wait.
    pub held: u64,
    /// Places in requests that were rewritten.
    pub rewritten: u64,
}

#[derive(Debug)]
struct Shared {
    target: Mutex<String>,
    faults: watch::Sender<Faults>,
    /// The replies to swallow: what they must contain.
    traps: Mutex<VecDeque<Vec<u8>>>,
    /// What to replace in requests, and by what.
    rewrites: Mutex<Vec<(Vec<u8>, Vec<u8>)>>,
    counters: Counters,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Faults {
    holds_requests: bool,
    holds_replies: bool,
    delay: Duration,
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
    /// When no port can be had.
    ///
    /// # Cancel safety
    ///
    /// Dropping it leaves the servers as they are at that moment; they end with their values.
    pub async fn start(target: impl Into<String>) -> Self {
        let target = Mutex::new(target.into());
        let (traps, rewrites, counters) = (Mutex::default(), Mutex::default(), Counters::default());
        let faults = watch::Sender::new(Faults::default());
        let shared = Arc::new(Shared { target, faults, traps, rewrites, counters });
        let listening = admin::blocking(|| {
            for _ in 0..10 {
                let port = port::free();
                // Somebody may have been quicker.
                if let Ok(listener) = listen(port) {
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

    /// The same URL, through this proxy.
    ///
    /// # Panics
    ///
    /// When it is no URL with a host.
    #[must_use]
    pub fn url(&self, url: &str) -> String {
        let mut parsed =
            or_panic(url::Url::parse(url).map_err(|error| format!("{error}: no URL for a proxy")));
        let is_set = parsed.set_host(Some("127.0.0.1")).is_ok() && parsed.set_port(Some(self.port)).is_ok();
        assert!(is_set, "a URL without a host cannot go through a proxy");
        parsed.into()
    }

    /// The port on which it listens.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Sends new connections to another server, as a failover does.
    pub fn retarget(&self, target: impl Into<String>) {
        *lock(&self.shared.target) = target.into();
    }

    /// Closes all connections and refuses new ones.
    pub fn cut(&self) {
        self.stop_accepting();
    }

    /// Closes all connections; new ones are welcome.
    pub fn reset(&self) {
        self.stop_accepting();
        self.listen_again();
    }

    /// Undoes [`Self::cut`], [`Self::stall`], [`Self::stall_replies`], [`Self::delay`] and replies that were
    /// to be dropped. What was held is forwarded.
    pub fn restore(&self) {
        lock(&self.shared.traps).clear();
        self.shared.faults.send_replace(Faults::default());
        self.listen_again();
    }

    /// Holds everything both ways, also the end of a connection. New connections are accepted and held.
    pub fn stall(&self) {
        self.shared.faults.send_modify(|faults| (faults.holds_requests, faults.holds_replies) = (true, true));
    }

    /// Holds what the server says; requests still reach it.
    pub fn stall_replies(&self) {
        self.shared.faults.send_modify(|faults| faults.holds_replies = true);
    }

    /// Makes every byte take this much longer, each way.
    pub fn delay(&self, delay: Duration) {
        self.shared.faults.send_modify(|faults| faults.delay = delay);
    }

    /// Swallows the next thing that the server says on any connection, and closes that connection: the work
    /// was done and nobody learns of it. A prepared statement takes two replies the first time.
    pub fn drop_next_reply(&self) {
        self.drop_next_reply_with("");
    }

    /// As [`Self::drop_next_reply`], for the next reply that contains these bytes, such as `COMMIT`.
    pub fn drop_next_reply_with(&self, bytes: impl AsRef<[u8]>) {
        lock(&self.shared.traps).push_back(bytes.as_ref().to_owned());
    }

    /// Replaces these words in every request from now on, as if the server did not know what they ask for. Spaces fill up
    /// what is shorter.
    ///
    /// # Panics
    ///
    /// When the replacement is longer, which would change the length of messages.
    pub fn rewrite(&self, words: &str, by: &str) {
        assert!(by.len() <= words.len(), "{by:?} is longer than {words:?}");
        let by = format!("{by:width$}", width = words.len());
        lock(&self.shared.rewrites).push((words.into(), by.into()));
    }

    /// What has gone through until now.
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
        // The port must be free and the sockets closed when we return.
        while !task.is_finished() || self.traffic().open > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn listen_again(&self) {
        let mut accepting = self.accepting();
        if accepting.is_none() {
            let begun = std::time::Instant::now();
            let listener = loop {
                match listen(self.port) {
                    // Until its own program begins, a child process that is being started elsewhere in
                    // these tests has a copy of our socket.
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// By the standard library, because a runtime may not block on another.
fn listen(port: u16) -> io::Result<std::net::TcpListener> {
    let listener = std::net::TcpListener::bind(("127.0.0.1", port))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// All connections end with the task that this starts.
fn accept_all(listener: std::net::TcpListener, shared: Arc<Shared>) -> AbortHandle {
    let task = async move {
        let Ok(listener) = TcpListener::from_std(listener) else { return };
        let mut connections = JoinSet::new();
        loop {
            tokio::select! {
                accepted = listener.accept() => {
                    if let Ok((client, _)) = accepted {
                        shared.counters.accepted.fetch_add(1, Ordering::SeqCst);
                        connections.spawn(connection(Open::new(&shared), client, shared.clone()));
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

/// The parameter that counts comes first, because it is dropped last: when nothing is open, the sockets are closed.
async fn connection(_open: Open, client: TcpStream, shared: Arc<Shared>) {
    shared.pass(Way::ToServer).await;
    let target = lock(&shared.target).clone();
    let Ok(server) = TcpStream::connect(target).await else { return };
    // Chunks are forwarded as they come; waiting for more would be a delay that nobody asked for.
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
    let is_asked = AtomicBool::new(false);
    // The first failure drops both directions, which closes both sockets.
    let _ = tokio::try_join!(
        shared.pipe(Way::ToServer, from_client, to_server, &is_asked),
        shared.pipe(Way::ToClient, from_server, to_client, &is_asked),
    );
}

/// Bytes and when they may arrive.
struct Chunk(Instant, Vec<u8>);

impl Shared {
    async fn pipe(
        &self,
        way: Way,
        reader: OwnedReadHalf,
        writer: OwnedWriteHalf,
        is_asked: &AtomicBool,
    ) -> io::Result<()> {
        let (sender, receiver) = mpsc::channel(IN_FLIGHT);
        tokio::join!(self.read(reader, sender), self.write(way, receiver, writer, is_asked)).1
    }

    /// Reads to the end, or to an error, which is an end too: it is news for the other side only when it may pass.
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
        way: Way,
        mut chunks: mpsc::Receiver<Chunk>,
        mut writer: OwnedWriteHalf,
        is_asked: &AtomicBool,
    ) -> io::Result<()> {
        while let Some(Chunk(due, bytes)) = chunks.recv().await {
            tokio::time::sleep_until(due).await;
            self.pass(way).await;
            if way == Way::ToClient && self.is_trapped(&bytes) {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            let bytes = if way == Way::ToServer { self.rewritten(bytes) } else { bytes };
            self.counters.count(way, bytes.len(), is_asked);
            writer.write_all(&bytes).await?;
        }
        self.pass(way).await;
        writer.shutdown().await
    }

    /// Waits while this direction is held.
    async fn pass(&self, way: Way) {
        let mut faults = self.faults.subscribe();
        let is_open = |faults: &Faults| match way {
            Way::ToServer => !faults.holds_requests,
            Way::ToClient => !faults.holds_replies,
        };
        if !is_open(&faults.borrow()) {
            self.counters.held.fetch_add(1, Ordering::SeqCst);
        }
        // The sender is ours, so it cannot be gone.
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
        let contains = |wanted: &Vec<u8>| {
            wanted.is_empty() || bytes.windows(wanted.len()).any(|window| window == wanted.as_slice())
        };
        let is_trapped = traps.front().is_some_and(contains);
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
