//! The layer's place in axum apps, and its keys.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::{LONG, memory, send, text};
use axum::Router;
use axum::body::Body;
use axum::extract::{FromRequestParts, Json, Path, Query};
use axum::routing::{get, post};
use bytes::Bytes;
use http::request::Parts;
use http::{HeaderValue, Method, Request, Response, StatusCode};
use leasehold_api::{Lock, LockExt as _};
use leasehold_tower::{Held, KeyFor, LockLayer, Template, extracted};
use proptest::prelude::*;

fn request(method: Method, uri: &str) -> Request<Body> {
    Request::builder().method(method).uri(uri).body(Body::empty()).unwrap()
}

/// A handler that returns the key of its lock.
async fn tell(held: Held) -> String {
    held.key().as_str().to_owned()
}

fn templated(lock: &Arc<dyn Lock>, template: &str) -> LockLayer<Template> {
    LockLayer::new(Arc::clone(lock), Template::parse(template).unwrap()).wait(LONG)
}

async fn answer(app: &Router, method: Method, uri: &str) -> (u16, String) {
    let response = send(app, request(method, uri)).await;
    (response.status().as_u16(), text(response).await)
}

#[tokio::test]
async fn only_the_route_before_the_layer_is_locked() {
    let (_, lock) = memory();
    let layer = templated(&lock, "ledger:{path.holder|int}");
    let reads = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&reads);
    let read = move |held: Option<axum::Extension<Held>>| async move {
        counted.fetch_add(1, Ordering::SeqCst);
        held.map(|held| held.key().to_string()).unwrap_or_default()
    };
    let app = Router::new().route("/ledger/{holder}", post(tell).route_layer(layer.clone()).get(read));
    assert_eq!(answer(&app, Method::POST, "/ledger/42").await, (200, "ledger:42".into()));
    assert_eq!(answer(&app, Method::GET, "/ledger/42").await, (200, String::new()), "not locked");
    assert_eq!(answer(&app, Method::PUT, "/ledger/42").await.0, 405);
    assert_eq!(answer(&app, Method::POST, "/nowhere").await.0, 404);
    assert_eq!((layer.stats().granted, layer.stats().no_key), (1, 0), "405 and 404 take no lock");
}

#[tokio::test]
async fn path_parameters_are_read_wherever_the_layer_is_placed() {
    let (_, lock) = memory();
    let layer = templated(&lock, "{path.tenant}:{path.holder|int}");
    let inside = Router::new().route("/l/{holder}", get(tell)).route_layer(layer.clone());
    let app = Router::new().nest("/{tenant}", inside);
    assert_eq!(answer(&app, Method::GET, "/acme/l/042").await, (200, "acme:42".into()));
    assert_eq!(answer(&app, Method::GET, "/a%3Ab/l/1").await, (200, "a%3Ab:1".into()), "escaped");
    assert_eq!(answer(&app, Method::GET, "/%FF/l/1").await.0, 400, "not UTF-8");
    assert_eq!(answer(&app, Method::GET, "/acme/l/x").await.0, 400);

    let outside = Router::new().nest("/{tenant}", Router::new().route("/l/{holder}", get(tell)));
    let outside = outside.route_layer(layer.clone());
    assert_eq!(answer(&outside, Method::GET, "/acme/l/7").await, (200, "acme:7".into()));

    // Without path parameters the layer finds no key and refuses the request.
    let before = layer.stats().granted;
    let service = Router::new().route("/l/{holder}", get(tell));
    let app = Router::new().nest_service("/x", service).layer(layer.clone());
    assert_eq!(answer(&app, Method::GET, "/x/l/7").await.0, 500);
    let app = Router::new().route("/l/{holder}", get(tell)).fallback(tell).layer(layer.clone());
    assert_eq!(answer(&app, Method::GET, "/l/7").await.0, 500, "the route has no tenant");
    assert_eq!(answer(&app, Method::GET, "/nowhere").await.0, 500);
    assert_eq!(layer.stats().granted, before);
}

#[tokio::test]
async fn a_path_parameter_that_occurs_twice_is_a_fault_of_the_service() {
    let (_, lock) = memory();
    let layer = templated(&lock, "l:{path.id}");
    let handler = async |Path((_, id)): Path<(String, String)>| id;
    let inside = Router::new().route("/spend/{id}", get(handler)).route_layer(layer.clone());
    let app = Router::new().nest("/{id}", inside);
    assert_eq!(answer(&app, Method::GET, "/a/spend/b").await.0, 500, "which one is it?");
    assert_eq!(layer.stats().granted, 0);
}

#[tokio::test]
async fn a_route_added_after_the_layer_is_not_locked() {
    let (_, lock) = memory();
    let layer = templated(&lock, "k");
    let app = Router::new().route("/a", get(tell)).route_layer(layer).route("/late", get(tell));
    assert_eq!(answer(&app, Method::GET, "/a").await, (200, "k".into()));
    let (status, body) = answer(&app, Method::GET, "/late").await;
    assert_eq!(status, 500, "a handler that asks for its lock fails where there is none");
    assert!(body.contains("not locked"), "{body}");
}

#[tokio::test]
async fn three_spellings_of_one_number_are_one_key() {
    let (_, lock) = memory();
    let plain = Router::new().route("/{id}", get(tell)).route_layer(templated(&lock, "l:{path.id}"));
    let int = Router::new().route("/{id}", get(tell)).route_layer(templated(&lock, "l:{path.id|int}"));
    let of = |Path(id): Path<i64>| leasehold_api::key!["l", id];
    let layer = LockLayer::new(Arc::clone(&lock), extracted(of));
    let extracted = Router::new().route("/{id}", get(tell)).route_layer(layer);
    let mut keys = Vec::new();
    for uri in ["/42", "/042", "/+42"] {
        keys.push(answer(&plain, Method::GET, uri).await.1);
        assert_eq!(answer(&int, Method::GET, uri).await, (200, "l:42".into()), "{uri}");
        assert_eq!(answer(&extracted, Method::GET, uri).await, (200, "l:42".into()), "{uri}");
    }
    assert_eq!(keys, ["l:42", "l:042", "l:+42"], "why there is a form");
}

#[tokio::test]
async fn extractors_refuse_the_same_with_and_without_the_layer() {
    #[derive(Debug)]
    struct Refusing;
    impl<S: Sync> FromRequestParts<S> for Refusing {
        type Rejection = Response<Body>;
        async fn from_request_parts(_: &mut Parts, _: &S) -> Result<Self, Response<Body>> {
            let mut response = Response::new(Body::from("no teapot"));
            *response.status_mut() = StatusCode::IM_A_TEAPOT;
            response.headers_mut().insert("x-why", HeaderValue::from_static("tea"));
            Err(response)
        }
    }
    let (_, lock) = memory();
    let typed = async |Path(_): Path<i64>| "typed";
    let by_path =
        LockLayer::new(Arc::clone(&lock), extracted(|Path(id): Path<i64>| leasehold_api::key!["l", id]));
    let refusing = async |_: Refusing| "refusing";
    let by_refusing =
        LockLayer::new(Arc::clone(&lock), extracted(|_: Refusing| leasehold_api::key!["never"]));
    let plain = Router::new().route("/{id}", get(typed)).route("/r/x", get(refusing));
    let locked = Router::new()
        .route("/{id}", get(typed).route_layer(by_path))
        .route("/r/x", get(refusing).route_layer(by_refusing));
    for uri in ["/x", "/99999999999999999999", "/%FF", "/r/x"] {
        let [plain, locked] =
            [send(&plain, request(Method::GET, uri)).await, send(&locked, request(Method::GET, uri)).await];
        assert!(plain.status().is_client_error());
        assert_eq!((plain.status(), plain.headers()), (locked.status(), locked.headers()), "{uri}");
        assert_eq!(text(plain).await, text(locked).await, "{uri}");
    }
}

#[tokio::test]
async fn ambiguous_queries_and_headers_are_refused() {
    #[derive(serde::Deserialize)]
    struct Holder {
        h: String,
    }
    let (_, lock) = memory();
    let handler = async |Query(Holder { h }): Query<Holder>, held: Held| {
        assert_eq!(*held.key(), leasehold_api::key!["q", h].unwrap(), "as the handler reads it");
    };
    let app = Router::new().route("/", get(handler)).route_layer(templated(&lock, "q:{query.h}"));
    for good in ["/?h=1", "/?x=2&h=a%3Ab", "/?h=a+b&y", "/?%68=1", "/?h=%25"] {
        assert_eq!(answer(&app, Method::GET, good).await.0, 200, "{good}");
    }
    for bad in ["/", "/?h", "/?h=", "/?x=1", "/?H=1", "/?h=1&h=2", "/?h=1&%68=1", "/?h=%FF", "/?h[]=1"] {
        let (status, body) = answer(&app, Method::GET, bad).await;
        assert_eq!(status, 400, "{bad}");
        assert!(body.contains("query.h"), "{bad}: {body}");
    }
    assert_eq!(
        answer(&app, Method::GET, &format!("/?h={}", "x".repeat(600))).await.0,
        400,
        "too long for a key"
    );

    let app = Router::new().route("/", get(tell)).route_layer(templated(&lock, "u:{header.x-user|lower}"));
    let with = |values: &[&[u8]]| {
        let mut request = request(Method::GET, "/");
        for value in values {
            request.headers_mut().append("x-user", HeaderValue::from_bytes(value).unwrap());
        }
        request
    };
    let response = send(&app, with(&[b"Ann"])).await;
    assert_eq!(text(response).await, "u:ann");
    let bad: [&[&[u8]]; 5] = [&[], &[b""], &[b"a", b"a"], &[b"a", b"b"], &[b"\xff"]];
    for bad in bad {
        assert_eq!(send(&app, with(bad)).await.status(), 400, "{bad:?}");
    }
}

#[tokio::test]
async fn bodies_are_read_before_the_lock_and_passed_on_whole() {
    let (_, lock) = memory();
    let key = Template::parse_with_body("order:{{json.order.id|int}}", 64).unwrap();
    let layer = LockLayer::new(Arc::clone(&lock), key).wait(LONG);
    let echo = async |held: Held, body: Bytes| [held.key().as_str().as_bytes(), b" ", &*body].concat();
    let app = Router::new().route("/", post(echo)).route_layer(layer.clone());
    let of = |body: Body| Request::post("/").body(body).unwrap();
    let body = "{ \"order\": {\"id\": \"042\"} }\n";
    assert_eq!(text(send(&app, of(body.into())).await).await, format!("order:42 {body}"));
    for (bad, status) in [
        ("{}".to_owned(), 400),
        (r#"{"order": {"id": 1, "id": 2}}"#.to_owned(), 400),
        (r#"{"order": {"id": 1}, "order": {"id": 2}}"#.to_owned(), 400),
        ("not json".to_owned(), 400),
        (format!("{{\"order\": {{\"id\": 1}}}}{}", " ".repeat(64)), 413),
    ] {
        assert_eq!(send(&app, of(bad.clone().into())).await.status(), status, "{bad}");
    }
    // A request whose body is unfinished holds no lock.
    let (sender, receiver) = tokio::sync::mpsc::channel::<Result<Bytes, Infallible>>(1);
    let slow = http_body_util::BodyExt::boxed_unsync(Pending(receiver));
    let sending = tokio::spawn({
        let app = app.clone();
        async move { send(&app, of(Body::new(slow))).await.status() }
    });
    sender.send(Ok(Bytes::from_static(b"{\"order\": {\"id\": 7}}"))).await.unwrap();
    sender.reserve().await.unwrap();
    assert_eq!((layer.stats().waiting, layer.stats().in_flight), (0, 0));
    drop(sender);
    assert_eq!(sending.await.unwrap(), 200);
    assert_eq!(layer.stats().granted, 2);
}

struct Pending(tokio::sync::mpsc::Receiver<Result<Bytes, Infallible>>);

impl http_body::Body for Pending {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<http_body::Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(cx).map(|bytes| bytes.map(|bytes| bytes.map(http_body::Frame::data)))
    }
}

#[tokio::test]
async fn extensions_have_typed_sources() {
    #[derive(Clone)]
    struct User(&'static str);
    let (_, lock) = memory();
    let template = Template::builder("u:{ext.user}").extension("user", |user: &User| user.0).build().unwrap();
    let layer = LockLayer::new(Arc::clone(&lock), template);
    let app = |user: Option<User>| {
        let app = Router::new().route("/", get(tell)).route_layer(layer.clone());
        match user {
            Some(user) => app.layer(axum::Extension(user)),
            None => app,
        }
    };
    assert_eq!(answer(&app(Some(User("ann"))), Method::GET, "/").await, (200, "u:ann".into()));
    for bad in [None, Some(User(""))] {
        let (status, body) = answer(&app(bad), Method::GET, "/").await;
        assert_eq!(status, 500, "the service's fault");
        assert!(!body.contains("ext"), "of which clients are not told: {body}");
    }
}

#[tokio::test]
async fn buffered_bodies_work_with_json_handlers() {
    let (_, lock) = memory();
    let key = Template::parse("j:{query.id|int}").unwrap().buffer_body(1024);
    let handler = async |Json(value): Json<serde_json::Value>| value["a"].to_string();
    let app = Router::new().route("/", post(handler)).route_layer(LockLayer::new(Arc::clone(&lock), key));
    let request =
        Request::post("/?id=1").header("content-type", "application/json").body(Body::from(r#"{"a": 5}"#));
    let request = request.unwrap();
    assert_eq!(text(send(&app, request).await).await, "5");
    assert!(lock.key("j:1").try_acquire().await.unwrap().is_some());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// Different values give different keys, and no key equals a part of the template.
    #[test]
    fn different_values_give_different_keys(a in "[:%a-c]{0,4}", b in "[:%a-c]{0,4}", c in "[:%a-c]{0,4}", d in "[:%a-c]{0,4}") {
        let template = Template::parse("k:{header.a}:x-{header.b}").unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let of = |a: &str, b: &str| {
            let request = Request::builder().header("a", a).header("b", b).body(()).unwrap();
            runtime.block_on(template.key_for(request)).1.ok()
        };
        let (first, second) = (of(&a, &b), of(&c, &d));
        prop_assert_eq!(first.is_none(), a.is_empty() || b.is_empty());
        if first.is_some() && second.is_some() {
            prop_assert_eq!(first == second, (a, b) == (c, d));
        }
    }
}
