//! Middleware of axum apps, with locks and transactions in Postgres. One program, so that all tests share a server.

#![allow(clippy::unwrap_used, clippy::expect_used)] // A failed `unwrap` fails the test.

mod apps;
mod commit;
#[path = "../common/layers.rs"]
mod common;
mod failed_release;
mod leaks;
mod ledger;
mod messages;
mod races;
mod transaction;
