//! The server of a store, and its faults.

use std::path::Path;
use std::time::{Duration, SystemTime};

use crate::clock::Clock;
use test_servers::{Cluster, ClusterOptions, Proxy, Standby, StopMode};

/// A server behind a proxy. A promoted standby replaces it.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) cluster: Cluster,
    pub(crate) proxy: Proxy,
    pub(crate) database: String,
    /// The server's clock, if it can be set.
    clock: Option<Clock>,
}

impl Server {
    /// Starts a server, whose clock can be set if `faketime` is given. Returns it with the URL of the store.
    pub(crate) async fn start(scheme: &str, parameters: &str, faketime: Option<&Path>) -> (Self, String) {
        let clock = faketime.map(Clock::new);
        // No `durable`, because confirmed writes are in the kernel and survive a kill of the server's processes.
        let mut options = ClusterOptions::new();
        for (name, value) in clock.iter().flat_map(Clock::variables) {
            options = options.variable(name, value);
        }
        let cluster = Cluster::start(options);
        let database = cluster.fresh_database().await;
        let proxy = Proxy::start(cluster.address()).await;
        let url = proxy.url(database.url());
        let (_, rest) = url.split_once("://").unwrap();
        let sign = if rest.contains('?') { '&' } else { '?' };
        let url = format!("{scheme}://{rest}{sign}install=true{parameters}");
        (Self { cluster, proxy, database: database.name().to_owned(), clock }, url)
    }

    pub(crate) fn has_connections(&self) -> bool {
        self.proxy.traffic().open > 0
    }

    /// Ends all client sessions. Returns their number.
    pub(crate) async fn end_sessions(&self) -> i64 {
        let sql = format!(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
             WHERE datname = '{}' AND backend_type = 'client backend'",
            self.database
        );
        self.cluster.number("postgres", sql).await
    }

    pub(crate) async fn crash(&self) {
        self.cluster.kill_postmaster().await;
        self.cluster.start_again().await;
    }

    /// Fails over to a standby, which misses the commits of the last `missed`. The old server ends before the new one accepts
    /// writes.
    pub(crate) async fn fail_over(&mut self, missed: Option<Duration>) {
        let standby = Standby::of(&self.cluster).await;
        if let Some(missed) = missed {
            standby.cut().await;
            tokio::time::sleep(missed).await;
        }
        self.cluster.kill_postmaster().await;
        self.proxy.retarget(standby.cluster().address());
        standby.promote().await;
        self.cluster = standby.into_cluster();
    }

    /// Blocks the server's writes for `pause`, then starts it again. Returns whether it tried to write.
    pub(crate) async fn fill_disk(&self, pause: Duration) -> bool {
        const PAGE: u64 = 8192;
        let logged = self.cluster.log().len();
        // The limit leaves room for log messages, and is a multiple of the page size because a page must be written whole.
        let limit = (logged as u64 / PAGE + 16) * PAGE;
        // Fills the WAL file up to the limit, so the next write fails.
        let place = "SELECT (pg_walfile_name_offset(pg_current_wal_insert_lsn())).file_offset::bigint";
        while self.cluster.number("postgres", place).await.unsigned_abs() < limit {
            let fill = "SELECT pg_logical_emit_message(false, '', repeat(' ', 1000000))";
            self.cluster.run_sql("postgres", fill).await;
        }
        self.cluster.limit_files(limit);
        tokio::time::sleep(pause).await;
        self.cluster.restart(StopMode::Immediate).await;
        self.cluster.log()[logged..].contains("File too large")
    }

    /// Moves the server's clock. Returns whether the server sees the step. If the clock cannot be set, moves the ends of the
    /// leases instead and returns whether leases existed.
    pub(crate) async fn step_clock(&mut self, seconds: i64) -> bool {
        let Some(clock) = &mut self.clock else { return self.step_leases(seconds).await > 0 };
        let ahead = clock.step(seconds) * 1000;
        let milliseconds = || SystemTime::UNIX_EPOCH.elapsed().unwrap().as_millis() as i64;
        let before = milliseconds();
        let sql = "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint";
        let seen = self.cluster.number("postgres", sql).await - ahead;
        // One millisecond of tolerance for rounding.
        (before - 1..=milliseconds() + 1).contains(&seen)
    }

    async fn step_leases(&self, seconds: i64) -> i64 {
        let sql = format!(
            "WITH stepped AS (UPDATE leasehold.lease SET expires_at = expires_at - interval '{seconds} seconds' \
             WHERE expires_at > clock_timestamp() RETURNING key) SELECT count(*) FROM stepped"
        );
        self.cluster.number(&self.database, sql).await
    }

    /// Returns the sessions and advisory locks that remain after all clients have ended.
    pub(crate) async fn leftovers(&self) -> Vec<String> {
        let sessions = self.cluster.backends(&self.database).await;
        let locks = self.cluster.advisory_locks(&self.database).await;
        let sessions = sessions.iter().map(|session| format!("{session:?}"));
        sessions.chain(locks.iter().map(|lock| format!("{lock:?}"))).collect()
    }
}
