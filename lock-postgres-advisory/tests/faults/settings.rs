//! Settings of roles and databases that would end waits and holds or change the meaning of statements.
use std::sync::Arc;
use std::time::Instant;

use crate::common::*;
use leasehold_api::{ErrorKind, Lock as _, LockExt as _, Validity};
use leasehold_postgres::RawBigint;
use leasehold_postgres_advisory::XactConfig;
use test_servers::{Cluster, Database};

/// Creates a database with these settings for all its sessions.
async fn with_defaults(settings: &[&str]) -> Database {
    let database = Cluster::shared().fresh_database().await;
    // Installs the schema before the settings apply.
    session(database.url()).await;
    let name = database.name();
    for setting in settings {
        Cluster::shared().run_sql("postgres", format!("ALTER DATABASE {name} SET {setting}")).await;
    }
    database
}

// docs/hazards.md H16, H17: set on the database only, because a session gets settings of a role in the same way.
#[tokio::test(flavor = "multi_thread")]
async fn no_default_limit_ends_a_wait_or_a_hold() {
    // Long enough for a busy machine to open a session, because they apply until the client sets its own.
    let limits = [
        "statement_timeout = '1500ms'",
        "lock_timeout = '1500ms'",
        "idle_in_transaction_session_timeout = '1500ms'",
        "idle_session_timeout = '1500ms'",
    ];
    let cluster = Cluster::shared();
    let database = with_defaults(&limits).await;
    let mut observer = admin(cluster).await;
    for lock in both(database.url()).await {
        let lock = Arc::new(lock);
        let guard = take(&lock, "7").await;
        // The client's own statement timeout does not end a wait either.
        let config = || server(database.url()).statement_timeout(ms(1_000));
        let others = [
            numbers(config()).connect().await.unwrap(),
            XactConfig::new(config()).hasher(Arc::new(RawBigint)).connect().await.unwrap(),
        ];
        let others = others.map(Arc::new);
        let begun = Instant::now();
        // Each waiter releases the key, because their order is not fixed.
        let waiting = others.each_ref().map(|other| {
            let other = Arc::clone(other);
            tokio::spawn(async move { take(&other, "7").await.release().await })
        });
        until_queued(cluster, database.name(), 2).await;
        // A restarted wait would be last in the queue.
        let since = format!(
            "SELECT string_agg(query_start::text, ' ' ORDER BY pid) FROM pg_stat_activity
             WHERE datname = '{}' AND wait_event = 'advisory'",
            database.name()
        );
        let begun_at = text(&mut observer, &since).await;
        // Longer than every limit, so that a limit that applies would have ended the wait.
        tokio::time::sleep(ms(2_500)).await;
        assert_eq!(guard.validity(), Validity::Valid, "{lock}");
        assert_eq!(queued(cluster, database.name()).await, 2, "{lock}: waits were ended");
        assert_eq!(text(&mut observer, &since).await, begun_at, "{lock}: waits were begun anew");
        guard.release().await.unwrap_or_else(|error| panic!("{lock}: {error}"));
        for waiting in waiting {
            waiting.await.unwrap().unwrap();
        }
        assert!(begun.elapsed() >= ms(2_500));
    }
}

// docs/hazards.md H15, H29.
#[tokio::test(flavor = "multi_thread")]
async fn defaults_of_transactions_do_not_matter() {
    for setting in [
        "default_transaction_isolation = 'serializable'",
        "default_transaction_isolation = 'repeatable read'",
        "default_transaction_read_only = on",
        "default_transaction_deferrable = on",
        "synchronous_commit = off",
        "search_path = 'nowhere'",
        "standard_conforming_strings = off",
        "client_min_messages = 'error'",
    ] {
        let cluster = Cluster::shared();
        let database = with_defaults(&[setting]).await;
        let [a, b] = both(database.url()).await.map(Arc::new);
        let mut last = None;
        for (lock, other) in [(&a, &b), (&b, &a), (&a, &a)] {
            let guard = take(lock, "7").await;
            assert!(guard.token() > last, "{setting}: {guard:?} after {last:?}");
            assert!(is_held(other, "7").await || Arc::ptr_eq(lock, other), "{setting}");
            let waiting = waiter(other, "7");
            if !Arc::ptr_eq(lock, other) {
                until_queued(cluster, database.name(), 1).await;
            }
            let token = guard.token();
            guard.release().await.unwrap();
            let next = waiting.await.unwrap().unwrap();
            assert!(next.token() > token, "{setting}: {next:?} after {token:?}");
            last = next.token();
            next.release().await.unwrap();
        }
        assert_eq!(held(cluster, database.name()).await, [0; 0], "{setting}");
        // Names are written although the default is read-only.
        let guard = a.key("7").label("here").acquire().await.unwrap();
        until(&format!("the name is written under {setting}"), async || {
            let info = b.admin().unwrap().inspect(&key("7")).await.unwrap();
            info.holder().unwrap().label.as_deref() == Some("here")
        })
        .await;
        guard.release().await.unwrap();
    }
}

// docs/hazards.md H26: an idle transaction that holds a lock does not hold back vacuum.
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_that_keeps_a_lock_pins_nothing() {
    let database = with_defaults(&["default_transaction_isolation = 'serializable'"]).await;
    let lock = transaction(database.url()).await;
    let mut observer = admin(Cluster::shared()).await;
    // About every 32nd token makes the server log the sequence, which gives that transaction an id. A checkpoint of the
    // shared server can do so once more, also for the repeated attempt.
    let mut pinned = Vec::new();
    for _ in 0..140 {
        let guard = take(&lock, "7").await;
        let pid = pid_of(Cluster::shared(), database.name(), 7).await;
        let pins =
            format!("SELECT concat(backend_xid, '/', backend_xmin) FROM pg_stat_activity WHERE pid = {pid}");
        pinned.extend(Some(text(&mut observer, &pins).await).filter(|pins| pins != "/"));
        guard.release().await.unwrap();
    }
    assert!(pinned.len() <= 1, "transaction ids or snapshots: {pinned:?}");
}

// Only the caller's own timeout ends a wait, and not early.
#[tokio::test(flavor = "multi_thread")]
async fn a_budget_ends_in_time_and_leaves_the_queue() {
    let cluster = Cluster::shared();
    let database = with_defaults(&[]).await;
    let holder = session(database.url()).await;
    let guard = take(&holder, "7").await;
    for lock in both(database.url()).await {
        let begun = Instant::now();
        let error = lock.key("7").wait(ms(1_500)).acquire().await.unwrap_err();
        let took = begun.elapsed();
        assert_error(&error, ErrorKind::Timeout, "wait longer");
        assert!(took >= ms(1_500) && took < LONG / 4, "{lock}: {took:?}");
        until_queued(cluster, database.name(), 0).await;
    }
    guard.release().await.unwrap();
}

/// The login role acts as another role, which sees few details of the login's sessions and cannot end them.
#[tokio::test(flavor = "multi_thread")]
async fn a_role_that_acts_as_another_one_will_do() {
    let cluster = Cluster::shared();
    let database = with_defaults(&[]).await;
    let name = database.name();
    let mut holder = database.connect().await;
    let roles = format!(
        "CREATE ROLE {name}_acts; CREATE ROLE {name}_logs_in LOGIN IN ROLE {name}_acts;
        ALTER ROLE {name}_logs_in SET role = '{name}_acts';
        GRANT USAGE ON SCHEMA leasehold TO {name}_acts;
        GRANT ALL ON ALL TABLES IN SCHEMA leasehold TO {name}_acts;
        GRANT ALL ON ALL SEQUENCES IN SCHEMA leasehold TO {name}_acts"
    );
    run(&mut holder, roles).await;
    let options: sqlx::postgres::PgConnectOptions = database.url().parse().unwrap();
    let options = options.username(&format!("{name}_logs_in"));
    let config = || leasehold_postgres::PgConfig::from_options(options.clone()).connect_timeout(LONG);
    let locks = [
        numbers(config()).connect().await.unwrap(),
        XactConfig::new(config()).hasher(Arc::new(RawBigint)).connect().await.unwrap(),
    ];
    for lock in locks {
        take(&lock, "7").await.release().await.unwrap();
        run(&mut holder, "SELECT pg_advisory_lock(7)").await;
        // If the client can end the wait at the server, its session stays usable. Otherwise the session is lost.
        let refused = lock.key("7").wait(ms(1_500)).acquire().await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Timeout, "{lock}: {refused}");
        until_queued(cluster, name, 0).await;
        let sessions = cluster.backends(name).await.len();
        run(&mut holder, "SELECT pg_advisory_unlock(7)").await;
        take(&lock, "7").await.release().await.unwrap();
        assert_eq!(cluster.backends(name).await.len(), sessions, "{lock}");
        lock.close().await.unwrap();
    }
}
