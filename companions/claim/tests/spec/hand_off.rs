//! A table through which recorders pass work to workers, as in the example `spreadsheet`.

#[path = "../../examples/spreadsheet/hand_off.rs"]
mod example;
use std::time::Duration;

use self::example::{RequestState, record};
use crate::common::*;
use leasehold_claim::sqlx::postgres::PgListener;
use leasehold_claim::sqlx::{Connection as _, PgPool};
use leasehold_claim::{
    ClaimError, ClaimSpec, ClaimStore as _, IdType, Outcome, PgClaims, State, States, Table, Take, Unmet,
};
use test_bounds::within;
use tokio::time::timeout;

async fn made() -> (test_servers::Database, PgPool, ClaimSpec) {
    let (db, pool) = database().await;
    let spec = example::spec().unwrap();
    example::create(&pool, &spec).await.unwrap();
    (db, pool, spec)
}

/// Work recorded while no worker ran is done later, creates before updates, each once.
#[tokio::test]
async fn work_recorded_without_a_worker_is_settled_by_a_later_one() {
    let (_db, pool, spec) = made().await;
    assert!(spec.check(&pool).await.unwrap().is_empty());
    let mut connection = pool.acquire().await.unwrap();
    for entity in 0..10 {
        for kind in ["create", "update", "update", "update"] {
            record(&mut connection, kind, entity, None).await.unwrap().unwrap();
        }
    }
    let claims = PgClaims::new(pool.clone(), spec);
    let mut kinds = Vec::new();
    for _ in 0..2 {
        let taken = claims.take(&Take::up_to(100)).await.unwrap();
        assert_eq!(taken.claims.len(), 10, "one claim for each entity");
        let done: Vec<_> = taken.claims.iter().map(|one| (one.claim.clone(), Outcome::Done)).collect();
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

#[tokio::test]
async fn business_columns_are_enough_and_numbers_grow() {
    let (_db, pool, _) = made().await;
    let insert = "INSERT INTO request (entity_id, document) VALUES (7, '{}') RETURNING id || status || kind || attempts_left";
    assert_eq!(text(&pool, insert).await, "1newcreate3");
    let mut last = 1;
    // By two sessions in turns, because numbers that a session draws ahead would not grow.
    let mut sessions = [pool.acquire().await.unwrap(), pool.acquire().await.unwrap()];
    for entity in 8..20 {
        let sql = format!("INSERT INTO request (entity_id) VALUES ({entity}) RETURNING id::text");
        let id: i64 = text(&mut *sessions[entity % 2], &sql).await.parse().unwrap();
        assert!(id > last, "{id} after {last}");
        last = id;
    }
    assert_eq!(refused(&pool, "INSERT INTO request (id, entity_id) VALUES (1000, 1)").await, "428C9");
}

#[tokio::test]
async fn states_and_kinds_are_closed_sets_with_named_constraints() {
    let (_db, pool, spec) = made().await;
    use RequestState::{Complete, Error, InProgress, New};
    for state in [New, InProgress, Complete, Error] {
        let sql =
            format!("INSERT INTO request (entity_id, status) VALUES ({}, '{}')", state as u8, state.name());
        run(&pool, &sql).await;
    }
    assert_eq!(refused(&pool, "INSERT INTO request (entity_id, status) VALUES (9, 'done')").await, "23514");
    assert_eq!(refused(&pool, "UPDATE request SET status = 'NEW'").await, "23514");
    assert_eq!(refused(&pool, "INSERT INTO request (entity_id, kind) VALUES (9, 'delete')").await, "23514");
    // The type and the database know the same states. A fifth state of the type does not compile here.
    assert_eq!(spec.states().all().len(), 4);
    for state in spec.states().all() {
        let known = RequestState::try_from(state).unwrap();
        let name = match known {
            New => "new",
            InProgress => "in-progress",
            Complete => "complete",
            Error => "error",
        };
        assert_eq!((known.name(), State::from(known)), (name, state.clone()));
    }
    for state in texts(&pool, "SELECT status FROM request ORDER BY entity_id").await {
        let row = RequestState::try_from(&State::from(state.as_str())).unwrap();
        assert_eq!(row.name(), state);
    }
    let unknown = RequestState::try_from(&State::from("done")).unwrap_err().to_string();
    assert!(unknown.contains("no state done"), "{unknown}");
    let listed = spec.constraints(&pool).await.unwrap();
    for name in ["request_status_states", "request_kinds", "request_one_create", "request_pkey"] {
        assert!(listed.contains_key(name), "{name} in {listed:#?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_fifty_creates_at_once_one_is_a_row_and_the_others_are_duplicates() {
    let (_db, pool, _) = made().await;
    for (kind, rows) in [("create", 1), ("update", 50)] {
        let tries: Vec<_> = (0..50)
            .map(|_| {
                let pool = pool.clone();
                tokio::spawn(async move {
                    let mut connection = pool.acquire().await.unwrap();
                    record(&mut connection, kind, 1, None).await.unwrap()
                })
            })
            .collect();
        let mut made = 0;
        for answer in tries {
            made += usize::from(within(LONG, "not ended", answer).await.unwrap().is_some());
        }
        assert_eq!(made, rows);
        let count = format!("SELECT count(*)::text FROM request WHERE kind = '{kind}'");
        assert_eq!(text(&pool, &count).await, rows.to_string());
    }
    // The database also refuses duplicates inserted without `record`.
    assert_eq!(refused(&pool, "INSERT INTO request (entity_id) VALUES (1)").await, "23505");
}

/// A unique violation of the server becomes a typed error with the constraint's name.
#[tokio::test]
async fn duplicates_of_any_unique_constraint_are_typed_and_cannot_be_retried() {
    let (_db, pool, _) = made().await;
    run(&pool, "INSERT INTO request (entity_id) VALUES (3)").await;
    let refused = try_run(&pool, "INSERT INTO request (entity_id) VALUES (3)").await;
    let error = ClaimError::of(refused.unwrap_err(), "insert");
    assert!(
        matches!(&error, ClaimError::Duplicate { constraint, .. } if &**constraint == "request_one_create"),
        "{error}"
    );
    assert!(!error.is_retryable());
    assert!(std::error::Error::source(&error).is_some());
    let refused = try_run(&pool, "INSERT INTO request (entity_id, status) VALUES (4, 'odd')").await;
    let error = ClaimError::of(refused.unwrap_err(), "insert");
    assert!(
        matches!(&error, ClaimError::Constraint { constraint, .. } if &**constraint == "request_status_states")
    );
}

/// A duplicate leaves the caller's transaction usable.
#[tokio::test]
async fn a_row_and_its_wake_up_come_with_one_commit() {
    let (db, pool, spec) = made().await;
    let mut listener = PgListener::connect(db.url()).await.unwrap();
    listener.listen(spec.channel()).await.unwrap();
    let mut connection = pool.acquire().await.unwrap();

    let mut tx = connection.begin().await.unwrap();
    record(&mut tx, "create", 1, None).await.unwrap().unwrap();
    tx.rollback().await.unwrap();
    assert_eq!(text(&pool, "SELECT count(*)::text FROM request").await, "0");
    // A notification of the rollback would arrive before this marker.
    run(&pool, &format!("SELECT pg_notify('{}', 'marker')", spec.channel())).await;
    assert_eq!(within(LONG, "not ended", listener.recv()).await.unwrap().payload(), "marker");

    let mut tx = connection.begin().await.unwrap();
    let id = record(&mut tx, "create", 1, Some(r#"{"a": 1}"#)).await.unwrap().unwrap();
    assert_eq!(record(&mut tx, "create", 1, None).await.unwrap(), None);
    record(&mut tx, "update", 1, None).await.unwrap().unwrap();
    assert!(timeout(Duration::from_millis(50), listener.recv()).await.is_err(), "not before the commit");
    tx.commit().await.unwrap();
    assert_eq!(within(LONG, "not ended", listener.recv()).await.unwrap().payload(), "new in public");
    let document = format!("SELECT document::text FROM request WHERE id = {id}");
    assert_eq!(text(&pool, &document).await, r#"{"a": 1}"#);

    record(&mut connection, "create", 2, None).await.unwrap().unwrap();
    within(LONG, "not ended", listener.recv()).await.expect("without a transaction, at once");
}

/// Names and kinds need quoting, in a table with a long name whose channel workers listen on.
#[tokio::test]
async fn kinds_and_names_may_be_anything() {
    let (_db, pool) = database().await;
    let table = Table::new("t".repeat(60)).unwrap().in_schema("s\"x").unwrap();
    let quoted = table.quoted();
    let make = format!(
        "CREATE SCHEMA \"s\"\"x\"; CREATE TABLE {quoted} (\"i'd\" bigint PRIMARY KEY, \"sta\"\"tus\" text NOT NULL DEFAULT 'new', \
         \"kin'd\" text, \"en\"\"tity\" text, \"bus'iness\" text)"
    );
    run(&pool, &make).await;
    let odd = ClaimSpec::builder(table)
        .id("i'd", IdType::Int)
        .state("sta\"tus", States::text(["new"], "do'ne\\").taken("in\"progress"))
        .kind("kin'd")
        .group("en\"tity")
        .grouped()
        .waits("change", "o'pen\\", Unmet::Block, Unmet::Block)
        .lease_columns("own\"er", "ep'och", "lease_until")
        .work(["bus'iness"])
        .build()
        .unwrap();
    for _ in 0..2 {
        odd.migration().apply(&pool).await.unwrap();
    }
    let findings = odd.check(&pool).await.unwrap();
    assert!(findings.is_empty(), "{findings:#?}");

    let claims = PgClaims::new(pool.clone(), odd);
    let mut listener = claims.listen().await.unwrap();
    let insert = format!(
        r"INSERT INTO {quoted} VALUES (1, 'new', E'o\'pen\\', 'e', 'b'), (2, 'new', 'change', 'e', 'b')"
    );
    let mut tx = pool.begin().await.unwrap();
    run(&mut *tx, &insert).await;
    claims.notify(&mut tx).await.unwrap();
    tx.commit().await.unwrap();
    within(LONG, "not ended", listener.woken()).await.unwrap();
    for kind in ["o'pen\\", "change"] {
        let taken = claims.take(&Take::up_to(9)).await.unwrap();
        assert_eq!(taken.claims.len(), 1);
        assert_eq!(taken.claims[0].rows[0].kind.as_deref(), Some(kind));
        claims.settle_one(&taken.claims[0].claim, Outcome::Done).await.unwrap();
    }
}
