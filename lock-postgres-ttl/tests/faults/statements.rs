//! Renewal, purge, tokens and the heap, statement by statement.

use std::time::Duration;

use leasehold_api::LockExt as _;
use leasehold_engine::Backend as _;
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};
use test_bounds::Bound;
use test_servers::{Cluster, ClusterOptions};
use test_stores::windows;

use crate::sql::LEASES;
use crate::support::{
    Came, adopt, config, connection, expire, give_out, holder, installed, key, release, renew, renew_early,
    renew_many, request, take, text, token_of,
};

const SHORT: Duration = Duration::from_millis(400);

/// Runs `renewing`, which waits for the row's lock until the lease of `k` has ended. Returns its output and whether
/// the lease is live.
async fn after_waiting<F: Future + Send + 'static>(renewing: fn(PgConnection) -> F) -> (F::Output, bool)
where
    F::Output: Send,
{
    // Long enough for the renewal to start before the lease ends, even on a busy machine.
    const LEASE: Duration = Duration::from_secs(3);
    let database = installed().await;
    let (mut store, mut user) = (connection(&database).await, connection(&database).await);
    store.execute("SET lock_timeout = 0").await.unwrap();
    assert_eq!(take(&mut store, LEASES.grant_one, "k", holder(1), LEASE).await, Came::Rows(1));
    // Marks the row as given out, so that it can be adopted. Renewals ignore the mark.
    store.execute("UPDATE leasehold.lease SET owner = NULL").await.unwrap();
    // Locks the row without a change, because a plain UPDATE rechecks only changed rows.
    let mut tx = user.begin().await.unwrap();
    tx.execute("SELECT 1 FROM leasehold.lease WHERE key = 'k' FOR UPDATE").await.unwrap();
    let renewing = tokio::spawn(renewing(store));
    tokio::time::sleep(LEASE + Duration::from_millis(100)).await;
    assert!(!renewing.is_finished());
    tx.commit().await.unwrap();
    let answer = renewing.await.unwrap();
    let live = "SELECT expires_at > clock_timestamp() FROM leasehold.lease WHERE key = 'k'";
    (answer, sqlx::query_scalar(live).fetch_one(&mut user).await.unwrap())
}

#[tokio::test]
async fn a_renewal_that_waited_does_not_revive_an_ended_lease() {
    let renewing = |mut store| async move { renew(&mut store, LEASES.renew, "k", holder(1)).await };
    assert_eq!(after_waiting(renewing).await, (Came::Rows(0), false));
}

#[tokio::test]
async fn a_hold_whose_lease_ended_during_the_wait_is_not_given_out() {
    let giving_out = |mut store| async move { give_out(&mut store, "k", holder(1), SHORT).await };
    assert_eq!(after_waiting(giving_out).await, (Came::Rows(0), false));
}

#[tokio::test]
async fn an_adoption_that_waited_does_not_revive_an_ended_lease() {
    let adopting = |mut store| async move {
        let given = (holder(1), token_of(&mut store, "k").await);
        adopt(&mut store, LEASES.adopt.unwrap(), "k", given, holder(2)).await
    };
    assert_eq!(after_waiting(adopting).await, (Came::Rows(0), false));
}

#[tokio::test]
async fn a_renewal_of_many_that_waited_longer_than_it_may_fails_as_a_whole() {
    // Fails with `invalid_text_representation`, after which the store uses its other statement.
    let renewing = |mut store| async move { renew_early(&mut store, &["k"], holder(1)).await };
    assert_eq!(after_waiting(renewing).await, (Err("22P02".to_owned()), false));
}

#[tokio::test]
async fn mutant_a_renewal_that_does_not_look_again_revives_it() {
    let renewing = |mut store| async move {
        let original = "WHEN l.expires_at + interval '300 milliseconds' <";
        let mutant = LEASES.renew_early.unwrap().replace(original, "WHEN l.expires_at + interval '1 hour' <");
        assert_ne!(mutant, LEASES.renew_early.unwrap());
        renew_many(&mut store, &mutant, &["k"], holder(1)).await
    };
    assert_eq!(after_waiting(renewing).await, (Ok(1), true));
    let renewing = |mut store| async move {
        let mutant = "\
UPDATE {schema}.lease l SET expires_at = clock_timestamp() + $3::bigint * interval '1 microsecond'
FROM unnest($1::text[], $2::text[]) AS r (key, holder)
WHERE l.key = r.key AND l.holder = r.holder AND NOT l.released AND l.expires_at > clock_timestamp()
RETURNING l.key";
        renew(&mut store, mutant, "k", holder(1)).await
    };
    assert_eq!(after_waiting(renewing).await, (Came::Rows(1), true));
}

#[tokio::test]
async fn what_ends_just_now_is_not_renewed_early() {
    let database = installed().await;
    let mut store = connection(&database).await;
    for (k, ttl) in [("a", 60_000), ("b", 200), ("c", 60_000)] {
        let taken = take(&mut store, LEASES.grant_one, k, holder(1), Duration::from_millis(ttl)).await;
        assert_eq!(taken, Came::Rows(1));
    }
    assert_eq!(renew_early(&mut store, &["a", "b", "c"], holder(1)).await, Ok(2));
    assert_eq!(renew_early(&mut store, &["a", "c"], holder(2)).await, Ok(0), "somebody else's");
    assert_eq!(release(&mut store, "a", holder(1)).await, Came::Rows(1));
    assert_eq!(renew_early(&mut store, &["a", "c"], holder(1)).await, Ok(1), "released");
}

#[tokio::test]
async fn tokens_grow_across_a_purge() {
    let database = installed().await;
    let backend = config(&database).backend().await.unwrap();
    let (mut store, mut other) = (connection(&database).await, connection(&database).await);
    let mut last = 0;
    for n in 0..5 {
        assert_eq!(take(&mut store, LEASES.grant_one, "k", holder(n), SHORT).await, Came::Rows(1));
        let token = token_of(&mut store, "k").await;
        assert!(token > last, "{token} after {last}");
        last = token;
        expire(&mut other, "k", "2 hours").await;
        assert_eq!(backend.purge(Duration::ZERO).await.unwrap(), 1);
    }
}

#[tokio::test]
async fn a_purge_spares_what_is_young_cooling_live_or_set_by_an_operator() {
    let database = installed().await;
    let backend = config(&database).backend().await.unwrap();
    let mut store = connection(&database).await;
    for k in ["young", "cooling", "live", "window", "old"] {
        assert_eq!(
            take(&mut store, LEASES.grant_one, k, holder(1), Duration::from_secs(60)).await,
            Came::Rows(1)
        );
    }
    expire(&mut store, "young", "59 minutes").await;
    for k in ["cooling", "window", "old"] {
        expire(&mut store, k, "61 minutes").await;
    }
    store.execute("UPDATE leasehold.lease SET cooldown_us = 7200000000 WHERE key = 'cooling'").await.unwrap();
    store.execute("UPDATE leasehold.lease SET window_us = 1 WHERE key = 'window'").await.unwrap();
    assert_eq!(backend.purge(Duration::ZERO).await.unwrap(), 1, "an hour at least, whatever is asked for");
    let left: Vec<String> = sqlx::query_scalar("SELECT key FROM leasehold.lease ORDER BY key")
        .fetch_all(&mut store)
        .await
        .unwrap();
    assert_eq!(left, ["cooling", "live", "window", "young"]);
}

#[tokio::test]
async fn a_purge_does_not_wait_for_or_remove_a_row_that_is_being_taken() {
    let database = installed().await;
    let backend = config(&database).backend().await.unwrap();
    let (mut store, mut taker) = (connection(&database).await, connection(&database).await);
    for k in ["a", "b"] {
        assert_eq!(take(&mut store, LEASES.grant_one, k, holder(1), SHORT).await, Came::Rows(1));
        expire(&mut store, k, "2 hours").await;
    }
    let mut tx = taker.begin().await.unwrap();
    assert_eq!(take(&mut tx, LEASES.grant_one, "a", holder(2), SHORT).await, Came::Rows(1));
    assert_eq!(backend.purge(Duration::ZERO).await.unwrap(), 1);
    tx.commit().await.unwrap();
    assert_eq!(backend.purge(Duration::ZERO).await.unwrap(), 0);
    let left: String =
        sqlx::query_scalar("SELECT holder FROM leasehold.lease").fetch_one(&mut store).await.unwrap();
    assert_eq!(left, holder(2).to_string());
}

#[tokio::test]
async fn updates_stay_on_their_page() {
    // A separate server, because transactions of other tests would keep old row versions.
    let cluster = Cluster::start(ClusterOptions::new());
    let database = cluster.fresh_database().await;
    let lock = config(&database).connections(1).connect().await.unwrap();
    let mut store = connection(&database).await;
    for round in 0..200 {
        let guards = lock.keys((0..5).map(|n| format!("k{n}"))).acquire().await.unwrap();
        if round % 10 == 0 {
            guards[0].renew().await.unwrap();
        }
        guards.release().await.unwrap();
    }
    // A session reports its statistics with a later statement, after a second.
    let counts = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE schemaname = 'leasehold' AND relname = 'lease'";
    let end = Bound::new(Duration::from_secs(60));
    loop {
        let (all, hot): (i64, i64) = sqlx::query_as(counts).fetch_one(&mut store).await.unwrap();
        if all >= 1_900 {
            assert!(hot * 100 >= all * 95, "{hot} of {all} updates were HOT");
            return;
        }
        end.check(format_args!("only {all} updates were reported"));
        // Runs a statement, which makes the session report.
        lock.key("k0").acquire().await.unwrap().release().await.unwrap();
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

#[tokio::test]
async fn batches_in_any_order_do_not_deadlock() {
    use leasehold_engine::{Attempt, Backend as _, HoldRef, Request};
    let database = installed().await;
    let mut tasks = Vec::new();
    for client in 0..6_u64 {
        let backend = config(&database).backend().await.unwrap();
        tasks.push(tokio::spawn(async move {
            for round in 0..40_u64 {
                let mut requests: Vec<Request> = (0..12_u64)
                    .map(|n| Request::new(key(&format!("k{n}")), holder(client * 100_000 + round * 100 + n)))
                    .collect();
                requests.iter_mut().for_each(|request| request.ttl = Some(Duration::from_secs(30)));
                if client % 2 == 0 {
                    requests.reverse();
                }
                let holds: Vec<HoldRef> = requests.iter().map(Request::hold).collect();
                let answers = backend.acquire(requests).await;
                let won = holds.into_iter().zip(answers);
                let won = won.filter(|(_, a)| matches!(a.as_ref().unwrap(), Attempt::Granted(_)));
                for answer in backend.release(won.map(|(hold, _)| hold).collect()).await {
                    assert!(answer.unwrap().was_held);
                }
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    let mut store = connection(&database).await;
    let deadlocks: i64 =
        sqlx::query_scalar("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
            .fetch_one(&mut store)
            .await
            .unwrap();
    assert_eq!(deadlocks, 0);
}

/// With more rows than one statement reads, a listing returns each hold once, ordered by key. A purge reaches the
/// last row.
#[tokio::test]
async fn a_listing_and_a_purge_go_over_many_pages() {
    let database = installed().await;
    let backend = config(&database).backend().await.unwrap();
    let mut user = connection(&database).await;
    let fill = "INSERT INTO leasehold.lease (key, holder, token, acquired_at, ttl_us, expires_at, released)
        SELECT 'k' || lpad(i::text, 5, '0'), '0-1', 1, now() - interval '2 days', 1,
            CASE WHEN i % 4000 = 0 THEN now() + interval '1 hour' ELSE now() - interval '1 day' END, i % 4000 <> 0
        FROM generate_series(1, 24000) i";
    sqlx::raw_sql(fill).execute(&mut user).await.unwrap();
    let admin = leasehold_engine::Backend::admin(&backend).unwrap();
    let keys = async |prefix: &str, limit: Option<usize>| {
        let mut query = leasehold_api::ListQuery::default();
        (query.prefix, query.limit) = (prefix.to_owned(), limit);
        let found = admin.list(&query).await.unwrap();
        found.iter().map(|info| info.key.as_str().to_owned()).collect::<Vec<_>>()
    };
    let all = ["k04000", "k08000", "k12000", "k16000", "k20000", "k24000"];
    // Each row at which a page of the list ends is held. With the prefix `k1` a page ends elsewhere.
    assert_eq!(keys("", None).await, all);
    assert_eq!(keys("k", Some(3)).await, all[..3]);
    assert_eq!(keys("k1", None).await, all[2..4]);
    assert_eq!(keys("k04000", None).await, all[..1]);
    assert_eq!(keys("l", None).await, [""; 0]);
    assert_eq!(admin.inspect(&key("k12000")).await.unwrap().holders.len(), 1);
    assert_eq!(admin.inspect(&key("k1200")).await.unwrap().holders.len(), 0);
    assert_eq!(backend.purge(Duration::from_secs(3600)).await.unwrap(), 24_000 - 6);
    assert_eq!(keys("", None).await, all);
}

#[tokio::test]
async fn a_release_ends_the_window_of_what_was_unused_and_no_other() {
    let database = installed().await;
    let backend = config(&database).backend().await.unwrap();
    let table = "leasehold.lease";
    windows::a_release_ends_the_window_of_what_was_unused_and_no_other(&backend, &database, table, request)
        .await;
}

/// A release of an ended lease still ends its unused window, if the key was not granted again since.
#[tokio::test]
async fn a_release_ends_the_window_of_what_was_unused_also_after_its_lease() {
    let database = installed().await;
    let backend = config(&database).backend().await.unwrap();
    let mut user = connection(&database).await;
    let ended = windows::windowed(&backend, request("k", 1), true).await;
    expire(&mut user, "k", "1 minute").await;
    let freed = backend.release(vec![ended]).await.remove(0).unwrap();
    assert!(!freed.was_held);
    let cooling = "SELECT count(*) FROM leasehold.lease WHERE cooldown_us IS NOT NULL";
    let cooling: i64 = sqlx::query_scalar(cooling).fetch_one(&mut user).await.unwrap();
    assert_eq!(cooling, 0);
}

/// Statements must not subtract infinite times, because servers before PostgreSQL 17 refuse that.
#[tokio::test]
async fn an_infinite_time_in_any_column_stops_nothing() {
    let database = installed().await;
    let backend = config(&database).backend().await.unwrap();
    let mut user = connection(&database).await;
    let times = ["-infinity", "infinity"];
    for (column, time) in
        ["acquired_at", "expires_at", "wake_until"].into_iter().flat_map(|of| times.map(|time| (of, time)))
    {
        user.execute("TRUNCATE leasehold.lease").await.unwrap();
        for (name, serial) in [("held", 1), ("released", 2)] {
            let mut asked = request(name, serial);
            asked.cooldown = Some(Duration::from_secs(60));
            let hold = asked.hold();
            backend.acquire(vec![asked]).await.remove(0).unwrap();
            if name == "released" {
                backend.release(vec![hold]).await.remove(0).unwrap();
            }
        }
        let set = AssertSqlSafe(format!("UPDATE leasehold.lease SET {column} = '{time}'"));
        assert_eq!(user.execute(set).await.unwrap().rows_affected(), 2);
        let asked =
            ["held", "released", "other"].into_iter().zip(10..).map(|(name, n)| request(name, n)).collect();
        for answer in backend.acquire(asked).await {
            answer.unwrap_or_else(|error| panic!("{column} = {time}: {error}"));
        }
        let query = leasehold_api::ListQuery::new().include_ended();
        let listed = backend.admin().unwrap().list(&query).await;
        assert_eq!(listed.unwrap_or_else(|error| panic!("{column} = {time}: {error}")).len(), 3);
        backend.purge(Duration::ZERO).await.unwrap_or_else(|error| panic!("{column} = {time}: {error}"));
    }
    for (column, time) in ["begun_at", "next_at"].into_iter().flat_map(|of| times.map(|time| (of, time))) {
        let under_way =
            "UPDATE leasehold.upkeep SET after = 'k', begun_at = now(), next_at = now() WHERE task = 'lease'";
        assert_eq!(user.execute(under_way).await.unwrap().rows_affected(), 1);
        let set =
            AssertSqlSafe(format!("UPDATE leasehold.upkeep SET {column} = '{time}' WHERE task = 'lease'"));
        user.execute(set).await.unwrap();
        let turn =
            sqlx::query(text(leasehold_postgres::upkeep::TAKE)).bind("lease").fetch_optional(&mut user).await;
        assert!(
            turn.unwrap_or_else(|error| panic!("{column} = {time}: {error}")).is_some(),
            "{column} = {time}"
        );
    }
}
