//! The row store on a real server: causes that lock and unlock a row (`docs/hazards.md`).

use std::sync::Arc;
use std::time::Duration;

use crate::LONG;
use leasehold_api::{
    ErrorKind, HoldState, HolderId, ListQuery, Lock as _, LockExt as _, LockKey, LossReason, Validity,
};
use leasehold_engine::{Attempt, Backend as _, Engine, HoldRef, ReleaseReply, Request};
use leasehold_postgres::Pooler;
use leasehold_postgres_row::{PgConfig, RowConfig};
use sqlx::postgres::PgListener;
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};
use test_bounds::{Bound, within};
use test_servers::{Cluster, Database, PgBouncer, fresh_database};
use test_stores::windows;

/// Interval of confirmations that find a change soon. A hold is lost after 5 s, which a slow machine can need.
const SOON: Duration = Duration::from_secs(1);

fn config(database: &Database) -> RowConfig {
    RowConfig::new(PgConfig::from_url(database.url()).unwrap().install_schema(true))
}

async fn two_clients() -> (Database, Engine, Engine) {
    let database = fresh_database().await;
    let (a, b) = (config(&database).connect().await.unwrap(), config(&database).connect().await.unwrap());
    (database, a, b)
}

fn key(text: &str) -> LockKey {
    LockKey::new(text).unwrap()
}

fn request(name: &str, serial: u64) -> Request {
    Request::new(key(name), HolderId::from_parts(0xfeed, serial))
}

async fn wait_until_marked(database: &Database) {
    let mut user = database.connect().await;
    let marked = "SELECT coalesce(bool_or(wake_until > clock_timestamp()), false) FROM leasehold.mutex";
    let end = Bound::new(Duration::from_secs(60));
    while !sqlx::query_scalar::<_, bool>(marked).fetch_one(&mut user).await.unwrap() {
        end.check("nobody has noted that it waits");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn stays_shut_when_its_holder_dies_until_an_operator_opens_it() {
    let (database, _, b) = two_clients().await;
    let dying = config(&database).backend().await.unwrap();
    let mut asked = request("month-end", 1);
    asked.label = Some("closing of June".into());
    let holder = asked.holder;
    assert!(matches!(dying.acquire(vec![asked]).await.remove(0).unwrap(), Attempt::Granted(_)));
    // The client loses its connections and sends nothing more.
    dying.abort();
    drop(dying);
    let mut user = database.connect().await;
    let others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
    user.execute(others).await.unwrap();
    let waited = b.key("month-end").wait(Duration::from_secs(2)).acquire().await;
    let error = waited.unwrap_err();
    assert!([ErrorKind::Timeout, ErrorKind::OutcomeUnknown].contains(&error.kind()), "{error}");

    let admin = b.admin().unwrap();
    let info = admin.inspect(&key("month-end")).await.unwrap().holders.remove(0);
    assert_eq!((info.state, info.holder, info.expires_in), (HoldState::Held, Some(holder), None));
    assert_eq!(info.label.as_deref(), Some("closing of June"));
    assert!(info.owner.unwrap().contains(&std::process::id().to_string()));
    assert_eq!(admin.list(&ListQuery::new()).await.unwrap().len(), 1);

    let stranger = HolderId::from_parts(0xfeed, 2);
    assert!(!admin.force_release(&key("month-end"), stranger).await.unwrap(), "it names whom it breaks");
    assert!(admin.force_release(&key("month-end"), holder).await.unwrap());
    assert!(!admin.force_release(&key("month-end"), holder).await.unwrap());
    let guard = b.key("month-end").try_acquire().await.unwrap().unwrap();
    assert!(guard.token() > info.token);
    guard.release().await.unwrap();
}

#[tokio::test]
async fn a_release_says_what_it_found_and_wakes_who_waits() {
    let database = fresh_database().await;
    let backend = config(&database).connections(1).backend().await.unwrap();
    let mut user = database.connect().await;
    let mut heard = PgListener::connect(database.url()).await.unwrap();
    heard.listen(backend.channel()).await.unwrap();
    for together in [false, true] {
        let requests: Vec<Request> =
            (1..).zip(["held", "waited for", "of another"]).map(|(n, name)| request(name, n)).collect();
        let mut holds: Vec<HoldRef> = requests.iter().map(Request::hold).collect();
        for answer in backend.acquire(requests).await {
            assert!(matches!(answer.unwrap(), Attempt::Granted(_)));
        }
        holds[2].holder = HolderId::from_parts(0xfeed, 9);
        let marked = "UPDATE leasehold.mutex SET wake_until = clock_timestamp() + interval '1 minute'
            WHERE key = 'waited for'";
        user.execute(marked).await.unwrap();
        let mut freed = Vec::new();
        if together {
            freed = backend.release(holds).await;
        } else {
            for hold in holds {
                freed.extend(backend.release(vec![hold]).await);
            }
        }
        let said: Vec<ReleaseReply> = freed.into_iter().map(Result::unwrap).collect();
        assert_eq!(
            said,
            [ReleaseReply::new(true), ReleaseReply::new(true).waiters(true), ReleaseReply::new(false)]
        );
        let next = within(LONG, "nothing heard", heard.recv()).await;
        assert_eq!(next.unwrap().payload(), "fwaited for");
        let shut = sqlx::query_scalar("SELECT key::text FROM leasehold.mutex WHERE acquired");
        let shut: Vec<String> = shut.fetch_all(&mut user).await.unwrap();
        assert_eq!(shut, ["of another"]);
        assert!(backend.release(vec![request("of another", 3).hold()]).await.remove(0).unwrap().was_held);
        assert!(
            format!("{backend:?}").contains("held: 0"),
            "nothing is kept of what was released: {backend:?}"
        );
    }
    user.execute(AssertSqlSafe(format!("NOTIFY {}, 'the end'", backend.channel()))).await.unwrap();
    let last = within(LONG, "nothing heard", heard.recv()).await.unwrap();
    assert_eq!(last.payload(), "the end", "nobody else was woken");
}

#[tokio::test]
async fn a_holder_learns_of_a_row_opened_by_hand_when_it_confirms_next() {
    let database = fresh_database().await;
    let lock = config(&database).confirm(SOON).connect().await.unwrap();
    let guard = lock.key("k").acquire().await.unwrap();
    let mut user = database.connect().await;
    user.execute("UPDATE leasehold.mutex SET acquired = false").await.unwrap();
    let reason = within(LONG, "not lost", guard.lost()).await;
    assert_eq!(reason, LossReason::Gone);
    assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Lost);
}

#[tokio::test]
async fn a_holder_is_told_of_a_forced_release_at_once() {
    let database = fresh_database().await;
    let slow = config(&database).confirm(Duration::from_secs(60));
    let (a, b) = (slow.connect().await.unwrap(), slow.connect().await.unwrap());
    let guard = a.key("k").acquire().await.unwrap();
    assert!(b.admin().unwrap().force_release(guard.key(), guard.holder()).await.unwrap());
    let reason = within(LONG, "not told", guard.lost()).await;
    assert_eq!(reason, LossReason::ForcedRelease);
}

#[tokio::test]
async fn a_request_to_release_is_told_at_once_and_by_each_confirmation() {
    let database = fresh_database().await;
    let slow = config(&database).confirm(Duration::from_secs(60));
    let (a, b) = (slow.connect().await.unwrap(), slow.connect().await.unwrap());
    let guard = a.key("k").acquire().await.unwrap();
    assert!(b.admin().unwrap().ask(guard.key(), guard.holder()).await.unwrap());
    within(LONG, "not told", guard.asked()).await;
    guard.release().await.unwrap();
    // Requests whose notification was lost: one is found by the holder's query, the other by the next confirmation.
    let mut user = database.connect().await;
    for is_queried in [true, false] {
        let confirm = if is_queried { Duration::from_secs(60) } else { SOON };
        let lock = config(&database).confirm(confirm).connect().await.unwrap();
        let guard = lock.key("k").acquire().await.unwrap();
        user.execute("UPDATE leasehold.mutex SET asked = holder").await.unwrap();
        if is_queried {
            guard.confirm().await.unwrap();
        }
        within(LONG, "not told", guard.asked()).await;
        guard.release().await.unwrap();
    }
}

#[tokio::test]
async fn releasing_what_is_free_is_no_error_and_frees_nobody_else() {
    let database = fresh_database().await;
    let backend = config(&database).backend().await.unwrap();
    let (first, second) = (request("k", 1), request("k", 2));
    assert_eq!(backend.release(vec![first.hold()]).await.remove(0).unwrap(), ReleaseReply::new(false));
    assert!(matches!(backend.acquire(vec![first.clone()]).await.remove(0).unwrap(), Attempt::Granted(_)));
    assert_eq!(backend.release(vec![second.hold()]).await.remove(0).unwrap(), ReleaseReply::new(false));
    // The three are one statement. The repeated hold is released once, and both of its replies are `true`.
    let answers = backend.release(vec![first.hold(), second.hold(), first.hold()]).await;
    let held: Vec<bool> = answers.into_iter().map(|answer| answer.unwrap().was_held).collect();
    assert_eq!(held, [true, false, true]);
}

#[tokio::test]
async fn exactly_one_of_a_hundred_gets_it() {
    let database = fresh_database().await;
    let mut tasks = Vec::new();
    for client in 0..10_u64 {
        let backend = Arc::new(config(&database).backend().await.unwrap());
        for n in 0..10_u64 {
            let backend = Arc::clone(&backend);
            tasks.push(tokio::spawn(async move {
                matches!(
                    backend.acquire(vec![request("k", client * 10 + n)]).await.remove(0).unwrap(),
                    Attempt::Granted(_)
                )
            }));
        }
    }
    let mut winners = 0;
    for task in tasks {
        winners += u32::from(task.await.unwrap());
    }
    assert_eq!(winners, 1);
}

#[tokio::test]
async fn a_releaser_is_told_of_those_who_wait_but_not_of_itself() {
    let database = fresh_database().await;
    let backend = config(&database).backend().await.unwrap();
    let (first, mut second) = (request("k", 1), request("k", 2));
    second.waits = true;
    assert!(matches!(backend.acquire(vec![first.clone()]).await.remove(0).unwrap(), Attempt::Granted(_)));
    assert!(matches!(backend.acquire(vec![second.clone()]).await.remove(0).unwrap(), Attempt::Contended(_)));
    let told = backend.release(vec![first.hold()]).await.remove(0).unwrap();
    assert_eq!(told, ReleaseReply::new(true).waiters(true));
    assert!(matches!(backend.acquire(vec![second.clone()]).await.remove(0).unwrap(), Attempt::Granted(_)));
    let told = backend.release(vec![second.hold()]).await.remove(0).unwrap();
    assert_eq!(told, ReleaseReply::new(true), "its own mark is not somebody else's");
}

#[tokio::test]
async fn many_requests_for_one_key_travel_together() {
    let database = fresh_database().await;
    let backend = config(&database).connections(1).backend().await.unwrap();
    let calls = (0..20).map(|serial| backend.acquire(vec![request("k", serial), request("l", 100 + serial)]));
    let mut granted = 0;
    for answer in futures_of(calls).await.into_iter().flatten() {
        granted += u32::from(matches!(answer.unwrap(), Attempt::Granted(_)));
    }
    assert_eq!(granted, 2);
}

/// Polls all futures at once, so that their requests are batched.
async fn futures_of<F: Future>(all: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut all: Vec<_> = all.map(|future| (Box::pin(future), None)).collect();
    std::future::poll_fn(|cx| {
        for (future, output) in &mut all {
            if output.is_none()
                && let std::task::Poll::Ready(ready) = future.as_mut().poll(cx)
            {
                *output = Some(ready);
            }
        }
        if all.iter().all(|(_, output)| output.is_some()) {
            std::task::Poll::Ready(())
        } else {
            std::task::Poll::Pending
        }
    })
    .await;
    all.into_iter().filter_map(|(_, output)| output).collect()
}

#[tokio::test]
async fn works_where_every_transaction_may_reach_another_session() {
    let (database, direct, _) = two_clients().await;
    let postgres = PgConfig::from_url(database.url()).unwrap().pooler(Pooler::Transaction);
    let pooled = Arc::new(RowConfig::new(postgres).connect().await.unwrap());
    let guard = direct.key("k").acquire().await.unwrap();
    let waiter = Arc::clone(&pooled);
    let waiting = tokio::spawn(async move { waiter.key("k").acquire().await });
    wait_until_marked(&database).await;
    guard.release().await.unwrap();
    let guard = within(pooled.capabilities().handover, "not handed over", waiting).await.unwrap().unwrap();
    assert!(direct.key("k").try_acquire().await.unwrap().is_none());
    guard.release().await.unwrap();
}

#[tokio::test]
async fn works_behind_a_pooler_in_transaction_mode() {
    let (database, direct, _) = two_clients().await;
    let pooler = PgBouncer::transaction_mode(Cluster::shared());
    let pooled = RowConfig::new(PgConfig::from_url(&pooler.url(database.name())).unwrap());
    let (a, b) = (pooled.connect().await.unwrap(), Arc::new(pooled.connect().await.unwrap()));
    let guard = a.key("k").acquire().await.unwrap();
    assert!(b.key("k").try_acquire().await.unwrap().is_none());
    assert!(direct.key("k").try_acquire().await.unwrap().is_none());
    guard.confirm().await.unwrap();
    let token = guard.token();
    let waiter = Arc::clone(&b);
    let waiting = tokio::spawn(async move { waiter.key("k").acquire().await });
    wait_until_marked(&database).await;
    guard.release().await.unwrap();
    let guard = within(a.capabilities().handover, "not handed over", waiting).await.unwrap().unwrap();
    assert!(guard.token() > token, "{:?} after {token:?}", guard.token());
    assert!(a.key("k").try_acquire().await.unwrap().is_none());
    guard.release().await.unwrap();
    direct.key("k").try_acquire().await.unwrap().unwrap().release().await.unwrap();
}

#[tokio::test]
async fn a_row_that_an_operator_has_locked_holds_up_nobody_else() {
    let (database, lock, _) = two_clients().await;
    lock.key("locked").acquire().await.unwrap().release().await.unwrap();
    let mut user: PgConnection = database.connect().await;
    let mut tx = user.begin().await.unwrap();
    tx.execute("SELECT 1 FROM leasehold.mutex FOR SHARE").await.unwrap();
    let (stuck, free) = tokio::join!(lock.key("locked").try_acquire(), async {
        within(LONG, "held up", lock.key("free").try_acquire()).await
    });
    assert!(stuck.unwrap().is_none());
    free.unwrap().unwrap().release().await.unwrap();
    tx.commit().await.unwrap();
    lock.key("locked").acquire().await.unwrap().release().await.unwrap();
}

/// Statements must not subtract infinite times, because servers before PostgreSQL 17 refuse that.
#[tokio::test]
async fn an_infinite_time_in_any_column_stops_nothing() {
    let database = fresh_database().await;
    let backend = config(&database).backend().await.unwrap();
    let mut user = database.connect().await;
    let times = ["-infinity", "infinity"];
    for (column, time) in
        ["acquired_at", "released_at", "wake_until"].into_iter().flat_map(|of| times.map(|time| (of, time)))
    {
        user.execute("TRUNCATE leasehold.mutex").await.unwrap();
        let (mut shut, mut open) = (request("shut", 1), request("open", 2));
        (shut.cooldown, open.cooldown) = (Some(Duration::from_secs(60)), Some(Duration::from_secs(60)));
        backend.acquire(vec![shut.clone(), open.clone()]).await;
        backend.release(vec![open.hold()]).await;
        let set = AssertSqlSafe(format!("UPDATE leasehold.mutex SET {column} = '{time}'"));
        assert_eq!(user.execute(set).await.unwrap().rows_affected(), 2);
        for answer in backend.acquire(vec![request("shut", 3), request("open", 4), request("other", 5)]).await
        {
            answer.unwrap_or_else(|error| panic!("{column} = {time}: {error}"));
        }
        let listed = backend.admin().unwrap().list(&ListQuery::new().include_ended()).await;
        assert_eq!(listed.unwrap_or_else(|error| panic!("{column} = {time}: {error}")).len(), 3);
        backend.purge(Duration::ZERO).await.unwrap_or_else(|error| panic!("{column} = {time}: {error}"));
    }
}

#[tokio::test]
async fn a_purge_never_opens_a_row() {
    let database = fresh_database().await;
    let backend = config(&database).backend().await.unwrap();
    let (shut, open) = (request("shut", 1), request("open", 2));
    backend.acquire(vec![shut.clone(), open.clone()]).await;
    backend.release(vec![open.hold()]).await;
    let mut user = database.connect().await;
    let old = "UPDATE leasehold.mutex SET acquired_at = acquired_at - interval '1 year', released_at = released_at - interval '1 year'";
    user.execute(old).await.unwrap();
    assert_eq!(backend.purge(Duration::ZERO).await.unwrap(), 1);
    let left: Vec<String> =
        sqlx::query_scalar("SELECT key FROM leasehold.mutex").fetch_all(&mut user).await.unwrap();
    assert_eq!(left, ["shut"]);
}

/// Runs the statement printed in docs/configuration.md.
#[tokio::test]
async fn the_statement_for_operators_removes_what_a_purge_removes() {
    let page = include_str!("../../../docs/configuration.md");
    let begin = page.find("DELETE FROM leasehold.mutex").unwrap();
    let statement = page[begin..].split("```").next().unwrap();
    let database = fresh_database().await;
    let backend = config(&database).backend().await.unwrap();
    let names = ["cooling", "old", "shut", "windowed", "young"];
    let requests: Vec<_> = names.iter().zip(1..).map(|(name, serial)| request(name, serial)).collect();
    backend.acquire(requests.clone()).await;
    let open = requests.iter().zip(names).filter(|(_, name)| *name != "shut").map(|(one, _)| one.hold());
    backend.release(open.collect()).await;
    let mut user = database.connect().await;
    let times = "UPDATE leasehold.mutex SET acquired_at = acquired_at - interval '1 day', released_at = released_at - interval '1 day'
        WHERE key <> 'young'; UPDATE leasehold.mutex SET window_us = 1 WHERE key = 'windowed';
        UPDATE leasehold.mutex SET cooldown_us = 86400000000 WHERE key = 'cooling'";
    sqlx::raw_sql(times).execute(&mut user).await.unwrap();
    for removed in [1, 0] {
        assert_eq!(user.execute(statement).await.unwrap().rows_affected(), removed);
        assert_eq!(backend.purge(Duration::from_secs(3600)).await.unwrap(), 0, "nor would a purge");
    }
    let left: Vec<String> = sqlx::query_scalar("SELECT key FROM leasehold.mutex ORDER BY key")
        .fetch_all(&mut user)
        .await
        .unwrap();
    assert_eq!(left, ["cooling", "shut", "windowed", "young"]);
}

#[tokio::test]
async fn closing_opens_what_this_client_holds() {
    let (database, a, b) = two_clients().await;
    let guard = a.key("k").acquire().await.unwrap();
    a.close().await.unwrap();
    assert_eq!(guard.validity(), Validity::Lost);
    b.key("k").try_acquire().await.unwrap().unwrap().release().await.unwrap();
    // Close also releases a grant without a guard.
    let backend = config(&database).backend().await.unwrap();
    assert!(matches!(backend.acquire(vec![request("k", 1)]).await.remove(0).unwrap(), Attempt::Granted(_)));
    backend.close().await;
    b.key("k").try_acquire().await.unwrap().unwrap().release().await.unwrap();
    let Ok(Attempt::Refused(error)) = backend.acquire(vec![request("k", 2)]).await.remove(0) else {
        panic!("nothing was sent");
    };
    assert_eq!(error.kind(), ErrorKind::Closed);
}

#[tokio::test]
async fn a_release_ends_the_window_of_what_was_unused_and_no_other() {
    let database = fresh_database().await;
    let backend = config(&database).backend().await.unwrap();
    let table = "leasehold.mutex";
    windows::a_release_ends_the_window_of_what_was_unused_and_no_other(&backend, &database, table, request)
        .await;
}
