//! Locked files, and what one grant keeps of them.

use std::fmt;
use std::fs::{self, File, TryLockError};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;

use leasehold_api::{Error, FencingToken};

use crate::error::io_error;
use crate::layout::{KeyFiles, open_lock};
use crate::turnstile::Turnstile;

/// How often, and how long apart, a grant tries again to lock a witness that somebody looks at just now.
const WITNESS_TRIES: usize = 20;
const WITNESS_PAUSE: Duration = Duration::from_micros(200);

/// A file that this value has locked. The lock goes with it, also where the descriptor was handed on.
#[derive(Debug)]
pub(crate) struct Locked(File);

impl Locked {
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
        let there = match fs::metadata(path) {
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

impl Drop for Locked {
    fn drop(&mut self) {
        // Closing alone would leave the lock with duplicates of the descriptor in child processes.
        self.unlock();
    }
}

/// Locks the file at `path`, which is made if it is missing; `None` when somebody else has it locked.
pub(crate) fn lock_at(path: &Path) -> io::Result<Option<Locked>> {
    // Whoever removes the directory may do so between opening and locking: such a lock excludes nobody.
    for _ in 0..3 {
        match Locked::exclusive(open_lock(path)?)? {
            Some(locked) if !locked.is_at(path)? => {}
            answer => return Ok(answer),
        }
    }
    Err(io::ErrorKind::NotFound.into())
}

/// Whether somebody has the file at `path` locked for itself. Shared with others who ask the same, and
/// nothing is made.
pub(crate) fn is_locked(path: &Path) -> io::Result<bool> {
    match File::open(path) {
        Ok(file) => Ok(Locked::shared(file)?.is_none()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e),
    }
}

/// One grant: the lock, and the witness that shows it.
#[derive(Debug)]
pub(crate) struct Hold {
    // Dropped in this order: whoever sees the lock free must not see the witness held.
    witness: Option<Arc<Locked>>,
    main: Arc<Locked>,
    files: KeyFiles,
    token: FencingToken,
}

impl Hold {
    /// The grant of whoever has locked `main` and written its record.
    pub(crate) fn new(main: Locked, files: KeyFiles, token: FencingToken) -> Self {
        let mut hold = Self { witness: None, main: Arc::new(main), files, token };
        for _ in 0..WITNESS_TRIES {
            hold.show();
            if hold.witness.is_some() {
                return hold;
            }
            std::thread::sleep(WITNESS_PAUSE);
        }
        tracing::debug!(file = %hold.files.seen().display(), "the witness is being looked at; it is locked later");
        hold
    }

    /// Locks the witness, unless that has been done or somebody looks at it just now. The grant does not
    /// depend on it.
    fn show(&mut self) {
        let seen = self.files.seen();
        if self.witness.as_ref().is_some_and(|w| w.is_at(&seen).unwrap_or(true)) {
            return;
        }
        match lock_at(&seen) {
            Ok(witness) => self.witness = witness.map(Arc::new),
            Err(error) => {
                tracing::warn!(%error, file = %seen.display(), "cannot lock the witness: the lock holds, but does not show in lists");
            }
        }
    }

    pub(crate) fn token(&self) -> FencingToken {
        self.token
    }

    pub(crate) fn file(&self) -> HeldFile {
        let witness = self.witness.as_ref().map(Arc::downgrade).unwrap_or_default();
        HeldFile { witness, main: Arc::downgrade(&self.main) }
    }

    /// Whether the lock is still that of its key, which ends when somebody removes or replaces the file.
    pub(crate) fn confirm(&mut self) -> Result<bool, Error> {
        let path = self.files.main();
        let is_there = self.main.is_at(&path).map_err(|e| io_error(e, "confirm the lock of", &path))?;
        if is_there {
            self.show();
        }
        Ok(is_there)
    }

    /// Lets go. Says whether it was held until now, and whether others wait.
    pub(crate) fn free(mut self) -> (bool, bool) {
        // The answers are for the caller's information: letting go does not depend on them.
        let was_held = self.main.is_at(&self.files.main()).unwrap_or(true);
        // Looked at while the lock is ours, when nobody else looks: so no try fails because of it.
        let waiters = Turnstile::is_occupied(&self.files.next()).unwrap_or(false);
        self.unlock();
        (was_held, waiters)
    }

    fn unlock(&mut self) {
        // Not by the last reference alone: somebody may be duplicating the descriptors just now.
        if let Some(witness) = self.witness.take() {
            witness.unlock();
        }
        self.main.unlock();
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.unlock();
    }
}

/// The locked file of a grant: what [`LockGuard::extension`](leasehold_api::LockGuard::extension) finds
/// for the file store.
///
/// It lets a process hand the lock on to a child, so that the lock of a parent that was killed is not
/// free before the child is gone.
#[derive(Clone)]
pub struct HeldFile {
    witness: Weak<Locked>,
    main: Weak<Locked>,
}

/// Descriptors that child processes inherit, see [`HeldFile::inheritable`].
#[derive(Debug)]
pub struct Inheritable {
    /// What inspection looks at. Made first, so that a process that ends closes it first.
    _witness: Option<OwnedFd>,
    main: OwnedFd,
}

impl AsFd for Inheritable {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.main.as_fd()
    }
}

impl HeldFile {
    /// Duplicates of the locked file's descriptor, and of what shows the lock to others, that child processes
    /// inherit.
    ///
    /// The lock belongs to the open file, which duplicates share. Releasing the guard, or dropping it,
    /// unlocks it for all of them at once. If instead this process dies without having done so, the lock
    /// stays until the last process that inherited the duplicates has closed them or has died.
    ///
    /// Every process started while the duplicates are open inherits them: make them just before starting the
    /// child and drop them just after.
    ///
    /// # Errors
    ///
    /// [`NotFound`](io::ErrorKind::NotFound) when the lock has been released; else what the system
    /// answers, such as too many open files.
    pub fn inheritable(&self) -> io::Result<Inheritable> {
        let main = self.main.upgrade().ok_or_else(|| {
            io::Error::new(io::ErrorKind::NotFound, "the lock has been released; acquire it first")
        })?;
        // A plain duplicate is not closed when another program is executed.
        let witness = self.witness.upgrade().map(|witness| rustix::io::dup(&witness.0)).transpose()?;
        Ok(Inheritable { _witness: witness, main: rustix::io::dup(&main.0)? })
    }
}

impl fmt::Debug for HeldFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeldFile").field("released", &(self.main.strong_count() == 0)).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use leasehold_api::LockKey;

    fn hold(dir: &Path) -> (Hold, KeyFiles) {
        let files = KeyFiles::new(dir, &LockKey::new("k").unwrap());
        let main = lock_at(&files.main()).unwrap().unwrap();
        (Hold::new(main, files.clone(), FencingToken::from_u64(7)), files)
    }

    #[test]
    fn letting_go_unlocks_also_for_inherited_duplicates() {
        let dir = tempfile::tempdir().unwrap();
        let (hold, files) = hold(dir.path());
        let file = hold.file();
        let duplicate = file.inheritable().unwrap();
        assert!(lock_at(&files.main()).unwrap().is_none());
        assert_eq!(hold.free(), (true, false));
        assert!(lock_at(&files.main()).unwrap().is_some(), "although a duplicate is open");
        assert!(!is_locked(&files.seen()).unwrap(), "although a duplicate is open");
        drop(duplicate);
        assert_eq!(file.inheritable().unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn letting_go_does_not_wait_for_whoever_makes_a_duplicate() {
        let dir = tempfile::tempdir().unwrap();
        let (hold, files) = hold(dir.path());
        let duplicating = hold.file().main.upgrade().unwrap();
        hold.free();
        assert!(lock_at(&files.main()).unwrap().is_some());
        drop(duplicating);
    }

    #[test]
    fn the_duplicate_alone_is_inherited() {
        let dir = tempfile::tempdir().unwrap();
        let (hold, _) = hold(dir.path());
        let closed_on_exec = |fd: &dyn AsFd| {
            rustix::io::fcntl_getfd(fd.as_fd()).unwrap().contains(rustix::io::FdFlags::CLOEXEC)
        };
        assert!(closed_on_exec(&hold.main.0));
        let inherited = hold.file().inheritable().unwrap();
        assert!(!closed_on_exec(&inherited) && !closed_on_exec(inherited._witness.as_ref().unwrap()));
    }

    #[test]
    fn a_witness_that_was_missed_is_locked_at_the_next_beat() {
        let dir = tempfile::tempdir().unwrap();
        let files = KeyFiles::new(dir.path(), &LockKey::new("k").unwrap());
        let onlooker = Locked::shared(open_lock(&files.seen()).unwrap()).unwrap().unwrap();
        let (mut hold, files) = hold(dir.path());
        assert!(hold.witness.is_none(), "granted all the same");
        drop(onlooker);
        assert!(!is_locked(&files.seen()).unwrap());
        assert!(hold.confirm().unwrap());
        assert!(is_locked(&files.seen()).unwrap());
        drop(hold);
        assert!(!is_locked(&files.seen()).unwrap());
    }

    #[test]
    fn a_lock_whose_file_was_replaced_is_not_confirmed() {
        let dir = tempfile::tempdir().unwrap();
        let (mut hold, files) = hold(dir.path());
        assert!(hold.confirm().unwrap());
        fs::remove_file(files.main()).unwrap();
        assert!(!hold.confirm().unwrap(), "removed");
        fs::write(files.main(), "").unwrap();
        assert!(!hold.confirm().unwrap(), "made anew");
        assert_eq!(hold.free(), (false, false));
    }
}
