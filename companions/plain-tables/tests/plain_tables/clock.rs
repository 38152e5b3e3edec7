//! Timeouts end by the clock of the server while it runs the statement, not by the clock of the client that sends it.

use leasehold_plain_tables::{IdType, Table, TimeoutTable};
use test_servers::sql::{run, text, until};

use super::{column, database};

/// The client sends its statement before the window ends, and the server runs it after the end, because the table is
/// locked. If the client sent its own time, that time would be too early, as from a client whose clock is slow.
#[tokio::test]
async fn the_time_at_which_a_statement_is_sent_does_not_count() {
    for is_unix in [false, true] {
        let (kind, now) = if is_unix {
            ("bigint", "EXTRACT(EPOCH FROM clock_timestamp())")
        } else {
            ("timestamptz", "clock_timestamp()")
        };
        // The beginning of a window that ends now, or in less than a second.
        let since =
            if is_unix { format!("ceil({now}) - 3600") } else { format!("{now} - interval '3600 s'") };
        let end = if is_unix { "at + 3600" } else { "at + interval '3600 s'" };
        let (_db, pool, mut observer) = database(&format!(
            "CREATE TABLE job (id text PRIMARY KEY, at {kind}, timeout int);
            INSERT INTO job VALUES ('hourly', {now}, 3600)"
        ))
        .await;
        let job = Table::new("job").unwrap();
        let jobs = TimeoutTable::new(job, column("id"), IdType::Text, column("at"), column("timeout"));
        let jobs = if is_unix { jobs.unix_time() } else { jobs };
        for is_batch in [false, true] {
            let mut operator = pool.begin().await.unwrap();
            run(&mut *operator, "LOCK TABLE job").await;
            let (calling, on) = (jobs.clone(), pool.clone());
            let call = tokio::spawn(async move {
                if is_batch {
                    calling.capture(&on, (), 5).await.unwrap().len() == 1
                } else {
                    calling.acquire(&on, "hourly").await.unwrap()
                }
            });
            let sent = "SELECT count(*) = 1 FROM pg_stat_activity
                WHERE datname = current_database() AND wait_event_type = 'Lock'";
            until(&mut observer, sent).await;
            run(&mut *operator, &format!("UPDATE job SET at = {since}")).await;
            let end = text(&mut *operator, &format!("SELECT {end} FROM job")).await;
            until(&mut observer, &format!("SELECT '{end}' <= {now}")).await;
            operator.commit().await.unwrap();
            assert!(call.await.unwrap(), "{kind}, batch {is_batch}: its window has ended");
            let begun = format!("SELECT at >= '{end}' FROM job");
            assert_eq!(text(&mut observer, &begun).await, "true", "{kind}: the new window begins at the end");
        }
    }
}
