//! Measures single calls on large tables by touched pages and time. Shows the cost of groups, delayed rows, live
//! leases and history for calls that do not use them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bench::report::{Row, quantile};
use leasehold_claim::{
    ClaimRef, ClaimSpec, ClaimStore, Claimer, OrderType, Outcome, PgClaims, Retention, States, Table, Take,
};
use sqlx::postgres::PgPoolOptions;
use sqlx::{AssertSqlSafe, PgPool, Row as _, raw_sql};
use test_servers::{Cluster, ClusterOptions};

const ROUNDS: usize = 5;
const DAY: Duration = Duration::from_secs(86_400);

/// Duration of the count for idle processes: several of their polls and lease checks.
const IDLE: Duration = Duration::from_secs(60);

/// A server that counts the pages touched by each statement.
pub(crate) struct AtSize {
    pool: PgPool,
    _cluster: Cluster,
}

impl AtSize {
    pub(crate) async fn start(options: ClusterOptions) -> Self {
        let cluster = Cluster::start(options.setting("shared_preload_libraries", "pg_stat_statements"));
        let database = cluster.fresh_database().await;
        // One connection, because its own counters are read.
        let pool = PgPoolOptions::new().max_connections(1).connect(database.url()).await.unwrap();
        let this = Self { pool, _cluster: cluster };
        this.run("CREATE EXTENSION pg_stat_statements").await;
        this
    }

    pub(crate) async fn measure(&self, rows: &mut Vec<Row>) {
        self.groups(rows).await;
        self.later(rows).await;
        self.upkeep(rows).await;
        self.renewals(rows).await;
        self.idle(rows).await;
    }

    /// A group of 8,000 rows, and a claimed group of 100,000 rows in front of all others.
    async fn groups(&self, rows: &mut Vec<Row>) {
        println!("groups: 8,000 rows of one, 100,000 of another, 50,000 of others");
        let build = |table: Table| spec(table).group("entity").grouped().build().unwrap();
        let claims = self.table("grouped", build, "entity text").await;
        let insert = |entity: &str, count: u32| {
            format!("INSERT INTO grouped (entity) SELECT {entity} FROM generate_series(1, {count}) n;")
        };
        let groups: Vec<String> = (0..=2 * ROUNDS).map(|n| insert(&format!("'large-{n}'"), 8_000)).collect();
        self.run(groups.concat() + &insert("'other-' || n / 3", 50_000)).await;
        self.run("VACUUM ANALYZE grouped").await;
        let (mut ours, mut by_hand) = (Vec::new(), Vec::new());
        for round in 0..ROUNDS {
            let begun = Instant::now();
            let taken = claims.take(&Take::up_to(1)).await.unwrap();
            ours.push(begun.elapsed());
            assert_eq!(taken.claims[0].rows.len(), 8_000);
            // Starts from the other end, because both must find unclaimed groups.
            let entity = format!("large-{}", 2 * ROUNDS - round);
            let text = format!(
                "UPDATE grouped t SET state = 'running', owner = gen_random_uuid(), epoch = epoch + 1,
                    lease_until = now() + interval '30 s'
                FROM (SELECT id FROM grouped WHERE entity = '{entity}' AND state = 'new' ORDER BY id
                    FOR NO KEY UPDATE SKIP LOCKED) picked
                WHERE t.id = picked.id RETURNING t.id, t.epoch, t.payload"
            );
            let begun = Instant::now();
            let taken = raw_sql(AssertSqlSafe(text)).fetch_all(&self.pool).await.unwrap();
            by_hand.push(begun.elapsed());
            assert_eq!(taken.len(), 8_000);
        }
        rows.push(times(
            "take a group of 8,000 rows",
            &ours,
            Some(&by_hand),
            Goal::Within(Duration::from_millis(150)),
        ));

        self.run("TRUNCATE grouped RESTART IDENTITY").await;
        self.run(insert("'hot'", 100_000) + &insert("'other-' || n", 1_000)).await;
        self.run("VACUUM ANALYZE grouped").await;
        assert_eq!(claims.take(&Take::up_to(1)).await.unwrap().claims[0].rows.len(), 10_000);
        let mut behind = Vec::new();
        for _ in 0..ROUNDS {
            let begun = Instant::now();
            let taken = claims.take(&Take::up_to(1)).await.unwrap();
            behind.push(begun.elapsed());
            assert_eq!(taken.claims[0].rows.len(), 1);
        }
        let what = "take another group, behind a claimed group of 100,000 rows";
        rows.push(times(what, &behind, None, Goal::Within(Duration::from_millis(150))));
    }

    async fn later(&self, rows: &mut Vec<Row>) {
        println!("rows for later: 500,000 in front of those to be taken, and none");
        let mut series = Vec::new();
        for (name, later) in [("delayed", 500_000), ("prompt", 0)] {
            let build = |table: Table| spec(table).order_by("ready_at", OrderType::Time).build().unwrap();
            let claims = self.table(name, build, "").await;
            self.run(format!(
                "INSERT INTO {name} (ready_at) SELECT now() + interval '1 day' FROM generate_series(1, {later});
                INSERT INTO {name} (ready_at) SELECT now() - interval '1 s' FROM generate_series(1, 1000)"
            ))
            .await;
            self.run(format!("VACUUM ANALYZE {name}")).await;
            series.push((claims, Vec::new()));
        }
        for _ in 0..20 * ROUNDS {
            for (claims, times) in &mut series {
                let begun = Instant::now();
                let taken = claims.take(&Take::up_to(1)).await.unwrap();
                times.push(begun.elapsed());
                assert_eq!(taken.claims.len(), 1);
            }
        }
        let (delayed, prompt) = (&series[0].1, &series[1].1);
        rows.push(times("take one, 500,000 rows for later", delayed, Some(prompt), Goal::Ratio(2.0)));
    }

    async fn upkeep(&self, rows: &mut Vec<Row>) {
        println!("upkeep: 20,000 live leases, a million rows that were settled yesterday");
        let build = |table: Table| {
            spec(table).settled_at("settled_at").retention(Retention::KeepFor(30 * DAY)).build().unwrap()
        };
        let claims = self.table("kept", build, "").await;
        self.run(
            "INSERT INTO kept (state, settled_at) SELECT 'done', now() - interval '1 day' FROM generate_series(1, 1000000);
            INSERT INTO kept (state, owner, epoch, lease_until)
                SELECT 'running', gen_random_uuid(), 1, now() + interval '1 hour' FROM generate_series(1, 20000)",
        )
        .await;
        self.run("VACUUM ANALYZE kept").await;
        let (mut sweeps, mut purges) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            self.run("SELECT pg_stat_statements_reset()").await;
            assert!(claims.sweep(100).await.unwrap().returned.is_empty());
            sweeps.push(self.pages("kept").await);
            self.run("SELECT pg_stat_statements_reset()").await;
            assert_eq!(claims.purge(500).await.unwrap(), 0);
            purges.push(self.pages("kept").await);
        }
        // Reads the claimed rows, because renewals must change no index (docs/decisions/claims-tables.md).
        rows.push(count("a sweep, 20,000 live leases", quantile(&sweeps, 0.5), "pages", 400.0));
        rows.push(count("a purge, a million young rows", quantile(&purges, 0.5), "pages", 10.0));
    }

    /// Renewals on a table with four further indexes.
    async fn renewals(&self, rows: &mut Vec<Row>) {
        println!("renewals: 2,000 rows, 35 times, four other indexes");
        let build = |table: Table| spec(table).build().unwrap();
        let claims = self.table("renewed", build, "a int, b int, c int, d int").await;
        self.run(
            "CREATE INDEX ON renewed (a); CREATE INDEX ON renewed (b); CREATE INDEX ON renewed (c, d); CREATE INDEX ON renewed (d);
            INSERT INTO renewed (a, b, c, d) SELECT n, n, n, n FROM generate_series(1, 2000) n",
        )
        .await;
        self.run("VACUUM ANALYZE renewed").await;
        let taken = claims.take(&Take::up_to(2_000)).await.unwrap();
        let held: Vec<ClaimRef> = taken.claims.into_iter().map(|taken| taken.claim).collect();
        // The first renewals move some rows elsewhere, because updating all rows of a page at once needs free space
        // of the same size in that page.
        let first = self.in_place(&claims, &held, 15).await;
        rows.push(share("the first 15 renewals of 2,000 rows that change no index (HOT)", first, None));
        let later = self.in_place(&claims, &held, 20).await;
        rows.push(share("later renewals that change no index (HOT)", later, Some(95.0)));
        let done = held.into_iter().map(|claim| (claim, Outcome::Done)).collect::<Vec<_>>();
        claims.settle(&done).await.unwrap();
    }

    /// Renews the rows this many times. Returns the number of row updates, and of updates that changed no index.
    async fn in_place(&self, claims: &PgClaims, held: &[ClaimRef], rounds: usize) -> (i64, i64) {
        let before = self.updates("renewed").await;
        for _ in 0..rounds {
            claims.renew(held, Take::DEFAULT_LEASE).await.unwrap();
        }
        let after = self.updates("renewed").await;
        (after.0 - before.0, after.1 - before.1)
    }

    /// Idle claimers with default settings.
    async fn idle(&self, rows: &mut Vec<Row>) {
        const PROCESSES: u32 = 4;
        println!("idle: {PROCESSES} processes with three tables each, for {IDLE:?}");
        let mut claimers = Vec::new();
        let tables = ["idle_a", "idle_b", "idle_c"];
        for table in tables {
            self.table(table, |table| spec(table).build().unwrap(), "").await;
        }
        for _ in 0..PROCESSES {
            let pool = PgPoolOptions::new()
                .max_connections(4)
                .connect_with((*self.pool.connect_options()).clone())
                .await;
            let pool = pool.unwrap();
            for table in tables {
                let claims = PgClaims::new(pool.clone(), spec(Table::new(table).unwrap()).build().unwrap());
                let claimer = Claimer::builder(Arc::new(claims)).start().unwrap();
                let waiting = claimer.clone();
                tokio::spawn(async move { drop(waiting.next().await) });
                claimers.push(claimer);
            }
        }
        // Waits for the initial check and the test of notifications.
        tokio::time::sleep(Duration::from_secs(10)).await;
        self.run("SELECT pg_stat_statements_reset()").await;
        tokio::time::sleep(IDLE).await;
        let calls =
            "SELECT coalesce(sum(calls), 0)::float8 FROM pg_stat_statements WHERE query LIKE '%idle\\_%'";
        let calls: f64 = raw_sql(calls).fetch_one(&self.pool).await.unwrap().get(0);
        let each = calls / IDLE.as_secs_f64() / f64::from(PROCESSES) / 3.0;
        rows.push(count("an idle process, each of its tables", each, "statements/s", 0.1));
        for claimer in claimers {
            claimer.close().await.unwrap();
        }
    }

    /// Creates a separate table with the migration.
    async fn table(&self, name: &str, spec: impl FnOnce(Table) -> ClaimSpec, columns: &str) -> PgClaims {
        let columns = if columns.is_empty() { String::new() } else { format!(", {columns}") };
        self.run(format!(
            "CREATE TABLE {name} (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, payload text NOT NULL DEFAULT 'order',
                state text NOT NULL DEFAULT 'new'{columns}) WITH (fillfactor = 85)"
        ))
        .await;
        let claims = PgClaims::new(self.pool.clone(), spec(Table::new(name).unwrap()));
        claims.spec().migration().apply(&self.pool).await.unwrap();
        claims
    }

    async fn run(&self, sql: impl Into<String>) {
        raw_sql(AssertSqlSafe(sql.into())).execute(&self.pool).await.unwrap();
    }

    /// Returns the pages touched by statements about `table` since the last reset.
    async fn pages(&self, table: &str) -> f64 {
        let text = format!(
            "SELECT sum(shared_blks_hit + shared_blks_read)::float8 FROM pg_stat_statements WHERE query LIKE '%{table}%'"
        );
        raw_sql(AssertSqlSafe(text)).fetch_one(&self.pool).await.unwrap().get(0)
    }

    /// Returns the row updates of `table`, and the updates that changed no index.
    async fn updates(&self, table: &str) -> (i64, i64) {
        // Flushes the counters, because the session would report them later.
        self.run("SELECT pg_stat_force_next_flush()").await;
        let text =
            format!("SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = '{table}'");
        let row = raw_sql(AssertSqlSafe(text)).fetch_one(&self.pool).await.unwrap();
        (row.get(0), row.get(1))
    }
}

fn spec(table: Table) -> leasehold_claim::ClaimSpecBuilder {
    ClaimSpec::builder(table)
        .state("state", States::text(["new"], "done").taken("running").failed("failed").exhausted("dead"))
        .lease_columns("owner", "epoch", "lease_until")
        .attempts("attempts_left")
        .max_attempts(5)
        .ready_at("ready_at")
        .work(["payload"])
}

enum Goal {
    Within(Duration),
    /// Maximum ratio to the compared figure.
    Ratio(f64),
}

fn times(work: &str, ours: &[Duration], floor: Option<&[Duration]>, goal: Goal) -> Row {
    let millis = |times: &[Duration]| {
        quantile(&times.iter().map(|time| time.as_secs_f64() * 1e3).collect::<Vec<_>>(), 0.5)
    };
    let (measured, floor) = (millis(ours), floor.map(millis));
    let ratio = floor.map(|floor| measured / floor);
    let (met, goal) = match goal {
        Goal::Within(limit) => (measured <= limit.as_secs_f64() * 1e3, format!("at most {limit:?}")),
        Goal::Ratio(most) => (ratio.is_some_and(|ratio| ratio <= most), format!("at most {most}")),
    };
    Row {
        work: work.to_owned(),
        measured: format!("{measured:.1} ms"),
        floor: floor.map_or_else(|| "-".to_owned(), |floor| format!("{floor:.1} ms")),
        ratio: ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}")),
        goal,
        met: Some(met),
        ..Row::default()
    }
}

/// Returns a row with the share of `such` in `all`, and the required minimum.
fn share(work: &str, (all, such): (i64, i64), least: Option<f64>) -> Row {
    let share = 100.0 * such as f64 / all as f64;
    Row {
        work: work.to_owned(),
        measured: format!("{such} of {all}"),
        floor: "-".to_owned(),
        ratio: format!("{share:.1} %"),
        goal: least.map_or_else(|| "-".to_owned(), |least| format!("at least {least} %")),
        met: least.map(|least| share >= least),
        ..Row::default()
    }
}

fn count(work: &str, measured: f64, of: &str, most: f64) -> Row {
    Row {
        work: work.to_owned(),
        measured: format!("{measured:.3} {of}").replace(".000", ""),
        floor: "-".to_owned(),
        ratio: "-".to_owned(),
        goal: format!("at most {most}"),
        met: Some(measured <= most),
        ..Row::default()
    }
}
