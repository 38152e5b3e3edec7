//! The second run of a row: its key, epoch and attempt, the effects that the first run left, and the record of the worker
//! that settled it.
use std::time::Duration;

use crate::common::*;
use leasehold_claim::{
    Backoff, Claim, ClaimSpec, ClaimStore as _, ClaimedRow, Claimer, ClaimerBuilder, OnFailure, Outcome,
    PgClaims, PgHeld, States, Table, Take,
};
use sqlx::{AssertSqlSafe, PgConnection, PgPool, raw_sql};
use test_bounds::within;
use test_servers::{Database, fresh_database};
use tokio::sync::mpsc;

const AGAIN: OnFailure = OnFailure::Retry(Backoff::constant(Duration::ZERO));

/// The kind of claim.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mode {
    Held,
    Leased,
}

/// A table with the row 7, for either kind of claim.
struct Jobs {
    pool: PgPool,
    spec: ClaimSpec,
    mode: Mode,
}

impl Jobs {
    async fn new(mode: Mode) -> (Database, Self, PgConnection) {
        let db = fresh_database().await;
        let mut observer = db.connect().await;
        run(
            &mut observer,
            "CREATE TABLE job (id bigint PRIMARY KEY, status text NOT NULL DEFAULT 'new', parts jsonb);
            INSERT INTO job (id, parts) VALUES (7, '[\"a\", \"b\", \"c\", \"d\"]')",
        )
        .await;
        let states = States::text(["new"], "done").taken("taken").failed("failed").exhausted("exhausted");
        let spec = ClaimSpec::builder(Table::new("job").unwrap())
            .state("status", states)
            .lease_columns("owner", "epoch", "lease_until")
            .epoch_sequence(Table::new("job_epochs").unwrap())
            .attempts("attempts_left")
            .max_attempts(5)
            .settled_by("settled_by")
            .work(["parts"])
            .build()
            .unwrap();
        let pool = pool(db.url(), 8).await;
        spec.migration().apply(&pool).await.unwrap();
        (db, Self { pool, spec, mode }, observer)
    }

    fn leases(&self) -> PgClaims {
        PgClaims::new(self.pool.clone(), self.spec.clone())
    }

    fn held(&self) -> PgHeld {
        PgHeld::new(self.pool.clone(), self.spec.clone())
    }

    fn claimer(&self) -> ClaimerBuilder {
        let builder = match self.mode {
            Mode::Held => self.held().claimer(),
            Mode::Leased => Claimer::builder(std::sync::Arc::new(self.leases())),
        };
        builder.on_failure(AGAIN)
    }

    /// Takes the row in a worker that dies after `work`.
    async fn crash<T>(&self, work: impl AsyncFnOnce(&ClaimedRow) -> T) -> T {
        match self.mode {
            Mode::Held => {
                let mut hold = self.held().begin(&Take::up_to(1)).await.unwrap().unwrap();
                let answer = work(&hold.taken().claims[0].rows[0]).await;
                let die = raw_sql("SELECT pg_terminate_backend(pg_backend_pid())");
                die.execute(hold.connection()).await.unwrap_err();
                answer
            }
            Mode::Leased => {
                let claims = self.leases();
                let taken = claims.take(&Take::up_to(1).lease(ms(1))).await.unwrap();
                let answer = work(&taken.claims[0].rows[0]).await;
                let swept = async {
                    while claims.sweep(10).await.unwrap().returned.is_empty() {
                        tokio::time::sleep(ms(1)).await;
                    }
                };
                within(LONG, "not ended", swept).await;
                answer
            }
        }
    }
}

async fn next(claimer: &Claimer) -> Claim {
    within(LONG, "not ended", claimer.next()).await.unwrap()
}

/// Each run of a row gets the same key, a greater epoch, and the number of its attempt. A crash counts as an attempt under
/// a lease. A held claim rolls it back, but its epoch still grows, because it comes from a sequence.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_run_gets_its_attempt_the_same_key_and_a_greater_epoch() {
    for (mode, attempts) in [(Mode::Held, [1, 2, 3]), (Mode::Leased, [2, 3, 4])] {
        let (_db, jobs, mut observer) = Jobs::new(mode).await;
        let (key, mut epoch) = jobs.crash(async |row| (row.dedupe_key(&jobs.spec), row.epoch)).await;
        let claimer = jobs.claimer().start().unwrap();
        let (ran, mut runs) = mpsc::unbounded_channel();
        let (spec, running) = (jobs.spec.clone(), claimer.clone());
        let running = tokio::spawn(async move {
            let handler = move |claim: Claim| {
                let seen = (claim.attempt(), claim.row().dedupe_key(&spec), claim.epoch().unwrap());
                let attempt = seen.0;
                ran.send(seen).unwrap();
                async move {
                    assert_ne!(attempt, Some(attempts[1]), "the one in the middle panics");
                    if attempt == Some(attempts[2]) { Ok(()) } else { Err("not yet") }
                }
            };
            running.run(1, handler).await.unwrap();
        });
        for attempt in attempts {
            let run = within(LONG, "not ended", runs.recv()).await.unwrap();
            assert_eq!((run.0, &run.1), (Some(attempt), &key), "{mode:?}");
            assert!(run.2 > epoch, "{mode:?}: epoch {} after {epoch}", run.2);
            epoch = run.2;
        }
        until(&mut observer, "SELECT status = 'done' FROM job").await;
        within(LONG, "not ended", claimer.close()).await.unwrap();
        within(LONG, "not ended", running).await.unwrap();
    }
}

/// Every end of a claim records its owner in a column of the table, in the statement of the end. A worker that was
/// overtaken, or was cut off before the commit, leaves no trace in it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_worker_that_settled_a_row_stays_recorded() {
    const SETTLED: &str = "SELECT status || ' ' || coalesce(settled_by, 'by none') FROM job";
    for mode in [Mode::Held, Mode::Leased] {
        let (_db, jobs, mut observer) = Jobs::new(mode).await;
        assert_eq!(jobs.spec.check(&jobs.pool).await.unwrap(), []);
        // The end and the name are one write, because the server checks the constraints after each.
        run(&mut observer, "ALTER TABLE job ADD CHECK (status <> 'done' OR settled_by IS NOT NULL)").await;
        let (claimer, claims) = (jobs.claimer().start().unwrap(), jobs.leases());
        let mut late = next(&claimer).await;
        let first = late.owner().to_string();
        if mode == Mode::Held {
            die(&mut late).await;
        } else {
            run(&mut observer, "UPDATE job SET lease_until = now() - interval '1 s'").await;
            claims.sweep(10).await.unwrap();
        }
        let second = next(&claimer).await;
        let owner = second.owner().to_string();
        assert_ne!(owner, first);
        second.retry("not yet", Duration::ZERO).await.unwrap();
        let third = next(&claimer).await;
        assert_eq!(text(&mut observer, SETTLED).await.split(' ').nth(1), Some(owner.as_str()), "{mode:?}");
        let owner = third.owner().to_string();
        if mode == Mode::Leased {
            // Only the end itself can write the name that the constraint asks for.
            run(&mut observer, "UPDATE job SET settled_by = NULL").await;
        }
        third.done().await.unwrap();
        late.done().await.unwrap_err();
        assert_eq!(text(&mut observer, SETTLED).await, format!("done {owner}"), "{mode:?}");

        // The work and who did it, in one transaction.
        run(
            &mut observer,
            "ALTER TABLE job ADD CHECK (status = 'done' OR settled_by IS NULL);
            UPDATE job SET status = 'new', settled_by = NULL",
        )
        .await;
        claimer.wake();
        let mut fourth = next(&claimer).await;
        let owner = fourth.owner().to_string();
        match mode {
            Mode::Held => {
                run(fourth.connection().unwrap(), "UPDATE job SET parts = '[]'").await;
                fourth.done().await.unwrap();
            }
            Mode::Leased => {
                let mut work = jobs.pool.begin().await.unwrap();
                run(&mut *work, "UPDATE job SET parts = '[]'").await;
                fourth.settle_with(&claims, work, Outcome::Done).await.unwrap();
            }
        }
        assert_eq!(text(&mut observer, SETTLED).await, format!("done {owner}"), "{mode:?}");
        assert_eq!(text(&mut observer, "SELECT parts::text FROM job").await, "[]");
        within(LONG, "not ended", claimer.close()).await.unwrap();
    }
}

/// The end of a held claim whose session has ended is written in another transaction, under the name that the worker
/// knows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failure_after_the_session_has_ended_names_the_claim_that_failed() {
    let (_db, jobs, mut observer) = Jobs::new(Mode::Held).await;
    let claimer = jobs.claimer().start().unwrap();
    let mut claim = next(&claimer).await;
    let owner = claim.owner().to_string();
    die(&mut claim).await;
    claim.fail("cut off").await.unwrap();
    let failed = text(&mut observer, "SELECT status || ' ' || settled_by FROM job").await;
    assert_eq!(failed, format!("failed {owner}"));
    within(LONG, "not ended", claimer.close()).await.unwrap();
}

/// Ends the session of a held claim.
async fn die(claim: &mut Claim) {
    let die = raw_sql("SELECT pg_terminate_backend(pg_backend_pid())");
    die.execute(claim.connection().unwrap()).await.unwrap_err();
}

/// Effects in another database, which no claim rolls back: for each row, the epoch of its current run and the run's effects.
struct Elsewhere(PgConnection);

impl Elsewhere {
    async fn new(db: &Database) -> Self {
        let mut on = db.connect().await;
        run(
            &mut on,
            "CREATE TABLE run (key text PRIMARY KEY, epoch bigint NOT NULL);
            CREATE TABLE effect (key text, part text, PRIMARY KEY (key, part))",
        )
        .await;
        Self(on)
    }

    /// Begins a run and removes the effects of an earlier run. Returns false if a later run has begun.
    async fn begin(&mut self, key: &str, epoch: i64) -> bool {
        self.changes(&format!(
            "WITH begun AS (INSERT INTO run (key, epoch) VALUES ('{key}', {epoch}) ON CONFLICT (key) \
             DO UPDATE SET epoch = EXCLUDED.epoch WHERE run.epoch < EXCLUDED.epoch RETURNING key), \
             taken_back AS (DELETE FROM effect USING begun WHERE effect.key = begun.key) SELECT 1 FROM begun"
        ))
        .await
    }

    /// Adds an effect if this is the latest run. Returns whether it did.
    async fn put(&mut self, key: &str, epoch: i64, part: &str) -> bool {
        self.changes(&format!(
            "INSERT INTO effect SELECT key, '{part}' FROM run WHERE key = '{key}' AND epoch = {epoch} RETURNING 1"
        ))
        .await
    }

    async fn changes(&mut self, sql: &str) -> bool {
        !raw_sql(AssertSqlSafe(sql.to_owned())).fetch_all(&mut self.0).await.unwrap().is_empty()
    }

    async fn parts(&mut self, key: &str) -> String {
        text(
            &mut self.0,
            &format!("SELECT string_agg(part, ' ' ORDER BY part) FROM effect WHERE key = '{key}'"),
        )
        .await
    }
}

/// A run dies after half of its effects, and its work changes before the next run. The next run replaces the effects, so
/// the result is that of one whole run. The first run can change nothing afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_run_corrects_effects_that_the_first_left() {
    let parts = |row: &ClaimedRow| serde_json::from_value::<Vec<String>>(row.work["parts"].clone()).unwrap();
    for mode in [Mode::Held, Mode::Leased] {
        let (_db, jobs, mut observer) = Jobs::new(mode).await;
        let other = fresh_database().await;
        let mut elsewhere = Elsewhere::new(&other).await;
        let (key, first) = jobs
            .crash(async |row| {
                let (key, epoch) = (row.dedupe_key(&jobs.spec), row.epoch);
                assert!(elsewhere.begin(&key, epoch).await);
                for part in &parts(row)[..2] {
                    assert!(elsewhere.put(&key, epoch, part).await);
                }
                (key, epoch)
            })
            .await;
        assert_eq!(elsewhere.parts(&key).await, "a b", "{mode:?}: half of it, which nothing has rolled back");
        run(&mut observer, "UPDATE job SET parts = '[\"b\", \"c\", \"x\"]' WHERE id = 7").await;

        let claimer = jobs.claimer().start().unwrap();
        let claim = next(&claimer).await;
        let (again, second) = (claim.row().dedupe_key(&jobs.spec), claim.epoch().unwrap());
        assert_eq!(again, key);
        assert!(elsewhere.begin(&again, second).await);
        // The first run was only slow. It can neither continue nor begin again.
        assert!(!elsewhere.put(&key, first, "d").await);
        assert!(!elsewhere.begin(&key, first).await);
        for part in parts(claim.row()) {
            assert!(elsewhere.put(&again, second, &part).await);
        }
        claim.done().await.unwrap();
        assert!(!elsewhere.put(&key, first, "d").await);
        assert_eq!(elsewhere.parts(&key).await, "b c x", "{mode:?}: as of one whole run");
        assert_eq!(text(&mut observer, "SELECT status FROM job").await, "done");
        within(LONG, "not ended", claimer.close()).await.unwrap();
    }
}
