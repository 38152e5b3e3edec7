//! Postgres URLs, for what a program does on the server besides locking.

use leasehold_api::Error;
use leasehold_engine::scheme::invalid;
use leasehold_postgres::schema::Stores;
use leasehold_postgres::{Credentials, PgConfig, scheme};

use crate::stores;

/// The server, database and schema that a Postgres URL names, for what is done there besides locking:
/// installing the schema, looking at the server.
///
/// # Errors
///
/// [`InvalidOption`](crate::ErrorKind::InvalidOption) for the URL of another store and for everything
/// that [`connect`](crate::connect()) would refuse about it. No error repeats the URL.
pub fn postgres_config(url: &str) -> Result<PgConfig, Error> {
    stores::read(url)?.extension::<PgConfig>().cloned().ok_or_else(not_of_postgres)
}

/// The user and the password that a Postgres URL names, or the environment where it names none: for
/// [`ConnectOptions::credentials`](crate::ConnectOptions::credentials), where the URL is a secret that changes. Nothing else
/// of the URL counts.
///
/// # Errors
///
/// As [`postgres_config`].
pub fn postgres_credentials(url: &str) -> Result<Credentials, Error> {
    postgres_config(url)?;
    scheme::credentials(&stores::parse(url)?)
}

/// The stores of a schema that the one with this URL needs privileges for. For the command, and not part of the interface.
#[doc(hidden)]
pub fn postgres_stores(url: &str) -> Result<Stores, Error> {
    stores::read(url)?.extension::<Stores>().copied().ok_or_else(not_of_postgres)
}

fn not_of_postgres() -> Error {
    invalid("this needs the URL of a Postgres database, such as postgres://user@host:5432/database")
}
