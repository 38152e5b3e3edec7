//! A credit ledger over HTTP, with and without a lock: the example service.
//!
//! `domain` has the rule, `handlers` the requests, `routes` where the lock goes. The rest is what a demonstration
//! needs: two stores, a switch between the ways to lock, a load, and a page that shows what comes of it.

mod control;
mod domain;
mod handlers;
mod load;
mod memory;
mod mode;
mod postgres;
mod routes;
mod service;
mod store;
mod tally;

pub use mode::Mode;
pub use service::{Error, Options, Running, start};
