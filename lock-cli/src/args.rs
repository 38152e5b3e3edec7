//! The command line. The comments are the help text, so they are not Markdown.
#![allow(clippy::doc_markdown)]

use std::ffi::OsString;
use std::time::Duration;

use clap::{Parser, Subcommand};
use leasehold::{HolderId, LockKey};

use crate::exit;

/// Runs a command while holding a lock, so that only one of us does it at a time.
#[derive(Debug, Parser)]
#[command(name = "leasehold", version, max_term_width = 100, after_long_help = exit::HELP)]
pub(crate) struct Args {
    /// The store: memory:, memory:NAME, file:///DIRECTORY, or postgres://, postgres+advisory-xact://,
    /// postgres+row:// or postgres+ttl://USER@HOST/DATABASE.
    ///
    /// Without it, the locks are files in the state directory of this user, and exclude each other
    /// between the processes of this machine. Prefer the environment for a URL with a password:
    /// other users can see arguments.
    #[arg(long, env = "LEASEHOLD_URL", hide_env_values = true, global = true, value_name = "URL")]
    pub(crate) url: Option<String>,

    /// Print no notes on stderr, only errors.
    #[arg(short, long, global = true)]
    pub(crate) quiet: bool,

    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(Run),
    List(List),
    Inspect(Inspect),
    Release(Release),
    Check(Check),
    Gc(Gc),
    Claims(Claims),
    Schema(Schema),
    Completions(Completions),
    Man(Man),
}

/// Wait for the lock, run a command while holding it, pass on its exit code.
///
/// It waits for ever unless told otherwise. The command finds LEASEHOLD_KEY, LEASEHOLD_TOKEN (the
/// fencing token, if the store has them) and LEASEHOLD_HOLDER in its environment. Signals (SIGTERM, SIGHUP, ..)
/// are passed on to it, and the lock is released after it has ended. If the lock is lost, or held for longer
/// than --max-hold, the command and all processes that it has started get SIGTERM, and SIGKILL after the grace
/// period (--on-loss). If this tool is killed, on Linux the command is
/// killed with it, and a file store frees the lock only after the command and all processes that it
/// left behind are gone.
#[derive(Debug, clap::Args)]
#[command(after_long_help = exit::HELP)]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) key: Key,

    /// The command and its arguments, after `--`.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,

    /// Wait at most this long for the lock, such as 250ms, 30s or 5m [default: for ever].
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) wait: Option<Duration>,

    /// Make one attempt and do not wait.
    #[arg(long, conflicts_with = "wait")]
    pub(crate) no_wait: bool,

    /// Take a lease of this length, renewed while the command runs [default: the store's].
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) ttl: Option<Duration>,

    /// Hold the lock at most this long. Past it, it counts as lost: others get in, and the command is ended.
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) max_hold: Option<Duration>,

    /// Run at most once in this window, whoever asks; else say so and exit with 0.
    #[arg(long, value_name = "DURATION", value_parser = duration, conflicts_with = "cooldown")]
    pub(crate) once_per: Option<Duration>,

    /// Let nobody else in before this time has passed since the grant, even if the command ends sooner.
    // Its former name does what it did for those who have it in their scripts.
    #[arg(long, alias = "min-hold", value_name = "DURATION", value_parser = duration)]
    pub(crate) cooldown: Option<Duration>,

    /// Show this text to those who list the locks.
    #[arg(long, value_name = "TEXT")]
    pub(crate) label: Option<String>,

    /// Exit with this code when somebody else held the lock for as long as was waited.
    #[arg(long, value_name = "N", default_value_t = exit::CONFLICT)]
    pub(crate) conflict_exit_code: u8,

    /// What to do with the command when the lock is lost or --max-hold has passed: end it and all processes that it
    /// has started, or only say so. Either way the exit code is 76.
    #[arg(long, value_name = "ACTION", default_value = "kill")]
    pub(crate) on_loss: OnLoss,

    /// The time between SIGTERM and SIGKILL when the lock is lost or --max-hold has passed, and for what the command
    /// leaves behind when a signal has ended it.
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "10s")]
    pub(crate) grace: Duration,
}

/// What becomes of the command when its lock is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum OnLoss {
    /// End it and all processes that it has started.
    Kill,
    /// Say so, and let it go on.
    Warn,
}

/// The key, as an argument or as an option.
#[derive(Debug, clap::Args)]
#[group(id = "which", required = true, multiple = false)]
pub(crate) struct Key {
    /// The key: 1 to 512 bytes of text.
    #[arg(value_name = "KEY", allow_negative_numbers = true)]
    argument: Option<LockKey>,

    /// The key, whatever it begins with: scripts that do not know are safe with it.
    #[arg(long = "key", value_name = "KEY", allow_hyphen_values = true)]
    option: Option<LockKey>,
}

impl Key {
    pub(crate) fn get(&self) -> &LockKey {
        match (&self.argument, &self.option) {
            (Some(key), _) | (None, Some(key)) => key,
            (None, None) => unreachable!("the parser wants one of them"),
        }
    }
}

/// List what is locked: who, since when, for how long.
#[derive(Debug, clap::Args)]
pub(crate) struct List {
    /// Only keys that begin with this.
    #[arg(default_value = "", hide_default_value = true)]
    pub(crate) prefix: String,

    /// Also what has ended: expired leases, and cooldowns that last (of --cooldown and --once-per).
    #[arg(long)]
    pub(crate) all: bool,

    /// Print a JSON array.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Show who holds a key. Exits with 1 when it is free.
#[derive(Debug, clap::Args)]
pub(crate) struct Inspect {
    #[command(flatten)]
    pub(crate) key: Key,

    /// Print a JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

/// End somebody else's hold of a key, if the store can. Exits with 1 when that holder does not hold it.
///
/// A store whose holds are kept by sessions (postgres://) cannot end one hold alone: --session ends the
/// session that keeps the key, and everything else that it keeps with it.
#[derive(Debug, clap::Args)]
pub(crate) struct Release {
    #[command(flatten)]
    pub(crate) key: Key,

    /// Confirms that the work under the lock may go on and overlap with the next holder's.
    #[arg(long, required = true)]
    pub(crate) force: bool,

    /// Whose hold to end, as `leasehold inspect` prints it.
    #[arg(long, value_name = "ID", required_unless_present = "session")]
    pub(crate) holder: Option<HolderId>,

    /// End the whole session that keeps the hold. Lists what else it keeps, and then wants --yes.
    #[arg(long)]
    pub(crate) session: bool,

    /// With --session: also when the session keeps other keys.
    #[arg(long, requires = "session")]
    pub(crate) yes: bool,

    /// Print a JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Print or install what the Postgres stores keep in a database.
#[derive(Debug, clap::Args)]
pub(crate) struct Schema {
    #[command(subcommand)]
    pub(crate) command: SchemaCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum SchemaCommand {
    Print(SchemaPrint),
    /// Install the schema, complete it, or upgrade an older one, in the database that --url names.
    Apply(SchemaGrants),
}

/// Print the SQL that installs the schema; it can be run any number of times.
///
/// Connects to nothing. Pipe it into psql, or keep it with your migrations.
#[derive(Debug, clap::Args)]
pub(crate) struct SchemaPrint {
    /// The name of the schema [default: that of the URL, or else leasehold].
    #[arg(long, value_name = "NAME")]
    pub(crate) schema: Option<String>,

    #[command(flatten)]
    pub(crate) grants: SchemaGrants,
}

/// Who may use the schema.
#[derive(Debug, clap::Args)]
pub(crate) struct SchemaGrants {
    /// Let this role use the stores, and nothing else.
    #[arg(long, value_name = "ROLE")]
    pub(crate) grant_to: Option<String>,

    /// Let this role look at the locks (`list`, `inspect`), and take or end none.
    #[arg(long, value_name = "ROLE")]
    pub(crate) grant_read_to: Option<String>,
}

/// Try the store: does it work, what can it do, what should be mended.
#[derive(Debug, clap::Args)]
pub(crate) struct Check {
    /// Print a JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Remove the files of keys that nobody holds or awaits, from a file store.
///
/// Locks may be taken and waited for meanwhile. Keys whose cooldown lasts are kept, and the fencing tokens of a key go on
/// above all that it had.
#[derive(Debug, clap::Args)]
pub(crate) struct Gc {
    /// Only keys that were not used for so long.
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "1d")]
    pub(crate) unused_for: Duration,

    /// Print a JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

/// List what is taken on a table of your own: by whom, since when, which epoch, and what is exhausted.
///
/// For tables whose rows are claimed through leasehold's claims, under leases or by open transactions.
/// Columns that are not named are found by their usual names: id; state or status; queue_id; group_id or
/// entity_id; owner or process_id; epoch; lease_until; taken_at; attempts_left or retries_left; error.
#[derive(Debug, clap::Args)]
pub(crate) struct Claims {
    /// The table, as TABLE or SCHEMA.TABLE.
    pub(crate) table: String,

    /// The column that identifies a row.
    #[arg(long, value_name = "COLUMN")]
    pub(crate) id: Option<String>,

    /// The column of the state.
    #[arg(long, value_name = "COLUMN")]
    pub(crate) state: Option<String>,

    /// The column of the queue.
    #[arg(long, value_name = "COLUMN")]
    pub(crate) queue: Option<String>,

    /// The column of the entity that a row is about.
    #[arg(long, value_name = "COLUMN")]
    pub(crate) group: Option<String>,

    /// The column of who has a row.
    #[arg(long, value_name = "COLUMN")]
    pub(crate) owner: Option<String>,

    /// The column of the epoch.
    #[arg(long, value_name = "COLUMN")]
    pub(crate) epoch: Option<String>,

    /// The column of the time at which a lease ends.
    #[arg(long, value_name = "COLUMN")]
    pub(crate) until: Option<String>,

    /// The column of the time since which a row is taken.
    #[arg(long, value_name = "COLUMN")]
    pub(crate) taken_at: Option<String>,

    /// The column of the attempts left.
    #[arg(long, value_name = "COLUMN")]
    pub(crate) attempts: Option<String>,

    /// The column of the last failure's message.
    #[arg(long, value_name = "COLUMN")]
    pub(crate) error: Option<String>,

    /// The table that keeps the leases, where they are not in columns.
    #[arg(long, value_name = "TABLE")]
    pub(crate) side_table: Option<String>,

    /// A state from which rows are taken; may be given several times [default: new, false].
    #[arg(long, value_name = "STATE")]
    pub(crate) takeable: Vec<String>,

    /// The state of rows without an attempt left [default: exhausted].
    #[arg(long, value_name = "STATE")]
    pub(crate) exhausted_state: Option<String>,

    /// List at most so many rows of each sort.
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub(crate) limit: u32,

    /// Print a JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Print the completions of a shell.
#[derive(Debug, clap::Args)]
pub(crate) struct Completions {
    /// The shell.
    pub(crate) shell: clap_complete::Shell,
}

/// Print the manual page of this tool or of one of its subcommands.
#[derive(Debug, clap::Args)]
pub(crate) struct Man {
    /// The subcommand.
    pub(crate) subcommand: Option<String>,
}

fn duration(text: &str) -> Result<Duration, String> {
    leasehold::parse_duration(text).map_err(|error| error.message().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        <Args as clap::CommandFactory>::command().debug_assert();
    }
}
