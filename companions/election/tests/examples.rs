//! Checks the output of the example.

#![allow(clippy::unwrap_used)]

#[allow(dead_code, unreachable_pub)] // A program, of which the test uses parts.
#[path = "../examples/two_replicas.rs"]
mod two_replicas;

#[tokio::test]
async fn the_second_replica_goes_on_where_the_first_one_has_stepped_down() {
    let log = two_replicas::run().await.unwrap();
    assert_eq!(log, [("a", 0), ("a", 1), ("b", 2), ("b", 3)]);
}
