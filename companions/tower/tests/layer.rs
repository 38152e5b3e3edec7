//! The layer on the memory store: its effect on requests.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "common/layers.rs"]
mod common;

use std::convert::Infallible;
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use common::*;
use http::{HeaderValue, Request, Response, StatusCode, header};
use http_body_util::BodyExt as _;
use leasehold_api::{ErrorKind, Lock, LockExt as _, LossReason, Validity};
use leasehold_memory::{ClientSetup, Fault, MemoryStore, Op};
use leasehold_tower::{Held, LockLayer, OnGone, OnLost};
use test_bounds::within;
use tokio::task::JoinSet;
use tower::limit::ConcurrencyLimitLayer;
use tower::{Layer as _, Service as _, ServiceBuilder, ServiceExt as _, service_fn};

async fn is_free(lock: &Arc<dyn Lock>, name: &str) -> bool {
    lock.key(name).try_acquire().await.unwrap().is_some()
}

/// Waits until another client can acquire the key, at once or after a release in the background.
async fn becomes_free(lock: &Arc<dyn Lock>, name: &str) {
    lock.key(name).wait(LONG).acquire().await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn the_handlers_response_is_the_same_with_and_without_the_layer() {
    let (_, lock) = memory();
    for status in [200, 204, 303, 400, 404, 409, 422, 500, 503] {
        let handler = service_fn(move |request: Request<Body>| async move {
            let body = request.into_body().collect().await.unwrap().to_bytes();
            let mut response = Response::new(Body::from(body));
            *response.status_mut() = StatusCode::from_u16(status).unwrap();
            response.headers_mut().append("x-a", HeaderValue::from_static("1"));
            response.headers_mut().append("x-a", HeaderValue::from_static("2"));
            Ok::<_, Infallible>(response)
        });
        let request = || Request::post("/k").body(Body::from("\u{0}bytes\u{ff}")).unwrap();
        let plain = send(&handler, request()).await;
        let locked = send(&layer(&lock).layer(handler), request()).await;
        assert_eq!((plain.status(), plain.headers()), (locked.status(), locked.headers()));
        assert_eq!(text(plain).await, text(locked).await);
        assert!(is_free(&lock, "k").await, "released before the response is given on");
    }
}

#[tokio::test]
async fn errors_of_the_service_pass_through_and_release_the_lock() {
    let (_, lock) = memory();
    let failing = service_fn(|_: Request<Body>| async { Err::<Response<Body>, _>("broken") });
    let answer = layer(&lock).layer(failing).oneshot(get("/k")).await;
    assert_eq!(answer.err(), Some("broken"));
    assert!(is_free(&lock, "k").await);
}

#[tokio::test]
async fn a_panicked_handler_releases_and_is_not_polled_again() {
    let (_, lock) = memory();
    let polls = Arc::new(AtomicUsize::new(0));
    for policy in [OnGone::Finish, OnGone::Cancel] {
        let counter = Arc::clone(&polls);
        let panicking = service_fn(move |_: Request<Body>| {
            let counter = Arc::clone(&counter);
            poll_fn(move |_| -> Poll<Result<Response<Body>, Infallible>> {
                counter.fetch_add(1, Ordering::SeqCst);
                panic!("a handler of a test panics")
            })
        });
        let layer = layer(&lock).on_gone(policy);
        let work = tokio::spawn(layer.layer(panicking).oneshot(get("/k")));
        assert!(work.await.unwrap_err().is_panic(), "the panic is the caller's to see");
        becomes_free(&lock, "k").await;
        layer.idle().await;
    }
    assert_eq!(polls.load(Ordering::SeqCst), 2, "once for each request");
}

#[tokio::test]
async fn the_handler_of_a_client_that_left_finishes_under_the_lock() {
    let (_, lock) = memory();
    let (layer, gate) = (layer(&lock), Gate::new());
    let service = layer.layer(gate.service());
    let mut request = Box::pin(service.clone().oneshot(get("/k")));
    begin(&mut request).await;
    gate.reached().await;
    drop(request);
    assert_eq!((layer.stats().in_flight, gate.ended()), (1, 0));
    assert!(!is_free(&lock, "k").await, "the handler runs on, and has the lock");
    // A retry waits for the handler.
    let retry = tokio::spawn(service.oneshot(get("/k")));
    until("the retry waits", || layer.stats().waiting == 1).await;
    let mut idle = Box::pin(layer.idle());
    begin(&mut idle).await;
    gate.open();
    gate.reached().await;
    assert_eq!(gate.ended(), 1, "the first has ended before the second began");
    assert!(gate.was_held_at_drop());
    gate.open();
    assert_eq!(text(retry.await.unwrap().unwrap()).await, "done");
    within(LONG, "not ended", idle).await;
    assert!(is_free(&lock, "k").await);
    assert_eq!(layer.stats().in_flight, 0);
}

#[tokio::test]
async fn idle_waits_for_handlers_whose_client_left() {
    let (_, lock) = memory();
    let (layer, gate) = (layer(&lock), Gate::new());
    let mut request = Box::pin(layer.layer(gate.service()).oneshot(get("/k")));
    begin(&mut request).await;
    drop(request);
    let mut idle = Box::pin(layer.idle());
    begin(&mut idle).await;
    gate.open();
    idle.await;
    assert_eq!(gate.ended(), 1);
    assert!(is_free(&lock, "k").await, "released by then");
}

#[tokio::test]
async fn a_cancelled_handler_is_dropped_before_its_lock() {
    let (_, lock) = memory();
    let (layer, gate) = (layer(&lock).on_gone(OnGone::Cancel), Gate::new());
    let mut request = Box::pin(layer.layer(gate.service()).oneshot(get("/k")));
    begin(&mut request).await;
    gate.reached().await;
    drop(request);
    assert!(gate.was_held_at_drop(), "the lock outlives the handler");
    assert_eq!(gate.ended(), 0);
    becomes_free(&lock, "k").await;
    layer.idle().await;
}

#[tokio::test]
async fn a_timeout_around_the_layer_counts_as_a_client_that_left() {
    let (_, lock) = memory();
    let (locks, gate) = (layer(&lock), Gate::new());
    let service = ServiceBuilder::new()
        .timeout(Duration::from_millis(10))
        .layer(locks.clone())
        .service(gate.service::<Body>().map_err(|never: Infallible| -> tower::BoxError { match never {} }));
    let error = service.oneshot(get("/k")).await.unwrap_err();
    assert!(error.is::<tower::timeout::error::Elapsed>(), "{error}");
    assert!(!is_free(&lock, "k").await);
    gate.open();
    locks.idle().await;
    assert_eq!(gate.ended(), 1);
    assert!(is_free(&lock, "k").await);
}

#[tokio::test]
async fn a_client_that_leaves_while_waiting_gives_up_its_place() {
    let (_, lock) = memory();
    let (layer, gate) = (layer(&lock), Gate::new());
    let service = layer.layer(gate.service());
    let held = lock.key("k").acquire().await.unwrap();
    let mut leaving = Box::pin(service.clone().oneshot(get("/k")));
    begin(&mut leaving).await;
    let mut staying = Box::pin(service.oneshot(get("/k")));
    begin(&mut staying).await;
    assert_eq!(layer.stats().waiting, 2);
    drop(leaving);
    held.release().await.unwrap();
    gate.open();
    assert_eq!(text(staying.await.unwrap()).await, "done");
    let stats = layer.stats();
    assert_eq!((stats.cancelled, stats.granted, stats.waiting), (1, 1, 0));
    assert_eq!(gate.ended(), 1, "only one of them was called");
}

#[test]
fn without_a_runtime_the_handler_is_dropped_without_a_panic() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let gate = Gate::new();
    let (_, lock) = runtime.block_on(async { memory() });
    let mut request = Box::pin(layer(&lock).layer(gate.service()).oneshot(get("/k")));
    runtime.block_on(async {
        begin(&mut request).await;
        gate.reached().await;
    });
    drop(runtime);
    drop(request);
    assert_eq!(gate.ended(), 0);
}

#[tokio::test]
async fn a_handler_whose_client_left_runs_in_the_requests_span() {
    let _subscriber = tracing::subscriber::set_default(tracing_subscriber::registry());
    let (_, lock) = memory();
    let (sent, seen) = tokio::sync::oneshot::channel();
    let sent = Arc::new(std::sync::Mutex::new(Some(sent)));
    let gate = Arc::new(tokio::sync::Notify::new());
    let opened = Arc::clone(&gate);
    let handler = service_fn(move |_: Request<Body>| {
        let (sent, opened) = (sent.lock().unwrap().take().unwrap(), Arc::clone(&opened));
        async move {
            opened.notified().await;
            sent.send(tracing::Span::current().metadata().map(tracing::Metadata::name)).unwrap();
            Ok::<_, Infallible>(Response::new(Body::default()))
        }
    });
    let layer = layer(&lock);
    let span = tracing::info_span!("request");
    let mut request =
        Box::pin(tracing::Instrument::instrument(layer.layer(handler).oneshot(get("/k")), span));
    begin(&mut request).await;
    drop(request);
    gate.notify_one();
    assert_eq!(seen.await.unwrap(), Some("request"));
}

#[tokio::test]
async fn a_refused_request_is_answered_with_a_problem() {
    let store = MemoryStore::new();
    let client = store.client_with(ClientSetup::new()).unwrap();
    let lock: Arc<dyn Lock> = Arc::new(client.lock);
    let gate = Gate::new();
    let kind = async |response: Response<_>| {
        assert_eq!(response.headers()[header::CONTENT_TYPE], "application/problem+json");
        let retry =
            response.headers().get(header::RETRY_AFTER).map(|after| after.to_str().unwrap().to_owned());
        let status = response.status().as_u16();
        let problem: serde_json::Value = serde_json::from_str(&text(response).await).unwrap();
        assert_eq!(problem["status"], status);
        (status, problem["type"].as_str().unwrap().rsplit_once(':').unwrap().1.to_owned(), retry)
    };
    let said = |status, kind: &str, retry: Option<&str>| (status, kind.to_owned(), retry.map(str::to_owned));

    let held = lock.key("k").acquire().await.unwrap();
    let layers = [layer(&lock).fail_fast(), layer(&lock).wait(Duration::from_millis(1))];
    for layer in layers {
        let service = layer.layer(gate.service());
        assert_eq!(kind(send(&service, get("/k")).await).await, said(503, "contended", Some("1")));
        assert_eq!(layer.stats().contended, 1);
    }
    for status in [409, 423, 429] {
        let layer = layer(&lock).fail_fast().contended(StatusCode::from_u16(status).unwrap());
        let response = send(&layer.layer(gate.service()), get("/k")).await;
        assert_eq!(kind(response).await, said(status, "contended", Some("1")));
    }
    let layer_ok = layer(&lock).fail_fast().contended(StatusCode::OK);
    assert_eq!(
        send(&layer_ok.layer(gate.service()), get("/k")).await.status(),
        503,
        "no success for a refusal"
    );
    drop(held);

    // A waiting request retries an unavailable store within its wait.
    let layer = layer(&lock).fail_fast();
    let service = layer.layer(gate.service());
    client.faults.script(Op::Acquire, Fault::Refuse(ErrorKind::Unavailable));
    assert_eq!(kind(send(&service, get("/down")).await).await, said(503, "lock-unavailable", Some("1")));
    client.faults.script(Op::Acquire, Fault::Refuse(ErrorKind::PermissionDenied));
    assert_eq!(kind(send(&service, get("/down")).await).await, said(503, "lock-unavailable", None));
    assert_eq!(kind(send(&service, get("/")).await).await, said(400, "no-key", None));
    lock.close().await.unwrap();
    assert_eq!(kind(send(&service, get("/k")).await).await, said(503, "lock-unavailable", Some("1")));
    let stats = layer.stats();
    assert_eq!((stats.unavailable, stats.no_key, stats.granted, stats.waiting), (3, 1, 0, 0));
    assert!(!gate.has_begun(), "the handler was never called");
}

#[tokio::test]
async fn a_failed_release_is_not_a_failed_response() {
    let store = MemoryStore::new();
    let client = store.client_with(ClientSetup::new()).unwrap();
    let lock: Arc<dyn Lock> = Arc::new(client.lock);
    let layer = layer(&lock).release_within(Duration::from_millis(20));
    let service = layer.layer(answering(StatusCode::CREATED));
    for (n, fault) in [Fault::Error(ErrorKind::Unavailable), Fault::LoseReplyHang].into_iter().enumerate() {
        client.faults.script(Op::Release, fault);
        let response = send(&service, get("/k")).await;
        assert_eq!(response.status(), StatusCode::CREATED);
        assert_eq!(text(response).await, "answer");
        assert_eq!(layer.stats().release_failed, n as u64 + 1, "{fault:?}");
        becomes_free(&lock, "k").await;
    }
    assert_eq!((layer.stats().lost, layer.stats().in_flight), (0, 0));
}

#[tokio::test]
async fn a_loss_stops_the_handler_before_its_next_step() {
    let (store, lock) = memory();
    let (layer, gate) = (layer(&lock), Gate::new());
    let mut request = Box::pin(layer.layer(gate.service()).oneshot(get("/k")));
    begin(&mut request).await;
    gate.reached().await;
    assert!(store.lose(&key("k"), LossReason::ForcedRelease));
    gate.open();
    let response = request.await.unwrap();
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(!response.headers().contains_key(header::RETRY_AFTER), "what was done is not known");
    assert!(text(response).await.contains("lock-lost"));
    assert_eq!(gate.ended(), 0);
    assert_eq!((layer.stats().lost, layer.stats().release_failed, layer.stats().in_flight), (1, 0, 0));
}

#[tokio::test]
async fn a_handler_notified_of_a_loss_goes_on() {
    let (store, lock) = memory();
    let (layer, gate) = (layer(&lock).on_lost(OnLost::Tell), Gate::new());
    let mut request = Box::pin(layer.layer(gate.service()).oneshot(get("/k")));
    begin(&mut request).await;
    gate.reached().await;
    assert!(store.lose(&key("k"), LossReason::ForcedRelease));
    gate.open();
    assert_eq!(text(request.await.unwrap()).await, "done");
    assert!(!gate.was_held_at_drop(), "it could see the loss");
    assert_eq!((layer.stats().lost, layer.stats().in_flight), (1, 0));
}

/// The end of a request must not wake its own connection, because the extra poll would be useless.
#[tokio::test]
async fn the_watch_for_a_loss_is_not_woken_by_the_release() {
    let (_, lock) = memory();
    let handler = service_fn(|_: Request<Body>| {
        let mut polled = false;
        poll_fn(move |_| match std::mem::replace(&mut polled, true) {
            false => Poll::Pending,
            true => Poll::Ready(Ok::<_, Infallible>(Response::new(Body::default()))),
        })
    });
    let mut request = tokio_test::task::spawn(layer(&lock).layer(handler).oneshot(get("/k")));
    assert!(request.poll().is_pending());
    assert!(request.poll().is_ready());
    assert!(!request.is_woken());
}

#[tokio::test]
async fn a_maximum_hold_stops_the_handler() {
    tokio::time::pause();
    let (_, lock) = memory();
    let (layer, gate) = (layer(&lock).max_hold(Duration::from_secs(3)), Gate::new());
    let response = send(&layer.layer(gate.service()), get("/k")).await;
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!((gate.ended(), layer.stats().lost), (0, 1));
    becomes_free(&lock, "k").await;
}

#[tokio::test]
async fn a_handler_sees_its_lock_and_afterwards_that_it_has_ended() {
    let (_, lock) = memory();
    let (sent, mut seen) = tokio::sync::mpsc::unbounded_channel();
    let handler = service_fn(move |request: Request<Body>| {
        let held = request.extensions().get::<Held>().unwrap().clone();
        assert_eq!((held.key(), held.validity()), (&key("k"), Validity::Valid));
        assert!(held.token().is_some());
        sent.send(held).unwrap();
        async { Ok::<_, Infallible>(Response::new(Body::default())) }
    });
    send(&layer(&lock).layer(handler), get("/k")).await;
    let held = seen.recv().await.unwrap();
    assert_eq!(held.validity(), Validity::Ended);
    held.ended().await;
}

#[tokio::test]
async fn the_same_key_in_a_layer_inside_is_refused_at_once() {
    let (_, lock) = memory();
    // Waiting would take a minute and exceed the test's limit.
    let (outer, inner) = (layer(&lock), layer(&lock));
    let service = outer.layer(inner.layer(answering(StatusCode::OK)));
    let response = within(LONG / 2, "not ended", send(&service, get("/k"))).await;
    assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
    assert!(text(response).await.contains("nested-lock"));
    assert_eq!((inner.stats().nested, inner.stats().granted, outer.stats().granted), (1, 0, 1));
    assert!(is_free(&lock, "k").await);

    // The same with another key between the two. Another key or another lock alone is allowed.
    let other = || LockLayer::new(Arc::clone(&lock), |_: &Request<Body>| leasehold_api::key!["other"]);
    let service = layer(&lock).layer(other().layer(layer(&lock).layer(answering(StatusCode::OK))));
    assert_eq!(send(&service, get("/k")).await.status(), StatusCode::INTERNAL_SERVER_ERROR);
    let service = layer(&lock).layer(other().layer(answering(StatusCode::OK)));
    assert_eq!(send(&service, get("/k")).await.status(), StatusCode::OK);
    let (_, elsewhere) = memory();
    let service = layer(&lock).layer(layer(&elsewhere).layer(answering(StatusCode::OK)));
    assert_eq!(send(&service, get("/k")).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn those_who_wait_for_the_lock_take_no_permit_inside() {
    let (_, lock) = memory();
    let (layer, gate) = (layer(&lock), Gate::new());
    let service = layer.layer(ConcurrencyLimitLayer::new(2).layer(gate.service()));
    let mut hot = JoinSet::new();
    for _ in 0..5 {
        hot.spawn(service.clone().oneshot(get("/hot")));
    }
    gate.reached().await;
    until("four waiting", || layer.stats().waiting == 4).await;
    let cold = tokio::spawn(service.oneshot(get("/cold")));
    // One permit was taken, so the four waiting requests have none.
    gate.reached().await;
    (0..6).for_each(|_| gate.open());
    assert_eq!(cold.await.unwrap().unwrap().status(), StatusCode::OK);
    assert!(hot.join_all().await.into_iter().all(|answer| answer.unwrap().status() == StatusCode::OK));
}

#[tokio::test]
async fn a_service_that_is_not_ready_is_not_called() {
    #[derive(Clone)]
    struct Late(usize);
    impl tower::Service<Request<Body>> for Late {
        type Response = Response<Body>;
        type Error = Infallible;
        type Future = std::future::Ready<Result<Response<Body>, Infallible>>;
        fn poll_ready(&mut self, cx: &mut std::task::Context<'_>) -> Poll<Result<(), Infallible>> {
            self.0 += 1;
            if self.0 < 3 {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            Poll::Ready(Ok(()))
        }
        fn call(&mut self, _: Request<Body>) -> Self::Future {
            assert!(self.0 >= 3, "called before it was ready");
            std::future::ready(Ok(Response::new(Body::default())))
        }
    }
    let (_, lock) = memory();
    let mut service = layer(&lock).layer(Late(0));
    assert!(poll_fn(|cx| Poll::Ready(service.poll_ready(cx).is_ready())).await, "the layer is always ready");
    assert_eq!(service.call(get("/k")).await.unwrap().status(), StatusCode::OK);
}

#[tokio::test]
async fn beyond_max_waiters_requests_are_refused_at_once() {
    let (_, lock) = memory();
    let (layer, gate) = (layer(&lock).max_waiters(3), Gate::new());
    let service = layer.layer(gate.service());
    let held = lock.key("k").acquire().await.unwrap();
    let mut waiting = JoinSet::new();
    for _ in 0..3 {
        waiting.spawn(service.clone().oneshot(get("/k")));
    }
    until("three waiting", || layer.stats().waiting == 3).await;
    let refused = send(&service, get("/k")).await;
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(refused.headers()[header::RETRY_AFTER], "1");
    assert!(text(refused).await.contains("too-many-waiters"));
    held.release().await.unwrap();
    (0..3).for_each(|_| gate.open());
    assert!(waiting.join_all().await.into_iter().all(|answer| answer.unwrap().status() == StatusCode::OK));
    assert_eq!((layer.stats().too_many, layer.stats().granted), (1, 3));
}

#[tokio::test]
async fn settings_that_cannot_be_used_are_told_at_start_up() {
    let (_, lock) = memory();
    let good = || layer(&lock);
    assert!(good().ttl(Duration::from_secs(3)).max_hold(LONG).label("spend").check().is_ok());
    for bad in [
        good().ttl(Duration::ZERO),
        good().max_hold(Duration::ZERO),
        good().label("x".repeat(300)),
        good().max_waiters(0),
    ] {
        assert_eq!(bad.check().unwrap_err().kind(), ErrorKind::InvalidOption);
    }
    let directory = tempfile::tempdir().unwrap();
    let file: Arc<dyn Lock> = Arc::new(leasehold_file::connect(directory.path()).unwrap());
    let error = layer(&file).ttl(Duration::from_secs(3)).check().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}

/// A valid key might be unusable for the store: too long for its namespace, or without a number.
#[tokio::test]
async fn a_key_that_the_store_does_not_take_is_the_client_s_fault() {
    let (_, lock) = memory();
    let lock: Arc<dyn Lock> = Arc::new(leasehold_api::Namespaced::new(lock, "tenant").unwrap());
    let long = format!("/{}", "x".repeat(leasehold_api::MAX_KEY_BYTES));
    for layer in [layer(&lock), layer(&lock).fail_fast()] {
        let response = send(&layer.layer(answering(StatusCode::OK)), get(&long)).await;
        assert_eq!(response.status(), StatusCode::BAD_REQUEST);
        let answer = text(response).await;
        assert!(answer.contains("no-key") && !answer.contains("xxx"), "{answer}");
        let stats = layer.stats();
        assert_eq!((stats.no_key, stats.unavailable, stats.waiting), (1, 0, 0));
    }
}
