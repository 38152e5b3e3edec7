//! Plain locks in memory, which behave like the tables.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_claim::{ClaimError, RowKey, State};
use tokio::time::Instant;
use uuid::Uuid;

use crate::{Mutexes, PlainGrant, Timeouts};

#[derive(Clone, Debug, Default)]
struct MemoryLockRow {
    owner: Option<Uuid>,
    epoch: i64,
    attempts: Option<i32>,
    window: Duration,
    since: Option<Instant>,
}

type MemoryLockRows = Mutex<BTreeMap<RowKey, MemoryLockRow>>;

/// Latches in the memory of this process, with owners and epochs. Clones share them.
///
/// ```
/// use leasehold_plain_tables::{ClaimError, MemoryMutexes, Mutexes, RowKey};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), ClaimError> {
/// let (locks, key) = (MemoryMutexes::new(), RowKey::new(7));
/// locks.create(&key).await?;
/// let grant = locks.grant(&key).await?.expect("the lock is free");
/// assert_eq!(locks.grant(&key).await?, None);
/// assert!(locks.give_back(&grant).await?);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct MemoryMutexes(Arc<MemoryLockRows>);

/// Locks with a timeout in the memory of this process, with epochs. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct MemoryTimeouts(Arc<MemoryLockRows>);

impl MemoryMutexes {
    /// Creates an empty set of latches.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets how often the lock can be granted, or `None` for any number of times. Creates a missing lock.
    pub fn set_attempts(&self, key: RowKey, attempts: Option<i32>) {
        lock(&self.0).entry(key).or_default().attempts = attempts;
    }
}

impl MemoryTimeouts {
    /// Creates an empty set of locks.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the length of the lock's window, which is the time for which a grant lasts, and how often it can be
    /// granted. Creates a missing lock.
    pub fn set(&self, key: RowKey, window: Duration, attempts: Option<i32>) {
        let mut rows = lock(&self.0);
        let row = rows.entry(key).or_default();
        (row.window, row.attempts) = (window, attempts);
    }
}

#[async_trait]
impl Mutexes for MemoryMutexes {
    async fn create(&self, key: &RowKey) -> Result<bool, ClaimError> {
        let mut rows = lock(&self.0);
        let missing = !rows.contains_key(key);
        rows.entry(key.clone()).or_default();
        Ok(missing)
    }

    async fn grant(&self, key: &RowKey) -> Result<Option<PlainGrant>, ClaimError> {
        grant(&self.0, key, MemoryLockRow::is_open, MemoryLockRow::shut)
    }

    async fn capture(&self, queue: Option<Arc<str>>, limit: u32) -> Result<Vec<PlainGrant>, ClaimError> {
        capture(&self.0, queue.as_deref(), limit, MemoryLockRow::is_open, MemoryLockRow::shut)
    }

    async fn give_back(&self, grant: &PlainGrant) -> Result<bool, ClaimError> {
        let mut rows = lock(&self.0);
        let row = find(&mut rows, &grant.key)?;
        if row.owner.is_none() {
            return Ok(false);
        }
        if row.owner != grant.owner || Some(row.epoch) != grant.epoch {
            return Err(superseded(grant, row, "true"));
        }
        row.owner = None;
        Ok(true)
    }

    async fn break_lock(&self, key: &RowKey, expected_owner: Uuid) -> Result<bool, ClaimError> {
        let mut rows = lock(&self.0);
        let row = find(&mut rows, key)?;
        let broken = row.owner == Some(expected_owner);
        if broken {
            row.owner = None;
        }
        Ok(broken)
    }

    async fn top_up(&self, key: &RowKey, attempts: u32) -> Result<i32, ClaimError> {
        top_up(&self.0, key, attempts)
    }
}

#[async_trait]
impl Timeouts for MemoryTimeouts {
    async fn grant(&self, key: &RowKey) -> Result<Option<PlainGrant>, ClaimError> {
        grant(&self.0, key, MemoryLockRow::has_ended, MemoryLockRow::begin)
    }

    async fn capture(&self, queue: Option<Arc<str>>, limit: u32) -> Result<Vec<PlainGrant>, ClaimError> {
        capture(&self.0, queue.as_deref(), limit, MemoryLockRow::has_ended, MemoryLockRow::begin)
    }

    async fn extend(&self, grant: &PlainGrant) -> Result<(), ClaimError> {
        fenced(&self.0, grant, MemoryLockRow::begin)
    }

    async fn settle(&self, grant: &PlainGrant) -> Result<(), ClaimError> {
        fenced(&self.0, grant, |_| {})
    }

    async fn top_up(&self, key: &RowKey, attempts: u32) -> Result<i32, ClaimError> {
        top_up(&self.0, key, attempts)
    }
}

impl MemoryLockRow {
    fn is_open(&self) -> bool {
        self.owner.is_none()
    }

    fn shut(&mut self) {
        self.owner = Some(Uuid::new_v4());
    }

    fn has_ended(&self) -> bool {
        self.since.is_none_or(|since| since.elapsed() >= self.window)
    }

    fn begin(&mut self) {
        self.since = Some(Instant::now());
    }

    fn granted(&mut self, key: &RowKey, take: impl Fn(&mut Self)) -> PlainGrant {
        take(self);
        self.epoch += 1;
        self.attempts = self.attempts.map(|left| left - 1);
        PlainGrant {
            key: key.clone(),
            owner: self.owner,
            epoch: Some(self.epoch),
            attempts_left: self.attempts,
        }
    }

    fn used_up(&self) -> bool {
        self.attempts.is_some_and(|left| left <= 0)
    }
}

fn grant(
    rows: &MemoryLockRows,
    key: &RowKey,
    free: impl Fn(&MemoryLockRow) -> bool,
    take: impl Fn(&mut MemoryLockRow),
) -> Result<Option<PlainGrant>, ClaimError> {
    let mut rows = lock(rows);
    let row = find(&mut rows, key)?;
    match (free(row), row.used_up()) {
        (false, _) => Ok(None),
        (true, true) => Err(ClaimError::Exhausted { row: key.clone() }),
        (true, false) => Ok(Some(row.granted(key, take))),
    }
}

fn capture(
    rows: &MemoryLockRows,
    queue: Option<&str>,
    limit: u32,
    free: impl Fn(&MemoryLockRow) -> bool,
    take: impl Fn(&mut MemoryLockRow),
) -> Result<Vec<PlainGrant>, ClaimError> {
    if limit == 0 {
        return Err(ClaimError::InvalidSpec("take at least one lock".to_owned()));
    }
    let mut rows = lock(rows);
    let able =
        rows.iter_mut().filter(|(key, row)| key.queue.as_deref() == queue && free(row) && !row.used_up());
    Ok(able.take(limit as usize).map(|(key, row)| row.granted(key, &take)).collect())
}

fn fenced(
    rows: &MemoryLockRows,
    grant: &PlainGrant,
    change: impl Fn(&mut MemoryLockRow),
) -> Result<(), ClaimError> {
    let mut rows = lock(rows);
    let row = find(&mut rows, &grant.key)?;
    if Some(row.epoch) != grant.epoch {
        return Err(superseded(grant, row, "taken"));
    }
    change(row);
    Ok(())
}

fn top_up(rows: &MemoryLockRows, key: &RowKey, attempts: u32) -> Result<i32, ClaimError> {
    let mut rows = lock(rows);
    let row = find(&mut rows, key)?;
    let more = i32::try_from(attempts).unwrap_or(i32::MAX);
    let left = row.attempts.unwrap_or(0).max(0).saturating_add(more);
    row.attempts = Some(left);
    Ok(left)
}

fn superseded(grant: &PlainGrant, row: &MemoryLockRow, state: &str) -> ClaimError {
    let epoch = grant.epoch.unwrap_or(0);
    ClaimError::superseded(grant.key.clone(), epoch, Some(row.epoch), Some(State::from(state)))
}

fn find<'r>(
    rows: &'r mut BTreeMap<RowKey, MemoryLockRow>,
    key: &RowKey,
) -> Result<&'r mut MemoryLockRow, ClaimError> {
    rows.get_mut(key).ok_or_else(|| ClaimError::NotFound { row: key.clone() })
}

fn lock(rows: &MemoryLockRows) -> MutexGuard<'_, BTreeMap<RowKey, MemoryLockRow>> {
    // Ignores poisoning, because no code panics while it holds the mutex.
    rows.lock().unwrap_or_else(PoisonError::into_inner)
}
