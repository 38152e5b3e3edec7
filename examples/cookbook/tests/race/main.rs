//! Races of the recipes of `docs/cookbook`. Each wrong way fails as its page describes, beside the right way. Sessions
//! are ordered by the server's report of their waits, never by time.
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
mod projects;
mod quota;
mod rate_limit;
mod render_once;
mod scheduled_job;
mod second_run;
mod stack;
mod support;
mod transaction;
mod unique_name;
