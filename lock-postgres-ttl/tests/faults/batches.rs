//! Batched requests, and calls that are dropped while they are queued.

use std::future::Future as _;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::LONG;
use leasehold_api::{Error, ErrorKind, FencingToken, Lock as _, LockExt as _, LossReason, Validity};
use leasehold_engine::{Attempt, Backend as _, HoldRef, Renewed, Request, token};
use leasehold_postgres::Pooler;
use leasehold_postgres_ttl::{PgConfig, TtlBackend, TtlConfig};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};
use test_bounds::{Bound, within};
use test_servers::Database;

use crate::sql::LEASES;
use crate::support::{Came, config, connection, expire, holder, installed, micros, request, take, text};

async fn granted(backend: &TtlBackend, request: Request) -> HoldRef {
    let hold = request.hold();
    assert!(matches!(backend.acquire(vec![request]).await.remove(0).unwrap(), Attempt::Granted(_)));
    hold
}

/// Waits until a session waits for a lock.
async fn until_blocked(watcher: &mut PgConnection) {
    let waits = "SELECT count(*) > 0 FROM pg_stat_activity
        WHERE wait_event_type = 'Lock' AND datname = current_database()";
    let end = Bound::new(Duration::from_secs(60));
    while !sqlx::query_scalar::<_, bool>(waits).fetch_one(&mut *watcher).await.unwrap() {
        end.check("nobody waits");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Returns the tokens of grants that wait for a transaction that purges the rows of `names`.
async fn tokens_beside_a_purge(names: &[&str]) -> Vec<FencingToken> {
    let database = installed().await;
    let backend = config(&database).backend().await.unwrap();
    for (name, serial) in names.iter().zip(100..) {
        let hold = granted(&backend, request(name, serial)).await;
        backend.release(vec![hold]).await.remove(0).unwrap();
    }
    let (mut user, mut watcher) = (connection(&database).await, connection(&database).await);
    user.execute("UPDATE leasehold.lease SET expires_at = now() - interval '1 day'").await.unwrap();
    let mut tx = user.begin().await.unwrap();
    let purge = sqlx::query_scalar(text(LEASES.purge)).bind(0_i64).bind("").bind(100_i64);
    let purged: i64 = purge.fetch_one(&mut *tx).await.unwrap();
    assert_eq!(usize::try_from(purged), Ok(names.len()));
    let requests = names.iter().zip(1..).map(|(name, serial)| request(name, serial)).collect();
    let asking = tokio::spawn(async move { backend.acquire(requests).await });
    until_blocked(&mut watcher).await;
    tx.commit().await.unwrap();
    asking.await.unwrap().into_iter().map(token_of).collect()
}

fn token_of(answer: Result<Attempt, Error>) -> FencingToken {
    match answer {
        Ok(Attempt::Granted(granted)) => granted.token.unwrap(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_grant_beside_a_purge_has_a_token_alone() {
    assert!(tokens_beside_a_purge(&["k"]).await[0] > token::from_store_number(0).unwrap());
}

#[tokio::test]
async fn a_grant_beside_a_purge_has_a_token_in_a_batch() {
    let none = token::from_store_number(0).unwrap();
    assert!(tokens_beside_a_purge(&["a", "b", "c"]).await.into_iter().all(|token| token > none));
}

#[tokio::test]
async fn two_renewals_of_one_lease_in_one_batch_are_both_answered() {
    let database = installed().await;
    let backend = config(&database).connections(1).backend().await.unwrap();
    let hold = granted(&backend, request("k", 1)).await;
    let mut longer = hold.clone();
    longer.ttl = Some(Duration::from_secs(3_600));
    let (one, other) = tokio::join!(backend.renew(vec![hold.clone()]), backend.renew(vec![longer]));
    for answer in one.into_iter().chain(other) {
        assert_eq!(answer.unwrap(), Renewed::Extended);
    }
    let mut user = connection(&database).await;
    let ttl: i64 =
        sqlx::query_scalar("SELECT ttl_us FROM leasehold.lease").fetch_one(&mut user).await.unwrap();
    assert_eq!(ttl, micros(Duration::from_secs(3_600)), "the last one counts");
    let (one, other) = tokio::join!(backend.release(vec![hold.clone()]), backend.release(vec![hold]));
    for answer in one.into_iter().chain(other) {
        assert!(answer.unwrap().was_held);
    }
}

#[tokio::test]
async fn what_nobody_waits_for_any_more_is_not_asked() {
    let database = installed().await;
    let backend = config(&database).connections(1).backend().await.unwrap();
    {
        // The first poll queues the request.
        let mut dropped = pin!(backend.acquire(vec![request("dropped", 1)]));
        assert!(matches!(dropped.as_mut().poll(&mut Context::from_waker(Waker::noop())), Poll::Pending));
    }
    granted(&backend, request("next", 2)).await;
    let mut user = connection(&database).await;
    let keys: Vec<String> =
        sqlx::query_scalar("SELECT key FROM leasehold.lease").fetch_all(&mut user).await.unwrap();
    assert_eq!(keys, ["next"]);
}

#[tokio::test]
async fn a_release_comes_after_the_grant_that_it_undoes() {
    let database = installed().await;
    let backend = config(&database).connections(1).backend().await.unwrap();
    let asked = request("k", 1);
    let hold = asked.hold();
    let (asked, freed) = tokio::join!(backend.acquire(vec![asked]), backend.release(vec![hold]));
    assert!(matches!(asked.into_iter().next().unwrap().unwrap(), Attempt::Granted(_)));
    assert!(freed.into_iter().next().unwrap().unwrap().was_held);
}

#[tokio::test]
async fn a_free_row_that_was_changed_while_it_was_waited_for_is_granted_all_the_same() {
    let database = installed().await;
    let (mut user, mut watcher) = (connection(&database).await, connection(&database).await);
    let backend = config(&database).connections(1).backend().await.unwrap();
    for serial in 1..3 {
        let hold = granted(&backend, request(&format!("k{serial}"), serial)).await;
        assert!(backend.release(vec![hold]).await.remove(0).unwrap().was_held);
    }
    let mut tx = user.begin().await.unwrap();
    tx.execute("UPDATE leasehold.lease SET label = 'seen' WHERE key = 'k1'").await.unwrap();
    // Granted alone, and below in a batch.
    let alone = backend.acquire(vec![request("k1", 3)]);
    let changed = async {
        until_blocked(&mut watcher).await;
        tx.commit().await.unwrap();
    };
    let (answer, ()) = tokio::join!(alone, changed);
    assert!(matches!(answer.into_iter().next().unwrap().unwrap(), Attempt::Granted(_)));
    backend.release(vec![request("k1", 3).hold()]).await.remove(0).unwrap();
    let mut tx = user.begin().await.unwrap();
    tx.execute("UPDATE leasehold.lease SET label = 'seen' WHERE key = 'k1'").await.unwrap();
    let together = backend.acquire(vec![request("k1", 4), request("k2", 5)]);
    let changed = async {
        until_blocked(&mut watcher).await;
        tx.commit().await.unwrap();
    };
    let (answers, ()) = tokio::join!(together, changed);
    for answer in answers {
        assert!(matches!(answer.unwrap(), Attempt::Granted(_)));
    }
}

#[tokio::test]
async fn rows_at_the_same_places_of_a_table_below_are_left_alone() {
    let database = installed().await;
    let mut user = connection(&database).await;
    let backend = config(&database).connections(1).backend().await.unwrap();
    let two = |serial| vec![request("k1", serial), request("k2", serial + 1)];
    let holds: Vec<HoldRef> = two(1).iter().map(Request::hold).collect();
    backend.acquire(two(1)).await;
    backend.release(holds).await;
    user.execute("CREATE TABLE public.below () INHERITS (leasehold.lease)").await.unwrap();
    user.execute(
        "INSERT INTO public.below (key, holder, token, acquired_at, ttl_us, expires_at, released)
        SELECT 'below' || n, 'x', n, now(), 1, 'infinity', false FROM generate_series(1, 20) n",
    )
    .await
    .unwrap();
    for answer in backend.acquire(two(3)).await {
        assert!(matches!(answer.unwrap(), Attempt::Granted(_)));
    }
    backend.release(two(3).iter().map(Request::hold).collect()).await;
    for n in 0..20 {
        backend.release(vec![granted(&backend, request("k1", 10 + n)).await]).await.remove(0).unwrap();
    }
    let untouched = "SELECT count(*) FROM public.below WHERE holder = 'x'";
    assert_eq!(sqlx::query_scalar::<_, i64>(untouched).fetch_one(&mut user).await.unwrap(), 20);
    // A copy of the row in the child table does not count as the row either.
    let hold = granted(&backend, request("k1", 50)).await;
    user.execute("INSERT INTO public.below SELECT * FROM ONLY leasehold.lease WHERE key = 'k1'")
        .await
        .unwrap();
    let mark = "UPDATE ONLY leasehold.lease SET wake_until = clock_timestamp() + interval '1 minute'";
    user.execute(mark).await.unwrap();
    let freed = backend.release(vec![hold]).await.remove(0).unwrap();
    assert_eq!((freed.was_held, freed.waiters), (true, true));
    let free = "SELECT released FROM ONLY leasehold.lease WHERE key = 'k1'";
    assert!(sqlx::query_scalar::<_, bool>(free).fetch_one(&mut user).await.unwrap());
    granted(&backend, request("k1", 51)).await;
}

#[tokio::test]
async fn a_release_that_waited_for_a_takeover_leaves_the_new_holder_alone() {
    let database = installed().await;
    let (mut user, mut watcher) = (connection(&database).await, connection(&database).await);
    let backend = config(&database).connections(1).backend().await.unwrap();
    let mut holds = Vec::new();
    for serial in 1..3 {
        holds.push(granted(&backend, request(&format!("k{serial}"), serial)).await);
    }
    expire(&mut user, "k1", "1 s").await;
    let mut tx = user.begin().await.unwrap();
    let taken = take(&mut tx, LEASES.grant_one, "k1", holder(9), Duration::from_secs(30)).await;
    assert_eq!(taken, Came::Rows(1));
    let releasing = tokio::spawn(async move { (backend.release(holds.clone()).await, backend, holds) });
    until_blocked(&mut watcher).await;
    tx.commit().await.unwrap();
    let (answers, backend, holds) = releasing.await.unwrap();
    let were_held: Vec<bool> = answers.into_iter().map(|answer| answer.unwrap().was_held).collect();
    assert_eq!(were_held, [false, true]);
    let live = "SELECT holder FROM leasehold.lease WHERE NOT released AND expires_at > clock_timestamp()";
    let live: String = sqlx::query_scalar(live).fetch_one(&mut user).await.unwrap();
    assert_eq!(live, holder(9).to_string());
    // A renewal does not take the other holder's lease either.
    for answer in backend.renew(holds).await {
        assert_eq!(answer.unwrap(), Renewed::Gone(LossReason::Gone));
    }
}

#[tokio::test]
async fn what_cannot_be_renewed_early_is_renewed_all_the_same() {
    let database = installed().await;
    let mut user = connection(&database).await;
    let backend = config(&database).connections(1).backend().await.unwrap();
    let mut holds = Vec::new();
    for serial in 1..4 {
        holds.push(granted(&backend, request(&format!("k{serial}"), serial)).await);
    }
    // The trigger shortens the new end, so the statement's check finds that it took too long.
    user.execute(
        "CREATE FUNCTION public.cap() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN NEW.expires_at := least(NEW.expires_at, clock_timestamp() + interval '10 s'); RETURN NEW; END $$;
        CREATE TRIGGER cap BEFORE UPDATE ON leasehold.lease FOR EACH ROW EXECUTE FUNCTION public.cap()",
    )
    .await
    .unwrap();
    for answer in backend.renew(holds.clone()).await {
        assert_eq!(answer.unwrap(), Renewed::Extended);
    }
    user.execute("DROP TRIGGER cap ON leasehold.lease").await.unwrap();
    // A locked row delays only its own renewal.
    let mut tx = user.begin().await.unwrap();
    tx.execute("SELECT FROM leasehold.lease WHERE key = 'k2' FOR UPDATE").await.unwrap();
    let answers = backend.renew(holds.clone()).await;
    let extended: Vec<_> = answers.iter().map(|answer| answer.as_ref().ok().copied()).collect();
    assert_eq!(extended, [Some(Renewed::Extended), None, Some(Renewed::Extended)]);
    assert_eq!(answers[1].as_ref().unwrap_err().kind(), ErrorKind::Unavailable);
    tx.rollback().await.unwrap();
    // A lost lease is reported as gone beside the renewed ones.
    backend.release(holds[..1].to_vec()).await;
    let answers = backend.renew(holds).await.into_iter().map(Result::unwrap);
    let gone = Renewed::Gone(LossReason::Gone);
    assert_eq!(answers.collect::<Vec<_>>(), [gone, Renewed::Extended, Renewed::Extended]);
}

#[tokio::test]
async fn what_differs_in_its_ttl_its_cooldown_or_its_label_is_granted_as_asked_for() {
    let database = installed().await;
    let mut user = connection(&database).await;
    let backend = config(&database).connections(1).backend().await.unwrap();
    for round in 0..2 {
        let mut requests: Vec<Request> = (0..4).map(|n| request(&format!("k{n}"), round * 10 + n)).collect();
        requests[1].ttl = Some(Duration::from_secs(70));
        requests[2].cooldown = Some(Duration::from_micros(1));
        requests[3].label = Some("fourth".into());
        let holds: Vec<HoldRef> = requests.iter().map(Request::hold).collect();
        for answer in backend.acquire(requests).await {
            assert!(matches!(answer.unwrap(), Attempt::Granted(_)));
        }
        let rows: Vec<(i64, Option<i64>, Option<String>)> =
            sqlx::query_as("SELECT ttl_us, cooldown_us, label FROM leasehold.lease ORDER BY key")
                .fetch_all(&mut user)
                .await
                .unwrap();
        let usual = (30_000_000, None, None);
        let expected = [
            usual.clone(),
            (70_000_000, None, None),
            (30_000_000, Some(1), None),
            (30_000_000, None, Some("fourth".to_owned())),
        ];
        assert_eq!(rows, expected, "round {round}");
        backend.release(holds).await;
    }
}

#[tokio::test]
async fn a_locked_table_is_an_error_and_not_a_held_key() {
    let database = installed().await;
    let backend = config(&database).backend().await.unwrap();
    let mut user = connection(&database).await;
    let mut tx = user.begin().await.unwrap();
    tx.execute("LOCK TABLE leasehold.lease IN SHARE MODE").await.unwrap();
    for count in [1, 512] {
        let start = Instant::now();
        let requests = (0..count).map(|n| request(&format!("k{n}"), n)).collect();
        for answer in backend.acquire(requests).await {
            let Ok(Attempt::Refused(error)) = answer else { panic!("the statement was rolled back") };
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
            assert!(error.key().is_some());
        }
        // One time limit applies to all requests together.
        assert!(start.elapsed() < Duration::from_secs(20), "{count}: {:?}", start.elapsed());
    }
    tx.commit().await.unwrap();
    granted(&backend, request("k0", 1)).await;
}

#[tokio::test]
async fn plans_that_were_made_for_an_empty_table_are_good_for_a_full_one() {
    let database = installed().await;
    let mut user = connection(&database).await;
    // Without autovacuum, because an analysis would renew the plans.
    user.execute("ALTER TABLE leasehold.lease SET (autovacuum_enabled = off)").await.unwrap();
    user.execute("VACUUM ANALYZE leasehold.lease").await.unwrap();
    let backend = config(&database).connections(1).backend().await.unwrap();
    let few: Vec<Request> = (0..3).map(|n| request(&format!("few{n}"), n)).collect();
    let holds: Vec<HoldRef> = few.iter().map(Request::hold).collect();
    for _ in 0..2 {
        backend.acquire(few.clone()).await;
        backend.renew(holds.clone()).await;
        backend.release(holds.clone()).await;
        backend.release(vec![granted(&backend, few[0].clone()).await]).await.remove(0).unwrap();
    }
    user.execute(
        "INSERT INTO leasehold.lease (key, holder, token, acquired_at, ttl_us, expires_at, released)
        SELECT 'old' || n, 'x', n, now(), 1, now(), true FROM generate_series(1, 100000) n",
    )
    .await
    .unwrap();
    let many: Vec<Request> = (0..300).map(|n| request(&format!("k{n}"), 1_000 + n)).collect();
    let holds: Vec<HoldRef> = many.iter().map(Request::hold).collect();
    for answer in backend.acquire(many).await {
        assert!(matches!(answer.unwrap(), Attempt::Granted(_)));
    }
    for answer in backend.renew(holds.clone()).await {
        assert_eq!(answer.unwrap(), Renewed::Extended);
    }
    for answer in backend.release(holds).await {
        assert!(answer.unwrap().was_held);
    }
    // Existing rows use another statement.
    let again: Vec<Request> = (0..300).map(|n| request(&format!("k{n}"), 2_000 + n)).collect();
    for answer in backend.acquire(again).await {
        assert!(matches!(answer.unwrap(), Attempt::Granted(_)));
    }
    for n in 0..10 {
        backend.release(vec![granted(&backend, request("few0", 3_000 + n)).await]).await.remove(0).unwrap();
    }
    // Closes, because a session reports its statistics at the latest when it ends.
    backend.close().await;
    let read = rows_read(&mut user).await;
    // A purge can have read all of the rows once.
    assert!(read < 200_000, "{read} rows were read of 100,000 for some 1,200 that were asked for");
}

/// Returns the rows read from the table, after all client sessions have ended and reported.
async fn rows_read(user: &mut PgConnection) -> i64 {
    loop {
        let others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
            AND pid <> pg_backend_pid() AND backend_type = 'client backend'";
        if sqlx::query_scalar::<_, i64>(others).fetch_one(&mut *user).await.unwrap() == 0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let read = "SELECT coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0) FROM pg_stat_user_tables \
        WHERE relname = 'lease'";
    sqlx::query_scalar(read).fetch_one(user).await.unwrap()
}

/// Records whether a grant's own transaction has read the marker.
const MARKER: &str = "\
CREATE TABLE public.looked (n bigint);
GRANT ALL ON public.looked TO PUBLIC;
CREATE FUNCTION public.note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO public.looked SELECT count(*) FROM pg_locks
        WHERE pid = pg_backend_pid() AND relation = 'leasehold.incarnation'::regclass;
    RETURN NULL;
END $$;
CREATE TRIGGER note AFTER INSERT ON leasehold.lease FOR EACH ROW EXECUTE FUNCTION public.note()";

#[tokio::test]
async fn behind_a_pooler_the_marker_is_looked_at_where_the_token_is_drawn() {
    let database = installed().await;
    let mut user = connection(&database).await;
    user.execute(MARKER).await.unwrap();
    let postgres = PgConfig::from_url(database.url()).unwrap().pooler(Pooler::Transaction);
    let backend = TtlConfig::new(postgres).backend().await.unwrap();
    granted(&backend, request("a", 1)).await;
    let looked: i64 = sqlx::query_scalar("SELECT n FROM public.looked").fetch_one(&mut user).await.unwrap();
    assert!(looked > 0, "the server may have crashed since it was looked at");
    // Without the marker, as after a crash, the sequence jumps before the next token.
    user.execute("TRUNCATE leasehold.incarnation").await.unwrap();
    let last = last_token(&mut user).await;
    granted(&backend, request("b", 2)).await;
    assert!(last_token(&mut user).await > last + 1_000);
}

async fn last_token(user: &mut PgConnection) -> i64 {
    sqlx::query_scalar("SELECT max(token) FROM leasehold.lease").fetch_one(user).await.unwrap()
}

#[tokio::test]
async fn extreme_values_in_a_row_harm_nobody() {
    let database = installed().await;
    let backend = config(&database).backend().await.unwrap();
    let mut user = connection(&database).await;
    for (name, serial) in [("max", 1), ("min", 2), ("endless", 3)] {
        let mut asked = request(name, serial);
        asked.cooldown = Some(Duration::from_micros(1));
        let hold = granted(&backend, asked).await;
        if name != "endless" {
            backend.release(vec![hold]).await.remove(0).unwrap();
        }
    }
    for set in [
        "window_us = 9223372036854775807 WHERE key = 'max'",
        "window_us = -9223372036854775808 WHERE key = 'min'",
        "expires_at = 'infinity' WHERE key = 'endless'",
    ] {
        let update = AssertSqlSafe(format!("UPDATE leasehold.lease SET {set}"));
        assert_eq!(user.execute(update).await.unwrap().rows_affected(), 1);
    }
    let asked = ["endless", "max", "min"].into_iter().zip(10..).map(|(name, n)| request(name, n)).collect();
    let answers: Vec<_> = backend.acquire(asked).await.into_iter().map(Result::unwrap).collect();
    assert!(matches!(&answers[0], Attempt::Contended(held) if held.retry_after.is_none()), "{answers:?}");
    assert!(matches!(&answers[1], Attempt::Contended(held) if held.cooling_for.is_some()), "{answers:?}");
    assert!(matches!(answers[2], Attempt::Granted(_)), "{answers:?}");
    for name in ["max", "endless"] {
        assert!(matches!(
            backend.acquire(vec![request(name, 20)]).await.remove(0),
            Ok(Attempt::Contended(_))
        ));
    }
    let query = leasehold_api::ListQuery::new().include_ended();
    assert_eq!(backend.admin().unwrap().list(&query).await.unwrap().len(), 3);
}

#[tokio::test]
async fn a_mark_shortens_nobody_elses() {
    let database = installed().await;
    let backend = config(&database).backend().await.unwrap();
    granted(&backend, request("k", 1)).await;
    let mut user = connection(&database).await;
    for seconds in [60, 1] {
        let mark = sqlx::query(text(LEASES.mark)).bind(vec!["k"]).bind(seconds * 1_000_000_i64);
        assert_eq!(mark.fetch_all(&mut user).await.unwrap().len(), 1);
    }
    let lasts = "SELECT wake_until > clock_timestamp() + interval '30 s' FROM leasehold.lease";
    assert!(sqlx::query_scalar::<_, bool>(lasts).fetch_one(&mut user).await.unwrap());
}

#[tokio::test]
async fn a_forged_notification_ends_nothing() {
    let database: Database = installed().await;
    let channel = config(&database).backend().await.unwrap().channel().to_owned();
    let lock = config(&database).connect().await.unwrap();
    let (spared, ended) = (lock.key("k").acquire().await.unwrap(), lock.key("l").acquire().await.unwrap());
    let mut user = connection(&database).await;
    let forged = format!("b{} k", spared.holder());
    sqlx::query("SELECT pg_notify($1, $2)").bind(channel).bind(forged).execute(&mut user).await.unwrap();
    // Waits for a later notification, because notifications arrive in order.
    assert!(lock.admin().unwrap().force_release(ended.key(), ended.holder()).await.unwrap());
    let reason = within(LONG, "not told", ended.lost()).await;
    assert_eq!(reason, LossReason::ForcedRelease);
    assert_eq!(spared.validity(), Validity::Valid);
    spared.release().await.unwrap();
}

#[tokio::test]
async fn a_store_says_which_it_is() {
    let database = installed().await;
    let backend = config(&database).backend().await.unwrap();
    assert!(backend.to_string().starts_with("lease rows of postgres "), "{backend}");
}

// A repeated request restarts the lease, because an earlier copy might have been granted too late for its caller.
#[tokio::test]
async fn asking_again_begins_the_lease_anew_and_never_shortens_it() {
    let database = installed().await;
    let backend = config(&database).backend().await.unwrap();
    let first = token_of(backend.acquire(vec![request("k", 1)]).await.remove(0));
    let mut user = connection(&database).await;
    for (left, at_least) in [("1 s", "20 s"), ("1 h", "59 min")] {
        let set = format!("UPDATE leasehold.lease SET expires_at = now() + interval '{left}'");
        user.execute(AssertSqlSafe(set)).await.unwrap();
        assert_eq!(token_of(backend.acquire(vec![request("k", 1)]).await.remove(0)), first);
        let lasts = format!("SELECT expires_at > now() + interval '{at_least}' FROM leasehold.lease");
        let lasts: bool = sqlx::query_scalar(AssertSqlSafe(lasts)).fetch_one(&mut user).await.unwrap();
        assert!(lasts, "{left}");
    }
    assert!(matches!(backend.acquire(vec![request("k", 2)]).await.remove(0), Ok(Attempt::Contended(_))));
}
