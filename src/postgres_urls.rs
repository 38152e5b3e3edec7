//! Postgres URLs, for programs that use the server for more than locks.

use leasehold_api::Error;
use leasehold_engine::scheme::invalid;
use leasehold_postgres::schema::Stores;
use leasehold_postgres::{Credentials, PgConfig, scheme};

use crate::stores;

/// Returns the server, database and schema of a Postgres URL, for work besides locking, such as installing the
/// schema.
///
/// # Errors
///
/// [`InvalidOption`](crate::ErrorKind::InvalidOption) for the URL of another store, and for a URL that
/// [`connect`](crate::connect()) refuses. No error repeats the URL.
pub fn postgres_config(url: &str) -> Result<PgConfig, Error> {
    stores::read(url)?.extension::<PgConfig>().cloned().ok_or_else(not_of_postgres)
}

/// Returns the user and the password of a Postgres URL, or of the environment if the URL has none. The other
/// parts of the URL are ignored. For [`ConnectOptions::credentials`](crate::ConnectOptions::credentials), if
/// the URL is a secret that changes.
///
/// # Errors
///
/// As [`postgres_config`].
pub fn postgres_credentials(url: &str) -> Result<Credentials, Error> {
    postgres_config(url)?;
    scheme::credentials(&stores::parse(url)?)
}

/// Returns the stores for which a user of this URL needs privileges in the schema. Public for the command only, and not
/// part of the interface.
#[doc(hidden)]
pub fn postgres_stores(url: &str) -> Result<Stores, Error> {
    stores::read(url)?.extension::<Stores>().copied().ok_or_else(not_of_postgres)
}

fn not_of_postgres() -> Error {
    invalid("this needs the URL of a Postgres database, such as postgres://user@host:5432/database")
}
