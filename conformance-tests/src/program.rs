//! A program that judges a store.

use std::env;
use std::process::ExitCode;

use crate::child;
use crate::harness::Factory;
use crate::run::Run;

const USAGE: &str = "\
usage: [NAME or RULE ..] [--threads N] [--json FILE] [--badge FILE]

Runs the cases of the suite, or those with such a name or of such a rule (C1 to C23), and prints the verdict.
  --threads N    so many at a time (16); in real time they mostly wait
  --json FILE    one object per case, and one with the verdict
  --badge FILE   the verdict as an endpoint badge of shields.io
Exit code: 0 proven, 1 failed, 2 inconclusive, 3 unproven, 64 no verdict.";

/// The exit code without a verdict.
const NO_VERDICT: u8 = 64;

/// Runs the suite as the `main` of a program that judges a store. `--help` shows the arguments. The program
/// starts itself as the child processes and prints the [`Report`](crate::Report).
///
/// The exit code is 0 if the store is proven, 1 if a case failed, and 2 if one was inconclusive. It is 3 if
/// something is unproven, and 64 if there is no verdict.
///
/// ```no_run
/// # struct MyStoreFactory;
/// # #[leasehold_conformance::async_trait]
/// # impl leasehold_conformance::Factory for MyStoreFactory {
/// #     fn time(&self) -> leasehold_conformance::Time {
/// #         leasehold_conformance::Time::Virtual
/// #     }
/// #     async fn open(&self) -> Result<Box<dyn leasehold_conformance::Harness>, leasehold_api::Error> {
/// #         Err(leasehold_api::Error::closed())
/// #     }
/// # }
/// fn main() -> std::process::ExitCode {
///     leasehold_conformance::main(MyStoreFactory)
/// }
/// ```
#[must_use = "the exit code is the verdict"]
pub fn main(factory: impl Factory + 'static) -> ExitCode {
    if child::act_if_child(&factory) {
        return ExitCode::SUCCESS;
    }
    match judge(&factory, env::args().skip(1)) {
        Ok(code) => ExitCode::from(code),
        Err(message) => {
            eprintln!("{message}");
            ExitCode::from(NO_VERDICT)
        }
    }
}

fn judge(factory: &dyn Factory, arguments: impl Iterator<Item = String>) -> Result<u8, String> {
    let mut run = Run::new(factory).threads(16).child_test("");
    let (mut json, mut badge) = (None, None);
    let mut arguments = arguments;
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{argument} takes a value\n{USAGE}"));
        match argument.as_str() {
            "--threads" => {
                let threads = value()?;
                run = run.threads(threads.parse().map_err(|_| format!("{threads:?} is no number\n{USAGE}"))?);
            }
            "--json" => json = Some(value()?),
            "--badge" => badge = Some(value()?),
            _ if argument.starts_with('-') => return Err(USAGE.to_owned()),
            _ => run = run.only(argument),
        }
    }
    let report = run.run();
    if report.cases.is_empty() {
        return Err("no case has such a name, or is of such a rule".to_owned());
    }
    println!("{report}");
    for (file, text) in [(json, report.to_json_lines()), (badge, report.badge())] {
        if let Some(file) = file {
            std::fs::write(&file, text).map_err(|error| format!("cannot write {file}: {error}"))?;
        }
    }
    Ok(report.verdict().exit_code())
}

#[cfg(test)]
mod tests {
    use leasehold_api::Error;

    use super::*;
    use crate::harness::{Harness, Time};

    struct Nowhere;

    #[leasehold_api::async_trait]
    impl Factory for Nowhere {
        fn time(&self) -> Time {
            Time::Virtual
        }

        async fn open(&self) -> Result<Box<dyn Harness>, Error> {
            Err(Error::closed())
        }
    }

    fn judged(arguments: &[&str]) -> Result<u8, String> {
        judge(&Nowhere, arguments.iter().map(|argument| (*argument).to_owned()))
    }

    #[test]
    fn the_verdict_is_an_exit_code_and_files() {
        let [json, badge] = ["json", "badge"].map(|name| {
            let name = format!("leasehold-verdict-{}-{name}", std::process::id());
            env::temp_dir().join(name)
        });
        let [json_file, badge_file] = [&json, &badge].map(|file| file.to_string_lossy());
        assert_eq!(judged(&["--threads", "2", "C13", "--json", &json_file, "--badge", &badge_file]), Ok(1));
        let text = std::fs::read_to_string(&json).unwrap();
        assert!(text.lines().count() > 3 && text.contains(r#""verdict":"failed""#), "{text}");
        assert!(std::fs::read_to_string(&badge).unwrap().contains(r#""color":"red""#));
        [json, badge].iter().for_each(|file| std::fs::remove_file(file).unwrap());
    }

    #[test]
    fn what_is_misspelt_is_no_verdict() {
        for arguments in
            [&["--thread", "2"][..], &["--threads"], &["--threads", "many"], &["C99"], &["--help"]]
        {
            assert!(judged(arguments).is_err(), "{arguments:?}");
        }
        let nowhere = judged(&["C13", "--badge", "/dev/null/badge"]);
        assert!(nowhere.is_err_and(|message| message.starts_with("cannot write /dev/null/badge")));
    }
}
