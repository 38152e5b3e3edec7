//! A streaming standby.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use test_setup::programs;

use crate::guarded::Guarded;
use crate::user::Medium;
use crate::{Cluster, Outcome, admin, or_panic, tree};

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
        let (data, environment) = (primary.socket_directory().join("data"), primary.environment());
        let started = admin::blocking(move || start(&url, &data, password, environment)).await;
        let standby = Self { cluster: or_panic(started) };
        standby.wait_until(STREAMS).await;
        standby
    }

    /// The server itself.
    #[must_use]
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// The server alone, such as after its promotion.
    #[must_use]
    pub fn into_cluster(self) -> Cluster {
        self.cluster
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
        let position: String = or_panic(rows.await.and_then(admin::first));
        self.wait_until(&format!("SELECT pg_last_wal_replay_lsn() >= '{position}'::pg_lsn")).await;
    }

    /// Asks again and again, because the server has no way to tell.
    async fn wait_until(&self, sql: &str) {
        let start = Instant::now();
        loop {
            let rows = admin::rows(self.cluster.admin_url(), sql.to_owned(), Vec::new()).await;
            if or_panic(rows.and_then(admin::first)) {
                return;
            }
            assert!(start.elapsed() < LIMIT, "not true within {LIMIT:?}: {sql}\n{}", self.cluster.log());
            admin::blocking(|| thread::sleep(PAUSE)).await;
        }
    }
}

/// A copy by the server's own interface for backups, since `pg_basebackup` is not part of every package and refuses
/// servers newer than itself.
fn start(
    url: &str,
    primary: &Path,
    password: Option<String>,
    environment: Vec<(String, String)>,
) -> Outcome<Cluster> {
    let binaries = programs::postgres()?;
    let process = Guarded::new("leasehold-pg-standby-", "data/postmaster.pid", Medium::Memory)?
        .with_environment(environment);
    let copy = |from: &str, is_wanted: fn(&str, &str) -> bool| {
        let to = process.directory().join("data").join(from);
        tree::copy(&primary.join(from), &to, |path| process.give(path), is_wanted)
    };
    // What is written meanwhile is in the log, which is therefore copied last.
    let label = admin::during_backup(url, || copy("", belongs_to_a_copy))?;
    copy("pg_wal", |_, _| true)?;
    let data = process.directory().join("data");
    tree::close(&data)?;
    process.write("data/backup_label", &label)?;
    process.write("data/standby.signal", "")?;
    // The last line of a name counts.
    let settings = data.join("postgresql.auto.conf");
    let known = fs::read_to_string(&settings)
        .map_err(|error| format!("cannot read {}: {error}", settings.display()))?;
    let follow = format!("{known}\nprimary_conninfo = '{}'\n", url.replace('\'', "''"));
    process.write("data/postgresql.auto.conf", &follow)?;
    Cluster::launch(process, &binaries, password)
}

/// Whether a file in a folder of the data directory (empty: the directory itself) is one that a copy needs.
fn belongs_to_a_copy(folder: &str, name: &str) -> bool {
    const OF_THE_PROCESS: [&str; 2] = ["postmaster.pid", "postmaster.opts"];
    const EMPTIED: [&str; 7] =
        ["pg_wal", "pg_replslot", "pg_dynshmem", "pg_notify", "pg_serial", "pg_snapshots", "pg_subtrans"];
    let is_temporary = name.starts_with("pgsql_tmp") || name.starts_with("pg_internal.init");
    let is_of_the_process = folder.is_empty() && OF_THE_PROCESS.contains(&name);
    !(is_temporary || is_of_the_process || EMPTIED.contains(&folder))
}
