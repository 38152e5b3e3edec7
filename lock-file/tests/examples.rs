//! Checks the output of the example.

#![allow(clippy::unwrap_used)]

#[allow(dead_code, unreachable_pub)] // A program, of which the test uses parts.
#[path = "../examples/once.rs"]
mod once;

#[tokio::test]
async fn the_second_run_within_the_hour_is_not_due() {
    let directory = tempfile::tempdir().unwrap();
    let locks = directory.path().join("locks");
    assert_eq!(once::run(&locks).await.unwrap(), "wrote 12 pages");
    assert_eq!(once::run(&locks).await.unwrap(), "not due for 60 minutes");
}
