//! The lock until the end of the body.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "common/layers.rs"]
mod common;

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use common::*;
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body::{Body as _, Frame};
use http_body_util::BodyExt as _;
use leasehold_api::{Error, ErrorKind, Lock, LockExt as _, LossReason};
use leasehold_memory::MemoryStore;
use leasehold_tower::{Held, LockBody, LockLayer, OnLost, Until};
use test_bounds::within;
use tokio::sync::mpsc;
use tower::{Layer as _, service_fn};

type Item = Result<Frame<Bytes>, &'static str>;

/// A body with frames from the test. With `known_end` it reports its end once the channel is closed and empty, like
/// bodies of a known length.
struct Fed {
    frames: mpsc::UnboundedReceiver<Item>,
    known_end: bool,
}

impl http_body::Body for Fed {
    type Data = Bytes;
    type Error = &'static str;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Item>> {
        self.frames.poll_recv(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.known_end && self.frames.is_closed() && self.frames.is_empty()
    }
}

struct Setup {
    store: MemoryStore,
    lock: Arc<dyn Lock>,
    layer: LockLayer<OfPath>,
    frames: mpsc::UnboundedSender<Item>,
    response: Response<LockBody<Fed>>,
}

async fn answered(known_end: bool, change: impl FnOnce(LockLayer<OfPath>) -> LockLayer<OfPath>) -> Setup {
    let (store, lock) = memory();
    let layer = change(layer(&lock).until(Until::BodyEnd));
    let (frames, receiver) = mpsc::unbounded_channel();
    let body = Arc::new(std::sync::Mutex::new(Some(Fed { frames: receiver, known_end })));
    let handler = service_fn(move |_: Request<Body>| {
        let body = body.lock().unwrap().take().unwrap();
        async { Ok::<_, Infallible>(Response::new(body)) }
    });
    let response = send(&layer.layer(handler), get("/k")).await;
    Setup { store, lock, layer, frames, response }
}

impl Setup {
    async fn is_held(&self) -> bool {
        let is_held = self.lock.key("k").try_acquire().await.unwrap().is_none();
        assert_eq!(self.layer.stats().in_flight, usize::from(is_held));
        is_held
    }

    async fn next(&mut self) -> Option<Result<Frame<Bytes>, leasehold_tower::BoxError>> {
        self.response.body_mut().frame().await
    }
}

fn data(text: &'static str) -> Item {
    Ok(Frame::data(Bytes::from_static(text.as_bytes())))
}

#[tokio::test]
async fn the_end_of_the_body_releases() {
    let mut it = answered(false, |layer| layer).await;
    for part in ["a", "b"] {
        it.frames.send(data(part)).unwrap();
        assert_eq!(it.next().await.unwrap().unwrap().into_data().unwrap(), part);
        assert!(it.is_held().await);
    }
    let mut trailers = HeaderMap::new();
    trailers.insert("x-sum", HeaderValue::from_static("1"));
    it.frames.send(Ok(Frame::trailers(trailers.clone()))).unwrap();
    assert_eq!(it.next().await.unwrap().unwrap().into_trailers().unwrap(), trailers);
    let (closed, _) = mpsc::unbounded_channel();
    drop(std::mem::replace(&mut it.frames, closed));
    assert!(it.next().await.is_none());
    assert!(!it.is_held().await);
}

#[tokio::test]
async fn a_body_that_says_to_have_ended_releases_with_its_last_frame() {
    let mut it = answered(true, |layer| layer).await;
    it.frames.send(data("a")).unwrap();
    it.frames.send(data("b")).unwrap();
    let (closed, _) = mpsc::unbounded_channel();
    drop(std::mem::replace(&mut it.frames, closed));
    it.next().await.unwrap().unwrap();
    assert!(it.is_held().await);
    it.next().await.unwrap().unwrap();
    assert!(it.response.body().is_end_stream());
    assert!(!it.is_held().await, "nobody will ask for the end");
}

#[tokio::test]
async fn an_error_of_the_body_releases() {
    let mut it = answered(false, |layer| layer).await;
    it.frames.send(Err("cut")).unwrap();
    assert_eq!(it.next().await.unwrap().unwrap_err().to_string(), "cut");
    assert!(!it.is_held().await);
}

#[tokio::test]
async fn a_dropped_body_releases() {
    let mut it = answered(false, |layer| layer).await;
    it.frames.send(data("a")).unwrap();
    it.next().await.unwrap().unwrap();
    assert!(it.is_held().await);
    drop(it.response);
    it.lock.key("k").wait(LONG).acquire().await.unwrap().release().await.unwrap();
    it.layer.idle().await;
}

#[tokio::test]
async fn an_empty_body_is_released_with_the_response() {
    let (_, lock) = memory();
    let handler = service_fn(async |_: Request<Body>| Ok::<_, Infallible>(Response::new(Body::default())));
    let layer = layer(&lock).until(Until::BodyEnd);
    let response = send(&layer.layer(handler), get("/k")).await;
    assert_eq!(layer.stats().in_flight, 0);
    assert!(lock.key("k").try_acquire().await.unwrap().is_some());
    drop(response);
}

#[tokio::test]
async fn a_loss_cuts_the_body_with_an_error() {
    let mut it = answered(false, |layer| layer).await;
    it.frames.send(data("a")).unwrap();
    it.next().await.unwrap().unwrap();
    assert!(it.store.lose(&key("k"), LossReason::ForcedRelease));
    it.frames.send(data("b")).unwrap();
    let error = it.next().await.unwrap().unwrap_err();
    assert_eq!(error.downcast_ref::<Error>().map(Error::kind), Some(ErrorKind::Lost));
    assert!(it.next().await.is_none(), "and nothing after it");
    assert_eq!((it.layer.stats().lost, it.layer.stats().in_flight), (1, 0));
}

#[tokio::test]
async fn a_loss_wakes_a_body_that_waits() {
    let mut it = answered(false, |layer| layer).await;
    let store = it.store.clone();
    let mut next = Box::pin(it.response.body_mut().frame());
    begin(&mut next).await;
    assert!(store.lose(&key("k"), LossReason::ForcedRelease));
    let error = within(LONG, "not ended", next).await.unwrap().unwrap_err();
    assert!(error.is::<Error>());
}

#[tokio::test]
async fn told_of_a_loss_the_body_goes_on() {
    let mut it = answered(false, |layer| layer.on_lost(OnLost::Tell)).await;
    assert!(it.store.lose(&key("k"), LossReason::ForcedRelease));
    it.frames.send(data("b")).unwrap();
    assert_eq!(it.next().await.unwrap().unwrap().into_data().unwrap(), "b");
}

#[tokio::test]
async fn a_slow_reader_holds_the_lock_for_a_minute_at_the_most() {
    tokio::time::pause();
    let mut it = answered(false, |layer| layer).await;
    let begun = tokio::time::Instant::now();
    let error = it.next().await.unwrap().unwrap_err();
    assert!(error.is::<Error>(), "{error}");
    let lasted = begun.elapsed();
    assert!((Duration::from_secs(59)..Duration::from_secs(62)).contains(&lasted), "{lasted:?}");
    it.lock.key("k").wait(LONG).acquire().await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn sizes_are_those_of_the_body_inside() {
    let (_, lock) = memory();
    let handler = service_fn(async |_: Request<Body>| Ok::<_, Infallible>(Response::new(Body::from("four"))));
    for until in [Until::Response, Until::BodyEnd] {
        let response = send(&layer(&lock).until(until).layer(handler), get("/k")).await;
        assert_eq!(response.body().size_hint().exact(), Some(4));
        assert_eq!(text(response).await, "four");
        lock.key("k").wait(LONG).acquire().await.unwrap().release().await.unwrap();
    }
}

/// A body that fails but could continue, and records at its drop whether the lock was held.
struct Owner {
    held: Held,
    was_held_at_drop: Arc<AtomicBool>,
    last: Option<Item>,
}

impl http_body::Body for Owner {
    type Data = Bytes;
    type Error = &'static str;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Item>> {
        Poll::Ready(self.last.take())
    }

    fn is_end_stream(&self) -> bool {
        false
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.was_held_at_drop.store(self.held.validity().is_held(), Ordering::SeqCst);
    }
}

#[tokio::test]
async fn what_the_body_owns_is_gone_before_the_lock_is() {
    let (_, lock) = memory();
    for last in [None, Some(Err("cut"))] {
        let was_held_at_drop = Arc::new(AtomicBool::new(false));
        let (seen, end) = (
            Arc::clone(&was_held_at_drop),
            last.map(|end: Result<(), _>| end.map(|()| Frame::data(Bytes::new()))),
        );
        let end = Arc::new(std::sync::Mutex::new(end));
        let handler = service_fn(move |request: Request<Body>| {
            let held = request.extensions().get::<Held>().unwrap().clone();
            let body = Owner { held, was_held_at_drop: Arc::clone(&seen), last: end.lock().unwrap().take() };
            async { Ok::<_, Infallible>(Response::new(body)) }
        });
        let layer = layer(&lock).until(Until::BodyEnd);
        let mut response = send(&layer.layer(handler), get("/k")).await;
        let frame = response.body_mut().frame().await;
        assert_eq!(frame.is_some_and(|frame| frame.is_err()), last.is_some());
        drop(response);
        assert!(was_held_at_drop.load(Ordering::SeqCst), "{last:?}: the lock went first");
        lock.key("k").wait(LONG).acquire().await.unwrap().release().await.unwrap();
    }
}

#[tokio::test]
async fn nothing_of_a_body_runs_without_the_lock_after_it_has_failed() {
    let mut it = answered(false, |layer| layer).await;
    it.frames.send(Err("cut")).unwrap();
    it.frames.send(data("after")).unwrap();
    assert_eq!(it.next().await.unwrap().unwrap_err().to_string(), "cut");
    assert!(!it.is_held().await);
    assert!(it.next().await.is_none(), "what comes after would be without the lock");
    assert!(it.response.body().is_end_stream());
}
