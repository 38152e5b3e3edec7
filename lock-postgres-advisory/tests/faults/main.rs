//! Hazards of session locks on a real server (`docs/hazards.md`). One program, so that all tests share a server.

#![allow(clippy::unwrap_used)] // A failed `unwrap` fails the test.

mod admin;
mod cells;
mod common;
mod crowds;
mod idle;
mod keys;
mod limits;
mod logs;
mod loss;
mod modes;
mod permits;
mod pooler;
mod pretending;
mod races;
mod refused;
mod settings;
mod side_session;
mod snapshots;
