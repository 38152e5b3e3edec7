#![doc = include_str!("../README.md")]

mod catalog;
mod error;
mod facts;
mod finding;
mod identity;
mod installation;
mod names;
mod session;
pub mod sql;
mod step;

pub use catalog::{CatalogReader, TextRow};
pub use error::{TableError, server_message};
pub use facts::{ColumnFacts, IndexFacts, TableFacts};
pub use finding::Finding;
pub use identity::RowIdentity;
pub use installation::{Installation, grants};
pub use names::{Column, Table};
pub use session::SchemaSession;
pub use step::{MigrationStep, write_script};

/// The driver whose types are part of this crate's interface.
pub use leasehold_postgres::sqlx;
