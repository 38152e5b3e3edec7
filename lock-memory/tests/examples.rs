//! Checks the output of the example.

#![allow(clippy::unwrap_used)]

#[allow(dead_code, unreachable_pub)] // A program, of which the test uses parts.
#[path = "../examples/keyed_mutex.rs"]
mod keyed_mutex;

#[tokio::test]
async fn no_deposit_is_lost() {
    let balances = keyed_mutex::run().await.unwrap();
    assert_eq!(Vec::from_iter(balances), [(0, 25), (1, 25), (2, 25), (3, 25)]);
}
