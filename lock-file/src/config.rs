//! Where the store is and how it waits.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use leasehold_api::{Error, ErrorKind};
use leasehold_engine::Engine;

use crate::backend::FileBackend;
use crate::files::FileMode;
use crate::gc::{self, Collected};
use crate::store::FileStore;

/// How often a waiter asks at most, where it cannot wait in the kernel, when nothing else was said: 20 ms.
pub const DEFAULT_POLL: Duration = Duration::from_millis(20);

const POLL_BOUNDS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(500));

/// Opens the store in `dir`, which is made if it is missing, and starts an engine on the current
/// tokio runtime. Every call makes an independent client.
///
/// # Errors
///
/// As [`FileConfig::connect`].
pub fn connect(dir: impl AsRef<Path>) -> Result<Engine, Error> {
    FileConfig::new(dir).connect()
}

/// The settings of a file store.
#[derive(Clone, Debug)]
pub struct FileConfig {
    dir: PathBuf,
    poll: Duration,
    mode: Option<u32>,
    read_only: bool,
}

impl FileConfig {
    /// A store in `dir`. A relative path counts from the directory that is current when it is opened.
    pub fn new(dir: impl AsRef<Path>) -> Self {
        Self { dir: dir.as_ref().to_owned(), poll: DEFAULT_POLL, mode: None, read_only: false }
    }

    /// How often a waiter asks, on average, where it cannot wait in the kernel: without a thread for that, or while a
    /// holder does not show. 1 ms to 500 ms, by default [`DEFAULT_POLL`].
    #[must_use]
    pub fn poll(mut self, every: Duration) -> Self {
        self.poll = every;
        self
    }

    /// The permissions of a new directory's files, whatever the umask is, for several users who exclude each other:
    /// `0o660` for those of one group, `0o666` for everybody; by default `0o600`, for its user alone. A bit for reading
    /// alone lets others look. The directory gets the permissions that go with them: `2770`, and `1777` for everybody.
    ///
    /// A directory that is there already goes by the permissions of its file `leasehold-format`; leave this out to
    /// follow them.
    #[must_use]
    pub fn mode(mut self, bits: u32) -> Self {
        self.mode = Some(bits);
        self
    }

    /// Opens the store to look at it only: nothing is made, read access is enough, and nothing can be locked. A directory
    /// that is missing has no locks.
    #[must_use]
    pub fn read_only(mut self) -> Self {
        self.read_only = true;
        self
    }

    /// Removes the files of the keys that nobody holds or awaits, whose cooldown is over, and which were last used
    /// `unused_for` ago. Locks may be taken and waited for meanwhile. What fencing needs is kept: the tokens of a key go
    /// on above all that it had. Blocks for as long as the disk takes.
    ///
    /// In a directory for everybody, only the files that this user may remove are removed.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](ErrorKind::Unavailable) when another process does the same; else as [`backend`](Self::backend).
    pub fn collect_garbage(&self, unused_for: Duration) -> Result<Collected, Error> {
        gc::collect(&self.dir, unused_for)
    }

    /// Opens the store and starts an engine on the current tokio runtime.
    ///
    /// # Errors
    ///
    /// As [`backend`](Self::backend), and what [`Engine::start`] answers outside a runtime.
    pub fn connect(&self) -> Result<Engine, Error> {
        Engine::start(self.backend()?)
    }

    /// Opens the store for an engine that is built by hand.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption) when the path is empty or not a directory, or the
    /// poll interval is out of bounds, or the mode is not usable or not that of the directory;
    /// [`PermissionDenied`](ErrorKind::PermissionDenied) when the
    /// directory cannot be made or written; [`Capacity`](ErrorKind::Capacity) when the disk is full;
    /// [`SchemaMissing`](ErrorKind::SchemaMissing) when another version wrote the directory;
    /// [`Corrupt`](ErrorKind::Corrupt) when its format marker is not ours.
    pub fn backend(&self) -> Result<FileBackend, Error> {
        let (min, max) = POLL_BOUNDS;
        if !(min..=max).contains(&self.poll) {
            return Err(Error::new(
                ErrorKind::InvalidOption,
                format!("a poll interval of {:?} is out of bounds; choose {min:?} to {max:?}", self.poll),
            ));
        }
        if self.read_only {
            return Ok(FileBackend::new(FileStore::open_read_only(&self.dir)?, self.poll));
        }
        let mode = self.mode.map(|bits| FileMode::new(bits).ok_or_else(|| unusable(bits))).transpose()?;
        Ok(FileBackend::new(FileStore::open(&self.dir, mode)?, self.poll))
    }
}

fn unusable(bits: u32) -> Error {
    Error::new(
        ErrorKind::InvalidOption,
        format!(
            "files cannot have the mode {bits:04o}; choose 0600 (this user), 0660 (one group) or 0666 (everybody)"
        ),
    )
}

/// The directory of this user's own store: `$XDG_STATE_HOME/leasehold`, by default
/// `~/.local/state/leasehold`; on macOS `~/Library/Application Support/leasehold`. It is not made here.
///
/// # Errors
///
/// [`InvalidOption`](ErrorKind::InvalidOption) when the user has no home directory, or it is not there.
pub fn default_dir() -> Result<PathBuf, Error> {
    // A home such as /nonexistent, of users who are to have none, would be made by the superuser.
    state_dir(env::var_os("XDG_STATE_HOME"), env::home_dir().filter(|home| home.is_dir()))
}

fn state_dir(xdg: Option<OsString>, home: Option<PathBuf>) -> Result<PathBuf, Error> {
    // A relative XDG path is to be ignored, says the specification of base directories.
    let xdg = xdg.map(PathBuf::from).filter(|p| p.is_absolute());
    if let (Some(state), false) = (xdg, cfg!(target_os = "macos")) {
        return Ok(state.join("leasehold"));
    }
    let home = home.filter(|p| p.is_absolute()).ok_or_else(|| {
        Error::new(
            ErrorKind::InvalidOption,
            "this user has no home directory for the file store, or it is not there; set HOME or name a directory (file:///path)",
        )
    })?;
    let state = if cfg!(target_os = "macos") { "Library/Application Support" } else { ".local/state" };
    Ok(home.join(state).join("leasehold"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(not(target_os = "macos"))]
    #[test]
    fn state_directory_follows_the_base_directory_specification() {
        let dir = |xdg: Option<&str>, home: Option<&str>| {
            state_dir(xdg.map(Into::into), home.map(Into::into)).map(|p| p.display().to_string())
        };
        assert_eq!(dir(Some("/state"), Some("/home/a")).unwrap(), "/state/leasehold");
        assert_eq!(dir(None, Some("/home/a")).unwrap(), "/home/a/.local/state/leasehold");
        assert_eq!(dir(Some("rel"), Some("/home/a")).unwrap(), "/home/a/.local/state/leasehold");
        assert_eq!(dir(Some(""), None).unwrap_err().kind(), ErrorKind::InvalidOption);
        assert_eq!(dir(None, Some("")).unwrap_err().kind(), ErrorKind::InvalidOption);
    }

    #[test]
    fn poll_interval_has_bounds() {
        let config = FileConfig::new("/nowhere");
        for bad in [Duration::ZERO, Duration::from_secs(1), Duration::MAX] {
            let error = config.clone().poll(bad).backend().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidOption, "{bad:?}");
        }
    }
}
