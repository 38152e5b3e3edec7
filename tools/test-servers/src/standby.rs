//! A streaming standby.

use std::thread;
use std::time::{Duration, Instant};

use sqlx::postgres::PgRow;
use sqlx::{Decode, Postgres, Row as _, Type};

use crate::guarded::Guarded;
use crate::{Cluster, Outcome, admin, binaries, or_panic};

/// How long the standby may need to see something.
const LIMIT: Duration = Duration::from_secs(60);

const PAUSE: Duration = Duration::from_millis(20);

const STREAMS: &str = "SELECT EXISTS (SELECT FROM pg_stat_wal_receiver WHERE status = 'streaming')";

/// A hot standby of a cluster: it follows, answers reads, and can be promoted.
#[derive(Debug)]
pub struct Standby {
    cluster: Cluster,
}

impl Standby {
    /// Copies the cluster and starts to follow it. Takes a second or two.
    ///
    /// # Panics
    ///
    /// When the copy cannot be made or started.
    ///
    /// # Cancel safety
    ///
    /// Dropping it leaves the servers as they are at that moment; they end with their values.
    pub async fn of(primary: &Cluster) -> Self {
        let (url, password) = (primary.admin_url(), primary.password().map(str::to_owned));
        let started = admin::blocking(move || start(&url, password)).await;
        let standby = Self { cluster: or_panic(started) };
        standby.wait_until(STREAMS).await;
        standby
    }

    /// The server itself.
    #[must_use]
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// The URL of a database on the standby.
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        self.cluster.url(database)
    }

    /// Makes it a primary, with what it has replayed, and waits until it takes writes.
    ///
    /// # Panics
    ///
    /// When that takes more than 60 seconds.
    ///
    /// # Cancel safety
    ///
    /// Dropping it leaves the servers as they are at that moment; they end with their values.
    pub async fn promote(&self) {
        self.cluster.run_sql("postgres", "SELECT pg_promote(true, 60)").await;
        self.wait_until("SELECT NOT pg_is_in_recovery()").await;
    }

    /// Stops receiving: what the primary does from now on is not seen here. Waits until it is so.
    ///
    /// # Panics
    ///
    /// When that takes more than 60 seconds.
    ///
    /// # Cancel safety
    ///
    /// Dropping it leaves the servers as they are at that moment; they end with their values.
    pub async fn cut(&self) {
        let sql = "ALTER SYSTEM SET primary_conninfo = ''";
        self.cluster.run_sql("postgres", sql).await;
        self.cluster.run_sql("postgres", "SELECT pg_reload_conf()").await;
        self.wait_until("SELECT NOT EXISTS (SELECT FROM pg_stat_wal_receiver)").await;
    }

    /// Waits until the standby has replayed what the primary has written until now.
    ///
    /// # Panics
    ///
    /// When that takes more than 60 seconds.
    ///
    /// # Cancel safety
    ///
    /// Dropping it leaves the servers as they are at that moment; they end with their values.
    pub async fn wait_for_replay(&self, primary: &Cluster) {
        let rows =
            admin::rows(primary.admin_url(), "SELECT pg_current_wal_lsn()::text".to_owned(), Vec::new());
        let position: String = or_panic(rows.await.and_then(first));
        self.wait_until(&format!("SELECT pg_last_wal_replay_lsn() >= '{position}'::pg_lsn")).await;
    }

    /// Asks again and again, because the server has no way to tell.
    async fn wait_until(&self, sql: &str) {
        let start = Instant::now();
        loop {
            let rows = admin::rows(self.cluster.admin_url(), sql.to_owned(), Vec::new()).await;
            if or_panic(rows.and_then(first)) {
                return;
            }
            assert!(start.elapsed() < LIMIT, "not true within {LIMIT:?}: {sql}\n{}", self.cluster.log());
            admin::blocking(|| thread::sleep(PAUSE)).await;
        }
    }
}

/// The only value of an answer.
fn first<T>(rows: Vec<PgRow>) -> Outcome<T>
where
    T: for<'r> Decode<'r, Postgres> + Type<Postgres>,
{
    let row = rows.first().ok_or("an answer without a row")?;
    row.try_get(0).map_err(|error| format!("cannot read an answer: {error}"))
}

fn start(url: &str, password: Option<String>) -> Outcome<Cluster> {
    let binaries = binaries::postgres()?;
    let process = Guarded::new("leasehold-pg-standby-", "data/postmaster.pid")?;
    process.run(&binaries.join("pg_basebackup"), |command| {
        command.args(["-D", "data", "-X", "stream", "-R", "-c", "fast", "--no-sync", "-d", url]);
    })?;
    Cluster::launch(process, &binaries, password)
}
