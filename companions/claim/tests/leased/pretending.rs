//! A server on which statements do not lock rows (`docs/hazards.md` H59).

use std::collections::BTreeMap;

use leasehold_claim::{ClaimStore as _, Outcome, PgClaims, Take};
use test_servers::{Cluster, Proxy};
use tokio::task::JoinSet;

use crate::common::*;

/// On such a server, a row can be given to several workers. Their epochs differ, so only the last claim can settle the row.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_a_row_that_is_handed_out_twice_one_end_is_written() {
    for spec in [request, beside] {
        let world = World::private(&[REQUEST, SIDE].concat()).await;
        world.insert(400).await;
        let proxy = Proxy::start(Cluster::shared().address()).await;
        for locks in
            ["FOR NO KEY UPDATE OF t SKIP LOCKED", "FOR NO KEY UPDATE SKIP LOCKED", "FOR UPDATE SKIP LOCKED"]
        {
            proxy.rewrite(locks, "");
        }
        let mut workers = JoinSet::new();
        for _ in 0..8 {
            let claims =
                PgClaims::new(pool(&proxy.url(world.database.url()), 2).await, spec().build().unwrap());
            let claims = claims.timeout(LONG);
            workers.spawn(async move {
                let mut ends = Vec::new();
                while claims.pending(&Take::up_to(1)).await.unwrap() {
                    let Ok(taken) = claims.take(&Take::up_to(5)).await else { continue };
                    tokio::task::yield_now().await;
                    for claim in taken.claims {
                        let id = claim.rows[0].key.id.to_string();
                        ends.push((id, settle(&claims, &claim.claim, Outcome::Done).await.is_ok()));
                    }
                }
                ends
            });
        }
        let mut written: BTreeMap<String, usize> = BTreeMap::new();
        while let Some(ends) = bounded(workers.join_next()).await {
            for (id, is_written) in ends.unwrap() {
                *written.entry(id).or_default() += usize::from(is_written);
            }
        }
        assert!(proxy.traffic().rewritten > 0, "no row was to be locked");
        let other: Vec<_> = written.iter().filter(|(_, count)| **count != 1).collect();
        assert!(
            other.is_empty() && written.len() == 400,
            "{} rows, not ended once: {other:?}",
            written.len()
        );
    }
}
