//! The smallest store: a table of holders, without leases and tokens. The engine adds queues, waiting and undo.
//!
//! A store with leases and tokens is the example `your_store` of `leasehold-conformance`.
//!
//! ```text
//! cargo run -p leasehold-engine --example smallest_store
//! ```

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_api::{Capabilities, Error, HolderId, LockExt as _, LockKey, LossReason, Scope};
use leasehold_engine::{
    Attempt, Contended, Engine, Granted, HoldRef, ReleaseReply, Renewed, Request, Single, SingleKey,
    async_trait,
};

/// The holder of each key. A real store has a server in its place.
type Holders = Arc<Mutex<HashMap<LockKey, HolderId>>>;

/// One client of the table.
#[derive(Debug)]
struct Client {
    holders: Holders,
    capabilities: Capabilities,
}

impl Client {
    fn holders(&self) -> MutexGuard<'_, HashMap<LockKey, HolderId>> {
        self.holders.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("smallest store")
    }
}

#[async_trait]
impl SingleKey for Client {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    async fn acquire(&self, request: Request) -> Result<Attempt, Error> {
        // Leaves an existing holder in place, because the same attempt sent twice is one grant.
        let holder = *self.holders().entry(request.key).or_insert(request.holder);
        Ok(if holder == request.holder {
            Attempt::Granted(Granted::default())
        } else {
            Attempt::Contended(Contended::new())
        })
    }

    async fn renew(&self, hold: HoldRef) -> Result<Renewed, Error> {
        let is_held = self.holders().get(&hold.key) == Some(&hold.holder);
        Ok(if is_held { Renewed::Extended } else { Renewed::Gone(LossReason::Gone) })
    }

    async fn release(&self, hold: HoldRef) -> Result<ReleaseReply, Error> {
        let mut holders = self.holders();
        let is_held = holders.get(&hold.key) == Some(&hold.holder);
        if is_held {
            holders.remove(&hold.key);
        }
        Ok(ReleaseReply::new(is_held))
    }
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    for line in run().await? {
        println!("{line}");
    }
    Ok(())
}

/// Runs two clients of one table. Returns a line for each of their steps.
pub async fn run() -> Result<Vec<String>, Error> {
    let holders = Holders::default();
    let client = || {
        let capabilities = Capabilities::new(Scope::Process);
        Engine::start(Single::new(Client { holders: Arc::clone(&holders), capabilities }))
    };
    let (one, other) = (client()?, client()?);
    let guard = one.key("a").acquire().await?;
    let mut steps = vec![format!("one holds {}", guard.key())];
    let refused = other.key("a").try_acquire().await?.is_none();
    steps.push(format!("the other is {}", if refused { "refused" } else { "granted it too" }));

    let waiting = other.key("a").wait(Duration::from_secs(60));
    let (released, granted) = tokio::join!(guard.release(), waiting.acquire());
    released?;
    steps.push(format!("the other waits, and gets {}", granted?.key()));
    Ok(steps)
}
