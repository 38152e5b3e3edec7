//! The example `swap` on each compiled-in store. CI also builds it with each of these features alone.

#![allow(clippy::unwrap_used)]
#![cfg(any(feature = "memory", feature = "file", feature = "postgres-ttl"))]

#[allow(dead_code, unreachable_pub)] // A program, of which the tests use parts.
#[path = "../examples/swap.rs"]
mod swap;

#[cfg(feature = "memory")]
#[tokio::test]
async fn two_clients_of_a_memory_store_sell_each_item_once() {
    assert_eq!(swap::run("memory:swap").await.unwrap(), 5);
}

#[cfg(feature = "file")]
#[tokio::test]
async fn two_clients_of_a_file_store_sell_each_item_once() {
    let directory = tempfile::tempdir().unwrap();
    let url = format!("file://{}", directory.path().join("locks").display());
    assert_eq!(swap::run(&url).await.unwrap(), 5);
}

#[cfg(feature = "postgres-ttl")]
#[tokio::test]
async fn two_clients_of_a_lease_store_sell_each_item_once() {
    let db = test_servers::fresh_database().await;
    let url = db.url().replacen("postgres:", "postgres+ttl:", 1);
    let url = format!("{url}{}install=true", if url.contains('?') { '&' } else { '?' });
    assert_eq!(swap::run(&url).await.unwrap(), 5);
}
