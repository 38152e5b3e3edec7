//! Held claims: work and settlement in one transaction.

use crate::common::*;
use leasehold_claim::PassCursor;
use leasehold_claim::{
    ClaimError, ClaimSpec, OrderType, Outcome, OwnerToken, PgHeld, RowKey, States, Table, Take,
};
use sqlx::Connection as _;
use test_servers::fresh_database;

/// The table has no added column. Claimed rows stay locked until the commit, which publishes work and settlement
/// together. Settled rows are not taken again.
#[tokio::test]
async fn a_plain_boolean_table_is_claimed_without_an_added_column() {
    let db = fresh_database().await;
    let (held, mut observer) = payment(&db).await;
    run(&mut observer, "CREATE TABLE booking (payment bigint)").await;
    let mut hold = held.begin(&Take::up_to(2)).await.unwrap().unwrap();
    assert_eq!(ids(hold.taken()), ["1", "2"]);
    run(hold.connection(), "INSERT INTO booking VALUES (1), (2)").await;
    for claimed in hold.taken().claims.clone() {
        assert_eq!((claimed.epoch(), claimed.rows[0].found.as_str()), (None, "false"));
        assert!(hold.settle(&claimed.claim, &Outcome::Done).await.unwrap().exhausted.is_empty());
    }
    // Other sessions see no change and cannot take the rows.
    let seen =
        "SELECT (SELECT count(*) FROM payment WHERE processed) || ' ' || (SELECT count(*) FROM booking)";
    assert_eq!(text(&mut observer, &format!("({seen})")).await, "0 0");
    let other = held.begin(&Take::up_to(9)).await.unwrap().unwrap();
    assert_eq!(ids(other.taken()), ["3", "4", "5"]);
    other.rollback().await.unwrap();
    hold.commit().await.unwrap();
    assert_eq!(text(&mut observer, &format!("({seen})")).await, "2 2");
    let rest = held.begin(&Take::up_to(9)).await.unwrap().unwrap();
    assert_eq!(ids(rest.taken()), ["3", "4", "5"]);
}

/// The second reader reads before the first one commits, so that commit does not stop it.
#[tokio::test]
async fn wrong_without_a_claim_two_readers_both_do_the_work() {
    let db = fresh_database().await;
    let (held, mut observer) = payment(&db).await;
    run(&mut observer, "CREATE TABLE booking (payment bigint)").await;
    let next = "SELECT min(id) FROM payment WHERE NOT processed";
    let mut readers = [db.connect().await, db.connect().await];
    for reader in &mut readers {
        run(&mut *reader, "BEGIN").await;
        assert_eq!(text(&mut *reader, next).await, "1");
    }
    for reader in &mut readers {
        run(
            reader,
            "INSERT INTO booking VALUES (1); UPDATE payment SET processed = true WHERE id = 1; COMMIT",
        )
        .await;
    }
    assert_eq!(text(&mut observer, "SELECT count(*) FROM booking WHERE payment = 1").await, "2");
    // With claims the second one gets the next row.
    let first = held.begin(&Take::up_to(1)).await.unwrap().unwrap();
    let second = held.begin(&Take::up_to(1)).await.unwrap().unwrap();
    assert_eq!((ids(first.taken()), ids(second.taken())), (vec!["2".to_owned()], vec!["3".to_owned()]));
}

/// Rows with NULL as their state are not taken.
#[tokio::test]
async fn rows_with_a_null_state_are_never_taken() {
    let db = fresh_database().await;
    let (held, mut observer) = payment(&db).await;
    run(
        &mut observer,
        "ALTER TABLE payment ALTER processed DROP NOT NULL; UPDATE payment SET processed = NULL",
    )
    .await;
    assert!(held.begin(&Take::up_to(9)).await.unwrap().is_none());
    assert!(!held.pending(&Take::up_to(9)).await.unwrap());
}

/// A slow row does not block the rest. Other sessions see only committed data and do not wait for the row.
#[tokio::test]
async fn other_workers_go_on_with_the_next_rows() {
    let db = fresh_database().await;
    let (held, mut observer) = payment(&db).await;
    let slow = held.begin(&Take::up_to(1)).await.unwrap().unwrap();
    for expected in ["2", "3", "4", "5"] {
        let mut hold = held.begin(&Take::up_to(1)).await.unwrap().unwrap();
        assert_eq!(ids(hold.taken()), [expected]);
        let claim = hold.taken().claims[0].claim.clone();
        hold.settle(&claim, &Outcome::Done).await.unwrap();
        hold.commit().await.unwrap();
    }
    assert_eq!(text(&mut observer, "SELECT processed FROM payment WHERE id = 1").await, "false");
    assert!(held.begin(&Take::up_to(1)).await.unwrap().is_none());
    assert!(held.pending(&Take::up_to(1)).await.unwrap(), "the slow one may crash");
    slow.rollback().await.unwrap();
    assert_eq!(ids(held.begin(&Take::up_to(9)).await.unwrap().unwrap().taken()), ["1"]);
}

/// A take never exceeds its limit, even under plans that run the inner query once per row.
#[tokio::test]
async fn held_claims_never_exceed_the_limit_under_bad_plans() {
    let db = fresh_database().await;
    let (held, mut observer) = payment(&db).await;
    run(&mut observer, "INSERT INTO payment SELECT n FROM generate_series(6, 2000) n; ANALYZE payment").await;
    for plan in ["hashjoin", "mergejoin", "sort", "material", "indexscan", "seqscan", "bitmapscan"] {
        let mut tx = db.connect().await;
        run(&mut tx, "SET enable_memoize = off").await;
        run(&mut tx, &format!("SET enable_{plan} = off; BEGIN")).await;
        let taken = held.take_in(&mut tx, &Take::up_to(3)).await.unwrap();
        assert_eq!(ids(&taken), ["1", "2", "3"], "{plan}");
        let locked = "SELECT count(*) FROM (SELECT FROM payment FOR UPDATE SKIP LOCKED) r";
        assert_eq!(text(&mut observer, locked).await, "1997", "{plan}");
        for claimed in &taken.claims {
            held.settle_in(&mut tx, &claimed.claim, &Outcome::PutBack).await.unwrap();
        }
        run(&mut tx, "ROLLBACK").await;
    }
}

/// Many workers at once take every row exactly once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_workers_take_every_row_once() {
    let db = fresh_database().await;
    let (held, mut observer) = payment(&db).await;
    run(
        &mut observer,
        "INSERT INTO payment SELECT n FROM generate_series(6, 400) n; CREATE TABLE booking (payment bigint PRIMARY KEY)",
    )
    .await;
    let workers = (0..8).map(|_| {
        let held = held.clone();
        tokio::spawn(async move {
            while let Some(mut hold) = held.begin(&Take::up_to(7)).await.unwrap() {
                for claimed in hold.taken().claims.clone() {
                    let sql = "INSERT INTO booking VALUES ($1::text::bigint)";
                    let id = claimed.rows[0].key.id.to_string();
                    sqlx::query(sql).bind(id).execute(hold.connection()).await.unwrap();
                    hold.settle(&claimed.claim, &Outcome::Done).await.unwrap();
                }
                hold.commit().await.unwrap();
            }
        })
    });
    for worker in workers.collect::<Vec<_>>() {
        worker.await.unwrap();
    }
    assert_eq!(text(&mut observer, "SELECT count(*) FROM booking").await, "400");
}

/// At a higher isolation level or outside a transaction, a claim is refused before it locks any row.
#[tokio::test]
async fn higher_isolation_is_refused() {
    let db = fresh_database().await;
    let (held, mut observer) = payment(&db).await;
    let mut tx = db.connect().await;
    for begin in ["BEGIN ISOLATION LEVEL REPEATABLE READ", "BEGIN ISOLATION LEVEL SERIALIZABLE", "SELECT 1"] {
        run(&mut tx, begin).await;
        let error = held.take_in(&mut tx, &Take::up_to(1)).await.unwrap_err();
        assert!(matches!(error, ClaimError::Unsupported(_)), "{begin}: {error}");
        let error =
            held.lock_row(&mut tx, &RowKey::new(1), leasehold_claim::LockWait::NoWait).await.unwrap_err();
        assert!(!matches!(error, ClaimError::Busy { .. }), "{begin}: {error}");
        let free = "SELECT count(*) FROM (SELECT FROM payment FOR UPDATE SKIP LOCKED) r";
        assert_eq!(text(&mut observer, free).await, "5", "{begin}");
        run(&mut tx, "ROLLBACK").await;
    }
    // The database's default isolation does not affect transactions that the library begins.
    let default = format!("ALTER DATABASE {} SET default_transaction_isolation = 'serializable'", db.name());
    run(&mut observer, &default).await;
    run(&mut observer, &format!("ALTER DATABASE {} SET default_transaction_read_only = on", db.name())).await;
    let held = PgHeld::new(pool(db.url(), 1).await, payments());
    let mut hold = held.begin(&Take::up_to(1)).await.unwrap().unwrap();
    let claim = hold.taken().claims[0].claim.clone();
    hold.settle(&claim, &Outcome::Done).await.unwrap();
    hold.commit().await.unwrap();
}

/// A claim is settled by the transaction that holds it, once, and by no other.
#[tokio::test]
async fn only_the_transaction_that_holds_a_claim_settles_it() {
    let db = fresh_database().await;
    let (held, mut observer) = payment(&db).await;
    let superseded = |result: Result<_, ClaimError>| {
        let error = result.map(|_: leasehold_claim::Settled| ()).unwrap_err();
        assert!(matches!(error, ClaimError::Superseded { .. }), "{error}");
        match error {
            ClaimError::Superseded { state, .. } => state.map(|state| state.to_string()),
            _ => None,
        }
    };
    let mut tx = db.connect().await;
    run(&mut tx, "BEGIN").await;
    let taken = held.take_in(&mut tx, &Take::up_to(2)).await.unwrap();
    let (one, two) = (&taken.claims[0].claim, &taken.claims[1].claim);
    assert_ne!(one.owner, two.owner, "each claim has an owner of its own");
    assert!(matches!(one.owner, OwnerToken::Uuid(_)));
    // From another transaction.
    let mut other = db.connect().await;
    run(&mut other, "BEGIN").await;
    held.take_in(&mut other, &Take::up_to(1)).await.unwrap();
    assert_eq!(superseded(held.settle_in(&mut other, one, &Outcome::Done).await).as_deref(), Some("false"));
    run(&mut other, "ROLLBACK").await;
    // A second time.
    held.settle_in(&mut tx, one, &Outcome::Done).await.unwrap();
    assert_eq!(superseded(held.settle_in(&mut tx, one, &Outcome::Done).await).as_deref(), Some("true"));
    run(&mut tx, "SAVEPOINT s").await;
    held.settle_in(&mut tx, two, &Outcome::PutBack).await.unwrap();
    assert_eq!(superseded(held.settle_in(&mut tx, two, &Outcome::Done).await).as_deref(), Some("false"));
    run(&mut tx, "ROLLBACK TO s").await;
    // A transaction does not take its own rows again, except rows released by a savepoint.
    run(&mut tx, "SAVEPOINT s").await;
    let third = held.take_in(&mut tx, &Take::up_to(1)).await.unwrap();
    assert_eq!(ids(&third), ["3"]);
    run(&mut tx, "ROLLBACK TO s").await;
    superseded(held.settle_in(&mut tx, &third.claims[0].claim, &Outcome::Done).await);
    let again = held.take_in(&mut tx, &Take::up_to(1)).await.unwrap();
    assert_eq!(ids(&again), ["3"]);
    // The transaction itself deleted the row.
    run(&mut tx, "DELETE FROM payment WHERE id = 2").await;
    assert_eq!(superseded(held.settle_in(&mut tx, two, &Outcome::Done).await), None);
    run(&mut tx, "COMMIT; BEGIN").await;
    superseded(held.settle_in(&mut tx, &again.claims[0].claim, &Outcome::Done).await);
    assert_eq!(text(&mut observer, "SELECT count(*) FROM payment WHERE processed").await, "1");
}

/// Outcomes write the columns of the spec, and are refused if a column is missing.
#[tokio::test]
async fn outcomes_in_a_table_with_everything() {
    let db = fresh_database().await;
    let (held, mut observer) = request(&db, requests().build().unwrap()).await;
    run(
        &mut observer,
        r#"INSERT INTO request (id, attempts, body, entity) VALUES (1, 3, '{"a": 1}', 7), (2, 3, NULL, 7), (3, 3, NULL, 8),
            (4, 1, NULL, 8), (5, NULL, NULL, 9), (6, 2, NULL, 9), (7, 0, NULL, 9)"#,
    )
    .await;
    let mut hold = held.begin(&Take::up_to(10)).await.unwrap().unwrap();
    assert_eq!(ids(hold.taken()), ["1", "2", "3", "4", "5", "6"], "7 is used up");
    let claims = hold.taken().claims.clone();
    assert_eq!(claims[0].rows[0].work.to_string(), r#"{"body":{"a":1},"entity":7}"#);
    assert_eq!((claims[0].rows[0].attempts_left, claims[4].rows[0].attempts_left), (Some(2), None));
    let retry = |after| Outcome::Retry { error: Some("not yet".to_owned()), after };
    let outcomes = [
        Outcome::Done,
        Outcome::Failed("it\0 broke".to_owned()),
        retry(LONG),
        retry(ms(0)),
        Outcome::PutBack,
        Outcome::To("parked".into()),
    ];
    for (claimed, outcome) in claims.iter().zip(&outcomes) {
        let settled = hold.settle(&claimed.claim, outcome).await.unwrap();
        let used_up = claimed.rows[0].key == RowKey::queued("default", 4);
        assert_eq!(settled.exhausted.len(), usize::from(used_up), "{outcome:?}");
    }
    // No attempt was committed yet.
    assert_eq!(text(&mut observer, "SELECT sum(attempts) FROM request").await, "12");
    hold.commit().await.unwrap();
    let sql =
        "SELECT string_agg(concat_ws(' ', id, status, attempts, message, ready_at > now() + interval '20s',
        settled_at IS NOT NULL), ', ' ORDER BY id) FROM request WHERE id < 7";
    assert_eq!(
        text(&mut observer, sql).await,
        "1 complete 2 t, 2 error 2 it\u{fffd} broke t, 3 new 2 not yet t f, 4 exhausted 0 not yet f, 5 new f, 6 parked 1 f"
    );
    assert!(held.begin(&Take::up_to(10).from(["new"])).await.unwrap().is_some(), "5, which was put back");
    let error = held.begin(&Take::up_to(10).from(["parked"])).await.unwrap_err();
    assert!(matches!(error, ClaimError::InvalidSpec(_)), "{error}");
    let error = held.begin(&Take::up_to(0)).await.unwrap_err();
    assert!(matches!(error, ClaimError::InvalidSpec(_)), "{error}");
}

/// An outcome that the spec does not allow writes nothing, and the transaction stays usable.
#[tokio::test]
async fn illegal_outcomes() {
    let db = fresh_database().await;
    let (held, mut observer) = payment(&db).await;
    let mut hold = held.begin(&Take::up_to(1)).await.unwrap().unwrap();
    let claim = hold.taken().claims[0].claim.clone();
    for outcome in [
        Outcome::Failed("x".to_owned()),
        Outcome::Retry { error: None, after: ms(1) },
        Outcome::To("true-ish".into()),
    ] {
        let error = hold.settle(&claim, &outcome).await.unwrap_err();
        let expected = matches!(error, ClaimError::Unsupported(_) | ClaimError::IllegalTransition { .. });
        assert!(expected, "{outcome:?}: {error}");
    }
    hold.settle(&claim, &Outcome::Retry { error: Some("no column for it".to_owned()), after: ms(0) })
        .await
        .unwrap();
    hold.commit().await.unwrap();
    assert_eq!(text(&mut observer, "SELECT count(*) FROM payment WHERE processed").await, "0");

    run(&mut observer, REQUEST).await;
    run(&mut observer, "INSERT INTO request (id) VALUES (1)").await;
    let states = States::enumeration(Table::new("status").unwrap(), ["new"], "complete")
        .taken("in-progress")
        .others(["parked"]);
    let spec = ClaimSpec::builder(Table::new("request").unwrap()).state("status", states).build().unwrap();
    let held = PgHeld::new(pool(db.url(), 2).await, spec);
    let mut hold = held.begin(&Take::up_to(1)).await.unwrap().unwrap();
    let claim = hold.taken().claims[0].claim.clone();
    for to in ["parked", "in-progress"] {
        let error = hold.settle(&claim, &Outcome::To(to.into())).await.unwrap_err();
        assert!(matches!(error, ClaimError::IllegalTransition { .. }), "{to}: {error}");
    }
    assert!(matches!(held.begin(&Take::up_to(1).queue("q")).await.unwrap_err(), ClaimError::InvalidSpec(_)));
}

/// The error names a violated constraint, and the failed transaction is not committed.
#[tokio::test]
async fn a_constraint_in_the_way_is_told_and_a_failed_transaction_is_not_committed() {
    let db = fresh_database().await;
    let (held, mut observer) = payment(&db).await;
    run(&mut observer, "CREATE UNIQUE INDEX one_done ON payment (processed) WHERE processed; UPDATE payment SET processed = true WHERE id = 5").await;
    let mut hold = held.begin(&Take::up_to(1)).await.unwrap().unwrap();
    let claim = hold.taken().claims[0].claim.clone();
    match hold.settle(&claim, &Outcome::Done).await.unwrap_err() {
        ClaimError::Constraint { constraint, .. } => assert_eq!(&*constraint, "one_done"),
        other => panic!("{other}"),
    }
    let error = hold.commit().await.unwrap_err();
    assert!(error.to_string().contains("25P02"), "{error}");
    // The user's own statement fails after everything was settled.
    let mut hold = held.begin(&Take::up_to(1)).await.unwrap().unwrap();
    let claim = hold.taken().claims[0].claim.clone();
    hold.settle(&claim, &Outcome::PutBack).await.unwrap();
    sqlx::query("SELECT 1/0").execute(hold.connection()).await.unwrap_err();
    hold.commit().await.unwrap_err();
    // Every connection is usable again.
    for _ in 0..9 {
        held.begin(&Take::up_to(1)).await.unwrap().unwrap().rollback().await.unwrap();
    }
}

/// The cursor follows the order of the spec with NULLs, in both directions, and over queues with equal ids.
#[tokio::test]
async fn the_cursor_follows_the_order() {
    let db = fresh_database().await;
    let spec =
        requests().order_by_descending("priority", OrderType::Int).order_by("seen_at", OrderType::Time);
    let spec = spec.build().unwrap();
    let (held, mut observer) = request(&db, spec).await;
    run(
        &mut observer,
        "ALTER TABLE request ADD seen_at timestamptz DEFAULT 'infinity';
        INSERT INTO request (id, queue, priority) VALUES (1, 'a', 1), (1, 'b', 1), (2, 'a', 5), (3, 'a', NULL), (4, 'b', 5), (5, 'a', NULL);
        UPDATE request SET seen_at = '2020-01-02 03:04:05.678901+02' WHERE id = 4; UPDATE request SET seen_at = NULL WHERE id = 3",
    )
    .await;
    let mut tx = db.connect().await;
    let mut seen = Vec::new();
    let mut cursor: Option<PassCursor> = None;
    loop {
        // Rolls back each take, so only the cursor prevents a repetition.
        let zone = if seen.len() % 2 == 0 { "UTC" } else { "Asia/Kolkata" };
        run(&mut tx, &format!("SET TimeZone = '{zone}'; SET DateStyle = 'SQL, DMY'")).await;
        run(&mut tx, "BEGIN").await;
        let taken = held.take_in(&mut tx, &Take::up_to(1).after(cursor.clone())).await.unwrap();
        run(&mut tx, "ROLLBACK").await;
        let Some(claimed) = taken.claims.first() else { break };
        seen.push(claimed.rows[0].key.to_string());
        assert_ne!(cursor, taken.cursor);
        cursor = taken.cursor;
        assert!(seen.len() <= 6, "{seen:?}");
    }
    let queue = |id: i32, queue: &str| format!("{id} in queue {queue}");
    assert_eq!(
        seen,
        [queue(5, "a"), queue(3, "a"), queue(4, "b"), queue(2, "a"), queue(1, "a"), queue(1, "b")]
    );
    run(&mut tx, "BEGIN").await;
    let b = held.take_in(&mut tx, &Take::up_to(9).queue("b")).await.unwrap();
    assert_eq!(ids(&b), ["4", "1"]);
    let hold = held.begin(&Take::up_to(1)).await.unwrap().unwrap();
    assert_eq!(ids(hold.taken()), ["5"]);
    hold.rollback().await.unwrap();
    tx.close().await.unwrap();
}
