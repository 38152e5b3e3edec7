//! The measured service: one handler, with the layer around it and with the lock acquired in it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::post;
use axum::serve::ListenerExt as _;
use leasehold_api::{Lock, LockExt as _, key};
use leasehold_tower::{LockLayer, Template};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// Maximum wait, longer than any request of a benchmark waits.
const WAIT: Duration = Duration::from_secs(60);
/// Duration of the busy handler's work.
const WORK: Duration = Duration::from_millis(5);

pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    /// Routes for requests that need no connection.
    pub(crate) router: Router,
    pub(crate) layer: LockLayer<Template>,
    task: JoinHandle<()>,
}

impl Server {
    pub(crate) async fn start(lock: &Arc<dyn Lock>) -> Self {
        let template = Template::parse("ledger:{path.holder|int}").unwrap();
        let layer = LockLayer::new(Arc::clone(lock), template).wait(WAIT).check().unwrap();
        let router = Router::new()
            .route("/layer/{holder}", post(spend).route_layer(layer.clone()))
            .route("/busy/{holder}", post(busy).route_layer(layer.clone()))
            .route("/hand/{holder}", post(by_hand).with_state(Arc::clone(lock)));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let listener = listener.tap_io(|stream| stream.set_nodelay(true).unwrap());
        let serving = axum::serve(listener, router.clone());
        let task = tokio::spawn(async move { serving.await.unwrap() });
        Self { address, router, layer, task }
    }

    pub(crate) async fn stop(self) {
        self.task.abort();
        self.layer.idle().await;
    }
}

/// Does nothing, so a request costs only HTTP and the lock.
async fn spend(Path(holder): Path<i64>) -> String {
    holder.to_string()
}

async fn busy(path: Path<i64>) -> String {
    tokio::time::sleep(WORK).await;
    spend(path).await
}

/// Acquires the lock in the handler, without the layer.
async fn by_hand(State(lock): State<Arc<dyn Lock>>, Path(holder): Path<i64>) -> Result<String, StatusCode> {
    let key = key!["ledger", holder].map_err(|_| StatusCode::BAD_REQUEST)?;
    let guard = lock.key(key).wait(WAIT).acquire().await.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?;
    let answer = spend(Path(holder)).await;
    guard.release().await.map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    Ok(answer)
}
