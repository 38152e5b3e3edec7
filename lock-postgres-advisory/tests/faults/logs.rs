//! Waits leave nothing in the server's log.

use std::sync::Arc;

use crate::common::*;
use leasehold_api::{ErrorKind, LockExt as _};
use test_servers::{Cluster, ClusterOptions};

// With the server's default of `log_min_messages`, which logs warnings and errors.
#[tokio::test(flavor = "multi_thread")]
async fn waits_that_end_without_the_lock_leave_no_error_or_warning_in_the_server_s_log() {
    let cluster = Cluster::start(ClusterOptions::new());
    let url = cluster.url("postgres");
    let holder = session(&url).await;
    let guard = take(&holder, "7").await;
    for lock in both(&url).await.map(Arc::new) {
        // More waiters than have room in the server's queue.
        let many: Vec<_> = (0..8)
            .map(|_| {
                let lock = Arc::clone(&lock);
                tokio::spawn(async move { lock.key("7").wait(ms(700)).acquire().await.unwrap_err().kind() })
            })
            .collect();
        until("some wait in the queue", async || queued(&cluster, "postgres").await > 0).await;
        for kind in many {
            assert_eq!(kind.await.unwrap(), ErrorKind::Timeout);
        }
        // A wait that is dropped.
        let dropped = waiter(&lock, "7");
        until("it waits", async || queued(&cluster, "postgres").await > 0).await;
        dropped.abort();
        until("it has left", async || queued(&cluster, "postgres").await == 0).await;
        assert!(lock.key("7").try_acquire().await.unwrap().is_none());
    }
    guard.release().await.unwrap();
    // Provokes a last line of the log, so that all earlier lines are written when it is.
    let mut connection = admin(&cluster).await;
    let last = sqlx::raw_sql("SELECT 1/0").execute(&mut connection).await;
    assert!(last.is_err());
    let log = cluster.log();
    let severe = |line: &&str| ["WARNING:", "ERROR:", "FATAL:"].iter().any(|word| line.contains(word));
    let lines: Vec<_> = log.lines().filter(severe).collect();
    assert!(lines.len() == 1 && lines[0].contains("division by zero"), "{log}");
}
