//! `--wait` is one budget for the way to the store and for the lock.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::process::Command;

use rustix::process::Signal;
use support::{Beside, finish};
use test_servers::{Cluster, ClusterOptions, PgBouncer, PgBouncerOptions, Standby, StopMode};

/// What is said, once, while the store cannot be reached.
const RETRYING: &str = "store unavailable, retrying: ";

fn tool(url: &str, arguments: &str) -> Command {
    let mut command = support::tool();
    command.env("LEASEHOLD_URL", url).args(arguments.split_whitespace());
    command
}

fn url(cluster: &Cluster, scheme: &str) -> String {
    let url = cluster.admin_url();
    format!("{scheme}://{}?install=true", url.split_once("://").unwrap().1)
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

#[test]
fn a_run_waits_for_a_server_that_starts_late() {
    let (runtime, cluster) = (runtime(), Cluster::start(ClusterOptions::new()));
    for scheme in ["postgres", "postgres+ttl"] {
        runtime.block_on(cluster.stop(StopMode::Fast));
        for patience in ["", "--wait 1h"] {
            let mut tool =
                Beside::start(&mut tool(&url(&cluster, scheme), &format!("run k {patience} -- echo ran")));
            let note = tool.note();
            assert!(note.contains(RETRYING) && note.contains("check that the server runs"), "{note}");
            if patience.is_empty() {
                // A wait for the server is ended like one for the lock.
                tool.signal(Signal::TERM);
                assert_eq!((tool.code(), tool.rest_of_stdout().as_str()), (143, ""));
                continue;
            }
            runtime.block_on(cluster.start_again());
            assert_eq!((tool.line().as_str(), tool.code()), ("ran", 0), "{scheme}");
            let rest = tool.rest_of_stderr();
            assert!(!rest.contains(RETRYING), "said once: {rest}");
        }
    }
}

/// Trying again is of no use, and what refuses is not what is to be mended.
#[test]
fn options_that_a_pooler_refuses_end_the_wait() {
    let cluster = Cluster::shared();
    let database = runtime().block_on(cluster.fresh_database());
    let bouncer = PgBouncer::start(cluster, &PgBouncerOptions::new());
    let url = bouncer.url(database.name()).replacen("postgres", "postgres+ttl", 1);
    assert_eq!(finish(&mut tool(&(url.clone() + "?install=true"), "run k -- true")).0, 0);
    let given = url.clone() + "?options=-cgeqo%3Doff";
    // The driver sends an empty one, too.
    for (url, environment) in [(&url, Some("")), (&given, None)] {
        let mut tool = tool(url, "run k -- echo ran");
        environment.map(|options| tool.env("PGOPTIONS", options));
        let (code, _, stderr) = finish(&mut tool);
        assert!(code == 64 && stderr.contains("unset PGOPTIONS"), "{code}: {stderr}");
    }
}

/// There are no transactions behind it, in which anything could be locked.
#[test]
fn a_pooler_in_statement_mode_ends_the_wait() {
    let cluster = Cluster::shared();
    let database = runtime().block_on(cluster.fresh_database());
    assert_eq!(finish(&mut tool(database.url(), "schema apply")).0, 0);
    let bouncer = PgBouncer::start(cluster, &PgBouncerOptions::new().setting("pool_mode", "statement"));
    for scheme in ["postgres", "postgres+advisory-xact", "postgres+row", "postgres+ttl"] {
        for pooler in ["detect", "transaction"] {
            let url = bouncer.url(database.name()).replacen("postgres", scheme, 1) + "?pooler=" + pooler;
            let (code, _, stderr) = finish(&mut tool(&url, "run k -- echo ran"));
            // Session locks are refused behind any pooler.
            let is_told = stderr.contains("statement mode") || scheme == "postgres";
            assert!(code == 64 && is_told, "{url}: {code}: {stderr}");
        }
    }
}

#[test]
fn a_check_of_a_standby_says_what_it_is() {
    let runtime = runtime();
    let primary = Cluster::start(ClusterOptions::new());
    assert_eq!(finish(&mut tool(&primary.admin_url(), "schema apply")).0, 0);
    let standby = runtime.block_on(Standby::of(&primary));
    runtime.block_on(standby.wait_for_replay(&primary));
    let (code, stdout, stderr) = finish(&mut tool(&standby.url("postgres"), "check --json"));
    let told: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((code, &told["server"]["standby"]), (69, &true.into()), "{told}{stderr}");
    assert!(told["advice"][0].as_str().unwrap().contains("primary"), "{told}");
}

#[test]
fn a_run_waits_for_a_connection_to_become_free() {
    let options =
        ClusterOptions::new().setting("max_connections", "6").setting("superuser_reserved_connections", "0");
    let (runtime, cluster) = (runtime(), Cluster::start(options));
    let url = url(&cluster, "postgres+ttl");
    assert_eq!(finish(&mut tool(&url, "run k -- true")).0, 0);
    let database = runtime.block_on(cluster.fresh_database());
    let all: Vec<_> = std::iter::from_fn(|| {
        let options = database.url();
        runtime.block_on(async {
            use leasehold::postgres::sqlx::{Connection as _, PgConnection};
            PgConnection::connect(options).await.ok()
        })
    })
    .collect();
    assert!(!all.is_empty());
    let mut waiter = Beside::start(&mut tool(&url, "run k -- echo ran"));
    let note = waiter.note();
    assert!(note.contains(RETRYING) && note.contains("no connection left"), "{note}");
    let (code, _, stderr) = finish(&mut tool(&url, "run k --no-wait -- echo ran"));
    assert!(code == 69 && !stderr.contains(RETRYING), "{code}: {stderr}");
    drop(all);
    assert_eq!((waiter.line().as_str(), waiter.code()), ("ran", 0), "{}", waiter.rest_of_stderr());
}

#[test]
fn without_an_answer_until_the_end_of_the_budget_the_store_is_unavailable() {
    // Nobody listens there.
    let url = "postgres://app@127.0.0.1:1/x";
    for (options, is_said) in
        [("--wait 300ms", true), ("-w 0.3", true), ("-q --wait 300ms", false), ("--no-wait", false)]
    {
        for command in [format!("run k {options} -- echo ran"), format!("lock k {options}")] {
            let (code, stdout, stderr) = finish(&mut tool(url, &command));
            assert_eq!((code, stdout.as_str()), (69, ""), "{command}: {stderr}");
            assert_eq!(stderr.matches(RETRYING).count(), usize::from(is_said), "{command}: {stderr}");
            assert!(stderr.contains("error: unavailable"), "{command}: {stderr}");
        }
    }
}

#[test]
fn what_no_retry_mends_is_told_at_once() {
    let cluster = Cluster::start(ClusterOptions::new().password("sesame-open"));
    let address = cluster.address();
    for (url, code) in [
        (format!("postgres://postgres:hunter2@{address}/postgres"), 69),
        (format!("postgres://postgres:sesame-open@{address}/no-such-database"), 64),
        (format!("postgres+row://postgres:sesame-open@{address}/postgres?schema=none"), 69),
    ] {
        let (got, stdout, stderr) = finish(&mut tool(&url, "run k -- echo ran"));
        assert_eq!((got, stdout.as_str()), (code, ""), "{stderr}");
        // Nor is it said where in its source the driver met the answer.
        assert!(!stderr.contains(RETRYING) && !stderr.contains("at line"), "{stderr}");
    }
}
