//! Measures requests per second through the layer, against a lock acquired and released in the handler.

use std::sync::Arc;

use bench::report::{Row, row};
use leasehold_api::Lock;

use crate::companions::client::Client;
use crate::companions::rounds::{Contender, compete};
use crate::companions::server::Server;

const CONNECTIONS: usize = 16;
const KEYS: usize = 1000;

pub(crate) async fn measure(store: &str, lock: &Arc<dyn Lock>, rows: &mut Vec<Row>) {
    println!("requests, {store}: {CONNECTIONS} connections, {KEYS} keys");
    let server = Server::start(lock).await;
    let contenders = vec![
        Contender::new("LockLayer", clients(&server, "layer").await),
        Contender::new("by hand", clients(&server, "hand").await),
    ];
    let series = compete(contenders).await;
    rows.push(row(&format!("HTTP requests, {store}"), &series[0], &series[1], 0.95));
    server.stop().await;
}

/// Returns clients that never use the same key at once.
async fn clients(server: &Server, route: &str) -> Vec<Client> {
    let mut clients = Vec::new();
    for client in 0..CONNECTIONS {
        let holders = (client..KEYS).step_by(CONNECTIONS);
        clients.push(Client::connect(server.address, route, holders).await);
    }
    clients
}
