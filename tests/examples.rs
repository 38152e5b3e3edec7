//! Checks the output of the example `quickstart`.

#![allow(clippy::unwrap_used)]
#![cfg(feature = "memory")]

#[allow(dead_code, unreachable_pub)] // A program, of which the test uses parts.
#[path = "../examples/quickstart.rs"]
mod quickstart;

#[tokio::test]
async fn the_first_steps() {
    let expected =
        ["acquired report", "a second caller was refused", "released", "wrote a report of 12 pages"];
    assert_eq!(quickstart::run("memory:").await.unwrap(), expected);
}
