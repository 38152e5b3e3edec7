//! A cluster starts, follows the tests' instructions, and leaves nothing behind.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use sqlx::{Connection as _, PgConnection};
use test_bounds::Bound;
use test_servers::sql::{number, refused, text, texts};
use test_servers::{Cluster, ClusterOptions, Signal, StopMode, fresh_database, prepared_database};
use tokio::signal::unix::SignalKind;

/// Polls a state of another process, which cannot be awaited.
fn wait_until(what: &str, mut is_true: impl FnMut() -> bool) {
    let start = Bound::new(Duration::from_secs(60));
    while !is_true() {
        start.check(format_args!("never: {what}"));
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Returns whether the process runs. A zombie does not count.
fn runs(pid: u32) -> bool {
    let output = Command::new("ps").args(["-o", "stat=", "-p", &pid.to_string()]).output().unwrap();
    !matches!(String::from_utf8_lossy(&output.stdout).trim().chars().next(), None | Some('Z'))
}

#[tokio::test]
async fn concurrent_tests_get_databases_of_their_own() {
    let (first, second, third) = tokio::join!(fresh_database(), fresh_database(), fresh_database());
    assert_ne!(first.name(), second.name());
    let mut connection = first.connect().await;
    sqlx::query("CREATE TABLE thing (a int)").execute(&mut connection).await.unwrap();
    for other in [second, third] {
        let mut connection = other.connect().await;
        assert_eq!(number(&mut connection, "SELECT count(*) FROM pg_class WHERE relname = 'thing'").await, 0);
    }
}

#[tokio::test]
async fn prepared_databases_have_what_the_script_makes_and_nothing_else() {
    let rows = |table: &str| format!("CREATE TABLE {table} (a int); INSERT INTO {table} VALUES (1)");
    for table in ["one", "other", "one"] {
        let script = rows(table);
        let (first, second) = tokio::join!(prepared_database(&script), prepared_database(&script));
        for database in [&first, &second] {
            let mut connection = database.connect().await;
            let insert = format!("INSERT INTO {table} VALUES (2)");
            sqlx::raw_sql(sqlx::AssertSqlSafe(insert)).execute(&mut connection).await.unwrap();
            let count = format!("SELECT count(*) FROM {table}");
            let count = sqlx::query_scalar::<_, i64>(sqlx::AssertSqlSafe(count));
            assert_eq!(count.fetch_one(&mut connection).await.unwrap(), 2);
            let tables = "SELECT count(*) FROM pg_class WHERE relname IN ('one', 'other')";
            assert_eq!(number(&mut connection, tables).await, 1);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_paused_clock_stands_still_during_the_helpers_work() {
    let start = tokio::time::Instant::now();
    let timer = tokio::spawn(tokio::time::sleep(Duration::from_secs(3600)));
    let database = Cluster::shared().fresh_database().await;
    Cluster::shared().run_sql(database.name(), "SELECT pg_sleep(0.1)").await;
    assert!(!timer.is_finished());
    assert_eq!(start.elapsed(), Duration::ZERO);
}

#[tokio::test]
async fn restarts_keep_port_and_data() {
    let cluster = Cluster::start(ClusterOptions::new().setting("work_mem", "5MB"));
    let database = cluster.fresh_database().await;
    let script = "CREATE TABLE kept (a int); CREATE UNLOGGED TABLE lost (a int);
        INSERT INTO kept VALUES (1); INSERT INTO lost VALUES (1); CHECKPOINT";
    cluster.run_sql(database.name(), script).await;
    let pid = cluster.pid();
    cluster.restart(StopMode::Fast).await;
    assert_ne!(cluster.pid(), pid);
    let mut connection = database.connect().await;
    assert_eq!(number(&mut connection, "SELECT count(*) FROM lost").await, 1, "a clean stop keeps it");
    let work_mem: String = sqlx::query_scalar("SHOW work_mem").fetch_one(&mut connection).await.unwrap();
    assert_eq!(work_mem, "5MB");

    cluster.kill_postmaster().await;
    assert_eq!(cluster.pid(), None);
    assert!(PgConnection::connect(database.url()).await.is_err(), "nobody may answer");
    assert!(sqlx::query("SELECT 1").execute(&mut connection).await.is_err(), "its process must be gone");
    cluster.start_again().await;
    let mut connection = database.connect().await;
    assert_eq!(number(&mut connection, "SELECT count(*) FROM kept").await, 1);
    assert_eq!(number(&mut connection, "SELECT count(*) FROM lost").await, 0, "a crash empties it");
}

#[tokio::test]
async fn a_backend_can_be_killed_alone() {
    let cluster = Cluster::start(ClusterOptions::new());
    let database = cluster.fresh_database().await;
    let (mut victim, mut other) = (database.connect().await, database.connect().await);
    let pid: i32 = sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut victim).await.unwrap();
    cluster.kill_backend(pid, Signal::TERM);
    assert!(sqlx::query("SELECT pg_sleep(60)").execute(&mut victim).await.is_err());
    assert_eq!(number(&mut other, "SELECT 1::bigint").await, 1);
}

#[tokio::test]
async fn a_paused_server_answers_after_it_resumes() {
    let cluster = Cluster::start(ClusterOptions::new());
    let mut connection = PgConnection::connect(&cluster.admin_url()).await.unwrap();
    cluster.pause();
    let asking = tokio::spawn(async move { number(&mut connection, "SELECT 7::bigint").await });
    // Long enough for every server that is not paused.
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!asking.is_finished());
    cluster.resume();
    assert_eq!(asking.await.unwrap(), 7);
    cluster.pause();
    // Dropped while paused, because its end must not wait.
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_server_whose_files_are_limited_writes_no_further_until_it_is_started_again() {
    let cluster = Cluster::start(ClusterOptions::new());
    let copy =
        format!("COPY (SELECT repeat('x', 2000000)) TO '{}/large'", cluster.socket_directory().display());
    let mut connection = PgConnection::connect(&cluster.admin_url()).await.unwrap();
    cluster.limit_files(1_000_000);
    let error = sqlx::raw_sql(sqlx::AssertSqlSafe(copy.clone())).execute(&mut connection).await.unwrap_err();
    assert!(error.to_string().contains("File too large"), "{error}");
    cluster.restart(StopMode::Immediate).await;
    cluster.run_sql("postgres", copy).await;
}

#[tokio::test]
async fn variables_are_those_of_the_server() {
    let cluster = Cluster::start(ClusterOptions::new().variable("LEASEHOLD_TEST", "17"));
    let script = "CREATE TABLE seen (a bigint); COPY seen FROM PROGRAM 'echo $LEASEHOLD_TEST'";
    cluster.run_sql("postgres", script).await;
    assert_eq!(cluster.number("postgres", "SELECT a FROM seen").await, 17);
}

#[tokio::test]
async fn sessions_and_advisory_locks_are_seen() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    assert_eq!(cluster.backends(database.name()).await, []);
    let url = format!("{}?application_name=somebody", database.url());
    let mut connection = PgConnection::connect(&url).await.unwrap();
    sqlx::query("SELECT pg_advisory_lock(-5), pg_advisory_lock_shared(3, -4)")
        .execute(&mut connection)
        .await
        .unwrap();
    let start = Bound::new(Duration::from_secs(60));
    let backend = loop {
        let mut backends = cluster.backends(database.name()).await;
        assert_eq!(backends.len(), 1);
        // The server begins to wait after its reply.
        if backends[0].waits_for == "Client/ClientRead" {
            break backends.remove(0);
        }
        start.check("the session never waits for its client");
    };
    assert_eq!((backend.application_name.as_str(), backend.state.as_str()), ("somebody", "idle"));
    let locks = cluster.advisory_locks(database.name()).await;
    let seen: Vec<_> =
        locks.iter().map(|lock| (lock.key_space, lock.number(), lock.mode.as_str(), lock.granted)).collect();
    let pair = (3 << 32) | i64::from((-4_i32).cast_unsigned());
    assert_eq!(seen, [(2, pair, "ShareLock", true), (1, -5, "ExclusiveLock", true)]);
    assert!(locks.iter().all(|lock| lock.pid == backend.pid));
}

#[tokio::test]
async fn a_password_is_asked_for() {
    let cluster = Cluster::start(ClusterOptions::new().password("s3cret/@"));
    PgConnection::connect(&cluster.admin_url()).await.unwrap();
    let wrong = format!("postgres://postgres:wrong@{}/postgres", cluster.address());
    let error = PgConnection::connect(&wrong).await.unwrap_err();
    assert_eq!(error.as_database_error().unwrap().code().unwrap(), "28P01");
}

#[test]
fn nothing_is_left_of_a_dropped_cluster() {
    let cluster = Cluster::start(ClusterOptions::new());
    let (pid, directory) = (cluster.pid().unwrap(), cluster.socket_directory());
    assert!(runs(pid) && directory.exists());
    drop(cluster);
    assert!(!runs(pid));
    assert!(!directory.exists());
}

const CHILD: &str = "TEST_SERVERS_CHILD";

/// Runs only as a child process of the next test, which kills it.
#[test]
fn child_with_a_cluster() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let cluster = Cluster::start(ClusterOptions::new());
    if std::env::var(CHILD).unwrap() == "paused" {
        cluster.pause();
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        // Handles SIGINT, because a shell that starts a background process ignores it.
        let mut interrupted = tokio::signal::unix::signal(SignalKind::interrupt()).unwrap();
        println!("\ncluster {} {}", cluster.pid().unwrap(), cluster.socket_directory().display());
        let _ = tokio::time::timeout(Duration::from_secs(60), interrupted.recv()).await;
        // Exits without running destructors, as the signal itself does.
        std::process::exit(1);
    });
}

#[test]
fn nothing_is_left_when_the_process_is_killed() {
    for kind in ["plain", "paused", "interrupted"] {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["child_with_a_cluster", "--exact", "--nocapture"])
            .env(CHILD, kind)
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let (pid, directory) = lines.into_iter().find_map(|line| cluster_of(&line)).unwrap();
        assert!(runs(pid) && directory.exists());
        if kind == "interrupted" {
            // Sends SIGINT to the whole group, as Ctrl-C at the terminal does.
            let group = format!("-{}", child.id());
            assert!(Command::new("kill").args(["-INT", "--", &group]).status().unwrap().success());
        } else {
            child.kill().unwrap();
        }
        child.wait().unwrap();
        wait_until("the server ends", || !runs(pid));
        wait_until("the directory is removed", || !directory.exists());
    }
}

#[tokio::test]
async fn databases_on_a_given_server_are_dropped() {
    let given = Cluster::start(ClusterOptions::new().setting("log_statement", "ddl"));
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["concurrent_tests_get_databases_of_their_own", "--exact"])
        .env("DATABASE_URL", given.admin_url())
        .output()
        .unwrap();
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stdout));
    assert_eq!(given.log().matches("CREATE DATABASE test_").count(), 3, "{}", given.log());
    let mut connection = PgConnection::connect(&given.admin_url()).await.unwrap();
    assert_eq!(number(&mut connection, "SELECT count(*) FROM pg_database WHERE NOT datistemplate").await, 1);
}

fn cluster_of(line: &str) -> Option<(u32, PathBuf)> {
    let (pid, directory) = line.strip_prefix("cluster ")?.split_once(' ')?;
    Some((pid.parse().ok()?, Path::new(directory).to_owned()))
}

#[tokio::test]
async fn values_are_read_as_text_whatever_their_type() {
    let database = fresh_database().await;
    let mut connection = database.connect().await;
    for (sql, expected) in [
        ("SELECT true", "true"),
        ("SELECT 7::bigint", "7"),
        ("SELECT 't'::text", "t"),
        ("SELECT NULL::boolean", "NULL"),
        ("SELECT 1 WHERE false", "NULL"),
        ("SELECT ARRAY[1, 2]", "{1,2}"),
    ] {
        assert_eq!(text(&mut connection, sql).await, expected, "{sql}");
    }
    assert_eq!(texts(&mut connection, "SELECT generate_series(1, 3)").await, ["1", "2", "3"]);
    assert_eq!(refused(&mut connection, "SELECT 1 / 0").await, "22012");
}
