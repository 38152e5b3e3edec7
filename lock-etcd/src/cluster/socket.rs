//! TCP connections that are counted.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use http::Uri;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tonic::ConnectError;

use super::heard::Ears;
use crate::config::Address;

/// The time for a TCP connection. After half of it the request also goes to the next member.
const CONNECT_LIMIT: Duration = Duration::from_secs(1);

/// The connections with one member: how many were made, and how many are open.
#[derive(Debug, Default)]
pub(super) struct Connections {
    made: AtomicU64,
    open: AtomicU64,
}

impl Connections {
    pub(super) fn made(&self) -> u64 {
        self.made.load(Ordering::SeqCst)
    }

    pub(super) fn open(&self) -> u64 {
        self.open.load(Ordering::SeqCst)
    }
}

/// Connects to a member.
#[derive(Clone, Debug)]
pub(super) struct Connector {
    pub(super) address: Address,
    pub(super) connections: Arc<Connections>,
    pub(super) ears: Arc<Ears>,
}

impl Connector {
    async fn connect(self) -> io::Result<TokioIo<Socket>> {
        let connecting = TcpStream::connect((self.address.host.as_str(), self.address.port));
        let tcp = timeout(CONNECT_LIMIT, connecting)
            .await
            .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        tcp.set_nodelay(true)?;
        // Counts before the first byte can leave, because an unchanged number must prove that no byte has left.
        self.connections.open.fetch_add(1, Ordering::SeqCst);
        let socket = Socket { tcp, connections: Arc::clone(&self.connections) };
        self.connections.made.fetch_add(1, Ordering::SeqCst);
        self.ears.connected();
        Ok(TokioIo::new(socket))
    }
}

impl tower::Service<Uri> for Connector {
    type Response = TokioIo<Socket>;
    type Error = ConnectError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, ConnectError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), ConnectError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let connector = self.clone();
        Box::pin(async move { connector.connect().await.map_err(|error| ConnectError(Box::new(error))) })
    }
}

/// A connection that counts as open until it is dropped.
#[derive(Debug)]
pub(super) struct Socket {
    tcp: TcpStream,
    connections: Arc<Connections>,
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.connections.open.fetch_sub(1, Ordering::SeqCst);
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.tcp).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.tcp).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.tcp.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_shutdown(cx)
    }
}
