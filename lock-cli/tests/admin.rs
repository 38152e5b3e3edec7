//! `leasehold list`, `inspect`, `release` and `check`: their output for people and for programs.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "support/command.rs"]
mod support;

use serde_json::Value;
use support::{Beside, Store, finish, nearly_an_hour};

const HOLD: &str = "echo $LEASEHOLD_HOLDER; read line";

/// Runs the command and checks that stderr is empty. Returns the exit code and stdout as JSON.
fn json(store: &Store, arguments: &str) -> (i32, Value) {
    let (code, stdout, stderr) = finish(&mut store.tool(arguments));
    assert_eq!(stderr, "");
    (code, serde_json::from_str(&stdout).unwrap_or_else(|error| panic!("{error}: {stdout}")))
}

#[test]
fn list_shows_who_holds_what() {
    let store = Store::new();
    let mut a = Beside::start(&mut store.run("ledger:1 --label nightly", HOLD));
    let holder = a.line();
    let mut b = Beside::start(&mut store.run("report", HOLD));
    b.line();

    let (code, stdout, stderr) = finish(&mut store.tool("list"));
    assert_eq!((code, stderr.as_str()), (0, ""));
    let lines: Vec<Vec<&str>> = stdout.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["KEY", "STATE", "WHO", "SINCE", "FOR", "TOKEN", "LABEL"]);
    assert_eq!((lines.len(), lines[1][0], lines[2][0]), (3, "ledger:1", "report"));
    assert_eq!(lines[1][1..4], ["held", "pid", &a.id().to_string()]);
    assert_eq!(lines[1].last(), Some(&"nightly"));
    assert!(lines[2].ends_with(&["sh", "pid", &b.id().to_string()]), "{stdout}");
    assert!(lines[1].iter().any(|word| word.ends_with('Z')), "the time says its zone: {stdout}");

    let (code, value) = json(&store, "list ledger: --json");
    assert_eq!((code, value.as_array().unwrap().len()), (0, 1));
    let hold = &value[0];
    assert_eq!(hold["key"], "ledger:1");
    assert_eq!(hold["state"], "held");
    assert_eq!(hold["label"], "nightly");
    assert_eq!(hold["holder"], holder.as_str());
    assert!(hold["token"].as_u64().unwrap() > 0);
    assert!(hold["held_for_ms"].is_u64());
    let since = hold["since"].as_str().unwrap();
    assert!(since.ends_with('Z') && since.len() == "2026-01-01T00:00:00.000000Z".len(), "{since}");
    let names: Vec<_> = hold.as_object().unwrap().keys().map(String::as_str).collect();
    let expected = [
        "asked",
        "cooling_for_ms",
        "expires_in_ms",
        "held_for_ms",
        "holder",
        "holders",
        "key",
        "label",
        "mode",
        "named",
        "owner",
        "permit",
        "permits",
        "since",
        "state",
        "token",
        "token_text",
        "waiters",
    ];
    assert_eq!(names, expected);
    let one = hold["holders"].as_array().unwrap();
    assert_eq!((one.len(), &one[0]["holder"], &one[0]["mode"]), (1, &hold["holder"], &"exclusive".into()));
}

#[test]
fn nothing_locked() {
    let store = Store::new();
    assert_eq!(finish(&mut store.run("k", "exit 0")).0, 0);
    let (code, stdout, _) = finish(&mut store.tool("list"));
    assert_eq!(code, 0);
    assert!(stdout.contains("nothing is locked"), "{stdout}");
    assert_eq!(json(&store, "list --json"), (0, serde_json::json!([])));
}

#[test]
fn cooldowns_are_listed_when_asked_for() {
    let store = Store::new();
    assert_eq!(finish(&mut store.run("hourly --once-per 1h", "exit 0")).0, 0);
    assert_eq!(json(&store, "list --json").1, serde_json::json!([]));
    let (_, value) = json(&store, "list --all --json");
    assert_eq!(value[0]["state"], "cooling");
    assert!(value[0]["cooling_for_ms"].as_u64().unwrap() > 3_000_000);
}

#[test]
fn inspect_tells_held_from_free() {
    let store = Store::new();
    let (code, stdout, stderr) = finish(&mut store.tool("inspect k"));
    assert_eq!((code, stderr.as_str()), (1, ""));
    assert!(stdout.starts_with("\"k\" is free on file:"), "which store: {stdout}");

    let mut tool = Beside::start(&mut store.run("k --label why", HOLD));
    let holder = tool.line();
    let (code, stdout, stderr) = finish(&mut store.tool("inspect k"));
    assert_eq!((code, stderr.as_str()), (0, ""));
    for part in [holder.as_str(), "held", "why", &format!("pid {}", tool.id())] {
        assert!(stdout.contains(part), "{part} in {stdout}");
    }
    let (code, value) = json(&store, "inspect k --json");
    assert_eq!((code, &value["holder"], &value["state"]), (0, &Value::from(holder), &Value::from("held")));

    tool.go_on();
    assert_eq!(tool.code(), 0);
    assert_eq!(finish(&mut store.tool("inspect k")).0, 1);
}

#[test]
fn machines_get_the_same_fields_of_a_free_a_held_and_a_cooling_key() {
    let store = Store::new();
    let free = serde_json::json!({
        "key": "k", "named": true, "state": "free", "cooling_for_ms": null, "waiters": null, "holders": [],
        "mode": null, "holder": null, "token": null, "token_text": null, "label": null, "owner": null, "since": null,
        "held_for_ms": null, "expires_in_ms": null, "asked": null, "permit": null, "permits": null,
    });
    assert_eq!(json(&store, "inspect k --json"), (1, free.clone()));
    let fields = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();

    let mut tool = Beside::start(&mut store.run("k --cooldown 1h --label why", HOLD));
    let holder = tool.line();
    let (code, held) = json(&store, "inspect k --json");
    assert_eq!((code, fields(&held)), (0, fields(&free)));
    assert_eq!((&held["state"], &held["holder"]), (&Value::from("held"), &Value::from(holder)));
    assert_eq!((&held["label"], &held["mode"]), (&Value::from("why"), &Value::from("exclusive")));
    let inner = held["holders"][0].as_object().unwrap();
    assert_eq!(held["holders"].as_array().unwrap().len(), 1);
    for name in ["state", "mode", "holder", "token", "label", "owner", "since", "expires_in_ms"] {
        assert_eq!(inner[name], held[name], "{name}");
    }

    tool.go_on();
    assert_eq!(tool.code(), 0);
    let (code, cooling) = json(&store, "inspect k --json");
    assert_eq!((code, fields(&cooling)), (1, fields(&free)));
    assert_eq!(cooling["state"], "cooling");
    assert!(cooling["cooling_for_ms"].as_u64().unwrap() > 3_000_000, "{cooling}");
    let (code, stdout, _) = finish(&mut store.tool("inspect k"));
    assert!(code == 1 && stdout.contains("cooling") && nearly_an_hour(&stdout), "{code} {stdout}");
}

#[test]
fn only_a_store_with_sessions_can_end_one() {
    for url in ["memory:", &Store::new().url()] {
        let (code, stdout, stderr) =
            finish(support::tool().args(["--url", url, "release", "k", "--force", "--session"]));
        assert_eq!((code, stdout.as_str()), (64, ""), "{stderr}");
        assert!(stderr.contains("unsupported") && stderr.contains("\"k\""), "{stderr}");
    }
}

#[test]
fn a_holder_that_is_asked_gets_its_signal_once_and_decides() {
    let store = Store::new();
    let ask = |arguments: &str| finish(&mut store.tool(&format!("release k --ask {arguments}")));
    let (code, stdout, _) = ask("");
    assert!(code == 1 && stdout.contains("nobody was asked"), "{code} {stdout}");
    let script = "trap 'echo asked' USR1; echo $LEASEHOLD_HOLDER; while ! read line; do :; done; exit 3";
    let mut deaf = Beside::start(&mut store.run("deaf", HOLD));
    deaf.line();
    let mut tool = Beside::start(&mut store.run("k --on-ask usr1", script));
    let holder = tool.line();
    let (code, value) = json(&store, "release k --ask --json");
    assert_eq!((code, value), (0, serde_json::json!({ "key": "k", "holder": holder, "asked": true })));
    assert_eq!(tool.line(), "asked");
    assert!(tool.note().contains("asked to release the lock \"k\"; sending SIGUSR1"));
    let (code, stdout, _) = ask(&format!("--holder {holder}"));
    assert!(code == 0 && stdout.contains(&format!("asked {holder} to release \"k\"")), "{code} {stdout}");
    assert_eq!(json(&store, "inspect k --json").1["asked"], true);
    assert!(finish(&mut store.tool("inspect k")).1.contains("asked       to release"));
    assert!(!store.is_free("k"), "it goes on");
    tool.go_on();
    assert_eq!((tool.rest_of_stdout().as_str(), tool.code()), ("", 3));
    let (code, stdout, _) = ask(&format!("--holder {holder}"));
    assert!(code == 1 && stdout.contains("does not hold"), "{code} {stdout}");
    // A command without the option is asked too, and gets no signal.
    assert_eq!(finish(&mut store.tool("release deaf --ask")).0, 0);
    deaf.go_on();
    assert_eq!(deaf.code(), 0);
}

#[test]
fn a_file_store_has_no_forced_release_and_says_so() {
    let store = Store::new();
    let mut tool = Beside::start(&mut store.run("k", HOLD));
    let holder = tool.line();
    let (code, stdout, stderr) = finish(&mut store.tool(&format!("release k --force --holder {holder}")));
    assert_eq!((code, stdout.as_str()), (64, ""), "{stderr}");
    assert!(stderr.contains("unsupported") && stderr.contains("\"k\""), "{stderr}");
    assert!(!store.is_free("k"));
}

#[test]
fn a_store_with_forced_release_says_when_there_is_nothing_to_release() {
    let holder = format!("{}-1", "0".repeat(32));
    let mut command = support::tool();
    command.args(["--url", "memory:", "release", "k", "--force", "--json", "--holder", &holder]);
    let (code, stdout, stderr) = finish(&mut command);
    let value: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((code, stderr.as_str()), (1, ""));
    assert_eq!(value, serde_json::json!({ "key": "k", "holder": holder, "released": false }));
}

#[test]
fn release_wants_to_be_meant() {
    let store = Store::new();
    let holder = format!("{}-1", "0".repeat(32));
    for (arguments, hint) in [
        (format!("release k --holder {holder}"), "--force"),
        ("release k --force".to_owned(), "--holder"),
        ("release k --force --holder me".to_owned(), "32 hexadecimal digits"),
        ("release k --ask --force".to_owned(), "cannot be used with"),
        ("run k --on-ask kill -- true".to_owned(), "HUP, USR1, USR2 or TERM"),
    ] {
        let (code, stdout, stderr) = finish(&mut store.tool(&arguments));
        assert_eq!((code, stdout.as_str()), (64, ""), "{arguments}");
        assert!(stderr.contains(hint), "{arguments}: {stderr}");
    }
}

#[test]
fn check_says_what_the_store_can_do() {
    let store = Store::new();
    let (code, stdout, stderr) = finish(&mut store.tool("check"));
    assert_eq!((code, stderr.as_str()), (0, ""));
    for part in ["works:", "between processes of one machine", "release --force", "within"] {
        assert!(stdout.contains(part), "{part} in {stdout}");
    }
    let (code, value) = json(&store, "check --json");
    assert_eq!((code, &value["ok"], &value["error"]), (0, &Value::Bool(true), &Value::Null));
    assert_eq!(value["capabilities"]["force_release"], false);
    assert_eq!(value["capabilities"]["ask"], true);
    assert_eq!(value["capabilities"]["end_session"], false);
    assert_eq!(
        (&value["capabilities"]["shared"], &value["capabilities"]["max_permits"]),
        (&true.into(), &1024.into())
    );
    assert!(value["capabilities"]["handover_ms"].as_u64().unwrap() > 0);
    assert_eq!(json(&store, "list --all --json").1, serde_json::json!([]), "it leaves nothing held");
}

#[test]
fn looking_makes_no_directory_and_no_file_and_tells_a_missing_one() {
    let store = Store::new();
    for (arguments, code) in [("list", 0), ("inspect k", 1), ("check", 0)] {
        let (ended, stdout, stderr) = finish(&mut store.tool(arguments));
        assert_eq!((ended, stderr.as_str()), (code, ""), "{arguments}: {stdout}");
        assert!(stdout.contains("there is no such directory"), "{arguments}: {stdout}");
    }
    assert!(!store.locks().exists());
    store.take("k");
    let names = || std::fs::read_dir(store.locks()).unwrap().count();
    let before = names();
    for (arguments, code) in [("list --all", 0), ("inspect another", 1), ("check", 0)] {
        let (ended, stdout, _) = finish(&mut store.tool(arguments));
        assert_eq!(ended, code, "{arguments}");
        assert!(!stdout.contains("no such directory"), "{arguments}: {stdout}");
    }
    assert_eq!(names(), before);
}

#[test]
fn check_says_what_to_mend() {
    let store = Store::new();
    std::fs::write(store.locks(), "a file").unwrap();
    let (code, stdout, stderr) = finish(&mut store.tool("check"));
    assert_eq!(code, 64, "{stderr}");
    assert!(stderr.contains("locks") && stdout.contains("to mend: "), "{stdout}{stderr}");
    let (code, value) = json(&store, "check --json");
    assert_eq!((code, &value["ok"], &value["capabilities"]), (64, &Value::Bool(false), &Value::Null));
    assert!(value["error"].as_str().unwrap().contains("locks"));

    let (code, stdout, _) = finish(support::tool().args(["--url", "memory:", "check"]));
    assert_eq!(code, 0);
    assert!(stdout.contains("within one process only"), "{stdout}");
}

#[test]
fn machines_get_an_object_also_when_there_is_no_answer() {
    for arguments in ["list --json", "inspect k --json", "list --json --watch"] {
        let mut command = support::tool();
        command.env("LEASEHOLD_URL", "redis://host").args(arguments.split(' '));
        let (code, stdout, stderr) = finish(&mut command);
        let value: Value = serde_json::from_str(&stdout).unwrap_or_else(|error| panic!("{error}: {stdout}"));
        assert_eq!((code, &value["ok"], &value["kind"]), (64, &false.into(), &"invalid option".into()));
        assert_eq!(
            (&value["retryable"], value["error"].as_str().unwrap().contains("redis")),
            (&false.into(), true)
        );
        assert!(stderr.contains("redis"), "{stderr}");
    }
    // `lock` must print nothing on stdout here, because a caller takes a line of it for the grant.
    let mut command = support::tool();
    command.env("LEASEHOLD_URL", "redis://host").args(["lock", "k", "--json"]);
    let (code, stdout, stderr) = finish(&mut command);
    assert!((code, stdout.as_str()) == (64, "") && stderr.contains("redis"), "{stdout}{stderr}");
}

/// `check` fails for a directory that can be read but not locked, such as on a full disk or a read-only file system.
#[test]
#[cfg(target_os = "linux")]
fn check_tells_a_directory_in_which_nothing_can_be_locked() {
    // No user, not even root, can create a file there.
    let (code, stdout, stderr) = finish(support::tool().args(["--url", "file:///proc", "check"]));
    assert_eq!(code, 69, "{stdout}{stderr}");
    assert!(!stdout.contains("works:") && stderr.contains("nothing can be locked"), "{stdout}{stderr}");
}

/// `check` reads the file that new keys need for their tokens, which `list` does not read.
#[test]
fn check_reads_what_is_remembered_of_removed_keys() {
    let store = Store::new();
    store.take("k");
    assert_eq!(finish(&mut store.tool("gc --unused-for 0s")).0, 0);
    assert_eq!(finish(&mut store.tool("check")).0, 0);
    std::fs::write(store.locks().join("leasehold-floor"), "garbage").unwrap();
    assert_eq!(finish(&mut store.tool("list")).0, 0);
    let (code, stdout, stderr) = finish(&mut store.tool("check"));
    assert!(code == 69 && stderr.contains("leasehold-floor is damaged"), "{code} {stdout}{stderr}");
}

/// The command prints warnings of the library.
#[test]
fn a_doubtful_directory_is_told() {
    use std::os::unix::fs::PermissionsExt as _;
    let store = Store::new();
    store.take("k");
    std::fs::set_permissions(store.locks(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let (code, _, stderr) = finish(&mut store.run("k", "exit 0"));
    assert!(code == 0 && stderr.contains("everybody can write"), "{code}: {stderr}");
    let (code, value) = json(&store, "check --json");
    assert!(
        code == 0 && value["advice"][0].as_str().unwrap().contains("everybody can write"),
        "{code}: {value}"
    );
}

#[test]
fn a_watched_list_shows_what_has_changed() {
    let store = Store::new();
    let mut watch = Beside::start(&mut store.tool("list --watch=0.1 --json"));
    let next = |watch: &mut Beside| serde_json::from_str::<Value>(&watch.line()).unwrap();
    assert_eq!(next(&mut watch), serde_json::json!([]));
    let mut tool = Beside::start(&mut store.run("k", HOLD));
    tool.line();
    while next(&mut watch)[0]["key"] != "k" {}
    tool.go_on();
    while next(&mut watch) != serde_json::json!([]) {}

    let mut watch = Beside::start(&mut store.tool("list --watch"));
    let page = [watch.line(), watch.line(), watch.line()];
    assert!(page[0].starts_with("file:") && page[0].ends_with('Z'), "{page:?}");
    assert!(page[1].is_empty() && page[2].starts_with("nothing is locked"), "{page:?}");
    assert_eq!(finish(&mut store.tool("list --watch=x")).0, 64);
    // A watch that ends with an error prints it as a JSON line.
    let mut watch = Beside::start(&mut store.tool("list --watch=0.1 --json"));
    assert_eq!(next(&mut watch), serde_json::json!([]));
    std::fs::rename(store.locks(), store.path("away")).unwrap();
    std::fs::write(store.locks(), "").unwrap();
    let failed = std::iter::from_fn(|| Some(next(&mut watch))).find(|line| !line.is_array()).unwrap();
    assert_eq!((&failed["ok"], &failed["retryable"]), (&false.into(), &false.into()), "{failed}");
    assert_eq!(watch.code(), 64, "{}", watch.rest_of_stderr());
    std::fs::remove_file(store.locks()).unwrap();
    // A watch ends when its reader closes the pipe.
    let script = format!("{} list --watch=0.1 | head -n 1", env!("CARGO_BIN_EXE_leasehold"));
    let mut command = std::process::Command::new("sh");
    assert_eq!(finish(command.args(["-c", &script]).env("LEASEHOLD_URL", store.url())).0, 0);
}
