//! Common parts of the tests of the claimer, such as a store that counts its calls and can be made to fail.
#![allow(dead_code, unreachable_pub, missing_docs, clippy::unwrap_used, clippy::expect_used)] // Each test file uses its part.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_claim::{
    ClaimError, ClaimRef, ClaimSpec, ClaimSpecBuilder, ClaimStore, Claimer, ClaimerBuilder, IdType,
    MemoryClaims, MemoryClock, MemoryRow, Outcome, Renewal, RowKey, Settled, State, States, Stats, Swept,
    Table, Take, Taken, TakenRow,
};
use leasehold_claim::{Sealed, Upkeep, Wake};
use leasehold_engine::TokioClock;
use tokio::sync::watch;

/// Limit of each wait.
pub const BOUND: Duration = Duration::from_secs(60);

pub async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    test_bounds::within(BOUND, format!("still not: {what}"), future).await
}

/// Polls until `is_so` returns true.
pub async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    within(what, async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
}

pub fn builder() -> ClaimSpecBuilder {
    ClaimSpec::builder(Table::new("request").unwrap())
        .id("id", IdType::Int)
        .state(
            "status",
            States::text(["new"], "complete").taken("in-progress").failed("error").exhausted("exhausted"),
        )
        .lease_columns("owner", "epoch", "lease_until")
        .attempts("attempts_left")
        .error("error")
        .ready_at("ready_at")
}

pub fn memory() -> MemoryClaims {
    MemoryClaims::new(builder().build().unwrap()).unwrap()
}

/// Returns a table with a stopped clock, for tests with paused time.
pub fn still_memory() -> MemoryClaims {
    MemoryClaims::with_clock(builder().build().unwrap(), MemoryClock::stopped()).unwrap()
}

pub fn insert(claims: &MemoryClaims, ids: impl IntoIterator<Item = i64>) {
    for id in ids {
        claims.insert(MemoryRow::new(id)).unwrap();
    }
}

pub fn with_attempts(claims: &MemoryClaims, id: i64, attempts: i32) {
    claims.insert(MemoryRow::new(id).with_attempts(attempts)).unwrap();
}

pub fn kind(error: &ClaimError) -> Option<leasehold_api::ErrorKind> {
    match error {
        ClaimError::Store(error) => Some(error.kind()),
        _ => None,
    }
}

pub fn state(claims: &MemoryClaims, id: i64) -> String {
    claims.row(&RowKey::new(id)).unwrap().state().unwrap().to_string()
}

pub fn count_in(claims: &MemoryClaims, state: &str) -> usize {
    claims.rows().iter().filter(|row| row.state().is_some_and(|is| is.as_str() == state)).count()
}

/// Returns a builder of claimers for tests with paused time.
pub fn paused(store: &Arc<Probe>) -> ClaimerBuilder {
    Claimer::builder(store.clone()).clock(Arc::new(TokioClock::new()))
}

/// A store that forwards calls, counts them, and fails on request.
pub struct Probe {
    inner: Arc<dyn ClaimStore>,
    pub takes: AtomicUsize,
    /// For each take: whether it started without a cursor, its limit, and its rows.
    pub passes: Mutex<Vec<(bool, u32, Vec<RowKey>)>>,
    pub pendings: AtomicUsize,
    pub renews: AtomicUsize,
    pub renewed: AtomicUsize,
    pub settles: AtomicUsize,
    pub settled: AtomicUsize,
    pub sweeps: AtomicUsize,
    pub listens: AtomicUsize,
    pub purges: AtomicUsize,
    /// Calls in order.
    pub log: Mutex<Vec<&'static str>>,
    /// Number of takes that report a skipped row.
    pub skips: AtomicU64,
    /// Whether calls fail.
    pub down: AtomicBool,
    /// Whether renewals return `Busy`.
    pub busy: AtomicBool,
    /// Whether the answer to the next settle is lost. The settle takes effect.
    pub lose_answer: AtomicBool,
    /// Whether listening is refused.
    pub deaf: AtomicBool,
    /// Whether all announcements are lost.
    pub dumb: AtomicBool,
    /// Whether listeners know from the start that new work is announced.
    pub proven: AtomicBool,
    /// Whether calls are held.
    silent: watch::Sender<bool>,
    /// Whether settles are held.
    slow_settles: watch::Sender<bool>,
    /// Whether answers to takes are held. The takes take effect.
    slow_takes: watch::Sender<bool>,
    slow_renewals: watch::Sender<bool>,
    /// Changes break all listeners.
    broken: watch::Sender<u64>,
}

impl Probe {
    pub fn of(inner: impl ClaimStore) -> Arc<Self> {
        Arc::new(Self {
            inner: Arc::new(inner),
            takes: AtomicUsize::new(0),
            passes: Mutex::default(),
            pendings: AtomicUsize::new(0),
            renews: AtomicUsize::new(0),
            renewed: AtomicUsize::new(0),
            settles: AtomicUsize::new(0),
            settled: AtomicUsize::new(0),
            sweeps: AtomicUsize::new(0),
            listens: AtomicUsize::new(0),
            purges: AtomicUsize::new(0),
            log: Mutex::default(),
            skips: AtomicU64::new(0),
            down: AtomicBool::new(false),
            busy: AtomicBool::new(false),
            lose_answer: AtomicBool::new(false),
            deaf: AtomicBool::new(false),
            dumb: AtomicBool::new(false),
            proven: AtomicBool::new(false),
            silent: watch::Sender::new(false),
            slow_settles: watch::Sender::new(false),
            slow_takes: watch::Sender::new(false),
            slow_renewals: watch::Sender::new(false),
            broken: watch::Sender::new(0),
        })
    }

    pub fn silence(&self, silent: bool) {
        self.silent.send_replace(silent);
    }

    pub fn hold_settles(&self, hold: bool) {
        self.slow_settles.send_replace(hold);
    }

    pub fn hold_takes(&self, hold: bool) {
        self.slow_takes.send_replace(hold);
    }

    pub fn hold_renewals(&self, hold: bool) {
        self.slow_renewals.send_replace(hold);
    }

    pub fn break_listeners(&self) {
        self.broken.send_modify(|count| *count += 1);
    }

    /// Returns the number of takes and checks for pending rows.
    pub fn claim_queries(&self) -> usize {
        self.takes.load(Ordering::SeqCst) + self.pendings.load(Ordering::SeqCst)
    }

    /// Returns the number of all calls.
    pub fn calls(&self) -> usize {
        let others = [&self.renews, &self.settles, &self.sweeps, &self.listens, &self.purges];
        self.claim_queries() + others.iter().map(|count| count.load(Ordering::SeqCst)).sum::<usize>()
    }

    fn note(&self, counter: &AtomicUsize, what: &'static str) {
        counter.fetch_add(1, Ordering::SeqCst);
        self.log.lock().unwrap().push(what);
    }

    async fn reach(&self) -> Result<(), ClaimError> {
        open(&self.silent).await;
        if self.down.load(Ordering::SeqCst) {
            let error = leasehold_api::Error::new(leasehold_api::ErrorKind::Unavailable, "it is down");
            return Err(error.into());
        }
        Ok(())
    }
}

async fn open(gate: &watch::Sender<bool>) {
    gate.subscribe().wait_for(|shut| !shut).await.unwrap();
}

impl fmt::Debug for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Probe")
    }
}

impl fmt::Display for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl Sealed for Probe {}

#[async_trait]
impl ClaimStore for Probe {
    fn spec(&self) -> &ClaimSpec {
        self.inner.spec()
    }

    async fn take(&self, take: &Take) -> Result<Taken, ClaimError> {
        self.note(&self.takes, "take");
        self.reach().await?;
        let mut taken = self.inner.take(take).await?;
        let rows = taken.claims.iter().flat_map(|claim| claim.rows.iter().map(|row| row.key.clone()));
        let from_start = format!("{take:?}").contains("after: None");
        self.passes.lock().unwrap().push((from_start, take.limit(), rows.collect()));
        if self.skips.load(Ordering::SeqCst) > 0 && taken.claims.is_empty() {
            self.skips.fetch_sub(1, Ordering::SeqCst);
            taken.skipped += 1;
        }
        open(&self.slow_takes).await;
        Ok(taken)
    }

    async fn pending(&self, take: &Take) -> Result<bool, ClaimError> {
        self.note(&self.pendings, "pending");
        self.reach().await?;
        self.inner.pending(take).await
    }

    async fn renew(&self, claims: &[ClaimRef], lease: Duration) -> Result<Vec<Renewal>, ClaimError> {
        self.note(&self.renews, "renew");
        self.renewed.fetch_add(claims.len(), Ordering::SeqCst);
        self.reach().await?;
        open(&self.slow_renewals).await;
        if self.busy.load(Ordering::SeqCst) {
            return Ok(vec![Renewal::Busy; claims.len()]);
        }
        self.inner.renew(claims, lease).await
    }

    async fn settle(
        &self,
        settlements: &[(ClaimRef, Outcome)],
    ) -> Result<Vec<Result<Settled, ClaimError>>, ClaimError> {
        self.note(&self.settles, "settle");
        self.settled.fetch_add(settlements.len(), Ordering::SeqCst);
        self.reach().await?;
        open(&self.slow_settles).await;
        let answers = self.inner.settle(settlements).await;
        if self.lose_answer.swap(false, Ordering::SeqCst) {
            let message = "the answer was lost";
            return Err(leasehold_api::Error::new(leasehold_api::ErrorKind::OutcomeUnknown, message).into());
        }
        answers
    }

    async fn sweep(&self, limit: u32) -> Result<Swept, ClaimError> {
        self.sweeps.fetch_add(1, Ordering::SeqCst);
        self.reach().await?;
        self.inner.sweep(limit).await
    }

    async fn upkeep(&self, limit: u32) -> Result<Upkeep, ClaimError> {
        self.sweeps.fetch_add(1, Ordering::SeqCst);
        self.reach().await?;
        self.inner.upkeep(limit).await
    }

    async fn taken(&self, limit: u32) -> Result<Vec<TakenRow>, ClaimError> {
        self.inner.taken(limit).await
    }

    async fn exhausted(&self, limit: u32) -> Result<Vec<RowKey>, ClaimError> {
        self.inner.exhausted(limit).await
    }

    async fn blocked(&self, limit: u32) -> Result<Vec<RowKey>, ClaimError> {
        self.inner.blocked(limit).await
    }

    async fn stats(&self, take: &Take) -> Result<Stats, ClaimError> {
        self.inner.stats(take).await
    }

    async fn cancel(&self, rows: &[RowKey], message: &str) -> Result<u64, ClaimError> {
        self.inner.cancel(rows, message).await
    }

    async fn requeue(&self, rows: &[RowKey], attempts: u32) -> Result<u64, ClaimError> {
        self.inner.requeue(rows, attempts).await
    }

    async fn requeue_all(&self, from: &State, limit: u32, attempts: u32) -> Result<u64, ClaimError> {
        self.inner.requeue_all(from, limit, attempts).await
    }

    async fn purge(&self, limit: u32) -> Result<u64, ClaimError> {
        self.purges.fetch_add(1, Ordering::SeqCst);
        self.inner.purge(limit).await
    }

    async fn listen(&self) -> Result<Box<dyn Wake>, ClaimError> {
        self.note(&self.listens, "listen");
        self.reach().await?;
        if self.deaf.load(Ordering::SeqCst) {
            return Err(ClaimError::Unsupported("there is nothing to listen to".to_owned()));
        }
        let inner = self.inner.listen().await?;
        self.log.lock().unwrap().push("listening");
        let (dumb, proven) = (self.dumb.load(Ordering::SeqCst), self.proven.load(Ordering::SeqCst));
        Ok(Box::new(ProbeWake { inner, dumb, proven, broken: self.broken.subscribe() }))
    }
}

#[derive(Debug)]
struct ProbeWake {
    inner: Box<dyn Wake>,
    dumb: bool,
    proven: bool,
    broken: watch::Receiver<u64>,
}

#[async_trait]
impl Wake for ProbeWake {
    async fn woken(&mut self) -> Result<(), ClaimError> {
        let dumb = self.dumb;
        let inner = async {
            if dumb {
                std::future::pending::<()>().await;
            }
            self.inner.woken().await
        };
        tokio::select! {
            woken = inner => woken,
            _ = self.broken.changed() => {
                let broken = leasehold_claim::api::Error::new(
                    leasehold_claim::api::ErrorKind::Unavailable,
                    "the connection broke",
                );
                Err(broken.into())
            }
        }
    }

    fn announces(&self) -> bool {
        self.proven || self.inner.announces()
    }
}
