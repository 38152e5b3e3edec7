//! A hand-off from the recorder to the worker.
#![allow(clippy::unwrap_used)] // Of tests, which are to fail here.

mod spec_common;

use leasehold_claim::{ClaimStore as _, HandOff, Outcome, PgClaims, RequestKind, Settlement, Table, Take};
use serde_json::json;
use spec_common::*;

/// rows 1 to 6 together: what was recorded while no worker ran is done, creates before updates, each once.
#[tokio::test]
async fn row_1_what_was_recorded_without_a_worker_is_settled_by_one_that_comes_later() {
    let (_db, pool) = database().await;
    let requests =
        HandOff::<RequestKind>::builder(Table::new("request").unwrap()).attempts(3).build().unwrap();
    requests.create(&pool).await.unwrap();
    assert!(requests.spec().check(&pool).await.unwrap().is_empty());
    let mut connection = pool.acquire().await.unwrap();
    for entity in 0..10 {
        requests.record(&mut connection, RequestKind::Create, entity, &json!({})).await.unwrap();
        for _ in 0..3 {
            requests.record(&mut connection, RequestKind::Update, entity, &json!({})).await.unwrap();
        }
    }
    let claims = PgClaims::new(pool.clone(), requests.spec().clone());
    let mut kinds = Vec::new();
    for _ in 0..2 {
        let taken = claims.take(&Take::up_to(100)).await.unwrap();
        assert_eq!(taken.claims.len(), 10, "one claim for each entity");
        let done: Vec<_> =
            taken.claims.iter().map(|one| Settlement::new(one.claim.clone(), Outcome::Done)).collect();
        kinds
            .extend(taken.claims.iter().flat_map(|one| one.rows.iter().map(|row| row.kind.clone().unwrap())));
        for answer in claims.settle(&done).await.unwrap() {
            answer.unwrap();
        }
    }
    assert_eq!(kinds.iter().filter(|kind| ***kind == *"create").count(), 10);
    assert!(kinds[..10].iter().all(|kind| **kind == *"create"), "{kinds:?}");
    assert_eq!(kinds.len(), 40);
    assert_eq!(text(&pool, "SELECT string_agg(DISTINCT status, ' ') FROM request").await, "complete");
    assert!(claims.take(&Take::up_to(100)).await.unwrap().claims.is_empty());
}
