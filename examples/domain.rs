//! Domain code that only uses the trait `Lock`, and its tests, which run without server and network.
//!
//! ```text
//! cargo run -p leasehold --example domain --features test-util
//! cargo test -p leasehold --example domain --features test-util
//! ```

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use leasehold::{Error, FencingToken, Lock, LockExt as _, key};

/// Accounts, each with a balance. A program has a database in its place.
#[derive(Debug, Default)]
struct Accounts(Mutex<Account>);

#[derive(Clone, Copy, Debug, Default)]
struct Account {
    balance: u64,
    /// The fencing token of the last write.
    token: Option<FencingToken>,
}

impl Accounts {
    fn read(&self) -> Account {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes the balance. Refuses a token older than the last write's, because the writer has lost the lock.
    fn write(&self, balance: u64, token: Option<FencingToken>) -> Result<(), SpendError> {
        let mut account = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if token < account.token {
            return Err(SpendError::Late);
        }
        *account = Account { balance, token };
        Ok(())
    }
}

/// The reason why nothing was spent.
#[derive(Debug, thiserror::Error)]
enum SpendError {
    #[error("the balance is too small")]
    Short,
    #[error("another spender has the lock by now")]
    Late,
    #[error(transparent)]
    Lock(#[from] Error),
}

/// Spends from an account, together with spenders in other processes.
#[derive(Clone, Debug)]
struct Ledger {
    lock: Arc<dyn Lock>,
    accounts: Arc<Accounts>,
    /// Time between the read of the balance and the write.
    pause: Duration,
}

impl Ledger {
    async fn spend(&self, account: u64, amount: u64) -> Result<u64, SpendError> {
        let guard = self.lock.key(key!["account", account]?).acquire().await?;
        let rest = self.accounts.read().balance.checked_sub(amount).ok_or(SpendError::Short)?;
        tokio::time::sleep(self.pause).await;
        self.accounts.write(rest, guard.token())?;
        guard.release().await?;
        Ok(rest)
    }
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    for line in run().await? {
        println!("{line}");
    }
    Ok(())
}

/// Spends twice. Returns a line for each. Only this function chooses the store.
async fn run() -> Result<Vec<String>, Error> {
    let accounts = Arc::new(Accounts(Mutex::new(Account { balance: 30, token: None })));
    let ledger =
        Ledger { lock: leasehold::connect("memory:").await?, accounts, pause: Duration::from_millis(10) };
    let mut said = Vec::new();
    for amount in [20, 20] {
        said.push(match ledger.spend(42, amount).await {
            Ok(rest) => format!("spent {amount}, {rest} left"),
            Err(error) => format!("{amount} not spent: {error}"),
        });
    }
    ledger.lock.close().await?;
    Ok(said)
}

#[cfg(test)]
mod tests {
    use leasehold::memory::{ClientSetup, MemoryStore};

    use super::*;

    const PAUSE: Duration = Duration::from_secs(1);

    fn ledger(lock: impl Lock, accounts: &Arc<Accounts>) -> Ledger {
        Ledger { lock: Arc::new(lock), accounts: Arc::clone(accounts), pause: PAUSE }
    }

    fn accounts(balance: u64) -> Arc<Accounts> {
        Arc::new(Accounts(Mutex::new(Account { balance, token: None })))
    }

    #[tokio::test]
    async fn the_program_spends_once() {
        assert_eq!(run().await.unwrap(), ["spent 20, 10 left", "20 not spent: the balance is too small"]);
    }

    /// Uses two clients of one store, which act like two processes. Time is virtual.
    #[tokio::test(start_paused = true)]
    async fn nobody_overdraws() {
        let (store, accounts) = (MemoryStore::new(), accounts(30));
        let (one, other) =
            (ledger(store.client().unwrap(), &accounts), ledger(store.client().unwrap(), &accounts));
        let (first, second) = tokio::join!(one.spend(42, 20), other.spend(42, 20));
        assert!(matches!((&first, &second), (Ok(10), Err(SpendError::Short))), "{first:?} {second:?}");
        assert_eq!(accounts.read().balance, 10);
    }

    /// The first spender loses contact with the store and then its lease, and tries to write anyway.
    #[tokio::test(start_paused = true)]
    async fn a_late_write_is_refused() {
        let store = MemoryStore::new().default_ttl(Duration::from_secs(30));
        let accounts = accounts(30);
        let client = store.client_with(ClientSetup::new()).unwrap();
        let mut late = ledger(client.lock, &accounts);
        late.pause = Duration::from_secs(120);
        let other = ledger(store.client().unwrap(), &accounts);
        let takes_over = async {
            tokio::time::sleep(PAUSE).await;
            client.faults.silence(true); // the store receives nothing from the first client after this
            other.spend(42, 20).await
        };
        let (late, spent) = tokio::join!(late.spend(42, 20), takes_over);
        assert!(matches!((&late, &spent), (Err(SpendError::Late), Ok(10))), "{late:?} {spent:?}");
    }
}
