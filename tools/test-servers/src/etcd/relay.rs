//! A proxy that ends HTTP/2 itself: its clients stay connected while the server behind it changes.

use std::net::{Ipv4Addr, TcpListener as StdListener};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use http::uri::{Authority, Scheme};
use http::{HeaderValue, Request, Response};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpListener;
use tokio::task::{AbortHandle, JoinSet};

use crate::{Outcome, admin, or_panic};

/// A proxy on loopback for gRPC without encryption. It runs on its own threads. If dropped, it ends with all its
/// connections.
#[derive(Debug)]
pub struct Relay {
    shared: Arc<Shared>,
    port: u16,
    task: AbortHandle,
}

#[derive(Debug)]
struct Shared {
    target: Mutex<String>,
    accepted: Mutex<u64>,
    client: Client<HttpConnector, Incoming>,
}

type Body = BoxBody<Bytes, hyper::Error>;

impl Relay {
    /// Starts a proxy in front of a server, such as `127.0.0.1:2379`.
    ///
    /// # Panics
    ///
    /// If no port is free.
    #[track_caller]
    #[must_use]
    pub fn start(target: impl Into<String>) -> Self {
        or_panic(Self::try_start(target.into()))
    }

    fn try_start(target: String) -> Outcome<Self> {
        let failed = |error: std::io::Error| format!("cannot listen for clients: {error}");
        let listener = StdListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let port = listener.local_addr().map_err(failed)?.port();
        let _inside = admin::runtime().enter();
        let client = Client::builder(TokioExecutor::new()).http2_only(true).build_http();
        let shared = Arc::new(Shared { target: Mutex::new(target), accepted: Mutex::new(0), client });
        let task = admin::runtime().spawn(serve(listener, shared.clone())).abort_handle();
        Ok(Self { shared, port, task })
    }

    /// Returns `127.0.0.1:PORT` of the proxy.
    #[must_use]
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Sends later requests to another server. Open connections of clients stay.
    pub fn retarget(&self, target: impl Into<String>) {
        *lock(&self.shared.target) = target.into();
    }

    /// Returns the number of connections that clients have opened.
    #[must_use]
    pub fn accepted(&self) -> u64 {
        *lock(&self.shared.accepted)
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(listener: StdListener, shared: Arc<Shared>) {
    let Ok(listener) = TcpListener::from_std(listener) else { return };
    // All connections end with this task.
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((client, _)) = accepted else { continue };
                *lock(&shared.accepted) += 1;
                let shared = shared.clone();
                let service = service_fn(move |request| forward(request, shared.clone()));
                let http = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                connections.spawn(http.serve_connection(TokioIo::new(client), service));
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

/// Forwards one call. If the server does not take it, replies with the status `UNAVAILABLE`, as proxies do.
async fn forward(request: Request<Incoming>, shared: Arc<Shared>) -> Result<Response<Body>, hyper::Error> {
    let (mut head, body) = request.into_parts();
    let target = lock(&shared.target).clone();
    let mut uri = head.uri.into_parts();
    uri.scheme = Some(Scheme::HTTP);
    uri.authority = target.parse::<Authority>().ok();
    let Ok(uri) = uri.try_into() else { return Ok(unavailable()) };
    head.uri = uri;
    match shared.client.request(Request::from_parts(head, body)).await {
        Ok(response) => Ok(response.map(BodyExt::boxed)),
        Err(_) => Ok(unavailable()),
    }
}

fn unavailable() -> Response<Body> {
    let mut response = Response::new(Empty::new().map_err(|never| match never {}).boxed());
    let headers = response.headers_mut();
    headers.insert("content-type", HeaderValue::from_static("application/grpc"));
    headers.insert("grpc-status", HeaderValue::from_static("14"));
    headers.insert("grpc-message", HeaderValue::from_static("the server behind the proxy is down"));
    response
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
