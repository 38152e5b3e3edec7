//! The choice of the store, and the variables that pass it to the command.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "support/command.rs"]
mod support;

use std::process::Command;

use support::{Store, finish, tool, with};

const TELL: &str = "echo url=${LEASEHOLD_URL-none} file=${LEASEHOLD_URL_FILE-none}";

fn tell(options: &[&str]) -> Command {
    with(with(tool(), options), ["run", "k", "--", "sh", "-c", TELL])
}

#[test]
fn a_file_may_hold_the_url() {
    let store = Store::new();
    let file = store.path("url");
    for text in [
        format!("{}\n", store.url()),
        format!("{}\r\nmore\n", store.url()),
        format!("\u{feff}{}", store.url()),
    ] {
        std::fs::write(&file, text).unwrap();
        let (code, stdout, stderr) = finish(tell(&[]).env("LEASEHOLD_URL_FILE", &file));
        assert_eq!((code, stdout), (0, format!("url=none file={}\n", file.display())), "{stderr}");
        assert_eq!(finish(tool().arg("list").env("LEASEHOLD_URL_FILE", &file)).0, 0);
        assert!(store.locks().exists(), "the locks are where it says");
    }
}

#[test]
fn what_the_environment_says_has_to_make_sense() {
    let store = Store::new();
    let (empty, missing) = (store.path("empty"), store.path("missing"));
    std::fs::write(&empty, "\npostgres://app:hunter2@db/x\n").unwrap();
    let (empty, missing) = (empty.display().to_string(), missing.display().to_string());
    let url = store.url();
    for (variables, hint) in [
        (vec![("LEASEHOLD_URL", "")], "is empty"),
        (vec![("LEASEHOLD_URL", " ")], "is empty"),
        (vec![("LEASEHOLD_URL_FILE", empty.as_str())], "is empty"),
        (vec![("LEASEHOLD_URL_FILE", missing.as_str())], missing.as_str()),
        (vec![("LEASEHOLD_URL_FILE", "")], "cannot read \"\", which LEASEHOLD_URL_FILE names"),
        (vec![("LEASEHOLD_URL", url.as_str()), ("LEASEHOLD_URL_FILE", &missing)], "both set"),
    ] {
        let (code, stdout, stderr) = finish(tell(&[]).envs(variables.clone()));
        assert_eq!((code, stdout.as_str()), (64, ""), "{variables:?}: {stderr}");
        assert!(stderr.contains(hint) && !stderr.contains("hunter2"), "{variables:?}: {stderr}");
        // The option has priority over all variables.
        assert_eq!(finish(tell(&["--url", &url]).envs(variables)).0, 0);
    }
}

#[test]
fn the_command_finds_the_store_of_the_option() {
    let (store, other) = (Store::new(), Store::new());
    let (code, stdout, stderr) = finish(
        tell(&["--url", &store.url()]).env("LEASEHOLD_URL", other.url()).env("LEASEHOLD_URL_FILE", "x"),
    );
    assert_eq!((code, stdout), (0, format!("url={} file=none\n", store.url())), "{stderr}");
    let (_, stdout, _) = finish(tell(&[]).env("LEASEHOLD_URL", store.url()));
    assert_eq!(stdout, format!("url={} file=none\n", store.url()));
}

#[test]
fn a_password_is_not_put_into_the_environment_of_the_command() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let database = runtime.block_on(test_servers::fresh_database());
    let joint = if database.url().contains('?') { '&' } else { '?' };
    let url = format!("{}{joint}install=true&password=hunter2", database.url());
    let (code, stdout, stderr) = finish(tell(&["--url", &url]).env("LEASEHOLD_URL", "memory:"));
    assert_eq!((code, stdout.as_str()), (0, "url= file=none\n"), "not the other store either: {stderr}");
    // A nested run must not use the user's default file store either.
    let nested = [env!("CARGO_BIN_EXE_leasehold"), "run", "inner", "--", "true"];
    let (code, _, stderr) = finish(&mut with(with(tool(), ["--url", &url, "run", "outer", "--"]), nested));
    assert!(code == 64 && stderr.contains("is empty"), "{code}: {stderr}");
    assert!(stderr.contains("name the same store") && !stderr.contains("unset"), "{stderr}");
}

#[test]
fn a_unit_has_directories_of_its_own() {
    let unit = Store::new();
    let (state, runtime) = (unit.path("state"), unit.path("run"));
    let run = |variables: &[(&str, &std::path::Path)]| {
        let mut command = with(tool(), ["run", "k", "--", "true"]);
        command.env("HOME", "/").env_remove("XDG_STATE_HOME").envs(variables.iter().copied());
        assert_eq!(finish(&mut command).0, 0);
    };
    run(&[("STATE_DIRECTORY", &state), ("RUNTIME_DIRECTORY", &runtime)]);
    assert!(state.join("leasehold").is_dir() && !runtime.exists(), "the one that lasts");
    run(&[("RUNTIME_DIRECTORY", &runtime)]);
    assert!(runtime.join("leasehold").is_dir());
}

#[test]
fn a_url_without_a_user_means_the_user_of_the_system() {
    let id = Command::new("id").arg("-un").output().unwrap().stdout;
    let user = String::from_utf8(id).unwrap().trim().to_owned();
    for (url, pguser, expected) in [
        ("postgres://127.0.0.1:1", None, user.as_str()),
        ("postgres://127.0.0.1:1", Some("of-libpq"), "of-libpq"),
        ("postgres://of-url@127.0.0.1:1", Some("of-libpq"), "of-url"),
    ] {
        let mut command = with(tool(), ["--url", url, "list"]);
        command.env_remove("PGUSER").env_remove("PGDATABASE").env("USER", "liar").env("LOGNAME", "liar");
        if let Some(user) = pguser {
            command.env("PGUSER", user);
        }
        let (code, _, stderr) = finish(&mut command);
        // Without a database in the URL, its name is the user's name.
        let named = format!("postgres {expected} at 127.0.0.1:1");
        assert!(code == 69 && stderr.contains(&named), "{named} in {stderr}");
    }
}

#[test]
fn a_password_that_was_not_encoded_is_said_to_need_it() {
    for url in ["postgres://app:hun/ter2@db/app", "postgres+row://app:hun#ter2@db/app"] {
        let (code, _, stderr) = finish(&mut with(tool(), ["--url", url, "list"]));
        assert_eq!(code, 64, "{stderr}");
        assert!(stderr.contains("percent-encode the password") && !stderr.contains("ter2"), "{stderr}");
    }
}
