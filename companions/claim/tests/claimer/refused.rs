//! Rows whose update the table refuses: they do not stop other rows, and their handlers run only with pauses.
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::within;
use leasehold_claim::sqlx::PgPool;
use leasehold_claim::{
    Backoff, Claim, ClaimError, ClaimSpec, ClaimStore as _, Claimer, ClaimerBuilder, IdType, OnFailure,
    PgClaims, PgHeld, RowKey, States, Table, Take,
};
use test_servers::sql::pool;
pub(crate) use test_servers::sql::{number, run};
use test_servers::{Database, fresh_database};

pub(crate) async fn until_number(what: &str, pool: &PgPool, sql: &str, wanted: i64) {
    within(what, async {
        while number(pool, sql).await != wanted {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

const JOB: &str =
    "CREATE TABLE job (id bigint PRIMARY KEY, status text NOT NULL DEFAULT 'new', result text, email text,
    grp text, attempts int NOT NULL DEFAULT 5, message text, ready_at timestamptz, settled_at timestamptz,
    owner uuid, epoch bigint, lease_until timestamptz)";
const HOUR: Duration = Duration::from_secs(3600);

fn job(held: bool) -> leasehold_claim::ClaimSpecBuilder {
    let states = States::text(["new"], "done").taken("running").failed("failed").exhausted("exhausted");
    let spec = ClaimSpec::builder(Table::new("job").unwrap())
        .id("id", IdType::Int)
        .state("status", states)
        .attempts("attempts")
        .error("message")
        .ready_at("ready_at");
    if held { spec } else { spec.lease_columns("owner", "epoch", "lease_until") }
}

async fn table(db: &Database, more: &str) -> PgPool {
    let pool = pool(db.url(), 8).await;
    run(&pool, JOB).await;
    run(&pool, more).await;
    pool
}

fn claimer(pool: &PgPool, held: bool, spec: ClaimSpec) -> ClaimerBuilder {
    if held {
        PgHeld::new(pool.clone(), spec).claimer()
    } else {
        Claimer::builder(Arc::new(PgClaims::new(pool.clone(), spec)))
    }
}

/// The number of runs of each row's handler, and the reported errors.
#[derive(Clone, Default)]
struct Seen {
    runs: Arc<Mutex<HashMap<i64, u32>>>,
    errors: Arc<Mutex<Vec<String>>>,
}

impl Seen {
    fn start(&self, builder: ClaimerBuilder) -> Claimer {
        let errors = Arc::clone(&self.errors);
        let builder = builder.on_error(move |error| errors.lock().unwrap().push(error.to_string()));
        let (claimer, runs) = (builder.start().unwrap(), Arc::clone(&self.runs));
        let worker = claimer.clone();
        tokio::spawn(async move {
            let handler = move |claim: Claim| {
                *runs.lock().unwrap().entry(claim.row().id().unwrap()).or_default() += 1;
                async { Ok::<(), String>(()) }
            };
            worker.run(2, handler).await.unwrap();
        });
        claimer
    }

    fn runs(&self, id: i64) -> u32 {
        self.runs.lock().unwrap().get(&id).copied().unwrap_or_default()
    }

    fn has_error(&self, row: i64, what: &str) -> bool {
        let row = format!("row {row} ");
        self.errors.lock().unwrap().iter().any(|error| error.starts_with(&row) && error.contains(what))
    }
}

const NO_RESULT: &str =
    "ALTER TABLE job ADD CONSTRAINT done_has_result CHECK (status <> 'done' OR result IS NOT NULL);
    INSERT INTO job (id, result) VALUES (1, NULL), (2, NULL), (3, 'x')";

/// The table refuses the state `done`. With that policy, the row fails after one run.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_whose_end_the_table_refuses_fails_where_that_is_the_policy() {
    for held in [false, true] {
        let db = fresh_database().await;
        let pool = table(&db, NO_RESULT).await;
        let seen = Seen::default();
        let claimer = seen.start(claimer(&pool, held, job(held).build().unwrap()));
        until_number("they failed", &pool, "SELECT count(*) FROM job WHERE status = 'failed'", 2).await;
        until_number("the other is done", &pool, "SELECT count(*) FROM job WHERE status = 'done'", 1).await;
        let said = "SELECT count(*) FROM job WHERE message LIKE '%done_has_result%'";
        assert_eq!(number(&pool, said).await, 2, "held {held}");
        within("closing", claimer.close()).await.unwrap();
        assert_eq!([1, 2, 3].map(|id| seen.runs(id)), [1, 1, 1], "held {held}");
        assert!(seen.has_error(1, "done_has_result") && seen.has_error(2, "done_has_result"));
    }
}

/// With the policy `Retry`, the row is retried after the backoff, and the attempt counts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_whose_end_the_table_refuses_is_tried_again_after_the_backoff() {
    for held in [false, true] {
        let db = fresh_database().await;
        let pool = table(&db, NO_RESULT).await;
        let seen = Seen::default();
        let builder = claimer(&pool, held, job(held).build().unwrap());
        let claimer = seen.start(builder.on_failure(OnFailure::Retry(Backoff::constant(HOUR))));
        let put_off = "SELECT count(*) FROM job WHERE status = 'new' AND attempts = 4 \
                       AND ready_at > now() + interval '30 minutes' AND message LIKE '%done_has_result%'";
        until_number("they are put off", &pool, put_off, 2).await;
        within("closing", claimer.close()).await.unwrap();
        assert_eq!([1, 2].map(|id| seen.runs(id)), [1, 1], "held {held}");
    }
}

/// The table refuses every settlement. A leased row waits for the end of its lease, and a held row is in a list of this
/// process.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_of_which_no_end_can_be_written_is_left_alone_for_growing_pauses() {
    for held in [false, true] {
        let db = fresh_database().await;
        // The table accepts the lease, but no later update.
        let when = if held { "OLD.id = 1" } else { "OLD.id = 1 AND OLD.status = 'running'" };
        let refuses = format!(
            "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'row % is not to be touched', OLD.id; END $$;
             CREATE TRIGGER no BEFORE UPDATE ON job FOR EACH ROW WHEN ({when}) EXECUTE FUNCTION no();
             INSERT INTO job (id) SELECT generate_series(1, 40)"
        );
        let pool = table(&db, &refuses).await;
        let seen = Seen::default();
        let claimer = seen.start(claimer(&pool, held, job(held).build().unwrap()));
        until_number("the others", &pool, "SELECT count(*) FROM job WHERE status = 'done'", 39).await;
        // Each of these wake-ups causes a pass from the start, which would run a row that is not left alone.
        for id in 41..=60 {
            run(&pool, &format!("INSERT INTO job (id) VALUES ({id})")).await;
            claimer.wake();
            let done = format!("SELECT count(*) FROM job WHERE id = {id} AND status = 'done'");
            until_number("the next", &pool, &done, 1).await;
        }
        within("the report", async {
            while !seen.has_error(1, "row 1 is not to be touched") {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
        assert!((1..=4).contains(&seen.runs(1)), "held {held}: {} runs", seen.runs(1));
        within("closing", claimer.close()).await.unwrap();
    }
}

const BAD_EMAIL: &str = "INSERT INTO job (id, email, grp) SELECT n, CASE WHEN n = 1 THEN 'none' ELSE 'a@b' END, 'g' || n % 7
    FROM generate_series(1, 20) n; ALTER TABLE job ADD CONSTRAINT email_is_one CHECK (email LIKE '%@%') NOT VALID";

/// The first row refuses every UPDATE. All other rows are done, and the error names this row.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_row_that_cannot_be_written_does_not_stop_the_others() {
    let raises = "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no email' USING ERRCODE = 'MY001'; END $$;
        CREATE TRIGGER no BEFORE UPDATE ON job FOR EACH ROW WHEN (NEW.email = 'none') EXECUTE FUNCTION no();
        INSERT INTO job (id, email) SELECT n, CASE WHEN n = 1 THEN 'none' ELSE 'a@b' END FROM generate_series(1, 20) n";
    for (more, what) in [(BAD_EMAIL, "email_is_one"), (raises, "no email")] {
        let db = fresh_database().await;
        let pool = table(&db, more).await;
        let seen = Seen::default();
        let findings = job(false).build().unwrap().check(&pool).await.unwrap();
        let counted =
            |text: &str| text.starts_with("1 rows break constraint email_is_one, which is NOT VALID");
        let is_found = findings.iter().any(|finding| counted(finding.message()));
        assert_eq!(is_found, what == "email_is_one", "{findings:?}");
        let claimer = seen.start(claimer(&pool, false, job(false).build().unwrap()));
        until_number("19 good rows", &pool, "SELECT count(*) FROM job WHERE status = 'done'", 19).await;
        within("closing", claimer.close()).await.unwrap();
        assert_eq!(seen.runs(1), 0);
        assert!(seen.has_error(1, what), "{:?}", seen.errors.lock().unwrap());
        assert_eq!(
            number(&pool, "SELECT count(*) FROM job WHERE status = 'new'").await,
            1,
            "it is as it was"
        );
    }
}

/// The same for groups, which are skipped as a whole, and for tenants with a limit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_with_such_a_row_is_left_out_as_a_whole() {
    for (grouped, done) in [(true, 17), (false, 19)] {
        let db = fresh_database().await;
        let pool = table(&db, BAD_EMAIL).await;
        let spec = if grouped { job(false).group("grp").grouped() } else { job(false).limit("grp", 2) };
        let seen = Seen::default();
        let claimer = seen.start(claimer(&pool, false, spec.build().unwrap()));
        until_number("the others", &pool, "SELECT count(*) FROM job WHERE status = 'done'", done).await;
        within("closing", claimer.close()).await.unwrap();
        assert!(seen.has_error(1, "email_is_one"), "{:?}", seen.errors.lock().unwrap());
        let left = "SELECT count(*) FROM job WHERE status = 'new'";
        assert_eq!(number(&pool, left).await, 20 - done, "grouped {grouped}");
    }
}

/// The number of statements of a pass is bounded, whatever the place and number of refused rows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_take_around_refused_rows_is_few_statements() {
    for bad in ["id = 1", "id = 77", "id = 100", "id % 10 = 3", "true"] {
        let db = fresh_database().await;
        let rows = format!(
            "INSERT INTO job (id, email) SELECT id, CASE WHEN {bad} THEN 'none' ELSE 'a@b' END FROM generate_series(1, 100) id;
             ALTER TABLE job ADD CONSTRAINT email_is_one CHECK (email LIKE '%@%') NOT VALID"
        );
        table(&db, &rows).await;
        // One session, because its statements are counted.
        let pool = pool(db.url(), 1).await;
        let claims = PgClaims::new(pool.clone(), job(false).build().unwrap());
        claims.pending(&Take::up_to(1)).await.unwrap();
        let (mut cursor, mut taken, mut refused) = (None, 0, Vec::new());
        loop {
            let before = calls(&pool).await;
            let answer = claims.take(&Take::up_to(100).after(cursor.clone())).await.unwrap();
            // One statement for all rows, then seven halvings, each with a query before and a ping after the refusal, and the
            // statements of the count.
            let after = calls(&pool).await - before;
            assert!(after <= 2 + 3 * 7 + 8, "{bad}: {after} statements");
            taken += answer.claims.len();
            refused.extend(answer.refused.iter().map(|refused| refused.key.clone()));
            assert!(answer.refused.iter().all(|one| matches!(&*one.error, ClaimError::Constraint { .. })));
            if answer.claims.is_empty() && answer.refused.is_empty() {
                break;
            }
            cursor = answer.cursor;
        }
        let are_bad = number(&pool, "SELECT count(*) FROM job WHERE email = 'none'").await;
        assert_eq!(refused.len(), usize::try_from(are_bad).unwrap(), "{bad}: each is named once");
        assert_eq!(taken + refused.len(), 100, "{bad}: nobody is passed over");
    }
}

/// Returns the number of this session's statements so far, including these four. Each is a transaction.
async fn calls(pool: &PgPool) -> i64 {
    run(pool, "SELECT pg_stat_force_next_flush()").await;
    run(pool, "SELECT pg_stat_clear_snapshot()").await;
    number(
        pool,
        "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()",
    )
    .await
}

/// Requeue and cancel write all other rows, and name a refused row if they can write none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requeue_and_cancel_go_around_rows_that_cannot_be_written() {
    let db = fresh_database().await;
    let pool = table(&db, BAD_EMAIL).await;
    let claims = PgClaims::new(pool.clone(), job(false).build().unwrap());
    let all: Vec<_> = (1..=20).map(RowKey::new).collect();
    assert_eq!(claims.cancel(&all, "no").await.unwrap(), 19);
    assert_eq!(
        number(&pool, "SELECT count(*) FROM job WHERE status = 'failed' AND message = 'no'").await,
        19
    );
    let error = claims.cancel(&[RowKey::new(1)], "no").await.unwrap_err();
    assert!(matches!(&error, ClaimError::Row { row, .. } if *row == RowKey::new(1)), "{error}");
    run(
        &pool,
        "ALTER TABLE job DROP CONSTRAINT email_is_one; UPDATE job SET email = 'none', status = 'failed' WHERE id <= 3;
         ALTER TABLE job ADD CONSTRAINT email_is_one CHECK (email LIKE '%@%') NOT VALID",
    )
    .await;
    assert_eq!(claims.requeue(&all[..5], 1).await.unwrap(), 2);
    assert_eq!(claims.requeue_all(&"failed".into(), 9, 1).await.unwrap(), 9, "no more than were asked for");
    assert_eq!(claims.requeue_all(&"failed".into(), 99, 1).await.unwrap(), 6);
    let error = claims.requeue_all(&"failed".into(), 99, 1).await.unwrap_err();
    assert!(error.to_string().contains("email_is_one") && error.to_string().starts_with("row "), "{error}");
}

/// A claimer with a filter does not change other rows, even rows without attempts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claimer_with_a_filter_exhausts_only_its_own_rows() {
    let db = fresh_database().await;
    let pool =
        table(&db, "INSERT INTO job (id, grp, attempts) VALUES (1, 'mine', 0), (2, 'theirs', 0)").await;
    let filter = leasehold_claim::Sql::trusted("grp = 'mine'");
    let claims = PgClaims::new(pool.clone(), job(false).filter(filter).build().unwrap());
    assert_eq!(claims.sweep(9).await.unwrap().exhausted, [RowKey::new(1)]);
    assert_eq!(number(&pool, "SELECT count(*) FROM job WHERE id = 2 AND status = 'new'").await, 1);
}
