//! The server of a store, and what is done to it.

use std::path::Path;
use std::time::{Duration, SystemTime};

use crate::clock::Clock;
use test_servers::{Cluster, ClusterOptions, Proxy, Standby, StopMode};

/// A server behind a proxy. Another one takes its place when its standby is promoted.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) cluster: Cluster,
    pub(crate) proxy: Proxy,
    pub(crate) database: String,
    /// Its clock, if it can be set.
    clock: Option<Clock>,
}

impl Server {
    /// Starts a server, whose clock can be set where there is `faketime`; answers the URL of the store as well.
    pub(crate) async fn start(scheme: &str, parameters: &str, faketime: Option<&Path>) -> (Self, String) {
        let clock = faketime.map(Clock::new);
        // What it has confirmed outlives its processes: they have given it to the kernel, which is not killed here.
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

    /// How many sessions were ended.
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

    /// A fail-over to a standby that has everything, or to one that has missed the last commits. The old server has ended
    /// before the new one takes writes.
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

    /// Lets the server write nothing for so long, and starts it again; whether it wanted to write.
    pub(crate) async fn fill_disk(&self, pause: Duration) -> bool {
        const PAGE: u64 = 8192;
        let logged = self.cluster.log().len();
        // It can log that it cannot write, and a page is never written in part.
        let limit = (logged as u64 / PAGE + 16) * PAGE;
        // What it writes next is behind that place.
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

    /// A step of the server's clock; whether the server sees it. Where it cannot be set, the ends of the leases come nearer or
    /// move away as if it had been; whether there were leases.
    pub(crate) async fn step_clock(&mut self, seconds: i64) -> bool {
        let Some(clock) = &mut self.clock else { return self.step_leases(seconds).await > 0 };
        let ahead = clock.step(seconds) * 1000;
        let milliseconds = || SystemTime::UNIX_EPOCH.elapsed().unwrap().as_millis() as i64;
        let before = milliseconds();
        let sql = "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint";
        let seen = self.cluster.number("postgres", sql).await - ahead;
        // Rounded.
        (before - 1..=milliseconds() + 1).contains(&seen)
    }

    async fn step_leases(&self, seconds: i64) -> i64 {
        let sql = format!(
            "WITH stepped AS (UPDATE leasehold.lease SET expires_at = expires_at - interval '{seconds} seconds' \
             WHERE expires_at > clock_timestamp() RETURNING key) SELECT count(*) FROM stepped"
        );
        self.cluster.number(&self.database, sql).await
    }

    /// What the store's clients have left behind, when there should be none any more.
    pub(crate) async fn leftovers(&self) -> Vec<String> {
        let sessions = self.cluster.backends(&self.database).await;
        let locks = self.cluster.advisory_locks(&self.database).await;
        let sessions = sessions.iter().map(|session| format!("{session:?}"));
        sessions.chain(locks.iter().map(|lock| format!("{lock:?}"))).collect()
    }
}
