//! Fuzzes the arguments of the command, for panics, passwords in the output, and misread arguments.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;

use fuzzing::{Fuzz, parts};

use crate::args::{Args, Command, flock};
use crate::{chosen_store, claims, output, redacted};

const PASSWORD: &str = "Hunter2x";

const ARGUMENTS: Fuzz<'_> = Fuzz {
    target: "arguments",
    inputs: 400,
    examples: &[
        "run\u{1f}deploy\u{1f}--wait\u{1f}5m\u{1f}--label\u{1f}ann\u{1f}--\u{1f}./deploy.sh\u{1f}-x",
        "run\u{1f}--key\u{1f}-h\u{1f}-w\u{1f}0.25\u{1f}-E\u{1f}7\u{1f}-c\u{1f}echo --",
        "run\u{1f}hourly\u{1f}--once-per\u{1f}1h\u{1f}--not-due-exit-code=3\u{1f}--on-loss=warn\u{1f}--grace=5s\u{1f}--\u{1f}--\u{1f}x",
        "lock\u{1f}-5\u{1f}--ttl\u{1f}30s\u{1f}--max-hold\u{1f}1d\u{1f}--cooldown\u{1f}1s\u{1f}-n\u{1f}--json\u{1f}-q",
        "--url\u{1f}postgres://app:Hunter2x@db:5432/x?sslmode=require\u{1f}list\u{1f}ledger:\u{1f}--watch=5\u{1f}--all",
        "--url=etcd://app:Hunter2x@a:2379,b:2379,c:2379/locks?ttl=30s\u{1f}list\u{1f}--json",
        "check\u{1f}postgres+row://app:Hunter2x@db/x",
        "run\u{1f}k\u{1f}--wait\u{1f}postgres://app:Hunter2x@db/x\u{1f}--\u{1f}true",
        "inspect\u{1f}--key=postgres://db/x?password=Hunter2x",
        "release\u{1f}k\u{1f}--force\u{1f}--holder\u{1f}0123456789abcdef0123456789abcdef-1\u{1f}--json",
        "release\u{1f}k\u{1f}--force\u{1f}--session\u{1f}--yes\u{1f}--url=postgres://app:Hunter2x@db/x",
        "gc\u{1f}--unused-for\u{1f}7d\u{1f}--url\u{1f}file:///run/lock/jobs",
        "claims\u{1f}app.request\u{1f}--queue\u{1f}queue_id\u{1f}--takeable\u{1f}new\u{1f}--side-table\u{1f}s.t\u{1f}--limit\u{1f}10",
        "schema\u{1f}print\u{1f}--schema\u{1f}x\u{1f}--grant-to\u{1f}app\u{1f}--store\u{1f}ttl",
        "schema\u{1f}apply\u{1f}--grant-read-to\u{1f}app",
        "completions\u{1f}zsh",
        "man\u{1f}run",
        "run\u{1f}a\u{1f}b\u{1f}-n\u{1f}--\u{1f}true",
        "lock\u{1f}--key\u{1f}-a\u{1f}--key=b\u{1f}--json",
        "run\u{1f}--help",
        "--version",
    ],
    words: &[
        "\u{1f}--",
        "\u{1f}-",
        "\u{1f}--key\u{1f}",
        "\u{1f}--url\u{1f}",
        "\u{1f}--url=",
        "\u{1f}--wait=",
        "postgres://app:Hunter2x@db/x",
        "://",
        "\u{1f}--holder\u{1f}",
        "\u{1f}-c\u{1f}",
        "\u{1f}-n",
        "\u{1f}-vq",
        "\u{1f}run",
        "\u{1f}help",
        "\u{1f}--json",
        "\u{1f}--min-hold\u{1f}",
        "1e308",
        "inf",
        "\u{1b}[31m",
    ],
};

#[test]
fn fuzz_arguments() {
    ARGUMENTS.check(|input| {
        let given: Vec<OsString> =
            parts(input).into_iter().map(|part| OsStr::from_bytes(part).to_owned()).collect();
        let name = [OsString::from("leasehold")];
        match flock::parse(name.iter().chain(&given).cloned()) {
            Err(error) => {
                let text = redacted(&error, &given).unwrap_or_else(|| error.to_string());
                let texts: Vec<_> = given.iter().map(|argument| argument.to_string_lossy()).collect();
                let times = texts.iter().map(|text| text.matches(PASSWORD).count()).sum::<usize>();
                let is_secret = times == 1 && texts.iter().any(|text| has_password(text));
                assert!(!is_secret || !text.contains(PASSWORD), "the password is shown: {text}");
                let _ = (flock::instead_of(&error, &given), flock::tip(&error, &given));
                let _ = output::printable(&text);
            }
            Ok(args) => read(&args, &given),
        }
    });
}

/// Returns whether the argument contains the password that the fuzzer has put in.
fn has_password(argument: &str) -> bool {
    let Some((scheme, rest)) = argument.rsplit_once("postgres://") else { return false };
    let Some((before, behind)) = rest.split_once(PASSWORD) else { return false };
    let of_user = before.contains(':') && !before.contains('@') && behind.contains('@');
    let is_parameter = before.ends_with("?password=") && before.matches('?').count() == 1;
    let is_once = argument.matches(PASSWORD).count() == 1;
    let is_alone = scheme.is_empty() || scheme.starts_with("--") && scheme.ends_with('=');
    is_alone && is_once && (of_user || is_parameter && !before.contains('#'))
}

/// Checks that the parsed values occur in the arguments.
fn read(args: &Args, given: &[OsString]) {
    if let Some(url) = &args.url {
        assert!(is_given(url, given), "{url}");
        let is_open = leasehold::postgres_config(url).is_ok() && !chosen_store::has_password(url);
        assert!(!is_open || !has_password(url), "it would be handed on: {url}");
        let _ = chosen_store::with_application_name(url);
    }
    let keys = match &args.command {
        Command::Run(run) => {
            // Checks that the command is everything after the first `--` that is not an option's value.
            let command = run.command();
            assert!(!command.is_empty());
            assert!(
                given.ends_with(&command)
                    || command[0] == "sh"
                        && given.iter().any(|g| g.as_bytes().ends_with(command[2].as_bytes()))
            );
            run.acquire.keys.get()
        }
        Command::Hold(hold) => hold.acquire.keys.get(),
        Command::Inspect(inspect) => std::slice::from_ref(inspect.key.get()),
        Command::Release(release) => std::slice::from_ref(release.key.get()),
        Command::Claims(claims) => {
            let _ = claims::survey(claims);
            &[]
        }
        _ => &[],
    };
    for key in keys {
        assert!(is_given(key.as_str(), given), "{key:?}");
        assert!(!has_password(key.as_str()), "it would be listed: {key:?}");
    }
}

/// Returns whether an argument is this text, or an option with this value.
fn is_given(text: &str, given: &[OsString]) -> bool {
    given.iter().any(|argument| {
        let value = argument.as_bytes().strip_suffix(text.as_bytes());
        value.is_some_and(|option| option.is_empty() || option.ends_with(b"=") || option.starts_with(b"-"))
    })
}
