//! The recipes of `docs/cookbook`, as code that the tests race on Postgres.
//!
//! A statement is written only on its page, and [`sql`] reads it from there at compile time. A test checks that the
//! Rust code on the pages is the code of these modules.

mod page;

pub mod apology;
pub mod archive;
pub mod copy_names;
pub mod delete;
pub mod duty;
pub mod file_names;
pub mod leader;
pub mod ledger;
pub mod migrate;
pub mod outside;
pub mod projects;
pub mod quota;
pub mod rate_limit;
pub mod render_once;
pub mod scheduled_job;
pub mod second_run;
pub mod stack;
pub mod transaction;
pub mod unique_name;

pub use page::sql;
