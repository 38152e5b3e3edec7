//! Shared grants, on a real server and by real processes.
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use crate::common::*;
use leasehold_api::{ErrorKind, HolderId, Lock as _, LockExt as _, LockGuard, LossReason, Mode, Validity};
use leasehold_engine::{Attempt, Backend as _, Engine, Request};
use leasehold_postgres_advisory::Sessions;
use test_bounds::within;
use test_servers::Cluster;

pub(crate) const URL: &str = "LEASEHOLD_ADVISORY_TEST_URL";

pub(crate) async fn read(lock: &Engine, key: &str) -> LockGuard {
    lock.key(key).shared().wait(LONG).acquire().await.unwrap()
}

/// Returns whether a reader is refused.
pub(crate) async fn is_closed_to_readers(lock: &Engine, key: &str) -> bool {
    match lock.key(key).shared().try_acquire().await.unwrap() {
        Some(guard) => {
            guard.release().await.unwrap();
            false
        }
        None => true,
    }
}

/// Returns the granted locks of the number, by mode.
pub(crate) async fn locks(database: &str, number: i64) -> Vec<String> {
    let locks = Cluster::shared().advisory_locks(database).await.into_iter();
    locks.filter(|lock| lock.granted && lock.number() == number).map(|lock| lock.mode).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_of_one_session_have_one_lock_of_the_server_and_the_last_one_releases_it() {
    let database = Cluster::shared().fresh_database().await;
    let lock = session(database.url()).await;
    let mut readers = Vec::new();
    for _ in 0..5 {
        readers.push(read(&lock, "7").await);
        assert_eq!(locks(database.name(), 7).await, ["ShareLock"]);
    }
    let ids: std::collections::BTreeSet<_> = readers.iter().map(LockGuard::holder).collect();
    assert_eq!(ids.len(), 5);
    let other = session(database.url()).await;
    while let Some(reader) = readers.pop() {
        assert!(is_held(&other, "7").await && is_held(&lock, "7").await);
        reader.release().await.unwrap();
        assert_eq!(locks(database.name(), 7).await.len(), usize::from(!readers.is_empty()));
    }
    let mut observer = database.connect().await;
    assert!(free(&mut observer, 7).await);
}

/// The release of the dropped reader has not ended when the next reader tries.
#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_ends_excludes_no_try_of_a_reader() {
    let database = Cluster::shared().fresh_database().await;
    for lock in both(database.url()).await {
        for round in 0..50 {
            drop(read(&lock, "7").await);
            let reader = lock.key("7").shared().try_acquire().await.unwrap();
            let reader = reader.unwrap_or_else(|| panic!("round {round}: nobody excludes the reader"));
            reader.release().await.unwrap();
        }
    }
}

/// The server would grant the session that shares already, past the writer, as often as it asks.
#[tokio::test(flavor = "multi_thread")]
async fn a_reader_does_not_pass_a_writer_that_waits_in_another_process() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let sessions = [session(database.url()).await, session(database.url()).await];
    for engines in [sessions, both(database.url()).await] {
        let [reads, other] = engines.map(Arc::new);
        for (reads, writes) in [(&reads, &other), (&other, &reads)] {
            let first = read(reads, "7").await;
            let writing = waiter(writes, "7");
            until_queued(cluster, database.name(), 1).await;
            // A reader joins the first one without the server until `share_for` ends.
            until("closed to readers", async || is_closed_to_readers(reads, "7").await).await;
            for _ in 0..3 {
                assert!(is_closed_to_readers(reads, "7").await, "it overtook the writer");
            }
            let (lock, key) = (Arc::clone(reads), "7");
            let later = tokio::spawn(async move { read(&lock, key).await });
            until_queued(cluster, database.name(), 2).await;
            assert_eq!(first.validity(), Validity::Valid);
            first.release().await.unwrap();
            let writer = writing.await.unwrap().unwrap();
            assert!(!later.is_finished(), "a reader beside the writer");
            let token = writer.token();
            writer.release().await.unwrap();
            let later = within(LONG, "not granted", later).await.unwrap();
            assert!(later.token() > token);
            later.release().await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_of_both_scopes_share_and_exclude_writers_of_both() {
    let database = Cluster::shared().fresh_database().await;
    let [sessions, transactions] = both(database.url()).await;
    for [first, second] in [[&sessions, &transactions], [&transactions, &sessions]] {
        let readers = [read(first, "7").await, read(second, "7").await, read(first, "7").await];
        assert!(readers.iter().all(|guard| guard.mode() == Mode::Shared && guard.permit().is_none()));
        for reader in readers {
            assert!(is_held(&sessions, "7").await && is_held(&transactions, "7").await);
            reader.release().await.unwrap();
        }
        let writer = take(first, "7").await;
        assert!(is_closed_to_readers(&sessions, "7").await && is_closed_to_readers(&transactions, "7").await);
        writer.release().await.unwrap();
    }
    // A transaction cannot end its turn before its permit.
    let error = transactions.key("7").permits(2).try_acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_takes_and_releases_each_number_in_its_mode() {
    let database = Cluster::shared().fresh_database().await;
    let (backend, other) =
        (numbers(server(database.url())).backend().await.unwrap(), session(database.url()).await);
    let (two, four) = (read(&other, "2").await, take(&other, "4").await);
    let wanted = [("1", Mode::Exclusive), ("2", Mode::Shared), ("3", Mode::Shared), ("4", Mode::Shared)];
    let requests: Vec<Request> = wanted
        .into_iter()
        .zip(1..)
        .map(|((name, mode), serial)| {
            let mut request = Request::new(key(name), HolderId::from_parts(7, serial));
            request.mode = mode;
            request
        })
        .collect();
    for _ in 0..2 {
        let answers = backend.acquire(requests.clone()).await;
        let granted: Vec<_> =
            answers.iter().map(|answer| matches!(answer, Ok(Attempt::Granted(_)))).collect();
        assert_eq!(granted, [true, true, true, false], "{answers:?}");
        for (number, modes) in [(1, vec!["ExclusiveLock"]), (2, vec!["ShareLock"; 2]), (3, vec!["ShareLock"])]
        {
            assert_eq!(locks(database.name(), number).await, modes, "{number}");
        }
        // The request that arrives twice is the same grant, and takes no second lock.
        let again = backend.acquire(requests[..3].to_vec()).await;
        assert!(again.iter().all(|answer| matches!(answer, Ok(Attempt::Granted(_)))), "{again:?}");
        let released = backend.release(requests.iter().map(Request::hold).collect()).await;
        let released: Vec<_> = released.into_iter().map(|reply| reply.unwrap().was_held).collect();
        assert_eq!(released, [true, true, true, false]);
        assert_eq!(locks(database.name(), 2).await, ["ShareLock"], "of the other client");
        assert_eq!(locks(database.name(), 1).await.len() + locks(database.name(), 3).await.len(), 0);
    }
    two.release().await.unwrap();
    four.release().await.unwrap();
    backend.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_polls_is_granted_and_its_session_has_the_lock_once() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let holder = session(database.url()).await;
    let [seven, eight] = [take(&holder, "7").await, take(&holder, "8").await];
    let lock = Arc::new(numbers(server(database.url())).waiting(1).connect().await.unwrap());
    let queued = waiter(&lock, "8");
    until_queued(cluster, database.name(), 1).await;
    // No session is left to wait on.
    let reads = Arc::clone(&lock);
    let polling = tokio::spawn(async move { [read(&reads, "7").await, read(&reads, "7").await] });
    seven.release().await.unwrap();
    let readers = within(LONG, "not granted", polling).await.unwrap();
    assert_eq!(locks(database.name(), 7).await, ["ShareLock"]);
    for reader in readers {
        reader.release().await.unwrap();
    }
    assert_eq!(locks(database.name(), 7).await, [""; 0]);
    eight.release().await.unwrap();
    queued.await.unwrap().unwrap().release().await.unwrap();
}

/// While the fault is on, a probe takes two seconds and finds a writer, and a shared lock cannot be released.
const FAULT: &str = "
    CREATE TABLE public.fault AS SELECT true AS is_on;
    CREATE SEQUENCE public.failed;
    ALTER FUNCTION pg_catalog.pg_try_advisory_lock_shared(bigint) RENAME TO try_shared;
    CREATE FUNCTION pg_catalog.pg_try_advisory_lock_shared(a bigint) RETURNS boolean LANGUAGE plpgsql AS $$
    BEGIN
        IF (SELECT f.is_on FROM public.fault AS f) THEN PERFORM pg_catalog.pg_sleep(2); RETURN false; END IF;
        RETURN pg_catalog.try_shared(a);
    END $$;
    ALTER FUNCTION pg_catalog.pg_advisory_unlock_shared(bigint) RENAME TO unlock_shared;
    CREATE FUNCTION pg_catalog.pg_advisory_unlock_shared(a bigint) RETURNS boolean LANGUAGE plpgsql AS $$
    BEGIN
        IF (SELECT f.is_on FROM public.fault AS f) THEN
            PERFORM pg_catalog.nextval('public.failed');
            RAISE EXCEPTION USING ERRCODE = '53200', MESSAGE = 'out of shared memory';
        END IF;
        RETURN pg_catalog.unlock_shared(a);
    END $$";

/// A reader that polls joins another one, which leaves. The lock of both is then its own, and its release fails.
#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_waits_and_fails_to_release_leaves_no_lock() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let mut user = database.connect().await;
    run(&mut user, "SELECT pg_advisory_lock(1)").await;
    let backend = numbers(server(database.url())).waiting(1).backend().await.unwrap();
    let lock = Arc::new(Engine::builder(backend).share_for(ms(0)).start().unwrap());
    let queued = waiter(&lock, "1");
    until_queued(cluster, database.name(), 1).await;
    let first = read(&lock, "7").await;
    run(&mut user, FAULT).await;
    let reads = Arc::clone(&lock);
    let waiting = tokio::spawn(async move { read(&reads, "7").await });
    until("it polls", async || marks(cluster, database.name()).await == 1).await;
    until_true(
        &mut user,
        "EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep')",
    )
    .await;
    // If the release came too late for the probe, it would fail itself, and be repeated.
    drop(first.release().await);
    until_true(&mut user, "SELECT last_value > 1 FROM public.failed").await;
    run(&mut user, "UPDATE public.fault SET is_on = false").await;
    within(LONG, "not granted", waiting).await.unwrap().release().await.unwrap();
    until("nothing is left", async || locks(database.name(), 7).await.is_empty()).await;
    run(&mut user, "SELECT pg_advisory_unlock(1)").await;
    queued.await.unwrap().unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn operators_see_every_reader_and_end_one_session_of_many() {
    let database = Cluster::shared().fresh_database().await;
    let (a, b, ops) =
        (session(database.url()).await, session(database.url()).await, session(database.url()).await);
    let label = "50 %\nof it";
    let readers =
        [a.key("7").shared().label(label).acquire().await.unwrap(), read(&a, "7").await, read(&b, "7").await];
    let ids = |guards: &[LockGuard]| {
        let mut ids: Vec<HolderId> = guards.iter().map(LockGuard::holder).collect();
        ids.sort();
        ids
    };
    let admin = ops.admin().unwrap();
    let shown = async || {
        let info = admin.inspect(&key("7")).await.unwrap();
        let mut ids: Vec<HolderId> = info.holders.iter().filter_map(|hold| hold.holder).collect();
        ids.sort();
        (ids, info)
    };
    until("all readers are named", async || shown().await.0 == ids(&readers)).await;
    let (_, info) = shown().await;
    assert!(info.holders.iter().all(|hold| hold.mode == Mode::Shared && hold.token.is_some()), "{info:?}");
    let first = info.holders.iter().find(|hold| hold.holder == Some(readers[0].holder())).unwrap();
    assert_eq!((first.label.as_deref(), first.token), (Some(label), readers[0].token()));
    // The clients themselves know at once.
    let own = a.admin().unwrap().inspect(&key("7")).await.unwrap();
    assert_eq!(own.holders.len(), 3, "{own:?}");

    let [one, two, other] = readers;
    let sessions = admin.extension::<Sessions>().unwrap();
    let all = sessions.sessions_of(&key("7")).await.unwrap();
    let holders: Vec<usize> = all.iter().map(|session| session.holds[0].holders.len()).collect();
    assert_eq!(holders.iter().sum::<usize>(), 3, "{all:?}");
    let of_a = all.iter().find(|session| session.holds[0].holders.len() == 2).unwrap();
    assert!(sessions.end_session(of_a).await.unwrap());
    // One session is lost with all its readers, and no other.
    for guard in [&one, &two] {
        assert_eq!(lost_within(guard, LONG).await, LossReason::SessionLost);
    }
    other.confirm().await.unwrap();
    assert!(is_held(&ops, "7").await);
    until("the ended readers are not shown", async || shown().await.0 == [other.holder()]).await;
    other.release().await.unwrap();
    take(&ops, "7").await.release().await.unwrap();
}

/// A holder in another process. Killed if dropped, even by a failed test.
pub(crate) struct Other(pub(crate) Child);

impl Other {
    /// Starts the test `code`, and waits for the line with which it is ready.
    pub(crate) fn start(code: &str, url: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", code, "--nocapture", "--test-threads=1"])
            .env(URL, url)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut answers = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains(">ready") {
            line.clear();
            assert_ne!(answers.read_line(&mut line).unwrap(), 0, "the other process ended");
        }
        Self(child)
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

const CODE: &str = "modes::another_process";

/// The code of the other process.
#[tokio::test(flavor = "multi_thread")]
async fn another_process() {
    let Ok(url) = std::env::var(URL) else {
        assert!(std::env::var_os(URL).is_none(), "the address is text");
        return;
    };
    let lock = session(&url).await;
    let _guard = read(&lock, "7").await;
    ready();
}

/// Lets the parent go on, and stays until it ends.
pub(crate) fn ready() {
    println!(">ready");
    std::io::stdout().flush().unwrap();
    let mut line = String::new();
    assert_eq!(std::io::stdin().read_line(&mut line).unwrap(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_reader_ends_alone() {
    let database = Cluster::shared().fresh_database().await;
    let lock = Arc::new(session(database.url()).await);
    let (first, second) = (Other::start(CODE, database.url()), Other::start(CODE, database.url()));
    let own = read(&lock, "7").await;
    assert_eq!(locks(database.name(), 7).await.len(), 3);
    drop(first);
    until("the first reader ends", async || locks(database.name(), 7).await.len() == 2).await;
    own.confirm().await.unwrap();
    own.release().await.unwrap();
    assert!(is_held(&lock, "7").await, "a reader is left");
    let writing = waiter(&lock, "7");
    drop(second);
    within(LONG, "not granted", writing).await.unwrap().unwrap().release().await.unwrap();
}
