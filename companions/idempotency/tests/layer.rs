//! The header `Idempotency-Key` over the store in memory: every response of the layer.
#![cfg(feature = "tower")]
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Path, Request};
use axum::http::request::Builder;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode};
use axum::routing::{any, post};
use leasehold_idempotency::{IdemTx, IdempotencyLayer, MemoryIdempotency, OnReplay, fingerprint};
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tower::ServiceExt as _;

struct App {
    router: Router,
    layer: MemoryLayer,
    /// Number of calls of a handler.
    calls: Arc<AtomicU64>,
    /// One permit for each `/slow` handler that can end.
    gate: Arc<Semaphore>,
}

type MemoryLayer = IdempotencyLayer<MemoryIdempotency>;

fn app(change: impl FnOnce(MemoryLayer) -> MemoryLayer) -> App {
    let layer = IdempotencyLayer::new(MemoryIdempotency::new(), |parts| {
        Some(parts.headers.get("x-user")?.to_str().ok()?.to_owned())
    });
    let (calls, gate) = (Arc::new(AtomicU64::new(0)), Arc::new(Semaphore::new(0)));
    let count = Arc::clone(&calls);
    let open = Arc::clone(&gate);
    let router = Router::new()
        .route(
            "/spend",
            any(async move |body: String| {
                let call = count.fetch_add(1, Ordering::SeqCst) + 1;
                let headers = [
                    ("content-type", "text/x-spent"),
                    ("location", "/spends/1"),
                    ("set-cookie", "secret=1"),
                    ("x-request-id", "7"),
                ];
                (StatusCode::CREATED, headers, format!("{call}: {body}"))
            }),
        )
        .route(
            "/slow",
            post(async move || {
                open.acquire().await.unwrap().forget();
                "done"
            }),
        )
        .route("/tx", post(async |_: IdemTx| "never"))
        .route("/refused", post(async || (StatusCode::PAYMENT_REQUIRED, "no funds")))
        .route(
            "/status/{status}",
            post(async |Path(status): Path<u16>| StatusCode::from_u16(status).unwrap()),
        )
        .route(
            "/later/{status}",
            post(async |Path(status): Path<u16>| {
                (StatusCode::from_u16(status).unwrap(), [("retry-after", "1")], "later")
            }),
        )
        .route(
            "/file",
            post(async || {
                let disposition =
                    HeaderValue::from_bytes("attachment; filename=\"é.csv\"".as_bytes()).unwrap();
                let headers = [
                    ("content-type", HeaderValue::from_static("text/csv")),
                    ("content-disposition", disposition),
                    ("cache-control", HeaderValue::from_static("no-store")),
                    ("x-request-id", HeaderValue::from_static("7")),
                ];
                (headers, "a,b")
            }),
        )
        .route("/packed", post(async || ([("content-encoding", "gzip")], "\u{1f}packed")))
        .route("/bytes", post(async || ([("etag", HeaderValue::from_bytes(b"\xff").unwrap())], "x")));
    let layer = change(layer);
    App { router: router.route_layer(layer.clone()), layer, calls, gate }
}

fn request(path: &str) -> Builder {
    Request::post(path).header("x-user", "42")
}

impl App {
    async fn send(&self, request: Builder, body: &'static str) -> (StatusCode, HeaderMap, String) {
        let request = request.body(Body::from(body)).unwrap();
        text(self.router.clone().oneshot(request).await.unwrap()).await
    }

    fn calls(&self) -> u64 {
        self.calls.load(Ordering::SeqCst)
    }
}

async fn text(response: Response<Body>) -> (StatusCode, HeaderMap, String) {
    let (parts, body) = response.into_parts();
    let body = to_bytes(body, 1 << 20).await.unwrap();
    (parts.status, parts.headers, String::from_utf8(body.to_vec()).unwrap())
}

fn is_problem((status, headers, body): &(StatusCode, HeaderMap, String), expected: u16, kind: &str) -> bool {
    let problem: serde_json::Value = serde_json::from_str(body).unwrap();
    headers["content-type"] == "application/problem+json"
        && status.as_u16() == expected
        && problem["status"] == expected
        && problem["type"] == format!("urn:leasehold:idempotency:{kind}")
        && !problem["detail"].as_str().unwrap().is_empty()
}

#[tokio::test]
async fn a_repetition_is_given_the_response_and_nothing_of_the_exchange() {
    let app = app(|layer| layer);
    let keyed = || request("/spend").header("idempotency-key", "abc");
    let (status, headers, body) = app.send(keyed(), "ten").await;
    assert_eq!((status, body.as_str()), (StatusCode::CREATED, "1: ten"));
    assert!(headers.contains_key("set-cookie") && !headers.contains_key("idempotent-replayed"));
    // The spelling of the draft is the same key.
    for again in [keyed(), request("/spend").header("idempotency-key", "\"abc\"; v=1")] {
        let (status, headers, body) = app.send(again, "ten").await;
        assert_eq!((status, body.as_str()), (StatusCode::CREATED, "1: ten"));
        assert_eq!(headers["content-type"], "text/x-spent");
        assert_eq!(headers["location"], "/spends/1");
        assert_eq!(headers["idempotent-replayed"], "true");
        assert!(!headers.contains_key("set-cookie") && !headers.contains_key("x-request-id"));
    }
    assert_eq!(app.calls(), 1);
}

#[tokio::test]
async fn what_is_wrong_with_a_key_is_a_problem_document_and_calls_no_handler() {
    let app = app(|layer| layer.max_request(10));
    let told = app.send(request("/spend"), "").await;
    assert!(is_problem(&told, 400, "key-missing"), "{told:?}");
    for bad in ["", "\"abc", "a,b"] {
        let told = app.send(request("/spend").header("idempotency-key", bad), "").await;
        assert!(is_problem(&told, 400, "key-invalid"), "{bad:?}: {told:?}");
    }
    let two = request("/spend").header("idempotency-key", "a").header("idempotency-key", "a");
    assert!(is_problem(&app.send(two, "").await, 400, "key-invalid"));
    let nobody = Request::post("/spend").header("idempotency-key", "a");
    assert!(is_problem(&app.send(nobody, "").await, 500, "no-principal"));
    let long = Request::post("/spend").header("x-user", "u".repeat(257)).header("idempotency-key", "a");
    assert!(is_problem(&app.send(long, "").await, 500, "no-principal"));
    let large = request("/spend").header("idempotency-key", "a");
    assert!(is_problem(&app.send(large, "12345678901").await, 413, "request-too-large"));
    assert_eq!(app.calls(), 0);
    let largest = request("/spend").header("idempotency-key", "a");
    assert_eq!(app.send(largest, "1234567890").await.0, StatusCode::CREATED);
}

#[tokio::test]
async fn another_request_under_the_key_is_unprocessable() {
    let app = app(|layer| layer);
    let keyed = |path| request(path).header("idempotency-key", "a");
    assert_eq!(app.send(keyed("/spend"), "ten").await.0, StatusCode::CREATED);
    for (other, body) in [
        (keyed("/spend"), "eleven"),
        (keyed("/spend?x=1"), "ten"),
        (keyed("/spend").method(Method::PATCH), "ten"),
        (keyed("/spend").header("content-type", "text/plain"), "ten"),
        (keyed("/slow"), "ten"),
    ] {
        assert!(is_problem(&app.send(other, body).await, 422, "key-reused"));
    }
    // Another client's key is separate.
    let other = Request::post("/spend").header("x-user", "43").header("idempotency-key", "a");
    assert_eq!(app.send(other, "eleven").await.2, "2: eleven");
}

#[tokio::test]
async fn a_request_in_flight_is_a_conflict_with_a_retry_after() {
    let app = app(|layer| layer);
    let keyed = || request("/slow").header("idempotency-key", "a");
    let mut first = Box::pin(app.send(keyed(), ""));
    assert!(futures_util::poll!(&mut first).is_pending());
    let told = app.send(keyed(), "").await;
    assert!(is_problem(&told, 409, "in-flight"), "{told:?}");
    assert_eq!(told.1["retry-after"], "1");
    app.gate.add_permits(1);
    assert_eq!(first.await.2, "done");
    assert_eq!(app.send(keyed(), "").await.1["idempotent-replayed"], "true");
}

#[tokio::test]
async fn a_client_that_left_gets_in_flight_and_later_the_response() {
    let app = app(|layer| layer);
    let keyed = || request("/slow").header("idempotency-key", "b");
    let mut gone = Box::pin(app.send(keyed(), ""));
    assert!(futures_util::poll!(&mut gone).is_pending());
    drop(gone);
    assert!(is_problem(&app.send(keyed(), "").await, 409, "in-flight"));
    app.gate.add_permits(1);
    app.layer.idle().await;
    let (_, headers, body) = app.send(keyed(), "").await;
    assert!(body == "done" && headers["idempotent-replayed"] == "true");
}

#[tokio::test(start_paused = true)]
async fn a_handler_whose_client_has_gone_ends_in_time() {
    let app = app(|layer| layer.finish_within(Duration::from_secs(60)));
    let keyed = || request("/slow").header("idempotency-key", "b");
    let mut gone = Box::pin(app.send(keyed(), ""));
    assert!(futures_util::poll!(&mut gone).is_pending());
    // A handler whose client waits has no time limit.
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert!(futures_util::poll!(&mut gone).is_pending());
    let left = Instant::now();
    drop(gone);
    app.layer.idle().await;
    assert_eq!(left.elapsed().as_secs(), 60);
    app.gate.add_permits(1);
    let (_, headers, body) = app.send(keyed(), "").await;
    assert!(body == "done" && !headers.contains_key("idempotent-replayed"), "it was rolled back");
}

#[tokio::test]
async fn a_refusal_that_may_pass_is_not_stored_and_success_always_is() {
    let app = app(|layer| layer.not_stored(|parts| parts.status == 404 || parts.status == 201));
    for (path, stored) in [
        ("/status/404", false),
        ("/status/410", true),
        ("/status/423", false),
        ("/later/400", false),
        ("/later/503", false),
        ("/later/202", true),
        ("/status/303", true),
        ("/spend", true),
    ] {
        for repeated in [false, true] {
            let told = app.send(request(path).header("idempotency-key", path), "").await;
            assert_eq!(told.1.contains_key("idempotent-replayed"), repeated && stored, "{path}: {told:?}");
        }
    }
}

#[tokio::test]
async fn a_replay_has_the_headers_of_a_download_and_those_that_were_named() {
    let names = [HeaderName::from_static("x-request-id"), HeaderName::from_static("content-length")];
    let app = app(|layer| layer.keep_headers(names));
    for repeated in [false, true] {
        let (_, headers, body) = app.send(request("/file").header("idempotency-key", "a"), "").await;
        assert_eq!(headers.contains_key("idempotent-replayed"), repeated);
        assert_eq!(headers["content-disposition"].as_bytes(), "attachment; filename=\"é.csv\"".as_bytes());
        assert_eq!(
            (&headers["cache-control"], body.as_str()),
            (&HeaderValue::from_static("no-store"), "a,b")
        );
        assert_eq!(headers["x-request-id"], "7");
        assert_eq!(headers.get_all("content-type").iter().count(), 1);
        assert!(!headers.contains_key("content-length") || headers["content-length"] == "3");
    }
}

#[tokio::test]
async fn a_fingerprint_of_ones_own_knows_a_form_that_is_sent_again() {
    let form = |boundary: &str| {
        let request = request("/spend").header("idempotency-key", "a");
        request.header("content-type", format!("multipart/form-data; boundary={boundary}"))
    };
    let bytes = app(|layer| layer);
    assert_eq!(bytes.send(form("a1"), "--a1\r\nx\r\n--a1--").await.0, StatusCode::CREATED);
    assert!(is_problem(&bytes.send(form("b2"), "--b2\r\nx\r\n--b2--").await, 422, "key-reused"));
    let own = app(|layer| {
        layer.fingerprint(|parts, body| fingerprint([parts.uri.path().as_bytes(), &body[4..body.len() - 4]]))
    });
    for repeated in [false, true] {
        let body = if repeated { "--b2\r\nx\r\n--b2--" } else { "--a1\r\nx\r\n--a1--" };
        let told = own.send(form(if repeated { "b2" } else { "a1" }), body).await;
        assert_eq!(told.1.contains_key("idempotent-replayed"), repeated, "{told:?}");
    }
}

#[tokio::test]
async fn a_repetition_can_be_refused() {
    let app = app(|layer| layer.on_replay(OnReplay::Refuse));
    let keyed = || request("/spend").header("idempotency-key", "a");
    assert_eq!(app.send(keyed(), "").await.0, StatusCode::CREATED);
    let told = app.send(keyed(), "").await;
    assert!(is_problem(&told, 409, "done-before"), "{told:?}");
    assert!(!told.1.contains_key("retry-after"), "it will not help");
    assert_eq!(app.calls(), 1);
    // A rejected request was not executed, so its repetition gets the recorded response, not `done-before`.
    for repeated in [false, true] {
        let keyed = request("/refused").header("idempotency-key", "b");
        let (status, headers, body) = app.send(keyed, "").await;
        assert_eq!((status, body.as_str()), (StatusCode::PAYMENT_REQUIRED, "no funds"));
        assert_eq!(headers.contains_key("idempotent-replayed"), repeated);
    }
}

#[tokio::test]
async fn a_body_is_replayed_with_what_is_needed_to_read_it() {
    let app = app(|layer| layer);
    for repeated in [false, true] {
        let keyed = request("/packed").header("idempotency-key", "a");
        let (_, headers, body) = app.send(keyed, "").await;
        assert_eq!((headers["content-encoding"].to_str().unwrap(), body.as_str()), ("gzip", "\u{1f}packed"));
        assert_eq!(headers.contains_key("idempotent-replayed"), repeated);
    }
}

#[tokio::test]
async fn methods_and_keys_that_are_not_asked_for_pass() {
    let app = app(|layer| layer.required(false).methods([Method::PUT]));
    for _ in 0..2 {
        // No key, and a method without keys.
        assert_eq!(app.send(request("/spend").method(Method::PUT), "").await.0, StatusCode::CREATED);
        assert_eq!(
            app.send(request("/spend").header("idempotency-key", "a"), "").await.0,
            StatusCode::CREATED
        );
    }
    assert_eq!(app.calls(), 4);
    let keyed = || request("/spend").method(Method::PUT).header("idempotency-key", "a");
    assert_eq!(app.send(keyed(), "").await.2, "5: ");
    assert_eq!(app.send(keyed(), "").await.2, "5: ");
    // Without a key there is no transaction, and none in memory.
    assert_eq!(app.send(request("/tx"), "").await.0, StatusCode::INTERNAL_SERVER_ERROR);
    let keyed = request("/tx").method(Method::POST).header("idempotency-key", "b");
    assert_eq!(app.send(keyed, "").await.0, StatusCode::INTERNAL_SERVER_ERROR);
}

#[tokio::test]
async fn a_header_that_is_no_text_is_not_stored() {
    let app = app(|layer| layer);
    let told = app.send(request("/bytes").header("idempotency-key", "a"), "").await;
    assert!(is_problem(&told, 500, "response-not-storable"), "{told:?}");
}

#[tokio::test]
async fn a_nested_router_does_not_shorten_what_was_asked_for() {
    let layer = IdempotencyLayer::new(MemoryIdempotency::new(), |_| Some("all".to_owned()));
    let inner = |name: &'static str| {
        Router::new().route("/spend", post(async move || name)).route_layer(layer.clone())
    };
    let router = Router::new().nest("/a", inner("a")).nest("/b", inner("b"));
    let send = async |path: &str| {
        let request = Request::post(path).header("idempotency-key", "k").body(Body::empty()).unwrap();
        text(router.clone().oneshot(request).await.unwrap()).await
    };
    assert_eq!(send("/a/spend").await.2, "a");
    let told = send("/b/spend").await;
    assert!(is_problem(&told, 422, "key-reused"), "not the response of the other: {told:?}");
}
