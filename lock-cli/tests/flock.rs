//! Command lines of users who are used to flock(1).
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "support/command.rs"]
mod support;

use support::{Beside, Store, finish, with};

#[test]
fn a_string_goes_through_the_shell() {
    let store = Store::new();
    let (code, stdout, stderr) = finish(&mut with(store.tool("run k -c"), ["echo a | tr a b; exit 3"]));
    assert_eq!((code, stdout.as_str(), stderr.as_str()), (3, "b\n", ""));
    for arguments in [vec!["run", "k", "-c", "true", "--", "true"], vec!["run", "k", "-c"]] {
        assert_eq!(finish(&mut with(store.tool(""), &arguments)).0, 64, "{arguments:?}");
    }
}

#[test]
fn short_options_are_those_of_flock() {
    let store = Store::new();
    let mut holder = Beside::start(&mut store.run("k", "echo begun; read line"));
    holder.line();
    for (options, expected) in [
        ("-n", 75),
        ("-w 0", 75),
        ("-w 1.5", 75),
        ("-w 1500ms", 75),
        ("-n -E 1", 1),
        ("-nE0", 0),
        ("--nonblock", 75),
        ("--nb", 75),
        ("--timeout 0", 75),
        ("--timeout=1.5", 75),
        ("-nx", 75),
        ("-xn", 75),
        ("-e -n", 75),
        ("--exclusive -x --nb", 75),
        ("-xw0", 75),
    ] {
        let (code, stdout, stderr) = finish(&mut store.run(&format!("k {options}"), "echo ran"));
        assert_eq!((code, stdout.as_str()), (expected, ""), "{options}: {stderr}");
    }
    holder.go_on();
    let (code, stdout, stderr) = finish(&mut store.run("k -w 30", "echo ran"));
    assert_eq!((code, stdout.as_str()), (0, "ran\n"), "{stderr}");
}

#[test]
fn only_w_takes_a_number_without_a_unit() {
    let store = Store::new();
    for (options, hint) in [
        ("--wait 5", "30s"),
        ("--wait 0", "30s"),
        ("-w 5x", "30s"),
        ("-w 5 --wait 5s", "cannot be used with"),
        ("-w 5 -n", "cannot be used with"),
    ] {
        let (code, stdout, stderr) = finish(&mut store.run(&format!("k {options}"), "echo ran"));
        assert_eq!((code, stdout.as_str()), (64, ""), "{options}: {stderr}");
        assert!(stderr.contains(hint), "{options}: {stderr}");
    }
}

#[test]
fn what_flock_has_and_this_has_not_is_refused_with_what_to_do_instead() {
    let store = Store::new();
    for (options, instead) in [
        ("-u", "released when the command"),
        ("--unlock", "released when the command"),
        ("-o", "even if it leaves processes behind"),
        ("--close", "even if it leaves processes behind"),
        ("-F", "outlive its command"),
        ("--no-fork", "outlive its command"),
    ] {
        for mut tool in
            [store.run(&format!("k {options}"), "echo ran"), store.tool(&format!("lock {options} k"))]
        {
            let (code, stdout, stderr) = finish(&mut tool);
            assert_eq!((code, stdout.as_str(), stderr.lines().count()), (64, "", 1), "{options}: {stderr}");
            assert!(stderr.contains(instead), "{options}: {stderr}");
        }
    }
    // Options after the dashes belong to the command, and so does the string of -c. Other subcommands refuse these options.
    let (code, stdout, stderr) =
        finish(&mut with(store.tool("run k -- echo"), ["-s", "-x", "-u", "--timeout"]));
    assert_eq!((code, stdout.as_str()), (0, "-s -x -u --timeout\n"), "{stderr}");
    let (code, _, stderr) = finish(&mut store.tool("list -s"));
    assert!(code == 64 && stderr.contains("unexpected argument '-s'"), "{stderr}");
    assert_eq!(finish(&mut store.tool("list -x")).0, 64);
}

#[test]
fn who_comes_from_setlock_or_consul_is_told_what_to_write() {
    let store = Store::new();
    for (options, instead) in [
        ("-N", "-E 0"),
        ("-X", "-E 0"),
        ("-try=30s", "--wait DURATION"),
        ("--try 30s", "--wait DURATION"),
        ("-timeout=15s", "--wait DURATION"),
        ("--child-exit-code", "always passed on"),
        ("-pass-stdin=true", "always gets the standard input"),
        ("-name=deploy", "--label TEXT"),
    ] {
        let (code, stdout, stderr) = finish(&mut store.run(&format!("k {options}"), "echo ran"));
        assert_eq!((code, stdout.as_str(), stderr.lines().count()), (64, "", 1), "{options}: {stderr}");
        assert!(stderr.contains(instead), "{options}: {stderr}");
    }
}

#[test]
fn a_string_with_arguments_is_told_how_to_have_them() {
    for arguments in [
        &["run", "a", "-c", r#"echo "$1""#, "x", "y"][..],
        &["run", "-nc", r#"echo "$1""#, "a", "--", "x", "y"],
        &["run", "a", "-c", r#"echo "$1""#, "x"],
        &["run", "-c", r#"echo "$1""#, "a", "x"],
    ] {
        let (code, _, stderr) = finish(&mut with(Store::new().tool(""), arguments));
        assert!(code == 64 && stderr.contains("-- sh -c STRING sh ARGUMENT"), "{arguments:?}: {stderr}");
        assert!(!stderr.contains("put -- before"), "{stderr}");
    }
    let (code, stdout, stderr) =
        finish(&mut with(Store::new().tool("run a -- sh -c"), [r#"echo "$1""#, "sh", "x"]));
    assert_eq!((code, stdout.as_str()), (0, "x\n"), "{stderr}");
}

#[test]
fn who_leaves_out_the_dashes_is_told() {
    let tip = "put -- before the command";
    for arguments in ["run k true", "run -n k true", "--quiet run k ./deploy.sh now", "run k http://svc/x"] {
        let (code, _, stderr) = finish(&mut Store::new().tool(arguments));
        assert!(code == 64 && stderr.contains(tip), "{arguments}: {stderr}");
    }
    for arguments in ["run k --frobnicate -- true", "list a b", "inspect"] {
        let (code, _, stderr) = finish(&mut Store::new().tool(arguments));
        assert!(code == 64 && !stderr.contains(tip), "{arguments}: {stderr}");
    }
}

#[test]
fn a_line_for_the_shell_that_is_run_as_a_program_gets_a_tip() {
    let store = Store::new();
    let (code, _, stderr) = finish(&mut with(store.tool("run k --"), ["echo a | cat"]));
    assert!(code == 127 && stderr.contains("-c STRING"), "{stderr}");
    let (code, _, stderr) = finish(&mut with(store.tool("run k --"), ["no-such-command", "a b"]));
    assert!(code == 127 && !stderr.contains("-c STRING"), "{stderr}");
}
