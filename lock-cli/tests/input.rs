//! Bad input and unusable stores: a clear message, the right code, no password.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "support/command.rs"]
mod support;

use std::process::Stdio;

use support::{Store, finish, tool, with};

#[test]
fn bad_arguments() {
    let store = Store::new();
    let long = "k".repeat(513);
    for (arguments, hint) in [
        (vec!["run", "", "--", "true"], "at least one character"),
        (vec!["run", &long, "--", "true"], "at most 512 bytes"),
        (vec!["run", "k"], "COMMAND"),
        (vec!["run", "k", "true"], "--"),
        (vec!["run", "k", "--wait", "30", "--", "true"], "30s"),
        (vec!["run", "k", "--wait", "5M", "--", "true"], "5m"),
        (vec!["run", "k", "--wait", "1s", "--no-wait", "--", "true"], "cannot be used with"),
        (vec!["run", "k", "--once-per", "1s", "--cooldown", "1s", "--", "true"], "cannot be used with"),
        (vec!["run", "k", "--once-per", "1s", "--min-hold", "1s", "--", "true"], "cannot be used with"),
        (vec!["run", "k", "--once-per", "0s", "--", "true"], "zero"),
        (vec!["run", "k", "--cooldown", "0s", "--", "true"], "zero"),
        (vec!["run", "k", "--max-hold", "0s", "--", "true"], "zero"),
        (vec!["run", "k", "--max-hold", "10", "--", "true"], "30s"),
        (vec!["run", "k", "--ttl", "0s", "--", "true"], "zero"),
        (vec!["run", "k", "--ttl", "30s", "--", "true"], "unsupported"),
        (vec!["run", "k", "--label", &long, "--", "true"], "256 bytes"),
        (vec!["run", "k", "--conflict-exit-code", "256", "--", "true"], "256"),
        (vec!["inspect", ""], "at least one character"),
        (vec!["frobnicate"], "frobnicate"),
        (vec![], "Usage"),
        (vec![], "inspect"),
        (vec!["schema"], "apply"),
        (vec!["run", "k", "http://svc/x"], "--"),
        (vec!["run", "--", "true"], "KEY"),
        (vec!["run", "a", "--key", "b", "--", "true"], "cannot be used with"),
        (vec!["completions", "tcsh"], "zsh"),
        (vec!["man", "frobnicate"], "--help"),
    ] {
        let (code, stdout, stderr) = finish(&mut with(store.tool(""), &arguments));
        assert_eq!((code, stdout.as_str()), (64, ""), "{arguments:?}: {stderr}");
        assert!(stderr.contains(hint), "{arguments:?}: {stderr}");
    }
}

#[test]
fn a_url_in_the_wrong_place_is_not_repeated() {
    for arguments in [
        "check postgres://app:s3cret@db/x",
        "list a b://app:s3cret@db",
        "run k postgres://app:s3cret@db -- x",
    ] {
        let (code, stdout, stderr) = finish(&mut Store::new().tool(arguments));
        assert_eq!((code, stdout.as_str()), (64, ""), "{stderr}");
        assert!(stderr.contains("--url") && !stderr.contains("s3cret"), "{stderr}");
        assert!(stderr.contains("<a URL>") && stderr.contains("--help"), "what the parser said: {stderr}");
    }
}

#[test]
fn what_is_very_long_is_not_repeated() {
    let key = "k".repeat(100_000);
    for arguments in [vec!["inspect", &key], vec!["run", "--wait", &key]] {
        let (code, stdout, stderr) = finish(&mut with(Store::new().tool(""), &arguments));
        assert_eq!((code, stdout.as_str()), (64, ""), "{stderr}");
        assert!(stderr.len() < 1000 && stderr.contains("kkk.. (100000 bytes)"), "{stderr}");
    }
}

#[test]
fn the_url_of_a_store_is_no_key_and_other_urls_are() {
    let store = Store::new();
    for url in [
        "postgres://app:s3cret@db/x",
        "postgres+ttl://db/x?password=s3cret",
        "postgres://app:s3/cret@db/x",
        "etcd://app:s3cret@a:2379,b:2379/locks",
    ] {
        for command in ["run --key", "lock", "inspect", "release"] {
            let mut refused = with(store.tool(command), [url]);
            if command.starts_with("run") {
                refused.args(["--", "true"]);
            }
            let (code, stdout, stderr) = finish(&mut refused);
            assert_eq!((code, stdout.as_str()), (64, ""), "{stderr}");
            assert!(stderr.contains("--url") && !stderr.contains("cret"), "{stderr}");
        }
    }
    for key in ["https://example.com/feed", "queue://eu:west", "a:b@c"] {
        assert_eq!(finish(&mut store.run(key, "echo $LEASEHOLD_KEY")).1, format!("{key}\n"));
    }
}

#[test]
fn keys_may_be_negative_numbers() {
    let store = Store::new();
    assert_eq!(finish(&mut store.run("-5", "echo $LEASEHOLD_KEY")).1, "-5\n");
    assert_eq!(finish(&mut store.tool("inspect -5")).0, 1);
}

#[test]
fn keys_may_begin_with_a_dash() {
    let store = Store::new();
    for key in ["-h", "--help", "-dash"] {
        let mut run = with(store.tool("run"), ["--key", key, "--", "sh", "-c", "echo $LEASEHOLD_KEY"]);
        assert_eq!(finish(&mut run).1, format!("{key}\n"));
        assert_eq!(finish(&mut with(store.tool("inspect"), ["--key", key])).0, 1);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn output_that_cannot_be_written_is_a_failure() {
    for arguments in [&["schema", "print"][..], &["--help"], &["run", "--help"], &["--version"], &["man"]] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let printed = tool().args(arguments).stdout(full).stderr(Stdio::piped()).output().unwrap();
        let said = String::from_utf8_lossy(&printed.stderr);
        assert_eq!(printed.status.code(), Some(74), "{arguments:?}: {said}");
        assert!(said.contains("not complete"), "{arguments:?}: {said}");
    }
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let free = Store::new().tool("inspect k").stdout(full).stderr(Stdio::piped()).output().unwrap();
    assert_eq!(free.status.code(), Some(74), "that it is free was not told");
}

/// The output is `/dev/null`, opened for reading too, as by `subprocess.DEVNULL` of Python.
#[test]
fn output_that_is_not_wanted_is_no_failure() {
    let store = Store::new();
    for (command, wanted) in [("inspect k", 1), ("list", 0), ("schema print --schema s", 0)] {
        let nowhere = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null").unwrap();
        assert_eq!(store.tool(command).stdout(nowhere).status().unwrap().code(), Some(wanted), "{command}");
    }
}

#[test]
fn a_store_without_a_schema_prints_none() {
    let (code, stdout, stderr) = finish(&mut Store::new().tool("schema print"));
    assert_eq!((code, stdout.as_str()), (64, ""), "{stderr}");
    assert!(stderr.contains("has no schema"), "{stderr}");
    for arguments in ["schema print", "schema apply"] {
        let mut schema = with(tool(), ["--url", "etcd://a:2379,b:2379/locks"]);
        let (code, stdout, stderr) = finish(schema.args(arguments.split(' ')));
        assert_eq!((code, stdout.as_str()), (64, ""), "{arguments}: {stderr}");
        assert!(stderr.contains("Postgres database"), "{arguments}: {stderr}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn too_few_descriptors_are_said_and_no_panic() {
    let store = Store::new();
    // The limit of the shell. Three files are already open.
    for open in 4..=10 {
        let script = format!("ulimit -n {open}; exec \"$0\" list --url \"$1\"");
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", &script, env!("CARGO_BIN_EXE_leasehold"), &store.url()]);
        let ended = finish(&mut shell);
        assert_eq!(ended.0, 69, "{open}: {ended:?}");
        assert!(ended.2.contains("ulimit -n"), "{open}: {ended:?}");
    }
}

#[test]
fn a_huge_wait_is_for_ever_and_no_panic() {
    let store = Store::new();
    assert_eq!(finish(&mut store.run("k --wait 1000000d", "echo ran")).1, "ran\n");
}

#[test]
fn bad_urls() {
    for (url, hint) in [
        ("", "file:///DIRECTORY"),
        ("/var/lib/locks", "file:///DIRECTORY"),
        ("file:locks", "file:///var/lib/locks"),
        ("file://host/locks", "file:///var/lib/locks"),
        ("redis://host", "no store has the scheme"),
        ("memory:x?tls=no", "no parameter \"tls\""),
        ("postgres://127.0.0.1:1/x?user=app;password=s3cret", "separate parameters by &"),
        ("etcd://app:s3cret@a:2379,b:2379/locks?tls=s3cret&poll=1s", "no parameter"),
    ] {
        for arguments in [&["run", "k", "--", "true"][..], &["list"], &["inspect", "k"], &["check"]] {
            let (code, _, stderr) = finish(tool().env("LEASEHOLD_URL", url).args(arguments));
            assert_eq!(code, 64, "{url} {arguments:?}: {stderr}");
            assert!(stderr.contains(hint), "{url} {arguments:?}: {stderr}");
            assert!(!stderr.contains("s3cret"), "{url} {arguments:?}: {stderr}");
        }
    }
}

#[test]
fn a_limit_on_files_is_an_error_and_no_end_by_a_signal() {
    let store = Store::new();
    store.take("k");
    let script = "ulimit -f 0; exec \"$0\" run k --no-wait --url \"$1\" -- echo ran";
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", script, env!("CARGO_BIN_EXE_leasehold"), &store.url()]);
    let (code, stdout, stderr) = finish(&mut shell);
    assert!(code == 69 && stdout.is_empty() && stderr.contains("cannot write"), "{code} {stdout}{stderr}");
}

#[test]
fn a_password_is_never_printed() {
    for url in [
        "postgres://app:hunter2@db/app",
        "file://app:hunter2@host/locks",
        "memory:x?password=hunter2",
        "etcd://app:hunter2@a:2379,b:2379/locks?poll=1s",
    ] {
        for arguments in [
            &["run", "k", "--wait", "300ms", "--", "true"][..],
            &["list"],
            &["check"],
            &["check", "--json"],
            &["--help"],
            &["run", "--help"],
            &["frobnicate"],
            &["man"],
            &["completions", "bash"],
        ] {
            let (_, stdout, stderr) = finish(tool().env("LEASEHOLD_URL", url).args(arguments));
            assert!(!(stdout + &stderr).contains("hunter2"), "{url} {arguments:?}");
            let (_, stdout, stderr) = finish(tool().args(["--url", url]).args(arguments));
            assert!(!(stdout + &stderr).contains("hunter2"), "--url {url} {arguments:?}");
        }
    }
}

#[test]
fn stores_that_cannot_be_used() {
    let store = Store::new();
    let file = store.path("file");
    std::fs::write(&file, "a file").unwrap();
    let damaged = store.path("damaged");
    std::fs::create_dir(&damaged).unwrap();
    std::fs::write(damaged.join("leasehold-format"), "something else").unwrap();
    let mut cases = vec![(file, 64), (store.path("file/below"), 64), (damaged, 69)];
    if cfg!(target_os = "linux") {
        // Even root cannot write to this path.
        cases.push(("/proc/leasehold".into(), 64));
    }
    for (path, expected) in cases {
        let url = format!("file://{}", path.display());
        let (code, stdout, stderr) = finish(tool().args(["--url", &url, "run", "k", "--", "echo", "ran"]));
        assert_eq!((code, stdout.as_str()), (expected, ""), "{stderr}");
        assert!(stderr.contains("leasehold: error: "), "{stderr}");
        assert!(stderr.contains(&path.display().to_string()), "{stderr}");
    }
}

#[test]
fn a_read_only_directory() {
    use std::os::unix::fs::PermissionsExt as _;
    let store = Store::new();
    assert_eq!(finish(&mut store.run("k", "exit 0")).0, 0);
    std::fs::set_permissions(store.locks(), std::fs::Permissions::from_mode(0o500)).unwrap();
    let (code, stdout, stderr) = finish(&mut store.run("k", "echo ran"));
    if rustix::process::geteuid().is_root() {
        assert_eq!((code, stdout.as_str()), (0, "ran\n"), "permissions do not bind root: {stderr}");
    } else {
        assert_eq!((code, stdout.as_str()), (69, ""), "{stderr}");
        assert!(stderr.contains("permission denied"), "{stderr}");
    }
}

#[test]
fn help_and_version_are_results() {
    for arguments in [&["--help"][..], &["help"], &["run", "--help"], &["--version"]] {
        let (code, stdout, stderr) = finish(tool().args(arguments));
        assert_eq!((code, stderr.as_str()), (0, ""), "{arguments:?}");
        assert!(stdout.contains("leasehold"), "{stdout}");
    }
    let (_, stdout, _) = finish(tool().arg("--help"));
    for code in ["64", "69", "75", "76", "126", "127", "128+N"] {
        assert!(stdout.contains(code), "{code} in {stdout}");
    }
}

#[test]
fn completions_and_manual() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let (code, stdout, stderr) = finish(tool().args(["completions", shell]));
        assert_eq!((code, stderr.as_str()), (0, ""), "{shell}");
        for (word, is_there) in [
            ("max-hold", true),
            ("cooldown", true),
            ("min-hold", false),
            ("__exec", false),
            ("nonblock", false),
            ("exclusive", false),
        ] {
            assert_eq!(stdout.contains(word), is_there, "{word}, {shell}: {stdout}");
        }
    }
    let (code, page, stderr) = finish(tool().arg("man"));
    assert_eq!((code, stderr.as_str()), (0, ""));
    let sections = [
        "NAME",
        "SYNOPSIS",
        "DESCRIPTION",
        "OPTIONS",
        "EXIT STATUS",
        "ENVIRONMENT",
        "FILES",
        "EXAMPLES",
        "SEE ALSO",
    ];
    let at: Vec<_> = sections
        .iter()
        .map(|section| {
            page.lines().position(|line| {
                line.strip_prefix(".SH ").is_some_and(|title| title.trim_matches('"') == *section)
            })
        })
        .collect();
    assert!(page.contains(".TH") && at.iter().all(Option::is_some) && at.is_sorted(), "{at:?} {page}");
    let (code, page, _) = finish(tool().args(["man", "run"]));
    assert_eq!(code, 0);
    assert!(
        page.contains("\nleasehold run [OPTIONS] KEY... \\-\\- COMMAND") && page.contains("\\-\\-grace"),
        "{page}"
    );
    // Only the first page lists the exit codes of all commands.
    assert!(page.contains(".SH \"EXIT STATUS\"\nSee leasehold(1).") && !page.contains("127"), "{page}");
}

#[test]
fn the_help_of_each_command_has_an_example() {
    for command in [
        "run",
        "lock",
        "list",
        "inspect",
        "release",
        "check",
        "claims",
        "schema",
        "schema print",
        "completions",
        "man",
    ] {
        for option in ["-h", "--help"] {
            let (code, stdout, _) = finish(tool().args(command.split(' ')).arg(option));
            assert!(code == 0 && stdout.contains("Example:\n  "), "{command}: {stdout}");
        }
    }
}

#[test]
fn no_colours_outside_a_terminal() {
    let store = Store::new();
    for arguments in ["run", "list", "inspect k", "check", "frobnicate", "--url x list"] {
        let (_, stdout, stderr) = finish(&mut store.tool(arguments));
        assert!(!(stdout + &stderr).contains('\x1b'), "{arguments}");
    }
}

#[test]
fn a_reader_who_leaves_is_no_panic() {
    let store = Store::new();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut child = store.tool("check").stdout(Stdio::from(writer)).stderr(Stdio::piped()).spawn().unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let mut stderr = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut stderr).unwrap();
    assert_eq!(stderr, "");
}
