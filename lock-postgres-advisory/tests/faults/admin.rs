//! Inspection, ended sessions, and errors of a server without the schema, on a real server.
use std::sync::Arc;

use crate::common::*;
use leasehold_api::{
    ErrorKind, HoldInfo, HolderId, KeyInfo, ListQuery, Lock as _, LockExt as _, LossReason, Mode, Validity,
};
use leasehold_engine::Engine;
use leasehold_postgres::{Identifier, PgConfig, schema};
use leasehold_postgres_advisory::{AdvisoryConfig, Sessions, XactConfig};
use sqlx::Connection as _;
use test_bounds::within;
use test_servers::{Cluster, Database};

async fn list(lock: &Engine) -> Vec<KeyInfo> {
    lock.admin().unwrap().list(&ListQuery::new()).await.unwrap()
}

async fn inspect(lock: &Engine, name: &str) -> KeyInfo {
    lock.admin().unwrap().inspect(&key(name)).await.unwrap()
}

/// Returns the only hold of the key.
fn hold(info: &KeyInfo) -> &HoldInfo {
    assert_eq!(info.holders.len(), 1, "{info:?}");
    info.holder().unwrap()
}

// docs/hazards.md H19: more locks than fit into a lock table of the default size.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_lock_table_can_be_listed() {
    let database = Cluster::shared().fresh_database().await;
    let lock = AdvisoryConfig::new(server(database.url())).connect().await.unwrap();
    let mut other = database.connect().await;
    run(&mut other, "SELECT pg_advisory_lock(n) FROM generate_series(1, 13000) AS n").await;
    assert_eq!(list(&lock).await.len(), 13_000);
    let free = inspect(&lock, "k").await;
    assert!(free.is_free() && free.key == key("k"), "{free:?}");
    other.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn locks_of_other_programs_are_listed_by_their_numbers() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let lock = AdvisoryConfig::new(server(database.url())).connect().await.unwrap();
    let mut other = database.connect().await;
    run(&mut other, "SET application_name = 'nightly vacuum'").await;
    run(&mut other, "SELECT pg_advisory_lock(-5), pg_advisory_lock(3, -4), pg_advisory_lock_shared(6)").await;
    let mut queued_there = database.connect().await;
    let wait = tokio::spawn(async move {
        run(&mut queued_there, "SELECT pg_advisory_lock(-5)").await;
        queued_there.close().await.unwrap();
    });
    until_queued(cluster, database.name(), 1).await;
    // A lock of another database is not listed.
    let elsewhere = cluster.fresh_database().await;
    let mut far = elsewhere.connect().await;
    run(&mut far, "SELECT pg_advisory_lock(99)").await;

    let keys = list(&lock).await;
    let names: Vec<_> = keys.iter().map(|info| (info.key.as_str(), info.named, info.waiters)).collect();
    assert_eq!(names, [("-5", false, Some(1)), ("3,-4", false, Some(0)), ("6", false, Some(0))]);
    let modes: Vec<_> = keys.iter().map(|info| hold(info).mode).collect();
    assert_eq!(modes, [Mode::Exclusive, Mode::Exclusive, Mode::Shared]);
    for hold in keys.iter().map(hold) {
        let owner = hold.owner.as_deref().unwrap();
        for part in ["postgres@127.0.0.1", "nightly vacuum", "server process"] {
            assert!(owner.contains(part), "{part:?} is not in {owner:?}");
        }
        assert_eq!((hold.holder, hold.token, &hold.label), (None, None, &None));
    }
    run(&mut other, "SELECT pg_advisory_unlock_all()").await;
    wait.await.unwrap();
    until("nothing is listed", async || list(&lock).await.is_empty()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn holds_of_other_clients_are_named_within_the_lag() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let config = || server(database.url()).application_name("ledger");
    let holders = [
        AdvisoryConfig::new(config()).connect().await.unwrap(),
        XactConfig::new(config()).connect().await.unwrap(),
    ];
    let looker = AdvisoryConfig::new(server(database.url())).connect().await.unwrap();
    for lock in holders {
        let lock = Arc::new(lock);
        let guard = lock.key("report:7").label("by hand").acquire().await.unwrap();
        // The holder's own client shows its hold at once.
        let own = inspect(&lock, "report:7").await;
        assert_eq!((hold(&own).holder, hold(&own).token), (Some(guard.holder()), guard.token()));
        assert!(own.named, "{own:?}");
        let lag = lock.capabilities().admin.lag + LONG / 4;
        let named = within(lag, format!("{lock}: not named"), async {
            loop {
                let info = list(&looker).await.pop().unwrap();
                // The row of an earlier holder names the key, but not the present holder.
                if info.named && hold(&info).holder.is_some() {
                    return info;
                }
                tokio::time::sleep(ms(20)).await;
            }
        });
        let info = named.await;
        assert_eq!(info.key.as_str(), "report:7");
        let hold = hold(&info);
        assert_eq!((hold.holder, hold.token), (Some(guard.holder()), guard.token()));
        assert_eq!(hold.label.as_deref(), Some("by hand"));
        assert!(hold.since.unwrap().elapsed().is_ok_and(|age| age < LONG));
        assert!(hold.owner.as_deref().unwrap().contains("ledger"));
        let waiting = waiter(&lock, "report:7");
        let other = Arc::new(session_by_name(&database).await);
        let queued_wait = waiter(&other, "report:7");
        until_queued(cluster, database.name(), 1).await;
        assert_eq!(inspect(&looker, "report:7").await.waiters, Some(1));
        guard.release().await.unwrap();
        for waiting in [waiting, queued_wait] {
            waiting.abort();
            drop(waiting.await);
        }
        until("free again", async || inspect(&looker, "report:7").await.is_free()).await;
    }
}

async fn session_by_name(database: &Database) -> Engine {
    AdvisoryConfig::new(server(database.url())).connect().await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn ending_a_session_says_what_else_goes_with_it() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let [lock, operator] = [session_by_name(&database).await, session_by_name(&database).await];
    let admin = operator.admin().unwrap();
    let sessions = admin.extension::<Sessions>().unwrap();
    assert!(admin.extension::<AdvisoryConfig>().is_none(), "nothing else is offered");
    assert_eq!(sessions.session_of(&key("a")).await.unwrap(), None);
    let [a, b] = [take(&lock, "a").await, take(&lock, "b").await];
    let mine = take(&operator, "c").await;
    until("both are named", async || list(&operator).await.iter().all(|info| info.named)).await;
    let session = sessions.session_of(&key("a")).await.unwrap().unwrap();
    let mut goes: Vec<_> = session.holds.iter().map(|info| info.key.as_str()).collect();
    goes.sort_unstable();
    assert_eq!(goes, ["a", "b"]);
    assert!(session.owner.as_deref().unwrap().contains("127.0.0.1"), "{session:?}");

    // A single hold cannot be ended, so the call fails and changes nothing.
    let error = admin.force_release(&key("a"), a.holder()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.message().contains("--force --session"), "{error}");
    assert_eq!(a.validity(), Validity::Valid);

    assert!(sessions.end_session(&session).await.unwrap());
    for guard in [&a, &b] {
        assert_eq!(lost_within(guard, LONG).await, LossReason::SessionLost);
    }
    until("the session is gone", async || list(&operator).await.len() == 1).await;
    assert!(!sessions.end_session(&session).await.unwrap(), "it names no later session");
    assert_eq!(mine.validity(), Validity::Valid);
    let taken = take(&lock, "a").await;
    assert!(taken.token() > a.token());
    let mut forged = session.clone();
    for id in ["", "1", "1-x", "0-0; DROP SCHEMA leasehold", "99999999999-1"] {
        forged.id = id.to_owned();
        assert_eq!(sessions.end_session(&forged).await.unwrap_err().kind(), ErrorKind::InvalidOption, "{id}");
    }
}

// Each transaction has a session to itself.
#[tokio::test(flavor = "multi_thread")]
async fn ending_the_session_of_a_transaction_lock_ends_that_lock_alone() {
    let database = Cluster::shared().fresh_database().await;
    let [lock, operator] = [transaction(database.url()).await, transaction(database.url()).await];
    let [a, b] = [take(&lock, "1").await, take(&lock, "2").await];
    let admin = operator.admin().unwrap();
    let error = admin.force_release(&key("1"), a.holder()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let sessions = admin.extension::<Sessions>().unwrap();
    let session = sessions.session_of(&key("1")).await.unwrap().unwrap();
    let goes: Vec<_> = session.holds.iter().map(|info| info.key.as_str()).collect();
    assert_eq!(goes, ["1"]);
    assert!(sessions.end_session(&session).await.unwrap());
    assert_eq!(lost_within(&a, LONG).await, LossReason::SessionLost);
    let taken = take(&operator, "1").await;
    assert!(taken.token() > a.token());
    assert_eq!(b.validity(), Validity::Valid);
}

// The row of an earlier holder is not shown as the present holder's.
#[tokio::test(flavor = "multi_thread")]
async fn an_old_name_is_not_shown_as_the_present_holder() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let lock = session(database.url()).await;
    let looker = session(database.url()).await;
    let guard = lock.key("7").label("first").acquire().await.unwrap();
    until("named", async || hold(&list(&looker).await[0]).label.is_some()).await;
    guard.release().await.unwrap();
    let mut foreign = database.connect().await;
    run(&mut foreign, "SELECT pg_advisory_lock(7)").await;
    let info = inspect(&looker, "7").await;
    let hold = hold(&info);
    assert_eq!((hold.holder, hold.token, &hold.label), (None::<HolderId>, None, &None));
    // C18: inspecting takes no lock.
    run(&mut foreign, "SELECT pg_advisory_unlock(7)").await;
    assert!(inspect(&looker, "7").await.is_free());
    assert_eq!(held(cluster, database.name()).await, [0; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_not_set_up_says_what_to_do() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let config = || server(database.url()).install_schema(false);
    let both = |config: PgConfig| async move {
        [
            AdvisoryConfig::new(config.clone()).connect().await.map(drop).unwrap_err(),
            XactConfig::new(config).connect().await.map(drop).unwrap_err(),
        ]
    };
    for error in both(config()).await {
        assert_error(&error, ErrorKind::SchemaMissing, "leasehold schema apply");
    }
    session(database.url()).await.close().await.unwrap();
    let name = Identifier::new("leasehold").unwrap();
    let role = Identifier::new(format!("role_{}", &database.name()[5..25])).unwrap();
    cluster.run_sql(database.name(), format!("CREATE ROLE {role} LOGIN")).await;
    let as_role = || {
        let url = database.url().replace("//postgres@", &format!("//{role}@"));
        server(&url).install_schema(false)
    };
    for error in both(as_role()).await {
        assert_error(&error, ErrorKind::PermissionDenied, "GRANT USAGE ON SCHEMA");
    }
    cluster.run_sql(database.name(), schema::grants(&name, &role, schema::Stores::Advisory)).await;
    // These privileges suffice to lock, to write names and to list.
    let poor = AdvisoryConfig::new(as_role()).connect().await.unwrap();
    // Details that the role cannot read are left out, for example the address of another role's session.
    let rich = AdvisoryConfig::new(config()).connect().await.unwrap();
    let others = rich.key("of another role").acquire().await.unwrap();
    let owner = list(&poor).await.iter().find_map(|info| hold(info).owner.clone()).unwrap();
    assert!(owner.starts_with("postgres (server process") && owner.contains("pg_read_all_stats"), "{owner}");
    others.release().await.unwrap();
    let guard = poor.key("k").label("poor").acquire().await.unwrap();
    until("named", async || list(&poor).await.iter().any(|info| hold(info).label.as_deref() == Some("poor")))
        .await;
    guard.release().await.unwrap();
    let in_transaction = XactConfig::new(as_role()).connect().await.unwrap();
    take(&in_transaction, "k").await.release().await.unwrap();

    cluster.run_sql(database.name(), "UPDATE leasehold.version SET version = 9, oldest_library = 9").await;
    for error in both(config()).await {
        assert_error(&error, ErrorKind::SchemaMissing, "update this program");
    }
    // A running client reports the same error with its next session.
    let guard = take(&poor, "k").await;
    cluster
        .run_sql(
            "postgres",
            format!("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{role}'"),
        )
        .await;
    lost_within(&guard, LONG).await;
    let error = refused_after_a_loss(&poor, "k").await;
    assert_error(&error, ErrorKind::SchemaMissing, "update this program");
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_that_cannot_be_used_are_refused_before_anything_is_opened() {
    let database = Cluster::shared().fresh_database().await;
    let config = || AdvisoryConfig::new(server(database.url()));
    for bad in [config().connections(0), config().connections(3), config().waiting(0), config().waiting(65)] {
        assert_eq!(bad.connect().await.unwrap_err().kind(), ErrorKind::InvalidOption, "{bad:?}");
    }
    for sessions in [0, 1_025] {
        let bad = XactConfig::new(server(database.url())).sessions(sessions);
        assert_eq!(bad.connect().await.unwrap_err().kind(), ErrorKind::InvalidOption);
    }
    assert_eq!(Cluster::shared().backends(database.name()).await, []);
}

// docs/backup-restore.md, "Work on the database of the locks".
#[tokio::test(flavor = "multi_thread")]
async fn a_lock_in_a_database_of_its_own_survives_work_on_the_other() {
    let cluster = Cluster::shared();
    let (locks, app) = (cluster.fresh_database().await, cluster.fresh_database().await);
    let mut admin = admin(cluster).await;
    let (old, copy) = (format!("{}_old", app.name()), format!("{}_copy", app.name()));
    let works = [
        format!("CREATE DATABASE {copy} TEMPLATE {}", app.name()),
        format!("ALTER DATABASE {} RENAME TO {old}", app.name()),
        format!("ALTER DATABASE {old} RENAME TO {}", app.name()),
        format!("DROP DATABASE {copy} WITH (FORCE)"),
    ];
    for guard in both(locks.url()).await {
        let held = take(&guard, "7").await;
        for work in &works {
            run(&mut admin, work.as_str()).await;
        }
        assert_eq!(held.validity(), Validity::Valid);
        held.release().await.unwrap();
    }
    // In the application's database, even a client without holds blocks the work.
    let _idle = session(app.url()).await;
    for work in &works[..2] {
        let refused = sqlx::raw_sql(sqlx::AssertSqlSafe(work.clone())).execute(&mut admin).await.unwrap_err();
        assert!(refused.to_string().contains("being accessed by other users"), "{refused}");
    }
}
