//! A mutex for each account. Tasks of one account exclude each other, and tasks of different accounts do not
//! wait.
//!
//! ```text
//! cargo run -p leasehold-memory --example keyed_mutex
//! ```

use std::collections::BTreeMap;
use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};

use leasehold_api::{Lock, LockExt as _, key};
use tokio::task::JoinSet;

const ACCOUNTS: u32 = 4;
const DEPOSITS: u32 = 25;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// The balance of each account. A real program has a database in its place.
type Balances = Arc<Mutex<BTreeMap<u32, u32>>>;

#[tokio::main]
async fn main() -> Result<()> {
    println!("{:?}", run().await?);
    Ok(())
}

/// Returns the balances after 25 deposits to each of four accounts, all at once.
pub async fn run() -> Result<BTreeMap<u32, u32>> {
    let lock: Arc<dyn Lock> = Arc::new(leasehold_memory::connect()?);
    let balances = Balances::default();
    let mut tasks = JoinSet::new();
    for deposit in 0..ACCOUNTS * DEPOSITS {
        tasks.spawn(deposit_one(Arc::clone(&lock), Arc::clone(&balances), deposit % ACCOUNTS));
    }
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    let balances = balances.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(balances.clone())
}

async fn deposit_one(lock: Arc<dyn Lock>, balances: Balances, account: u32) -> Result<()> {
    let guard = lock.key(key!["account", account]?).acquire().await?;
    let map = || balances.lock().unwrap_or_else(PoisonError::into_inner);
    let balance = map().get(&account).copied().unwrap_or_default();
    // Lets other tasks run. Without the lock, one of them would read the same balance here.
    tokio::task::yield_now().await;
    map().insert(account, balance + 1);
    guard.release().await?;
    Ok(())
}
