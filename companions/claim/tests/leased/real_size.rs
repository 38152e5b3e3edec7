//! Claims on large tables, on large groups, and on tables with other constraints and indexes.
use std::time::Duration;

use crate::common::*;
use leasehold_claim::{ClaimStore as _, Outcome, PgClaims, Renewal, Retention, Take};
use test_servers::{Cluster, ClusterOptions};

/// A group larger than the limit of a claim is taken in parts, in order, and never by two workers at once.
#[tokio::test]
async fn a_group_larger_than_a_claim() {
    for spec in [request(), beside()] {
        let world = World::new(&[REQUEST, SIDE].concat()).await;
        world.run("INSERT INTO request (entity) SELECT 'e' FROM generate_series(1, 250)").await;
        let claims = world.claims(spec.group("entity").work(["document"]).grouped().group_limit(100));
        let mut seen = Vec::new();
        for expected in [100, 100, 50] {
            let claim = take_one(&claims).await;
            assert_eq!(claim.rows.len(), expected);
            assert!(take(&claims, 1).await.claims.is_empty(), "somebody is at the group");
            seen.extend(claim.rows.iter().map(|row| row.key.id.to_string().parse::<i64>().unwrap()));
            settle(&claims, &claim.claim, Outcome::Done).await.unwrap();
        }
        assert_eq!(seen, (1..=250).collect::<Vec<_>>());
    }
}

/// The take of an unclaimed group is not quadratic in its rows. A quadratic take would last for minutes.
#[tokio::test]
async fn a_large_group_is_taken_at_once_and_stops_nobody() {
    let world = World::new(REQUEST).await;
    let spec = request().group("entity").work(["document"]).grouped();
    spec_of(&world, request().group("entity").work(["document"]).grouped()).await;
    world.run("INSERT INTO request (entity) SELECT 'hot' FROM generate_series(1, 30000)").await;
    world.run("INSERT INTO request (entity) VALUES ('other'); ANALYZE request").await;
    let claims = world.claims(spec);
    let hot = take_one(&claims).await;
    assert_eq!((hot.group.as_deref(), hot.rows.len()), (Some("hot"), 10_000));
    let taken = take(&claims, 1).await;
    assert_eq!(taken.claims.len(), 1, "behind 20,000 rows of a group that somebody is at: {taken:?}");
    assert_eq!(taken.claims[0].group.as_deref(), Some("other"));
    assert_eq!(taken.skipped, 1, "the group was seen");
}

async fn spec_of(world: &World, spec: leasehold_claim::ClaimSpecBuilder) {
    spec.build().unwrap().migration().apply(&world.pool).await.unwrap();
}

/// A renewal changes the row in place (HOT), even if the table has other indexes.
#[tokio::test]
async fn renewals_change_rows_in_place() {
    // A separate server, because open transactions of other tests would prevent the cleanup of pages.
    let cluster = Cluster::start(ClusterOptions::new());
    let database = cluster.fresh_database().await;
    let world = World { pool: pool(database.url(), 2).await, database };
    world.run(REQUEST).await;
    world
        .run(
            "ALTER TABLE request SET (fillfactor = 50, autovacuum_enabled = false);
            CREATE INDEX ON request (document); CREATE INDEX ON request (entity);
            CREATE INDEX ON request (kind, entity); CREATE INDEX ON request (taken_at)",
        )
        .await;
    spec_of(&world, request()).await;
    world.insert(1_000).await;
    let taken = take(&world.claims(request()), 20).await;
    let all: Vec<_> = taken.claims.iter().map(|claim| claim.claim.clone()).collect();
    world.pool.close().await;
    let before = updates(&world, 20).await;

    let renewing = pool(world.database.url(), 1).await;
    let claims = PgClaims::new(renewing.clone(), request().build().unwrap()).timeout(LONG);
    for _ in 0..100 {
        let renewals = claims.renew(&all, Duration::from_secs(60)).await.unwrap();
        assert!(renewals.iter().all(|renewal| *renewal == Renewal::Renewed));
    }
    renewing.close().await;
    let after = updates(&world, before.0 + 2_000).await;
    let (all, in_place) = (after.0 - before.0, after.1 - before.1);
    assert!(in_place * 100 >= all * 95, "{in_place} of {all} in place");
}

/// Waits until the server has counted `at_least` row updates, which it does when a session ends. Returns the number of
/// updates, and of updates in place.
async fn updates(world: &World, at_least: i64) -> (i64, i64) {
    let mut observer = world.database.connect().await;
    let sql = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'request'";
    bounded(async {
        loop {
            let counts: (i64, i64) = sqlx::query_as(sql).fetch_one(&mut observer).await.unwrap();
            if counts.0 >= at_least {
                return counts;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await
}

/// A row that a foreign key still references stays, but the purge deletes the others.
#[tokio::test]
async fn a_referenced_row_does_not_stop_the_purge() {
    let world =
        World::new(&format!("{REQUEST} CREATE TABLE result (request bigint REFERENCES request (id))")).await;
    let claims = world.claims(request().retention(Retention::KeepFor(Duration::from_millis(1))));
    world.insert(300).await;
    let taken = claims.take(&Take::up_to(300)).await.unwrap();
    let done: Vec<_> = taken.claims.iter().map(|claim| (claim.claim.clone(), Outcome::Done)).collect();
    assert!(claims.settle(&done).await.unwrap().iter().all(Result::is_ok));
    world.run("UPDATE request SET settled_at = settled_at - interval '1 hour'").await;
    world.run("INSERT INTO result SELECT id FROM request WHERE id IN (1, 2, 150, 300)").await;
    assert_eq!(claims.purge(100).await.unwrap(), 100, "as many as were asked for");
    assert_eq!(claims.purge(1_000).await.unwrap(), 196);
    assert_eq!(world.number("SELECT count(*) FROM request").await, 4);
    let error = claims.purge(1_000).await.unwrap_err();
    assert!(error.to_string().contains("result_request_fkey"), "what stands against it is named: {error}");
    world.run("DELETE FROM result").await;
    assert_eq!(claims.purge(1_000).await.unwrap(), 4);
}
