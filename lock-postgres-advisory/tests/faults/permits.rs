//! Permits, on a real server and by real processes.
use std::collections::BTreeSet;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::*;
use crate::modes::{Other, URL, is_closed_to_readers, locks, read, ready};
use leasehold_api::{
    Error, ErrorKind, HolderId, ListQuery, Lock as _, LockExt as _, LockGuard, LossReason, Mode,
};
use leasehold_engine::{Attempt, Backend as _, Engine, Request};
use leasehold_postgres::{Identifier, schema};
use leasehold_postgres_advisory::{Sessions, XactLocks};
use sqlx::Connection as _;
use test_bounds::within;
use test_servers::{Cluster, Database, Proxy};
use tokio::task::JoinHandle;

async fn permit(lock: &Engine, of: u32) -> LockGuard {
    lock.key("7").permits(of).wait(LONG).acquire().await.unwrap()
}

async fn try_permit(lock: &Engine, of: u32) -> Option<LockGuard> {
    lock.key("7").permits(of).try_acquire().await.unwrap()
}

fn waits_for_permit(lock: &Arc<Engine>, of: u32) -> JoinHandle<Result<LockGuard, Error>> {
    let lock = Arc::clone(lock);
    tokio::spawn(async move { lock.key("7").permits(of).wait(LONG).acquire().await })
}

/// Returns how many advisory locks the database has.
async fn count(database: &str) -> usize {
    Cluster::shared().advisory_locks(database).await.iter().filter(|lock| lock.granted).count()
}

async fn release_all(guards: impl IntoIterator<Item = LockGuard>) {
    for guard in guards {
        guard.release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn permits_of_one_session_share_three_locks_and_the_last_one_releases_them() {
    let database = Cluster::shared().fresh_database().await;
    let (lock, other) = (session(database.url()).await, session(database.url()).await);
    let mut guards = Vec::new();
    for held in 1..=5 {
        guards.push(permit(&lock, 5).await);
        // The number, the gate, the total, and one lock for each permit.
        assert_eq!((locks(database.name(), 7).await.len(), count(database.name()).await), (1, 3 + held));
    }
    let numbers: BTreeSet<_> = guards.iter().filter_map(LockGuard::permit).collect();
    assert_eq!(numbers, (0..5).collect());
    assert!(try_permit(&lock, 5).await.is_none() && try_permit(&other, 5).await.is_none());
    // The middle one is released, and only its number is free.
    let third = guards.remove(2);
    let number = third.permit();
    third.release().await.unwrap();
    let next = try_permit(&other, 5).await.unwrap();
    assert_eq!(next.permit(), number);
    guards.push(next);
    release_all(guards).await;
    assert_eq!(count(database.name()).await, 0);
    take(&other, "7").await.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_further_permit_is_a_probe_and_one_statement_and_a_release_is_one() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let proxy = Proxy::start(cluster.address()).await;
    let lock = numbers(seldom(&proxy.url(database.url()))).connect().await.unwrap();
    // The second permit opens the side session, and each prepares its statements.
    let first = permit(&lock, 9).await;
    permit(&lock, 9).await.release().await.unwrap();
    let (mut acquiring, mut releasing) = (Vec::new(), Vec::new());
    for _ in 0..5 {
        let before = proxy.traffic().round_trips;
        let guard = permit(&lock, 9).await;
        let acquired = proxy.traffic().round_trips;
        guard.release().await.unwrap();
        acquiring.push(acquired - before);
        releasing.push(proxy.traffic().round_trips - acquired);
    }
    // Takes the minimum, because names add round trips to some rounds.
    assert_eq!(
        (acquiring.iter().min(), releasing.iter().min()),
        (Some(&2), Some(&1)),
        "{acquiring:?} {releasing:?}"
    );
    first.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_that_name_different_numbers_at_once_never_both_have_permits() {
    let database = Cluster::shared().fresh_database().await;
    let (a, b) = (session(database.url()).await, session(database.url()).await);
    for _ in 0..50 {
        let (two, three) =
            tokio::join!(a.key("7").permits(2).try_acquire(), b.key("7").permits(3).try_acquire());
        let mut granted = Vec::new();
        for outcome in [two, three] {
            match outcome {
                Ok(guard) => granted.extend(guard),
                Err(error) => assert_eq!(error.kind(), ErrorKind::ModeMismatch, "{error}"),
            }
        }
        assert!(granted.len() < 2, "{granted:?}");
        release_all(granted).await;
        // A claim that was refused leaves nothing.
        assert_eq!(count(database.name()).await, 0);
    }
    let guard = permit(&a, 2).await;
    let error = b.key("7").permits(3).wait(LONG).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ModeMismatch, "{error}");
    guard.release().await.unwrap();
    permit(&b, 3).await.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn permits_and_readers_of_every_scope_exclude_each_other() {
    let database = Cluster::shared().fresh_database().await;
    let [sessions, transactions] = both(database.url()).await;
    let other = session(database.url()).await;
    let in_transaction = XactLocks::new("leasehold".parse().unwrap()).numbers(leasehold_postgres::RawBigint);
    let mut connection = database.connect().await;
    let permits = [permit(&sessions, 2).await, permit(&other, 2).await];
    for guard in permits {
        for lock in [&sessions, &transactions, &other] {
            assert!(is_closed_to_readers(lock, "7").await && is_held(lock, "7").await, "{lock}");
        }
        let mut tx = connection.begin().await.unwrap();
        assert!(in_transaction.try_lock_shared_in(&mut tx, &key("7")).await.unwrap().is_none());
        let error = in_transaction.lock_shared_in(&mut tx, &key("7"), LONG).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        tx.rollback().await.unwrap();
        guard.release().await.unwrap();
    }
    for lock in [&sessions, &transactions, &other] {
        let readers = [read(&sessions, "7").await, read(lock, "7").await];
        assert!(try_permit(&sessions, 2).await.is_none() && try_permit(&other, 2).await.is_none(), "{lock}");
        release_all(readers).await;
    }
    let mut tx = connection.begin().await.unwrap();
    in_transaction.lock_shared_in(&mut tx, &key("7"), LONG).await.unwrap();
    assert!(try_permit(&other, 2).await.is_none());
    tx.commit().await.unwrap();
    permit(&other, 2).await.release().await.unwrap();
}

/// A reader takes the turn, so later permits of other clients are refused.
#[tokio::test(flavor = "multi_thread")]
async fn a_reader_and_a_writer_that_wait_for_permits_come_before_later_ones() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let (a, b) = (session(database.url()).await, Arc::new(session(database.url()).await));
    for reads in [true, false] {
        let held = permit(&a, 3).await;
        let waiting = if reads {
            let lock = Arc::clone(&b);
            tokio::spawn(async move { lock.key("7").shared().wait(LONG).acquire().await })
        } else {
            waiter(&b, "7")
        };
        let refused = async || match try_permit(&a, 3).await {
            Some(guard) => {
                guard.release().await.unwrap();
                false
            }
            None => true,
        };
        until("later permits are refused", refused).await;
        assert!(!waiting.is_finished());
        held.release().await.unwrap();
        let guard = within(LONG, "not granted", waiting).await.unwrap().unwrap();
        assert_eq!(guard.mode(), if reads { Mode::Shared } else { Mode::Exclusive });
        guard.release().await.unwrap();
    }
    until("nothing is left", async || count(database.name()).await == 0).await;
}

/// The code of the other process, which holds a permit and waits for another one.
#[tokio::test(flavor = "multi_thread")]
async fn another_process() {
    let Ok(url) = std::env::var(URL) else {
        assert!(std::env::var_os(URL).is_none(), "the address is text");
        return;
    };
    let lock = Arc::new(session(&url).await);
    let _guard = permit(&lock, 2).await;
    let _waiting = waits_for_permit(&lock, 2);
    ready();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_permit_of_a_killed_holder_comes_back_with_its_number() {
    let database = Cluster::shared().fresh_database().await;
    let lock = Arc::new(session(database.url()).await);
    let own = permit(&lock, 2).await;
    let other = Other::start("permits::another_process", database.url());
    assert!(try_permit(&lock, 2).await.is_none());
    let waiting = waits_for_permit(&lock, 2);
    drop(other);
    let next = within(LONG, "not granted", waiting).await.unwrap().unwrap();
    assert_eq!([own.permit(), next.permit()].map(Option::unwrap).iter().sum::<u32>(), 1);
    own.confirm().await.unwrap();
    release_all([own, next]).await;
    until("nothing is left", async || count(database.name()).await == 0).await;
}

/// docs/hazards.md H08: the server ends the session that has the turn, and no other session of the process.
#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_process_at_the_head_blocks_the_next_waiter_for_seconds_alone() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let lock = Arc::new(session(database.url()).await);
    let own = permit(&lock, 2).await;
    let other = Other::start("permits::another_process", database.url());
    // The number, gate, total and permit of both, and the turn, the gate and the mark of the waiter.
    until("the other process has the turn", async || count(database.name()).await == 11).await;
    let pid = other.0.id().to_string();
    assert!(Command::new("kill").args(["-STOP", &pid]).status().unwrap().success());
    let waiting = waits_for_permit(&lock, 2);
    until_queued(cluster, database.name(), 1).await;
    own.release().await.unwrap();
    let next = within(LONG, "not granted", waiting).await.unwrap().unwrap();
    assert!(try_permit(&lock, 2).await.is_none(), "the stopped process still has its permit");
    next.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn operators_see_permits_at_their_key_alone_and_end_one_session() {
    let database = Cluster::shared().fresh_database().await;
    let (a, b) = (Arc::new(session(database.url()).await), session(database.url()).await);
    let ops = session(database.url()).await;
    let guards = [
        a.key("7").permits(3).label("x y").acquire().await.unwrap(),
        permit(&a, 3).await,
        permit(&b, 3).await,
    ];
    // The waiter has a turn and a mark.
    let waiting = waits_for_permit(&a, 3);
    until("it polls", async || marks(Cluster::shared(), database.name()).await == 1).await;
    let admin = ops.admin().unwrap();
    let ids = guards.iter().map(LockGuard::holder).collect::<BTreeSet<_>>();
    let shown = async || {
        let info = admin.inspect(&key("7")).await.unwrap();
        info.holders.iter().filter_map(|hold| hold.holder).collect::<BTreeSet<HolderId>>()
    };
    until("all holders are named", async || shown().await == ids).await;
    for info in [
        vec![admin.inspect(&key("7")).await.unwrap()],
        admin.list(&ListQuery::new()).await.unwrap(),
        a.admin().unwrap().list(&ListQuery::new()).await.unwrap(),
    ] {
        assert_eq!(info.len(), 1, "{info:?}");
        let holders = &info[0].holders;
        let numbers: BTreeSet<_> = holders.iter().filter_map(|hold| hold.permit).collect();
        assert_eq!((holders.len(), numbers), (3, (0..3).collect()), "{info:?}");
        assert!(holders.iter().all(|hold| hold.mode == Mode::Permit { of: 3 }), "{info:?}");
        let labelled = holders.iter().find(|hold| hold.holder == Some(guards[0].holder())).unwrap();
        assert_eq!((labelled.label.as_deref(), labelled.permit), (Some("x y"), guards[0].permit()));
    }
    let sessions = admin.extension::<Sessions>().unwrap();
    let all = sessions.sessions_of(&key("7")).await.unwrap();
    let of_b = all.iter().find(|session| session.holds[0].holders.len() == 1).unwrap();
    assert!(sessions.end_session(of_b).await.unwrap());
    assert_eq!(lost_within(&guards[2], LONG).await, LossReason::SessionLost);
    let next = within(LONG, "not granted", waiting).await.unwrap().unwrap();
    assert_eq!(next.permit(), guards[2].permit());
    let [one, two, _lost] = guards;
    release_all([one, two, next]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_repeated_has_one_permit_and_a_release_that_is_repeated_releases_one() {
    let database = Cluster::shared().fresh_database().await;
    let backend = numbers(server(database.url())).backend().await.unwrap();
    let request = |serial| {
        let mut request = Request::new(key("7"), HolderId::from_parts(7, serial));
        request.mode = Mode::Permit { of: 2 };
        request
    };
    let acquire = async |serial| match backend.acquire(vec![request(serial)]).await.remove(0) {
        Ok(Attempt::Granted(granted)) => granted.permit,
        other => panic!("{other:?}"),
    };
    let first = acquire(1).await;
    assert_eq!(acquire(1).await, first);
    let second = acquire(2).await;
    assert_ne!(second, first);
    for was_held in [true, false] {
        let reply = backend.release(vec![request(1).hold()]).await.remove(0).unwrap();
        assert_eq!(reply.was_held, was_held);
    }
    assert_eq!(acquire(3).await, first, "the other one is still held");
    backend.close().await;
}

/// The server refuses the third lock of a claim, for want of room, and nothing stays held.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_fails_half_way_leaves_nothing() {
    let database = Cluster::shared().fresh_database().await;
    let lock = session(database.url()).await;
    let mut user = database.connect().await;
    run(&mut user, "ALTER FUNCTION pg_catalog.pg_try_advisory_lock_shared(bigint) RENAME TO try_shared;
        CREATE FUNCTION pg_catalog.pg_try_advisory_lock_shared(a bigint) RETURNS boolean LANGUAGE plpgsql AS $$
        BEGIN RAISE EXCEPTION USING ERRCODE = '53200', MESSAGE = 'out of shared memory'; END $$").await;
    let error = lock.key("7").permits(2).try_acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Capacity, "{error}");
    assert_eq!(count(database.name()).await, 0);
    run(
        &mut user,
        "DROP FUNCTION pg_catalog.pg_try_advisory_lock_shared(bigint);
        ALTER FUNCTION pg_catalog.try_shared(bigint) RENAME TO pg_try_advisory_lock_shared",
    )
    .await;
    permit(&lock, 2).await.release().await.unwrap();
}

async fn hold_in(lock: &Engine, mode: Mode) -> LockGuard {
    lock.key("7").mode(mode).wait(LONG).acquire().await.unwrap()
}

/// Other clients wait for the turn and would come first each time, because a request that polls has no turn.
#[tokio::test(flavor = "multi_thread")]
async fn a_permit_that_polls_takes_a_turn_when_a_session_is_available() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let mut observer = database.connect().await;
    run(&mut observer, "SELECT pg_advisory_lock(1)").await;
    let lock = Arc::new(numbers(server(database.url())).waiting(1).connect().await.unwrap());
    let queued = waiter(&lock, "1");
    until_queued(cluster, database.name(), 1).await;
    let other = session(database.url()).await;
    let guard = permit(&other, 1).await;
    let waiting = waits_for_permit(&lock, 1);
    until("it polls", async || marks(cluster, database.name()).await == 1).await;
    run(&mut observer, "SELECT pg_advisory_unlock(1)").await;
    queued.await.unwrap().unwrap().release().await.unwrap();
    // The permit of the holder and the turn of the waiter are exclusive locks.
    until("it has the turn", async || held(cluster, database.name()).await.len() == 2).await;
    guard.release().await.unwrap();
    within(LONG, "not granted", waiting).await.unwrap().unwrap().release().await.unwrap();
}

/// Starts holders of two clients in `mode` that overlap until `enough`. Returns after the first one has the key.
async fn crowd(database: &Database, mode: Mode, enough: &Arc<AtomicBool>) -> Vec<JoinHandle<()>> {
    let mut holders = Vec::new();
    for _ in 0..2 {
        let (lock, enough) = (session(database.url()).await, Arc::clone(enough));
        holders.push(tokio::spawn(async move {
            let mut held = hold_in(&lock, mode).await;
            while !enough.load(Ordering::Acquire) {
                tokio::time::sleep(ms(20)).await;
                // The next one begins before this one ends. A holder that is kept out lets a waiter in.
                let next = lock.key("7").mode(mode).try_acquire().await.unwrap();
                held.release().await.unwrap();
                held = match next {
                    Some(next) => next,
                    None => hold_in(&lock, mode).await,
                };
            }
            held.release().await.unwrap();
        }));
    }
    until("the key is held", async || !locks(database.name(), 7).await.is_empty()).await;
    holders
}

/// A permit is not granted while a reader has the key, so later readers must let it in.
#[tokio::test(flavor = "multi_thread")]
async fn readers_of_others_do_not_starve_a_permit_that_waits() {
    let database = Cluster::shared().fresh_database().await;
    let (lock, enough) = (session(database.url()).await, Arc::new(AtomicBool::new(false)));
    let readers = crowd(&database, Mode::Shared, &enough).await;
    let guard = permit(&lock, 2).await;
    enough.store(true, Ordering::Release);
    guard.release().await.unwrap();
    for reader in readers {
        within(LONG, "not ended", reader).await.unwrap();
    }
    until("nothing is left", async || count(database.name()).await == 0).await;
}

/// A writer without a session to wait on polls. Holders of two other clients overlap all the time.
#[tokio::test(flavor = "multi_thread")]
async fn readers_and_permits_of_others_do_not_starve_a_writer_that_polls() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let mut observer = database.connect().await;
    run(&mut observer, "SELECT pg_advisory_lock(1)").await;
    let writes = Arc::new(numbers(server(database.url())).waiting(1).connect().await.unwrap());
    let queued = waiter(&writes, "1");
    until_queued(cluster, database.name(), 1).await;
    for mode in [Mode::Shared, Mode::Permit { of: 4 }] {
        let enough = Arc::new(AtomicBool::new(false));
        let holders = crowd(&database, mode, &enough).await;
        let writer = take(&writes, "7").await;
        enough.store(true, Ordering::Release);
        writer.release().await.unwrap();
        for holder in holders {
            within(LONG, "not ended", holder).await.unwrap();
        }
    }
    run(&mut observer, "SELECT pg_advisory_unlock(1)").await;
    queued.await.unwrap().unwrap().release().await.unwrap();
    until("nothing is left", async || count(database.name()).await == 0).await;
}

/// A reader and a permit that join others of their session check for waiters on a second session, or in the lock table.
#[tokio::test(flavor = "multi_thread")]
async fn without_a_second_session_readers_and_permits_still_join_and_no_waiter_is_passed() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    session(database.url()).await.close().await.unwrap();
    let role = Identifier::new(format!("alone_{}", &database.name()[5..25])).unwrap();
    let grants = schema::grants(&Identifier::new("leasehold").unwrap(), &role, schema::Stores::Advisory);
    cluster.run_sql(database.name(), format!("CREATE ROLE {role} LOGIN; {grants}")).await;
    let url = database.url().replace("//postgres@", &format!("//{role}@"));
    let backend = numbers(server(&url).install_schema(false)).backend().await.unwrap();
    let lock = Engine::builder(backend).share_for(ms(0)).start().unwrap();
    let other = Arc::new(session(database.url()).await);
    let (first_reader, first_permit) =
        (read(&lock, "8").await, lock.key("7").permits(9).try_acquire().await.unwrap().unwrap());
    cluster.run_sql("postgres", format!("ALTER ROLE {role} NOLOGIN")).await;
    let kept = pid_of(cluster, database.name(), 8).await;
    cluster
        .run_sql(
            "postgres",
            format!(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE usename = '{role}' AND pid <> {kept}"
            ),
        )
        .await;
    let reader = lock.key("8").shared().try_acquire().await.unwrap().unwrap();
    let permit = try_permit(&lock, 9).await.unwrap();
    let writers = [waiter(&other, "8"), waiter(&other, "7")];
    until_queued(cluster, database.name(), 2).await;
    assert!(is_closed_to_readers(&lock, "8").await && try_permit(&lock, 9).await.is_none());
    release_all([first_reader, first_permit, reader, permit]).await;
    for writer in writers {
        within(LONG, "not granted", writer).await.unwrap().unwrap().release().await.unwrap();
    }
    cluster.run_sql("postgres", format!("ALTER ROLE {role} LOGIN")).await;
}
