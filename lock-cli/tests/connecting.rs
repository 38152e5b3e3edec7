//! `--wait` is one budget for the connection to the store and for the lock.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "support/command.rs"]
mod support;

use std::io::{Read as _, Write as _};
use std::process::Command;

use rustix::process::Signal;
use support::{Beside, finish};
use test_servers::{Cluster, ClusterOptions, PgBouncer, PgBouncerOptions, Standby, StopMode};

/// The note that is printed once while the store cannot be reached.
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
                // A signal ends the wait for the server like a wait for the lock.
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

/// A retry would fail too, and the fault is in the options, not in the pooler.
#[test]
fn options_that_a_pooler_refuses_end_the_wait() {
    let cluster = Cluster::shared();
    let database = runtime().block_on(cluster.fresh_database());
    let bouncer = PgBouncer::start(cluster, &PgBouncerOptions::new());
    let url = bouncer.url(database.name()).replacen("postgres", "postgres+ttl", 1);
    assert_eq!(finish(&mut tool(&(url.clone() + "?install=true"), "run k -- true")).0, 0);
    let given = url.clone() + "?options=-cgeqo%3Doff";
    // The driver also sends an empty value.
    for (url, environment) in [(&url, Some("")), (&given, None)] {
        let mut tool = tool(url, "run k -- echo ran");
        environment.map(|options| tool.env("PGOPTIONS", options));
        let (code, _, stderr) = finish(&mut tool);
        assert!(code == 64 && stderr.contains("unset PGOPTIONS"), "{code}: {stderr}");
    }
}

/// Such a pooler allows no transactions, so no lock can be acquired.
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
            // The session store refuses any pooler, with another message.
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
    // No server listens on this port.
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
        // The message also omits the place in the driver's source.
        assert!(!stderr.contains(RETRYING) && !stderr.contains("at line"), "{stderr}");
    }
}

/// One server sends an error in another encoding, and another requires an unsupported login method.
#[test]
fn a_refusal_that_cannot_be_read_ends_the_wait() {
    let refusal = b"SFATAL\0VFATAL\0C28P01\0Mmot de passe \xe9chou\xe9\0\0";
    let size = u32::try_from(refusal.len() + 4).unwrap().to_be_bytes();
    let not_utf8 = [&b"E"[..], &size, refusal].concat();
    let gss = [&b"R"[..], &8_u32.to_be_bytes(), &7_u32.to_be_bytes()].concat();
    for (answer, code, says) in [(not_utf8, 69, "permission denied"), (gss, 64, "authentication method")] {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        std::thread::spawn(move || {
            while let Ok((mut client, _)) = listener.accept() {
                let mut startup = [0; 1024];
                let _ = client.read(&mut startup);
                if startup[4..8] == 80_877_103_u32.to_be_bytes() {
                    let _ = client.write_all(b"N");
                    let _ = client.read(&mut startup);
                }
                let _ = client.write_all(&answer);
            }
        });
        let url = format!("postgres://app:wrong@127.0.0.1:{port}/app");
        let (got, _, stderr) = finish(&mut tool(&url, "run k -- echo ran"));
        assert!(got == code && stderr.contains(says) && !stderr.contains(RETRYING), "{got}: {stderr}");
    }
}

/// Each variable that decides where or how securely psql connects has its effect here, or is refused by name.
#[test]
fn variables_of_libpq_count() {
    let cluster = Cluster::shared();
    let database = runtime().block_on(cluster.fresh_database());
    let port = cluster.port().to_string();
    let whole = [
        ("PGHOST", "nowhere.example"),
        ("PGHOSTADDR", "127.0.0.1"),
        ("PGPORT", &port),
        ("PGDATABASE", database.name()),
        ("PGUSER", "postgres"),
        ("PGTARGETSESSIONATTRS", "read-write"),
        ("PGCHANNELBINDING", "prefer"),
        ("PGGSSENCMODE", "disable"),
    ];
    let mut counted = tool("postgres+ttl://?install=true", "run k -- echo ran");
    let (code, stdout, stderr) = finish(counted.envs(whole));
    assert_eq!((code, stdout.as_str()), (0, "ran\n"), "{stderr}");
    for (variable, value) in [
        ("PGSSLMODE", "verify"),
        ("PGREQUIREAUTH", "scram-sha-256"),
        ("PGREQUIREPEER", "postgres"),
        ("PGSSLCRL", "/etc/crl"),
        ("PGSERVICE", "ledger"),
        ("PGCHANNELBINDING", "require"),
    ] {
        let mut refused = tool("postgres+ttl://", "run k -- echo ran");
        let (code, _, stderr) = finish(refused.envs(whole).env(variable, value));
        assert!(code == 64 && stderr.contains(variable), "{code}: {stderr}");
    }
}

/// The password changes while one run holds the lock and another waits for it. Then all sessions end.
#[test]
fn a_password_that_is_rotated_in_its_file_is_read_again() {
    let (runtime, cluster) = (runtime(), Cluster::start(ClusterOptions::new().password("sesame")));
    let (directory, address) = (tempfile::tempdir().unwrap(), cluster.address());
    let file = directory.path().join("url");
    let sql = |text: &str| runtime.block_on(cluster.run_sql("postgres", text));
    sql("CREATE ROLE rot LOGIN SUPERUSER PASSWORD 'first'");
    for (scheme, keeps) in [("postgres+ttl", true), ("postgres+row", true), ("postgres", false)] {
        sql("ALTER ROLE rot PASSWORD 'first'");
        std::fs::write(&file, format!("{scheme}://rot:first@{address}/postgres?install=true\n")).unwrap();
        let with_file = |arguments: &str| {
            let mut command = support::tool();
            command.env("LEASEHOLD_URL_FILE", &file).args(arguments.split_whitespace());
            command
        };
        let mut holder = with_file("run k --grace 1s --");
        let mut holder = Beside::start(holder.args(["sh", "-c", "echo held; read line; echo kept"]));
        assert_eq!(holder.line(), "held");
        let mut waiter = Beside::start(&mut with_file("run k -- echo ran"));
        let note = waiter.note();
        assert!(note.contains('k'), "{note}");
        sql("ALTER ROLE rot PASSWORD 'second'");
        let new = directory.path().join("new");
        std::fs::write(&new, format!("{scheme}://rot:second@{address}/postgres?install=true\n")).unwrap();
        std::fs::rename(&new, &file).unwrap();
        // Sessions that wait for the lock end first, because otherwise the end of the holder's could grant it to one of them.
        sql("SELECT count(pg_terminate_backend(pid, 60000)) FROM (SELECT pid FROM pg_stat_activity
            WHERE usename = 'rot' ORDER BY wait_event_type = 'Lock' DESC NULLS LAST OFFSET 0) AS sessions");
        if keeps {
            // A third run sees the holder through separate sessions.
            let (code, _, stderr) = finish(&mut with_file("run k --no-wait -- echo ran"));
            assert_eq!(code, 75, "{stderr}");
            holder.go_on();
            assert_eq!((holder.line().as_str(), holder.code()), ("kept", 0), "{}", holder.rest_of_stderr());
        }
        assert_eq!(
            (waiter.line().as_str(), waiter.code()),
            ("ran", 0),
            "{scheme}: {}",
            waiter.rest_of_stderr()
        );
    }
}
