//! Files locked by this process, through the kernel.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use crate::files::{FileMode, open_lock, open_to_look};

/// A file that this value has locked. The lock goes with it, also where the descriptor was handed on.
#[derive(Debug)]
pub(crate) struct LockedFile(File);

impl LockedFile {
    /// Locks `file` for itself alone; `None` when somebody else has it locked.
    pub(crate) fn exclusive(file: File) -> io::Result<Option<Self>> {
        let answer = file.try_lock();
        Self::judge(file, answer)
    }

    /// Locks `file` together with others that share it; `None` when somebody has it for itself.
    pub(crate) fn shared(file: File) -> io::Result<Option<Self>> {
        let answer = file.try_lock_shared();
        Self::judge(file, answer)
    }

    /// Locks `file` by `lock`, which waits.
    fn wait(file: File, lock: impl Fn(&File) -> io::Result<()>) -> io::Result<Self> {
        loop {
            match lock(&file) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                answer => return answer.map(|()| Self(file)),
            }
        }
    }

    fn judge(file: File, answer: Result<(), TryLockError>) -> io::Result<Option<Self>> {
        match answer {
            Ok(()) => Ok(Some(Self(file))),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(e)) => Err(e),
        }
    }

    /// The file.
    pub(crate) fn file(&self) -> &File {
        &self.0
    }

    /// Unlocks the file although others may still refer to this value.
    pub(crate) fn unlock(&self) {
        // Unlocking a file that is locked does not fail, and closing it does the same.
        let _ = self.0.unlock();
    }

    /// Whether `path` still leads to this file.
    pub(crate) fn is_at(&self, path: &Path) -> io::Result<bool> {
        let there = match fs::symlink_metadata(path) {
            Ok(meta) => meta,
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Ok(false);
            }
            Err(e) => return Err(e),
        };
        let here = self.0.metadata()?;
        Ok((here.dev(), here.ino()) == (there.dev(), there.ino()))
    }
}

impl Drop for LockedFile {
    fn drop(&mut self) {
        // Closing alone would leave the lock with duplicates of the descriptor in child processes.
        self.unlock();
    }
}

/// Locks the file at `path`, which is made if it is missing; `None` when somebody else has it locked.
pub(crate) fn lock_at(path: &Path, mode: FileMode) -> io::Result<Option<LockedFile>> {
    // Whoever removes the file, or the directory, may do so between opening and locking: such a lock excludes nobody.
    for _ in 0..20 {
        match LockedFile::exclusive(open_lock(path, mode)?)? {
            Some(locked) if !locked.is_at(path)? => {}
            answer => return Ok(answer),
        }
    }
    Err(io::ErrorKind::NotFound.into())
}

/// Locks the file at `path` as [`lock_at`] does, and waits until that is possible; `None` when it is not wanted any
/// more by then.
pub(crate) fn lock_at_blocking(
    path: &Path,
    mode: FileMode,
    is_wanted: &dyn Fn() -> bool,
) -> io::Result<Option<LockedFile>> {
    loop {
        let locked = LockedFile::wait(open_lock(path, mode)?, File::lock)?;
        if !is_wanted() {
            return Ok(None);
        }
        // Whoever removed the file, or the directory, did so while we waited.
        if locked.is_at(path)? {
            return Ok(Some(locked));
        }
    }
}

/// Waits until nobody has the file at `path` locked for itself; says whether it had to wait.
pub(crate) fn wait_until_free(path: &Path) -> io::Result<bool> {
    let file = match open_to_look(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(e) => return Err(e),
    };
    match file.try_lock_shared() {
        Ok(()) => Ok(false),
        Err(TryLockError::WouldBlock) => LockedFile::wait(file, File::lock_shared).map(|_| true),
        Err(TryLockError::Error(e)) => Err(e),
    }
}

/// Whether somebody has the file at `path` locked for itself. Shared with others who ask the same, and
/// nothing is made.
pub(crate) fn is_locked(path: &Path) -> io::Result<bool> {
    match open_to_look(path) {
        Ok(file) => Ok(LockedFile::shared(file)?.is_none()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e),
    }
}
