//! Dropped calls, lost replies and statements that fail half-way, on a real server.
use std::sync::Arc;
use std::time::Duration;

use crate::common::*;
use futures_util::future::join_all;
use leasehold_api::{ErrorKind, HolderId, Lock as _, LockExt as _, LossReason, Validity};
use leasehold_engine::{Attempt, Backend as _, CancellationToken, Engine, Request};
use leasehold_postgres::{Identifier, RawBigint, schema};
use leasehold_postgres_advisory::{AdvisoryConfig, XactConfig};
use test_bounds::within;
use test_servers::{Cluster, Database, Proxy};
use tokio::time::timeout;

/// Waits until the database has no lock, no mark and no waiter.
async fn assert_clean(database: &Database) {
    let locks = async || Cluster::shared().advisory_locks(database.name()).await;
    until("nothing is left in the server", async || locks().await.is_empty()).await;
}

/// Returns the number of sessions with this application name.
async fn sessions_of(database: &Database, name: &str) -> usize {
    let all = Cluster::shared().backends(database.name()).await;
    all.iter().filter(|backend| backend.application_name == name).count()
}

// docs/hazards.md H38: a wait is dropped around the moment of its grant.
#[tokio::test(flavor = "multi_thread")]
async fn waits_that_are_dropped_around_the_release_leave_nothing() {
    let database = Cluster::shared().fresh_database().await;
    let holder = session(database.url()).await;
    for case in 0..3 {
        let config = server(database.url()).application_name("ours");
        let (lock, sessions) = match case {
            0 => (numbers(config).connect().await, 5),
            // Most waiters poll instead of waiting in the queue.
            1 => (numbers(config).waiting(1).connect().await, 2),
            _ => (XactConfig::new(config).hasher(Arc::new(RawBigint)).connect().await, 17),
        };
        let lock = lock.unwrap();
        for round in 0..60_u64 {
            let kept: Vec<_> = join_all(["1", "2", "3"].map(|key| take(&holder, key))).await;
            let waits = ["1", "2", "3", "3"].map(|key| {
                let give_up = Duration::from_micros(fastrand::u64(0..4_000));
                let wait = lock.key(key).wait(LONG).acquire();
                async move { drop(timeout(give_up, wait).await) }
            });
            let releases = async {
                tokio::time::sleep(Duration::from_micros(fastrand::u64(0..3_000))).await;
                for guard in kept {
                    guard.release().await.unwrap();
                }
            };
            tokio::join!(join_all(waits), releases);
            if round % 20 == 0 {
                // No dropped wait blocks a key.
                for key in ["1", "2", "3"] {
                    take(&holder, key).await.release().await.unwrap();
                    take(&lock, key).await.release().await.unwrap();
                }
            }
        }
        assert_clean(&database).await;
        let ours = sessions_of(&database, "ours").await;
        assert!(ours <= sessions, "{ours} sessions instead of {sessions} at most: {lock}");
        lock.close().await.unwrap();
        until("all sessions are closed", async || sessions_of(&database, "ours").await == 0).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tries_and_releases_that_are_dropped_leave_nothing() {
    let database = Cluster::shared().fresh_database().await;
    for lock in both(database.url()).await {
        for _ in 0..60 {
            let calls = ["1", "2", "3", "1", "2"].map(|key| {
                let give_up = || Duration::from_micros(fastrand::u64(0..2_500));
                let lock = &lock;
                async move {
                    let granted = timeout(give_up(), lock.key(key).try_acquire()).await;
                    if let Ok(Ok(Some(guard))) = granted {
                        drop(timeout(give_up(), guard.release()).await);
                    }
                }
            });
            join_all(calls).await;
        }
        for key in ["1", "2", "3"] {
            take(&lock, key).await.release().await.unwrap();
        }
        assert_clean(&database).await;
    }
}

// The engine abandons a call after its limit while the request is still in flight.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_dropped_call_asked_for_is_found_by_its_release() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let holder = session(database.url()).await;
    let proxy = Proxy::start(cluster.address()).await;
    let url = proxy.url(database.url());
    let backend = numbers(server(&url)).waiting(1).backend().await.unwrap();
    // The only session for waiting is taken, so the next wait polls.
    let kept = take(&holder, "1").await;
    let request = |name: &str, serial| Request::new(key(name), HolderId::from_parts(7, serial));
    let (first, stop) = (request("1", 1), CancellationToken::new());
    let queued_wait = backend.wait(first.clone(), stop.clone());
    let asked = async {
        until_queued(cluster, database.name(), 1).await;
        for serial in 2..20 {
            let asking = request("2", serial);
            let other = take(&holder, "2").await;
            let wait = timeout(ms(150), backend.wait(asking.clone(), CancellationToken::new()));
            let freed = async {
                tokio::time::sleep(ms(60 + serial * 5)).await;
                proxy.delay(ms(30));
                other.release().await.unwrap();
            };
            let (waited, ()) = tokio::join!(wait, freed);
            proxy.delay(Duration::ZERO);
            let released = backend.release(vec![asking.hold()]).await.pop().unwrap().unwrap();
            if let Ok(granted) = waited {
                let granted = matches!(granted.unwrap(), Attempt::Granted(_));
                assert_eq!(released.was_held, granted);
            }
            // The reply to this call comes after all requests in flight.
            backend.renew(vec![asking.hold()]).await;
            until("the number is free", async || !held(cluster, database.name()).await.contains(&2)).await;
        }
        stop.cancel();
    };
    tokio::join!(async { drop(queued_wait.await) }, asked);
    kept.release().await.unwrap();
    backend.close().await;
    assert_clean(&database).await;
}

/// Returns the number of current locks whose names are written.
async fn names(database: &Database) -> u32 {
    let sql =
        "SELECT count(*) FROM leasehold.advisory_name AS n JOIN pg_locks AS l ON l.pid = n.pid AND l.granted
        AND l.locktype = 'advisory' AND l.objid = n.number::oid AND l.classid = 0";
    text(&mut database.connect().await, sql).await.parse().unwrap()
}

// The server executes a statement and the reply is lost. The client ends the session, so nothing stays held.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_is_lost_leaves_nothing() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let other = session(database.url()).await;
    let proxy = Proxy::start(cluster.address()).await;
    let url = proxy.url(database.url());
    for in_session in [true, false] {
        let connect = async || match in_session {
            true => numbers(seldom(&url)).connect().await.unwrap(),
            false => XactConfig::new(seldom(&url)).hasher(Arc::new(RawBigint)).connect().await.unwrap(),
        };
        let lock = connect().await;
        // Prepares the statements, so that each is answered by one reply.
        take(&lock, "7").await.release().await.unwrap();
        let neighbour = take(&lock, "8").await;
        // Waits for the name, because its reply in the background would be dropped instead.
        until("it has a name", async || names(&database).await == 1).await;
        proxy.drop_next_reply_with("SELECT 1");
        match lock.key("7").try_acquire().await {
            Err(error) => assert!(error.is_retryable(), "{error}"),
            Ok(guard) => panic!("{guard:?} although its answer was lost"),
        }
        take(&other, "7").await.release().await.unwrap();
        neighbour.release().await.unwrap_or_else(|error| assert_eq!(error.kind(), ErrorKind::Lost));
        // Closes the client, because replies in the background would be dropped instead.
        lock.close().await.unwrap();

        let lock = connect().await;
        take(&lock, "7").await.release().await.unwrap();
        let guard = take(&lock, "7").await;
        proxy.drop_next_reply_with(if in_session { "SELECT 1" } else { "COMMIT" });
        let error = guard.release().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
        take(&other, "7").await.release().await.unwrap();
        take(&lock, "7").await.release().await.unwrap();
    }
    assert_clean(&database).await;
}

// docs/hazards.md H38: the request to end a wait is in flight when the wait is granted. It would end the session's
// next statement, so the session sends none before the request has arrived.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_to_end_a_wait_meets_no_later_statement() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let holder = session(database.url()).await;
    let calm = || seldom(database.url());
    let in_session = numbers(calm()).backend().await.unwrap();
    let in_transaction = XactConfig::new(calm()).hasher(Arc::new(RawBigint)).backend().await.unwrap();
    for (backend, arrives) in
        [&in_session, &in_transaction].into_iter().flat_map(|backend| [(backend, true), (backend, false)])
    {
        let (kept, stop) = (take(&holder, "1").await, CancellationToken::new());
        let request = Request::new(key("1"), HolderId::from_parts(7, 1));
        let mut wait = backend.wait(request.clone(), stop.clone());
        // Locks the view that the request reads, so the request is delayed.
        let mut barrier = database.connect().await;
        let blocked = async {
            until_queued(cluster, database.name(), 1).await;
            run(&mut barrier, "BEGIN; LOCK TABLE pg_catalog.pg_locks IN ACCESS EXCLUSIVE MODE").await;
        };
        tokio::select! {
            outcome = &mut wait => panic!("{outcome:?} while the key is held: {backend}"),
            () = blocked => {}
        }
        stop.cancel();
        // One poll sends the request. The wait is not polled again before the grant, because it measures the
        // request's duration only when polled.
        assert!(futures_util::poll!(&mut wait).is_pending(), "{backend}");
        let under_way = "SELECT count(*) = 1 FROM pg_lock_status()
                         WHERE NOT granted AND relation = 'pg_catalog.pg_locks'::regclass";
        until_true(&mut barrier, under_way).await;
        kept.release().await.unwrap();
        until("the wait is granted", async || held(cluster, database.name()).await == [1]).await;
        if arrives {
            run(&mut barrier, "ROLLBACK").await;
            let answered = "SELECT count(*) = 0 FROM pg_lock_status() WHERE NOT granted";
            until_true(&mut barrier, answered).await;
        }
        let granted = matches!(wait.await.unwrap(), Attempt::Granted(_));
        assert_eq!(granted, arrives, "{backend}");
        if !arrives {
            run(&mut barrier, "ROLLBACK").await;
        }
        let released = backend.release(vec![request.hold()]).await.pop().unwrap().unwrap();
        assert_eq!(released.was_held, arrives, "{backend}");
        take(&holder, "1").await.release().await.unwrap();
    }
}

/// Creates a role with the privileges of a user of the store. Returns the role and its URL.
async fn poor(database: &Database) -> (Identifier, String) {
    let role = Identifier::new(format!("poor_{}", &database.name()[5..25])).unwrap();
    let schema = Identifier::new("leasehold").unwrap();
    let sql = format!(
        "CREATE ROLE {0} LOGIN; {1}",
        role.quoted(),
        schema::grants(&schema, &role, schema::Stores::Advisory)
    );
    Cluster::shared().run_sql(database.name(), sql).await;
    (role.clone(), database.url().replace("//postgres@", &format!("//{role}@")))
}

/// Tries all `keys` at once. Waits before that until the engine has undone earlier failures and holds `holds` keys.
async fn try_many(
    lock: &Engine,
    keys: std::ops::Range<i32>,
    holds: usize,
) -> Vec<Result<(), leasehold_api::Error>> {
    until("the engine is idle", async || lock.active_keys() == holds).await;
    let tries = keys.map(|n| async move {
        match lock.key(n.to_string()).try_acquire().await? {
            Some(guard) => guard.release().await,
            None => panic!("{n} is held by nobody"),
        }
    });
    join_all(tries).await
}

// A statement fails after it has locked. The client releases these session locks, and no others.
#[tokio::test(flavor = "multi_thread")]
async fn a_statement_that_fails_half_way_leaves_nothing_held() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    session(database.url()).await.close().await.unwrap();
    let (role, url) = poor(&database).await;
    let config = || seldom(&url).install_schema(false);
    let session = numbers(config()).connect().await.unwrap();
    let in_transaction = XactConfig::new(config()).hasher(Arc::new(RawBigint)).connect().await.unwrap();
    // Not kept in the transaction scope, because its open transaction would block ALTER SEQUENCE.
    let kept = take(&session, "1").await;
    for (lock, holds) in [(&session, 1), (&in_transaction, 0)] {
        let limit = "(SELECT last_value FROM leasehold.token)";
        for (breaks, mends, kind) in [
            (
                format!("REVOKE ALL ON SEQUENCE leasehold.token FROM {role}"),
                format!("GRANT ALL ON SEQUENCE leasehold.token TO {role}"),
                ErrorKind::PermissionDenied,
            ),
            (
                format!("DO $$ BEGIN EXECUTE 'ALTER SEQUENCE leasehold.token MAXVALUE ' || {limit}; END $$"),
                "ALTER SEQUENCE leasehold.token MAXVALUE 9007199254740991".to_owned(),
                ErrorKind::Capacity,
            ),
            (
                "ALTER SEQUENCE leasehold.token RENAME TO token_away".to_owned(),
                "ALTER SEQUENCE leasehold.token_away RENAME TO token".to_owned(),
                ErrorKind::SchemaMissing,
            ),
        ] {
            cluster.run_sql(database.name(), breaks.as_str()).await;
            for outcome in
                try_many(lock, 10..11, holds).await.into_iter().chain(try_many(lock, 10..20, holds).await)
            {
                // A prepared statement still works after the sequence was renamed.
                if kind == ErrorKind::SchemaMissing && outcome.is_ok() {
                    continue;
                }
                let error = outcome.unwrap_err();
                assert_eq!(error.kind(), kind, "{breaks}: {error}");
            }
            assert_eq!(kept.validity(), Validity::Valid, "{breaks}");
            until(&format!("only the neighbour is held after {breaks}"), async || {
                held(cluster, database.name()).await == [1]
            })
            .await;
            cluster.run_sql(database.name(), mends).await;
        }
        for outcome in try_many(lock, 10..20, holds).await {
            outcome.unwrap();
        }
    }
    kept.release().await.unwrap();
}

// docs/hazards.md H20: the server detects no deadlock, because waiters use other sessions than holders. The budget
// ends the waits, and the holds stay.
#[tokio::test(flavor = "multi_thread")]
async fn a_circle_of_waiters_ends_with_the_budget() {
    let database = Cluster::shared().fresh_database().await;
    let [a, b] = both(database.url()).await;
    let [one, two] = [take(&a, "1").await, take(&b, "2").await];
    let (first, second) =
        tokio::join!(a.key("2").wait(ms(1_500)).acquire(), b.key("1").wait(ms(1_500)).acquire());
    for error in [first.unwrap_err(), second.unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    }
    assert_eq!([one.validity(), two.validity()], [Validity::Valid; 2]);
    one.release().await.unwrap();
    two.release().await.unwrap();
    // Keys of one call are taken in one order, so two such calls do not deadlock.
    for _ in 0..20 {
        let work = async |lock: &Engine, keys: [&str; 2]| {
            lock.keys(keys).wait(LONG).acquire().await?.release().await
        };
        let (first, second) = tokio::join!(work(&a, ["1", "2"]), work(&b, ["2", "1"]));
        first.and(second).unwrap();
    }
    assert_clean(&database).await;
}

// C17: close ends sessions, waits and holds.
#[tokio::test(flavor = "multi_thread")]
async fn close_ends_every_session() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let holder = session(database.url()).await;
    let kept = take(&holder, "7").await;
    for lock in both(database.url()).await {
        let lock = Arc::new(lock);
        let mine = take(&lock, "8").await;
        let waiting = waiter(&lock, "7");
        until_queued(cluster, database.name(), 1).await;
        within(LONG / 4, "not ended", lock.close()).await.unwrap();
        assert_eq!(lost_within(&mine, LONG).await, LossReason::Closed);
        assert_eq!(waiting.await.unwrap().unwrap_err().kind(), ErrorKind::Closed);
        assert_eq!(lock.key("9").try_acquire().await.unwrap_err().kind(), ErrorKind::Closed);
        assert_eq!(held(cluster, database.name()).await, [7]);
        lock.close().await.unwrap();
    }
    let config = AdvisoryConfig::new(server(database.url()));
    drop(config.connect().await.unwrap());
    kept.release().await.unwrap();
    // A dropped client is closed too.
    drop(holder);
    until_sessions(cluster, &database, 0).await;
}
