//! Leases, sweeps and attempts in Postgres.
use std::time::Duration;

use crate::common::*;
use leasehold_claim::{
    ClaimError, ClaimRef, ClaimSpec, ClaimSpecBuilder, ClaimStore as _, Outcome, OwnerToken, Renewal,
    Retention, RowKey, States, Table, Take,
};
use sqlx::Executor as _;
use test_bounds::Bound;

const NOW: Outcome = Outcome::Retry { error: None, after: Duration::ZERO };

fn renewed(renewals: &[Renewal]) -> usize {
    renewals.iter().filter(|renewal| **renewal == Renewal::Renewed).count()
}

/// A renewal compares row, owner, epoch and state. The answers are in the order of the claims.
#[tokio::test(flavor = "multi_thread")]
async fn renewals_match_row_owner_epoch_and_state() {
    for spec in [request(), beside()] {
        let world = World::new(&[REQUEST, SIDE].concat()).await;
        world.insert(6).await;
        let claims = world.claims(spec);
        let taken = take(&claims, 5).await;
        let mut all: Vec<ClaimRef> = taken.claims.iter().map(|claim| claim.claim.clone()).collect();
        world.expire().await;
        world.run("UPDATE lease SET lease_until = '-infinity'").await;
        // Without a sweep, all rows still belong to their claims.
        assert_eq!(renewed(&claims.renew(&all, LONG).await.unwrap()), 5);
        assert!(claims.sweep(9).await.unwrap().returned.is_empty());
        let remaining = claims.taken(9).await.unwrap();
        assert!(remaining.iter().all(|row| row.remaining.unwrap() > LONG / 2), "{remaining:?}");
        // A wrong owner, a wrong epoch, a wrong state, and a deleted row.
        all[0].owner = OwnerToken::Uuid(uuid::Uuid::new_v4());
        all[1].rows = [(RowKey::new(2), all[1].rows[0].1 + 1)].into();
        world
            .run("UPDATE request SET status = 'complete' WHERE id = 3; DELETE FROM request WHERE id = 4")
            .await;
        let renewals = claims.renew(&all, LONG).await.unwrap();
        for (at, renewal) in renewals.iter().enumerate() {
            let Renewal::Lost { row, current_epoch, state } = renewal else {
                assert_eq!(at, 4, "{renewals:?}");
                continue;
            };
            assert_eq!(*row, all[at].rows[0].0);
            assert_eq!(current_epoch.is_some(), at < 3, "{renewals:?}");
            let state = state.as_ref().map(|state| state.as_str().to_owned());
            assert_eq!(
                state.as_deref(),
                [Some("in-progress"), Some("in-progress"), Some("complete"), None][at]
            );
        }
        assert!(claims.renew(&[], LONG).await.unwrap().is_empty());
        assert!(matches!(claims.renew(&all, Duration::ZERO).await, Err(ClaimError::InvalidSpec(_))));
    }
}

/// A renewal does not wait for a locked row, and renews the other rows.
#[tokio::test(flavor = "multi_thread")]
async fn a_renewal_is_not_held_up() {
    for spec in [request(), beside()] {
        let world = World::new(&[REQUEST, SIDE].concat()).await;
        world.insert(3).await;
        let claims = world.claims(spec);
        let all: Vec<ClaimRef> = take(&claims, 3).await.claims.into_iter().map(|claim| claim.claim).collect();
        let mut other = world.pool.begin().await.unwrap();
        other.execute("UPDATE request SET document = 'x' WHERE id = 2").await.unwrap();
        let renewals = bounded(claims.renew(&all, LONG)).await.unwrap();
        assert_eq!(renewals, [Renewal::Renewed, Renewal::Busy, Renewal::Renewed]);
        other.commit().await.unwrap();
        assert_eq!(renewed(&claims.renew(&all, LONG).await.unwrap()), 3);
    }
}

/// A sweep returns an ended lease with a greater epoch, so its late owner is refused. Concurrent sweeps return each row once.
#[tokio::test(flavor = "multi_thread")]
async fn sweepers_return_each_ended_lease_once() {
    for spec in [request(), beside()] {
        let world = World::new(&[REQUEST, SIDE].concat()).await;
        world.insert(40).await;
        let claims = world.claims(spec);
        let taken = take(&claims, 40).await;
        assert!(claims.sweep(99).await.unwrap().returned.is_empty(), "none has ended");
        let mut kept = taken.claims[39].claim.clone();
        world.run("UPDATE request SET lease_until = clock_timestamp() WHERE id < 40").await;
        world.run("UPDATE lease SET lease_until = clock_timestamp() WHERE id <> '40'").await;
        let sweepers: Vec<_> = (0..4)
            .map(|_| {
                let claims = claims.clone();
                tokio::spawn(async move {
                    let mut returned = Vec::new();
                    loop {
                        let swept = claims.sweep(3).await.unwrap();
                        assert!(swept.returned.len() <= 3 && swept.exhausted.is_empty());
                        if swept.returned.is_empty() {
                            return returned;
                        }
                        returned.extend(swept.returned);
                    }
                })
            })
            .collect();
        let mut returned = Vec::new();
        for sweeper in sweepers {
            returned.extend(bounded(sweeper).await.unwrap());
        }
        returned.sort();
        assert_eq!(returned, (1..40).map(RowKey::new).collect::<Vec<_>>());
        assert_eq!(
            world.number("SELECT count(*) FROM request WHERE status = 'new' AND owner IS NULL").await,
            39
        );
        let late = settle(&claims, &taken.claims[0].claim, Outcome::Done).await;
        assert!(matches!(late, Err(ClaimError::Superseded { .. })), "{late:?}");
        let again = take_one(&claims).await;
        assert!(again.epoch() > taken.claims[0].epoch(), "{again:?}");
        let late = settle(&claims, &taken.claims[0].claim, Outcome::Done).await;
        assert!(
            matches!(late, Err(ClaimError::Superseded { current_epoch, .. }) if current_epoch == again.epoch()),
            "{late:?}"
        );
        kept.rows = taken.claims[39].claim.rows.clone();
        settle(&claims, &kept, Outcome::Done).await.unwrap();
    }
}

/// A row's own timeout replaces the lease of the take.
#[tokio::test(flavor = "multi_thread")]
async fn a_row_can_have_its_own_timeout() {
    for spec in [request(), beside()] {
        let world = World::new(&[REQUEST, SIDE].concat()).await;
        world.run("INSERT INTO request (timeout_s) VALUES (86400), (NULL), (-1)").await;
        let claims = world.claims(spec.timeout_seconds("timeout_s"));
        let taken = claims.take(&Take::up_to(9).lease(Duration::from_secs(60))).await.unwrap();
        let leases: Vec<u64> = taken.claims.iter().map(|claim| claim.lease.as_secs()).collect();
        assert_eq!(leases, [86_400, 60, 60]);
        // Allows 20 s for the query, because a busy machine can be slow.
        let remain = async |leases: [u64; 3]| {
            let mut rows = claims.taken(9).await.unwrap();
            rows.sort_by_key(|row| row.key.clone());
            let remaining: Vec<f64> = rows.iter().map(|row| row.remaining.unwrap().as_secs_f64()).collect();
            let fits = |(left, lease): (&f64, u64)| *left <= lease as f64 && *left > lease as f64 - 20.0;
            assert!(remaining.iter().zip(leases).all(fits), "{remaining:?} of {leases:?}");
        };
        remain([86_400, 60, 60]).await;
        let all: Vec<ClaimRef> = taken.claims.iter().map(|claim| claim.claim.clone()).collect();
        world.run("UPDATE request SET timeout_s = 3600 WHERE id = 1").await;
        assert_eq!(renewed(&claims.renew(&all, Duration::from_secs(120)).await.unwrap()), 3);
        remain([3_600, 120, 120]).await;
    }
}

/// A lease has one boundary everywhere: it has ended at `lease_until`, but not a microsecond before. The server's clock is
/// stopped to test both sides.
#[tokio::test(flavor = "multi_thread")]
async fn a_lease_has_one_boundary_by_the_servers_clock() {
    let world = World::private(&[REQUEST, SIDE].concat()).await;
    // SQL functions, because the planner inlines their bodies.
    world.run("CREATE OR REPLACE FUNCTION pg_catalog.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS
        $$ SELECT '2026-01-01 00:00:00+00'::pg_catalog.timestamptz $$;
        CREATE OR REPLACE FUNCTION pg_catalog.statement_timestamp() RETURNS timestamptz LANGUAGE sql STABLE AS
        $$ SELECT '2026-01-01 00:00:00+00'::pg_catalog.timestamptz $$;
        CREATE FUNCTION request_claim_state(text, timestamptz) RETURNS text LANGUAGE sql AS
        $$ SELECT CASE WHEN $1 = 'in-progress' AND $2 <= pg_catalog.clock_timestamp() THEN 'new' ELSE $1 END $$").await;
    let keep = Retention::KeepFor(Duration::from_secs(1));
    let claims = world.claims(request().retention(keep));
    let on_read = world.claims(request().expire_on_read());
    let side = world.claims(beside());
    world.insert(1).await;
    take_one(&claims).await;
    // The written times come from the server's clock and a duration, never from the client's clock.
    assert_eq!(
        world
            .text("SELECT lease_until = '2026-01-01 00:00:30+00' AND taken_at = '2026-01-01' FROM request")
            .await,
        "true"
    );
    let at = async |column: &str, text: &str| {
        world.run(&format!("UPDATE request SET {column} = '2026-01-01 {text}+00'")).await;
    };
    at("lease_until", "00:00:00.000001").await;
    assert!(claims.sweep(9).await.unwrap().returned.is_empty());
    assert!(take(&on_read, 9).await.claims.is_empty());
    at("lease_until", "00:00:00").await;
    assert!(on_read.pending(&Take::up_to(1)).await.unwrap());
    assert_eq!(take_one(&on_read).await.epoch(), Some(2));
    at("lease_until", "00:00:00").await;
    assert_eq!(claims.sweep(9).await.unwrap().returned, [RowKey::new(1)]);
    at("ready_at", "00:00:00.000001").await;
    assert!(take(&claims, 9).await.claims.is_empty());
    at("ready_at", "00:00:00").await;
    let claim = take_one(&claims).await;
    settle(&claims, &claim.claim, Outcome::Done).await.unwrap();
    world.run("UPDATE request SET settled_at = '2025-12-31 23:59:59.000001+00'").await;
    assert_eq!(claims.purge(9).await.unwrap(), 0);
    world.run("UPDATE request SET settled_at = '2025-12-31 23:59:59+00'").await;
    assert_eq!(claims.purge(9).await.unwrap(), 1);

    world.insert(1).await;
    take_one(&side).await;
    world.run("UPDATE lease SET lease_until = '2026-01-01 00:00:00.000001+00'").await;
    assert!(side.sweep(9).await.unwrap().returned.is_empty());
    world.run("UPDATE lease SET lease_until = '2026-01-01 00:00:00+00'").await;
    assert_eq!(side.sweep(9).await.unwrap().returned.len(), 1);
}

/// Three attempts give exactly three claims, also with crashes, and then the row is exhausted and listed. A requeue adds
/// attempts. The count is never negative.
#[tokio::test(flavor = "multi_thread")]
async fn three_attempts_are_three_claims_until_more_are_added() {
    let listed: fn(ClaimSpecBuilder) -> ClaimSpecBuilder = |spec| spec;
    let unnamed: fn(ClaimSpecBuilder) -> ClaimSpecBuilder =
        |spec| spec.state("status", States::text(["new"], "complete").taken("in-progress").failed("error"));
    for (spec, has_state) in [
        (listed(request()), true),
        (listed(beside()), true),
        (unnamed(request()), false),
        (unnamed(beside()), false),
    ] {
        let world = World::new(&[REQUEST, SIDE].concat()).await;
        world.run("INSERT INTO request (attempts_left) VALUES (3), (NULL)").await;
        let claims = world.claims(spec);
        let rest = if has_state { "exhausted" } else { "new" };
        let left = async || world.text("SELECT attempts_left FROM request WHERE id = 1").await;
        for (attempt, end) in [Some(NOW), None, Some(Outcome::PutBack), Some(NOW)].into_iter().enumerate() {
            let claim = take_one(&claims).await;
            assert_eq!(claim.rows[0].key, RowKey::new(1));
            let remaining = [2, 1, 0, 0][attempt];
            assert_eq!(claim.rows[0].attempts_left, Some(remaining));
            assert_eq!(left().await, remaining.to_string());
            match end {
                // A put-back does not count as an attempt.
                Some(Outcome::PutBack) => {
                    assert!(
                        settle(&claims, &claim.claim, Outcome::PutBack).await.unwrap().exhausted.is_empty()
                    );
                    assert_eq!(left().await, "1");
                }
                Some(end) => {
                    let settled = settle(&claims, &claim.claim, end).await.unwrap();
                    let last: &[RowKey] = if remaining == 0 { &[RowKey::new(1)] } else { &[] };
                    assert_eq!(settled.exhausted, last);
                }
                // A crash of the worker.
                None => {
                    world.run("UPDATE request SET lease_until = '-infinity' WHERE id = 1; UPDATE lease SET lease_until = '-infinity'").await;
                    assert_eq!(claims.sweep(9).await.unwrap().returned, [RowKey::new(1)]);
                }
            }
        }
        assert_eq!(world.text("SELECT status FROM request WHERE id = 1").await, rest);
        assert_eq!(claims.exhausted(9).await.unwrap(), [RowKey::new(1)]);
        let unlimited = take_one(&claims).await;
        assert_eq!((unlimited.rows[0].key.clone(), unlimited.rows[0].attempts_left), (RowKey::new(2), None));
        assert!(!claims.pending(&Take::up_to(1)).await.unwrap());

        assert_eq!(
            claims
                .requeue(&[RowKey::new(1), RowKey::new(2), RowKey::new(1), RowKey::new(77)], 1)
                .await
                .unwrap(),
            1
        );
        assert!(claims.exhausted(9).await.unwrap().is_empty());
        assert!(matches!(claims.requeue(&[RowKey::new(1)], 0).await, Err(ClaimError::InvalidSpec(_))));
        take_one(&claims).await;
        // The last attempt crashes, and the sweep reports the row as exhausted.
        world.run("UPDATE request SET lease_until = '-infinity' WHERE id = 1; UPDATE lease SET lease_until = '-infinity' WHERE id = '1'").await;
        let swept = claims.sweep(9).await.unwrap();
        assert_eq!((swept.returned.len(), swept.exhausted), (0, vec![RowKey::new(1)]));
        assert_eq!(world.text("SELECT status FROM request WHERE id = 1").await, rest);
        assert_eq!(left().await, "0");
        assert!(take(&claims, 9).await.claims.is_empty());
        // Rows inserted without attempts are reported as exhausted too, once.
        world.run("INSERT INTO request (attempts_left) VALUES (0), (-5)").await;
        let swept = claims.sweep(9).await.unwrap();
        assert_eq!(swept.exhausted.len(), if has_state { 2 } else { 0 });
        assert_eq!(claims.exhausted(9).await.unwrap().len(), 3);
        assert_eq!(claims.requeue(&[RowKey::new(4)], u32::try_from(i32::MAX).unwrap()).await.unwrap(), 1);
        assert_eq!(world.text("SELECT attempts_left FROM request WHERE id = 4").await, i32::MAX.to_string());
    }
}

/// Rows of a table with a boolean state have attempts, and exhausted rows are listed.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_boolean_table_have_attempts() {
    let world = World::new(&[
        "CREATE TABLE plain (id bigint PRIMARY KEY, processed boolean NOT NULL DEFAULT false, tries smallint NOT NULL DEFAULT 2);
        INSERT INTO plain (id) VALUES (1);",
        SIDE,
    ].concat()).await;
    let claims = world.claims(
        ClaimSpec::builder(Table::new("plain").unwrap())
            .state("processed", States::boolean())
            .side_table(Table::new("lease").unwrap())
            .attempts("tries"),
    );
    for _ in 0..2 {
        let claim = take_one(&claims).await;
        assert!(take(&claims, 9).await.claims.is_empty());
        settle(&claims, &claim.claim, NOW).await.unwrap();
    }
    assert!(take(&claims, 9).await.claims.is_empty());
    assert_eq!(claims.exhausted(9).await.unwrap(), [RowKey::new(1)]);
    assert_eq!(claims.requeue(&[RowKey::new(1)], 1).await.unwrap(), 1);
    let claim = take_one(&claims).await;
    settle(&claims, &claim.claim, Outcome::Done).await.unwrap();
    assert_eq!(world.text("SELECT processed::text || tries FROM plain").await, "true0");
}

/// The pause before a retry follows the server's clock.
#[tokio::test(flavor = "multi_thread")]
async fn a_retry_after_a_pause() {
    let world = World::new(REQUEST).await;
    world.insert(1).await;
    let claims = world.claims(request());
    let claim = take_one(&claims).await;
    let later = Outcome::Retry { error: Some("busy".into()), after: Duration::from_secs(3600) };
    settle(&claims, &claim.claim, later).await.unwrap();
    assert!(take(&claims, 9).await.claims.is_empty());
    assert!(!claims.pending(&Take::up_to(1)).await.unwrap());
    let pause = "SELECT round(EXTRACT(epoch FROM ready_at - clock_timestamp()) / 60)::int FROM request";
    assert_eq!(world.number(pause).await, 60);
    world.run("UPDATE request SET ready_at = clock_timestamp()").await;
    assert_eq!(flat(&take(&claims, 9).await), [1]);
}

/// Epochs from a sequence grow from row to row and with each sweep.
#[tokio::test(flavor = "multi_thread")]
async fn epochs_of_a_sequence() {
    let world = World::new(REQUEST).await;
    world.run("CREATE SEQUENCE epochs").await;
    world.insert(2).await;
    let claims = world.claims(request().epoch_sequence(Table::new("epochs").unwrap()));
    let [first, second] = [take_one(&claims).await, take_one(&claims).await];
    assert!(second.epoch() > first.epoch());
    world.expire().await;
    claims.sweep(9).await.unwrap();
    let again = take_one(&claims).await;
    assert_eq!(again.rows[0].key, first.rows[0].key);
    assert!(again.epoch() > second.epoch());
    assert_eq!(
        world.number("SELECT epoch FROM request WHERE id = 2").await.cmp(&second.epoch().unwrap()),
        std::cmp::Ordering::Greater
    );
}

/// Many claims are renewed in one statement on a table whose statistics are outdated. Each row is found by its key. A
/// comparison of all pairs would take a hundred times as long.
#[tokio::test(flavor = "multi_thread")]
async fn many_claims_with_old_statistics() {
    const MANY: u32 = 8_000;
    for spec in [request(), beside()] {
        let world = World::new(&[REQUEST, SIDE].concat()).await;
        world.run("ALTER TABLE request SET (autovacuum_enabled = off)").await;
        world.insert(MANY).await;
        world.run("ANALYZE request; ANALYZE lease").await;
        let claims = world.claims(spec);
        let taken = take(&claims, MANY).await;
        let all: Vec<ClaimRef> = taken.claims.iter().map(|claim| claim.claim.clone()).collect();
        let began = Bound::new(LONG / 2);
        assert_eq!(renewed(&claims.renew(&all, LONG).await.unwrap()), MANY as usize);
        let ends: Vec<_> = all.into_iter().map(|claim| (claim, Outcome::Done)).collect();
        assert!(claims.settle(&ends).await.unwrap().iter().all(Result::is_ok));
        began.check("each was compared with each");
    }
}

/// One call contains an old and a new claim of the same row. The old claim is lost and the new one renewed, in either order.
#[tokio::test(flavor = "multi_thread")]
async fn an_old_and_a_new_claim_of_one_row_in_one_call() {
    for spec in [request(), beside()] {
        let world = World::new(&[REQUEST, SIDE].concat()).await;
        world.insert(1).await;
        let claims = world.claims(spec);
        let old = take_one(&claims).await.claim;
        world.expire().await;
        world.run("UPDATE lease SET lease_until = '-infinity'").await;
        claims.sweep(9).await.unwrap();
        let new = take_one(&claims).await.claim;
        let renewals = claims.renew(&[old.clone(), new.clone()], LONG).await.unwrap();
        assert!(matches!(renewals[..], [Renewal::Lost { .. }, Renewal::Renewed]), "{renewals:?}");
        let renewals = claims.renew(&[new, old], LONG).await.unwrap();
        assert!(matches!(renewals[..], [Renewal::Renewed, Renewal::Lost { .. }]), "{renewals:?}");
    }
}
