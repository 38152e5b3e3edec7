//! Tests of specs and migrations. They are one program, so they share a server.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A failed `unwrap` fails the test.

mod check;
mod common;
mod create;
mod cyclic;
mod hand_off;
mod migration;
mod migration_claims;
mod notify_trigger;
mod settled_by;
mod wide_keys;
