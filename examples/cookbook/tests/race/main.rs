//! The recipes of `docs/cookbook`, raced: each wrong way fails as its page says, next to the right one. Sessions
//! are ordered by what the server says of their waits, never by time.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod apology;
mod archive;
mod copy_names;
mod delete;
mod duty;
mod file_names;
mod leader;
mod ledger;
mod migrate;
mod outside;
mod pages;
mod quota;
mod scheduled_job;
mod stack;
mod support;
mod transaction;
mod unique_name;
