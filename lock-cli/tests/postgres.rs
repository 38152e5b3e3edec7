//! The command on the Postgres stores, on a real server: exclusion between processes, however they end.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "support/command.rs"]
mod support;

use std::process::Command;
use std::time::{Duration, Instant};

use leasehold::LockExt as _;
use leasehold::postgres::sqlx::{AssertSqlSafe, Connection as _, raw_sql};
use serde_json::Value;
use support::{Beside, finish, nearly_an_hour};
use test_bounds::{Bound, within};
use test_servers::{Cluster, Database};

const HOLD: &str = "echo $LEASEHOLD_HOLDER; read line";
const STORES: [&str; 4] = ["postgres", "postgresql+advisory-xact", "postgres+row", "postgres+ttl"];

/// The name in sqlx's documentation, which also gives its number.
const SQLX: &str = "my first Postgres advisory lock!";

/// Longer than any step takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// One of the stores in a separate database.
struct Store {
    database: Database,
    scheme: &'static str,
    parameters: &'static str,
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

impl Store {
    fn new(scheme: &'static str, parameters: &'static str) -> Self {
        Self { database: runtime().block_on(test_servers::fresh_database()), scheme, parameters }
    }

    fn all() -> impl Iterator<Item = Self> {
        STORES.into_iter().map(|scheme| Self::new(scheme, "install=true"))
    }

    fn url(&self) -> String {
        let (_, rest) = self.database.url().split_once("://").unwrap();
        let joint = if rest.contains('?') { '&' } else { '?' };
        format!("{}://{rest}{joint}{}", self.scheme, self.parameters)
    }

    fn tool(&self, arguments: &str) -> Command {
        tool(&self.url(), arguments)
    }

    fn run(&self, arguments: &str, script: &str) -> Command {
        let mut command = self.tool("run");
        command.args(arguments.split_whitespace()).args(["--", "sh", "-c", script]);
        command
    }

    fn is_free(&self, key: &str) -> bool {
        match finish(&mut self.run(&format!("{key} --no-wait"), "exit 0")) {
            (0, ..) => true,
            (75, ..) => false,
            other => panic!("{}: {other:?}", self.scheme),
        }
    }

    fn take(&self, key: &str) {
        let (code, _, stderr) = finish(&mut self.run(&format!("{key} --wait 5m"), "exit 0"));
        assert_eq!(code, 0, "{}: {stderr}", self.scheme);
    }

    /// Runs the tool. Returns the exit code and its output as JSON.
    fn json(&self, arguments: &str) -> (i32, Value) {
        let (code, stdout, stderr) = finish(&mut self.tool(arguments));
        let value = serde_json::from_str(&stdout);
        (code, value.unwrap_or_else(|error| panic!("{}: {error}: {stdout}{stderr}", self.scheme)))
    }

    /// Repeats `list --json` until `is_there` accepts its output, and returns that.
    fn listed(&self, is_there: impl Fn(&Value) -> bool) -> Value {
        let start = Bound::new(PATIENCE);
        loop {
            let (code, value) = self.json("list --json");
            assert_eq!(code, 0);
            if is_there(&value) {
                return value;
            }
            start.check(format_args!("{}: {value}", self.scheme));
        }
    }

    fn sql(&self, sql: &str) {
        runtime().block_on(async {
            let mut connection = self.database.connect().await;
            raw_sql(AssertSqlSafe(sql.to_owned())).execute(&mut connection).await.unwrap();
            connection.close().await.unwrap();
        });
    }
}

fn tool(url: &str, arguments: &str) -> Command {
    let mut command = support::tool();
    command.env("LEASEHOLD_URL", url).args(arguments.split_whitespace());
    command
}

#[test]
fn run_excludes_between_processes_and_a_waiter_comes_next() {
    for store in Store::all() {
        let mut a = Beside::start(&mut store.run("k --label nightly", HOLD));
        let holder = a.line();
        assert!(!store.is_free("k"), "{}", store.scheme);
        assert!(store.is_free("another"), "{}", store.scheme);

        let named = |value: &Value| value[0]["holder"] == holder.as_str();
        let hold = store.listed(named)[0].clone();
        assert_eq!(
            (&hold["key"], &hold["named"]),
            (&Value::from("k"), &Value::from(true)),
            "{}",
            store.scheme
        );
        assert_eq!((&hold["state"], &hold["label"]), (&Value::from("held"), &Value::from("nightly")));
        let (code, inspected) = store.json("inspect k --json");
        assert_eq!((code, &inspected["holder"]), (0, &hold["holder"]), "{}", store.scheme);
        let (code, stdout, _) = finish(&mut store.tool("list"));
        assert!(code == 0 && stdout.contains("nightly"), "{stdout}");

        let mut b = Beside::start(&mut store.run("k --wait 60s", "echo in"));
        a.go_on();
        assert_eq!(a.code(), 0, "{}", store.scheme);
        assert_eq!((b.line(), b.code()), ("in".to_owned(), 0), "{}", store.scheme);
        assert_eq!(finish(&mut store.tool("inspect k")).0, 1, "{}", store.scheme);
    }
}

#[test]
fn two_spellings_of_the_session_scope_are_one_store() {
    let mut store = Store::new("postgres", "install=true");
    let mut a = Beside::start(&mut store.run("k", HOLD));
    a.line();
    store.scheme = "postgresql+advisory";
    assert!(!store.is_free("k"));
    store.scheme = "postgres+advisory-xact";
    assert!(!store.is_free("k"), "both scopes exclude each other");
}

#[test]
fn two_schemas_are_two_stores() {
    for mut store in Store::all() {
        let mut a = Beside::start(&mut store.run("k", HOLD));
        a.line();
        assert!(!store.is_free("k"), "{}", store.scheme);
        store.parameters = "install=true&schema=Other";
        assert!(store.is_free("k"), "{}", store.scheme);
    }
}

#[test]
fn a_killed_holder_frees_an_advisory_lock_at_once() {
    for store in Store::all().take(2) {
        let mut a = Beside::start(&mut store.run("k", HOLD));
        a.line();
        a.kill();
        store.take("k");
    }
}

#[test]
fn a_killed_holder_frees_a_lease_when_it_ends() {
    let store = Store::new("postgres+ttl", "install=true&ttl=2s&poll=50ms");
    let mut a = Beside::start(&mut store.run("k", HOLD));
    a.line();
    let killed = Instant::now();
    a.kill();
    store.take("k");
    assert!(killed.elapsed() > Duration::from_millis(1000), "{:?}", killed.elapsed());
}

#[test]
fn a_killed_holder_of_a_mutex_row_leaves_it_shut_until_forced() {
    let store = Store::new("postgres+row", "install=true");
    let mut a = Beside::start(&mut store.run("k", HOLD));
    let holder = a.line();
    a.kill();
    assert!(!store.is_free("k"));
    let (_, listed) = store.json("list --json");
    assert_eq!(listed[0]["holder"], holder.as_str());
    let other = format!("{}-1", "0".repeat(32));
    assert_eq!(finish(&mut store.tool(&format!("release k --force --holder {other}"))).0, 1);
    assert!(!store.is_free("k"));
    let (code, value) = store.json(&format!("release k --force --holder {holder} --json"));
    assert_eq!((code, &value["released"]), (0, &Value::from(true)));
    assert!(store.is_free("k"));
}

#[test]
fn a_key_that_cools_shows_as_such() {
    for scheme in ["postgres+row", "postgres+ttl"] {
        let store = Store::new(scheme, "install=true");
        assert_eq!(finish(&mut store.run("k --cooldown 1h", "exit 0")).0, 0);
        let (code, seen) = store.json("inspect k --json");
        assert_eq!((code, &seen["state"]), (1, &Value::from("cooling")), "{scheme}: {seen}");
        let (code, _, stderr) = finish(&mut store.run("k --no-wait", "exit 0"));
        assert_eq!(code, 75, "{scheme}: {stderr}");
        assert!(stderr.contains("in a cooldown for") && nearly_an_hour(&stderr), "{scheme}: {stderr}");
    }
}

#[test]
fn a_window_lasts_though_its_run_was_killed() {
    for (scheme, parameters) in [("postgres+row", "install=true"), ("postgres+ttl", "install=true&ttl=1s")] {
        let store = Store::new(scheme, parameters);
        let mut first = Beside::start(&mut store.run("hourly --once-per 1h", HOLD));
        let holder = first.line();
        first.kill();
        if scheme == "postgres+row" {
            let (code, _, stderr) = finish(&mut store.run("hourly --once-per 1h", "echo ran"));
            assert!(
                code == 0 && stderr.contains("not due") && stderr.contains(", held by "),
                "{code} {stderr}"
            );
            assert_eq!(finish(&mut store.tool(&format!("release hourly --force --holder {holder}"))).0, 0);
        }
        store.listed(|holds| holds.as_array().is_some_and(Vec::is_empty));
        let (code, stdout, stderr) = finish(&mut store.run("hourly --once-per 1h", "echo ran"));
        assert_eq!((code, stdout.as_str()), (0, ""), "{scheme}: {stderr}");
        assert!(stderr.contains("not due") && !stderr.contains("held by"), "{scheme}: {stderr}");
    }
}

#[test]
fn a_forced_release_of_a_row_ends_the_command_of_its_holder() {
    for store in Store::all().skip(2) {
        let ttl = if store.scheme == "postgres+ttl" { "--ttl 3s" } else { "" };
        let mut a = Beside::start(&mut store.run(&format!("k {ttl}"), HOLD));
        let holder = a.line();
        assert_eq!(finish(&mut store.tool(&format!("release k --force --holder {holder}"))).0, 0);
        assert_eq!(a.code(), 76, "{}: {}", store.scheme, a.rest_of_stderr());
        store.take("k");
    }
}

#[test]
fn an_advisory_lock_goes_with_its_session_which_has_to_be_meant() {
    let store = Store::new("postgres", "install=true");
    let mut a = Beside::start(&mut store.run("k", HOLD));
    let holder = a.line();
    let (code, _, stderr) = finish(&mut store.tool(&format!("release k --force --holder {holder}")));
    assert!(code == 64 && stderr.contains("--session"), "{code} {stderr}");
    assert_eq!(finish(&mut store.tool("release free --force --session")).0, 1);
    for asks in ["release k --ask", "run o --on-ask USR1 -- true", "elect e --step-down-if-asked -- true"] {
        let (code, _, stderr) = finish(&mut store.tool(asks));
        assert!(code == 64 && stderr.contains("requests to release a lock"), "{asks}: {code} {stderr}");
    }
    let (code, stdout, stderr) = finish(&mut store.tool("release k --force --session"));
    assert_eq!(code, 0, "{stdout}{stderr}");
    assert_eq!(a.code(), 76, "{}", a.rest_of_stderr());
    store.take("k");

    runtime().block_on(async {
        let lock = leasehold::connect(&store.url()).await.unwrap();
        let guards = lock.keys(["one", "two"]).acquire().await.unwrap();
        store.listed(|value| value.as_array().unwrap().len() == 2 && value[1]["key"] == "two");
        let (code, stdout, stderr) = finish(&mut store.tool("release one --force --session"));
        assert_eq!((code, stdout.as_str()), (64, ""), "{stderr}");
        assert!(stderr.contains("two") && stderr.contains("--yes"), "{stderr}");
        assert!(
            guards.iter().all(|guard| guard.validity() == leasehold::Validity::Valid),
            "nothing was done"
        );
        let (code, value) = store.json("release one --force --session --yes --json");
        assert_eq!((code, &value["released"]), (0, &Value::from(true)));
        assert_eq!(value["session"]["holds"].as_array().unwrap().len(), 2);
        for guard in guards {
            within(PATIENCE, "not ended", guard.lost()).await;
        }
        lock.close().await.unwrap();
    });
    store.take("two");
}

#[test]
fn list_shows_waiters_and_the_locks_of_other_programs() {
    let store = Store::new("postgres", "install=true");
    let mut a = Beside::start(&mut store.run("k", HOLD));
    a.line();
    let mut b = Beside::start(&mut store.run("k", "echo in"));
    let waited = |value: &Value| value[0]["waiters"] == 1 && value[0]["key"] == "k";
    store.listed(waited);
    let (_, stdout, _) = finish(&mut store.tool("list"));
    assert!(stdout.contains("WAITERS"), "{stdout}");
    a.go_on();
    assert_eq!((a.code(), b.line(), b.code()), (0, "in".to_owned(), 0));

    runtime().block_on(async {
        let mut other = store.database.connect().await;
        raw_sql("SET application_name = 'psql'; SELECT pg_advisory_lock(4711)")
            .execute(&mut other)
            .await
            .unwrap();
        let (_, value) = store.json("list --json");
        assert_eq!(
            (&value[0]["key"], &value[0]["named"]),
            (&Value::from("4711"), &Value::from(false)),
            "{value}"
        );
        assert!(value[0]["owner"].as_str().unwrap().contains("psql"), "{value}");
        other.close().await.unwrap();
    });
}

#[test]
fn every_url_is_its_own_store() {
    let capability = |scheme, parameters, name: &str| {
        let (code, value) = Store::new(scheme, parameters).json("check --json");
        assert_eq!(code, 0, "{scheme}: {value}");
        value["capabilities"][name].clone()
    };
    let free_after = |scheme| capability(scheme, "install=true", "crash_release_ms");
    assert_eq!(free_after("postgres+row"), Value::Null);
    assert!(free_after("postgres+advisory").is_u64() && free_after("postgres+ttl").is_u64());
    assert_eq!(capability("postgres+ttl", "install=true&ttl=7s", "default_ttl_ms"), 7000);
    assert_eq!(capability("postgres+row", "install=true", "default_ttl_ms"), Value::Null);
    let slower = capability("postgres+row", "install=true&poll=9s", "handover_ms");
    assert!(slower.as_u64() > Some(9000), "{slower}");
    let holds = |scheme| capability(scheme, "install=true", "max_holds").as_u64().unwrap();
    assert!(holds("postgres+advisory-xact") < holds("postgres"), "a connection each");
}

#[test]
fn the_printed_grants_are_enough_for_everything_but_installing() {
    let runtime = runtime();
    let cluster = Cluster::shared();
    for scheme in STORES {
        let database = runtime.block_on(cluster.fresh_database());
        let role = format!("app_{}", &database.name()[5..]);
        let mut store = Store { database, scheme, parameters: "schema=locks" };
        let kind = scheme.strip_prefix("postgres+").unwrap_or("advisory").trim_end_matches("-xact");
        let printing = ["--grant-to", &role, "--store", kind];
        let (_, script, _) = finish(&mut support::with(store.tool("schema print"), printing));
        assert_eq!(script.matches("\nGRANT ").count(), 6 + usize::from(kind != "advisory"), "{script}");
        store.sql(&format!("CREATE ROLE {role} LOGIN"));
        store.sql(&script);
        let url = store.url().replacen("//postgres@", &format!("//{role}@"), 1);
        store.parameters = "schema=locks&install=true";
        let with_install = store.url().replacen("//postgres@", &format!("//{role}@"), 1);
        assert!(url.contains(&role), "{url}");
        for url in [url, with_install] {
            let (code, stdout, stderr) = finish(&mut tool(&url, "check"));
            assert_eq!((code, stderr.as_str()), (0, ""), "{scheme}: {stdout}");
            let lacking = stdout.lines().find(|line| line.trim_start().starts_with("privileges missing"));
            assert!(lacking.is_some_and(|line| line.ends_with("none")), "{scheme}: {stdout}");
            let mut a = Beside::start(&mut tool(&url, "run k --label why -- cat"));
            let start = Instant::now();
            while finish(&mut tool(&url, "inspect k")).0 != 0 {
                assert!(start.elapsed() < PATIENCE, "{scheme}");
            }
            for command in ["list", "list --all", "inspect k"] {
                let (code, _, stderr) = finish(&mut tool(&url, command));
                assert_eq!((code, stderr.as_str()), (0, ""), "{scheme} {command}");
            }
            assert_eq!(finish(&mut tool(&url, "run k --no-wait -- true")).0, 75, "{scheme}");
            let mut b = Beside::start(&mut tool(&url, "run k --wait 60s -- echo in"));
            a.close_stdin();
            assert_eq!((a.code(), b.line(), b.code()), (0, "in".to_owned(), 0), "{scheme}");
        }
        store.sql(&format!("REVOKE UPDATE ON SEQUENCE locks.token FROM {role}"));
        let url = store.url().replacen("//postgres@", &format!("//{role}@"), 1);
        let (code, _, stderr) = finish(&mut tool(&url, "run k --no-wait -- true"));
        assert_eq!(code, 69, "an error, not \"held\": {stderr}");
        assert!(stderr.contains("GRANT UPDATE ON SEQUENCE \"locks\".token"), "{scheme}: {stderr}");
    }
}

#[test]
fn a_role_that_may_read_looks_and_takes_nothing() {
    let runtime = runtime();
    for scheme in STORES {
        let database = runtime.block_on(Cluster::shared().fresh_database());
        let role = format!("watcher_{}", &database.name()[5..]);
        let store = Store { database, scheme, parameters: "" };
        store.sql(&format!("CREATE ROLE {role} LOGIN"));
        let apply = &mut support::with(store.tool("schema apply"), ["--grant-read-to", &role]);
        assert_eq!(finish(apply).0, 0, "{scheme}");
        let mut holder = Beside::start(&mut store.tool("run k -- cat"));
        let url = store.url().replacen("//postgres@", &format!("//{role}@"), 1);
        let start = Bound::new(PATIENCE);
        while finish(&mut tool(&url, "inspect k")).0 != 0 {
            start.check(format_args!("{scheme}"));
        }
        assert_eq!(finish(&mut tool(&url, "list")).0, 0, "{scheme}");
        let (code, _, stderr) = finish(&mut tool(&url, "run other --no-wait -- true"));
        assert!(code == 69 && stderr.contains("permission denied"), "{scheme} {code}: {stderr}");
        holder.close_stdin();
        assert_eq!(holder.code(), 0);
    }
}

#[test]
fn the_numbers_of_other_programs_can_be_used() {
    for (parameters, sql, key, other) in [
        ("install=true&hash=raw", "SELECT pg_advisory_lock(42)", "42", "43"),
        ("install=true&hash=pair", "SELECT pg_advisory_lock(1, 2)", "1,2", "2,1"),
        ("install=true&hash=sqlx", "SELECT pg_advisory_lock(-5560419505042474287)", SQLX, "another"),
    ] {
        for scheme in ["postgres", "postgres+advisory-xact"] {
            let store = Store::new(scheme, parameters);
            let runtime = runtime();
            let mut foreign = runtime.block_on(store.database.connect());
            runtime.block_on(raw_sql(sql).execute(&mut foreign)).unwrap();
            let no_wait =
                |key: &str| finish(&mut support::with(store.tool("run --no-wait"), [key, "--", "true"])).0;
            assert_eq!((no_wait(key), no_wait(other)), (75, 0), "{scheme} {parameters}");
            runtime.block_on(foreign.close()).unwrap();
            assert_eq!(finish(&mut support::with(store.tool("run --wait 30s"), [key, "--", "true"])).0, 0);
        }
    }
    let store = Store::new("postgres", "install=true&hash=raw");
    assert_eq!(finish(&mut store.run("not-a-number", "exit 0")).0, 64);
}

#[test]
fn the_schema_is_applied_and_checked() {
    for scheme in STORES {
        let store = Store::new(scheme, "schema=My%20\"Locks");
        let (code, stdout, stderr) = finish(&mut store.tool("check"));
        assert_eq!(code, 69, "{stdout}{stderr}");
        assert!(stdout.contains("not installed") && stdout.contains("schema apply"), "{stdout}{stderr}");
        let (code, value) = store.json("check --json");
        assert_eq!(
            (code, &value["ok"], &value["server"]["schema_version"]),
            (69, &Value::Bool(false), &Value::Null)
        );
        assert_eq!(finish(&mut store.run("k", "exit 0")).0, 69);

        for _ in 0..2 {
            let (code, stdout, stderr) = finish(&mut store.tool("schema apply"));
            assert_eq!((code, stderr.as_str()), (0, ""), "{stdout}");
            assert!(stdout.contains("My \"Locks") && stdout.contains("ready"), "{stdout}");
        }
        let (code, stdout, stderr) = finish(&mut store.tool("check"));
        assert_eq!((code, stderr.as_str()), (0, ""), "{stdout}");
        for part in ["works:", "PostgreSQL", "UTF8", "version 4", "privileges missing"] {
            assert!(stdout.contains(part), "{part} in {stdout}");
        }
        let (code, value) = store.json("check --json");
        assert_eq!((code, &value["server"]["standby"]), (0, &Value::Bool(false)), "{value}");
        assert_eq!(value["server"]["missing_grants"], serde_json::json!([]));
    }
}

#[test]
fn a_check_says_so_where_it_has_no_key_to_try_with() {
    let store = Store::new("postgres", "install=true&hash=raw");
    let (code, stdout, stderr) = finish(&mut store.tool("check"));
    assert_eq!(code, 64, "{stdout}{stderr}");
    let is_said = stdout.contains("version 4") && stdout.contains("keys are numbers with this");
    assert!(is_said, "{stdout}{stderr}");
    assert_eq!(finish(&mut store.run("42", "exit 7")).0, 7);
}

#[test]
fn the_printed_schema_is_what_is_applied() {
    let store = Store::new("postgres+ttl", "schema=by%20hand");
    // The command connects to no server, because none exists at this URL.
    let (code, printed, stderr) =
        finish(&mut tool("postgres+ttl://nobody@127.0.0.1:1/x?schema=by%20hand", "schema print"));
    assert_eq!((code, stderr.as_str()), (0, ""));
    let (_, same, _) = finish(
        support::with(store.tool("schema print"), ["--schema", "by hand"]).env_remove("LEASEHOLD_URL"),
    );
    assert_eq!(printed, same);
    store.sql(&printed);
    store.sql(&printed);
    assert!(store.is_free("k"));
    let (code, granted, _) =
        finish(&mut support::with(store.tool("schema print"), ["--grant-to", "the \"role"]));
    assert_eq!(code, 0);
    // The grants are in the same transaction.
    let objects = printed.strip_suffix("COMMIT;\n").unwrap();
    let grants = granted.strip_prefix(objects).and_then(|rest| rest.strip_suffix("COMMIT;\n")).unwrap();
    assert!(grants.contains("GRANT USAGE ON SCHEMA \"by hand\" TO \"the \"\"role\";"), "{grants}");
    let (code, _, stderr) = finish(&mut support::with(support::tool(), ["schema", "print", "--schema", ""]));
    assert_eq!(code, 64, "{stderr}");
    for everybody in [["--grant-to", "public"], ["--grant-to", "PUBLIC"], ["--grant-read-to", "public"]] {
        let (code, stdout, stderr) = finish(&mut support::with(store.tool("schema print"), everybody));
        assert!(
            (code, stdout.as_str()) == (64, "") && stderr.contains("no role"),
            "{everybody:?}: {stdout}{stderr}"
        );
    }
    let (code, _, stderr) = finish(&mut tool("memory:", "schema apply"));
    assert!(code == 64 && stderr.contains("postgres://"), "{stderr}");
    let (code, _, stderr) = finish(support::tool().args(["schema", "apply"]));
    assert!(code == 64 && stderr.contains("--url"), "{stderr}");
}
