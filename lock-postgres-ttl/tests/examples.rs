//! Checks the output of the example.

#![allow(clippy::unwrap_used)]

#[allow(dead_code, unreachable_pub)] // A program, of which the test uses parts.
#[path = "../examples/fenced_commit.rs"]
mod fenced_commit;

#[tokio::test]
async fn without_the_lease_nothing_is_committed() {
    let db = test_servers::fresh_database().await;
    let expected = ["spending with the lease: committed", "spending without it: rolled back", "90 are left"];
    assert_eq!(fenced_commit::run(db.url()).await.unwrap(), expected);
}
