//! Checks the output of the example.

#![allow(clippy::unwrap_used)]

#[allow(dead_code, unreachable_pub)] // A program, of which the test uses parts.
#[path = "../examples/month_end.rs"]
mod month_end;

#[tokio::test]
async fn a_run_that_stopped_half_way_is_released_by_an_operator() {
    let db = test_servers::fresh_database().await;
    let expected = [
        "the job has started",
        "a second run was refused",
        "held for: closing of June",
        "released by force: true",
        "released by force again: false",
        "the next run is done",
        "the job has lost its lock",
    ];
    assert_eq!(month_end::run(db.url()).await.unwrap(), expected);
}
