//! What runs or waits under a lock. The comments are the help text.
#![allow(clippy::doc_markdown)]

use std::ffi::OsString;
use std::time::Duration;

use super::{AcquireArgs, duration};

const RUN_HELP: &str = "\
Example:
  leasehold run deploy --wait 5m -- ./deploy.sh production
  leasehold run ledger:41 ledger:42 -- ./transfer.sh

Exit codes: of the command; 64 bad arguments, 69 store unavailable, 75 not granted in time, 76 lost.
All of them, and the environment, are in `leasehold --help` and `leasehold man`.";

const HOLD_HELP: &str = "\
Example:
  coproc LOCK { leasehold lock deploy; }; read -r token holder key <&\"${LOCK[0]}\"

Exit codes: 0 held until the end, 64 bad arguments, 69 store unavailable, 75 not granted in time or not due, 76 lost.";

/// Wait for the lock, run a command while holding it, pass on its exit code.
///
/// It waits for ever unless told otherwise, also for a store that cannot be reached. The command finds LEASEHOLD_KEY,
/// LEASEHOLD_TOKEN (the fencing token, if the store has them) and LEASEHOLD_HOLDER in its environment (of several keys
/// LEASEHOLD_KEYS and LEASEHOLD_TOKENS), and LEASEHOLD_URL if --url has no password. Signals (SIGTERM, SIGHUP, ..) are
/// passed on to it unless they have reached it already, and the lock is released after it has ended. If the lock is lost, or held for longer than --max-hold, the command and all processes that it has started
/// get SIGTERM, and SIGKILL after the grace period (--on-loss). If this tool is killed, on Linux the command is killed
/// with it, but not what the command has started: a file store frees the lock only after all of these are gone, a server
/// before that. Have a unit of systemd end them all.
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

    /// What to do with the command when the lock is lost or --max-hold has passed: end it and all processes that it
    /// has started, or only say so. Either way the exit code is 76.
    #[arg(long, value_name = "ACTION", default_value = "kill")]
    pub(crate) on_loss: OnLoss,

    /// The time between SIGTERM and SIGKILL when the lock is lost or --max-hold has passed, and for what the command
    /// leaves behind when a signal has ended it.
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "10s")]
    pub(crate) grace: Duration,
}

impl RunArgs {
    /// The command, which is not empty.
    pub(crate) fn command(&self) -> Vec<OsString> {
        match &self.shell {
            Some(script) => vec!["sh".into(), "-c".into(), script.clone()],
            None => self.command.clone(),
        }
    }
}

/// What becomes of the command when its lock is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum OnLoss {
    /// End it and all processes that it has started.
    Kill,
    /// Say so, and let it go on.
    Warn,
}

/// Wait for the lock, say that it is held, and hold it until standard input is closed.
///
/// For several commands of one script. Prints one line for each key when all are held: the fencing token (or -), the holder's
/// id and the key. SIGINT, SIGTERM, SIGHUP and SIGQUIT release it as well. It ends with 0 if the lock was held until then, and
/// at once with 76 when it is lost: then stop. Keep its standard input open, for example with a pipe: of a cron job, and of
/// a command with `&` in a script, it is /dev/null or empty. The first is refused, with the second the lock is released at
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
