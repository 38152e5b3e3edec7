//! The engine that the stores with one row per key share: mutex rows and leases.
//!
//! A store gives its statements ([`Dialect`]) and what it promises ([`TableSettings`]); everything
//! between a request and a statement is here. Requests travel together: for each kind at most one
//! statement per round trip, whoever asked.

mod admin;
mod backend;
mod common;
mod db;
mod dialect;
mod grants;
mod hints;
mod holds;
mod job;
mod maintenance;
mod registry;
mod sql;
mod upkeep;
mod values;
mod work;

pub use backend::{TableBackend, TableSettings};
pub use dialect::{Dialect, Extension};
pub use sql::SETTINGS;
