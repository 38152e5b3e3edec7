//! The suite on the store in memory.
#![allow(clippy::unwrap_used)]

#[path = "suite/cases.rs"]
mod suite;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use leasehold_idempotency::{
    Fingerprint, IdempotencyError, Ident, MemoryIdempotency, MemoryKeyTransaction, RequestOutcome, Stored,
};
use suite::World;

struct Memory {
    store: MemoryIdempotency,
    effects: Arc<AtomicU64>,
}

fn world() -> Memory {
    Memory { store: MemoryIdempotency::new(), effects: Arc::default() }
}

fn effect(effects: &Arc<AtomicU64>, fresh: &mut MemoryKeyTransaction) {
    let effects = Arc::clone(effects);
    fresh.on_commit(move || {
        effects.fetch_add(1, Ordering::SeqCst);
    });
}

impl World for Memory {
    type Store = MemoryIdempotency;

    fn store(&self) -> MemoryIdempotency {
        self.store.clone()
    }

    fn joining(&self, wait: Duration) -> MemoryIdempotency {
        self.store.clone().join(wait)
    }

    fn bounded(&self, bytes: usize) -> MemoryIdempotency {
        self.store.clone().max_body(bytes)
    }

    async fn effect(&self, fresh: &mut MemoryKeyTransaction) {
        effect(&self.effects, fresh);
    }

    async fn effects(&self) -> u64 {
        self.effects.load(Ordering::SeqCst)
    }

    async fn expire(&self) {
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(24 * 3600)).await;
        tokio::time::resume();
    }

    async fn run(
        &self,
        ident: &Ident,
        fingerprint: &Fingerprint,
        end: Result<Stored, IdempotencyError>,
    ) -> Result<RequestOutcome, IdempotencyError> {
        let body = async |fresh: &mut MemoryKeyTransaction| {
            effect(&self.effects, fresh);
            end
        };
        self.store.run(ident, fingerprint, body).await
    }
}

suite::suite!(world());

#[tokio::test(start_paused = true)]
async fn a_key_is_kept_for_its_retention() {
    let store = MemoryIdempotency::new().retention(Duration::from_secs(60));
    let (ident, request) = (suite::ident("a"), suite::request("x"));
    suite::fresh(store.begin(&ident, &request).await).finish(Stored::done(200, "x")).await.unwrap();
    tokio::time::advance(Duration::from_millis(59_999)).await;
    assert_eq!(suite::replay(store.begin(&ident, &request).await).body(), "x");
    tokio::time::advance(Duration::from_millis(1)).await;
    drop(suite::fresh(store.begin(&ident, &request).await));
}

#[tokio::test(start_paused = true)]
async fn what_took_longer_than_the_retention_is_remembered_when_it_is_done() {
    let store = MemoryIdempotency::new().retention(Duration::from_secs(60));
    let (ident, request) = (suite::ident("a"), suite::request("x"));
    let slow = suite::fresh(store.begin(&ident, &request).await);
    tokio::time::advance(Duration::from_secs(120)).await;
    slow.finish(Stored::done(200, "x")).await.unwrap();
    tokio::time::advance(Duration::from_millis(59_999)).await;
    assert_eq!(suite::replay(store.begin(&ident, &request).await).body(), "x");
}
