//! The arguments of `elect` and `observe`. The comments are the help text.
#![allow(clippy::doc_markdown)]

use std::ffi::OsString;
use std::time::Duration;

use rustix::process::Signal;

use super::{Key, duration};

const ELECT_HELP: &str = "\
Example:
  leasehold elect scheduler --value 10.0.0.7:8080 --step-down USR1 --step-down-if-asked -- ./scheduler

Exit codes: of the last command; 64 bad arguments, 69 store unavailable, 76 lost at the end.
All of them, and the environment, are in `leasehold --help` and `leasehold man`.";

const OBSERVE_HELP: &str = "\
Example:
  leasehold observe scheduler --json";

/// Campaign to lead, and run a command whenever this replica leads.
///
/// Start it on every replica, with a store that all of them reach. One of them leads and runs its command, whose
/// environment is as of `run` (LEASEHOLD_TOKEN is the term). If the leadership is lost, the command and all processes
/// it has started are killed at once (SIGKILL), because a lease ends soon afterwards (after a tenth of its TTL) and
/// another replica starts its own. Then this replica campaigns again, as it does after each failure of the store.
///
/// The step-down signal ends the command by SIGTERM, and by SIGKILL after the grace period, and this replica rests.
/// SIGTERM, SIGINT and SIGQUIT are passed on to the command, and after its end this tool ends. Other signals are passed
/// on.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "leasehold elect [OPTIONS] KEY -- COMMAND [ARGUMENT]...\n       leasehold elect [OPTIONS] KEY -c STRING",
    after_help = ELECT_HELP
)]
pub(crate) struct ElectArgs {
    #[command(flatten)]
    pub(crate) key: Key,

    /// The command and its arguments, after `--`.
    #[arg(last = true, required_unless_present = "shell", value_name = "COMMAND")]
    command: Vec<OsString>,

    /// Run this through `sh -c`, instead of a command.
    #[arg(short = 'c', value_name = "STRING", conflicts_with = "command", allow_hyphen_values = true)]
    shell: Option<OsString>,

    /// Show this text to observers while this replica leads, such as its address, up to 256 bytes [default: user, host,
    /// program and process].
    #[arg(long, value_name = "TEXT")]
    pub(crate) value: Option<String>,

    /// Take a lease of this length, renewed while this replica leads [default: the store's].
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) ttl: Option<Duration>,

    /// Campaign again after the end of the command: after each, after a failure (another exit code than 0), or never.
    /// Otherwise exit with the command's code. A command that ends within a second is followed by a pause that doubles,
    /// up to a minute.
    #[arg(long, value_name = "WHEN", default_value = "on-failure")]
    pub(crate) restart: Restart,

    /// Step down on this signal: HUP, USR1 or USR2.
    #[arg(long, value_name = "SIGNAL", value_parser = step_down)]
    pub(crate) step_down: Option<Signal>,

    /// Step down also at a request to release (`leasehold release KEY --ask`).
    #[arg(long)]
    pub(crate) step_down_if_asked: bool,

    /// Do not campaign for this long after a step-down, to let another replica lead.
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "30s")]
    pub(crate) rest: Duration,

    /// The time between SIGTERM and SIGKILL after a step-down, and for processes left by a command that a signal has
    /// ended. After a loss the command has no time.
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "10s")]
    pub(crate) grace: Duration,
}

impl ElectArgs {
    /// Returns the command, which is not empty.
    pub(crate) fn command(&self) -> Vec<OsString> {
        match &self.shell {
            Some(script) => vec!["sh".into(), "-c".into(), script.clone()],
            None => self.command.clone(),
        }
    }
}

/// When to campaign again after the end of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Restart {
    /// After each end.
    Always,
    /// After an exit code other than 0, and after a signal.
    OnFailure,
    /// Never.
    Never,
}

/// Print the leader of a key, and each change of it, until interrupted.
///
/// Prints one line per change: `leader`, the term's token (or -), the holder's id and the value, or `none` if no
/// replica leads. It takes no part in the election, and needs only the right to inspect.
#[derive(Debug, clap::Args)]
#[command(after_help = OBSERVE_HELP)]
pub(crate) struct ObserveArgs {
    #[command(flatten)]
    pub(crate) key: Key,

    /// Print a JSON object in one line instead.
    #[arg(long)]
    pub(crate) json: bool,
}

fn step_down(text: &str) -> Result<Signal, String> {
    let usable = [Signal::HUP, Signal::USR1, Signal::USR2];
    signal(text, &usable).ok_or_else(|| "HUP, USR1 or USR2, because the others end the tool".to_owned())
}

/// Reads the name of one of these signals.
pub(super) fn signal(text: &str, usable: &[Signal]) -> Option<Signal> {
    let name = text.to_ascii_uppercase();
    let signal = match name.strip_prefix("SIG").unwrap_or(&name) {
        "HUP" => Signal::HUP,
        "USR1" => Signal::USR1,
        "USR2" => Signal::USR2,
        "TERM" => Signal::TERM,
        _ => return None,
    };
    usable.contains(&signal).then_some(signal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_to_step_down_is_one_that_does_not_end_the_tool() {
        for (text, signal) in [("USR1", Signal::USR1), ("sigusr2", Signal::USR2), ("hup", Signal::HUP)] {
            assert_eq!(step_down(text), Ok(signal), "{text}");
        }
        for bad in ["", "TERM", "SIGINT", "10", "SIG"] {
            assert!(step_down(bad).is_err(), "{bad}");
        }
    }
}
