//! The directory of a file store, for commands that only look at it.

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

/// How long a disk may take for a few bytes.
const WRITE: Duration = Duration::from_secs(5);

/// The directory of a file store.
pub(crate) fn directory(lock: &dyn Lock) -> Option<String> {
    lock.to_string().strip_prefix("file://").map(str::to_owned)
}

/// What to say beside "nothing is locked" where nothing could be: a path may have been mistyped.
pub(crate) fn missing_note(lock: &dyn Lock) -> &'static str {
    match directory(lock) {
        Some(directory) if !Path::new(&directory).exists() => {
            ": there is no such directory, so nothing was ever locked there"
        }
        _ => "",
    }
}

/// Whether a key could be locked in the directory of a file store, as far as a file can be written and tokens given there. Where it is
/// missing, whether it could be made. A disk that hangs keeps a thread, and nobody waiting.
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
    // A name that nobody else has, also where processes of several machines or containers have one number.
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos());
    let path = directory.join(format!("check-{}-{now}.tmp", std::process::id()));
    let mut file = fs::OpenOptions::new().write(true).create_new(true).open(&path)?;
    let written = file.write_all(&[0; 4096]);
    fs::remove_file(&path).and(written)
}

/// What is doubtful about the directory of a file store.
pub(crate) fn cautions(lock: &dyn Lock) -> Vec<String> {
    directory(lock).map(leasehold::file::cautions).unwrap_or_default()
}
