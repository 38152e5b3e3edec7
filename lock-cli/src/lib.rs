#![doc = include_str!("../README.md")]

#[cfg(not(unix))]
compile_error!(
    "the command `leasehold` needs a Unix system: it passes signals on; the library runs elsewhere too"
);

mod acquire;
mod admin;
mod args;
mod check;
mod child;
mod chosen_store;
mod claims;
mod completions;
mod deadlock;
mod elect;
mod exit;
mod file_store;
#[cfg(test)]
mod fuzz;
mod gc;
mod grant;
mod hold;
mod identity;
mod manual;
mod numbered_keys;
mod observe;
mod output;
mod run;
mod schema;
mod signal_helpers;
mod signals;
mod supervise;
mod survey;
mod tree;
mod wait_budget;
mod waiting;

use std::ffi::OsString;
use std::process::ExitCode;

use leasehold::Error;

use crate::args::{Args, Command, flock};
use crate::chosen_store::ChosenStore;
use crate::output::Notes;

/// Runs the command with the arguments and the environment of this process. Returns its exit code.
///
/// To use the command with a custom store, call this function after [`leasehold::register_scheme`], on the main thread
/// and outside of any runtime.
#[must_use]
pub fn main() -> ExitCode {
    #[cfg(target_os = "linux")]
    if std::env::args_os().nth(1).is_some_and(|argument| argument == child::EXEC) {
        return child::become_command(std::env::args_os().skip(2));
    }
    let args = match flock::parse(std::env::args_os()) {
        Ok(args) => args,
        Err(error) => {
            let given: Vec<_> = std::env::args_os().skip(1).collect();
            // Exits with 0 for help and version, which count as errors in clap but were requested by the user.
            let mut code = if error.use_stderr() { exit::USAGE } else { 0 };
            if let Some(text) = flock::instead_of(&error, &given) {
                output::problem(text);
                return code.into();
            }
            match redacted(&error, &given) {
                Some(text) => output::problem(&text),
                None if error.use_stderr() => drop(error.print()),
                None if output::is_written(error.print()) => {}
                None => code = exit::OUTPUT_LOST,
            }
            if let Some(tip) = flock::tip(&error, &given) {
                output::problem(tip);
            }
            return code.into();
        }
    };
    let is_look = matches!(args.command, Command::Inspect(_));
    match run_in_runtime(args) {
        // Reports that output was lost. For `inspect`, also instead of the code for a free key, because that result was
        // not printed either.
        Ok(code) if output::is_incomplete() && (code == 0 || is_look) => exit::OUTPUT_LOST.into(),
        Ok(code) => code.into(),
        Err(error) => {
            output::error(&error);
            exit::of_error(error.kind()).into()
        }
    }
}

/// Length above which an argument is not repeated in full.
const LONGEST_REPEATED: usize = 600;

/// Returns the parser's message without URLs and with long arguments cut, because the parser repeats unexpected
/// arguments, and a URL can contain a password. `None` if the message repeats none.
fn redacted(error: &clap::Error, given: &[OsString]) -> Option<String> {
    let urls = given.iter().filter_map(|argument| {
        let argument = argument.to_string_lossy();
        let (before, _) = argument.split_once("://")?;
        let scheme = before.trim_end_matches(|c: char| c.is_ascii_alphanumeric() || "+-.".contains(c));
        Some(argument[scheme.len()..].to_owned())
    });
    // Also looks for both spellings of the URL: the parser omits escape sequences of a terminal, and other errors show
    // them escaped.
    let spelled = urls.flat_map(|url| {
        let escaped = format!("{url:?}");
        [anstream::adapter::strip_str(&url).to_string(), escaped.trim_matches('"').to_owned()]
    });
    let said = error.to_string();
    let mut urls: Vec<String> = spelled.filter(|url| said.contains(url.as_str())).collect();
    let long = given.iter().map(|argument| argument.to_string_lossy().into_owned());
    let long: Vec<String> =
        long.filter(|text| text.len() > LONGEST_REPEATED && said.contains(text.as_str())).collect();
    if urls.is_empty() && long.is_empty() {
        return None;
    }
    // Replaces the longest URL first, because one URL can be a prefix of another.
    urls.sort_by_key(|url| std::cmp::Reverse(url.len()));
    let mut text = said.trim_start_matches("error: ").to_owned();
    for url in &urls {
        text = text.replace(url.as_str(), "<a URL>");
    }
    for argument in &long {
        let begin = &argument[..argument.floor_char_boundary(40)];
        text = text.replace(argument.as_str(), &format!("{begin}.. ({} bytes)", argument.len()));
    }
    if !urls.is_empty() {
        text = format!("{}\n\nA URL is named by --url or LEASEHOLD_URL.", text.trim_end());
    }
    Some(text.trim_end().to_owned())
}

fn run_in_runtime(args: Args) -> Result<u8, Error> {
    has_descriptors().map_err(|error| output::system("too few files may be open (`ulimit -n`)", error))?;
    // Builds a runtime that stays on this thread, because the command is started from it (see `child`).
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| output::system("cannot start the runtime", error))?;
    let code = runtime.block_on(dispatch(args));
    // Does not wait for background work. Any remaining work is blocked in the store, and the lock is closed.
    runtime.shutdown_background();
    code
}

/// Returns an error if a few more files cannot be opened, because building a runtime would panic then.
fn has_descriptors() -> std::io::Result<()> {
    (0..4).map(|_| std::os::unix::net::UnixStream::pair()).collect::<Result<Vec<_>, _>>().map(drop)
}

async fn dispatch(args: Args) -> Result<u8, Error> {
    let notes = Notes { quiet: args.quiet, verbose: args.verbose };
    let wants_json = args.command.wants_json();
    let done = run_command(args, notes).await;
    if let (Err(error), true) = (&done, wants_json) {
        // Prints the error in one line, because `list --watch` is read line by line.
        output::line(&output::described(error).to_string());
    }
    done
}

async fn run_command(args: Args, notes: Notes) -> Result<u8, Error> {
    let store = || ChosenStore::find(args.url.as_deref());
    match args.command {
        Command::Run(run) => run::run(&run, &store()?, notes).await,
        Command::Hold(hold) => hold::hold(&hold, &store()?, notes).await,
        Command::Elect(elect) => elect::elect(&elect, &store()?, notes).await,
        Command::Observe(observe) => observe::observe(&observe, &store()?).await,
        Command::List(list) => admin::list(&list, &store()?).await,
        Command::Inspect(inspect) => admin::inspect(&inspect, &store()?, notes).await,
        Command::Release(release) => admin::release(&release, &store()?, notes).await,
        Command::Check(check) => check::check(&check, &store()?).await,
        Command::Gc(gc) => gc::gc(&gc, &store()?).await,
        Command::Claims(claims) => claims::claims(&claims, store()?.url(), notes).await,
        Command::Schema(schema) => schema::schema(&schema, store()?.url()).await,
        Command::Completions(completions) => {
            completions::print(completions.shell);
            Ok(0)
        }
        Command::Man(man) => manual::manual(man.subcommand.as_deref()),
    }
}
