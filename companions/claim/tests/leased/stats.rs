//! Counts and requeues on migrated tables.
use std::time::Duration;

use crate::common::*;
use leasehold_claim::{ClaimError, ClaimSpecBuilder, ClaimStore as _, OrderType, RowKey, Stats, Take};

fn by_time() -> ClaimSpecBuilder {
    request().order_by("ready_at", OrderType::Time)
}

async fn migrated(spec: ClaimSpecBuilder) -> World {
    let world = World::new(
        "CREATE TABLE request (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, entity text,
        document text, status text NOT NULL DEFAULT 'new')",
    )
    .await;
    spec.build().unwrap().migration().apply(&world.pool).await.unwrap();
    world
}

/// If the order starts with the time, rows for later are found after any number of other rows.
#[tokio::test(flavor = "multi_thread")]
async fn rows_for_later_are_counted_beside_those_for_now() {
    let world = migrated(by_time()).await;
    world.insert(50).await;
    world
        .run(
            "UPDATE request SET ready_at = now() - interval '90 minutes' WHERE id = 7;
             UPDATE request SET ready_at = '-infinity' WHERE id = 8;
             INSERT INTO request (document, ready_at) SELECT 'later', now() + interval '1 hour' FROM generate_series(1, 3)",
        )
        .await;
    let claims = world.claims(by_time());
    let Stats { ready, later, oldest, is_capped, .. } = claims.stats(&Take::up_to(10)).await.unwrap();
    assert_eq!((ready, later, is_capped), (10, 3, true));
    let age = oldest.unwrap();
    assert!(age >= Duration::from_secs(90 * 60) && age < Duration::from_secs(100 * 60), "{age:?}");
    let few = claims.stats(&Take::up_to(3)).await.unwrap();
    assert_eq!((few.ready, few.later, few.is_capped), (3, 3, true));
    let all = claims.stats(&Take::up_to(60)).await.unwrap();
    assert_eq!((all.ready, all.later, all.is_capped), (50, 3, false));
    // In another order, only the first rows are counted.
    let Stats { ready, later, is_capped, .. } =
        world.claims(request()).stats(&Take::up_to(10)).await.unwrap();
    assert_eq!((ready, later, is_capped), (10, 0, true));
}

/// A constraint that refuses one row does not prevent the requeue of the others.
#[tokio::test(flavor = "multi_thread")]
async fn a_constraint_stands_against_a_requeue() {
    let world = World::new(REQUEST).await;
    world
        .run(
            "CREATE UNIQUE INDEX one_new ON request (entity) WHERE status = 'new';
             INSERT INTO request (entity, status) VALUES ('a', 'error'), ('b', 'error'), ('a', 'new')",
        )
        .await;
    let claims = world.claims(request());
    assert_eq!(claims.requeue_all(&"error".into(), 9, 1).await.unwrap(), 1);
    let refused = claims.requeue_all(&"error".into(), 9, 1).await;
    assert!(matches!(&refused, Err(ClaimError::Row { row, .. }) if *row == RowKey::new(1)), "{refused:?}");
    assert_eq!(world.number("SELECT count(*) FROM request WHERE status = 'error'").await, 1);
}
