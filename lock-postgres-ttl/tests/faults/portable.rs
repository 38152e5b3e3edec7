//! A lease that leaves one process as a text and is released by another one.

use std::env;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use crate::LONG;
use leasehold_api::{ErrorKind, Lock as _, LockExt as _, PortableHold};
use leasehold_engine::{Attempt, Backend as _, token};
use sqlx::{Connection as _, Executor as _, PgConnection};
use test_bounds::within;
use test_servers::{Cluster, Proxy};
use tokio::task::JoinSet;

use crate::network::two_ways;
use crate::sql::{FENCE, LEASES};
use crate::support::{
    Came, adopt, config_of, connection, give_out, holder, installed, key, micros, request, take, text,
    token_of,
};

/// The database of the first process.
const URL: &str = "LEASEHOLD_FIRST_PROCESS_URL";

/// The word before the text in the output of the first process.
const GIVEN_OUT: &str = "given out: ";

/// Does nothing unless [`a_hold_outlives_its_first_process`] runs it.
#[tokio::test]
async fn first_process() {
    let Ok(url) = env::var(URL) else { return };
    let lock = config_of(&url).connect().await.unwrap();
    let portable = lock.key("k").acquire().await.unwrap().into_ref(LONG).await.unwrap();
    println!("\n{GIVEN_OUT}{}", portable.expose());
    // Without a close, as a request's process that is stopped.
    std::process::exit(7);
}

#[tokio::test]
async fn a_hold_outlives_its_first_process() {
    let database = installed().await;
    let second = config_of(database.url()).connect().await.unwrap();
    let mut first = Command::new(env::current_exe().unwrap());
    first.args(["--exact", "portable::first_process", "--nocapture"]).env(URL, database.url());
    let ended = tokio::task::spawn_blocking(move || first.output().unwrap());
    let ended = within(LONG, "the first process hangs", ended).await.unwrap();
    assert_eq!(ended.status.code(), Some(7), "{ended:?}");
    let output = String::from_utf8(ended.stdout).unwrap();
    let portable = output.lines().find_map(|line| line.strip_prefix(GIVEN_OUT)).unwrap();
    let portable: PortableHold = portable.parse().unwrap();
    assert!(second.key("k").try_acquire().await.unwrap().is_none(), "the lease lasts");
    let has_owner = async || {
        let info = second.admin().unwrap().inspect(&key("k")).await.unwrap();
        info.holder().unwrap().owner.is_some()
    };
    assert!(!has_owner().await, "an operator sees that it is on its way");
    let guard = second.adopt(portable.expose()).await.unwrap();
    assert!(has_owner().await);
    assert!(guard.token() > Some(portable.token()));
    assert_eq!(second.adopt(portable.expose()).await.unwrap_err().kind(), ErrorKind::Lost);
    guard.release().await.unwrap();
    second.key("k").try_acquire().await.unwrap().unwrap().release().await.unwrap();
}

#[tokio::test]
async fn giving_out_and_adopting_take_one_statement_each() {
    let (proxy, _database, behind, direct) = two_ways().await;
    let mut trips = Vec::new();
    for key in ["a", "b", "c"] {
        let guard = behind.key(key).ttl(LONG).acquire().await.unwrap();
        let before = proxy.traffic().round_trips;
        let portable = guard.into_ref(LONG).await.unwrap();
        let given_out = proxy.traffic().round_trips - before;
        let before = proxy.traffic().round_trips;
        let guard = behind.adopt(portable.expose()).await.unwrap();
        trips.push((given_out, proxy.traffic().round_trips - before));
        guard.release().await.unwrap();
        direct.key(key).try_acquire().await.unwrap().unwrap().release().await.unwrap();
    }
    // Prepares each statement first.
    assert_eq!(trips[1..], [(1, 1), (1, 1)]);
}

/// The session that had no answer is ended in the background, which must not release the hold.
#[tokio::test]
async fn an_adoption_whose_answer_is_lost_is_repeated_and_stays_one_grant() {
    let (proxy, database, behind, direct) = two_ways().await;
    let mut user = connection(&database).await;
    let portable = direct.key("k").acquire().await.unwrap().into_ref(LONG).await.unwrap();
    proxy.drop_next_reply_with("UPDATE 1");
    let guard = within(LONG, "not adopted", behind.adopt(portable.expose())).await.unwrap();
    assert_eq!(proxy.traffic().dropped_replies, 1, "it was carried out, and nobody heard of it");
    let drawn = "SELECT last_value FROM leasehold.token";
    let drawn: i64 = sqlx::query_scalar(drawn).fetch_one(&mut user).await.unwrap();
    assert_eq!((drawn, token_of(&mut user, "k").await), (drawn, drawn), "one number was drawn for it");
    // Longer than the interval of the background's work.
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    guard.release().await.expect("held until now");
    direct.key("k").try_acquire().await.unwrap().unwrap().release().await.unwrap();
}

#[tokio::test]
async fn an_adoption_waits_for_the_end_of_a_fenced_transaction() {
    let database = installed().await;
    let (mut store, mut user) = (connection(&database).await, connection(&database).await);
    for (n, statement) in [(1, LEASES.adopt.unwrap().to_owned()), (3, walking())] {
        let key = format!("k{n}");
        assert_eq!(take(&mut store, LEASES.grant_one, &key, holder(n), LONG).await, Came::Rows(1));
        let given = (holder(n), token_of(&mut store, &key).await);
        assert_eq!(give_out(&mut store, &key, holder(n), LONG).await, Came::Rows(1));
        let mut tx = user.begin().await.unwrap();
        let fence = sqlx::query(text(FENCE)).bind(&key).bind(holder(n).to_string()).bind(given.1);
        fence.execute(&mut *tx).await.unwrap();
        let came = adopt(&mut store, &statement, &key, given, holder(n + 1)).await;
        assert_eq!(came, if n == 1 { Came::Blocked } else { Came::Rows(1) }, "{statement}");
        tx.commit().await.unwrap();
        // The same request again, and another one.
        for (to, rows) in [(n + 1, 1), (n + 1, 1), (n, 0)] {
            let came = adopt(&mut store, LEASES.adopt.unwrap(), &key, given, holder(to)).await;
            assert_eq!(came, Came::Rows(rows), "{to}");
        }
    }
}

/// Returns the rest of the lease of `k` in seconds, its TTL in seconds, and whether its row has an owner.
async fn lease(on: &mut PgConnection) -> (i64, i64, bool) {
    let row = "SELECT extract(epoch FROM expires_at - clock_timestamp())::bigint, ttl_us / 1000000, owner IS NOT NULL
        FROM leasehold.lease WHERE key = 'k'";
    sqlx::query_as(row).fetch_one(on).await.unwrap()
}

#[tokio::test]
async fn an_adoption_that_arrives_again_never_shortens_the_lease() {
    const HOUR: Duration = Duration::from_secs(3600);
    let database = installed().await;
    let mut store = connection(&database).await;
    assert_eq!(take(&mut store, LEASES.grant_one, "k", holder(1), LONG).await, Came::Rows(1));
    let given = (holder(1), token_of(&mut store, "k").await);
    let again =
        async |store: &mut PgConnection| adopt(store, LEASES.adopt.unwrap(), "k", given, holder(2)).await;
    assert_eq!(again(&mut store).await, Came::Rows(0), "it was not given out");
    assert_eq!(give_out(&mut store, "k", holder(1), LONG).await, Came::Rows(1));
    assert_eq!(again(&mut store).await, Came::Rows(1));
    let token = token_of(&mut store, "k").await;
    let renew = sqlx::query(text(LEASES.renew)).bind(vec!["k"]).bind(vec![holder(2).to_string()]);
    renew.bind(micros(HOUR)).execute(&mut store).await.unwrap();
    assert_eq!(again(&mut store).await, Came::Rows(1), "the same grant");
    assert_eq!(token_of(&mut store, "k").await, token);
    let (left, ttl, has_owner) = lease(&mut store).await;
    // Half an hour for a machine that stands still.
    assert!(left > 1800 && ttl == 3600 && has_owner, "{left} {ttl} {has_owner}");
    // A wrong statement, which forgets the renewal.
    let longest = "greatest(CASE WHEN l.holder = $4::text THEN l.expires_at END,";
    let mutant = LEASES.adopt.unwrap().replace(longest, "greatest(NULL,");
    assert_ne!(mutant, LEASES.adopt.unwrap());
    assert_eq!(adopt(&mut store, &mutant, "k", given, holder(2)).await, Came::Rows(1));
    assert!(lease(&mut store).await.0 <= 30);
    // The same request after its hold has left again.
    assert_eq!(give_out(&mut store, "k", holder(2), Duration::from_secs(20)).await, Came::Rows(1));
    assert_eq!(again(&mut store).await, Came::Rows(0));
    let (left, ttl, has_owner) = lease(&mut store).await;
    assert!(left <= 20 && ttl == 20 && !has_owner, "{left} {ttl} {has_owner}");
}

/// Each adoption of a locked row costs the whole `lock_timeout`, during which its session renews nothing.
#[tokio::test]
async fn of_many_adoptions_of_locked_rows_only_a_few_are_tried() {
    let database = Cluster::shared().fresh_database().await;
    let proxy = Proxy::start(Cluster::shared().address()).await;
    let behind = config_of(&proxy.url(database.url())).connections(1).backend().await.unwrap();
    let behind = Arc::new(behind);
    let (mut store, mut user) = (connection(&database).await, connection(&database).await);
    let mut requests = Vec::new();
    for n in 0..12 {
        let name = format!("k{n}");
        assert_eq!(take(&mut store, LEASES.grant_one, &name, holder(n), LONG).await, Came::Rows(1));
        assert_eq!(give_out(&mut store, &name, holder(n), LONG).await, Came::Rows(1));
        let mut given = request(&name, n).hold();
        given.token = token::from_store_number(token_of(&mut store, &name).await.unsigned_abs());
        requests.push((request(&name, n + 100), given));
    }
    let mut tx = user.begin().await.unwrap();
    tx.execute("SELECT 1 FROM leasehold.lease FOR UPDATE").await.unwrap();
    let before = proxy.traffic().round_trips;
    let mut adopting = JoinSet::new();
    for (request, given) in requests {
        let behind = Arc::clone(&behind);
        adopting.spawn(async move { behind.adopt(request, given).await });
    }
    for answer in adopting.join_all().await {
        let is_refused =
            matches!(&answer, Ok(Attempt::Refused(error)) if error.kind() == ErrorKind::Unavailable);
        assert!(is_refused, "{answer:?}");
    }
    let trips = proxy.traffic().round_trips - before;
    assert!((4..10).contains(&trips), "{trips} round trips");
    tx.rollback().await.unwrap();
}

/// Returns a wrong statement, whose lock does not wait for a fence.
fn walking() -> String {
    let original = LEASES.adopt.unwrap();
    let statement = original.replace("FOR UPDATE", "FOR NO KEY UPDATE");
    assert_ne!(statement, original);
    statement
}
