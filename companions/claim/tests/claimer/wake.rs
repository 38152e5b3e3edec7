//! Notifications between processes on a real server, and the statements of idle processes.
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::common::{Probe, until, within};
use crate::pg::{id, insert, number, pool, prepare, spec};
use leasehold_claim::group_number;
use leasehold_claim::sqlx::{PgPool, query, query_scalar};
use leasehold_claim::{ClaimRef, ClaimStore, Claimer, Outcome, PgClaims, Retention, RowKey, Take};
use test_servers::fresh_database;
use tokio::task::JoinHandle;
use tokio::time::sleep;

const NEVER: Duration = Duration::from_secs(36_000);

async fn take(claims: &PgClaims, rows: u32, lease: Duration) -> Vec<ClaimRef> {
    let taken = claims.take(&Take::up_to(rows).lease(lease)).await.unwrap();
    taken.claims.into_iter().map(|claimed| claimed.claim).collect()
}

async fn settle(claims: &PgClaims, all: &[ClaimRef], outcome: &Outcome) {
    let all: Vec<_> = all.iter().map(|claim| (claim.clone(), outcome.clone())).collect();
    for answer in claims.settle(&all).await.unwrap() {
        answer.unwrap();
    }
}

/// Starts a claimer that neither polls nor sweeps, so only announcements wake it.
async fn neighbour(url: &str) -> (Claimer, Arc<Probe>) {
    let store = Probe::of(PgClaims::new(pool(url, 2).await, spec().build().unwrap()));
    let claimer = Claimer::builder(store.clone()).ahead(0).poll(NEVER).sweep_every(NEVER).start().unwrap();
    (claimer, store)
}

/// Starts a worker that finishes `rows` rows and returns their ids. Returns when the worker sleeps.
async fn waiting(claimer: &Claimer, store: &Probe, rows: usize) -> JoinHandle<Vec<i64>> {
    let looks = store.pendings.load(Ordering::SeqCst);
    let claimer = claimer.clone();
    let waiting = tokio::spawn(async move {
        let mut ids = Vec::new();
        for _ in 0..rows {
            let claim = claimer.next().await.unwrap();
            ids.push(id(&claim));
            claim.done().await.unwrap();
        }
        ids.sort_unstable();
        ids
    });
    until("it listens, and has looked", || {
        store.pendings.load(Ordering::SeqCst) > looks && store.log.lock().unwrap().contains(&"listening")
    })
    .await;
    waiting
}

/// Rows that are put back, requeued or swept wake idle processes without an announcement by the application.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_that_come_back_wake_other_processes() {
    let database = fresh_database().await;
    let admin = prepare(database.url()).await;
    insert(&admin, 7).await;
    let claims = PgClaims::new(admin.clone(), spec().build().unwrap());
    // All rows are claimed first, so the other process sees a row only after it comes back.
    let taken = take(&claims, 7, NEVER / 2).await;
    assert_eq!(taken.len(), 7);
    let (claimer, store) = neighbour(database.url()).await;
    until("it knows when the first lease ends", || store.sweeps.load(Ordering::SeqCst) > 0).await;
    let retry = Outcome::Retry { error: None, after: Duration::ZERO };

    for (at, outcome) in [Outcome::PutBack, retry, Outcome::Snooze(Duration::ZERO)].iter().enumerate() {
        let neighbour = waiting(&claimer, &store, 1).await;
        settle(&claims, &taken[at..=at], outcome).await;
        let back = within("one that came back", neighbour).await.unwrap();
        assert_eq!(back, [i64::try_from(at).unwrap() + 1], "{outcome:?}");
    }

    // Several rows at once.
    let neighbour = waiting(&claimer, &store, 2).await;
    settle(&claims, &taken[3..5], &Outcome::PutBack).await;
    assert_eq!(within("both", neighbour).await.unwrap(), [4, 5]);

    // A requeued row.
    let neighbour = waiting(&claimer, &store, 1).await;
    let use_up = "UPDATE request SET status = 'exhausted', attempts_left = 0, owner = NULL WHERE id = 6";
    query(use_up).execute(&admin).await.unwrap();
    assert_eq!(claims.requeue(&[RowKey::new(6)], 1).await.unwrap(), 1);
    assert_eq!(within("the one that was topped up", neighbour).await.unwrap(), [6]);

    // A swept row, by a claimer without workers.
    let neighbour = waiting(&claimer, &store, 1).await;
    query("UPDATE request SET lease_until = now() WHERE id = 7").execute(&admin).await.unwrap();
    let sweeper = Claimer::builder(Arc::new(claims)).start().unwrap();
    assert_eq!(within("the one that was swept", neighbour).await.unwrap(), [7]);
    drop(sweeper);
    within("closing", claimer.close()).await.unwrap();
}

/// The trigger of the migration notifies for plain SQL on any connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_insert_by_plain_sql_wakes_workers() {
    let database = fresh_database().await;
    let admin = prepare(database.url()).await;
    spec().build().unwrap().migration().apply(&admin).await.unwrap();
    let (claimer, store) = neighbour(database.url()).await;
    let mut psql = database.connect().await;
    for id in 1..=3 {
        let neighbour = waiting(&claimer, &store, 1).await;
        query("INSERT INTO request DEFAULT VALUES").execute(&mut psql).await.unwrap();
        assert_eq!(within("the row, without a poll", neighbour).await.unwrap(), [id]);
    }
    within("closing", claimer.close()).await.unwrap();
}

/// The announcement of a returned row does not prove that the application announces new work.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_new_work_counts_as_heard_of() {
    let database = fresh_database().await;
    let admin = prepare(database.url()).await;
    insert(&admin, 1).await;
    let claims = PgClaims::new(admin.clone(), spec().build().unwrap());
    let mut wake = claims.listen().await.unwrap();
    let taken = take(&claims, 1, Duration::from_secs(60)).await;
    settle(&claims, &taken, &Outcome::PutBack).await;
    within("the one that came back", wake.woken()).await.unwrap();
    assert!(!wake.announces());
    let mut connection = admin.acquire().await.unwrap();
    claims.notify(&mut connection).await.unwrap();
    within("new work", wake.woken()).await.unwrap();
    assert!(wake.announces());
    // A settlement as done wakes no listener.
    let taken = take(&claims, 1, Duration::from_secs(60)).await;
    settle(&claims, &taken, &Outcome::Done).await;
    assert!(tokio::time::timeout(Duration::from_millis(300), wake.woken()).await.is_err());
}

/// Returns the number of executions of prepared statements on the pool's only connection, except this query.
async fn statements(pool: &PgPool) -> i64 {
    let sql = "SELECT sum(generic_plans + custom_plans)::bigint FROM pg_prepared_statements \
               WHERE statement NOT LIKE '%pg_prepared_statements%'";
    query_scalar::<_, Option<i64>>(sql).fetch_one(pool).await.unwrap().unwrap_or(0)
}

/// An idle check is one statement, and so is an idle poll.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_check_is_one_statement() {
    let database = fresh_database().await;
    let admin = prepare(database.url()).await;
    insert(&admin, 2).await;
    let one = pool(database.url(), 1).await;
    let claims = PgClaims::new(one.clone(), spec().build().unwrap());
    let lease = Duration::from_secs(600);
    let taken = take(&claims, 1, lease).await;
    let before = statements(&one).await;
    for _ in 0..10 {
        let upkeep = claims.upkeep(100).await.unwrap();
        assert!(upkeep.next.is_some_and(|next| next > lease / 2 && next <= lease), "{upkeep:?}");
    }
    settle(&claims, &taken, &Outcome::Done).await;
    settle(&claims, &take(&claims, 1, lease).await, &Outcome::Done).await;
    let settled = statements(&one).await;
    assert!((13..=14).contains(&(settled - before)), "ten looks, a take and two ends: {}", settled - before);
    for _ in 0..10 {
        assert_eq!(claims.upkeep(100).await.unwrap(), leasehold_claim::Upkeep::default());
        assert!(!claims.pending(&Take::up_to(1)).await.unwrap());
    }
    assert_eq!(statements(&one).await - settled, 20);
}

/// While one process sweeps or purges, the others do not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_process_sweeps_and_purges_at_a_time() {
    let database = fresh_database().await;
    let admin = prepare(database.url()).await;
    query("ALTER TABLE request ADD settled_at timestamptz").execute(&admin).await.unwrap();
    insert(&admin, 2).await;
    let spec = spec().settled_at("settled_at").retention(Retention::KeepFor(Duration::from_secs(60))).build();
    let claims = PgClaims::new(admin.clone(), spec.unwrap());
    settle(&claims, &take(&claims, 1, Duration::from_secs(60)).await, &Outcome::Done).await;
    query("UPDATE request SET settled_at = now() - interval '2 min' WHERE id = 1")
        .execute(&admin)
        .await
        .unwrap();
    assert_eq!(take(&claims, 1, Duration::from_millis(1)).await.len(), 1);
    sleep(Duration::from_millis(20)).await;

    let turn = group_number(number(&admin, "SELECT 'request'::regclass::oid::bigint").await, "\0upkeep");
    let mut other = admin.begin().await.unwrap();
    query("SELECT pg_advisory_xact_lock($1)").bind(turn).execute(&mut *other).await.unwrap();
    let upkeep = claims.upkeep(10).await.unwrap();
    assert!(upkeep.swept.returned.is_empty(), "{upkeep:?}");
    assert_eq!(upkeep.next, Some(Duration::ZERO), "there is something to do, for whoever is at it");
    assert_eq!(claims.purge(10).await.unwrap(), 0);
    other.commit().await.unwrap();

    assert_eq!(claims.upkeep(10).await.unwrap().swept.returned, [RowKey::new(2)]);
    assert_eq!(claims.purge(10).await.unwrap(), 1);
    assert_eq!(number(&admin, "SELECT count(*) FROM request WHERE status = 'new'").await, 1);
    let locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' \
                 AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
    assert_eq!(number(&admin, locks).await, 0, "the turn is over");
}
