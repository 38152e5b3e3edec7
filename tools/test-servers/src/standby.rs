//! A streaming standby.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use test_setup::programs;

use crate::guarded::Guarded;
use crate::user::Medium;
use crate::{Cluster, Outcome, admin, or_panic, tree};

/// Time limit for the standby to reach a state.
const LIMIT: Duration = Duration::from_secs(60);

const PAUSE: Duration = Duration::from_millis(20);

const STREAMS: &str = "SELECT EXISTS (SELECT FROM pg_stat_wal_receiver WHERE status = 'streaming')";

/// A hot standby of a cluster. It follows, serves reads, and can be promoted.
#[derive(Debug)]
pub struct Standby {
    cluster: Cluster,
}

impl Standby {
    /// Copies the cluster and starts to follow it. Takes a second or two.
    ///
    /// # Panics
    ///
    /// If the copy cannot be made or started.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn of(primary: &Cluster) -> Self {
        let (url, password) = (primary.admin_url(), primary.password().map(str::to_owned));
        let (data, environment) = (primary.socket_directory().join("data"), primary.environment());
        let started = admin::blocking(move || start(&url, &data, password, environment)).await;
        let standby = Self { cluster: or_panic(started) };
        standby.wait_until(STREAMS).await;
        standby
    }

    /// Returns the standby's server.
    #[must_use]
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// Returns the server alone, for example after its promotion.
    #[must_use]
    pub fn into_cluster(self) -> Cluster {
        self.cluster
    }

    /// Returns the URL of a database on the standby.
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        self.cluster.url(database)
    }

    /// Promotes the standby to a primary with the replayed data, and waits until it accepts writes.
    ///
    /// # Panics
    ///
    /// If it takes more than 60 seconds.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn promote(&self) {
        self.cluster.run_sql("postgres", "SELECT pg_promote(true, 60)").await;
        self.wait_until("SELECT NOT pg_is_in_recovery()").await;
    }

    /// Stops receiving, so later changes of the primary do not arrive. Waits until that is in effect.
    ///
    /// # Panics
    ///
    /// If it takes more than 60 seconds.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn cut(&self) {
        let sql = "ALTER SYSTEM SET primary_conninfo = ''";
        self.cluster.run_sql("postgres", sql).await;
        self.cluster.run_sql("postgres", "SELECT pg_reload_conf()").await;
        self.wait_until("SELECT NOT EXISTS (SELECT FROM pg_stat_wal_receiver)").await;
    }

    /// Waits until the standby has replayed everything that the primary had written at the call.
    ///
    /// # Panics
    ///
    /// If it takes more than 60 seconds.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn wait_for_replay(&self, primary: &Cluster) {
        let rows =
            admin::rows(primary.admin_url(), "SELECT pg_current_wal_lsn()::text".to_owned(), Vec::new());
        let position: String = or_panic(rows.await.and_then(admin::first));
        self.wait_until(&format!("SELECT pg_last_wal_replay_lsn() >= '{position}'::pg_lsn")).await;
    }

    /// Polls, because the server sends no notification.
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

/// Copies through the server's interface for backups, because `pg_basebackup` is missing in some packages and refuses
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
    // Copies the WAL last, because it contains the writes made during the copy.
    let label = admin::during_backup(url, || copy("", belongs_to_a_copy))?;
    copy("pg_wal", |_, _| true)?;
    let data = process.directory().join("data");
    tree::close(&data)?;
    process.write("data/backup_label", &label)?;
    process.write("data/standby.signal", "")?;
    // Appends the settings, because the last line of a name counts.
    let settings = data.join("postgresql.auto.conf");
    let known = fs::read_to_string(&settings)
        .map_err(|error| format!("cannot read {}: {error}", settings.display()))?;
    let follow = format!("{known}\nprimary_conninfo = '{}'\n", url.replace('\'', "''"));
    process.write("data/postgresql.auto.conf", &follow)?;
    Cluster::launch(process, &binaries, password)
}

/// Returns whether a copy needs this file. `folder` is a folder of the data directory, or empty for the directory
/// itself.
fn belongs_to_a_copy(folder: &str, name: &str) -> bool {
    const OF_THE_PROCESS: [&str; 2] = ["postmaster.pid", "postmaster.opts"];
    const EMPTIED: [&str; 7] =
        ["pg_wal", "pg_replslot", "pg_dynshmem", "pg_notify", "pg_serial", "pg_snapshots", "pg_subtrans"];
    let is_temporary = name.starts_with("pgsql_tmp") || name.starts_with("pg_internal.init");
    let is_of_the_process = folder.is_empty() && OF_THE_PROCESS.contains(&name);
    !(is_temporary || is_of_the_process || EMPTIED.contains(&folder))
}
