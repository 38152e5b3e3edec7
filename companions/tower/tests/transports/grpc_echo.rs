//! A gRPC service over raw bytes, on a real socket, with a layer around it.

#![allow(clippy::unwrap_used, unreachable_pub)] // A failed `unwrap` fails the test.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use bytes::{Buf as _, BufMut as _};
use http_body_util::BodyExt as _;
use leasehold_api::BoxFuture;
use leasehold_tower::{Grpc, KeyFor, LockLayer};
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::body::Body;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::server::{NamedService, ServerStreamingService, UnaryService};
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status, Streaming};

use crate::common::Gate;

/// A codec whose messages are bytes.
#[derive(Clone, Copy, Default)]
pub struct Raw;

impl Codec for Raw {
    type Encode = Vec<u8>;
    type Decode = Vec<u8>;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Vec<u8>;
    type Error = Status;

    fn encode(&mut self, item: Vec<u8>, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.put_slice(&item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Vec<u8>;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Vec<u8>>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining()).to_vec()))
    }
}

type Sender = mpsc::UnboundedSender<Result<Vec<u8>, Status>>;

/// The gate of the service, and its counters.
#[derive(Clone)]
pub struct Calls {
    pub gate: Gate,
    now: Arc<AtomicUsize>,
    most: Arc<AtomicUsize>,
    total: Arc<AtomicUsize>,
    stream: Arc<Mutex<Option<Sender>>>,
}

impl Calls {
    pub fn most_at_once(&self) -> usize {
        self.most.load(Ordering::SeqCst)
    }

    pub fn total(&self) -> usize {
        self.total.load(Ordering::SeqCst)
    }

    pub fn send(&self, message: &[u8]) {
        self.stream.lock().unwrap().as_ref().unwrap().send(Ok(message.to_vec())).unwrap();
    }

    pub fn end(&self) {
        *self.stream.lock().unwrap() = None;
    }
}

#[derive(Clone)]
struct Echo(Calls);

impl NamedService for Echo {
    const NAME: &'static str = "test.Echo";
}

impl tower::Service<http::Request<Body>> for Echo {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<http::Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let calls = self.0.clone();
        Box::pin(async move {
            let mut grpc = tonic::server::Grpc::new(Raw);
            let method = request.uri().path().rsplit('/').next().unwrap().to_owned();
            Ok(match method.as_str() {
                "Stream" => grpc.server_streaming(Streams(calls), request).await,
                _ => grpc.unary(Unary { calls, method }, request).await,
            })
        })
    }
}

struct Unary {
    calls: Calls,
    method: String,
}

impl UnaryService<Vec<u8>> for Unary {
    type Response = Vec<u8>;
    type Future = BoxFuture<'static, Result<Response<Vec<u8>>, Status>>;

    fn call(&mut self, request: Request<Vec<u8>>) -> Self::Future {
        let (calls, method) = (self.calls.clone(), self.method.clone());
        Box::pin(async move {
            calls.total.fetch_add(1, Ordering::SeqCst);
            let now = calls.now.fetch_add(1, Ordering::SeqCst) + 1;
            calls.most.fetch_max(now, Ordering::SeqCst);
            tokio::task::yield_now().await;
            if method == "Wait" {
                let gate = tower::ServiceExt::oneshot(calls.gate.service::<()>(), http::Request::new(()));
                gate.await.unwrap().into_body().collect().await.unwrap();
            }
            calls.now.fetch_sub(1, Ordering::SeqCst);
            match method.as_str() {
                "Fail" => Err(Status::failed_precondition("short")),
                _ => Ok(Response::new(request.into_inner())),
            }
        })
    }
}

struct Streams(Calls);

impl ServerStreamingService<Vec<u8>> for Streams {
    type Response = Vec<u8>;
    type ResponseStream = Pin<Box<UnboundedReceiverStream<Result<Vec<u8>, Status>>>>;
    type Future = std::future::Ready<Result<Response<Self::ResponseStream>, Status>>;

    fn call(&mut self, _: Request<Vec<u8>>) -> Self::Future {
        let (sender, receiver) = mpsc::unbounded_channel();
        *self.0.stream.lock().unwrap() = Some(sender);
        std::future::ready(Ok(Response::new(Box::pin(UnboundedReceiverStream::new(receiver)))))
    }
}

/// Starts a server with `layer` around all its services. Returns its counters and a client.
pub async fn serve<K: KeyFor<http::Request<Body>>>(layer: &LockLayer<K, Grpc>) -> (Calls, Channel) {
    let calls = Calls {
        gate: Gate::new(),
        now: Arc::default(),
        most: Arc::default(),
        total: Arc::default(),
        stream: Arc::default(),
    };
    let incoming = TcpIncoming::bind(([127, 0, 0, 1], 0).into()).unwrap();
    let address = incoming.local_addr().unwrap();
    let server = Server::builder().layer(layer.clone()).add_service(Echo(calls.clone()));
    tokio::spawn(server.serve_with_incoming(incoming));
    let client = Endpoint::try_from(format!("http://{address}")).unwrap().connect().await.unwrap();
    (calls, client)
}

fn request(holder: Option<&str>, message: Vec<u8>) -> Request<Vec<u8>> {
    let mut request = Request::new(message);
    if let Some(holder) = holder {
        request.metadata_mut().insert("x-holder", holder.parse().unwrap());
    }
    request
}

pub async fn call(
    client: Channel,
    method: &'static str,
    holder: Option<&'static str>,
    message: Vec<u8>,
) -> Result<Vec<u8>, Status> {
    let path = format!("/test.Echo/{method}").parse().unwrap();
    let mut client = tonic::client::Grpc::new(client);
    client.ready().await.unwrap();
    client.unary(request(holder, message), path, Raw).await.map(Response::into_inner)
}

pub async fn stream(client: Channel, holder: Option<&'static str>) -> Result<Streaming<Vec<u8>>, Status> {
    let mut client = tonic::client::Grpc::new(client);
    client.ready().await.unwrap();
    let path = "/test.Echo/Stream".parse().unwrap();
    client.server_streaming(request(holder, Vec::new()), path, Raw).await.map(Response::into_inner)
}
