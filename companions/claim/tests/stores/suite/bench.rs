//! The tools of a case: a table, its rows, and clients that claim them.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_claim::{
    ClaimError, ClaimRef, ClaimSpec, ClaimSpecBuilder, ClaimStore, Claimed, IdType, Outcome, RowId, RowKey,
    Settled, State, States, Swept, Table, Take, Taken,
};
use test_bounds::within;
use tokio::time::sleep;

use super::LONG;
use super::hold::HoldStore;

/// A factory of tables.
#[async_trait]
pub trait Harness: Send + Sync {
    /// Creates an empty table.
    async fn table(&self, layout: &Layout, spec: &ClaimSpec) -> Box<dyn TableHarness>;
}

/// Access to a table besides its claims.
#[async_trait]
pub trait TableHarness: Send + Sync {
    /// Creates a client that shares only the table with the others.
    fn client(&self) -> Arc<dyn ClaimStore>;
    /// Creates a client for held claims.
    fn holder(&self) -> Arc<dyn HoldStore>;
    /// Inserts a row and notifies, in one transaction.
    async fn insert(&self, seed: Seed) -> RowKey;
    /// Returns the committed state of the row.
    async fn see(&self, key: &RowKey) -> Option<Seen>;
    /// Ends the lease of the row now.
    async fn expire(&self, key: &RowKey);
    /// Writes a state directly.
    async fn set_state(&self, key: &RowKey, state: &str);
    /// Moves the settlement time of the row into the past. The row must be the last settled one.
    async fn settled_earlier(&self, key: &RowKey, by: Duration);
    /// Deletes the row directly.
    async fn delete(&self, key: &RowKey);
    /// Locks the row in another transaction, until the returned value is passed to `unlock`.
    async fn lock(&self, key: &RowKey) -> Box<dyn Any + Send>;
    /// Ends the transaction of `lock`.
    async fn unlock(&self, lock: Box<dyn Any + Send>);
    /// Loses all later notifications.
    async fn lose_wake_ups(&self);
}

/// The type of the state column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateKind {
    Text,
    Enum,
    Boolean,
}

/// The place of the lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tracking {
    Columns,
    Side,
    None,
}

/// A variant of the table. All cases run with each variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    pub states: StateKind,
    pub tracking: Tracking,
}

impl Variant {
    pub const TEXT: Self = Self { states: StateKind::Text, tracking: Tracking::Columns };
    pub const ENUM: Self = Self { states: StateKind::Enum, tracking: Tracking::Columns };
    pub const BOOLEAN: Self = Self { states: StateKind::Boolean, tracking: Tracking::Columns };
    pub const SIDE: Self = Self { states: StateKind::Text, tracking: Tracking::Side };
    pub const BOOLEAN_SIDE: Self = Self { states: StateKind::Boolean, tracking: Tracking::Side };

    pub fn is_boolean(self) -> bool {
        self.states == StateKind::Boolean
    }

    pub fn home(self) -> &'static str {
        if self.is_boolean() { "false" } else { "new" }
    }

    pub fn taken(self) -> &'static str {
        if self.is_boolean() { "false" } else { "in-progress" }
    }

    pub fn done(self) -> &'static str {
        if self.is_boolean() { "true" } else { "complete" }
    }

    pub fn failed(self) -> Option<&'static str> {
        (!self.is_boolean()).then_some("error")
    }

    /// Returns the state of a row without attempts left.
    pub fn exhausted(self) -> &'static str {
        if self.is_boolean() { "false" } else { "exhausted" }
    }
}

/// The layout of the claimed table. Every table has all columns, and a spec uses some of them.
#[derive(Clone)]
pub struct Layout {
    pub variant: Variant,
    pub tracking: Option<Tracking>,
    pub id: IdType,
    pub numbered_owners: bool,
    pub numbered_epochs: bool,
    pub on_read: bool,
    pub queued: bool,
    more: fn(ClaimSpecBuilder) -> ClaimSpecBuilder,
}

impl Layout {
    /// Creates a layout whose spec is extended by `more`.
    pub fn new(more: fn(ClaimSpecBuilder) -> ClaimSpecBuilder) -> Self {
        Self {
            variant: Variant::TEXT,
            tracking: None,
            id: IdType::Int,
            numbered_owners: false,
            numbered_epochs: false,
            on_read: false,
            queued: false,
            more,
        }
    }

    pub fn without_lease(mut self) -> Self {
        self.tracking = Some(Tracking::None);
        self
    }

    pub fn columns(mut self) -> Self {
        self.tracking = Some(Tracking::Columns);
        self
    }

    pub fn id(mut self, kind: IdType) -> Self {
        self.id = kind;
        self
    }

    pub fn numbered_owners(mut self) -> Self {
        self.numbered_owners = true;
        self
    }

    pub fn numbered_epochs(mut self) -> Self {
        self.numbered_epochs = true;
        self
    }

    pub fn on_read(mut self) -> Self {
        self.on_read = true;
        self
    }

    pub fn queued(mut self) -> Self {
        self.queued = true;
        self
    }

    pub fn in_variant(mut self, variant: Variant) -> Self {
        self.variant = Variant { tracking: self.tracking.unwrap_or(variant.tracking), ..variant };
        self
    }

    pub fn spec(&self) -> ClaimSpec {
        let (takeable, done) = (["new", "again"], "complete");
        let named = |states: States| {
            let states =
                states.taken("in-progress").failed("error").exhausted("exhausted").others(["paused"]);
            states.transition("in-progress", "paused")
        };
        let table = |name: &str| Table::new(name).unwrap();
        let states = match self.variant.states {
            StateKind::Text => named(States::text(takeable, done)),
            StateKind::Enum => named(States::enumeration(table("request_state"), takeable, done)),
            StateKind::Boolean => States::boolean(),
        };
        let mut spec =
            ClaimSpec::builder(table("request")).id("id", self.id).state("status", states).error("error");
        spec = match self.variant.tracking {
            Tracking::Columns => spec.lease_columns("owner", "epoch", "lease_until").taken_at("taken_at"),
            Tracking::Side => spec.side_table(table("request_claims")),
            Tracking::None => spec,
        };
        if self.numbered_owners {
            spec = spec.owner_sequence(table("request_owners"));
        }
        if self.numbered_epochs {
            spec = spec.epoch_sequence(table("request_epochs"));
        }
        if self.queued {
            spec = spec.queue("queue");
        }
        if self.on_read {
            spec = spec.expire_on_read();
        }
        (self.more)(spec).build().unwrap()
    }
}

/// A row to insert.
#[derive(Clone, Debug)]
pub struct Seed {
    pub id: RowId,
    pub queue: &'static str,
    pub state: Option<&'static str>,
    pub entity: Option<&'static str>,
    pub kind: &'static str,
    pub attempts: Option<i32>,
    pub ready_in: Option<Duration>,
    pub timeout: Option<i32>,
    pub priority: i64,
    pub due_in: Option<Duration>,
    pub label: String,
}

/// Returns the row `id`, with defaults in all columns.
pub fn row(id: impl Into<RowId>) -> Seed {
    Seed {
        id: id.into(),
        queue: "default",
        state: None,
        entity: None,
        kind: "update",
        attempts: None,
        ready_in: None,
        timeout: None,
        priority: 0,
        due_in: None,
        label: String::new(),
    }
}

macro_rules! setters {
    ($( $name:ident: $type:ty = $field:ident $(. $wrap:ident)?; )*) => {
        impl Seed { $(
            pub fn $name(mut self, value: $type) -> Self {
                self.$field = setters!(@ value $($wrap)?);
                self
            }
        )* }
    };
    (@ $value:ident some) => { Some($value) };
    (@ $value:ident) => { $value };
}
setters! {
    queue: &'static str = queue;
    state: &'static str = state.some;
    entity: &'static str = entity.some;
    kind: &'static str = kind;
    attempts: i32 = attempts.some;
    ready_in: Duration = ready_in.some;
    timeout: i32 = timeout.some;
    priority: i64 = priority;
    due_in: Duration = due_in.some;
    label: String = label;
}

/// The committed state of a row.
#[derive(Clone, Debug, PartialEq)]
pub struct Seen {
    pub state: String,
    pub owner: Option<String>,
    pub epoch: Option<i64>,
    pub attempts: Option<i32>,
    pub error: Option<String>,
    pub has_lease: bool,
    pub is_dated: bool,
    pub settled_by: Option<String>,
}

/// A table under test.
pub struct Bench {
    pub table: Box<dyn TableHarness>,
    pub spec: ClaimSpec,
    pub variant: Variant,
}

impl Bench {
    pub fn client(&self) -> Arc<dyn ClaimStore> {
        self.table.client()
    }

    pub fn holder(&self) -> Arc<dyn HoldStore> {
        self.table.holder()
    }

    pub async fn insert(&self, seed: Seed) -> RowKey {
        bounded(self.table.insert(seed)).await
    }

    /// Inserts the rows 1 to `count`.
    pub async fn fill(&self, count: i64) -> Vec<RowKey> {
        let mut keys = Vec::new();
        for id in 1..=count {
            keys.push(self.insert(row(id)).await);
        }
        keys
    }

    pub async fn see(&self, key: &RowKey) -> Seen {
        bounded(self.table.see(key)).await.unwrap_or_else(|| panic!("row {key} is gone"))
    }

    pub async fn is_gone(&self, key: &RowKey) -> bool {
        bounded(self.table.see(key)).await.is_none()
    }

    pub async fn state(&self, key: &RowKey) -> String {
        self.see(key).await.state
    }

    /// Returns whether the row is claimed, by its state and owner.
    pub async fn is_taken(&self, key: &RowKey) -> bool {
        let seen = self.see(key).await;
        seen.state == self.variant.taken() && seen.owner.is_some()
    }

    /// Returns whether the row is unclaimed and in its initial state.
    pub async fn is_home(&self, key: &RowKey) -> bool {
        let seen = self.see(key).await;
        seen.state == self.variant.home() && seen.owner.is_none() && !seen.has_lease
    }

    pub async fn is_done(&self, key: &RowKey) -> bool {
        let seen = self.see(key).await;
        seen.state == self.variant.done() && seen.owner.is_none() && !seen.has_lease
    }

    pub async fn expire(&self, key: &RowKey) {
        bounded(self.table.expire(key)).await;
    }

    pub async fn expire_all(&self, claim: &ClaimRef) {
        for (key, _) in &*claim.rows {
            self.expire(key).await;
        }
    }

    pub async fn lock(&self, key: &RowKey) -> Box<dyn Any + Send> {
        bounded(self.table.lock(key)).await
    }

    pub async fn unlock(&self, lock: Box<dyn Any + Send>) {
        bounded(self.table.unlock(lock)).await;
    }

    pub async fn set_state(&self, key: &RowKey, state: &str) {
        bounded(self.table.set_state(key, state)).await;
    }

    pub async fn take(&self, limit: u32) -> Vec<Claimed> {
        self.try_take(&Take::up_to(limit)).await.unwrap().claims
    }

    /// Takes the only claimable row.
    pub async fn take_one(&self) -> Claimed {
        let mut claims = self.take(1).await;
        assert_eq!(claims.len(), 1, "there is a row to take");
        claims.remove(0)
    }

    pub async fn try_take(&self, take: &Take) -> Result<Taken, ClaimError> {
        bounded(self.client().take(take)).await
    }

    pub async fn ids(&self, take: &Take) -> Vec<String> {
        ids(&self.try_take(take).await.unwrap().claims)
    }

    pub async fn is_pending(&self) -> bool {
        bounded(self.client().pending(&Take::up_to(1))).await.unwrap()
    }

    pub async fn settle(&self, claim: &ClaimRef, outcome: Outcome) -> Result<Settled, ClaimError> {
        let mut answers = self.settle_all(vec![(claim.clone(), outcome)]).await;
        assert_eq!(answers.len(), 1, "one answer for each claim");
        answers.remove(0)
    }

    pub async fn settle_all(
        &self,
        settlements: Vec<(ClaimRef, Outcome)>,
    ) -> Vec<Result<Settled, ClaimError>> {
        bounded(self.client().settle(&settlements)).await.unwrap()
    }

    pub async fn sweep(&self) -> Swept {
        bounded(self.client().sweep(1000)).await.unwrap()
    }

    /// Ends the leases of the claim and sweeps.
    pub async fn crash(&self, claim: &ClaimRef) -> Swept {
        self.expire_all(claim).await;
        self.sweep().await
    }

    /// Ends the lease of a single row and sweeps.
    pub async fn crash_one(&self, key: &RowKey) -> Swept {
        self.expire(key).await;
        self.sweep().await
    }

    /// Returns the epoch as the table shows it. `None` without lease columns.
    pub fn shown(&self, epoch: i64) -> Option<i64> {
        (self.variant.tracking == Tracking::Columns).then_some(epoch)
    }
}

/// Returns the ids of all rows, in the order in which they were taken.
pub fn ids(claims: &[Claimed]) -> Vec<String> {
    claims.iter().flat_map(|claimed| &claimed.rows).map(|row| row.key.id.to_string()).collect()
}

/// Returns the keys of all rows of a claim.
pub fn keys(claimed: &Claimed) -> Vec<RowKey> {
    claimed.rows.iter().map(|row| row.key.clone()).collect()
}

/// Returns the claim without one row.
pub fn without(claim: &ClaimRef, row: &RowKey) -> ClaimRef {
    let mut rest = claim.clone();
    rest.rows = rest.rows.iter().filter(|(key, _)| key != row).cloned().collect();
    rest
}

/// Awaits `future`, and fails if it takes too long.
pub async fn bounded<T>(future: impl Future<Output = T>) -> T {
    within(LONG, "no answer in time", future).await
}

/// Sleeps for a moment, so other tasks can run.
pub async fn pause() {
    sleep(Duration::from_millis(1)).await;
}

/// Polls `look` until it returns true.
pub async fn until<F: Future<Output = bool>>(mut look: impl FnMut() -> F) {
    let looking = async {
        while !look().await {
            sleep(Duration::from_millis(5)).await;
        }
    };
    within(LONG, "it never came to be", looking).await;
}

pub fn is_superseded(answer: &Result<Settled, ClaimError>) -> bool {
    matches!(answer, Err(ClaimError::Superseded { .. }))
}

pub fn state_of(name: &str) -> Option<State> {
    Some(State::new(name))
}

pub fn retry() -> Outcome {
    Outcome::Retry { error: Some("not this time".to_owned()), after: Duration::ZERO }
}
