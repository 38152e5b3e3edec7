//! Held claims that depend on other rows: preconditions and groups.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::common::*;
use leasehold_claim::PassEnd;
use leasehold_claim::group_number;
use leasehold_claim::{ClaimError, Outcome, PgHeld, Take, Unmet};
use test_bounds::within;
use test_servers::fresh_database;

fn waiting(failed: Unmet, missing: Unmet) -> leasehold_claim::ClaimSpec {
    requests().waits("update", "create", failed, missing).build().unwrap()
}

/// An update waits for its create in every state of the create.
#[tokio::test]
async fn a_held_update_waits_for_its_create() {
    let db = fresh_database().await;
    let (held, mut observer) = request(&db, waiting(Unmet::Block, Unmet::Run)).await;
    run(&mut observer, "INSERT INTO request (id, kind, entity) VALUES (1, 'create', 7), (2, 'update', 7), (3, 'update', NULL)").await;
    let all = Take::up_to(9);
    // The create is new and unlocked: it is taken, but the update is not. Row 3 has no entity.
    let mut creating = held.begin(&all).await.unwrap().unwrap();
    assert_eq!(ids(creating.taken()), ["1", "3"]);
    // The create is locked by another worker: a typed error, so the worker does not idle.
    match held.begin(&all).await.unwrap_err() {
        error @ ClaimError::Busy { .. } => assert!(error.is_retryable()),
        error => panic!("{error}"),
    }
    let claims = creating.taken().claims.clone();
    for claimed in &claims {
        creating.settle(&claimed.claim, &Outcome::Done).await.unwrap();
    }
    creating.commit().await.unwrap();
    // The create is new but not ready: the update waits too.
    run(
        &mut observer,
        "UPDATE request SET status = 'new', ready_at = now() + interval '1 hour' WHERE id = 1",
    )
    .await;
    assert!(matches!(held.begin(&all).await.unwrap_err(), ClaimError::Busy { .. }));
    let mut tx = db.connect().await;
    run(&mut tx, "BEGIN").await;
    let taken = held.take_in(&mut tx, &all).await.unwrap();
    assert_eq!((taken.claims.len(), taken.skipped), (0, 1));
    let behind = held.take_in(&mut tx, &all.clone().after(taken.cursor)).await.unwrap();
    assert_eq!((behind.claims.len(), behind.skipped), (0, 0), "the cursor is past it");
    run(&mut tx, "ROLLBACK").await;
    // The create is done but locked: the take fails, and the connection stays usable.
    run(&mut observer, "UPDATE request SET status = 'complete' WHERE id = 1").await;
    run(&mut observer, "BEGIN; SELECT FROM request WHERE id = 1 FOR UPDATE").await;
    assert!(matches!(held.begin(&all).await.unwrap_err(), ClaimError::Busy { .. }));
    let mut tx = db.connect().await;
    run(&mut tx, "BEGIN").await;
    let taken = held.take_in(&mut tx, &all).await.unwrap();
    assert_eq!((taken.claims.len(), taken.skipped), (0, 1));
    assert_eq!(
        text(&mut tx, "SELECT count(*) FROM (SELECT FROM request WHERE id = 2 FOR UPDATE) r").await,
        "1"
    );
    run(&mut tx, "ROLLBACK").await;
    run(&mut observer, "ROLLBACK").await;
    // The create is done: the update is taken, and the create stays locked against changes.
    let updating = held.begin(&all).await.unwrap().unwrap();
    assert_eq!(ids(updating.taken()), ["2"]);
    assert_eq!(
        text(
            &mut observer,
            "SELECT count(*) FROM (SELECT FROM request WHERE id = 1 FOR UPDATE SKIP LOCKED) r"
        )
        .await,
        "0"
    );
    updating.rollback().await.unwrap();
    // The create has failed: depending on the spec, the update is blocked, so workers may idle, or it runs.
    run(&mut observer, "UPDATE request SET status = 'error' WHERE id = 1").await;
    assert!(held.begin(&all).await.unwrap().is_none());
    assert!(!held.pending(&all).await.unwrap());
    let running = PgHeld::new(pool(db.url(), 2).await, waiting(Unmet::Run, Unmet::Block));
    let hold = running.begin(&all).await.unwrap().unwrap();
    assert_eq!(ids(hold.taken()), ["2"]);
    hold.rollback().await.unwrap();
    // The create is deleted.
    run(&mut observer, "DELETE FROM request WHERE id = 1").await;
    assert!(running.begin(&all).await.unwrap().is_none());
    assert_eq!(ids(held.begin(&all).await.unwrap().unwrap().taken()), ["2"]);
}

/// A pass skips the updates of a locked create and continues with the next rows on the same connection. Skipped rows are
/// offered in the next pass.
#[tokio::test]
async fn updates_of_a_locked_create_are_passed_over() {
    let db = fresh_database().await;
    let (_, mut observer) = request(&db, waiting(Unmet::Block, Unmet::Run)).await;
    run(
        &mut observer,
        "INSERT INTO request (id, kind, status, entity) VALUES (1, 'create', 'complete', 7), (2, 'create', 'complete', 8);
        INSERT INTO request (id, entity) VALUES (3, 7), (4, 8), (5, 7), (6, 8)",
    )
    .await;
    // The pool has one connection, so it must be usable after each skip.
    let held = PgHeld::new(pool(db.url(), 1).await, waiting(Unmet::Block, Unmet::Run));
    let mut editor = db.connect().await;
    run(&mut editor, "BEGIN; SELECT FROM request WHERE id = 1 FOR UPDATE").await;
    for limit in [1, 9] {
        let mut pass = passes(&held, Take::up_to(limit));
        let mut seen = Vec::new();
        loop {
            match pass.next().await {
                Step::Hold(hold) => {
                    seen.extend(ids(hold.taken()));
                    hold.rollback().await;
                }
                Step::End(end) => {
                    assert_eq!(end, PassEnd::Found);
                    break;
                }
            }
        }
        assert_eq!(seen, ["4", "6"], "{limit}");
    }
    assert_eq!(
        text(&mut observer, "SELECT string_agg(attempts::text, '') FROM request WHERE id > 2").await,
        "3333"
    );
    run(&mut observer, "UPDATE request SET status = 'complete' WHERE id IN (4, 6)").await;
    let mut pass = passes(&held, Take::up_to(9));
    match pass.next().await {
        Step::End(end) => assert_eq!(end, PassEnd::Skipped, "it may not idle"),
        Step::Hold(hold) => panic!("{:?}", hold.taken()),
    }
    // The other transaction ends without a notification.
    run(&mut editor, "ROLLBACK").await;
    let Step::Hold(mut hold) = pass.next().await else { panic!("nothing") };
    assert_eq!(ids(hold.taken()), ["3", "5"]);
    hold.settle_all().await;
    hold.commit().await;
    for expected in [PassEnd::Found, PassEnd::Clean] {
        match pass.next().await {
            Step::End(end) => assert_eq!(end, expected),
            Step::Hold(hold) => panic!("{:?}", hold.taken()),
        }
    }
    // A row locked by another worker looks claimable until its commit. A worker that idled now would miss a crash of the other.
    run(&mut observer, "UPDATE request SET status = 'new' WHERE id = 3").await;
    run(&mut editor, "BEGIN; SELECT FROM request WHERE id = 3 FOR UPDATE").await;
    match pass.next().await {
        Step::End(end) => assert_eq!(end, PassEnd::Skipped),
        Step::Hold(hold) => panic!("{:?}", hold.taken()),
    }
}

/// All outstanding rows of an entity are one claim and settled together. Each row without an entity is a separate claim.
#[tokio::test]
async fn all_rows_of_a_group_are_one_held_claim() {
    let db = fresh_database().await;
    let (held, mut observer) = request(&db, requests().grouped().build().unwrap()).await;
    run(
        &mut observer,
        "INSERT INTO request (id, entity) SELECT n, 7 FROM generate_series(1, 30) n;
        INSERT INTO request (id, entity) VALUES (31, NULL), (32, 8), (33, NULL), (34, 8)",
    )
    .await;
    let mut hold = held.begin(&Take::up_to(1)).await.unwrap().unwrap();
    let claimed = hold.taken().claims[0].clone();
    assert_eq!((hold.taken().claims.len(), claimed.rows.len(), claimed.group.as_deref()), (1, 30, Some("7")));
    assert!(claimed.rows.is_sorted_by_key(|row| row.key.clone()));
    assert!(claimed.epoch().is_some_and(|epoch| claimed.rows.iter().all(|row| row.epoch <= epoch)));
    let number =
        group_number(text(&mut observer, "SELECT 'request'::regclass::oid").await.parse().unwrap(), "7");
    let free = format!("SELECT pg_try_advisory_xact_lock({number})");
    assert_eq!(text(&mut observer, &free).await, "false");
    // The other groups, in order. The claimed group counts as skipped.
    let mut others = held.begin(&Take::up_to(9)).await.unwrap().unwrap();
    let rows: Vec<_> = others.taken().claims.iter().map(|claimed| claimed.rows.len()).collect();
    assert_eq!(
        (ids(others.taken()), rows),
        (["31", "32", "34", "33"].map(str::to_owned).to_vec(), vec![1, 2, 1])
    );
    assert_eq!(others.taken().skipped, 1);
    let eight = others.taken().claims[1].claim.clone();
    others.settle(&eight, &Outcome::Failed("broken".to_owned())).await.unwrap();
    others.commit().await.unwrap();
    hold.settle(&claimed.claim, &Outcome::Done).await.unwrap();
    hold.commit().await.unwrap();
    let states = "SELECT string_agg(status || ' ' || n, ', ' ORDER BY status) FROM (SELECT status, count(*) n FROM request GROUP BY 1) s";
    assert_eq!(text(&mut observer, states).await, "new 2, complete 30, error 2");
    assert_eq!(text(&mut observer, &free).await, "true");
}

/// A group is taken as a whole or not at all. While another transaction locks one of its rows, the next group is taken.
#[tokio::test]
async fn a_locked_row_keeps_its_whole_group_from_being_taken() {
    let db = fresh_database().await;
    let (held, mut observer) = request(&db, requests().grouped().build().unwrap()).await;
    run(&mut observer, "INSERT INTO request (id, entity) VALUES (1, 7), (2, 8), (3, 7), (4, 8)").await;
    let mut editor = db.connect().await;
    run(&mut editor, "BEGIN; SELECT FROM request WHERE id = 3 FOR UPDATE").await;
    for limit in [1, 9] {
        let hold = held.begin(&Take::up_to(limit)).await.unwrap().unwrap();
        assert_eq!((ids(hold.taken()), hold.taken().skipped), (vec!["2".to_owned(), "4".to_owned()], 1));
        hold.rollback().await.unwrap();
    }
    run(&mut editor, "ROLLBACK").await;
    // A row under a lease also blocks its group.
    run(&mut observer, "UPDATE request SET status = 'in-progress' WHERE id = 3").await;
    let hold = held.begin(&Take::up_to(9)).await.unwrap().unwrap();
    assert_eq!((ids(hold.taken()), hold.taken().skipped), (vec!["2".to_owned(), "4".to_owned()], 1));
    hold.rollback().await.unwrap();
    // A group put back in this pass is not offered again through its later rows.
    run(&mut observer, "UPDATE request SET status = 'new'").await;
    let mut pass = passes(&held, Take::up_to(1));
    let mut seen = Vec::new();
    while let Step::Hold(hold) = pass.next().await {
        seen.extend(ids(hold.taken()));
        hold.rollback().await;
        assert!(seen.len() <= 4, "{seen:?}");
    }
    assert_eq!(seen, ["1", "3", "2", "4"]);
}

/// 16 workers on hot groups finish all rows in bounded time, with never two workers on one group.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_workers_never_hold_one_entity() {
    let db = fresh_database().await;
    let (_, mut observer) = request(&db, requests().build().unwrap()).await;
    run(&mut observer, "INSERT INTO request (id, entity) SELECT n, n % 3 FROM generate_series(1, 300) n")
        .await;
    let held = PgHeld::new(pool(db.url(), 16).await, requests().grouped().build().unwrap()).timeout(LONG);
    let at_work: Arc<[AtomicU32; 3]> = Arc::default();
    let more = AtomicU32::new(301);
    let more = Arc::new(more);
    let workers: Vec<_> = (0..16)
        .map(|_| {
            let (held, at_work, more) = (held.clone(), Arc::clone(&at_work), Arc::clone(&more));
            tokio::spawn(async move {
                let mut pass = passes(&held, Take::up_to(1));
                loop {
                    match pass.next().await {
                        Step::Hold(mut hold) => {
                            let claimed = hold.taken().claims[0].clone();
                            let entity: usize = claimed.group.as_deref().unwrap().parse().unwrap();
                            assert_eq!(at_work[entity].fetch_add(1, Ordering::SeqCst), 0, "two on {entity}");
                            let id = more.fetch_add(1, Ordering::SeqCst);
                            if id < 330 {
                                let sql = format!("INSERT INTO request (id, entity) VALUES ({id}, {entity})");
                                run(hold.connection(), &sql).await;
                            }
                            tokio::task::yield_now().await;
                            hold.settle_all().await;
                            at_work[entity].fetch_sub(1, Ordering::SeqCst);
                            hold.commit().await;
                        }
                        Step::End(PassEnd::Clean) => return,
                        Step::End(_) => tokio::time::sleep(ms(1)).await,
                    }
                }
            })
        })
        .collect();
    let all = async {
        for worker in workers {
            worker.await.unwrap();
        }
    };
    within(LONG, "not ended", all).await;
    assert_eq!(text(&mut observer, "SELECT count(*) FROM request WHERE status <> 'complete'").await, "0");
}
