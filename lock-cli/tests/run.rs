//! `leasehold run`: exclusion, exit codes, environment, waiting, windows.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "support/command.rs"]
mod support;

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::UnixDatagram;

use support::{Beside, Store, finish, finish_refused, nearly_an_hour, read, with};

/// Prints that it has begun, and ends after reading a line.
const HOLD: &str = "echo begun; read line; echo ended";

#[test]
fn passes_on_output_and_exit_code() {
    let store = Store::new();
    let (code, stdout, stderr) = finish(&mut store.run("k", "echo out; echo err >&2; exit 7"));
    assert_eq!((code, stdout.as_str(), stderr.as_str()), (7, "out\n", "err\n"), "and says nothing itself");
    assert!(store.is_free("k"));
}

#[test]
fn passes_on_arguments_and_input_exactly() {
    let store = Store::new();
    let odd = OsStr::from_bytes(b"\xff not UTF-8");
    let arguments = [
        OsStr::new("--"),
        OsStr::new("printf"),
        OsStr::new("[%s]"),
        OsStr::new(""),
        OsStr::new("a  b"),
        OsStr::new("--"),
        OsStr::new("-x"),
        odd,
    ];
    let output = with(store.tool("run k"), arguments).output().unwrap();
    assert_eq!(output.stdout, b"[][a  b][--][-x][\xff not UTF-8]");

    let mut echo = Beside::start(&mut store.run("k", "read line; echo got \"$line\""));
    echo.go_on();
    assert_eq!(echo.line(), "got");
    assert_eq!(echo.code(), 0);
}

#[test]
fn the_command_finds_key_token_and_holder() {
    let store = Store::new();
    let tell = r#"printf '%s\n' "$LEASEHOLD_KEY" "$LEASEHOLD_TOKEN" "$LEASEHOLD_HOLDER""#;
    let grant = || {
        let key = "ledger:42 \u{e9}";
        let (code, stdout, stderr) = finish(&mut with(store.tool("run"), [key, "--", "sh", "-c", tell]));
        assert_eq!(code, 0, "{stderr}");
        let lines: Vec<_> = stdout.lines().map(str::to_owned).collect();
        assert_eq!(lines[0], key);
        (lines[1].parse::<u64>().unwrap(), lines[2].clone())
    };
    let ((first, one), (second, other)) = (grant(), grant());
    assert!(first < second, "{first} {second}");
    assert_ne!(one, other);
}

#[test]
fn two_never_run_at_once() {
    let store = Store::new();
    let counter = store.path("counter");
    std::fs::write(&counter, "0").unwrap();
    // The increment is not atomic, so runs without the lock would lose increments and overlap at the mark.
    let script = format!(
        "cd {}; mkdir mark || echo overlap; n=$(cat counter); sleep 0.01; echo $((n + 1)) > counter; rmdir mark",
        store.path("").display()
    );
    let mut all: Vec<_> = (0..12).map(|_| Beside::start(&mut store.run("k", &script))).collect();
    for tool in &mut all {
        assert_eq!(tool.rest_of_stdout(), "");
        assert_eq!(tool.code(), 0, "{}", tool.rest_of_stderr());
    }
    assert_eq!(read(counter).trim(), "12");
}

#[test]
fn different_keys_run_at_once() {
    let store = Store::new();
    let mut a = Beside::start(&mut store.run("a", HOLD));
    assert_eq!(a.line(), "begun");
    let mut b = Beside::start(&mut store.run("b", HOLD));
    assert_eq!(b.line(), "begun");
}

#[test]
fn a_held_lock_is_a_conflict() {
    let store = Store::new();
    let mut holder = Beside::start(&mut store.run("k", HOLD));
    assert_eq!(holder.line(), "begun");
    for (arguments, expected) in [
        ("k --no-wait", 75),
        ("k --wait 0s", 75),
        ("k --wait 1500ms", 75),
        ("k --no-wait --conflict-exit-code 3", 3),
        ("k --no-wait --conflict-exit-code 0", 0),
    ] {
        let (code, stdout, stderr) = finish_refused(&mut store.run(arguments, "echo ran"));
        assert_eq!((code, stdout.as_str()), (expected, ""), "{arguments}: {stderr}");
        assert!(stderr.contains("\"k\" is locked, held by pid "), "{arguments}: {stderr}");
    }
    holder.go_on();
    assert_eq!((holder.line().as_str(), holder.code()), ("ended", 0));
    assert!(store.is_free("k"));
}

#[test]
fn waits_until_the_holder_has_ended() {
    let store = Store::new();
    let log = store.path("log");
    let script = |name: &str| format!("{HOLD}; echo {name} >> {}", log.display());
    let mut holder = Beside::start(&mut store.run("k", &script("first")));
    assert_eq!(holder.line(), "begun");
    let mut waiter = Beside::start(&mut store.run("k", &script("second")));
    let note = waiter.note();
    assert!(note.contains("waiting for \"k\" on file:") && note.contains(", held by pid "), "{note}");
    holder.go_on();
    assert_eq!(waiter.line(), "begun");
    assert_eq!(read(&log), "first\n", "the first had ended");
    waiter.go_on();
    assert_eq!((holder.code(), waiter.code()), (0, 0));
    assert_eq!(read(&log), "first\nsecond\n");
}

#[test]
fn a_command_ended_by_a_signal() {
    let store = Store::new();
    for (signal, expected) in [("TERM", 143), ("KILL", 137), ("USR1", 138)] {
        let (code, _, stderr) = finish(&mut store.run("k", &format!("kill -{signal} $$")));
        assert_eq!(code, expected, "{stderr}");
        assert!(store.is_free("k"));
    }
}

#[test]
fn a_command_that_cannot_start() {
    let store = Store::new();
    let plain = store.path("plain");
    std::fs::write(&plain, "not executable").unwrap();
    for (command, expected) in [
        ("no-such-command-anywhere".to_owned(), 127),
        (store.path("missing").display().to_string(), 127),
        (plain.display().to_string(), 126),
        (store.path("").display().to_string(), 126),
    ] {
        let (code, _, stderr) = finish(&mut with(store.tool("run k --"), [&command]));
        assert_eq!(code, expected, "{command}: {stderr}");
        assert!(stderr.contains("cannot run") && stderr.contains(&command), "{stderr}");
        assert!(store.is_free("k"));
    }
    // Without a PATH, the system's default path applies.
    let mut without_path = store.run("k", "echo found");
    let (code, stdout, stderr) = finish(without_path.env_remove("PATH"));
    assert_eq!((code, stdout.as_str()), (0, "found\n"), "{stderr}");
    // A missing command fails before the wait and uses up no window.
    let mut holder = Beside::start(&mut store.tool("lock held"));
    holder.line();
    assert_eq!(finish(&mut store.tool("run held -- no-such-command-anywhere")).0, 127);
    assert_eq!(finish(&mut store.tool("run hourly --once-per 1h -- no-such-command-anywhere")).0, 127);
    assert_eq!(finish(&mut store.run("hourly --once-per 1h", "echo due")).1, "due\n");
    let (code, _, stderr) = finish(&mut store.run("k", "exit 127"));
    assert_eq!((code, stderr.as_str()), (127, ""), "a command's own 127 is told apart by our silence");
}

#[test]
fn once_per_window() {
    let store = Store::new();
    let run = || finish(&mut store.run("hourly --once-per 1h", "echo ran"));
    assert_eq!(run().1, "ran\n");
    let (code, stdout, stderr) = run();
    assert_eq!((code, stdout.as_str()), (0, ""), "{stderr}");
    assert!(
        stderr.contains("not due") && stderr.contains("again in ") && nearly_an_hour(&stderr),
        "{stderr}"
    );
    let (code, stdout, stderr) = finish(&mut store.run("hourly --once-per 1h --quiet", "echo ran"));
    assert_eq!((code, stdout.as_str(), stderr.as_str()), (0, "", ""));
}

#[test]
fn a_window_lasts_though_its_run_was_killed() {
    let store = Store::new();
    let mut first = Beside::start(&mut store.run("hourly --once-per 1h", HOLD));
    assert_eq!(first.line(), "begun");
    first.kill();
    assert_eq!(first.rest_of_stdout(), "");
    let (code, stdout, stderr) = finish(&mut store.run("hourly --once-per 1h", "echo ran"));
    assert_eq!((code, stdout.as_str()), (0, ""), "{stderr}");
    assert!(stderr.contains("not due"), "{stderr}");
}

#[test]
fn a_cooldown_keeps_others_out() {
    // Also under its former name, because scripts use it.
    for option in ["--cooldown", "--min-hold"] {
        let store = Store::new();
        assert_eq!(finish(&mut store.run(&format!("k {option} 1h"), "exit 0")).0, 0);
        let (code, stdout, stderr) = finish(&mut store.run("k --no-wait", "echo ran"));
        assert_eq!((code, stdout.as_str()), (75, ""), "{stderr}");
        assert!(stderr.contains("in a cooldown for another ") && nearly_an_hour(&stderr), "{stderr}");
    }
}

#[test]
fn a_maximum_hold_that_is_not_reached_changes_nothing() {
    let store = Store::new();
    let (code, stdout, stderr) = finish(&mut store.run("k --max-hold 1h", "echo ran; exit 7"));
    assert_eq!((code, stdout.as_str(), stderr.as_str()), (7, "ran\n", ""));
    assert!(store.is_free("k"));
}

#[test]
fn a_run_inside_a_run_has_its_own_grant() {
    let store = Store::new();
    let inner = format!(
        "{} run inner -- sh -c 'echo $LEASEHOLD_KEY $LEASEHOLD_TOKEN'; echo $LEASEHOLD_KEY $LEASEHOLD_TOKEN",
        env!("CARGO_BIN_EXE_leasehold")
    );
    let (code, stdout, stderr) = finish(&mut store.run("outer", &inner));
    let lines: Vec<_> = stdout.lines().collect();
    assert_eq!(code, 0, "{stderr}");
    assert!(lines[0].starts_with("inner ") && lines[1].starts_with("outer "), "{stdout}");
    assert_ne!(lines[0].split(' ').next_back(), lines[1].split(' ').next_back());

    // The lock is not reentrant, so the run's own key is held for a nested run too.
    let again = format!("{} run k --no-wait -- echo ran", env!("CARGO_BIN_EXE_leasehold"));
    assert_eq!(finish(&mut store.run("k", &again)).0, 75);
}

#[test]
fn without_a_url_the_locks_are_in_the_state_directory() {
    let home = Store::new();
    let run = |script: &str| {
        let mut command = with(support::tool(), ["run", "nightly-report", "--", "sh", "-c", script]);
        command.env("XDG_STATE_HOME", home.path("")).env("HOME", home.path(""));
        command
    };
    let mut holder = Beside::start(&mut run(HOLD));
    assert_eq!(holder.line(), "begun");
    let mut other = Beside::start(&mut run(HOLD));
    assert!(other.note().contains("waiting for \"nightly-report\""));
    holder.go_on();
    assert_eq!(other.line(), "begun");
    let mut list = with(support::tool(), ["list"]);
    let (_, stdout, _) = finish(list.env("XDG_STATE_HOME", home.path("")).env("HOME", home.path("")));
    assert!(stdout.contains("nightly-report"), "{stdout}");
    // A missing home is not created, because the superuser might run the tool for users without a home.
    let missing = home.path("missing");
    let (code, _, stderr) = finish(run("exit 0").env_remove("XDG_STATE_HOME").env("HOME", &missing));
    assert!(code == 64 && stderr.contains("set HOME") && !missing.exists(), "{code} {stderr}");
}

#[test]
fn a_url_argument_goes_before_the_environment() {
    let (store, other) = (Store::new(), Store::new());
    let mut holder = Beside::start(&mut store.run("k", HOLD));
    assert_eq!(holder.line(), "begun");
    let elsewhere = ["--url", &other.url(), "run", "k", "--no-wait", "--", "echo", "ran"];
    assert_eq!(finish(&mut with(store.tool(""), elsewhere)).1, "ran\n");
    let here = ["--url", &store.url(), "run", "k", "--no-wait", "--", "echo", "ran"];
    assert_eq!(finish(&mut with(other.tool(""), here)).0, 75);
}

/// Several runs often share one stderr, for example in the log of a unit.
#[test]
fn each_line_on_stderr_is_written_by_one_call() {
    let store = Store::new();
    for (arguments, lines) in [("k -v -- true", 6), ("k -- /no/such/program", 1)] {
        // Delivers each call's bytes as one message.
        let (read, write) = UnixDatagram::pair().unwrap();
        let end = write.try_clone().unwrap();
        let mut tool = with(store.tool("run"), arguments.split(' '));
        let mut tool = tool.stderr(OwnedFd::from(write)).spawn().unwrap();
        // Reads beside the tool, because the socket holds only a few messages.
        std::thread::spawn(move || tool.wait().and_then(|_| end.send(b"")));
        let mut written = Vec::new();
        let mut message = [0; 4096];
        while let Ok(length @ 1..) = read.recv(&mut message) {
            written.push(String::from_utf8(message[..length].to_vec()).unwrap());
        }
        assert!(written.len() >= lines, "{written:?}");
        for line in written {
            assert!(line.starts_with("leasehold: ") && line.find('\n') == Some(line.len() - 1), "{line:?}");
        }
    }
}
