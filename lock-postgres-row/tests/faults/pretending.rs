//! A server on which some statements do nothing (`docs/hazards.md` H59).

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use leasehold_api::LockExt as _;
use leasehold_postgres::PgConfig;
use leasehold_postgres_row::RowConfig;
use sqlx::Connection as _;
use test_servers::{Cluster, Proxy};
use tokio::time::sleep;

/// Only a broken server needs this long.
const LONG: Duration = Duration::from_secs(120);

fn config_of(url: &str) -> RowConfig {
    RowConfig::new(PgConfig::from_url(url).unwrap().install_schema(true).connect_timeout(LONG))
}

/// Several clients take turns at few keys, singly and together, and never is there a second holder.
async fn exclude(url: &str) {
    const KEYS: usize = 4;
    let inside: Arc<[AtomicU32; KEYS]> = Arc::default();
    let mut workers = Vec::new();
    for client in 0..4_usize {
        let lock = Arc::new(config_of(url).poll(Duration::from_millis(20)).connect().await.unwrap());
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
                    // Refused while somebody else keeps the row locked; then it is repeated in the background.
                    let _ = guard.release().await;
                }
            }));
        }
    }
    for worker in workers {
        worker.await.unwrap();
    }
}

/// The server reads these words as spaces.
async fn without(words: &[&str]) {
    let database = Cluster::shared().fresh_database().await;
    config_of(database.url()).connect().await.unwrap();
    let proxy = Proxy::start(Cluster::shared().address()).await;
    for words in words {
        proxy.rewrite(words, "");
    }
    // Rows that somebody keeps locked are what statements leave out.
    let mut user = sqlx::PgConnection::connect(database.url()).await.unwrap();
    let locks = tokio::spawn(async move {
        loop {
            sqlx::raw_sql("BEGIN; SELECT FROM leasehold.mutex FOR UPDATE").execute(&mut user).await.unwrap();
            sleep(Duration::from_millis(400)).await;
            sqlx::raw_sql("COMMIT").execute(&mut user).await.unwrap();
            sleep(Duration::from_millis(300)).await;
        }
    });
    exclude(&proxy.url(database.url())).await;
    locks.abort();
    assert!(proxy.traffic().rewritten > 0, "nothing was asked for by {words:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_exclude_where_rows_are_not_locked() {
    without(&["FOR NO KEY UPDATE", "FOR UPDATE", "SKIP LOCKED"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_exclude_where_locked_rows_are_not_skipped() {
    without(&["SKIP LOCKED"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_exclude_and_are_handed_on_where_nobody_hears_a_notification() {
    let database = Cluster::shared().fresh_database().await;
    let proxy = Proxy::start(Cluster::shared().address()).await;
    // Which is as long.
    proxy.rewrite("LISTEN leasehold", "NOTIFY leasehold");
    exclude(&proxy.url(database.url())).await;
    assert!(proxy.traffic().rewritten > 0);
}
