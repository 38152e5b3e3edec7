//! Notifications, hand-over, statement counts, lost replies.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::LONG;
use leasehold_api::{
    ErrorKind, HoldState, KeyInfo, ListQuery, Lock as _, LockExt as _, LossReason, Validity, WindowOutcome,
};
use leasehold_engine::{Attempt, Backend as _, HoldRef, Request};
use leasehold_postgres_ttl::PgConfig;
use sqlx::postgres::PgListener;
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};
use test_bounds::{Bound, within};

use crate::support::{config, connection, expire, holder, installed, is_pending, key, request};

/// Counts statements that change the table, by a trigger.
const COUNTED: &str = "\
CREATE TABLE public.said (what text, n int);
CREATE FUNCTION public.say() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO public.said SELECT TG_OP, (SELECT count(*) FROM changed);
    RETURN NULL;
END $$;
CREATE TRIGGER said AFTER UPDATE ON leasehold.lease REFERENCING NEW TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION public.say()";

#[tokio::test]
async fn a_thousand_leases_are_renewed_by_one_statement() {
    let database = installed().await;
    let backend = config(&database).backend().await.unwrap();
    let request = |n: u64| {
        let mut request = Request::new(key(&format!("k{n}")), holder(n));
        request.ttl = Some(Duration::from_secs(30));
        request
    };
    let requests: Vec<Request> = (0..1_000).map(request).collect();
    let holds: Vec<_> = requests.iter().map(Request::hold).collect();
    for answer in backend.acquire(requests).await {
        assert!(matches!(answer.unwrap(), Attempt::Granted(_)));
    }
    let mut user = connection(&database).await;
    user.execute(COUNTED).await.unwrap();
    let start = Instant::now();
    for answer in backend.renew(holds).await {
        assert_eq!(answer.unwrap(), leasehold_engine::Renewed::Extended);
    }
    println!("1,000 leases renewed in {:?}", start.elapsed());
    let said: Vec<(String, i32)> =
        sqlx::query_as("SELECT what, n FROM said").fetch_all(&mut user).await.unwrap();
    assert_eq!(said, [("UPDATE".to_owned(), 1_000)]);
}

#[tokio::test]
async fn a_release_says_what_it_found_and_wakes_who_waits() {
    let database = installed().await;
    let mut user = connection(&database).await;
    let backend = config(&database).connections(1).backend().await.unwrap();
    let mut heard = PgListener::connect(database.url()).await.unwrap();
    heard.listen(backend.channel()).await.unwrap();
    for (together, unmarked) in
        [(true, "clock_timestamp()"), (false, "clock_timestamp()"), (false, "NULL"), (true, "NULL")]
    {
        let names = ["held", "held, waited for", "ended", "ended, waited for", "of another"];
        let requests: Vec<Request> = (1..).zip(names).map(|(n, name)| request(name, n)).collect();
        let mut holds: Vec<HoldRef> = requests.iter().map(Request::hold).collect();
        for answer in backend.acquire(requests).await {
            assert!(matches!(answer.unwrap(), Attempt::Granted(_)));
        }
        holds[4].holder = holder(9);
        user.execute(AssertSqlSafe(format!(
            "UPDATE leasehold.lease SET
                expires_at = CASE WHEN key LIKE 'ended%' THEN clock_timestamp() ELSE expires_at END,
                wake_until = CASE WHEN key LIKE '%waited for' THEN clock_timestamp() + interval '1 minute'
                    ELSE {unmarked} END"
        )))
        .await
        .unwrap();
        let mut freed = Vec::new();
        if together {
            freed = backend.release(holds).await;
        } else {
            for hold in holds {
                freed.extend(backend.release(vec![hold]).await);
            }
        }
        let said: Vec<(bool, bool)> = freed
            .into_iter()
            .map(|freed| freed.unwrap())
            .map(|freed| (freed.was_held, freed.waiters))
            .collect();
        assert_eq!(said, [(true, false), (true, true), (false, false), (false, true), (false, false)]);
        let free = "SELECT count(*) FROM leasehold.lease WHERE released";
        assert_eq!(sqlx::query_scalar::<_, i64>(free).fetch_one(&mut user).await.unwrap(), 4);
        let mut woken = Vec::new();
        for _ in 0..2 {
            let next = within(LONG, "nothing heard", heard.recv()).await;
            woken.push(next.unwrap().payload().to_owned());
        }
        woken.sort();
        assert_eq!(woken, ["fended, waited for", "fheld, waited for"]);
        backend.release(vec![request("of another", 5).hold()]).await.remove(0).unwrap();
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
async fn notifies_only_when_somebody_waits() {
    let database = installed().await;
    let backend = config(&database).backend().await.unwrap();
    let mut heard = PgListener::connect(database.url()).await.unwrap();
    heard.listen(backend.channel()).await.unwrap();
    let (a, b) = (config(&database).connect().await.unwrap(), config(&database).connect().await.unwrap());
    for _ in 0..20 {
        a.key("quiet").acquire().await.unwrap().release().await.unwrap();
        // A try that finds the key held does not become a waiter.
        let guard = a.key("quiet").acquire().await.unwrap();
        assert!(b.key("quiet").try_acquire().await.unwrap().is_none());
        guard.release().await.unwrap();
    }
    let mut user = connection(&database).await;
    for (age, expected) in [("-1 hour", vec!["wk", "fk"]), ("1 hour", vec!["fk"])] {
        let patient = config(&database).poll(Duration::from_secs(60)).connect().await.unwrap();
        let guard = a.key("k").acquire().await.unwrap();
        has_age(&mut user, age).await;
        let waiting =
            tokio::spawn(async move { patient.key("k").acquire().await.map(|guard| (patient, guard)) });
        until_marked(&mut user).await;
        guard.release().await.unwrap();
        for expected in expected {
            let next = within(LONG, "nothing heard", heard.recv()).await.unwrap();
            assert_eq!(next.payload(), expected, "a waiter of a young hold, or the contended release");
        }
        let (_b, guard) = waiting.await.unwrap().unwrap();
        guard.release().await.unwrap();
    }
}

/// Makes each hold so old. A negative age keeps it young for as long as a test needs.
async fn has_age(user: &mut PgConnection, age: &str) {
    let set = "UPDATE leasehold.lease SET acquired_at = clock_timestamp() - $1::text::interval";
    sqlx::query(set).bind(age).execute(user).await.unwrap();
}

/// Waits until a waiter has set its mark.
async fn until_marked(user: &mut PgConnection) {
    let waits = "SELECT coalesce(bool_or(wake_until > clock_timestamp()), false) FROM leasehold.lease";
    let end = Bound::new(Duration::from_secs(60));
    while !sqlx::query_scalar::<_, bool>(waits).fetch_one(&mut *user).await.unwrap() {
        end.check("nobody has noted that it waits");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_waiter_of_another_client_ends_a_chain_at_once() {
    let database = installed().await;
    let config = config(&database).ttl(Duration::from_secs(600)).poll(Duration::from_secs(60));
    let backend = config.backend().await.unwrap();
    let mut timing = backend.timing();
    // Much longer than the bound below.
    timing.handover_for = Duration::from_secs(180);
    let lock = leasehold_engine::Engine::builder(backend).timing(timing).start().unwrap();
    let other = config.connect().await.unwrap();
    let mut guard = lock.key("k").acquire().await.unwrap();
    has_age(&mut connection(&database).await, "-1 hour").await;
    let stored = guard.stored_holder();
    let waiting = tokio::spawn(async move {
        let wait = Duration::from_secs(120);
        other.key("k").wait(wait).acquire().await.unwrap().release().await.unwrap();
    });
    let end = Bound::new(Duration::from_secs(60));
    while guard.stored_holder() == stored {
        end.check("its client was not told of the waiter");
        let mut next = std::pin::pin!(lock.key("k").wait(Duration::from_secs(120)).acquire());
        assert!(is_pending(next.as_mut()).await);
        guard.release().await.unwrap();
        guard = next.await.unwrap();
        // Slowly, because a chain also ends with its thousand tokens.
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    within(LONG, "not granted", waiting).await.unwrap();
    guard.release().await.unwrap();
}

#[tokio::test]
async fn a_notification_hands_over_at_once() {
    let database = installed().await;
    // Polling would take a minute.
    let config = config(&database).poll(Duration::from_secs(60));
    let (a, b) = (config.connect().await.unwrap(), config.connect().await.unwrap());
    let guard = a.key("k").acquire().await.unwrap();
    let waiting = tokio::spawn(async move {
        let guard = b.key("k").wait(Duration::from_secs(120)).acquire().await.unwrap();
        (guard, b)
    });
    let mut user = connection(&database).await;
    until_marked(&mut user).await;
    guard.release().await.unwrap();
    let (guard, _b) = within(LONG, "not granted", waiting).await.unwrap();
    guard.release().await.unwrap();
}

#[tokio::test]
async fn hands_over_with_every_notification_lost() {
    let database = installed().await;
    // A client configured for a pooler does not listen. The "pooler" here is the server itself.
    let postgres =
        PgConfig::from_url(database.url()).unwrap().pooler(leasehold_postgres::Pooler::Transaction);
    let deaf = Arc::new(leasehold_postgres_ttl::TtlConfig::new(postgres).connect().await.unwrap());
    let lock = config(&database).connect().await.unwrap();
    for round in 0..3 {
        let guard = lock.key("k").acquire().await.unwrap();
        let waiter = Arc::clone(&deaf);
        let waiting = tokio::spawn(async move { waiter.key("k").acquire().await });
        let mut user = connection(&database).await;
        until_marked(&mut user).await;
        guard.release().await.unwrap();
        let bound = deaf.capabilities().handover;
        let guard = within(bound, format!("not granted in round {round}"), waiting).await;
        guard.unwrap().unwrap().release().await.unwrap();
    }
}

#[tokio::test]
async fn an_ended_lease_is_taken_over_without_polling() {
    let database = installed().await;
    let config = config(&database).poll(Duration::from_secs(60));
    let backend = config.backend().await.unwrap();
    let lock = config.connect().await.unwrap();
    let mut request = Request::new(key("k"), holder(1));
    request.ttl = Some(Duration::from_millis(1_500));
    let start = Instant::now();
    // The lease is not renewed.
    assert!(matches!(backend.acquire(vec![request]).await.remove(0).unwrap(), Attempt::Granted(_)));
    let guard = lock.key("k").acquire().await.unwrap();
    let took = start.elapsed();
    assert!(took >= Duration::from_millis(1_500) && took < Duration::from_secs(30), "{took:?}");
    guard.release().await.unwrap();
}

#[tokio::test]
async fn one_request_that_fails_spares_its_neighbours() {
    let database = installed().await;
    let backend = config(&database).backend().await.unwrap();
    let mut user = connection(&database).await;
    user.execute("ALTER TABLE leasehold.lease ADD CONSTRAINT poison CHECK (label <> 'poison')")
        .await
        .unwrap();
    let request = |n: u64| {
        let mut request = Request::new(key(&format!("k{n}")), holder(n));
        request.ttl = Some(Duration::from_secs(30));
        request.label = Some(if n == 3 { "poison".into() } else { "fine".into() });
        request
    };
    let answers = backend.acquire((0..10).map(request).collect()).await;
    for (n, answer) in answers.iter().enumerate() {
        match answer {
            Ok(Attempt::Granted(_)) => assert_ne!(n, 3),
            Ok(Attempt::Refused(error)) => {
                assert_eq!(n, 3, "{error}");
                assert_eq!(error.key(), Some(&key("k3")));
            }
            other => panic!("{n}: {other:?}"),
        }
    }
}

#[tokio::test]
async fn a_forced_release_is_told_at_once() {
    let database = installed().await;
    let (a, b) = (config(&database).connect().await.unwrap(), config(&database).connect().await.unwrap());
    let guard = a.key("k").acquire().await.unwrap();
    // No timer ends while a blocking task runs, so the next look comes after `LONG`.
    let (end, ended) = std::sync::mpsc::channel::<()>();
    let standstill = tokio::task::spawn_blocking(move || ended.recv_timeout(LONG));
    tokio::time::pause();
    let start = tokio::time::Instant::now();
    assert!(b.admin().unwrap().force_release(guard.key(), guard.holder()).await.unwrap());
    let reason = guard.lost().await;
    assert_eq!((reason, start.elapsed()), (LossReason::ForcedRelease, Duration::ZERO));
    drop(end);
    let _ = standstill.await.unwrap();
}

#[tokio::test]
async fn a_request_to_release_is_notified_and_each_look_and_renewal_reports_it() {
    let database = installed().await;
    let (a, b) = (config(&database).connect().await.unwrap(), config(&database).connect().await.unwrap());
    let (lost, told) = (a.key("lost").acquire().await.unwrap(), a.key("told").acquire().await.unwrap());
    let renewed = a.key("renewed").acquire().await.unwrap();
    let mut user = connection(&database).await;
    // A request whose notification was lost.
    user.execute("UPDATE leasehold.lease SET asked = holder WHERE key = 'lost'").await.unwrap();
    lost.confirm().await.unwrap();
    within(LONG, "not reported", lost.asked()).await;
    user.execute("UPDATE leasehold.lease SET asked = holder WHERE key = 'renewed'").await.unwrap();
    renewed.renew().await.unwrap();
    within(LONG, "not reported", renewed.asked()).await;
    let channel = config(&database).backend().await.unwrap().channel().to_owned();
    let mut listener = PgListener::connect(database.url()).await.unwrap();
    listener.listen(&channel).await.unwrap();
    assert!(b.admin().unwrap().ask(told.key(), told.holder()).await.unwrap());
    let notice = within(LONG, "not notified", listener.recv()).await.unwrap();
    assert_eq!(notice.payload(), format!("b{} told", told.holder()));
    within(LONG, "not told", told.asked()).await;
    told.release().await.unwrap();
}

#[tokio::test]
async fn an_operator_changes_the_window_in_the_row() {
    let database = installed().await;
    let lock = config(&database).connect().await.unwrap();
    let mut user = connection(&database).await;
    let run = async || {
        let hour = Duration::from_secs(3_600);
        let once = lock.key("report").at_most_once_per(hour).run(async |_| ()).await.unwrap();
        matches!(once, WindowOutcome::Due(()))
    };
    assert!(run().await);
    assert!(!run().await);
    user.execute("UPDATE leasehold.lease SET window_us = 1000 WHERE key = 'report'").await.unwrap();
    assert!(run().await, "the operator's window has passed");
    tokio::time::sleep(Duration::from_millis(2)).await;
    assert!(run().await, "it also counts for later grants");
    user.execute("UPDATE leasehold.lease SET window_us = NULL WHERE key = 'report'").await.unwrap();
    assert!(!run().await, "back to what callers ask for");
}

#[tokio::test]
async fn a_request_without_an_answer_is_undone_also_if_it_is_carried_out_late() {
    let database = installed().await;
    let backend = config(&database).backend().await.unwrap();
    let lock = config(&database).connect().await.unwrap();
    let (mut user, mut killer) = (connection(&database).await, connection(&database).await);
    // The grant waits for an uncommitted row, and its session is ended. The row then commits, as if the server had
    // executed the request late.
    let mut tx = user.begin().await.unwrap();
    let row = "INSERT INTO leasehold.lease (key, holder, token, acquired_at, ttl_us, expires_at, cooldown_us)
        VALUES ('k', $1, nextval('leasehold.token'), now(), 3600000000, now() + interval '1 hour', 3600000000)";
    sqlx::query(row).bind(holder(1).to_string()).execute(&mut *tx).await.unwrap();
    let mut request = Request::new(key("k"), holder(1));
    request.ttl = Some(Duration::from_secs(3_600));
    let asking = tokio::spawn(async move {
        let answers = backend.acquire(vec![request]).await;
        (backend, answers)
    });
    let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
        WHERE wait_event_type = 'Lock' AND datname = current_database()";
    let asked = Bound::new(Duration::from_secs(60));
    while killer.execute(end).await.unwrap().rows_affected() == 0 {
        asked.check("no grant waits for the row");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let (_backend, answers) = asking.await.unwrap();
    let error = answers.into_iter().next().unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutcomeUnknown, "{error}");
    tx.commit().await.unwrap();
    let guard = lock.key("k").wait(Duration::from_secs(10)).acquire().await.unwrap();
    guard.release().await.unwrap();
}

#[tokio::test]
async fn leases_outlive_their_sessions() {
    const TTL: Duration = Duration::from_secs(9);
    let database = installed().await;
    let lock = config(&database).ttl(TTL).connect().await.unwrap();
    let guard = lock.key("k").acquire().await.unwrap();
    let mut user = connection(&database).await;
    let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'leasehold' AND datname = current_database()";
    let until =
        "SELECT (extract(epoch FROM expires_at) * 1000000)::bigint FROM leasehold.lease WHERE key = 'k'";
    let granted = Instant::now();
    let mut last: i64 = sqlx::query_scalar(until).fetch_one(&mut user).await.unwrap();
    while granted.elapsed() <= TTL {
        user.execute(end).await.unwrap();
        // Waits for a renewal, which needs a new session.
        let ended = last;
        while last == ended {
            tokio::time::sleep(Duration::from_millis(10)).await;
            assert_ne!(guard.validity(), Validity::Lost);
            last = sqlx::query_scalar(until).fetch_one(&mut user).await.unwrap();
        }
    }
    guard.release().await.unwrap();
}

#[tokio::test]
async fn a_row_that_vanishes_is_noticed_long_before_the_next_renewal() {
    let database = installed().await;
    let lock = config(&database).ttl(Duration::from_secs(3_600)).connect().await.unwrap();
    let guard = lock.key("k").acquire().await.unwrap();
    let bystander = lock.key("other").acquire().await.unwrap();
    let mut user = connection(&database).await;
    user.execute("DELETE FROM leasehold.lease WHERE key = 'k'").await.unwrap();
    let bound = lock.capabilities().loss_detection;
    let reason = within(bound, "not noticed", guard.lost()).await;
    assert_eq!(reason, LossReason::Gone);
    assert_eq!(bystander.validity(), Validity::Valid);
    bystander.release().await.unwrap();
    let next = lock.key("k").acquire().await.unwrap();
    assert!(next.token() > guard.token());
    next.release().await.unwrap();
}

#[tokio::test]
async fn what_has_ended_is_shown_apart_from_what_is_held() {
    let database = installed().await;
    let backend = config(&database).backend().await.unwrap();
    let mut requests: Vec<Request> = ["cooling", "ended", "held", "free"]
        .into_iter()
        .zip(1..)
        .map(|(name, serial)| request(name, serial))
        .collect();
    requests[0].cooldown = Some(Duration::from_secs(60));
    let holds: Vec<HoldRef> = requests.iter().map(Request::hold).collect();
    for answer in backend.acquire(requests).await {
        assert!(matches!(answer.unwrap(), Attempt::Granted(_)));
    }
    for freed in backend.release(vec![holds[0].clone(), holds[3].clone()]).await {
        assert!(freed.unwrap().was_held);
    }
    expire(&mut connection(&database).await, "ended", "1 s").await;
    let admin = backend.admin().unwrap();

    let cooling = admin.inspect(&key("cooling")).await.unwrap();
    assert!(cooling.holders.is_empty() && !cooling.is_free(), "{cooling:?}");
    assert!(cooling.cooldown.is_some_and(|left| left <= Duration::from_secs(60)), "{cooling:?}");
    for name in ["ended", "free", "never seen"] {
        assert_eq!(admin.inspect(&key(name)).await.unwrap(), KeyInfo::free(key(name)));
    }
    let held = admin.inspect(&key("held")).await.unwrap();
    assert_eq!((held.holder().unwrap().holder, held.cooldown), (Some(holds[2].holder), None));

    let names = |infos: &[KeyInfo]| infos.iter().map(|info| info.key.to_string()).collect::<Vec<_>>();
    assert_eq!(names(&admin.list(&ListQuery::new()).await.unwrap()), ["held"]);
    let all = admin.list(&ListQuery::new().include_ended()).await.unwrap();
    assert_eq!(names(&all), ["cooling", "ended", "held"]);
    assert!(all[0].holders.is_empty() && all[0].cooldown.is_some(), "{all:?}");
    let states: Vec<_> = all[1..].iter().map(|info| info.holders[0].state).collect();
    assert_eq!(states, [HoldState::Expired, HoldState::Held]);
}
