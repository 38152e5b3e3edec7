//! Middleware of axum apps, with locks and transactions in Postgres: one program, so that its parts share a server.

#![allow(clippy::unwrap_used, clippy::expect_used)] // Of tests, which are to fail here.

mod apps;
mod commit;
#[path = "../common/layers.rs"]
mod common;
mod leaks;
mod ledger;
mod races;
mod transaction;
