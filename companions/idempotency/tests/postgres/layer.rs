//! The layer over Postgres: the handler's effects and its response commit together.

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::http::{HeaderMap, Response, StatusCode};
use axum::routing::post;
use leasehold_idempotency::{IdemTx, IdempotencyLayer};
use tower::ServiceExt as _;

use crate::common::{Pg, effect, world};
use crate::suite::{fresh, ident, request};

fn app(world: &Pg) -> Router {
    let layer = IdempotencyLayer::new(world.store.clone().max_body(64), |parts| {
        Some(parts.headers.get("x-user")?.to_str().ok()?.to_owned())
    });
    let kept = world.pool.clone();
    Router::new()
        .route(
            "/ok",
            post(async |mut tx: IdemTx| {
                effect(&mut tx).await;
                "ok"
            }),
        )
        .route(
            "/status/{status}",
            post(async |axum::extract::Path(status): axum::extract::Path<u16>, mut tx: IdemTx| {
                effect(&mut tx).await;
                (StatusCode::from_u16(status).unwrap(), "told")
            }),
        )
        .route(
            "/large",
            post(async |mut tx: IdemTx| {
                effect(&mut tx).await;
                "x".repeat(65)
            }),
        )
        .route(
            "/panic",
            post(async |mut tx: IdemTx| -> &'static str {
                effect(&mut tx).await;
                panic!("in the handler")
            }),
        )
        .route(
            "/keep",
            post(async move |mut tx: IdemTx| {
                effect(&mut tx).await;
                let pool = kept.clone();
                tokio::spawn(async move {
                    pool.close_event().await;
                    drop(tx);
                });
                "kept"
            }),
        )
        .route(
            "/broken",
            post(async |mut tx: IdemTx| {
                effect(&mut tx).await;
                assert!(sqlx::query("SELECT 1 / 0").execute(&mut *tx).await.is_err());
                "ok"
            }),
        )
        .route(
            "/deferred",
            post(async |mut tx: IdemTx| {
                effect(&mut tx).await;
                sqlx::query("INSERT INTO part VALUES (9)").execute(&mut *tx).await.unwrap();
            }),
        )
        .route(
            "/trigger",
            post(async |mut tx: IdemTx| {
                effect(&mut tx).await;
                sqlx::query("INSERT INTO refused DEFAULT VALUES").execute(&mut *tx).await.unwrap();
            }),
        )
        .route_layer(layer)
}

async fn send(app: &Router, path: &str, key: &str) -> Response<Body> {
    let request = Request::post(path).header("x-user", "42").header("idempotency-key", key);
    app.clone().oneshot(request.body(Body::from("body")).unwrap()).await.unwrap()
}

async fn text(response: Response<Body>) -> (StatusCode, HeaderMap, String) {
    let (parts, body) = response.into_parts();
    let body = to_bytes(body, 1 << 20).await.unwrap();
    (parts.status, parts.headers, String::from_utf8(body.to_vec()).unwrap())
}

#[tokio::test]
async fn a_double_click_over_http_is_one_effect_and_one_answer() {
    let world = world(4).await;
    let app = app(&world);
    let told = futures_util::future::join_all((0..20).map(|_| send(&app, "/ok", "k"))).await;
    let mut done = 0;
    for response in told {
        let (status, headers, body) = text(response).await;
        match status {
            StatusCode::OK => {
                assert_eq!(body, "ok");
                done += u32::from(!headers.contains_key("idempotent-replayed"));
            }
            StatusCode::CONFLICT => assert_eq!(headers["retry-after"], "1"),
            other => panic!("{other}: {body}"),
        }
    }
    assert_eq!(done, 1);
    let (status, headers, body) = text(send(&app, "/ok", "\"k\"").await).await;
    assert_eq!(
        (status, &headers["idempotent-replayed"], body.as_str()),
        (StatusCode::OK, &"true".parse().unwrap(), "ok")
    );
    assert_eq!(world.effects().await, 1);
}

#[tokio::test]
async fn effects_follow_the_status() {
    // Status, number of effects, and whether a repetition is a replay.
    for (status, effects, replayed) in [
        (200, 1, true),
        (303, 1, true),
        (400, 0, true),
        (402, 0, true),
        (404, 0, true),
        (422, 0, true),
        (401, 0, false),
        (403, 0, false),
        (408, 0, false),
        (409, 0, false),
        (421, 0, false),
        (423, 0, false),
        (424, 0, false),
        (425, 0, false),
        (428, 0, false),
        (429, 0, false),
        (500, 0, false),
        (503, 0, false),
    ] {
        let world = world(2).await;
        let app = app(&world);
        let path = format!("/status/{status}");
        for repeated in [false, true] {
            let (told, headers, body) = text(send(&app, &path, "k").await).await;
            assert_eq!((told.as_u16(), body.as_str()), (status, "told"));
            assert_eq!(headers.contains_key("idempotent-replayed"), repeated && replayed, "{status}");
        }
        assert_eq!(world.effects().await, effects, "{status}");
    }
}

#[tokio::test]
async fn what_cannot_be_stored_or_was_kept_is_rolled_back() {
    let world = world(4).await;
    let app = app(&world);
    world
        .run(
            "CREATE TABLE whole (id int PRIMARY KEY);
            CREATE TABLE part (whole int REFERENCES whole DEFERRABLE INITIALLY DEFERRED);
            CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no'; END $$;
            CREATE TABLE refused (); CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON refused DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION refuse()",
        )
        .await;
    for (path, kind) in [
        ("/large", "response-not-storable"),
        ("/keep", "not-carried-out"),
        ("/broken", "not-carried-out"),
        ("/deferred", "not-carried-out"),
        ("/trigger", "not-carried-out"),
    ] {
        let (status, headers, body) = text(send(&app, path, path).await).await;
        assert!(status == 500 && body.contains(kind), "{path}: {status} {body}");
        assert_eq!(headers["content-type"], "application/problem+json");
        assert!(!headers.contains_key("retry-after"), "no repetition helps: {path}");
    }
    let panicked = tokio::spawn({
        let app = app.clone();
        async move { send(&app, "/panic", "panic").await }
    });
    assert!(panicked.await.unwrap_err().is_panic());
    assert_eq!(world.effects().await, 0);
    // The same keys are new again.
    for path in ["/large", "/broken", "/deferred"] {
        assert_eq!(text(send(&app, path, path).await).await.0, 500);
    }
}

/// If the client leaves, hyper drops the handler.
#[tokio::test]
async fn a_client_that_leaves_and_repeats_has_one_effect() {
    let world = world(4).await;
    let app = app(&world);
    for _ in 0..40 {
        let mut request = Box::pin(send(&app, "/ok", "k"));
        for _ in 0..6 {
            if futures_util::poll!(&mut request).is_ready() {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_micros(500)).await;
        }
    }
    loop {
        let (status, _, body) = text(send(&app, "/ok", "k").await).await;
        match status {
            StatusCode::OK => break assert_eq!(body, "ok"),
            StatusCode::CONFLICT => tokio::task::yield_now().await,
            other => panic!("{other}: {body}"),
        }
    }
    assert_eq!(world.effects().await, 1);
}

#[tokio::test]
async fn the_longest_pause_is_a_number_and_no_panic() {
    let world = world(2).await;
    let store = world.store.clone().retry_after(std::time::Duration::MAX);
    let layer = IdempotencyLayer::new(store.clone(), |_| Some("account:42".to_owned()));
    let app = Router::new().route("/", post(async || "ok")).route_layer(layer);
    let open = fresh(store.begin(&ident("k"), &request("x")).await);
    let (status, headers, _) = text(send(&app, "/", "k").await).await;
    assert_eq!((status, &headers["retry-after"]), (StatusCode::CONFLICT, &u64::MAX.into()));
    open.rollback().await.unwrap();
}
