//! A table through which recorders hand work to workers.

#![allow(clippy::unwrap_used)] // Of tests, which are to fail here.

mod spec_common;

use std::time::Duration;

use leasehold_claim::sqlx::postgres::PgListener;
use leasehold_claim::sqlx::{Connection as _, PgPool};
use leasehold_claim::{
    ClaimError, ColumnType, HandOff, IdType, KindName, RequestKind, RequestState, Sql, StateName, Table,
};
use serde_json::json;
use spec_common::*;
use tokio::time::timeout;

fn requests() -> HandOff {
    HandOff::builder(Table::new("request").unwrap())
        .entity("entity_id", IdType::Int)
        .column("document", ColumnType::Jsonb)
        .column("amount", ColumnType::Numeric)
        .column("tags", ColumnType::Trusted(Sql::trusted("text[] NOT NULL DEFAULT '{}'")))
        .attempts(3)
        .build()
        .unwrap()
}

async fn made() -> (test_servers::Database, PgPool, HandOff) {
    let (db, pool) = database().await;
    let requests = requests();
    requests.create(&pool).await.unwrap();
    (db, pool, requests)
}

/// row 2
#[tokio::test]
async fn row_2_business_columns_are_enough_and_numbers_grow() {
    let (_db, pool, _) = made().await;
    let insert = "INSERT INTO request (entity_id, document) VALUES (7, '{}') RETURNING id || status || kind || attempts_left";
    assert_eq!(text(&pool, insert).await, "1newcreate3");
    let mut last = 1;
    for entity in 8..20 {
        let sql = format!("INSERT INTO request (entity_id) VALUES ({entity}) RETURNING id::text");
        let id: i64 = text(&pool, &sql).await.parse().unwrap();
        assert!(id > last, "{id} after {last}");
        last = id;
    }
    let kind = "SELECT atttypid::regtype::text || ' ' || pg_get_serial_sequence('request', 'id') FROM pg_attribute \
                WHERE attrelid = 'request'::regclass AND attname = 'id'";
    assert_eq!(text(&pool, kind).await, "bigint public.request_id_seq");
    assert_eq!(refused(&pool, "INSERT INTO request (id, entity_id) VALUES (1000, 1)").await, "428C9");
}

/// row 3 and row 4
#[tokio::test]
async fn row_3_and_row_4_states_and_kinds_are_closed_sets_with_named_constraints() {
    let (_db, pool, requests) = made().await;
    for state in RequestState::ALL {
        let sql =
            format!("INSERT INTO request (entity_id, status) VALUES ({}, '{}')", *state as u8, state.name());
        run(&pool, &sql).await;
    }
    assert_eq!(refused(&pool, "INSERT INTO request (entity_id, status) VALUES (9, 'done')").await, "23514");
    assert_eq!(refused(&pool, "UPDATE request SET status = 'NEW'").await, "23514");
    assert_eq!(refused(&pool, "INSERT INTO request (entity_id, kind) VALUES (9, 'delete')").await, "23514");
    assert!(RequestState::from_name("done").is_none() && RequestKind::from_name("delete").is_none());
    let listed = requests.spec().constraints(&pool).await.unwrap();
    for name in ["request_status_states", "request_kind_kinds", "request_one_create", "request_pkey"] {
        assert!(listed.iter().any(|row| row.name == name && row.is_valid), "{name} in {listed:#?}");
    }
}

/// row 5
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn row_5_of_fifty_creates_at_once_one_is_a_row_and_the_others_are_duplicates() {
    let (_db, pool, requests) = made().await;
    for (kind, rows) in [(RequestKind::Create, 1), (RequestKind::Update, 50)] {
        let tries: Vec<_> = (0..50)
            .map(|n| {
                let (pool, requests) = (pool.clone(), requests.clone());
                tokio::spawn(async move {
                    let mut connection = pool.acquire().await.unwrap();
                    requests.record(&mut connection, kind, 1, &json!({ "amount": n })).await
                })
            })
            .collect();
        let mut duplicates = 0;
        for answer in tries {
            match timeout(LONG, answer).await.unwrap().unwrap() {
                Ok(_) => {}
                Err(ClaimError::Duplicate { constraint, .. }) if &*constraint == "request_one_create" => {
                    duplicates += 1;
                }
                Err(other) => panic!("{other}"),
            }
        }
        assert_eq!(duplicates, 50 - rows);
        let count = format!("SELECT count(*)::text FROM request WHERE kind = '{}'", kind.name());
        assert_eq!(text(&pool, &count).await, rows.to_string());
    }
    // The database says so too to those who do not ask through here.
    assert_eq!(refused(&pool, "INSERT INTO request (entity_id) VALUES (1)").await, "23505");
}

/// row 5: what the server itself says is the same kind of error.
#[tokio::test]
async fn duplicates_of_any_unique_constraint_are_typed_and_cannot_be_retried() {
    let (_db, pool, requests) = made().await;
    run(&pool, "CREATE UNIQUE INDEX request_amount ON request (amount)").await;
    let mut connection = pool.acquire().await.unwrap();
    requests.record(&mut connection, RequestKind::Update, 1, &json!({ "amount": 5 })).await.unwrap();
    let error =
        requests.record(&mut connection, RequestKind::Update, 2, &json!({ "amount": 5 })).await.unwrap_err();
    assert!(
        matches!(&error, ClaimError::Duplicate { constraint, .. } if &**constraint == "request_amount"),
        "{error}"
    );
    assert!(!error.is_retryable());
    assert!(std::error::Error::source(&error).is_some());
    let refused =
        try_run(&pool, "INSERT INTO request (entity_id, kind, amount) VALUES (3, 'update', 5)").await;
    let error = ClaimError::of(refused.unwrap_err(), "insert");
    assert!(
        matches!(&error, ClaimError::Duplicate { constraint, .. } if &**constraint == "request_amount"),
        "{error}"
    );
    let refused = try_run(&pool, "INSERT INTO request (entity_id, status) VALUES (4, 'odd')").await;
    let error = ClaimError::of(refused.unwrap_err(), "insert");
    assert!(
        matches!(&error, ClaimError::Constraint { constraint, .. } if &**constraint == "request_status_states")
    );
}

/// row 6, and a duplicate leaves the caller's transaction usable.
#[tokio::test]
async fn row_6_row_and_wake_up_are_one_hand_off() {
    let (db, pool, requests) = made().await;
    let mut listener = PgListener::connect(db.url()).await.unwrap();
    listener.listen(requests.spec().channel()).await.unwrap();
    let mut connection = pool.acquire().await.unwrap();

    let mut tx = connection.begin().await.unwrap();
    requests.record(&mut tx, RequestKind::Create, 1, &json!({})).await.unwrap();
    tx.rollback().await.unwrap();
    assert_eq!(text(&pool, "SELECT count(*)::text FROM request").await, "0");
    // Had the rollback woken anybody, that would come before this.
    run(&pool, &format!("SELECT pg_notify('{}', 'marker')", requests.spec().channel())).await;
    assert_eq!(timeout(LONG, listener.recv()).await.unwrap().unwrap().payload(), "marker");

    let mut tx = connection.begin().await.unwrap();
    let id =
        requests.record(&mut tx, RequestKind::Create, 1, &json!({ "document": { "a": 1 } })).await.unwrap();
    let again = requests.record(&mut tx, RequestKind::Create, 1, &json!({})).await.unwrap_err();
    assert!(matches!(again, ClaimError::Duplicate { .. }), "{again}");
    requests.record(&mut tx, RequestKind::Update, 1, &json!({ "amount": 1.5, "tags": ["x"] })).await.unwrap();
    assert!(timeout(Duration::from_millis(50), listener.recv()).await.is_err(), "not before the commit");
    tx.commit().await.unwrap();
    assert_eq!(timeout(LONG, listener.recv()).await.unwrap().unwrap().payload(), "");
    assert_eq!(
        text(&pool, &format!("SELECT document::text FROM request WHERE id = {id}")).await,
        r#"{"a": 1}"#
    );
    let update = "SELECT amount || tags::text || kind FROM request WHERE kind = 'update'";
    assert_eq!(text(&pool, update).await, "1.5{x}update");

    requests.record(&mut connection, RequestKind::Create, 2, &json!({})).await.unwrap();
    timeout(LONG, listener.recv()).await.unwrap().expect("without a transaction, at once");
}

#[tokio::test]
async fn bad_input_is_said_clearly() {
    let (_db, pool, requests) = made().await;
    let mut connection = pool.acquire().await.unwrap();
    let kind = RequestKind::Update;
    for (work, word) in
        [(json!([1]), "no object"), (json!({ "id": 4 }), "\"id\""), (json!({ "x\"": 4 }), "no such column")]
    {
        let error = requests.record(&mut connection, kind, 1, &work).await.unwrap_err();
        assert!(matches!(&error, ClaimError::InvalidSpec(text) if text.contains(word)), "{error}");
    }
    let error = requests.record(&mut connection, kind, "one", &json!({})).await.unwrap_err();
    assert!(error.to_string().contains("no bigint"), "{error}");
    let error = requests.record(&mut connection, kind, 1, &json!({ "amount": "much" })).await.unwrap_err();
    assert!(matches!(error, ClaimError::Store(_)), "{error}");
    for (name, word) in [("status", "already"), ("entity_id", "already"), ("", "name")] {
        let built =
            HandOff::<RequestKind>::builder(Table::new("r").unwrap()).column(name, ColumnType::Text).build();
        let error = built.unwrap_err();
        assert!(error.to_string().contains(word), "{error}");
    }
}

/// Kinds of the application, with names that need quoting, in a table with a long name.
#[derive(Clone, Copy)]
enum Odd {
    Open,
    Change,
}

impl KindName for Odd {
    const ALL: &'static [Self] = &[Self::Change, Self::Open];

    fn name(self) -> &'static str {
        match self {
            Self::Open => "o'pen\\",
            Self::Change => "change",
        }
    }

    fn is_once_per_entity(self) -> bool {
        matches!(self, Self::Open)
    }
}

#[tokio::test]
async fn kinds_and_names_may_be_anything() {
    let (_db, pool) = database().await;
    run(&pool, "CREATE SCHEMA \"s\"\"x\"").await;
    let table = Table::new("t".repeat(60)).unwrap().in_schema("s\"x").unwrap();
    let odd = HandOff::<Odd>::builder(table)
        .entity("en\"tity", IdType::Text)
        .required("bus'iness", ColumnType::Text)
        .build()
        .unwrap();
    for _ in 0..2 {
        odd.create(&pool).await.unwrap();
    }
    let mut connection = pool.acquire().await.unwrap();
    odd.record(&mut connection, Odd::Open, "e", &json!({ "bus'iness": "b" })).await.unwrap();
    let error = odd.record(&mut connection, Odd::Open, "e", &json!({ "bus'iness": "b" })).await.unwrap_err();
    assert!(matches!(error, ClaimError::Duplicate { .. }), "{error}");
    let error = odd.record(&mut connection, Odd::Change, "e", &json!({})).await.unwrap_err();
    assert!(matches!(error, ClaimError::Store(_) | ClaimError::Constraint { .. }), "{error}");
    let findings = odd.spec().check(&pool).await.unwrap();
    assert!(findings.is_empty(), "{findings:#?}");
}
