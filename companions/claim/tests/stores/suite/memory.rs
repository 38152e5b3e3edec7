//! The harness of the table in memory, with an optional front for mutants.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_claim::{ClaimSpec, ClaimStore, MemoryClaims, MemoryRow, RowKey};
use serde_json::Value;

use super::bench::{Harness, Layout, Seed, Seen, TableHarness, Variant};
use super::hold::HoldStore;
use super::{Env, case};

/// Wraps the clients of the table.
pub trait Front: Send + Sync + 'static {
    fn client(&self, claims: &MemoryClaims) -> Arc<dyn ClaimStore>;
    fn holder(&self, claims: &MemoryClaims) -> Arc<dyn HoldStore>;
}

/// A front without a wrapper.
pub struct Bare;

impl Front for Bare {
    fn client(&self, claims: &MemoryClaims) -> Arc<dyn ClaimStore> {
        Arc::new(claims.clone())
    }

    fn holder(&self, claims: &MemoryClaims) -> Arc<dyn HoldStore> {
        Arc::new(claims.clone())
    }
}

pub struct Memory(pub Arc<dyn Front>);

pub struct MemoryTable {
    claims: MemoryClaims,
    front: Arc<dyn Front>,
    has_queues: bool,
}

#[async_trait]
impl Harness for Memory {
    async fn table(&self, layout: &Layout, spec: &ClaimSpec) -> Box<dyn TableHarness> {
        let claims = MemoryClaims::new(spec.clone()).unwrap();
        Box::new(MemoryTable { claims, front: self.0.clone(), has_queues: layout.queued })
    }
}

#[async_trait]
impl TableHarness for MemoryTable {
    fn client(&self) -> Arc<dyn ClaimStore> {
        self.front.client(&self.claims)
    }

    fn holder(&self) -> Arc<dyn HoldStore> {
        self.front.holder(&self.claims)
    }

    async fn insert(&self, seed: Seed) -> RowKey {
        let now = self.claims.clock().now();
        let mut row = MemoryRow::new(seed.id)
            .with_kind(seed.kind)
            .with_column("priority", seed.priority.into())
            .with_column("label", seed.label.into());
        if self.has_queues {
            row = row.with_queue(seed.queue);
        }
        if let Some(state) = seed.state {
            row = row.with_state(state);
        }
        if let Some(entity) = seed.entity {
            row = row.with_group(entity);
        }
        if let Some(attempts) = seed.attempts {
            row = row.with_attempts(attempts);
        }
        if let Some(ready) = seed.ready_in {
            row = row.with_ready_at(now + ready);
        }
        if let Some(timeout) = seed.timeout {
            row = row.with_timeout_seconds(timeout);
        }
        // Only the order of these times matters, so they have no fractions.
        let due = seed.due_in.map_or(Value::Null, |due| {
            Value::String(format!(
                "2026-01-01T{:02}:{:02}:00Z",
                due.as_secs() / 3600,
                due.as_secs() / 60 % 60
            ))
        });
        self.claims.insert(row.with_column("due", due)).unwrap()
    }

    async fn see(&self, key: &RowKey) -> Option<Seen> {
        let row = self.claims.row(key)?;
        Some(Seen {
            state: row.state()?.to_string(),
            owner: row.owner().map(|owner| owner.to_string()),
            epoch: Some(row.epoch()),
            attempts: row.attempts_left(),
            error: row.error().map(str::to_owned),
            has_lease: row.lease_until().is_some(),
            is_dated: row.settled_at().is_some(),
            settled_by: row.settled_by().map(str::to_owned),
        })
    }

    async fn expire(&self, key: &RowKey) {
        assert!(self.claims.expire(key).unwrap(), "row {key} has a lease that can end");
    }

    async fn set_state(&self, key: &RowKey, state: &str) {
        self.claims.update(key, "status", state.into()).unwrap();
    }

    async fn settled_earlier(&self, key: &RowKey, by: Duration) {
        assert!(self.claims.row(key).is_some_and(|row| row.settled_at().is_some()), "row {key} is settled");
        self.claims.clock().advance(by);
    }

    async fn delete(&self, key: &RowKey) {
        self.claims.delete(key).unwrap();
    }

    async fn lock(&self, key: &RowKey) -> Box<dyn Any + Send> {
        Box::new(self.claims.lock(key).unwrap())
    }

    async fn unlock(&self, lock: Box<dyn Any + Send>) {
        drop(lock);
    }

    async fn lose_wake_ups(&self) {
        self.claims.lose_wake_ups(true);
    }
}

/// Runs a case in virtual time, in which waits for missing events end at once.
pub fn run(variant: Variant, front: Arc<dyn Front>, name: &str) {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    let env = Env { harness: Box::new(Memory(front)), variant };
    runtime.block_on((case(name).run)(&env));
}
