//! Where entries are kept: in this process, or in Postgres.

use serde::Serialize;
use sqlx::pool::PoolConnection;

use crate::domain::Entries;
use crate::memory::Memory;
use crate::postgres::Database;

/// The accounts that are there from the beginning: 1 to this number.
pub(crate) const HOLDERS: i64 = 6;
/// What each of them begins with.
pub(crate) const OPENING: i64 = 100;

#[derive(Clone, Debug)]
pub(crate) enum Store {
    Memory(Memory),
    Postgres(Database),
}

/// An account, as the page shows it.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Account {
    pub(crate) holder: i64,
    pub(crate) balance: i64,
    /// How many spends have left it below zero: each of them has spent what another one had spent already.
    pub(crate) double_spends: i64,
}

/// What one request reads and writes.
pub(crate) enum Connection {
    Memory(Memory),
    Postgres(PoolConnection<sqlx::Postgres>),
}

impl Store {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Memory(_) => "memory",
            Self::Postgres(_) => "Postgres",
        }
    }

    pub(crate) async fn entries(&self) -> Result<Connection, sqlx::Error> {
        match self {
            Self::Memory(memory) => Ok(Connection::Memory(memory.clone())),
            Self::Postgres(database) => Ok(Connection::Postgres(database.pool.acquire().await?)),
        }
    }

    pub(crate) async fn accounts(&self) -> Result<Vec<Account>, sqlx::Error> {
        match self {
            Self::Memory(memory) => Ok(memory.accounts()),
            Self::Postgres(database) => database.accounts().await,
        }
    }

    /// How many transactions wait for a lock at the server.
    pub(crate) async fn waiting(&self) -> Result<usize, sqlx::Error> {
        match self {
            Self::Memory(_) => Ok(0),
            Self::Postgres(database) => database.waiting().await,
        }
    }

    /// All entries go, and the accounts begin again.
    pub(crate) async fn start_over(&self) -> Result<(), sqlx::Error> {
        match self {
            Self::Memory(memory) => memory.start_over(),
            Self::Postgres(database) => database.start_over().await?,
        }
        Ok(())
    }

    pub(crate) async fn close(&self) {
        if let Self::Postgres(database) = self {
            database.close().await;
        }
    }
}

impl Entries for Connection {
    async fn balance(&mut self, holder: i64) -> Result<i64, sqlx::Error> {
        match self {
            Self::Memory(memory) => memory.balance(holder).await,
            Self::Postgres(connection) => connection.balance(holder).await,
        }
    }

    async fn append(&mut self, holder: i64, amount: i64) -> Result<(), sqlx::Error> {
        match self {
            Self::Memory(memory) => memory.append(holder, amount).await,
            Self::Postgres(connection) => connection.append(holder, amount).await,
        }
    }
}
