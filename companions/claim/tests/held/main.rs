//! Tests of held claims. They are one program, so they share a server.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A failed `unwrap` fails the test.

mod beside_leases;
mod claims;
mod common;
mod dependent;
mod faults;
mod run;
mod second_run;
