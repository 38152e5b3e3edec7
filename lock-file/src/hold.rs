//! One grant: its locked files, and how a child process inherits them.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use leasehold_api::{Error, FencingToken};

use crate::error::io_error;
use crate::kernel_wait::{KernelWaits, PendingWait};
use crate::layout::KeyFiles;
use crate::locked_file::{LockedFile, lock_at, wait_until_free};
use crate::record::Record;
use crate::waiter_lock::WaiterLock;

/// Those of this process who wait for holders, one for each key: whoever is next.
static RELEASES: KernelWaits<bool> = KernelWaits::new();

/// How often, and how long apart, a grant tries again to lock a status file that somebody looks at just now.
const STATUS_TRIES: usize = 20;
const STATUS_PAUSE: Duration = Duration::from_micros(200);

/// Waits in the kernel until nobody shows as the holder of the key with these files, and says whether that took any
/// waiting. A hint: the lock itself is let go just after the status that shows it. `None`: there is no thread for it.
///
/// The status is what is waited for, because somebody who has given up and is woken all the same would make others
/// find the lock taken.
pub(crate) fn wait_for_release(files: &KeyFiles) -> Option<PendingWait<bool>> {
    let status = files.status();
    RELEASES.wait_for(&files.status(), move |_| wait_until_free(&status).map(Some))
}

/// One grant: the lock, and the status lock that shows it to inspection.
///
/// Every method can run while another one waits for the disk: nothing waits for the disk under the mutex.
#[derive(Debug)]
pub(crate) struct FileHold {
    main: LockedFile,
    status: Mutex<StatusLock>,
    files: KeyFiles,
    token: FencingToken,
}

/// The lock of the status file, as far as it could be had.
#[derive(Clone, Debug)]
enum StatusLock {
    NotLocked,
    Locked(Arc<LockedFile>),
    /// The grant has ended, and with it the right to lock the status file.
    Released,
}

impl FileHold {
    /// The grant of whoever has locked `main` and written its record.
    pub(crate) fn new(main: LockedFile, files: KeyFiles, token: FencingToken) -> Self {
        let hold = Self { main, status: Mutex::new(StatusLock::NotLocked), files, token };
        for _ in 0..STATUS_TRIES {
            hold.lock_status();
            if matches!(hold.status(), StatusLock::Locked(_)) {
                return hold;
            }
            std::thread::sleep(STATUS_PAUSE);
        }
        tracing::debug!(file = %hold.files.status().display(), "the status file is being looked at; it is locked later");
        hold
    }

    /// Locks the status file, unless that has been done or somebody looks at it just now. The grant does not
    /// depend on it.
    fn lock_status(&self) {
        let path = self.files.status();
        match self.status() {
            StatusLock::Released => return,
            StatusLock::Locked(locked) if locked.is_at(&path).unwrap_or(true) => return,
            StatusLock::Locked(_) | StatusLock::NotLocked => {}
        }
        match lock_at(&path, self.files.mode()) {
            Ok(Some(locked)) => {
                let mut status = lock(&self.status);
                // Released meanwhile, it is unlocked again.
                if !matches!(*status, StatusLock::Released) {
                    *status = StatusLock::Locked(Arc::new(locked));
                }
            }
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(%error, file = %path.display(), "cannot lock the status file: the lock holds, but does not show in lists");
            }
        }
    }

    fn status(&self) -> StatusLock {
        lock(&self.status).clone()
    }

    pub(crate) fn token(&self) -> FencingToken {
        self.token
    }

    /// Whether the lock is still that of its key, which ends when somebody removes or replaces the file.
    pub(crate) fn confirm(&self) -> Result<bool, Error> {
        let path = self.files.main();
        let is_there = self.main.is_at(&path).map_err(|e| io_error(e, "confirm the lock of", &path))?;
        if is_there {
            self.lock_status();
        }
        Ok(is_there)
    }

    /// Ends the cooldown that this grant has begun: nobody has had it. While the lock is still ours.
    pub(crate) fn end_cooldown(&self) {
        // Not while the lock is another file's: its record is another holder's by now.
        let ended = match self.main.is_at(&self.files.main()) {
            Ok(true) => Record::end_cooldown(&self.files, self.token),
            Ok(false) => Ok(()),
            Err(error) => Err(io_error(error, "look at", &self.files.main())),
        };
        if let Err(error) = ended {
            tracing::warn!(%error, "an attempt is undone, but its cooldown stays");
        }
    }

    /// Unlocks. Says whether it was held until now, and whether others wait.
    pub(crate) fn free(&self) -> (bool, bool) {
        // The answers are for the caller's information: unlocking does not depend on them.
        let was_held = self.main.is_at(&self.files.main()).unwrap_or(true);
        // While the lock is still ours, nobody else looks at the waiter lock, so no waiter fails to lock it
        // because of this look.
        let waiters = WaiterLock::is_held(&self.files.next()).unwrap_or(false);
        self.unlock();
        (was_held, waiters)
    }

    /// Unlocks without looking at the files, so without waiting for the disk.
    pub(crate) fn unlock(&self) {
        // First the status: whoever sees the lock free must not see it held. And not by dropping the last
        // reference: somebody may be confirming it or duplicating its descriptor.
        if let StatusLock::Locked(status) = std::mem::replace(&mut *lock(&self.status), StatusLock::Released)
        {
            status.unlock();
        }
        self.main.unlock();
    }
}

impl Drop for FileHold {
    fn drop(&mut self) {
        self.unlock();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is under it is replaced as a whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The locked file of a grant: what [`LockGuard::extension`](leasehold_api::LockGuard::extension) finds
/// for the file store.
///
/// It lets a process hand the lock on to a child, so that the lock of a parent that was killed is not
/// free before the child is gone.
#[derive(Clone)]
pub struct HeldFile(Weak<FileHold>);

/// Descriptors that child processes inherit, see [`HeldFile::inheritable`].
#[derive(Debug)]
pub struct Inheritable {
    /// What inspection looks at. Made first, so that a process that ends closes it first.
    _status: Option<OwnedFd>,
    main: OwnedFd,
}

impl AsFd for Inheritable {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.main.as_fd()
    }
}

impl HeldFile {
    pub(crate) fn of(hold: &Arc<FileHold>) -> Self {
        Self(Arc::downgrade(hold))
    }

    /// Duplicates of the locked file's descriptor, and of what shows the lock to others, that child processes
    /// inherit.
    ///
    /// The lock belongs to the open file, which duplicates share. Releasing the guard, or dropping it,
    /// unlocks it for all of them. If instead this process dies without having done so, the lock
    /// lasts until every process that has inherited the duplicates has closed them or has died.
    ///
    /// Every process started while the duplicates are open inherits them: make them just before starting the
    /// child and drop them just after.
    ///
    /// # Errors
    ///
    /// [`NotFound`](io::ErrorKind::NotFound) when the lock has been released; else what the system
    /// answers, such as too many open files.
    pub fn inheritable(&self) -> io::Result<Inheritable> {
        let released =
            || io::Error::new(io::ErrorKind::NotFound, "the lock has been released; acquire it first");
        let hold = self.0.upgrade().ok_or_else(released)?;
        // A plain duplicate is not closed when another program is executed.
        let status = match hold.status() {
            StatusLock::Released => return Err(released()),
            StatusLock::NotLocked => None,
            StatusLock::Locked(status) => Some(rustix::io::dup(status.file())?),
        };
        Ok(Inheritable { _status: status, main: rustix::io::dup(hold.main.file())? })
    }
}

impl fmt::Debug for HeldFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hold = self.0.upgrade();
        let released = hold.is_none_or(|h| matches!(h.status(), StatusLock::Released));
        f.debug_struct("HeldFile").field("released", &released).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::{FileMode, open_lock};
    use crate::locked_file::is_locked;
    use leasehold_api::LockKey;
    use std::fs;
    use std::path::Path;

    fn hold(dir: &Path) -> (Arc<FileHold>, KeyFiles) {
        let files = KeyFiles::new(dir, FileMode::PRIVATE, &LockKey::new("k").unwrap());
        let main = lock_at(&files.main(), FileMode::PRIVATE).unwrap().unwrap();
        (Arc::new(FileHold::new(main, files.clone(), FencingToken::from_u64(7))), files)
    }

    #[test]
    fn a_release_unlocks_inherited_duplicates_too() {
        let dir = tempfile::tempdir().unwrap();
        let (hold, files) = hold(dir.path());
        let file = HeldFile::of(&hold);
        let duplicate = file.inheritable().unwrap();
        assert!(lock_at(&files.main(), FileMode::PRIVATE).unwrap().is_none());
        assert_eq!(hold.free(), (true, false));
        assert!(lock_at(&files.main(), FileMode::PRIVATE).unwrap().is_some(), "although a duplicate is open");
        assert!(!is_locked(&files.status()).unwrap(), "although a duplicate is open");
        drop(duplicate);
        assert_eq!(file.inheritable().unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_release_needs_not_the_last_reference() {
        let dir = tempfile::tempdir().unwrap();
        let (hold, files) = hold(dir.path());
        let file = HeldFile::of(&hold);
        let confirming = Arc::clone(&hold);
        hold.free();
        assert!(lock_at(&files.main(), FileMode::PRIVATE).unwrap().is_some());
        assert_eq!(file.inheritable().unwrap_err().kind(), io::ErrorKind::NotFound);
        // One that was under way does not lock the status of a lock that is free.
        confirming.confirm().unwrap();
        assert!(!is_locked(&files.status()).unwrap());
    }

    #[test]
    fn the_duplicate_alone_is_inherited() {
        let dir = tempfile::tempdir().unwrap();
        let (hold, _) = hold(dir.path());
        let closed_on_exec = |fd: &dyn AsFd| {
            rustix::io::fcntl_getfd(fd.as_fd()).unwrap().contains(rustix::io::FdFlags::CLOEXEC)
        };
        assert!(closed_on_exec(hold.main.file()));
        let inherited = HeldFile::of(&hold).inheritable().unwrap();
        assert!(!closed_on_exec(&inherited) && !closed_on_exec(inherited._status.as_ref().unwrap()));
    }

    #[test]
    fn a_status_file_that_was_busy_is_locked_by_the_next_confirmation() {
        let dir = tempfile::tempdir().unwrap();
        let files = KeyFiles::new(dir.path(), FileMode::PRIVATE, &LockKey::new("k").unwrap());
        let onlooker =
            LockedFile::shared(open_lock(&files.status(), FileMode::PRIVATE).unwrap()).unwrap().unwrap();
        let (hold, files) = hold(dir.path());
        assert!(matches!(hold.status(), StatusLock::NotLocked), "granted all the same");
        drop(onlooker);
        assert!(!is_locked(&files.status()).unwrap());
        assert!(hold.confirm().unwrap());
        assert!(is_locked(&files.status()).unwrap());
        drop(hold);
        assert!(!is_locked(&files.status()).unwrap());
    }

    #[test]
    fn a_lock_whose_file_was_replaced_is_not_confirmed() {
        let dir = tempfile::tempdir().unwrap();
        let (hold, files) = hold(dir.path());
        assert!(hold.confirm().unwrap());
        fs::remove_file(files.main()).unwrap();
        assert!(!hold.confirm().unwrap(), "removed");
        fs::write(files.main(), "").unwrap();
        assert!(!hold.confirm().unwrap(), "made anew");
        assert_eq!(hold.free(), (false, false));
    }
}
