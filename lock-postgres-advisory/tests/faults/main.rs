//! What really happens to session locks on a server (`docs/hazards.md`): one program, so that its parts share a server.

#![allow(clippy::unwrap_used)] // Of tests, which are to fail here.

mod admin;
mod cells;
mod common;
mod crowds;
mod helper;
mod keys;
mod limits;
mod loss;
mod pooler;
mod races;
mod refused;
mod settings;
mod snapshots;
