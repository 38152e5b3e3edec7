//! The settings of the file store.

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

/// The default poll interval of a waiter that cannot wait in the kernel: 20 ms.
pub const DEFAULT_POLL: Duration = Duration::from_millis(20);

const POLL_BOUNDS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(500));

/// Opens the store in `dir`, creates the directory if it is missing, and starts an engine on the current tokio runtime.
/// Every call creates an independent client.
///
/// # Errors
///
/// See [`FileConfig::connect`].
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
    handover: bool,
}

impl FileConfig {
    /// Creates the settings for a store in `dir`. A relative path counts from the current directory at the time of
    /// opening.
    pub fn new(dir: impl AsRef<Path>) -> Self {
        Self {
            dir: dir.as_ref().to_owned(),
            poll: DEFAULT_POLL,
            mode: None,
            read_only: false,
            handover: true,
        }
    }

    /// Sets the average poll interval of a waiter that cannot wait in the kernel, because no thread is available or a
    /// holder's status file is not locked. 1 ms to 500 ms, by default [`DEFAULT_POLL`].
    #[must_use]
    pub fn poll(mut self, every: Duration) -> Self {
        self.poll = every;
        self
    }

    /// Sets the permissions of a new directory's files, independent of the umask, for users who share locks. `0o660` is
    /// for one group, `0o666` for all users, and the default `0o600` for the directory's user. A read-only bit permits
    /// inspection. The directory gets matching permissions: `2770`, or `1777` for all users.
    ///
    /// An existing directory keeps the permissions of its file `leasehold-format`. Omit the mode to follow them.
    #[must_use]
    pub fn mode(mut self, bits: u32) -> Self {
        self.mode = Some(bits);
        self
    }

    /// Opens the store only for inspection and requests to release. No file is created, and no key can be locked. Read
    /// access is enough to inspect. A missing directory has no locks.
    #[must_use]
    pub fn read_only(mut self) -> Self {
        self.read_only = true;
        self
    }

    /// Sets whether callers of this client pass a hold to each other for a short time, without the directory. By
    /// default they do.
    #[must_use]
    pub fn handover(mut self, on: bool) -> Self {
        self.handover = on;
        self
    }

    /// Removes the files of keys without a holder, waiter or cooldown that were last used `unused_for` ago. Locks can
    /// be used at the same time. The data for fencing is kept, so a key's tokens keep growing. Blocks while the disk
    /// works.
    ///
    /// In a directory for all users, only files that this user can remove are removed.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](ErrorKind::Unavailable) if another process is removing files. Otherwise see
    /// [`backend`](Self::backend).
    pub fn collect_garbage(&self, unused_for: Duration) -> Result<Collected, Error> {
        gc::collect(&self.dir, unused_for)
    }

    /// Opens the store and starts an engine on the current tokio runtime.
    ///
    /// # Errors
    ///
    /// See [`backend`](Self::backend) and, outside a runtime, [`Engine::start`].
    pub fn connect(&self) -> Result<Engine, Error> {
        Engine::start(self.backend()?)
    }

    /// Opens the store for an engine that the caller builds.
    ///
    /// # Errors
    ///
    /// - [`InvalidOption`](ErrorKind::InvalidOption) if the path is empty or not a directory, the poll interval is out
    ///   of range, or the mode is unusable or differs from the directory's.
    /// - [`PermissionDenied`](ErrorKind::PermissionDenied) if the directory cannot be created or written.
    /// - [`Capacity`](ErrorKind::Capacity) if the disk is full.
    /// - [`SchemaMissing`](ErrorKind::SchemaMissing) if another version wrote the directory.
    /// - [`Corrupt`](ErrorKind::Corrupt) if its format marker is invalid.
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
        Ok(FileBackend::new(FileStore::open(&self.dir, mode)?, self.poll).handover(self.handover))
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

/// Returns the directory of this user's store: `$XDG_STATE_HOME/leasehold`, by default `~/.local/state/leasehold`, and
/// on macOS `~/Library/Application Support/leasehold`. Does not create it.
///
/// # Errors
///
/// [`InvalidOption`](ErrorKind::InvalidOption) if the user has no home directory, or it does not exist.
pub fn default_dir() -> Result<PathBuf, Error> {
    // Ignores a home that does not exist, because the superuser would create it. A home such as /nonexistent
    // means that the user has none.
    state_dir(env::var_os("XDG_STATE_HOME"), env::home_dir().filter(|home| home.is_dir()))
}

fn state_dir(xdg: Option<OsString>, home: Option<PathBuf>) -> Result<PathBuf, Error> {
    // Ignores a relative path, as the XDG base directory specification requires.
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
