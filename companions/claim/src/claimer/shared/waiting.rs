//! Workers that wait for a claim.

use std::sync::atomic::Ordering;

use super::ClaimerCore;

/// A worker that waits for a claim. The claimer counts it until this value is dropped.
pub(crate) struct WaitingWorker<'a>(&'a ClaimerCore);

impl<'a> WaitingWorker<'a> {
    pub(crate) fn new(shared: &'a ClaimerCore) -> Self {
        shared.waiting.fetch_add(1, Ordering::AcqRel);
        shared.demand.notify_one();
        Self(shared)
    }
}

impl Drop for WaitingWorker<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use tokio::time::sleep;

    use super::super::lock;
    use super::*;
    use crate::{ClaimSpec, Claimer, IdType, MemoryClaims, MemoryRow, States, Table};

    #[tokio::test(start_paused = true)]
    async fn whoever_has_got_a_claim_wants_none() {
        let spec = ClaimSpec::builder(Table::new("request").unwrap())
            .id("id", IdType::Int)
            .state("status", States::text(["new"], "complete").taken("in-progress"))
            .lease_columns("owner", "epoch", "lease_until");
        let claims = MemoryClaims::new(spec.build().unwrap()).unwrap();
        for id in 1..=2 {
            claims.insert(MemoryRow::new(id)).unwrap();
        }
        let claimer = Claimer::builder(Arc::new(claims)).ahead(0).start().unwrap();
        let shared = &claimer.shared;
        let mut waiting = Some(WaitingWorker::new(shared));
        while lock(&shared.ready).queue.is_empty() {
            sleep(Duration::from_millis(1)).await;
        }
        assert!(shared.begin(&mut waiting).is_some());
        assert_eq!(shared.wanted(), 0, "nobody waits, and the second row is for others");
    }
}
