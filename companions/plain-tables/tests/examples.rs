//! Checks the output of the example.

#![allow(clippy::unwrap_used)]

#[allow(dead_code, unreachable_pub)] // A program, of which the test uses parts.
#[path = "../examples/import.rs"]
mod import;

#[tokio::test]
async fn plain_tables_are_locks_as_they_are() {
    let db = test_servers::fresh_database().await;
    let expected = [
        "import of file 1: granted",
        "the same again: refused",
        "import of file 2: granted",
        "file 1 after its release: granted",
        "report 1: granted",
        "within the hour: refused",
        "an hour later: granted",
    ];
    assert_eq!(import::run(db.url()).await.unwrap(), expected);
}
