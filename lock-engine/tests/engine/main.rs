//! The engine on a store in memory: one program, so that what its parts share is built once.

#![allow(unreachable_pub, clippy::unwrap_used, clippy::expect_used)] // Of tests, which are to fail here.

mod cancellation;
mod closing;
mod common;
mod contention;
mod ending;
mod interleavings;
mod life;
mod look;
mod outbox;
mod runtime;
mod trouble;
