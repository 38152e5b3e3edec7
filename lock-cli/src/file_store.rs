//! Helpers for commands that only inspect the directory of a file store.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use std::{
    fs,
    io::{self, Write as _},
};

use leasehold::{Error, ErrorKind, Lock};
use rustix::fs::{Access, access};
use tokio::task::spawn_blocking;
use tokio::time::timeout;

/// Time limit for writing a few bytes to disk.
const WRITE: Duration = Duration::from_secs(5);

/// Returns the directory of the lock's file store. `None` for other stores.
pub(crate) fn directory(lock: &dyn Lock) -> Option<String> {
    lock.to_string().strip_prefix("file://").map(str::to_owned)
}

/// Returns the text to print for "nothing is locked". The text reports a missing directory, because the path might be
/// mistyped.
pub(crate) fn missing_note(lock: &dyn Lock) -> &'static str {
    match directory(lock) {
        Some(directory) if !Path::new(&directory).exists() => {
            ": there is no such directory, so nothing was ever locked there"
        }
        _ => "",
    }
}

/// Checks that a key could be locked in the directory of a file store: that a file can be written and tokens can be
/// drawn. For a missing directory, checks that it could be created. A hanging disk blocks only a thread.
pub(crate) async fn check_writable(lock: &dyn Lock) -> Result<(), Error> {
    let Some(directory) = directory(lock).map(PathBuf::from) else { return Ok(()) };
    let path = directory.clone();
    let try_it = move || write_into(&path).map(|()| leasehold::file::check_tokens(path));
    let written = timeout(WRITE, spawn_blocking(try_it)).await;
    let no_answer = || Ok(Err(io::ErrorKind::TimedOut.into()));
    let written =
        written.unwrap_or_else(|_| no_answer()).unwrap_or_else(|ended| Err(io::Error::other(ended)));
    match written {
        Ok(tokens) => tokens.map_err(|error| error.with_store(lock.to_string())),
        Err(error) => {
            let kind = match error.kind() {
                io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                    ErrorKind::PermissionDenied
                }
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorKind::Capacity,
                _ => ErrorKind::Unavailable,
            };
            let message = format!("nothing can be locked in {}: {error}", directory.display());
            Err(Error::new(kind, message).with_source(error).with_store(lock.to_string()))
        }
    }
}

fn write_into(directory: &Path) -> io::Result<()> {
    let there = directory.ancestors().find(|ancestor| ancestor.exists()).unwrap_or(Path::new("/"));
    if there != directory {
        return Ok(access(there, Access::WRITE_OK | Access::EXEC_OK)?);
    }
    // Builds a name that is unique, even if processes on several machines or in several containers have the same id.
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos());
    let path = directory.join(format!("check-{}-{now}.tmp", std::process::id()));
    let mut file = fs::OpenOptions::new().write(true).create_new(true).open(&path)?;
    let written = file.write_all(&[0; 4096]);
    fs::remove_file(&path).and(written)
}

/// Returns the warnings about the directory of a file store.
pub(crate) fn cautions(lock: &dyn Lock) -> Vec<String> {
    directory(lock).map(leasehold::file::cautions).unwrap_or_default()
}
