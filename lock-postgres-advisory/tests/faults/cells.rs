//! Guarantees (`docs/coverage.md`) of advisory locks: dead paths, stopped and killed holders, notifications.
use std::io::{BufRead as _, BufReader, Lines, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::*;
use leasehold_api::{ErrorKind, Lock as _, LockExt as _, MultiGuard, Validity};
use leasehold_postgres::sqlx::postgres::PgListener;
use leasehold_postgres::{Identifier, channel};
use test_bounds::within;
use test_servers::{Cluster, ClusterOptions, Database, PgBouncer, Proxy, StopMode};

/// The child process: holds a key, and prints the guard's validity after a line on its input.
#[test]
fn child() {
    // Does nothing unless a test below started this process.
    let Ok(task) = std::env::var("LEASEHOLD_TEST_CHILD") else { return };
    let (scope, url) = task.split_once(' ').unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        let lock = match scope {
            "session" => numbers(quick(url)).connect().await.unwrap(),
            _ => in_transactions(quick(url)).connect().await.unwrap(),
        };
        let guard = take(&lock, "7").await;
        println!("holds");
        let told = tokio::task::spawn_blocking(|| std::io::stdin().lines().next().unwrap().unwrap());
        told.await.unwrap();
        println!("reads {:?}", guard.validity());
        guard.lost().await;
        // The process and its client keep running.
        std::future::pending::<()>().await;
    });
}

/// A child process, killed when the test ends or fails.
struct Process {
    child: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Process {
    /// Starts a child and returns when it holds key 7.
    fn holding(scope: &str, url: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "cells::child", "--nocapture"])
            .env("LEASEHOLD_TEST_CHILD", format!("{scope} {url}"));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut process = Self { child, input, output: BufReader::new(output).lines() };
        process.says("holds");
        process
    }

    fn says(&mut self, what: &str) -> String {
        self.output.by_ref().map(Result::unwrap).find(|line| line.contains(what)).unwrap()
    }

    fn signal(&self, signal: &str) {
        let done = Command::new("kill").args([signal, &self.child.id().to_string()]).status().unwrap();
        assert!(done.success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

// Row b, docs/hazards.md H35: the pooler sees that the client's socket was closed, and ends the transaction.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_holder_behind_a_pooler_frees() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let lock = session(database.url()).await;
    let bouncer = PgBouncer::transaction_mode(cluster);
    let mut holder = Process::holding("transaction", &bouncer.url(database.name()));
    assert_eq!(held(cluster, database.name()).await, [7]);
    holder.child.kill().unwrap();
    holder.child.wait().unwrap();
    let bound = LIVENESS.server_gives_up + LONG / 4;
    lock.key("7").wait(bound).acquire().await.unwrap().release().await.unwrap();
}

// Row c: the holder's loss comes first, and others get in when the session ends. On loopback the kernel answers the
// server's probes, so the test cuts the connection itself.
#[tokio::test(flavor = "multi_thread")]
async fn others_get_in_when_the_session_of_a_dead_path_ends() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let other = Arc::new(session(database.url()).await);
    let proxy = Proxy::start(cluster.address()).await;
    for lock in both_with(quick(&proxy.url(database.url()))).await {
        let guard = take(&lock, "7").await;
        let waiting = waiter(&other, "7");
        until_queued(cluster, database.name(), 1).await;
        proxy.stall();
        lost_within(&guard, LONG).await;
        assert!(!waiting.is_finished(), "two holders at once");
        proxy.cut();
        let next = within(LONG, "free when the session ends", waiting).await.unwrap().unwrap();
        assert!(next.token() > guard.token());
        // Row d: when the network is back, the old hold stays lost.
        proxy.restore();
        until("usable again", async || match lock.key("8").try_acquire().await {
            Ok(guard) => guard.unwrap().release().await.is_ok(),
            Err(_) => false,
        })
        .await;
        assert_eq!(guard.validity(), Validity::Lost);
        assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Lost);
        assert!(is_held(&lock, "7").await, "the release of a lost guard freed its successor");
        assert_eq!(next.validity(), Validity::Valid);
        next.release().await.unwrap();
        within(LONG, "not ended", lock.close()).await.unwrap();
    }
}

// H35, row c: the server ends a transaction that its client no longer confirms, although the pooler's connection
// stays open and the proxy's kernel answers every probe.
#[tokio::test(flavor = "multi_thread")]
async fn a_silent_client_behind_a_pooler_is_given_up_by_the_server() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let other = Arc::new(session(database.url()).await);
    let pooler = PgBouncer::transaction_mode(cluster);
    let proxy = Proxy::start(pooler.address()).await;
    let config = quick(&proxy.url(&pooler.url(database.name())));
    let lock = in_transactions(config).connect().await.unwrap();
    let guard = take(&lock, "7").await;
    let waiting = waiter(&other, "7");
    until_queued(cluster, database.name(), 1).await;
    // Longer than the server's limit, because every confirmation restarts it.
    tokio::time::sleep(LIVENESS.server_gives_up + ms(500)).await;
    assert_eq!(guard.validity(), Validity::Valid);
    assert!(!waiting.is_finished(), "two holders at once");
    proxy.stall();
    lost_within(&guard, LONG).await;
    let next = within(LIVENESS.server_gives_up + LONG, "not given up", waiting).await.unwrap().unwrap();
    assert!(next.token() > guard.token());
    next.release().await.unwrap();
}

/// Returns, for each session, the seconds until the server's kernel sends the next keepalive probe. `None` if no
/// keepalive timer runs.
#[cfg(target_os = "linux")]
async fn probes(cluster: &Cluster, database: &Database) -> Vec<Option<f64>> {
    let ports: Vec<i32> = sqlx::query_scalar(
        "SELECT client_port FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()",
    )
    .fetch_all(&mut database.connect().await)
    .await
    .unwrap();
    let sockets = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let port = |address: &str| u16::from_str_radix(address.rsplit_once(':').unwrap().1, 16).unwrap();
    let timer = |client: i32| {
        let mut lines = sockets.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
        let ours = |line: &Vec<&str>| port(line[1]) == cluster.port() && i32::from(port(line[2])) == client;
        let (kind, ticks) = lines.find(ours)?[5].split_once(':').unwrap();
        // Timer 2 is the keepalive timer, in hundredths of a second.
        (kind == "02").then(|| f64::from(u32::from_str_radix(ticks, 16).unwrap()) / 100.0)
    };
    ports.into_iter().map(timer).collect()
}

// Row c, docs/hazards.md H07: on loopback only the probes can be shown, not that the server ends the session.
#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread")]
async fn the_server_asks_soon_whether_a_quiet_client_is_there() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let liveness = leasehold_postgres::Liveness::default();
    let config = server(database.url()).liveness(liveness);
    let lock = numbers(config.clone()).connect().await.unwrap();
    let in_transaction = leasehold_postgres_advisory::XactConfig::new(config).connect().await.unwrap();
    let _guards = [take(&lock, "7").await, take(&in_transaction, "8").await];
    until("every session is watched", async || {
        let probes = probes(cluster, &database).await;
        let soon = |probe: &Option<f64>| {
            probe.is_some_and(|seconds| seconds <= liveness.server_gives_up.as_secs_f64() / 2.0)
        };
        probes.len() >= 2 && probes.iter().all(soon)
    })
    .await;
}

// Row e: a stopped process keeps its lock until it runs again, because its machine answers the probes.
#[tokio::test(flavor = "multi_thread")]
async fn a_holder_that_was_stopped_reads_lost_and_gives_back() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let other = session(database.url()).await;
    for scope in ["session", "transaction"] {
        let mut holder = Process::holding(scope, database.url());
        holder.signal("-STOP");
        tokio::time::sleep(LIVENESS.lost_after + ms(500)).await;
        assert!(is_held(&other, "7").await, "{scope}");
        holder.input.write_all(b"go on\n").unwrap();
        holder.signal("-CONT");
        // At the first query, before the client has exchanged anything with the server.
        assert_eq!(holder.says("reads"), "reads Lost", "{scope}");
        let guard = take(&other, "7").await;
        assert!(holder.child.try_wait().unwrap().is_none(), "{scope}: given back, not dead");
        guard.release().await.unwrap();
    }
}

// docs/hazards.md H33: commits that notify run one after the other, so only keys with pollers are notified.
#[tokio::test(flavor = "multi_thread")]
async fn notifies_only_when_somebody_polls() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let holder = session(database.url()).await;
    let lock = Arc::new(numbers(server(database.url())).waiting(1).connect().await.unwrap());
    let mut heard = PgListener::connect(database.url()).await.unwrap();
    heard.listen(&channel("advisory", &Identifier::new("leasehold").unwrap())).await.unwrap();
    for _ in 0..20 {
        let guard = take(&holder, "1").await;
        // A try that finds the key held does not become a waiter.
        assert!(is_held(&lock, "1").await);
        guard.release().await.unwrap();
        let guards = holder.keys(["4", "5", "6"]).acquire().await.unwrap();
        guards.release().await.unwrap();
    }
    // The server itself serves a waiter in its queue.
    let guard = take(&holder, "1").await;
    let waiting = waiter(&lock, "1");
    until_queued(cluster, database.name(), 1).await;
    guard.release().await.unwrap();
    let first = waiting.await.unwrap().unwrap();
    // `first` keeps the only session for waiting, so the next waiters poll.
    let contended = [take(&holder, "2").await, take(&holder, "3").await];
    let waiting = ["2", "3"].map(|key| waiter(&lock, key));
    until("both poll", async || {
        let locks = cluster.advisory_locks(database.name()).await;
        locks.iter().filter(|lock| lock.mode == "ShareLock").count() == 2
    })
    .await;
    for (guard, waiting) in contended.into_iter().zip(waiting) {
        let key = guard.key().to_string();
        guard.release().await.unwrap();
        let told = within(LONG, "not ended", heard.recv()).await.unwrap();
        assert_eq!(told.payload(), key, "somebody was notified who does not poll");
        waiting.await.unwrap().unwrap().release().await.unwrap();
    }
    first.release().await.unwrap();
}

/// Counts warnings about the lock table.
struct Warnings;

static WARNINGS: AtomicUsize = AtomicUsize::new(0);

impl tracing::field::Visit for Warnings {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        if field.name() == "message" && format!("{value:?}").contains("max_locks_per_transaction") {
            WARNINGS.fetch_add(1, Ordering::SeqCst);
        }
    }
}

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }

    fn event(&self, event: &tracing::Event<'_>) {
        event.record(&mut Self);
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

// docs/hazards.md H19.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_fills_half_of_the_lock_table_warns_once() {
    tracing::subscriber::set_global_default(Warnings).unwrap();
    let small =
        ClusterOptions::new().setting("max_connections", "10").setting("max_locks_per_transaction", "10");
    let cluster = Cluster::start(small);
    let lock = session(&cluster.url("postgres")).await;
    let half = lock.capabilities().max_holds.unwrap() / 2;
    let mut guards = Vec::new();
    for n in 0..half {
        guards.push(take(&lock, &n.to_string()).await);
    }
    assert_eq!(WARNINGS.load(Ordering::SeqCst), 0, "{half} are only half of it");
    for n in half..half + 3 {
        guards.push(take(&lock, &n.to_string()).await);
    }
    assert_eq!(WARNINGS.load(Ordering::SeqCst), 1);
    guards.into_iter().collect::<MultiGuard>().release().await.unwrap();
    cluster.stop(StopMode::Fast).await;
}
