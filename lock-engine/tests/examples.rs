//! Checks the output of the example.

#![allow(clippy::unwrap_used)]

#[allow(dead_code, unreachable_pub)] // A program, of which the test uses parts.
#[path = "../examples/smallest_store.rs"]
mod smallest_store;

#[tokio::test]
async fn the_smallest_store_excludes_and_has_waiters() {
    let expected = ["one holds a", "the other is refused", "the other waits, and gets a"];
    assert_eq!(smallest_store::run().await.unwrap(), expected);
}
