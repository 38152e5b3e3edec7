//! Tests of the claimer. They are one program, so they share a server.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A failed `unwrap` fails the test.

mod claims;
mod close;
mod common;
mod idle;
mod keep;
mod max_hold;
mod passes;
mod pg;
mod postgres;
mod processes;
mod refused;
mod run;
mod wake;
