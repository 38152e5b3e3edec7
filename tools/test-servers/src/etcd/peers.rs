//! The connections between the members, which tests can interrupt for single members.

use std::collections::HashMap;
use std::net::{Ipv4Addr, TcpListener as StdListener};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::io::{self, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};

use crate::{Outcome, admin, port::Port};

/// The header in which a member names itself at the start of a connection.
const FROM: &[u8] = b"x-server-from: ";

/// Longest start of a connection.
const HEAD: usize = 16 * 1024;

/// A forwarder in front of each member's port for members. A connection belongs to two members: the listener, and the
/// sender, which names itself in the first request.
#[derive(Debug)]
pub(super) struct Peers {
    shared: Arc<Shared>,
    links: Vec<(u16, AbortHandle)>,
}

#[derive(Debug)]
struct Shared {
    /// Numbers of the members by their ids in hexadecimal.
    names: Mutex<HashMap<String, usize>>,
    isolated: watch::Sender<Option<usize>>,
}

impl Peers {
    /// Starts a forwarder for each of these ports.
    pub(super) fn start(ports: &[Port]) -> Outcome<Self> {
        let shared = Arc::new(Shared { names: Mutex::default(), isolated: watch::Sender::new(None) });
        let mut links = Vec::new();
        for (number, target) in ports.iter().map(Port::number).enumerate() {
            let failed = |error: io::Error| format!("cannot listen for members: {error}");
            let listener = StdListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(failed)?;
            listener.set_nonblocking(true).map_err(failed)?;
            let port = listener.local_addr().map_err(failed)?.port();
            let task = admin::runtime().spawn(forward(listener, target, number, shared.clone()));
            links.push((port, task.abort_handle()));
        }
        Ok(Self { shared, links })
    }

    /// Returns the ports of the forwarders.
    pub(super) fn ports(&self) -> impl Iterator<Item = u16> {
        self.links.iter().map(|(port, _)| *port)
    }

    /// Notes the id of a member.
    pub(super) fn name(&self, number: usize, id: u64) {
        self.shared.names().insert(format!("{id:x}"), number);
    }

    /// Closes all connections of a member, and refuses new ones.
    pub(super) fn isolate(&self, number: usize) {
        self.shared.isolated.send_replace(Some(number));
    }

    pub(super) fn rejoin(&self) {
        self.shared.isolated.send_replace(None);
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        self.links.iter().for_each(|(_, task)| task.abort());
    }
}

impl Shared {
    fn names(&self) -> MutexGuard<'_, HashMap<String, usize>> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of the member that sent this start of a connection.
    fn sender(&self, head: &[u8]) -> Option<usize> {
        let lower = head.to_ascii_lowercase();
        let start = lower.windows(FROM.len()).position(|window| window == FROM)? + FROM.len();
        let name: Vec<u8> = lower[start..].iter().copied().take_while(u8::is_ascii_hexdigit).collect();
        self.names().get(std::str::from_utf8(&name).ok()?).copied()
    }
}

async fn forward(listener: StdListener, target: u16, number: usize, shared: Arc<Shared>) {
    let Ok(listener) = TcpListener::from_std(listener) else { return };
    // All connections end with this task.
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                if let Ok((client, _)) = accepted {
                    let shared = shared.clone();
                    connections.spawn(async move {
                        let _ = connection(client, target, number, &shared).await;
                    });
                }
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn connection(mut client: TcpStream, target: u16, number: usize, shared: &Shared) -> io::Result<()> {
    let mut isolated = shared.isolated.subscribe();
    let mut head = Vec::new();
    while !head.windows(4).any(|window| window == b"\r\n\r\n") && head.len() < HEAD {
        if client.read_buf(&mut head).await? == 0 {
            return Ok(());
        }
    }
    let mut server = TcpStream::connect((Ipv4Addr::LOCALHOST, target)).await?;
    server.write_all(&head).await?;
    let is_cut = |isolated: &Option<usize>| {
        // The sender is looked up each time, because ids are known only after the start.
        isolated.is_some_and(|cut| cut == number || shared.sender(&head) == Some(cut))
    };
    tokio::select! {
        _ = isolated.wait_for(is_cut) => Ok(()),
        copied = io::copy_bidirectional(&mut client, &mut server) => copied.map(drop),
    }
}
