//! Where entries are stored: in this process, or in Postgres.

use std::ops::RangeInclusive;

use serde::Serialize;
use sqlx::pool::PoolConnection;

use crate::domain::{Entries, Unavailable};
use crate::memory::Memory;
use crate::postgres::Database;

/// The number of initial accounts, numbered from 1.
pub(crate) const HOLDERS: i64 = 6;
/// The initial balance of each account.
pub(crate) const OPENING: i64 = 100;
/// The accounts of rounds on the page have this number or a larger one.
pub(crate) const ROUNDS: i64 = 1_000_000;

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
    /// The number of spends that left a negative balance. Such a spend used credit that another one had already used.
    pub(crate) double_spends: i64,
}

/// The connection through which one request reads and writes entries.
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

    pub(crate) async fn entries(&self) -> Result<Connection, Unavailable> {
        match self {
            Self::Memory(memory) => Ok(Connection::Memory(memory.clone())),
            Self::Postgres(database) => Ok(Connection::Postgres(database.pool.acquire().await?)),
        }
    }

    /// Returns the accounts, except the accounts of rounds.
    pub(crate) async fn accounts(&self) -> Result<Vec<Account>, Unavailable> {
        self.within(0..=ROUNDS - 1).await
    }

    /// Returns one account, or `None` without entries.
    pub(crate) async fn account(&self, holder: i64) -> Result<Option<Account>, Unavailable> {
        Ok(self.within(holder..=holder).await?.pop())
    }

    async fn within(&self, holders: RangeInclusive<i64>) -> Result<Vec<Account>, Unavailable> {
        match self {
            Self::Memory(memory) => Ok(memory.accounts(holders)),
            Self::Postgres(database) => Ok(database.accounts(holders).await?),
        }
    }

    /// Returns the number of transactions that wait for a lock at the server.
    pub(crate) async fn waiting(&self) -> Result<usize, Unavailable> {
        match self {
            Self::Memory(_) => Ok(0),
            Self::Postgres(database) => Ok(database.waiting().await?),
        }
    }

    /// Deletes all entries and resets the accounts.
    pub(crate) async fn start_over(&self) -> Result<(), Unavailable> {
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
    async fn balance(&mut self, holder: i64) -> Result<i64, Unavailable> {
        match self {
            Self::Memory(memory) => memory.balance(holder).await,
            Self::Postgres(connection) => connection.balance(holder).await,
        }
    }

    async fn append(&mut self, holder: i64, amount: i64) -> Result<(), Unavailable> {
        match self {
            Self::Memory(memory) => memory.append(holder, amount).await,
            Self::Postgres(connection) => connection.append(holder, amount).await,
        }
    }
}
