//! The arguments of `run` and `lock`. The comments are the help text.
#![allow(clippy::doc_markdown)]

use std::ffi::OsString;
use std::time::Duration;

use rustix::process::Signal;

use super::{AcquireArgs, duration};

const RUN_HELP: &str = "\
Example:
  leasehold run deploy --wait 5m -- ./deploy.sh production
  leasehold run ledger:41 ledger:42 -- ./transfer.sh
  leasehold run render --slots 4 -- sh -c './render --gpu $LEASEHOLD_PERMIT'

Exit codes: of the command; 64 bad arguments, 69 store unavailable, 75 not granted in time, 76 lost.
All of them, and the environment, are in `leasehold --help` and `leasehold man`.";

const HOLD_HELP: &str = "\
Example:
  coproc LOCK { leasehold lock deploy; }; read -r token holder key <&\"${LOCK[0]}\"

Exit codes: 0 held until the end, 64 bad arguments, 69 store unavailable, 75 not granted in time or not due, 76 lost.";

/// Wait for the lock, run a command while holding it, and pass on its exit code.
///
/// The wait has no limit by default, even if the store cannot be reached. The command's environment has LEASEHOLD_KEY,
/// LEASEHOLD_TOKEN (the fencing token, if the store has them), LEASEHOLD_HOLDER, with --slots LEASEHOLD_PERMIT (the
/// number of its slot, from 0), for several keys LEASEHOLD_KEYS, LEASEHOLD_TOKENS and LEASEHOLD_PERMITS, and
/// LEASEHOLD_URL if --url has no password. Signals (SIGTERM, SIGHUP, ..) that have not reached the command are passed
/// on to it, and the lock is released after its end. If the lock is lost, or held for longer than --max-hold, the
/// command and all processes it has started get SIGTERM, and SIGKILL after the grace period (--on-loss). If this tool
/// is killed, on Linux the command is killed as well, but not the processes it has started. A file store then releases
/// the lock after the last of these has ended, but a server releases it earlier. Let a systemd unit end them all.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "leasehold run [OPTIONS] KEY... -- COMMAND [ARGUMENT]...\n       leasehold run [OPTIONS] KEY... -c STRING",
    after_help = RUN_HELP
)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) acquire: AcquireArgs,

    /// The command and its arguments, after `--`.
    #[arg(last = true, required_unless_present = "shell", value_name = "COMMAND")]
    command: Vec<OsString>,

    /// Run this through `sh -c`, instead of a command.
    #[arg(short = 'c', value_name = "STRING", conflicts_with = "command", allow_hyphen_values = true)]
    shell: Option<OsString>,

    /// The action when the lock is lost or --max-hold has passed: end the command and all processes it has started, or
    /// only report the loss. Either way the exit code is 76.
    #[arg(long, value_name = "ACTION", default_value = "kill")]
    pub(crate) on_loss: OnLoss,

    /// The time between SIGTERM and SIGKILL when the lock is lost or --max-hold has passed, and for processes left by a
    /// command that a signal has ended.
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "10s")]
    pub(crate) grace: Duration,

    /// Send this signal to the command at a request to release (`leasehold release KEY --ask`): HUP, USR1, USR2 or TERM.
    /// The command decides when it ends.
    #[arg(long, value_name = "SIGNAL", value_parser = ask_signal)]
    pub(crate) on_ask: Option<Signal>,
}

fn ask_signal(text: &str) -> Result<Signal, String> {
    super::elect::signal(text, &[Signal::HUP, Signal::USR1, Signal::USR2, Signal::TERM])
        .ok_or_else(|| "HUP, USR1, USR2 or TERM".to_owned())
}

impl RunArgs {
    /// Returns the command, which is not empty.
    pub(crate) fn command(&self) -> Vec<OsString> {
        match &self.shell {
            Some(script) => vec!["sh".into(), "-c".into(), script.clone()],
            None => self.command.clone(),
        }
    }
}

/// The action on the command when its lock is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum OnLoss {
    /// End the command and all processes it has started.
    Kill,
    /// Report the loss, and let the command continue.
    Warn,
}

/// Wait for the lock, report the grant, and hold the lock until standard input is closed.
///
/// For several commands of one script. When all keys are held, it prints one line per key: the fencing token (or -),
/// the holder's id and the key (with --json also the number of its slot). SIGINT, SIGTERM, SIGHUP and SIGQUIT also
/// release the lock. It exits with 0 if the lock was held until then, and at once with 76 if the lock is lost: then
/// stop. Keep its standard input open, for example with a pipe. In a cron job standard input is /dev/null or empty, and
/// so it is for a command with `&` in a script. /dev/null is refused, and with an empty input the lock is released at
/// once.
#[derive(Debug, clap::Args)]
#[command(
    after_help = HOLD_HELP
)]
pub(crate) struct HoldArgs {
    #[command(flatten)]
    pub(crate) acquire: AcquireArgs,

    /// Print a JSON object in one line instead.
    #[arg(long)]
    pub(crate) json: bool,
}
