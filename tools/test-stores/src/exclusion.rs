//! Checks that table stores exclude even on a server on which some statements do nothing (`docs/hazards.md` H59).

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use leasehold_api::LockExt as _;
use leasehold_engine::Engine;
use sqlx::AssertSqlSafe;
use test_servers::sql::LONG;
use test_servers::{Cluster, Proxy};
use tokio::time::sleep;

/// Runs clients that compete for few keys, one or two at a time, on a server that reads `words` as spaces. Fails if a key
/// has two holders. `connect` makes a client that polls often. `table` contains the store's rows.
pub async fn exclude_without(words: &[&str], table: &str, connect: impl AsyncFn(String) -> Engine) {
    let database = Cluster::shared().fresh_database().await;
    connect(database.url().to_owned()).await;
    let proxy = Proxy::start(Cluster::shared().address()).await;
    for words in words {
        proxy.rewrite(words, "");
    }
    // One transaction locks rows again and again, because statements with SKIP LOCKED omit locked rows.
    let mut user = database.connect().await;
    let lock = format!("BEGIN; SELECT FROM {table} FOR UPDATE");
    let locks = tokio::spawn(async move {
        loop {
            sqlx::raw_sql(AssertSqlSafe(lock.clone())).execute(&mut user).await.unwrap();
            sleep(Duration::from_millis(400)).await;
            sqlx::raw_sql("COMMIT").execute(&mut user).await.unwrap();
            sleep(Duration::from_millis(300)).await;
        }
    });
    exclude(&proxy.url(database.url()), connect).await;
    locks.abort();
    assert!(proxy.traffic().rewritten > 0, "nothing was asked for by {words:?}");
}

/// Runs the clients of [`exclude_without`] on a server that sends no notifications.
pub async fn exclude_without_notifications(connect: impl AsyncFn(String) -> Engine) {
    let database = Cluster::shared().fresh_database().await;
    let proxy = Proxy::start(Cluster::shared().address()).await;
    // The clients send NOTIFY instead of LISTEN, so none of them listens. Both words have the same length.
    proxy.rewrite("LISTEN leasehold", "NOTIFY leasehold");
    exclude(&proxy.url(database.url()), connect).await;
    assert!(proxy.traffic().rewritten > 0);
}

async fn exclude(url: &str, connect: impl AsyncFn(String) -> Engine) {
    const KEYS: usize = 4;
    let inside: Arc<[AtomicU32; KEYS]> = Arc::default();
    let mut workers = Vec::new();
    for client in 0..4_usize {
        let lock = Arc::new(connect(url.to_owned()).await);
        for worker in 0..3_usize {
            let (lock, inside) = (Arc::clone(&lock), Arc::clone(&inside));
            workers.push(tokio::spawn(async move {
                for round in 0..15_usize {
                    let first = (client + worker + round) % KEYS;
                    let keys = if round % 3 == 0 { vec![first, (first + 1) % KEYS] } else { vec![first] };
                    let guard =
                        lock.keys(keys.iter().map(usize::to_string)).wait(LONG).acquire().await.unwrap();
                    for key in &keys {
                        assert_eq!(inside[*key].fetch_add(1, Ordering::SeqCst), 0, "two holders of {key}");
                    }
                    tokio::task::yield_now().await;
                    for key in &keys {
                        inside[*key].fetch_sub(1, Ordering::SeqCst);
                    }
                    // Fails while another transaction has locked the row. The engine then retries in the background.
                    let _ = guard.release().await;
                }
            }));
        }
    }
    for worker in workers {
        worker.await.unwrap();
    }
}
