//! Observes the processes, sessions and advisory locks of a server.

use std::fs;
use std::process::Command;

use rustix::process::Pid;
use sqlx::Row as _;

use crate::{Outcome, admin};

/// A client session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Backend {
    /// Its process id.
    pub pid: i32,
    /// The application name set by the client.
    pub application_name: String,
    /// `active`, `idle` or `idle in transaction`, or empty while it is being opened.
    pub state: String,
    /// The running statement, or the last one.
    pub query: String,
    /// Its wait event, such as `Lock/advisory` or `Client/ClientRead`, or empty if it does not wait.
    pub waits_for: String,
}

/// A row of `pg_locks` for an advisory lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdvisoryLock {
    /// The session's process id.
    pub pid: i32,
    /// The upper half of a bigint, or the first of two integers.
    pub class_id: u32,
    /// The lower half of a bigint, or the second of two integers.
    pub object_id: u32,
    /// 1 for a bigint, 2 for two integers.
    pub key_space: i16,
    /// `ExclusiveLock` or `ShareLock`.
    pub mode: String,
    /// Whether the session holds it. Otherwise the session waits for it.
    pub granted: bool,
}

impl AdvisoryLock {
    /// Returns the locked bigint, or the two integers packed the same way.
    #[must_use]
    pub fn number(&self) -> i64 {
        (u64::from(self.class_id) << 32 | u64::from(self.object_id)).cast_signed()
    }
}

const BACKENDS: &str = "
    SELECT pid, application_name, coalesce(state, '') AS state, coalesce(query, '') AS query,
           coalesce(wait_event_type || '/' || wait_event, '') AS waits_for
    FROM pg_catalog.pg_stat_activity
    WHERE datname = $1 AND backend_type = 'client backend' AND pid <> pg_catalog.pg_backend_pid()
    ORDER BY pid";

pub(crate) async fn backends(url: &str, database: &str) -> Outcome<Vec<Backend>> {
    let rows = admin::rows(url.to_owned(), BACKENDS.to_owned(), vec![database.to_owned()]).await?;
    let backend = |row: &sqlx::postgres::PgRow| {
        Ok(Backend {
            pid: row.try_get("pid")?,
            application_name: row.try_get("application_name")?,
            state: row.try_get("state")?,
            query: row.try_get("query")?,
            waits_for: row.try_get("waits_for")?,
        })
    };
    rows.iter().map(backend).collect::<Result<_, sqlx::Error>>().map_err(unreadable)
}

const ADVISORY_LOCKS: &str = "
    SELECT pid, classid::bigint AS class_id, objid::bigint AS object_id, objsubid, mode, granted
    FROM pg_catalog.pg_locks
    JOIN pg_catalog.pg_database ON pg_database.oid = pg_locks.database
    WHERE locktype = 'advisory' AND datname = $1
    ORDER BY classid, objid, granted DESC, pid";

pub(crate) async fn advisory_locks(url: &str, database: &str) -> Outcome<Vec<AdvisoryLock>> {
    let rows = admin::rows(url.to_owned(), ADVISORY_LOCKS.to_owned(), vec![database.to_owned()]).await?;
    let half = |row: &sqlx::postgres::PgRow, name| {
        let number: i64 = row.try_get(name)?;
        u32::try_from(number).map_err(|error| sqlx::Error::Decode(error.into()))
    };
    let lock = |row: &sqlx::postgres::PgRow| {
        Ok(AdvisoryLock {
            pid: row.try_get("pid")?,
            class_id: half(row, "class_id")?,
            object_id: half(row, "object_id")?,
            key_space: row.try_get("objsubid")?,
            mode: row.try_get("mode")?,
            granted: row.try_get("granted")?,
        })
    };
    rows.iter().map(lock).collect::<Result<_, sqlx::Error>>().map_err(unreadable)
}

fn unreadable(error: sqlx::Error) -> String {
    format!("cannot read what the server says about itself: {error}")
}

/// Returns the direct children of a process.
pub(crate) fn children(parent: Pid) -> Vec<Pid> {
    let of_parent = |(child, its_parent): (i32, i32)| {
        (its_parent == parent.as_raw_nonzero().get()).then(|| Pid::from_raw(child)).flatten()
    };
    let all = from_proc().unwrap_or_else(from_ps);
    all.into_iter().filter_map(of_parent).collect()
}

/// Returns all processes with their parents, if `/proc` exists.
fn from_proc() -> Option<Vec<(i32, i32)>> {
    fs::metadata("/proc/self/stat").ok()?;
    let process = |entry: fs::DirEntry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        let text = fs::read_to_string(entry.path().join("stat")).ok()?;
        // Splits at the last parenthesis, because the name can contain any character. State and parent follow it.
        let parent = text.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()?;
        Some((pid, parent))
    };
    Some(fs::read_dir("/proc").ok()?.flatten().filter_map(process).collect())
}

fn from_ps() -> Vec<(i32, i32)> {
    let output = Command::new("ps").args(["-A", "-o", "pid=", "-o", "ppid="]).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    let pair = |line: &str| {
        let mut numbers = line.split_whitespace().map(str::parse);
        Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
    };
    text.lines().filter_map(pair).collect()
}
