//! A credit ledger over HTTP, with and without a lock: the example service.
//!
//! `domain` has the rule, `handlers` the requests, `routes` the place of the lock. The rest serves the demonstration:
//! two stores, a switch between the guards, a load, and a page that shows the results.

mod control;
mod domain;
mod handlers;
mod lanes;
mod load;
mod memory;
mod mode;
mod postgres;
mod routes;
mod service;
mod store;
mod tally;
mod trace;

pub use mode::Mode;
pub use service::{Error, Options, Running, start};
