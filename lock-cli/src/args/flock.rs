//! Options of flock(1) and `consul lock`, with advice for the ones this command lacks.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgAction, Command, CommandFactory as _, FromArgMatches as _};

use super::Args;

/// Returns the command line for parsing. It accepts redundant options, which help, manual and completions omit.
fn command() -> Command {
    let exclusive = Arg::new("exclusive").short('x').short_alias('e').long("exclusive");
    let exclusive = exclusive.action(ArgAction::Count).hide(true).conflicts_with_all(["shared", "slots"]);
    let mut command = Args::command();
    for name in ["run", "lock"] {
        command = command.mut_subcommand(name, |command| command.arg(exclusive.clone()));
    }
    command
}

/// Parses the arguments, the first of which is the program's name.
pub(crate) fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Args, clap::Error> {
    let mut command = command();
    let matches = command.try_get_matches_from_mut(arguments)?;
    if has_keys_behind_string(&matches) {
        return Err(command.error(ErrorKind::ArgumentConflict, "there are arguments behind the string of -c"));
    }
    Args::from_arg_matches(&matches).map_err(|error| error.format(&mut command))
}

/// Returns whether arguments intended for the string of -c were parsed as keys.
fn has_keys_behind_string(matches: &clap::ArgMatches) -> bool {
    let of = |run: &clap::ArgMatches, name| run.indices_of(name).into_iter().flatten().collect::<Vec<_>>();
    matches.subcommand_matches("run").is_some_and(|run| {
        let (keys, string) = (of(run, "arguments"), of(run, "shell"));
        keys.len() > 1 && string.iter().any(|string| keys.iter().any(|key| key > string))
    })
}

/// Returns advice for an option of flock(1) that `run` and `lock` lack.
pub(crate) fn instead_of(error: &clap::Error, given: &[OsString]) -> Option<&'static str> {
    let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg) else { return None };
    if error.kind() != ErrorKind::UnknownArgument || !given.iter().any(|word| word == "run" || word == "lock")
    {
        return None;
    }
    match option.as_str() {
        "-u" | "--unlock" => Some(
            "there is nothing to unlock by hand (-u, --unlock): the lock is released when the command of `run` ends, or the input of `lock` is closed",
        ),
        "-o" | "--close" => Some(
            "the lock is released when the command ends, even if it leaves processes behind (-o, --close): leave it out",
        ),
        "-F" | "--no-fork" => Some(
            "`run` has to outlive its command to release the lock (-F, --no-fork): leave it out; signals and the exit code are passed on",
        ),
        "-N" | "-X" => Some(
            "to wait, and to exit with another code than 0 on a conflict, is the default: leave out -N and -X of setlock(8); for its -x write -E 0",
        ),
        _ => of_consul(given),
    }
}

/// Returns advice for an option of `consul lock`, spelled with one dash or two.
fn of_consul(given: &[OsString]) -> Option<&'static str> {
    let names =
        given.iter().take_while(|word| *word != "--").filter_map(|word| word.to_str()?.strip_prefix('-'));
    let mut names = names.map(|word| word.trim_start_matches('-').split('=').next().unwrap_or_default());
    names.find_map(|name| match name {
        "try" | "timeout" => Some("the time to wait is --wait DURATION, such as --wait 30s, or -w SECONDS"),
        "name" => Some("the text in lists of the locks is --label TEXT"),
        "pass-stdin" | "child-exit-code" | "monitor-retry" => Some(
            "the command always gets the standard input, its exit code is always passed on, and a store that does not answer is always tried again: leave the option out",
        ),
        _ => None,
    })
}

/// Returns advice for a command of `run` without a `--` before it, or after -c.
pub(crate) fn tip(error: &clap::Error, given: &[OsString]) -> Option<&'static str> {
    let mut options = given.iter().skip_while(|word| *word != "run").skip(1).take_while(|word| *word != "--");
    if !given.iter().any(|word| word == "run") {
        return None;
    }
    let has_shell = options.any(is_shell);
    let has_dashes = given.iter().any(|word| word == "--");
    match error.kind() {
        ErrorKind::UnknownArgument | ErrorKind::ArgumentConflict if has_shell => Some(
            "-c takes one string and nothing behind it; with arguments: leasehold run KEY -- sh -c STRING sh ARGUMENT..",
        ),
        ErrorKind::UnknownArgument | ErrorKind::MissingRequiredArgument if !has_dashes && !has_shell => {
            Some("put -- before the command: leasehold run KEY -- COMMAND")
        }
        _ => None,
    }
}

/// Returns whether this is -c, alone, after other letters, or with its string.
fn is_shell(word: &OsString) -> bool {
    let letters = word.as_encoded_bytes().strip_prefix(b"-").unwrap_or_default();
    letters.iter().find(|letter| !b"nsxeqv".contains(letter)) == Some(&b'c')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
    }
}
