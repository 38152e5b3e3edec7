//! The engine on a store in memory. One program, so that shared code is built once.

#![allow(unreachable_pub, clippy::unwrap_used, clippy::expect_used)] // A failed `unwrap` fails the test.

mod cancellation;
mod closing;
mod common;
mod contention;
mod ending;
mod follow;
mod handover;
mod interleavings;
mod life;
mod limits;
mod look;
mod modes;
mod outbox;
mod portable;
mod queued;
mod runtime;
mod sharing;
mod trouble;
