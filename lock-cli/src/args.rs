//! The command line. The comments are the help text, so they are not Markdown.
#![allow(clippy::doc_markdown)]

mod acquire;
mod elect;
pub(crate) mod flock;
mod run;

use std::time::Duration;

use clap::{Parser, Subcommand};
use leasehold::{HolderId, LockKey};

pub(crate) use self::acquire::AcquireArgs;
pub(crate) use self::elect::{ElectArgs, ObserveArgs, Restart};
pub(crate) use self::run::{HoldArgs, OnLoss, RunArgs};
use crate::{chosen_store, exit};

/// Runs a command while holding a lock, so only one process runs it at a time.
#[derive(Debug, Parser)]
#[command(name = "leasehold", version, max_term_width = 100, after_long_help = exit::HELP)]
pub(crate) struct Args {
    /// The store: memory:, memory:NAME, file:///DIRECTORY, postgres://, postgres+advisory-xact://, postgres+row:// or
    /// postgres+ttl://USER@HOST/DATABASE, etcd:// or etcds://HOST,HOST,HOST/PREFIX.
    ///
    /// Without it, LEASEHOLD_URL holds the URL, or LEASEHOLD_URL_FILE names a file with the URL in its first line.
    /// Without these, the locks are files in the state directory of this user or systemd unit, and exclude each other
    /// between the processes of this machine. A URL with a password belongs in the file or the environment, because
    /// other users can see arguments.
    #[arg(long, global = true, value_name = "URL")]
    pub(crate) url: Option<String>,

    /// Print no notes on stderr, only errors.
    #[arg(short, long, global = true)]
    pub(crate) quiet: bool,

    /// Print each step on stderr.
    #[arg(short, long, global = true, conflicts_with = "quiet")]
    pub(crate) verbose: bool,

    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(RunArgs),
    #[command(name = "lock")]
    Hold(HoldArgs),
    Elect(ElectArgs),
    Observe(ObserveArgs),
    List(ListArgs),
    Inspect(InspectArgs),
    Release(ReleaseArgs),
    Check(CheckArgs),
    Gc(GcArgs),
    Claims(ClaimsArgs),
    Schema(SchemaArgs),
    Completions(CompletionsArgs),
    Man(ManArgs),
}

impl Command {
    /// Returns whether to print errors as JSON as well.
    pub(crate) fn wants_json(&self) -> bool {
        match self {
            // A reader of its output would take a line for the grant.
            Self::Hold(_) => false,
            Self::List(args) => args.json,
            Self::Inspect(args) => args.json,
            Self::Release(args) => args.json,
            Self::Check(args) => args.json,
            Self::Gc(args) => args.json,
            Self::Claims(args) => args.json,
            Self::Observe(args) => args.json,
            Self::Run(_) | Self::Elect(_) | Self::Schema(_) | Self::Completions(_) | Self::Man(_) => false,
        }
    }
}

/// The key, as an argument or as an option.
#[derive(Debug, clap::Args)]
#[group(id = "which", required = true, multiple = false)]
pub(crate) struct Key {
    /// The key: 1 to 512 bytes of text.
    #[arg(value_name = "KEY", allow_negative_numbers = true, value_parser = key)]
    argument: Option<LockKey>,

    /// The key, even if it begins with a dash. Use this form in scripts with arbitrary keys.
    #[arg(long = "key", value_name = "KEY", allow_hyphen_values = true, value_parser = key)]
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

/// The keys, as arguments or as options.
#[derive(Debug, clap::Args)]
#[group(id = "which", required = true, multiple = false)]
pub(crate) struct Keys {
    /// The key: 1 to 512 bytes of text. Of several keys, all are taken or none, which prevents deadlocks between runs.
    #[arg(value_name = "KEY", allow_negative_numbers = true, value_parser = key)]
    arguments: Vec<LockKey>,

    /// The key, even if it begins with a dash. Use this form in scripts with arbitrary keys. Can be given several
    /// times.
    #[arg(long = "key", value_name = "KEY", allow_hyphen_values = true, value_parser = key)]
    options: Vec<LockKey>,
}

impl Keys {
    /// Returns the keys in the given order, at least one.
    pub(crate) fn get(&self) -> &[LockKey] {
        if self.arguments.is_empty() { &self.options } else { &self.arguments }
    }

    /// Returns the keys for a sentence: `"a", "b"`.
    pub(crate) fn named(&self) -> String {
        named(self.get())
    }
}

/// Returns several keys for a sentence: `"a", "b"`.
pub(crate) fn named<'a>(keys: impl IntoIterator<Item = &'a LockKey>) -> String {
    keys.into_iter().map(|key| format!("\"{key}\"")).collect::<Vec<_>>().join(", ")
}

/// List locked keys with their holder, start and duration.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  leasehold list ledger: --watch=5")]
pub(crate) struct ListArgs {
    /// Only keys that begin with this prefix.
    #[arg(default_value = "", hide_default_value = true)]
    pub(crate) prefix: String,

    /// Also list ended holds: expired leases, and cooldowns of --cooldown and --once-per that still last.
    #[arg(long)]
    pub(crate) all: bool,

    /// Repeat the list every 2 seconds, or at the given interval, until interrupted. With --json, print an array in one
    /// line each time.
    #[arg(long, value_name = "SECONDS", value_parser = acquire::seconds, num_args = 0..=1, require_equals = true, default_missing_value = "2")]
    pub(crate) watch: Option<Duration>,

    /// Print a JSON array.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Show the holder of a key. Exits with 1 if the key is free.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  leasehold inspect deploy")]
pub(crate) struct InspectArgs {
    #[command(flatten)]
    pub(crate) key: Key,

    /// Print a JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

/// End another client's hold of a key, or request its release, if the store can. Exits with 1 if that holder does not
/// hold the key.
///
/// A request (`--ask`) goes to the holder's program, which can ignore it. `leasehold run --on-ask` and `leasehold elect
/// --step-down-if-asked` react to it.
///
/// A store whose sessions hold the locks (postgres://) cannot end a single hold. --session ends the session that holds
/// the key, and with it all other locks of that session.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  leasehold release deploy --force --holder 0123456789abcdef0123456789abcdef-1"
)]
pub(crate) struct ReleaseArgs {
    #[command(flatten)]
    pub(crate) key: Key,

    /// Confirm that the work under the lock might continue and overlap with the next holder's.
    #[arg(long, required_unless_present = "ask")]
    pub(crate) force: bool,

    /// Send the holder a request to release, instead of ending its hold.
    #[arg(long, conflicts_with_all = ["force", "session", "yes"])]
    pub(crate) ask: bool,

    /// The holder, as `leasehold inspect` prints it [default with `--ask`: the present holder].
    #[arg(long, value_name = "ID", required_unless_present_any = ["session", "ask"])]
    pub(crate) holder: Option<HolderId>,

    /// End the whole session that holds the key. Lists the other locks of the session, and then requires --yes.
    #[arg(long)]
    pub(crate) session: bool,

    /// With --session: end the session even if it holds other keys.
    #[arg(long, requires = "session")]
    pub(crate) yes: bool,

    /// Print a JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Print or install the schema of the Postgres stores.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  leasehold schema apply --url postgres://admin@db/app --grant-to app")]
pub(crate) struct SchemaArgs {
    #[command(subcommand)]
    pub(crate) command: SchemaCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum SchemaCommand {
    Print(SchemaPrint),
    /// Install, complete or upgrade the schema in the database of --url.
    Apply(SchemaGrants),
}

/// Print the SQL that installs the schema. It can be run any number of times.
///
/// Opens no connection. Pipe the output into psql, or add it to your migrations.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  leasehold schema print --grant-to app | psql -v ON_ERROR_STOP=1")]
pub(crate) struct SchemaPrint {
    /// The name of the schema [default: the schema of the URL, or else leasehold].
    #[arg(long, value_name = "NAME")]
    pub(crate) schema: Option<String>,

    #[command(flatten)]
    pub(crate) grants: SchemaGrants,
}

/// The roles that can use the schema.
#[derive(Debug, clap::Args)]
pub(crate) struct SchemaGrants {
    /// Grant this role the use of the stores, and nothing else.
    #[arg(long, value_name = "ROLE")]
    pub(crate) grant_to: Option<String>,

    /// Grant only this store: advisory locks, mutex rows, or leases [default: all].
    #[arg(long, value_enum, value_name = "STORE", requires = "grant_to")]
    pub(crate) store: Option<GrantedStore>,

    /// Grant this role inspection of the locks (`list`, `inspect`), but not taking or ending any.
    #[arg(long, value_name = "ROLE")]
    pub(crate) grant_read_to: Option<String>,
}

/// A store, named by the scheme of its URL.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum GrantedStore {
    /// postgres:// and postgres+advisory-xact://
    Advisory,
    /// postgres+row://
    Row,
    /// postgres+ttl://
    Ttl,
}

/// Test the store: whether it works, its capabilities, and problems to fix.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  leasehold check --json")]
pub(crate) struct CheckArgs {
    /// Print a JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Remove the files of keys without a holder or waiter from a file store.
///
/// Locks can be used at the same time. Keys in a cooldown are kept, and the fencing tokens of a key keep growing.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  leasehold --url file:///run/lock/jobs gc --unused-for 7d")]
pub(crate) struct GcArgs {
    /// Only keys unused for this long.
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "1d")]
    pub(crate) unused_for: Duration,

    /// Print a JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

/// List the claimed rows of a table: their owner, start and epoch, and the exhausted rows.
///
/// For tables whose rows are claimed through leasehold's claims, under leases or by open transactions. Columns that are
/// not named are found by their usual names: id; state or status; queue_id; group_id or entity_id; owner or process_id;
/// epoch; lease_until; taken_at; attempts_left or retries_left; error.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  leasehold claims app.request --queue queue_id")]
pub(crate) struct ClaimsArgs {
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

    /// The column of a row's entity.
    #[arg(long, value_name = "COLUMN")]
    pub(crate) group: Option<String>,

    /// The column of a row's owner.
    #[arg(long, value_name = "COLUMN")]
    pub(crate) owner: Option<String>,

    /// The column of the epoch.
    #[arg(long, value_name = "COLUMN")]
    pub(crate) epoch: Option<String>,

    /// The column of the time at which a lease ends.
    #[arg(long, value_name = "COLUMN")]
    pub(crate) until: Option<String>,

    /// The column of the time when a row was taken.
    #[arg(long, value_name = "COLUMN")]
    pub(crate) taken_at: Option<String>,

    /// The column of the attempts left.
    #[arg(long, value_name = "COLUMN")]
    pub(crate) attempts: Option<String>,

    /// The column of the last failure's message.
    #[arg(long, value_name = "COLUMN")]
    pub(crate) error: Option<String>,

    /// The table of the leases, if they are not in columns.
    #[arg(long, value_name = "TABLE")]
    pub(crate) side_table: Option<String>,

    /// A state from which rows are taken. Can be given several times [default: new, false].
    #[arg(long, value_name = "STATE")]
    pub(crate) takeable: Vec<String>,

    /// The state of rows without attempts left [default: exhausted].
    #[arg(long, value_name = "STATE")]
    pub(crate) exhausted_state: Option<String>,

    /// List at most this many rows of each kind. A note reports further rows.
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) limit: u32,

    /// Print a JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Print the completions for a shell.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  leasehold completions bash > /etc/bash_completion.d/leasehold")]
pub(crate) struct CompletionsArgs {
    /// The shell.
    pub(crate) shell: clap_complete::Shell,
}

/// Print the manual page of this tool or of one of its subcommands.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  leasehold man run | man -l -")]
pub(crate) struct ManArgs {
    /// The subcommand.
    pub(crate) subcommand: Option<String>,
}

fn key(text: &str) -> Result<LockKey, String> {
    if chosen_store::is_mistaken_for_key(text) {
        return Err("the URL of a store is no key; put it behind --url".to_owned());
    }
    text.parse().map_err(|error: leasehold::Error| error.message().to_owned())
}

fn duration(text: &str) -> Result<Duration, String> {
    leasehold::parse_duration(text).map_err(|error| error.message().to_owned())
}
