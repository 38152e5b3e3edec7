//! The table of lock modes: statements that a fenced transaction admits or blocks, cell by cell.

use std::pin::pin;
use std::time::Duration;

use crate::LONG;
use leasehold_api::{ErrorKind, Lock as _, LockExt as _, LockGuard};
use leasehold_engine::{Attempt, Backend as _, Request};
use leasehold_postgres_ttl::{LeaseFence, LeaseGuardExt as _, PgConfig, TtlConfig};
use sqlx::{Connection, Executor, PgConnection};
use test_servers::{Cluster, Database};

use crate::sql::{FENCE, LEASES};
use crate::support::{
    Came, config, connection, expire, holder, installed, is_pending, key, release, renew, renew_early, take,
    take_all, take_free, text, token_of,
};

/// Starts a transaction with `fence` on holder 1's lease of `key`.
async fn fenced<'c>(user: &'c mut PgConnection, fence: &str, key: &str) -> sqlx::PgTransaction<'c> {
    let mut observer_token = 0;
    if fence.contains("$3") {
        observer_token = token_of(user, key).await;
    }
    let mut tx = user.begin().await.unwrap();
    let query = sqlx::query(text(fence)).bind(key).bind(holder(1).to_string());
    let query = if fence.contains("$3") { query.bind(observer_token) } else { query };
    let rows = query.fetch_all(&mut *tx).await.unwrap();
    assert_eq!(rows.len(), 1);
    tx
}

async fn database_with_lease(key: &str) -> (Database, PgConnection, PgConnection) {
    let database = installed().await;
    let (mut store, user) = (connection(&database).await, connection(&database).await);
    assert_eq!(take(&mut store, LEASES.grant_one, key, holder(1), LONG).await, Came::Rows(1));
    (database, store, user)
}

#[tokio::test]
async fn a_fence_lets_renewals_releases_and_tries_pass() {
    let (_database, mut store, mut user) = database_with_lease("a").await;
    let tx = fenced(&mut user, FENCE, "a").await;
    assert_eq!(renew(&mut store, LEASES.renew, "a", holder(1)).await, Came::Rows(1));
    for alone in [LEASES.grant_one, LEASES.retake_one] {
        assert_eq!(take(&mut store, alone, "a", holder(2), LONG).await, Came::Rows(0));
    }
    // A try batched with a fenced live lease returns at once and grants the other keys.
    let granted = take_all(&mut store, LEASES.grant, &["a", "b", "c"], holder(2)).await;
    assert_eq!(granted.unwrap(), ["b", "c"]);
    expire(&mut store, "b", "1 s").await;
    assert_eq!(take_free(&mut store, LEASES.grant_free, &["a", "b", "c"], holder(3)).await.unwrap(), [2]);
    assert_eq!(renew_early(&mut store, &["a"], holder(1)).await, Ok(1));
    assert_eq!(release(&mut store, "a", holder(1)).await, Came::Rows(1));
    // The released key stays pinned, so no other client gets it before the transaction ends.
    assert_eq!(take(&mut store, LEASES.grant_one, "a", holder(2), LONG).await, Came::Blocked);
    tx.commit().await.unwrap();
    assert_eq!(take(&mut store, LEASES.grant_one, "a", holder(2), LONG).await, Came::Rows(1));
}

#[tokio::test]
async fn a_fence_holds_up_the_takeover_of_an_ended_lease() {
    let (_database, mut store, mut user) = database_with_lease("a").await;
    let tx = fenced(&mut user, FENCE, "a").await;
    expire(&mut store, "a", "1 s").await;
    for alone in [LEASES.grant_one, LEASES.retake_one] {
        assert_eq!(take(&mut store, alone, "a", holder(2), LONG).await, Came::Blocked);
    }
    assert_eq!(take_all(&mut store, LEASES.grant, &["a", "b"], holder(2)).await, None, "blocked as a whole");
    assert_eq!(take_free(&mut store, LEASES.grant_free, &["a"], holder(2)).await, None);
    tx.commit().await.unwrap();
    assert_eq!(take(&mut store, LEASES.retake_one, "a", holder(2), LONG).await, Came::Rows(1));
}

#[tokio::test]
async fn a_takeover_that_skips_locked_rows_leaves_out_the_fenced_one() {
    let (_database, mut store, mut user) = database_with_lease("a").await;
    let tx = fenced(&mut user, FENCE, "a").await;
    expire(&mut store, "a", "1 s").await;
    let skipping = LEASES.grant.replace("{free}", LEASES.free).replace("{among}", LEASES.among);
    let granted = take_all(&mut store, &skipping, &["a", "b"], holder(2)).await;
    assert_eq!(granted.unwrap(), ["b"]);
    tx.rollback().await.unwrap();
    assert_eq!(take_all(&mut store, &skipping, &["a"], holder(2)).await.unwrap(), ["a"]);
}

#[tokio::test]
async fn mutant_a_takeover_that_does_not_write_the_key_walks_through_the_fence() {
    let (_database, mut store, mut user) = database_with_lease("a").await;
    let tx = fenced(&mut user, FENCE, "a").await;
    expire(&mut store, "a", "1 s").await;
    let mutant = LEASES.grant_one.replace("    key = excluded.key,\n", "");
    assert_ne!(mutant, LEASES.grant_one);
    assert_eq!(take(&mut store, &mutant, "a", holder(2), LONG).await, Came::Rows(1), "granted: no fence");
    tx.commit().await.unwrap();
}

#[tokio::test]
async fn mutant_a_takeover_that_does_not_lock_the_row_for_itself_walks_through_the_fence() {
    let (_database, mut store, mut user) = database_with_lease("a").await;
    let tx = fenced(&mut user, FENCE, "a").await;
    expire(&mut store, "a", "1 s").await;
    let unlocked = LEASES.grant_free.replace("FOR UPDATE", "OFFSET 0");
    let weaker = LEASES.grant_free.replace("FOR UPDATE", "FOR NO KEY UPDATE");
    // Unlike the conflict path of an INSERT, an UPDATE checks whether the key's value changes.
    let writes_the_key = unlocked.replace("SET\n    holder", "SET\n    key = s.key,\n    holder");
    assert!(unlocked != LEASES.grant_free && weaker != LEASES.grant_free && writes_the_key != unlocked);
    for mutant in [unlocked, weaker, writes_the_key] {
        let granted = take_free(&mut store, &mutant, &["a"], holder(2)).await;
        assert_eq!(granted.unwrap(), [1], "granted: no fence");
        expire(&mut store, "a", "1 s").await;
    }
    let mutant = LEASES.retake_one.replace("FOR UPDATE", "FOR NO KEY UPDATE");
    assert_eq!(take(&mut store, &mutant, "a", holder(2), LONG).await, Came::Rows(1), "granted: no fence");
    tx.commit().await.unwrap();
}

#[tokio::test]
async fn mutant_a_fence_by_share_lock_blocks_the_holder_itself() {
    let (_database, mut store, mut user) = database_with_lease("a").await;
    let mutant = "SELECT 1 FROM leasehold.lease WHERE key = $1 AND holder = $2 FOR SHARE";
    let tx = fenced(&mut user, mutant, "a").await;
    assert_eq!(renew(&mut store, LEASES.renew, "a", holder(1)).await, Came::Blocked);
    assert_eq!(release(&mut store, "a", holder(1)).await, Came::Blocked);
    tx.rollback().await.unwrap();
}

#[tokio::test]
async fn a_stale_fence_finds_nothing() {
    let database = installed().await;
    let (a, b) = (config(&database).connect().await.unwrap(), config(&database).connect().await.unwrap());
    let mut user = connection(&database).await;
    let old = a.key("k").acquire().await.unwrap();
    expire(&mut user, "k", "1 s").await;
    let new = b.key("k").acquire().await.unwrap();
    assert!(new.token() > old.token());
    let mut tx = user.begin().await.unwrap();
    assert_eq!(old.fence(&mut tx).await.unwrap_err().kind(), ErrorKind::Lost);
    new.fence(&mut tx).await.unwrap();
    tx.rollback().await.unwrap();
    new.release().await.unwrap();
}

#[tokio::test]
async fn commits_while_held_and_rolls_back_when_lost() {
    let database = installed().await;
    let lock = config(&database).connect().await.unwrap();
    let mut user = connection(&database).await;
    user.execute("CREATE TABLE ledger (n int)").await.unwrap();
    let count = "SELECT count(*) FROM ledger";

    let guard = lock.key("k").acquire().await.unwrap();
    let mut tx = user.begin().await.unwrap();
    tx.execute("INSERT INTO ledger VALUES (1)").await.unwrap();
    guard.commit(tx).await.unwrap();
    // A second transaction under the same lock. The first one's commit is final.
    let mut tx = user.begin().await.unwrap();
    tx.execute("INSERT INTO ledger VALUES (2)").await.unwrap();
    guard.commit(tx).await.unwrap();
    let rows: i64 = sqlx::query_scalar(count).fetch_one(&mut user).await.unwrap();
    assert_eq!(rows, 2);

    let mut tx = user.begin().await.unwrap();
    tx.execute("INSERT INTO ledger VALUES (3)").await.unwrap();
    assert!(lock.admin().unwrap().force_release(guard.key(), guard.holder()).await.unwrap());
    assert_eq!(guard.commit(tx).await.unwrap_err().kind(), ErrorKind::Lost);
    let rows: i64 = sqlx::query_scalar(count).fetch_one(&mut user).await.unwrap();
    assert_eq!(rows, 2, "rolled back");
}

#[tokio::test]
async fn a_commit_that_the_server_refuses_is_told_as_such() {
    let database = installed().await;
    let lock = config(&database).connect().await.unwrap();
    let mut user = connection(&database).await;
    user.execute("CREATE TABLE ledger (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)").await.unwrap();
    let guard = lock.key("k").acquire().await.unwrap();
    let mut tx = user.begin().await.unwrap();
    tx.execute("INSERT INTO ledger VALUES (1), (1)").await.unwrap();
    let error = guard.commit(tx).await.unwrap_err();
    assert!(![ErrorKind::OutcomeUnknown, ErrorKind::Lost].contains(&error.kind()), "{error}");
    assert!(error.to_string().contains("23505"), "{error}");
    guard.release().await.unwrap();
}

#[tokio::test]
async fn a_snapshot_that_may_be_too_old_is_refused() {
    let database = installed().await;
    let lock = config(&database).connect().await.unwrap();
    let mut user = connection(&database).await;
    let guard = lock.key("k").acquire().await.unwrap();
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        for renewed in [false, true] {
            let begin = sqlx::AssertSqlSafe(format!("BEGIN ISOLATION LEVEL {level}"));
            let mut tx = user.begin_with(begin).await.unwrap();
            tx.execute("SELECT 1 FROM leasehold.version").await.unwrap();
            if renewed {
                guard.renew().await.unwrap();
            }
            let error = guard.fence(&mut tx).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidOption, "{level} {renewed}: {error}");
            assert!(error.to_string().contains("READ COMMITTED"), "{error}");
            tx.rollback().await.unwrap();
        }
    }
    guard.release().await.unwrap();
}

#[tokio::test]
async fn a_pinned_key_reads_held_and_does_not_hold_up_its_neighbours() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let postgres = PgConfig::from_url(database.url()).unwrap().install_schema(true);
    let backend = TtlConfig::new(postgres.application_name("pinned")).backend().await.unwrap();
    let lock = config(&database).connect().await.unwrap();
    let mut user = connection(&database).await;
    let guard = lock.key("pinned").acquire().await.unwrap();
    let mut tx = user.begin().await.unwrap();
    guard.fence(&mut tx).await.unwrap();
    guard.release().await.unwrap();

    for round in 0..3 {
        let names = [format!("a{round}"), format!("b{round}"), "pinned".to_owned(), format!("z{round}")];
        let request = |(serial, name): (u64, &String)| {
            let mut request = Request::new(key(name), holder(serial));
            request.ttl = Some(LONG);
            request
        };
        let requests: Vec<_> = (100 * (round + 1)..).zip(&names).map(request).collect();
        let answers = backend.acquire(requests).await;
        let granted: Vec<bool> =
            answers.iter().map(|a| matches!(a.as_ref().unwrap(), Attempt::Granted(_))).collect();
        assert_eq!(granted, [true, true, false, true]);
        // The client waits for the pinned key once and then knows that it is pinned.
        let gave_up = "pinned ERROR:  canceling statement due to lock timeout";
        assert_eq!(cluster.log().matches(gave_up).count(), 1, "round {round}");
    }
    // A waiter is granted the key after the transaction ends.
    let waiting = tokio::spawn({
        let lock = config(&database).connect().await.unwrap();
        async move { lock.key("pinned").acquire().await.map(|guard| (lock, guard)) }
    });
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!waiting.is_finished());
    tx.commit().await.unwrap();
    let (_lock, guard) = waiting.await.unwrap().unwrap();
    guard.release().await.unwrap();
}

/// Passes the lease of the key `k` from `first` to another caller of the same client.
async fn passed_on(lock: &leasehold_engine::Engine, first: LockGuard) -> LockGuard {
    let stored = first.stored_holder();
    let mut next = pin!(lock.key("k").acquire());
    assert!(is_pending(next.as_mut()).await);
    first.release().await.unwrap();
    let next = next.await.unwrap();
    assert_eq!(next.stored_holder(), stored);
    next
}

#[tokio::test]
async fn the_handle_of_a_released_guard_does_not_fence_under_its_successor() {
    let database = installed().await;
    let backend = config(&database).backend().await.unwrap();
    let mut timing = backend.timing();
    // Less than the lease is valid without a renewal.
    timing.handover_for = Duration::from_secs(15);
    let lock = leasehold_engine::Engine::builder(backend).timing(timing).start().unwrap();
    let mut user = connection(&database).await;
    let first = lock.key("k").acquire().await.unwrap();
    let handle = first.handle();
    let second = passed_on(&lock, first).await;
    assert!(second.token() > handle.token());
    assert!(
        handle.extension::<LeaseFence>().is_none(),
        "the row still has the holder and the number of its grant"
    );
    // The successor's fence compares what the server has.
    let mut tx = user.begin().await.unwrap();
    second.fence(&mut tx).await.unwrap();
    tx.rollback().await.unwrap();
    // Once fenced, the lease does not pass on, so the fence is of no use after the release.
    let fence = second.extension::<LeaseFence>().unwrap().clone();
    let stored = second.stored_holder();
    let mut third = pin!(lock.key("k").acquire());
    assert!(is_pending(third.as_mut()).await);
    second.release().await.unwrap();
    let third = third.await.unwrap();
    assert_ne!(third.stored_holder(), stored);
    let mut tx = user.begin().await.unwrap();
    assert_eq!(fence.fence(&mut tx).await.unwrap_err().kind(), ErrorKind::Lost);
    tx.rollback().await.unwrap();
    third.release().await.unwrap();
}
