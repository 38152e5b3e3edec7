use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use cookbook::rate_limit::{Answer, Api, Called, PAGE, RateLimit, call_once, slots};
use cookbook::sql;
use futures_util::future::join_all;
use leasehold_claim::{Claimed, PgClaims, PgHeld, Take};
use sqlx::PgPool;
use test_bounds::within;
use test_servers::sql::{number, pool};
use test_servers::{Database, fresh_database};
use tokio::process::Command;
use tokio::sync::Notify;

use crate::support::*;

#[allow(dead_code, unreachable_pub)] // A program, of which the tests use parts.
#[path = "../../examples/rate_limit.rs"]
mod example;

const HOUR: Duration = Duration::from_secs(3600);
const LIMIT: RateLimit = RateLimit { window: HOUR, answer: LONG, batch: 3 };

/// What the processes of the next test run: this program again, with this as its only test.
#[tokio::test]
async fn another_process() {
    if std::env::var_os("RATE_CHILD").is_some() {
        example::process(&std::env::var("DATABASE_URL").unwrap()).await.unwrap();
    }
}

/// A thousand calls by eight processes, two of which are killed in the middle of one: in no span of a window's length
/// does the service see more calls than it allows. Each row is sent once, those of the killed processes again.
#[tokio::test(flavor = "multi_thread")]
async fn calls_over_all_processes_never_exceed_the_limit() {
    let db = fresh_database().await;
    let limit = RateLimit { window: Duration::from_millis(200), answer: Duration::from_secs(5), batch: 5 };
    let plan = example::Plan { limit, allowed: 40, calls: 1_000, processes: 8, killed: 2 };
    let start = || {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "rate_limit::another_process", "--nocapture"]);
        command
    };
    let calls = within(LONG, "not all sent", example::limited(db.url(), plan, start)).await.unwrap();
    assert!(!calls.iter().any(|call| call.is_refused), "the service never has to say 429");
    let most = example::most_in(&calls, limit.window);
    assert!(most <= plan.allowed as usize, "{most} calls in {:?}", limit.window);

    let mut sent = BTreeMap::<i64, Vec<usize>>::new();
    for call in &calls {
        assert!(call.rows.len() <= limit.batch as usize);
        call.rows.iter().for_each(|row| sent.entry(*row).or_default().push(call.process));
    }
    assert_eq!(sent.len(), 5_000, "each row was sent");
    let again: Vec<_> = sent.values().filter(|by| by.len() > 1).collect();
    assert!(again.len() >= 2 * 5, "one batch of each killed process: {again:?}");
    assert!(calls.len() >= 1_002, "{}", calls.len());
    let processes: std::collections::BTreeSet<_> = calls.iter().map(|call| call.process).collect();
    assert_eq!(processes.len(), plan.processes, "all take part");
}

/// Answers in this order, and then is done. Keeps what it was sent.
struct Scripted {
    answers: Mutex<Vec<Answer>>,
    sent: Mutex<Vec<Vec<String>>>,
}

impl Scripted {
    fn new(answers: impl IntoIterator<Item = Answer>) -> Self {
        let mut answers: Vec<_> = answers.into_iter().collect();
        answers.reverse();
        Self { answers: Mutex::new(answers), sent: Mutex::default() }
    }
}

impl Api for Scripted {
    async fn call(&self, batch: &[Claimed]) -> Answer {
        let rows = batch.iter().map(|claimed| claimed.rows[0].work["recipient"].as_str().unwrap().to_owned());
        self.sent.lock().unwrap().push(rows.collect());
        self.answers.lock().unwrap().pop().unwrap_or(Answer::Done)
    }
}

struct Tables {
    db: Database,
    pool: PgPool,
    slots: PgClaims,
    mails: PgClaims,
}

impl Tables {
    async fn new(allowed: i32, mails: i64) -> Self {
        let db = database(sql(PAGE, "schema")).await;
        let pool = pool(db.url(), 4).await;
        let specs = [slots().unwrap(), cookbook::rate_limit::mails().unwrap()];
        for spec in &specs {
            spec.migration().apply(&pool).await.unwrap();
            spec.ensure(&pool).await.unwrap();
        }
        sqlx::query(sql(PAGE, "allow")).bind(allowed).execute(&pool).await.unwrap();
        let fill = "INSERT INTO mail (recipient) SELECT 'r' || n FROM generate_series(1, $1) n";
        sqlx::query(fill).bind(mails).execute(&pool).await.unwrap();
        let [slots, mails] = specs.map(|spec| PgClaims::new(pool.clone(), spec));
        Self { db, pool, slots, mails }
    }

    async fn call(&self, api: &impl Api) -> Called {
        call_once(&self.slots, &self.mails, &LIMIT, api).await.unwrap()
    }

    /// An hour goes by.
    async fn pass(&self) {
        for table in ["api_slot", "mail"] {
            let past = format!("UPDATE {table} SET ready_at = ready_at - interval '1 hour'");
            run(&self.pool, past).await;
        }
    }

    /// State and attempts of each row.
    async fn mails(&self) -> String {
        let all = "SELECT string_agg(state || ' ' || attempts_left, ', ' ORDER BY id) FROM mail";
        text(&self.pool, all).await
    }
}

#[tokio::test]
async fn a_batch_of_rows_is_one_call_and_uses_one_slot_for_a_window() {
    let (tables, api) = (Tables::new(2, 7).await, Scripted::new([]));
    assert_eq!(tables.call(&api).await, Called::Batch(3));
    assert_eq!(tables.call(&api).await, Called::Batch(3));
    assert_eq!(tables.call(&api).await, Called::NoSlot);
    tables.pass().await;
    assert_eq!(tables.call(&api).await, Called::Batch(1));
    assert_eq!(tables.call(&api).await, Called::NoRows, "without a call, the slot stays free");
    assert_eq!(tables.call(&api).await, Called::NoRows);
    let sent = api.sent.into_inner().unwrap();
    assert_eq!(sent, [&["r1", "r2", "r3"][..], &["r4", "r5", "r6"], &["r7"]]);
}

/// Clients on separate connections make all calls that the limit allows, and in the next window as many again.
#[tokio::test]
async fn clients_together_make_every_call_that_is_allowed() {
    const ALLOWED: i32 = 20;
    let tables = Tables::new(ALLOWED, 200).await;
    let mut clients = Vec::new();
    for _ in 0..8 {
        let pool = pool(tables.db.url(), 1).await;
        let claims = |spec| PgClaims::new(pool.clone(), spec);
        clients.push((claims(slots().unwrap()), claims(cookbook::rate_limit::mails().unwrap())));
    }
    for window in 1..=2 {
        let api = Scripted::new([]);
        let until_no_slot = async |(slots, mails): &(PgClaims, PgClaims)| loop {
            match call_once(slots, mails, &LIMIT, &api).await.unwrap() {
                Called::Batch(rows) => assert_eq!(rows, 3, "a batch is as large as the limit allows"),
                Called::NoSlot => return,
                Called::NoRows => panic!("there are more rows than calls"),
            }
        };
        within(LONG, "calls go on", join_all(clients.iter().map(until_no_slot))).await;
        let calls = api.sent.into_inner().unwrap().len();
        assert_eq!(i32::try_from(calls).unwrap(), ALLOWED, "window {window}");
        tables.pass().await;
    }
}

#[tokio::test]
async fn too_many_is_a_snooze_that_costs_no_attempt_and_a_failure_costs_one() {
    let day = 24 * HOUR;
    let tables = Tables::new(2, 2).await;
    let api = Scripted::new([Answer::TooMany(day), Answer::Failed("status 500".to_owned())]);
    assert_eq!(tables.call(&api).await, Called::Batch(2));
    assert_eq!(tables.mails().await, "new 5, new 5");
    let waits = "SELECT bool_and(ready_at > now() + interval '23 hours') FROM mail";
    assert_eq!(text(&tables.pool, waits).await, "true");
    let waiting = "SELECT count(*) FROM api_slot WHERE ready_at > now() + interval '23 hours'";
    assert_eq!(number(&tables.pool, waiting).await, 1, "the slot waits as long");
    assert_eq!(tables.call(&api).await, Called::NoRows);
    for _ in 0..24 {
        tables.pass().await;
    }
    assert_eq!(tables.call(&api).await, Called::Batch(2));
    assert_eq!(tables.mails().await, "new 4, new 4");
    assert_eq!(text(&tables.pool, "SELECT min(error) FROM mail").await, "status 500");
    tables.pass().await;
    assert_eq!(tables.call(&api).await, Called::Batch(2));
    assert_eq!(tables.mails().await, "sent 3, sent 3");
}

/// A service that says that it was called, and never answers.
#[derive(Default)]
struct Silent(Notify);

impl Api for Silent {
    async fn call(&self, _: &[Claimed]) -> Answer {
        self.0.notify_one();
        std::future::pending().await
    }
}

/// The slot of a process that was killed in a call comes back a window after the last moment of that call, and its
/// rows are sent again.
#[tokio::test]
async fn the_slot_of_a_killed_process_comes_back_after_call_and_window() {
    let (tables, service) = (Tables::new(1, 3).await, Silent::default());
    let killed = async {
        tokio::select! {
            called = tables.call(&service) => panic!("{called:?}"),
            () = service.0.notified() => {}
        }
    };
    within(LONG, "not called", killed).await;
    let api = Scripted::new([]);
    assert_eq!(tables.call(&api).await, Called::NoSlot);
    let after_window = "SELECT lease_until > clock_timestamp() + interval '1 hour' FROM api_slot";
    assert_eq!(text(&tables.pool, after_window).await, "true");
    let end =
        |table: &str| format!("UPDATE {table} SET lease_until = clock_timestamp() - interval '1 second'");
    run(&tables.pool, end("api_slot")).await;
    assert_eq!(tables.call(&api).await, Called::NoRows);
    run(&tables.pool, end("mail")).await;
    assert_eq!(tables.call(&api).await, Called::Batch(3));
    assert_eq!(tables.mails().await, "sent 3, sent 3, sent 3", "the killed call was an attempt");
}

/// A call that has no answer in time has its slot for a window from then on, and costs an attempt.
#[tokio::test]
async fn a_call_without_an_answer_is_given_up_and_counts() {
    let (tables, service) = (Tables::new(1, 3).await, Silent::default());
    let limit = RateLimit { answer: Duration::from_secs(1), ..LIMIT };
    let called = call_once(&tables.slots, &tables.mails, &limit, &service);
    assert_eq!(within(LONG, "not given up", called).await.unwrap(), Called::Batch(3));
    assert_eq!(tables.mails().await, "new 4, new 4, new 4");
    assert_eq!(text(&tables.pool, "SELECT min(error) FROM mail").await, "no answer in 1s");
    assert_eq!(tables.call(&service).await, Called::NoSlot);
}

#[tokio::test]
async fn wrong_a_counter_per_minute_allows_twice_as_many_around_a_full_minute() {
    let db = database(sql(PAGE, "wrong: schema")).await;
    let mut on = db.connect().await;
    let mut made = 0;
    for at in ["2026-01-01 00:00:59.9Z", "2026-01-01 00:01:00.1Z"] {
        for _ in 0..15 {
            let count = sqlx::query(sql(PAGE, "wrong: count")).bind(at).bind(10);
            made += count.execute(&mut on).await.unwrap().rows_affected();
        }
    }
    assert_eq!(made, 20, "in a fifth of a second, with 10 allowed in a minute");
}

#[tokio::test]
async fn wrong_a_held_slot_forgets_the_call_of_a_killed_process() {
    let tables = Tables::new(1, 0).await;
    let held = PgHeld::new(tables.pool.clone(), slots().unwrap());
    for _call in 0..3 {
        let hold = held.begin(&Take::up_to(1)).await.unwrap();
        let hold = hold.expect("the slot is free at once, although the service has seen the call before");
        hold.rollback().await.unwrap();
    }
}
