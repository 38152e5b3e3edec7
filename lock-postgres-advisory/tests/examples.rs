//! Checks the output of the example.

#![allow(clippy::unwrap_used)]

#[allow(dead_code, unreachable_pub)] // A program, of which the test uses parts.
#[path = "../examples/transaction.rs"]
mod transaction;

#[tokio::test]
async fn three_of_five_spends_find_enough() {
    let db = test_servers::fresh_database().await;
    assert_eq!(transaction::run(db.url()).await.unwrap(), 3);
}
