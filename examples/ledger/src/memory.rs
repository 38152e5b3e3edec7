//! Stores the ledger in this process, without a database.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::domain::{Entries, Unavailable};
use crate::store::{Account, HOLDERS, OPENING};
use std::ops::RangeInclusive;

/// Simulates the round trip to a database. Without that pause, no two requests would overlap.
const ROUND_TRIP: Duration = Duration::from_millis(1);

/// Stores sums and counts instead of entries, because entries would be unread and grow without limit.
#[derive(Clone, Debug)]
pub(crate) struct Memory(Arc<Mutex<BTreeMap<i64, Account>>>);

impl Memory {
    pub(crate) fn new() -> Self {
        let memory = Self(Arc::default());
        memory.start_over();
        memory
    }

    pub(crate) fn accounts(&self, holders: RangeInclusive<i64>) -> Vec<Account> {
        self.state().range(holders).map(|(_, account)| *account).collect()
    }

    pub(crate) fn start_over(&self) {
        let opened = |holder| (holder, Account { holder, balance: OPENING, double_spends: 0 });
        *self.state() = (1..=HOLDERS).map(opened).collect();
    }

    fn state(&self) -> MutexGuard<'_, BTreeMap<i64, Account>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entries for Memory {
    async fn balance(&mut self, holder: i64) -> Result<i64, Unavailable> {
        let balance = self.state().get(&holder).map_or(0, |account| account.balance);
        tokio::time::sleep(ROUND_TRIP).await;
        Ok(balance)
    }

    async fn append(&mut self, holder: i64, amount: i64) -> Result<(), Unavailable> {
        tokio::time::sleep(ROUND_TRIP).await;
        let mut state = self.state();
        let account = state.entry(holder).or_insert(Account { holder, balance: 0, double_spends: 0 });
        account.balance = account.balance.saturating_add(amount);
        account.double_spends += i64::from(amount < 0 && account.balance < 0);
        Ok(())
    }
}
