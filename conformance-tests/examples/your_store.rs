//! A complete store: a table of rows with leases and fencing tokens, which all clients share.
//!
//! The table here is a map in this process. In a real store the table is on a server, and each method of
//! [`SingleKey`] is one request to it.
//!
//! ```text
//! cargo run -p leasehold-conformance --example your_store
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_api::{
    Capabilities, Error, Fencing, FencingToken, HolderId, LeaseBounds, LockKey, LossReason, Scope,
};
use leasehold_engine::{
    Attempt, Contended, Engine, Granted, HoldRef, ReleaseReply, Renewed, Request, Single, SingleKey,
    TokioClock, async_trait, token,
};
use tokio::time::Instant;

const DEFAULT_TTL: Duration = Duration::from_secs(30);

/// The server: the holder and the end of each lease, and the last token number.
#[derive(Debug, Default)]
pub struct Table {
    rows: Mutex<(BTreeMap<LockKey, Row>, u64)>,
}

#[derive(Clone, Copy, Debug)]
struct Row {
    holder: HolderId,
    token: Option<FencingToken>,
    ends: Instant,
    /// Whether a waiting request was refused during this hold, so that the releaser yields to other clients.
    awaited: bool,
}

impl Table {
    fn lock(&self) -> MutexGuard<'_, (BTreeMap<LockKey, Row>, u64)> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One client of the table.
#[derive(Debug)]
pub struct TableClient {
    table: Arc<Table>,
    capabilities: Capabilities,
}

/// Connects another client to the table.
///
/// # Errors
///
/// An error if called outside of a tokio runtime.
pub fn connect(table: &Arc<Table>) -> Result<Engine, Error> {
    Engine::builder(backend(table)).clock(Arc::new(TokioClock::new())).start()
}

/// Makes a backend for the engine.
#[must_use]
pub fn backend(table: &Arc<Table>) -> Single<TableClient> {
    // Declare only the features that the store has, because the suite tests each of them.
    let mut capabilities = Capabilities::new(Scope::Process);
    capabilities.lease =
        Some(LeaseBounds::new(Some(DEFAULT_TTL), Duration::from_secs(1), Duration::from_secs(300)));
    capabilities.fencing = Fencing::Volatile;
    capabilities.loss_detection = Duration::from_secs(300);
    capabilities.undo = Duration::from_secs(1);
    capabilities.handover = Duration::from_secs(2);
    capabilities.crash_release = Some(Duration::from_secs(300));
    Single::new(TableClient { table: Arc::clone(table), capabilities })
}

#[async_trait]
impl SingleKey for TableClient {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    // Return `Attempt::Refused(error)` if a request never reached the server, for example because there is no
    // connection. The engine then releases nothing. After an `Err` the engine releases by holder id.
    async fn acquire(&self, request: Request) -> Result<Attempt, Error> {
        let now = Instant::now();
        let (rows, last) = &mut *self.table.lock();
        match rows.get_mut(&request.key) {
            // Two requests of the same attempt are one grant, whose lease lasts from the later one.
            Some(row) if row.holder == request.holder && row.ends > now => {
                row.ends = row.ends.max(now + request.ttl.unwrap_or(DEFAULT_TTL));
                Ok(Attempt::Granted(Granted::with_token(row.token)))
            }
            Some(row) if row.ends > now => {
                // A refused try does not count, because it does not wait.
                row.awaited |= request.waits;
                let mut contended = Contended::new();
                contended.retry_after = Some(row.ends - now);
                Ok(Attempt::Contended(contended))
            }
            _ => {
                *last += 1;
                let token = token::from_store_number(*last);
                let ends = now + request.ttl.unwrap_or(DEFAULT_TTL);
                rows.insert(request.key, Row { holder: request.holder, token, ends, awaited: false });
                Ok(Attempt::Granted(Granted::with_token(token)))
            }
        }
    }

    async fn renew(&self, hold: HoldRef) -> Result<Renewed, Error> {
        let now = Instant::now();
        match self.table.lock().0.get_mut(&hold.key) {
            // Extends only a hold that this holder still has, because an ended hold stays ended.
            Some(row) if row.holder == hold.holder && row.ends > now => {
                row.ends = now + hold.ttl.unwrap_or(DEFAULT_TTL);
                Ok(Renewed::Extended)
            }
            _ => Ok(Renewed::Gone(LossReason::Gone)),
        }
    }

    async fn release(&self, hold: HoldRef) -> Result<ReleaseReply, Error> {
        let rows = &mut self.table.lock().0;
        match rows.get(&hold.key).copied() {
            Some(row) if row.holder == hold.holder => {
                rows.remove(&hold.key);
                Ok(ReleaseReply::new(row.ends > Instant::now()).waiters(row.awaited))
            }
            _ => Ok(ReleaseReply::new(false)),
        }
    }
}

impl fmt::Display for TableClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("table:example")
    }
}

#[tokio::main]
#[allow(dead_code)] // The tests include this file for its store.
async fn main() -> Result<(), Error> {
    use leasehold_api::LockExt as _;
    let table = Arc::new(Table::default());
    let (one, other) = (connect(&table)?, connect(&table)?);
    let guard = one.key("ledger:42").acquire().await?;
    println!("one client holds {} with token {:?}", guard.key(), guard.token());
    println!("the other gets {:?}", other.key("ledger:42").try_acquire().await?);
    guard.release().await?;
    println!("after the release it gets {:?}", other.key("ledger:42").try_acquire().await?);
    Ok(())
}
