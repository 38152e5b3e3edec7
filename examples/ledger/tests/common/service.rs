//! Common parts of the tests.

#![allow(clippy::unwrap_used, dead_code, unreachable_pub)] // A failed `unwrap` fails the test.

use std::net::SocketAddr;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, Request, Response, StatusCode, header};
use http_body_util::BodyExt as _;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use ledger::{Mode, Options, Running};
use serde_json::Value;
use sqlx::{Connection as _, Executor as _, PgConnection};
use test_bounds::within;
use test_servers::Database;

/// Limit of a wait that only a broken program exceeds.
pub const LONG: Duration = Duration::from_secs(600);

/// Starts a service on the database, or with the ledger in the process.
pub async fn service(database: Option<&Database>, mode: Mode, load: bool) -> Running {
    let mut options = Options::default();
    options.database_url = database.map(|database| database.url().to_owned());
    options.mode = Some(mode);
    options.load = load;
    options.wait = LONG;
    within(LONG, "does not start", ledger::start(options)).await.unwrap()
}

#[derive(Clone)]
pub struct Browser {
    http: Client<HttpConnector, Body>,
    address: SocketAddr,
}

impl Browser {
    pub fn of(running: &Running) -> Self {
        Self::at(running.address())
    }

    pub fn at(address: SocketAddr) -> Self {
        Self { http: Client::builder(TokioExecutor::new()).build_http(), address }
    }

    pub async fn get(&self, path: &str) -> (StatusCode, HeaderMap, String) {
        let response = self.send(Request::get(self.url(path)).body(Body::empty()).unwrap()).await;
        let (parts, body) = response.into_parts();
        let bytes = body.collect().await.unwrap().to_bytes();
        (parts.status, parts.headers, String::from_utf8(bytes.to_vec()).unwrap())
    }

    pub async fn figures(&self) -> Value {
        let (status, _, text) = self.get("/figures").await;
        assert_eq!(status, StatusCode::OK, "{text}");
        serde_json::from_str(&text).unwrap()
    }

    /// Polls the figures until `is_so` accepts them, and returns them.
    pub async fn until(&self, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        let look = async {
            loop {
                let figures = self.figures().await;
                if is_so(&figures) {
                    return figures;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        within(LONG, format!("never {what}"), look).await
    }

    pub async fn spend(&self, holder: &str, amount: u32) -> StatusCode {
        self.form(&format!("/accounts/{holder}/spend"), &format!("amount={amount}")).await
    }

    pub async fn spend_keyed(&self, holder: &str, amount: u32, key: &str) -> StatusCode {
        let request = Request::post(self.url(&format!("/accounts/{holder}/spend")))
            .header(header::CONTENT_TYPE, "application/x-www-form-urlencoded")
            .header("idempotency-key", key);
        self.send(request.body(Body::from(format!("amount={amount}"))).unwrap()).await.status()
    }

    pub async fn form(&self, path: &str, body: &str) -> StatusCode {
        self.post(path, "application/x-www-form-urlencoded", body).await
    }

    pub async fn json(&self, path: &str, body: &str) -> StatusCode {
        self.post(path, "application/json", body).await
    }

    /// Returns the answer with its body.
    pub async fn json_text(&self, path: &str, body: &str) -> (StatusCode, String) {
        let (parts, body) = self.send_as(path, "application/json", body).await.into_parts();
        let bytes = body.collect().await.unwrap().to_bytes();
        (parts.status, String::from_utf8(bytes.to_vec()).unwrap())
    }

    async fn post(&self, path: &str, content: &str, body: &str) -> StatusCode {
        self.send_as(path, content, body).await.status()
    }

    async fn send_as(&self, path: &str, content: &str, body: &str) -> Response<Body> {
        let request = Request::post(self.url(path)).header(header::CONTENT_TYPE, content);
        self.send(request.body(Body::from(body.to_owned())).unwrap()).await
    }

    async fn send(&self, request: Request<Body>) -> Response<Body> {
        let response = within(LONG, "no answer", self.http.request(request)).await.unwrap();
        response.map(Body::new)
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }
}

/// Returns the balance and the double spends of the first account.
pub fn first(figures: &Value) -> (i64, i64) {
    let account = &figures["accounts"][0];
    assert_eq!(account["holder"], 1);
    (account["balance"].as_i64().unwrap(), account["double_spends"].as_i64().unwrap())
}

/// Stops requests between their read and their write, by a table lock that allows only reads of entries.
pub struct Gate(PgConnection);

impl Gate {
    pub async fn close(database: &Database) -> Self {
        let mut connection = database.connect().await;
        connection.execute("BEGIN").await.unwrap();
        connection.execute("LOCK TABLE ledger_example.entry IN SHARE MODE").await.unwrap();
        Self(connection)
    }

    /// Waits until `count` requests wait at the gate.
    pub async fn reached(&mut self, count: i64) {
        let look = async {
            while self.waiting().await != count {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        within(LONG, format!("never {count} at the gate"), look).await;
    }

    pub async fn waiting(&mut self) -> i64 {
        let sql =
            "SELECT count(*) FROM pg_locks WHERE relation = 'ledger_example.entry'::regclass AND NOT granted";
        sqlx::query_scalar(sql).fetch_one(&mut self.0).await.unwrap()
    }

    pub async fn open(mut self) {
        self.0.execute("ROLLBACK").await.unwrap();
        self.0.close().await.unwrap();
    }
}
