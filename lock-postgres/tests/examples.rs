//! Checks the output of the example.

#![allow(clippy::unwrap_used)]

#[allow(dead_code, unreachable_pub)] // A program, of which the test uses parts.
#[path = "../examples/schema.rs"]
mod schema;

use test_servers::{fresh_database, ordinary_role};

#[tokio::test]
async fn the_role_lacks_nothing_when_the_schema_is_installed() {
    let (db, role) = (fresh_database().await, ordinary_role().await);
    let after = [format!("installed, and granted to {role}"), format!("{role} lacks 0 privileges")];
    let first = schema::run(db.url(), &role).await.unwrap();
    assert_eq!((first[0].as_str(), &first[1..]), ("no schema yet", after.as_slice()));
    let again = schema::run(db.url(), &role).await.unwrap();
    assert!(again[0].starts_with("Installed"), "{again:?}");
    assert_eq!(again[1..], after);
}
