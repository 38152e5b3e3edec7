//! Helpers of the tests.

#![allow(clippy::unwrap_used, dead_code, unreachable_pub)] // A failed `unwrap` fails the test.

use std::convert::Infallible;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use leasehold_api::{Error, Lock, LockKey};
use leasehold_memory::MemoryStore;
use leasehold_tower::{Held, LockLayer};
use test_bounds::within;
use tokio::sync::Semaphore;
use tower::{Service, ServiceExt as _, service_fn};

/// Time limit that only a broken program reaches.
pub const LONG: Duration = Duration::from_secs(600);

pub type Body = Full<Bytes>;

pub fn memory() -> (MemoryStore, Arc<dyn Lock>) {
    let store = MemoryStore::new();
    let lock = Arc::new(store.client().unwrap());
    (store, lock)
}

pub fn key(text: &str) -> LockKey {
    LockKey::new(text).unwrap()
}

/// Returns the path without its slash as the key.
pub fn of_path<B>(request: &Request<B>) -> Result<LockKey, Error> {
    LockKey::from_parts([request.uri().path().trim_start_matches('/')])
}

pub type OfPath = fn(&Request<Body>) -> Result<LockKey, Error>;

pub fn layer(lock: &Arc<dyn Lock>) -> LockLayer<OfPath> {
    LockLayer::new(Arc::clone(lock), of_path as OfPath).wait(LONG)
}

pub fn get(path: &str) -> Request<Body> {
    Request::get(path).body(Body::default()).unwrap()
}

pub async fn text<B>(response: Response<B>) -> String
where
    B: http_body::Body<Data = Bytes>,
    B::Error: std::fmt::Debug,
{
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// A handler that waits at a gate and records its starts and ends.
#[derive(Clone, Debug)]
pub struct Gate(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    begun: Semaphore,
    opened: Semaphore,
    ended: Semaphore,
    was_held_at_drop: AtomicBool,
}

impl Gate {
    pub fn new() -> Self {
        let [begun, opened, ended] = [0; 3].map(Semaphore::new);
        Self(Arc::new(Inner { begun, opened, ended, was_held_at_drop: AtomicBool::new(false) }))
    }

    /// Lets one request pass.
    pub fn open(&self) {
        self.0.opened.add_permits(1);
    }

    /// Takes back one [`open`](Self::open) that no request has used.
    pub async fn pass(&self) {
        self.0.opened.acquire().await.unwrap().forget();
    }

    /// Waits until one more request has come to the gate.
    pub async fn reached(&self) {
        within(LONG, "no request came", self.0.begun.acquire()).await.unwrap().forget();
    }

    pub fn has_begun(&self) -> bool {
        self.0.begun.available_permits() > 0
    }

    /// Returns the number of requests that have passed and ended.
    pub fn ended(&self) -> usize {
        self.0.ended.available_permits()
    }

    /// Returns whether the lock was held when the last request ended or was dropped.
    pub fn was_held_at_drop(&self) -> bool {
        self.0.was_held_at_drop.load(Ordering::SeqCst)
    }

    pub fn service<B: Send + 'static>(
        &self,
    ) -> impl Service<Request<B>, Response = Response<Body>, Error = Infallible, Future: Send>
    + Clone
    + Send
    + use<B> {
        let gate = self.clone();
        service_fn(move |request: Request<B>| {
            let gate = gate.clone();
            async move {
                let _probe = Probe { held: request.extensions().get::<Held>().cloned(), gate: gate.clone() };
                gate.0.begun.add_permits(1);
                gate.0.opened.acquire().await.unwrap().forget();
                gate.0.ended.add_permits(1);
                Ok(Response::new(Body::from("done")))
            }
        })
    }
}

struct Probe {
    held: Option<Held>,
    gate: Gate,
}

impl Drop for Probe {
    fn drop(&mut self) {
        let is_held = self.held.as_ref().is_some_and(|held| held.validity().is_held());
        self.gate.0.was_held_at_drop.store(is_held, Ordering::SeqCst);
    }
}

/// Returns a handler that responds at once.
pub fn answering(
    status: StatusCode,
) -> impl Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future: Send>
+ Clone
+ Send
+ 'static {
    service_fn(move |_| async move {
        let mut response = Response::new(Body::from("answer"));
        *response.status_mut() = status;
        Ok(response)
    })
}

/// Sends one request through `service`.
pub async fn send<S, Req>(service: &S, request: Req) -> S::Response
where
    S: Service<Req, Error = Infallible> + Clone,
{
    let answer = within(LONG, "no answer", service.clone().oneshot(request)).await;
    answer.unwrap_or_else(|never| match never {})
}

/// Polls `future` once. Panics if it is ready.
pub async fn begin<F: Future + Unpin>(future: &mut F) {
    let mut future = pin!(future);
    std::future::poll_fn(|cx| {
        assert!(future.as_mut().poll(cx).is_pending(), "ready too early");
        Poll::Ready(())
    })
    .await;
}

/// Waits until `is_so` returns `true`.
pub async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let look = async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    within(LONG, format!("never {what}"), look).await;
}
