//! Statements on parts, in an order that a lock decides, and rules of both table stores.

use std::time::Duration;

use leasehold_api::{ErrorKind, Lock as _, LockExt as _, Mode};
use leasehold_engine::{Attempt, Backend as _};
use leasehold_postgres_ttl::LeaseGuardExt as _;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection, Row as _};
use test_bounds::Bound;
use test_servers::{Cluster, Proxy};
use test_stores::parts;

use crate::sql::LEASES;
use crate::support::{config, config_of, holder, installed, request, text};

/// Inserts a shared key with one part for each of these holders.
async fn share(conn: &mut PgConnection, holders: &[u64]) {
    let gate = "INSERT INTO leasehold.lease (key, holder, token, acquired_at, ttl_us, expires_at, released)
        VALUES ('k', '*', 1, now(), 0, 'infinity', false)";
    conn.execute(gate).await.unwrap();
    for (part, serial) in holders.iter().enumerate() {
        let insert = format!(
            "INSERT INTO leasehold.lease_part
                (key, part, of, holder, token, acquired_at, ttl_us, expires_at, released)
            VALUES ('k', {part}, 0, '{}', 1, now(), 1, now() + interval '1 hour', false)",
            holder(*serial)
        );
        conn.execute(AssertSqlSafe(insert)).await.unwrap();
    }
}

/// Waits until `count` sessions wait for a lock.
async fn until_waiting(watcher: &mut PgConnection, count: i64) {
    let waiting = "SELECT count(*) FROM pg_stat_activity
        WHERE wait_event_type = 'Lock' AND datname = current_database()";
    let end = Bound::new(Duration::from_secs(60));
    while super::number(watcher, waiting).await < count {
        end.check("too few sessions wait");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn a_renewal_and_a_conversion_lock_the_parts_in_one_order() {
    let database = installed().await;
    let (mut operator, mut watcher) = (database.connect().await, database.connect().await);
    // The order of the holders differs from that of their parts.
    share(&mut operator, &[2, 1]).await;
    operator.execute("UPDATE leasehold.lease_part SET expires_at = now() - interval '1 s'").await.unwrap();
    operator.execute("BEGIN; SELECT FROM leasehold.lease_part WHERE part = 0 FOR UPDATE").await.unwrap();
    let (mut writer, mut reader) = (database.connect().await, database.connect().await);
    let converting = tokio::spawn(async move {
        let query = sqlx::query(text(LEASES.parts.unwrap().convert)).bind("k").bind(holder(9).to_string());
        let query = query.bind(30_000_000_i64).bind(None::<&str>).bind("test").bind(false).bind(None::<i64>);
        query.fetch_all(&mut writer).await.unwrap().len()
    });
    until_waiting(&mut watcher, 1).await;
    let renewing = tokio::spawn(async move {
        let holders: Vec<String> = [1, 2].map(|serial| holder(serial).to_string()).into();
        let query = sqlx::query(text(LEASES.parts.unwrap().renew)).bind(vec!["k", "k"]).bind(holders);
        query.bind(30_000_000_i64).fetch_all(&mut reader).await.unwrap().len()
    });
    until_waiting(&mut watcher, 2).await;
    operator.execute("COMMIT").await.unwrap();
    assert_eq!((converting.await.unwrap(), renewing.await.unwrap()), (1, 0));
}

#[tokio::test]
async fn an_early_renewal_counts_a_holder_with_two_parts_once() {
    let database = installed().await;
    let mut conn = database.connect().await;
    share(&mut conn, &[1, 1]).await;
    let holders: Vec<String> = [1, 2].map(|serial| holder(serial).to_string()).into();
    let early = text(LEASES.parts.unwrap().renew_early.unwrap());
    let query = sqlx::query(early).bind(vec!["k", "k"]).bind(holders).bind(30_000_000_i64);
    let renewed: i64 = query.fetch_one(&mut conn).await.unwrap().get(0);
    assert_eq!(renewed, 1, "the second holder has no part");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_permit_that_is_free_and_fenced_is_contended_after_a_few_statements() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let proxy = Proxy::start(cluster.address()).await;
    let backend = config_of(&proxy.url(database.url())).connections(1).backend().await.unwrap();
    let (hold, _) = super::granted(&backend, super::wanting(1, Mode::Permit { of: 1 })).await;
    super::released(&backend, hold).await;
    let mut user = database.connect().await;
    user.execute("BEGIN; SELECT FROM leasehold.lease_part FOR KEY SHARE").await.unwrap();
    let before = proxy.traffic().round_trips;
    let contended = super::attempt(&backend, super::wanting(2, Mode::Permit { of: 1 })).await;
    assert!(matches!(contended, Attempt::Contended(_)), "{contended:?}");
    let sent = proxy.traffic().round_trips - before;
    assert!(sent <= 12, "{sent} round trips");
    user.execute("COMMIT").await.unwrap();
    let (hold, _) = super::granted(&backend, super::wanting(3, Mode::Permit { of: 1 })).await;
    super::released(&backend, hold).await;
    backend.close().await;
}

#[tokio::test]
async fn readers_that_enter_at_once_and_skip_different_parts_each_get_one() {
    parts::readers_that_enter_at_once_and_skip_different_parts_each_get_one(&LEASES).await;
}

#[tokio::test]
async fn a_permit_beside_readers_ends() {
    let database = installed().await;
    let backend = config(&database).backend().await.unwrap();
    parts::a_permit_beside_readers_ends(&backend, &database, "lease", request).await;
    backend.close().await;
}

#[tokio::test]
async fn a_row_that_an_operator_holds_is_no_gate() {
    let database = installed().await;
    let backend = config(&database).backend().await.unwrap();
    parts::a_row_that_an_operator_holds_is_no_gate(&backend, &database, "lease", request).await;
    backend.close().await;
}

#[tokio::test]
async fn readers_of_locked_keys_do_not_all_wait() {
    let database = installed().await;
    let backend = config(&database).backend().await.unwrap();
    parts::readers_of_locked_keys_do_not_all_wait(&backend, &database, "lease", request).await;
    backend.close().await;
}

#[tokio::test]
async fn a_purge_ends_behind_the_last_idle_key_and_the_last_old_part() {
    let database = installed().await;
    let backend = config(&database).backend().await.unwrap();
    parts::a_purge_ends_behind_the_last_idle_key_and_the_last_old_part(&backend, &database, "lease").await;
    backend.close().await;
}

#[tokio::test]
async fn a_semaphore_with_the_parts_of_another_one_gets_its_own() {
    let database = installed().await;
    let backend = config(&database).backend().await.unwrap();
    parts::a_semaphore_with_the_parts_of_another_one_gets_its_own(&backend, &database, "lease", request)
        .await;
    backend.close().await;
}

#[tokio::test]
async fn a_part_whose_gate_an_operator_has_opened_fences_nothing() {
    let database = installed().await;
    let lock = config(&database).connect().await.unwrap();
    let reader = lock.key("k").shared().acquire().await.unwrap();
    let mut user = database.connect().await;
    user.execute("UPDATE leasehold.lease SET released = true").await.unwrap();
    let mut tx = user.begin().await.unwrap();
    assert_eq!(reader.fence(&mut tx).await.unwrap_err().kind(), ErrorKind::Lost);
    tx.rollback().await.unwrap();
    lock.close().await.unwrap();
}
