//! The command during an outage of its server, on a separate server.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "support/command.rs"]
mod support;

use std::process::Command;
use std::time::{Duration, Instant};

use leasehold::postgres::sqlx::{Row as _, raw_sql};
use rustix::process::Signal;
use serde_json::Value;
use support::{Beside, finish};
use test_servers::{Cluster, ClusterOptions, Proxy, StopMode, fresh_database};

fn run(cluster: &Cluster, scheme: &str, arguments: &str, script: &str) -> Command {
    with_store(&cluster.admin_url(), scheme, arguments, script)
}

fn with_store(url: &str, scheme: &str, arguments: &str, script: &str) -> Command {
    let (_, rest) = url.split_once("://").unwrap();
    let mut command = support::tool();
    command.env("LEASEHOLD_URL", format!("{scheme}://{rest}?install=true"));
    command.arg("run").args(arguments.split_whitespace()).args(["--", "sh", "-c", script]);
    command
}

// C6: an unconfirmed release is repeated, even by a tool that is about to end.
#[test]
fn a_release_is_repeated_while_the_server_restarts() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let cluster = Cluster::start(ClusterOptions::new());
    for scheme in ["postgres+row", "postgres+ttl"] {
        let mut tool = Beside::start(&mut run(&cluster, scheme, "k", "echo begun; read line"));
        assert_eq!(tool.line(), "begun");
        runtime.block_on(cluster.stop(StopMode::Fast));
        tool.go_on();
        let note = tool.note();
        assert!(note.contains("not confirmed"), "{scheme}: {note}");
        runtime.block_on(cluster.start_again());
        assert_eq!(tool.code(), 0, "{scheme}: {}", tool.rest_of_stderr());
        assert_eq!(tool.rest_of_stderr(), "", "{scheme}");
        let (code, _, stderr) = finish(&mut run(&cluster, scheme, "k --no-wait", "exit 0"));
        assert_eq!(code, 0, "{scheme}: {stderr}");
    }
}

#[test]
fn a_row_that_may_stay_shut_is_told_of_also_to_the_quiet() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let cluster = Cluster::start(ClusterOptions::new());
    let mut tool = Beside::start(&mut run(&cluster, "postgres+row", "k -q", "echo begun; read line; exit 3"));
    assert_eq!(tool.line(), "begun");
    runtime.block_on(cluster.stop(StopMode::Fast));
    tool.go_on();
    let error = tool.note();
    assert!(error.contains("error:") && error.contains("release KEY --force --holder"), "{error}");
    assert_eq!(tool.code(), 3);
}

// A signal ends the wait for the release, but the tool still prints the error.
#[test]
fn a_row_that_may_stay_shut_is_told_of_also_to_the_impatient() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let cluster = Cluster::start(ClusterOptions::new());
    let mut tool = Beside::start(&mut run(&cluster, "postgres+row", "k", "echo begun; read line; exit 3"));
    assert_eq!(tool.line(), "begun");
    runtime.block_on(cluster.stop(StopMode::Fast));
    tool.go_on();
    let note = tool.note();
    assert!(note.contains("not confirmed"), "{note}");
    tool.signal(Signal::INT);
    let error = tool.note();
    assert!(error.contains("error:") && error.contains("release KEY --force --holder"), "{error}");
    assert_eq!(tool.code(), 3);
}

/// The network falls silent, so a waiter does not learn of its grant. Then its wait ends by its budget or by a signal.
#[test]
fn an_attempt_that_may_have_shut_a_row_is_told_of_and_is_nobody_elses_lock() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let database = runtime.block_on(fresh_database());
    let mut user = runtime.block_on(database.connect());
    let mut sql =
        |text: &'static str| -> bool { runtime.block_on(raw_sql(text).fetch_one(&mut user)).unwrap().get(0) };
    for (options, signal, expected) in
        [("--wait 20s -q -E 0", None, 69), ("--wait 1h -q --cooldown 1h", Some(Signal::TERM), 143)]
    {
        let proxy = Proxy::start(Cluster::shared().address());
        let proxy = runtime.block_on(proxy);
        let mut holder =
            Beside::start(&mut with_store(database.url(), "postgres+row", "k", "echo begun; read line"));
        assert_eq!(holder.line(), "begun");
        let mut waiter = Beside::start(&mut with_store(
            &proxy.url(database.url()),
            "postgres+row",
            &format!("k {options}"),
            "echo ran",
        ));
        let end = Instant::now() + Duration::from_secs(16);
        while !sql("SELECT coalesce(bool_or(wake_until > clock_timestamp()), false) FROM leasehold.mutex") {
            assert!(Instant::now() < end, "nobody waits");
            std::thread::sleep(Duration::from_millis(5));
        }
        // Releases the row while no request of the waiter is in flight, and holds the replies, so the waiter does not learn
        // of its grant. Tries again if a request was in flight.
        let pause = || std::thread::sleep(Duration::from_millis(5));
        loop {
            assert!(Instant::now() < end, "it is not granted");
            let (mut seen, mut since) = (proxy.traffic().bytes_to_client, Instant::now());
            while since.elapsed() < Duration::from_millis(200) && Instant::now() < end {
                pause();
                let now = proxy.traffic().bytes_to_client;
                if now != seen {
                    (seen, since) = (now, Instant::now());
                }
            }
            proxy.stall_replies();
            sql("UPDATE leasehold.mutex SET acquired = false RETURNING true");
            let opened = Instant::now();
            while opened.elapsed() < Duration::from_secs(3) && !sql("SELECT acquired FROM leasehold.mutex") {
                pause();
            }
            // Locks the row again unless the waiter was granted.
            if sql(
                "WITH shut AS (UPDATE leasehold.mutex SET acquired = true WHERE NOT acquired RETURNING true)
                SELECT NOT EXISTS (SELECT FROM shut)",
            ) {
                break;
            }
            proxy.restore();
        }
        if let Some(signal) = signal {
            waiter.signal(signal);
        }
        let (code, said) = (waiter.code(), waiter.rest_of_stderr());
        assert_eq!(code, expected, "{said}");
        let process = format!("shows process {} as its holder", waiter.id());
        assert!(said.contains("error:") && said.contains(&process), "{options}: {said}");
        assert!(!said.contains("nothing was done"), "{options}: {said}");
        assert_eq!(said.contains("its window has begun"), options.contains("--cooldown"), "{said}");
        assert_eq!(waiter.rest_of_stdout(), "");
        sql("UPDATE leasehold.mutex SET acquired = false, cooldown_us = NULL RETURNING true");
        assert_eq!(holder.code(), 76, "its row was opened");
    }
}

/// timeout(1) sends its signal twice, to the process and to its group. Other programs send it more often.
#[test]
fn one_order_to_end_in_several_signals_is_not_impatience() {
    let cluster = Cluster::start(ClusterOptions::new());
    for scheme in ["postgres+row", "postgres+ttl"] {
        let mut tool = Beside::start(&mut run(&cluster, scheme, "k", "echo begun; exec sleep 600"));
        assert_eq!(tool.line(), "begun");
        for _ in 0..100 {
            tool.signal(Signal::TERM);
            std::thread::yield_now();
        }
        assert_eq!(tool.code(), 143, "{scheme}");
        assert_eq!(tool.rest_of_stderr(), "", "{scheme}");
        let (code, _, stderr) = finish(&mut run(&cluster, scheme, "k --no-wait", "exit 0"));
        assert_eq!(code, 0, "{scheme}: {stderr}");
    }
}

// A run that only waited must not advise breaking the holder's lock.
#[test]
fn a_wait_that_ends_with_the_server_advises_no_force() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let cluster = Cluster::start(ClusterOptions::new());
    let mut holder = Beside::start(&mut run(&cluster, "postgres+row", "k", "echo begun; read line"));
    assert_eq!(holder.line(), "begun");
    for impatient in [false, true] {
        let mut waiter = Beside::start(&mut run(&cluster, "postgres+row", "k --wait 10s", "echo ran"));
        let note = waiter.note();
        assert!(note.contains("waiting for"), "{note}");
        runtime.block_on(cluster.stop(StopMode::Fast));
        if impatient {
            // The first signal ends the wait, if it has not ended yet. The other ends the close.
            waiter.signal(Signal::TERM);
            waiter.signal(Signal::INT);
        }
        let said = waiter.rest_of_stderr();
        // On a slow machine the server stops during an attempt of the waiter, which then only doubts its own hold.
        let own = format!("if `leasehold inspect` shows process {} as its holder", waiter.id());
        assert!(!said.contains("--force") || said.contains(&own), "{said}");
        let code = waiter.code();
        assert!([69, 75].contains(&code) || impatient && code > 128, "{code}: {said}");
        assert_eq!(waiter.rest_of_stdout(), "");
        runtime.block_on(cluster.start_again());
    }
}

#[test]
fn what_cannot_be_reached_is_said_without_the_password() {
    let cluster = Cluster::start(ClusterOptions::new().password("sesame-open"));
    let url = |password: &str, host: &str, database: &str| {
        format!("postgres://postgres:{password}@{host}/{database}?install=true")
    };
    let (address, closed) = (cluster.address(), "127.0.0.1:1");
    assert_eq!(finish(&mut at(&url("sesame-open", &address, "postgres"), "run k -- true")).0, 0);
    for (url, code) in [
        (url("hunter2", &address, "postgres"), 69),
        (url("sesame-open", &address, "no-such-database"), 64),
        (url("sesame-open", closed, "postgres"), 69),
        (url("sesame-open", "host.invalid", "postgres"), 69),
        (url("sesame-open", &address, "postgres") + "&sslmode=verify-full", 64),
        (url("sesame-open", &address, "postgres") + "&channel_binding=require", 64),
        (url("hunter2", &address, "postgres") + "#x", 64),
    ] {
        for store in ["postgres", "postgres+advisory-xact", "postgres+row", "postgres+ttl"] {
            for command in
                ["run k --no-wait -- true", "list", "inspect k", "check", "check --json", "schema apply"]
            {
                let url = url.replacen("postgres", store, 1);
                let (got, stdout, stderr) = finish(&mut at(&url, command));
                let shown = format!("{stdout}{stderr}");
                assert_eq!(got, code, "{command} on {}: {shown}", url.replace("sesame-open", "..."));
                assert!(!shown.contains("hunter2") && !shown.contains("sesame"), "{command}: {shown}");
                assert!(shown.len() > 40, "{command}: {shown}");
            }
        }
    }
}

/// `VACUUM (FULL)` locks the table like this. The error must not claim anything about the key.
#[test]
fn a_table_that_somebody_keeps_locked_is_named() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let database = runtime.block_on(fresh_database());
    let mut user = runtime.block_on(database.connect());
    let mut sql = |text: &'static str| {
        runtime.block_on(raw_sql(text).execute(&mut user)).unwrap();
    };
    assert_eq!(finish(&mut at(database.url(), "schema apply")).0, 0);
    let schemes = ["postgres", "postgres+advisory-xact", "postgres+row", "postgres+ttl"];
    let looks = ["inspect k", "list", "release k --force --session"];
    for (lock, commands, schemes) in [
        ("BEGIN; LOCK TABLE leasehold.advisory_name IN ACCESS EXCLUSIVE MODE", &looks[..], &schemes[..2]),
        // New sessions read this table.
        ("BEGIN; LOCK TABLE leasehold.incarnation IN ACCESS EXCLUSIVE MODE", &["run k -n -- true"], &schemes),
    ] {
        sql(lock);
        let tools = schemes.iter().flat_map(|scheme| {
            let url = database.url().replacen("postgres", scheme, 1);
            commands.iter().map(move |command| (*scheme, *command, Beside::start(&mut at(&url, command))))
        });
        for (scheme, command, mut tool) in tools.collect::<Vec<_>>() {
            let (code, said) = (tool.code(), tool.rest_of_stderr());
            assert!(
                code == 69 && said.contains("look for it in pg_locks"),
                "{scheme} {command}: {code} {said}"
            );
        }
        sql("ROLLBACK");
    }
}

#[test]
fn a_watched_list_says_in_a_line_that_the_server_is_away() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let cluster = Cluster::start(ClusterOptions::new());
    assert_eq!(finish(&mut at(&cluster.admin_url(), "schema apply")).0, 0);
    let mut watch = Beside::start(&mut at(&cluster.admin_url(), "list --watch=0.1 --json"));
    let mut next = |is_wanted: fn(&Value) -> bool| {
        let lines = std::iter::from_fn(|| Some(serde_json::from_str(&watch.line()).unwrap()));
        lines.take(1_000).find(is_wanted).unwrap()
    };
    next(Value::is_array);
    runtime.block_on(cluster.stop(StopMode::Fast));
    let failed = next(Value::is_object);
    assert_eq!((&failed["ok"], &failed["retryable"]), (&false.into(), &true.into()), "{failed}");
    runtime.block_on(cluster.start_again());
    next(Value::is_array);
}

fn at(url: &str, arguments: &str) -> Command {
    let mut command = support::tool();
    command.env("LEASEHOLD_URL", url).args(arguments.split_whitespace());
    command
}
