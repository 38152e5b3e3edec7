//! A socket of this process in front of one address. The driver connects only to the address its host name resolves to,
//! and verifies certificates against that name. Through the socket it reaches the chosen address.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::{fs, io, process};

use tokio::io::{AsyncWriteExt as _, copy};
use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio_util::task::AbortOnDropHandle;

/// Relays connections while it exists. Existing connections outlive it.
pub(crate) struct Relay {
    directory: PathBuf,
    accepting: AbortOnDropHandle<()>,
}

impl Relay {
    /// Connects to `address` and listens for the driver, which names sockets by `port`.
    pub(crate) async fn to(address: SocketAddr, port: u16) -> io::Result<Self> {
        let first = connected(address).await?;
        let directory = directory()?;
        let socket = format!("{}/.s.PGSQL.{port}", directory.display());
        let listener = UnixListener::bind(socket)?;
        let accepting = AbortOnDropHandle::new(tokio::spawn(accept(listener, address, first)));
        Ok(Self { directory, accepting })
    }

    /// Returns the directory for [`PgConnectOptions::socket`](sqlx::postgres::PgConnectOptions::socket).
    pub(crate) const fn directory(&self) -> &PathBuf {
        &self.directory
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.accepting.abort();
        if !cfg!(target_os = "linux") {
            let _ = fs::remove_dir_all(&self.directory);
        }
    }
}

/// Returns an abstract name on Linux, where a socket needs no file, and a private directory elsewhere.
fn directory() -> io::Result<PathBuf> {
    let name = format!("leasehold-{}-{:016x}", process::id(), fastrand::u64(..));
    if cfg!(target_os = "linux") {
        return Ok(PathBuf::from(format!("\0{name}")));
    }
    let directory = std::env::temp_dir().join(name);
    let mut builder = fs::DirBuilder::new();
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(&directory)?;
    Ok(directory)
}

async fn connected(address: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

async fn accept(listener: UnixListener, address: SocketAddr, first: TcpStream) {
    let mut first = Some(first);
    while let Ok((driver, _)) = listener.accept().await {
        // Refuses other processes, because any process on this machine can connect to an abstract name.
        let owner = driver.peer_cred().ok().and_then(|owner| owner.pid());
        if owner.is_some_and(|pid| u32::try_from(pid) != Ok(process::id())) {
            continue;
        }
        let server = match first.take() {
            Some(server) => server,
            // Closes the driver's connection if the server cannot be reached.
            None => match connected(address).await {
                Ok(server) => server,
                Err(_) => continue,
            },
        };
        tokio::spawn(forward(driver, server));
    }
}

/// Forwards data in both directions until one side closes its connection. Everything sent before is still
/// forwarded.
async fn forward(mut driver: UnixStream, mut server: TcpStream) {
    {
        let (mut from_driver, mut to_driver) = driver.split();
        let (mut from_server, mut to_server) = server.split();
        tokio::select! {
            _ = copy(&mut from_driver, &mut to_server) => {}
            _ = copy(&mut from_server, &mut to_driver) => {}
        }
    }
    let _ = server.shutdown().await;
}
