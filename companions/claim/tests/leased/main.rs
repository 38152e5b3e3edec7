//! Tests of claims under leases in Postgres. They are one program, so they share a server.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A failed `unwrap` fails the test.

mod common;
mod contention;
mod crowd;
mod faults;
mod groups;
mod infinite;
mod lease;
mod limits;
mod listener;
mod pretending;
mod real_size;
mod settle;
mod stats;
mod take;
mod tenants;
