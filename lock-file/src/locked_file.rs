//! Files locked by this process, through the kernel.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use crate::files::{FileMode, open_lock, open_to_look};

/// A file that this process has locked. Dropping the value unlocks the file, even if a process inherited the
/// descriptor.
#[derive(Debug)]
pub(crate) struct LockedFile(File);

impl LockedFile {
    /// Locks `file` exclusively. Returns `None` if another process or value has locked it.
    pub(crate) fn exclusive(file: File) -> io::Result<Option<Self>> {
        let answer = file.try_lock();
        Self::judge(file, answer)
    }

    /// Locks `file` in shared mode. Returns `None` if it is locked exclusively.
    pub(crate) fn shared(file: File) -> io::Result<Option<Self>> {
        let answer = file.try_lock_shared();
        Self::judge(file, answer)
    }

    /// Locks `file` by `lock`, which blocks until the file is free.
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

    /// Returns the file.
    pub(crate) fn file(&self) -> &File {
        &self.0
    }

    /// Unlocks the file even if this value has other references.
    pub(crate) fn unlock(&self) {
        // Ignores the result, because unlocking a locked file does not fail, and closing it has the same
        // effect.
        let _ = self.0.unlock();
    }

    /// Returns whether `path` still leads to this file.
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
        // Unlocks explicitly, because closing would leave the lock with duplicates of the descriptor in child
        // processes.
        self.unlock();
    }
}

/// Locks the file at `path`, and creates it if it is missing. Returns `None` if it is locked already.
pub(crate) fn lock_at(path: &Path, mode: FileMode) -> io::Result<Option<LockedFile>> {
    lock_by(path, mode, LockedFile::exclusive)
}

/// Locks the file at `path` like [`lock_at`], but in shared mode. Returns `None` if it is locked exclusively.
pub(crate) fn lock_shared_at(path: &Path, mode: FileMode) -> io::Result<Option<LockedFile>> {
    lock_by(path, mode, LockedFile::shared)
}

fn lock_by(
    path: &Path,
    mode: FileMode,
    lock: impl Fn(File) -> io::Result<Option<LockedFile>>,
) -> io::Result<Option<LockedFile>> {
    // Repeats if the file or the directory was removed between opening and locking, because a lock on a
    // removed file excludes no other process.
    for _ in 0..20 {
        match lock(open_lock(path, mode)?)? {
            Some(locked) if !locked.is_at(path)? => {}
            answer => return Ok(answer),
        }
    }
    Err(io::ErrorKind::NotFound.into())
}

/// Locks the file at `path` like [`lock_at`], but waits. Returns `None` if the lock is no longer wanted after the wait.
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
        // Opens the file again if it or the directory was removed during the wait.
        if locked.is_at(path)? {
            return Ok(Some(locked));
        }
    }
}

/// Waits until the file at `path` is not locked exclusively. Returns whether it had to wait.
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

/// Returns whether the file at `path` is locked exclusively. Concurrent checks do not conflict, and no file is created.
pub(crate) fn is_locked(path: &Path) -> io::Result<bool> {
    match open_to_look(path) {
        Ok(file) => Ok(LockedFile::shared(file)?.is_none()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e),
    }
}
