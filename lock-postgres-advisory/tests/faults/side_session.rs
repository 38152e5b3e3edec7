//! Inspection and the writing of names neither delay nor end a lock (docs/hazards.md H54).
use std::sync::Arc;

use crate::common::*;
use leasehold_api::{ErrorKind, Fencing, Lock as _, Validity};
use leasehold_postgres::schema::{self, Stores};
use leasehold_postgres::{Identifier, RawBigint};
use leasehold_postgres_advisory::XactLocks;
use test_servers::Cluster;

/// Makes the writing of names hang, and ignores every cancellation.
const STUCK: &str = "
CREATE FUNCTION public.stuck() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    LOOP
        BEGIN
            PERFORM pg_sleep(60);
        EXCEPTION WHEN query_canceled THEN NULL;
        END;
    END LOOP;
END $$;
CREATE TRIGGER stuck BEFORE INSERT ON leasehold.advisory_name FOR EACH ROW EXECUTE FUNCTION public.stuck()";

const STUCK_PIDS: &str = "SELECT coalesce(string_agg(pid::text, ',' ORDER BY pid), '') FROM pg_stat_activity
    WHERE datname = current_database() AND wait_event = 'PgSleep'";

#[tokio::test(flavor = "multi_thread")]
async fn names_that_cannot_be_written_delay_and_end_no_lock() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let lock = numbers(quick(database.url())).connect().await.unwrap();
    let mut observer = database.connect().await;
    run(&mut observer, STUCK).await;
    let guard = take(&lock, "7").await;
    let keeper = pid_of(cluster, database.name(), 7).await;
    until("somebody writes names", async || {
        !text(&mut database.connect().await, STUCK_PIDS).await.is_empty()
    })
    .await;
    let first = text(&mut observer, STUCK_PIDS).await;
    assert_ne!(first, keeper.to_string(), "the session that keeps the locks is free");
    // The lock works while that statement hangs.
    take(&lock, "8").await.release().await.unwrap();
    // The client abandons that session and retries on another one.
    until("it is tried again", async || text(&mut database.connect().await, STUCK_PIDS).await != first).await;
    assert_eq!(pid_of(cluster, database.name(), 7).await, keeper);
    take(&lock, "8").await.release().await.unwrap();
    // The hold was confirmed throughout, because otherwise it would be lost.
    assert_eq!(guard.validity(), Validity::Valid);
    guard.release().await.unwrap();
    for pid in text(&mut observer, STUCK_PIDS).await.split(',').filter_map(|pid| pid.parse().ok()) {
        end(cluster, pid).await;
    }
    lock.close().await.unwrap();
}

/// Returns the pair of numbers that pollers of a number lock as their mark.
fn mark_of(number: i64) -> String {
    let mixed = number ^ 0x6c65_6173_6568_6f6c;
    format!("({mixed}::bigint >> 32)::integer, (({mixed}::bigint << 32) >> 32)::integer")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mark_that_meets_a_release_is_set_with_the_next_poll() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let holder = session(database.url()).await;
    let [seven, eight] = [take(&holder, "7").await, take(&holder, "8").await];
    let lock = Arc::new(numbers(server(database.url())).waiting(1).connect().await.unwrap());
    let queued = waiter(&lock, "8");
    until_queued(cluster, database.name(), 1).await;
    // Locks the mark as a release does while it checks for pollers.
    let mut releaser = database.connect().await;
    run(&mut releaser, format!("SELECT pg_advisory_lock({})", mark_of(7))).await;
    let polling = waiter(&lock, "7");
    let mut observer = database.connect().await;
    // The poller has tried to set its mark and failed.
    let tried = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE '%pg_try_advisory_lock_shared%'";
    until_true(&mut observer, &format!("({tried} AND pid <> pg_backend_pid()) > 0")).await;
    let marks = "(SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database WHERE d.datname = current_database()
        AND l.locktype = 'advisory' AND l.mode = 'ShareLock' AND l.granted AND l.classid = 1818583411)";
    assert_eq!(text(&mut observer, marks).await, "0");
    run(&mut releaser, "SELECT pg_advisory_unlock_all()").await;
    until_true(&mut observer, &format!("{marks} = 1")).await;
    seven.release().await.unwrap();
    polling.await.unwrap().unwrap().release().await.unwrap();
    eight.release().await.unwrap();
    queued.await.unwrap().unwrap().release().await.unwrap();
    // The mark is removed once.
    until_true(&mut observer, &format!("{marks} = 0")).await;
    assert!(
        !cluster.log().contains("you don't own a lock of type ShareLock"),
        "nobody takes back what he has not set"
    );
}

/// The release frees the lock, and then fails because the server has no room to check for marks.
#[tokio::test(flavor = "multi_thread")]
async fn a_release_that_fails_after_it_freed_was_a_release() {
    let database = Cluster::shared().fresh_database().await;
    let mut user = database.connect().await;
    // Connects before, because connecting tries the function too (H59).
    let lock = session(database.url()).await;
    run(&mut user, "CREATE SEQUENCE public.calls;
        ALTER FUNCTION pg_catalog.pg_try_advisory_xact_lock(int, int) RENAME TO try_advisory_xact_lock;
        CREATE FUNCTION pg_catalog.pg_try_advisory_xact_lock(a int, b int) RETURNS boolean LANGUAGE plpgsql AS $$
        BEGIN
            IF nextval('public.calls') = 1 THEN
                RAISE EXCEPTION USING ERRCODE = '53200', MESSAGE = 'out of shared memory';
            END IF;
            RETURN pg_catalog.try_advisory_xact_lock(a, b);
        END $$").await;
    let guard = take(&lock, "7").await;
    guard.release().await.unwrap_or_else(|error| panic!("it was held until now: {error}"));
    // The failed statement freed the lock. The repeated one found nothing to free and did not call the function.
    assert_eq!(text(&mut user, "SELECT last_value FROM public.calls").await, "1");
    assert!(free(&mut user, 7).await);
}

/// docs/hazards.md H22: a number is one lock for all schemas, but each schema has a separate sequence of tokens.
#[tokio::test(flavor = "multi_thread")]
async fn numbers_that_schemas_share_have_tokens_in_one_of_them() {
    let database = Cluster::shared().fresh_database().await;
    let schema = Identifier::new("other").unwrap();
    let ours = session(database.url()).await;
    let theirs = numbers(server(database.url()).schema(schema.clone())).connect().await.unwrap();
    assert_eq!(ours.capabilities().fencing, Fencing::Durable);
    assert_eq!(theirs.capabilities().fencing, Fencing::None);
    let mut last = None;
    for _ in 0..2 {
        let guard = take(&ours, "42").await;
        assert!(is_held(&theirs, "42").await, "one lock");
        assert!(guard.token() > last, "{guard:?} after {last:?}");
        last = guard.token();
        guard.release().await.unwrap();
        let guard = take(&theirs, "42").await;
        assert!(is_held(&ours, "42").await);
        assert_eq!(guard.token(), None);
        let seen = theirs.admin().unwrap().inspect(&key("42")).await.unwrap();
        assert_eq!(seen.holders[0].token, None, "{seen:?}");
        guard.release().await.unwrap();
    }
    let mut user = database.connect().await;
    run(&mut user, "BEGIN").await;
    let error = XactLocks::new(schema.clone()).numbers(RawBigint).token(&mut user).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(XactLocks::new(schema).token(&mut user).await.is_ok(), "numbers of that schema alone");
}

/// A role that can no longer log in affects only new sessions. A wait in the server's queue goes on although no new
/// session can check it.
#[tokio::test(flavor = "multi_thread")]
async fn a_wait_outlives_that_the_server_lets_no_look_in() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let holder = session(database.url()).await;
    let mut user = database.connect().await;
    let role = Identifier::new(format!("waits_{}", &database.name()[5..])).unwrap();
    let grants = schema::grants(&Identifier::new("leasehold").unwrap(), &role, Stores::Advisory);
    run(&mut user, &format!("CREATE ROLE {} LOGIN; {grants}", role.quoted())).await;
    let url = database.url().replacen("//postgres@", &format!("//{}@", role.as_str()), 1);
    let lock = Arc::new(in_transactions(quick(&url)).connect().await.unwrap());
    let guard = take(&holder, "7").await;
    let waiting = waiter(&lock, "7");
    until_queued(cluster, database.name(), 1).await;
    run(&mut user, &format!("ALTER ROLE {} NOLOGIN", role.quoted())).await;
    let others = format!(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = '{}' AND pid NOT IN
            (SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted)",
        role.as_str()
    );
    text(&mut user, &others).await;
    // More failed checks than the client tolerates without a reply.
    let refused = format!("role \"{}\" is not permitted to log in", role.as_str());
    let looks =
        2 * usize::try_from(LIVENESS.lost_after.as_millis() / LIVENESS.confirm_every.as_millis()).unwrap();
    until("many looks were refused", async || cluster.log().matches(&refused).count() >= looks).await;
    assert!(!waiting.is_finished(), "{:?}", waiting.await);
    guard.release().await.unwrap();
    waiting.await.unwrap().unwrap().release().await.unwrap();
}
