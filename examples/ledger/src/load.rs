//! Clients that spend and top up over HTTP.

use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::store::HOLDERS;

const CLIENTS: usize = 12;
/// Time limit of a request, which only a broken service exceeds.
const ANSWER: Duration = Duration::from_secs(10);

/// The built-in load: clients that send requests to one address.
#[derive(Debug)]
pub(crate) struct Load {
    address: SocketAddr,
    /// Maximum duration of the load, because a forgotten page must not fill the database.
    limit: Duration,
    running: Mutex<Option<Clients>>,
}

#[derive(Debug)]
struct Clients {
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Load {
    pub(crate) fn new(address: SocketAddr, limit: Duration) -> Self {
        Self { address, limit, running: Mutex::new(None) }
    }

    pub(crate) fn is_running(&self) -> bool {
        self.state().as_ref().is_some_and(|clients| !clients.tasks.is_empty())
    }

    /// Starts the clients, unless they already run.
    pub(crate) fn start(&self) {
        let mut running = self.state();
        if running.as_ref().is_some_and(|clients| !clients.tasks.is_empty()) {
            return;
        }
        let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
        let http = Client::builder(TokioExecutor::new()).build_http();
        for _ in 0..CLIENTS {
            let client = OneClient { http: http.clone(), address: self.address };
            let (stop, limit) = (stop.clone(), self.limit);
            tasks.spawn(async move { timeout(limit, client.run(&stop)).await });
        }
        tasks.close();
        *running = Some(Clients { stop, tasks });
    }

    /// Stops the clients and waits for their last responses.
    pub(crate) async fn stop(&self) {
        let Some(clients) = self.state().take() else { return };
        clients.stop.cancel();
        clients.tasks.wait().await;
    }

    fn state(&self) -> MutexGuard<'_, Option<Clients>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct OneClient {
    http: Client<HttpConnector, Body>,
    address: SocketAddr,
}

impl OneClient {
    async fn run(&self, stop: &CancellationToken) {
        while !stop.is_cancelled() {
            let holder = fastrand::i64(1..=HOLDERS);
            // Sends every spend twice, like a double click, with one idempotency key.
            let key = fastrand::u128(..).to_string();
            let (a, b) =
                tokio::join!(self.post(holder, "spend", 10, &key), self.post(holder, "spend", 10, &key));
            let is_short = [a, b].contains(&Some(StatusCode::PAYMENT_REQUIRED));
            if is_short && fastrand::u8(..4) == 0 {
                self.post(holder, "top-up", 50, &key).await;
            }
            let pause = sleep(Duration::from_millis(fastrand::u64(10..50)));
            stop.run_until_cancelled(pause).await;
        }
    }

    /// Sends a request and returns its status, or `None` without a response.
    async fn post(&self, holder: i64, action: &str, amount: u32, key: &str) -> Option<StatusCode> {
        let request = Request::post(format!("http://{}/accounts/{holder}/{action}", self.address))
            .header(header::CONTENT_TYPE, "application/x-www-form-urlencoded")
            .header("idempotency-key", key)
            .body(Body::from(format!("amount={amount}")))
            .ok()?;
        let answer = async {
            let response = self.http.request(request).await.ok()?;
            let status = response.status();
            // Reads the response to its end, because the connection cannot be reused otherwise.
            http_body_util::BodyExt::collect(response.into_body()).await.ok()?;
            Some(status)
        };
        timeout(ANSWER, answer).await.ok().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_load_stops_by_itself() {
        // A server that accepts connections and never answers.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let load = Load::new(silent.local_addr().unwrap(), Duration::from_millis(20));
        load.start();
        assert!(load.is_running());
        let tasks = load.state().as_ref().unwrap().tasks.clone();
        timeout(Duration::from_secs(60), tasks.wait()).await.expect("goes on");
        assert!(!load.is_running());
    }
}
