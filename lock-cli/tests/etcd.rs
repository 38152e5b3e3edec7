//! The command on etcd, on a real cluster: exclusion between processes, the operators' commands, errors and exit codes.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "support/command.rs"]
mod support;

use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use support::{Beside, finish, nearly_an_hour, with};
use test_bounds::Bound;
use test_servers::{Etcd, EtcdOptions, EtcdUser};

const HOLD: &str = "echo $LEASEHOLD_HOLDER; read line";

/// Longer than any step takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// A store by its URL.
struct Store {
    url: String,
}

impl Store {
    /// Returns the store of this prefix on the cluster of all tests.
    fn new(prefix: &str) -> Self {
        Self { url: Etcd::shared().url(prefix) }
    }

    fn tool(&self, arguments: &str) -> Command {
        let mut command = support::tool();
        command.env("LEASEHOLD_URL", &self.url).args(arguments.split_whitespace());
        command
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
            other => panic!("{other:?}"),
        }
    }

    fn take(&self, key: &str) {
        let (code, _, stderr) = finish(&mut self.run(&format!("{key} --wait 5m"), "exit 0"));
        assert_eq!(code, 0, "{stderr}");
    }

    /// Runs the tool. Returns the exit code and its output as JSON.
    fn json(&self, arguments: &str) -> (i32, Value) {
        let (code, stdout, stderr) = finish(&mut self.tool(arguments));
        let value = serde_json::from_str(&stdout);
        (code, value.unwrap_or_else(|error| panic!("{error}: {stdout}{stderr}")))
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

#[test]
fn a_run_on_etcd_excludes_others_and_a_waiter_comes_next() {
    let store = Store::new("cli-run");
    let mut a = Beside::start(&mut store.run("k --label nightly", HOLD));
    let holder = a.line();
    assert!(!store.is_free("k"));
    assert!(store.is_free("another"));

    let mut b = Beside::start(&mut store.run("k --wait 5m", "echo $LEASEHOLD_TOKEN; read line"));
    let start = Bound::new(PATIENCE);
    let seen = loop {
        let (code, seen) = store.json("inspect k --json");
        assert_eq!(code, 0);
        if seen["waiters"] == 1 {
            break seen;
        }
        start.check(&seen);
    };
    assert_eq!((&seen["holder"], &seen["label"]), (&Value::from(holder.as_str()), &Value::from("nightly")));
    assert!(seen["expires_in_ms"].as_u64().is_some_and(|left| left <= 30_000), "{seen}");
    assert!(seen["owner"].as_str().is_some_and(|owner| owner.contains(&a.id().to_string())), "{seen}");
    let token = seen["token"].as_u64().unwrap();

    a.go_on();
    assert_eq!(a.code(), 0);
    assert!(b.line().parse::<u64>().unwrap() > token, "tokens grow from holder to holder");
    let (code, list) = store.json("list --json");
    assert_eq!((code, list.as_array().unwrap().len()), (0, 1), "{list}");
    b.go_on();
    assert_eq!(b.code(), 0);
    let (code, stdout, _) = finish(&mut store.tool("list"));
    assert!(code == 0 && stdout.contains("nothing is locked"), "{stdout}");
}

#[test]
fn a_killed_run_on_etcd_frees_its_key_when_its_lease_ends() {
    let store = Store { url: format!("{}?ttl=2s", Etcd::shared().url("cli-killed")) };
    let mut tool = Beside::start(&mut store.run("k", HOLD));
    tool.line();
    tool.kill();
    store.take("k");
}

#[test]
fn a_forced_release_on_etcd_ends_the_command_of_the_holder() {
    let store = Store::new("cli-force");
    let mut tool = Beside::start(&mut store.run("k", HOLD));
    let holder = tool.line();
    let release = format!("release k --force --holder {holder}");
    let (code, stdout, stderr) = finish(&mut store.tool(&release));
    assert_eq!(code, 0, "{stderr}");
    assert!(stdout.contains(&holder), "{stdout}");
    assert_eq!(tool.code(), 76, "{}", tool.rest_of_stderr());
    assert_eq!(finish(&mut store.tool(&release)).0, 1, "it does not hold it any more");
    assert!(store.is_free("k"));
    let (code, _, stderr) = finish(&mut store.tool("release k --force --session"));
    assert_eq!(code, 64, "{stderr}");
}

#[test]
fn a_cooldown_on_etcd_outlives_its_run_and_is_listed() {
    let store = Store::new("cli-cooldown");
    let run = || finish(&mut store.run("hourly --once-per 1h", "echo ran"));
    assert_eq!(run().1, "ran\n");
    let (code, stdout, _) = run();
    assert_eq!((code, stdout.as_str()), (0, ""), "not due");
    let (_, list) = store.json("list --all --json");
    assert_eq!(list[0]["state"], "cooling");
    let (code, stdout, _) = finish(&mut store.tool("inspect hourly"));
    assert!(code == 1 && stdout.contains("cooling") && nearly_an_hour(&stdout), "{code} {stdout}");
}

#[test]
fn two_prefixes_are_two_stores() {
    let (one, other) = (Store::new("cli-one"), Store::new("cli-one-b"));
    let mut tool = Beside::start(&mut one.run("k", HOLD));
    tool.line();
    assert!(other.is_free("k"));
    assert_eq!(other.json("list --json").1, serde_json::json!([]));
    tool.go_on();
    assert_eq!(tool.code(), 0);
}

#[test]
fn the_command_of_a_run_uses_the_same_cluster_of_several_hosts() {
    let address = Etcd::shared().address(0);
    // Nothing listens on the second port.
    let url = format!("etcd://{address},127.0.0.1:1/cli-nested");
    let nested = "run inner -- echo ran";
    let mut tool =
        with(support::tool(), ["--url", &url, "run", "outer", "--", env!("CARGO_BIN_EXE_leasehold")]);
    let (code, stdout, stderr) = finish(tool.args(nested.split(' ')));
    assert_eq!((code, stdout.as_str()), (0, "ran\n"), "{stderr}");
}

#[test]
fn a_check_of_etcd_reports_its_facts() {
    let etcd = Etcd::shared();
    let store = Store::new("cli-check");
    let (code, report) = store.json("check --json");
    assert_eq!((code, &report["ok"]), (0, &Value::from(true)), "{report}");
    let version = runtime().block_on(etcd.status(0)).unwrap().version;
    assert!(report["facts"].to_string().contains(&version), "{version} in {report}");
    assert_eq!(report["server"], Value::Null, "that is the part of Postgres");
    let (code, stdout, _) = finish(&mut store.tool("check"));
    assert!(code == 0 && stdout.contains("works: took, saw and released a lock"), "{stdout}");
    assert!(stdout.contains("STORE") && stdout.contains(&version), "{stdout}");
}

#[test]
fn members_that_cannot_be_reached_are_an_outage_without_the_password() {
    let store = Store { url: "etcd://app:s3cret@127.0.0.1:1,127.0.0.1:2/locks".to_owned() };
    for arguments in ["run k --no-wait -- true", "list", "check"] {
        let (code, stdout, stderr) = finish(&mut store.tool(arguments));
        assert_eq!(code, 69, "{arguments}: {stdout}{stderr}");
        assert!(stderr.contains("127.0.0.1:1"), "which member: {stderr}");
        assert!(!(stdout + &stderr).contains("s3cret"), "{arguments}");
    }
}

#[test]
fn a_user_of_one_prefix_locks_there_and_nowhere_else() {
    let etcd = Etcd::start(EtcdOptions::new());
    let users = [EtcdUser::new("app", "s3cret", "locks/"), EtcdUser::new("other", "s3cret", "others/")];
    runtime().block_on(etcd.require_users(&users));
    let at = |login: &str, prefix: &str| Store {
        url: etcd.url(prefix).replacen("://", &format!("://{login}"), 1),
    };
    let own = at("app:s3cret@", "locks");
    let (code, stdout, stderr) = finish(&mut own.run("k", "echo ran"));
    assert_eq!((code, stdout.as_str()), (0, "ran\n"), "{stderr}");
    assert_eq!(own.json("list --json"), (0, serde_json::json!([])));
    for refused in [
        at("app:wr0ng@", "locks"),
        at("", "locks"),
        at("app:s3cret@", "others"),
        at("nobody:s3cret@", "locks"),
    ] {
        let (code, stdout, stderr) = finish(&mut refused.run("k --wait 5m", "echo ran"));
        assert_eq!((code, stdout.as_str()), (69, ""), "{stderr}");
        assert!(!stderr.contains("s3cret") && !stderr.contains("wr0ng"), "{stderr}");
    }
}

#[test]
fn a_password_of_etcd_that_is_rotated_in_its_file_is_read_again() {
    let etcd = Etcd::start(EtcdOptions::new());
    runtime().block_on(etcd.require_users(&[EtcdUser::new("app", "one", "locks/")]));
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("url");
    let url = |password: &str| etcd.url("locks").replacen("://", &format!("://app:{password}@"), 1);
    let rotate = |password: &str| std::fs::write(&file, url(password) + "?ttl=5s\n").unwrap();
    rotate("one");
    let mut tool = support::tool();
    // Three times as long as a lease that is not renewed.
    tool.env("LEASEHOLD_URL_FILE", &file).args(["run", "k", "--", "sh", "-c", "echo held; sleep 15"]);
    let mut tool = Beside::start(&mut tool);
    assert_eq!(tool.line(), "held");
    rotate("two");
    // Ends the login that the tool has.
    runtime().block_on(etcd.change_password("app", "two"));
    assert_eq!(tool.code(), 0, "{}", tool.rest_of_stderr());
}

#[test]
fn without_space_holders_stay_and_an_operator_is_called() {
    let etcd = Etcd::start(EtcdOptions::new().quota(4 << 20));
    let store = Store { url: etcd.url("locks") };
    let mut tool = Beside::start(&mut store.run("k", HOLD));
    tool.line();
    runtime().block_on(etcd.fill());
    let (code, stdout, stderr) = finish(&mut store.run("another --wait 5m", "echo ran"));
    assert_eq!((code, stdout.as_str()), (69, ""), "it does not wait for an operator: {stderr}");
    let (code, report) = store.json("check --json");
    assert_eq!((code, &report["kind"]), (69, &Value::from("needs operator")), "{report}");
    assert_eq!(store.json("list --json").1[0]["key"], "k", "the holder keeps its lock");
    tool.go_on();
    assert_eq!(tool.code(), 0, "{}", tool.rest_of_stderr());
    runtime().block_on(etcd.make_room());
    store.take("another");
}

#[test]
fn a_run_goes_on_without_the_leader() {
    let etcd = Etcd::start(EtcdOptions::three());
    let store = Store { url: etcd.url("locks") };
    let mut tool = Beside::start(&mut store.run("k", HOLD));
    tool.line();
    runtime().block_on(async { etcd.kill(etcd.leader().await).await });
    let (code, _, stderr) = finish(&mut store.run("another --wait 5m", "exit 0"));
    assert_eq!(code, 0, "{stderr}");
    assert!(!store.is_free("k"));
    tool.go_on();
    assert_eq!(tool.code(), 0, "{}", tool.rest_of_stderr());
    store.take("k");
}

#[test]
fn slots_on_etcd_are_numbered_between_processes_and_one_of_them_can_be_forced() {
    let store = Store::new("cli-slots");
    let mut first =
        Beside::start(&mut store.run("k --slots 2", "echo $LEASEHOLD_PERMIT $LEASEHOLD_HOLDER; read line"));
    let line = first.line();
    let (number, holder) = line.split_once(' ').unwrap();
    assert_eq!(number, "0");
    let mut second = Beside::start(&mut store.run("k --slots 2", "echo $LEASEHOLD_PERMIT; read line"));
    assert_eq!(second.line(), "1");
    let (code, _, stderr) = finish(&mut store.run("k --slots 3 --no-wait", "echo ran"));
    assert!(code == 64 && stderr.contains("in use with 2 permits"), "{code}: {stderr}");
    let (_, seen) = store.json("inspect k --json");
    let holders = seen["holders"].as_array().unwrap();
    assert_eq!(holders.iter().map(|hold| hold["permit"].as_u64()).collect::<Vec<_>>(), [Some(0), Some(1)]);
    assert_eq!(finish(&mut store.tool(&format!("release k --force --holder {holder}"))).0, 0);
    assert_eq!(first.code(), 76, "{}", first.rest_of_stderr());
    let (code, stdout, stderr) = finish(&mut store.run("k --slots 2 --wait 5m", "echo $LEASEHOLD_PERMIT"));
    assert_eq!((code, stdout.as_str()), (0, "0\n"), "{stderr}");
    second.go_on();
    assert_eq!(second.code(), 0);
    assert_eq!(finish(&mut store.run("k --shared --wait 5m", "echo read")).1, "read\n");
}
