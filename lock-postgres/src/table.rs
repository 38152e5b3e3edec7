//! The engine that the stores with one row per key share: mutex rows and leases.
//!
//! A store provides its statements ([`Dialect`]) and declares its capabilities ([`TableSettings`]). Everything between a
//! request and a statement is here. Requests of all callers are batched, with at most one statement of each kind per round
//! trip.

mod admin;
mod adoption;
mod backend;
mod common;
mod db;
mod dialect;
mod grants;
mod hints;
mod holds;
mod job;
mod maintenance;
mod parts;
mod registry;
mod sql;
mod upkeep;
mod values;
mod work;

pub use backend::{TableBackend, TableSettings};
pub use dialect::{Dialect, Extension};
pub use parts::Parts;
pub use sql::SETTINGS;
