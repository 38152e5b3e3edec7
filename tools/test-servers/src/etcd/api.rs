//! Calls of a member: JSON over HTTP, which every etcd since 3.4 offers beside gRPC.

use std::fmt;
use std::sync::{OnceLock, mpsc};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::header::AUTHORIZATION;
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};

use crate::admin;

/// Time limit of a call. A frozen member takes as long.
const LIMIT: Duration = Duration::from_secs(5);

/// Time limit of a call that works through the whole database, or that no test makes to a frozen member.
const LONG: Duration = Duration::from_secs(60);

/// The failure of a call: a member's refusal, or no reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The code of gRPC, or `None` if no reply came.
    pub code: Option<u64>,
    /// The message of the member, or the reason for the missing reply.
    pub message: String,
}

impl Refusal {
    pub(super) fn no_reply(message: String) -> Self {
        Self { code: None, message }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.code {
            Some(code) => write!(f, "{} (code {code})", self.message),
            None => f.write_str(&self.message),
        }
    }
}

/// The state of a member.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// The version of the server.
    pub version: String,
    /// The id of the cluster.
    pub cluster: u64,
    /// The id of the member.
    pub member: u64,
    /// The id of the leader that the member knows, or 0.
    pub leader: u64,
    /// The term of the last election.
    pub term: u64,
    /// The number of the last write.
    pub revision: u64,
    /// The number of the last entry in the log.
    pub index: u64,
    /// The size of the database in bytes.
    pub size: u64,
}

/// The calls of one member.
#[derive(Debug)]
pub(super) struct Api {
    port: u16,
    /// The password of `root`, with which each call logs in.
    root: Option<String>,
}

impl Api {
    pub(super) fn new(port: u16, root: Option<String>) -> Self {
        Self { port, root }
    }

    /// Calls `/v3/PATH`. Blocks.
    pub(super) fn call(&self, path: &str, body: &Value) -> Result<Value, Refusal> {
        self.call_within(LIMIT, path, body)
    }

    /// Calls as [`Self::call`] does, for work on the whole database.
    pub(super) fn call_slowly(&self, path: &str, body: &Value) -> Result<Value, Refusal> {
        self.call_within(LONG, path, body)
    }

    fn call_within(&self, limit: Duration, path: &str, body: &Value) -> Result<Value, Refusal> {
        let reply = self.bytes(limit, path, body)?;
        serde_json::from_slice(&reply)
            .map_err(|error| Refusal::no_reply(format!("{path} returned no JSON: {error}")))
    }

    /// Returns the data of the stream of a snapshot.
    pub(super) fn snapshot(&self) -> Result<Vec<u8>, Refusal> {
        let reply = self.bytes(LONG, "maintenance/snapshot", &json!({}))?;
        let mut data = Vec::new();
        for part in serde_json::Deserializer::from_slice(&reply).into_iter::<Value>() {
            let part = part.map_err(|error| Refusal::no_reply(format!("no JSON in a snapshot: {error}")))?;
            data.extend(decoded(&part["result"]["blob"]));
        }
        Ok(data)
    }

    pub(super) fn status(&self) -> Result<Status, Refusal> {
        let reply = self.call("maintenance/status", &json!({}))?;
        Ok(Status {
            version: reply["version"].as_str().unwrap_or_default().to_owned(),
            cluster: number(&reply["header"]["cluster_id"]),
            member: number(&reply["header"]["member_id"]),
            leader: number(&reply["leader"]),
            term: number(&reply["raftTerm"]),
            revision: number(&reply["header"]["revision"]),
            index: number(&reply["raftIndex"]),
            size: number(&reply["dbSize"]),
        })
    }

    /// Returns the counters of the member as text.
    pub(super) fn metrics(&self) -> Result<String, Refusal> {
        let request = http::Request::get(format!("http://127.0.0.1:{}/metrics", self.port));
        let reply = self.send(LONG, request.body(Full::default()))?.1;
        Ok(String::from_utf8_lossy(&reply).into_owned())
    }

    fn bytes(&self, limit: Duration, path: &str, body: &Value) -> Result<Bytes, Refusal> {
        let mut request = http::Request::post(format!("http://127.0.0.1:{}/v3/{path}", self.port));
        if let Some(password) = self.root.as_ref().filter(|_| path != "auth/authenticate") {
            request = request.header(AUTHORIZATION, self.log_in("root", password)?);
        }
        let (is_success, reply) = self.send(limit, request.body(Full::from(body.to_string())))?;
        if is_success {
            return Ok(reply);
        }
        let said: Value = serde_json::from_slice(&reply).unwrap_or_default();
        let message = said["message"].as_str().map_or_else(|| format!("{reply:?}"), str::to_owned);
        Err(Refusal { code: said["code"].as_u64(), message })
    }

    fn log_in(&self, name: &str, password: &str) -> Result<String, Refusal> {
        let reply = self.call("auth/authenticate", &json!({ "name": name, "password": password }))?;
        Ok(reply["token"].as_str().unwrap_or_default().to_owned())
    }

    fn send(
        &self,
        limit: Duration,
        request: http::Result<http::Request<Full<Bytes>>>,
    ) -> Result<(bool, Bytes), Refusal> {
        let request = request.map_err(|error| Refusal::no_reply(error.to_string()))?;
        let work = async move {
            let reply =
                client().request(request).await.map_err(|error| Refusal::no_reply(format!("{error:?}")))?;
            let is_success = reply.status().is_success();
            let body = reply.into_body().collect().await;
            let body = body.map_err(|error| Refusal::no_reply(format!("{error:?}")))?;
            Ok((is_success, body.to_bytes()))
        };
        let (sender, receiver) = mpsc::channel();
        // Runs a task, because a test's runtime, in which a cluster can start, must not block on another runtime.
        admin::runtime().spawn(async move { sender.send(tokio::time::timeout(limit, work).await) });
        let reply = receiver.recv().map_err(|_| Refusal::no_reply("a call panicked".to_owned()))?;
        reply.map_err(|_| Refusal::no_reply(format!("no reply of port {} within {limit:?}", self.port)))?
    }
}

/// Returns the number in a value of JSON. It is text, because it can have 64 bits, and missing for 0.
pub(super) fn number(value: &Value) -> u64 {
    value.as_str().and_then(|text| text.parse().ok()).or_else(|| value.as_u64()).unwrap_or_default()
}

/// Returns bytes in base64, as etcd's JSON has them.
pub(super) fn encoded(bytes: impl AsRef<[u8]>) -> String {
    STANDARD.encode(bytes)
}

/// Returns the bytes in a value of JSON. Empty if the value is missing.
pub(super) fn decoded(value: &Value) -> Vec<u8> {
    value.as_str().and_then(|text| STANDARD.decode(text).ok()).unwrap_or_default()
}

/// Returns the client of all calls. It keeps no idle connections, because members end and start again.
fn client() -> &'static Client<HttpConnector, Full<Bytes>> {
    static CLIENT: OnceLock<Client<HttpConnector, Full<Bytes>>> = OnceLock::new();
    CLIENT.get_or_init(|| Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build_http())
}
