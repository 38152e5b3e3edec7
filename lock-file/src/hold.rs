//! One grant: its locked files, and how a child process inherits them.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::time::Duration;

use leasehold_api::Error;
use leasehold_engine::token::Reserved;

use crate::ask::is_asked;
use crate::error::io_error;
use crate::kernel_wait::{KernelWaits, PendingWait};
use crate::layout::KeyFiles;
use crate::locked_file::{LockedFile, lock_at, wait_until_free};
use crate::record::Record;
use crate::token::Numbers;
use crate::waiter_lock::WaiterLock;

/// The waits of this process for holders, by status file.
static RELEASES: KernelWaits<bool> = KernelWaits::new();

/// How often a grant tries to lock a status file that another process inspects. A pause follows each try.
const STATUS_TRIES: usize = 20;
const STATUS_PAUSE: Duration = Duration::from_micros(200);

/// Waits in the kernel until the status files of the key and its parts were unlocked, and returns whether it had to
/// wait. This is only a hint, because the lock is released just after the status file. Returns `None` if no thread is
/// available.
///
/// Waits for the status file and not for the lock, because otherwise an abandoned wait could get the lock and
/// make other clients find it taken.
pub(crate) fn wait_for_release(files: &KeyFiles) -> Option<PendingWait<bool>> {
    let of_key = files.clone();
    RELEASES.wait_for(&files.status(), move |_| wait_for_holders(&of_key).map(Some))
}

/// Waits for an exclusive holder, or for one shared holder after the other, because all of them must leave.
fn wait_for_holders(files: &KeyFiles) -> io::Result<bool> {
    if wait_until_free(&files.status())? {
        return Ok(true);
    }
    let mut has_waited = false;
    for part in files.parts() {
        has_waited |= wait_until_free(&part.status())?;
    }
    Ok(has_waited)
}

/// One grant: the lock, and the status lock, which shows the hold to inspection.
///
/// A grant that is not exclusive has locked the key in shared mode and one part of it exclusively. Its status file and
/// record belong to the part.
///
/// Every method but [`free`](Self::free) can run while another one waits for the disk, because no disk access happens
/// under the mutex of the status.
#[derive(Debug)]
pub(crate) struct FileHold {
    /// The key's lock, exclusive or shared.
    main: LockedFile,
    /// The lock of the part. `None` if the grant is exclusive.
    part: Option<LockedFile>,
    status: Mutex<StatusLock>,
    /// Held while the record is written. The lock stays during that time, because a successor writes the same file.
    record: Mutex<()>,
    /// Whether the grant has ended. A writer of the record that finds this set afterwards unlocks.
    ended: AtomicBool,
    /// The files of the key, or of the part.
    files: KeyFiles,
    numbers: Numbers,
}

/// The lock of the status file, if available.
#[derive(Clone, Debug)]
enum StatusLock {
    NotLocked,
    Locked(Arc<LockedFile>),
    /// The grant has ended, so the status file must not be locked again.
    Released,
}

impl FileHold {
    /// Creates the grant of a caller that has locked `main` and written its record.
    pub(crate) fn new(main: LockedFile, files: KeyFiles, numbers: Numbers) -> Self {
        Self::shown(main, None, files, numbers)
    }

    /// Creates the grant of a caller that has locked `main` in shared mode, the part with these files, and written the
    /// part's record.
    pub(crate) fn of_part(main: LockedFile, part: LockedFile, files: KeyFiles, numbers: Numbers) -> Self {
        Self::shown(main, Some(part), files, numbers)
    }

    fn shown(main: LockedFile, part: Option<LockedFile>, files: KeyFiles, numbers: Numbers) -> Self {
        let (status, record) = (Mutex::new(StatusLock::NotLocked), Mutex::new(()));
        let hold = Self { main, part, status, record, ended: AtomicBool::new(false), files, numbers };
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

    /// Locks the status file, unless it is locked already or being inspected. The grant does not depend on
    /// this lock.
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
                // Drops the new lock, which unlocks the status file, if the hold was released during the
                // attempt.
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

    pub(crate) fn numbers(&self) -> Numbers {
        self.numbers
    }

    /// Returns the tokens for further callers of this client. None without the exclusive lock, because all holders of
    /// the key have the same token then.
    pub(crate) fn reserved(&self) -> Reserved {
        if self.part.is_some() { Reserved::default() } else { self.numbers.reserved() }
    }

    /// Returns the number of the part, or `None` if the grant is exclusive.
    pub(crate) fn part_number(&self) -> Option<u32> {
        self.files.part_number()
    }

    /// Returns whether `holder` has a request to release. An unreadable file counts as no request.
    pub(crate) fn is_asked(&self, holder: &str) -> bool {
        is_asked(&self.files, holder).unwrap_or(false)
    }

    /// Returns whether the lock files still belong to the key: `false` if one was removed or replaced.
    pub(crate) fn confirm(&self) -> Result<bool, Error> {
        let is_there = self.has_files()?;
        if is_there {
            self.lock_status();
        }
        Ok(is_there)
    }

    fn has_files(&self) -> Result<bool, Error> {
        let part = self.part.as_ref().map(|part| (part, self.files.main()));
        for (lock, path) in part.into_iter().chain([(&self.main, self.files.main_of_key())]) {
            if !lock.is_at(&path).map_err(|e| io_error(e, "confirm the lock of", &path))? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Ends the cooldown of this unused grant. Call it while the lock is held.
    pub(crate) fn end_cooldown(&self) {
        // Skips the record if the lock file was replaced, because the record then belongs to another holder.
        let ended = match self.has_files() {
            Ok(true) => Record::end_cooldown(&self.files, self.numbers.token),
            Ok(false) => Ok(()),
            Err(error) => Err(error),
        };
        if let Err(error) = ended {
            tracing::warn!(%error, "an attempt is undone, but its cooldown stays");
        }
    }

    /// Replaces the label in the record. Returns `false` if the grant has ended.
    pub(crate) fn relabel(&self, label: &str) -> Result<bool, Error> {
        let writing = lock(&self.record);
        let relabelled = match self.has_files() {
            Ok(true) if !self.ended.load(Ordering::SeqCst) => {
                Record::relabel(&self.files, self.numbers.token, label).map(|()| true)
            }
            Ok(_) => Ok(false),
            Err(error) => Err(error),
        };
        drop(writing);
        if self.ended.load(Ordering::SeqCst) {
            self.unlock_files();
        }
        relabelled
    }

    /// Unlocks. Returns whether the lock was held until now, and whether other clients wait.
    pub(crate) fn free(&self) -> (bool, bool) {
        let _written = lock(&self.record);
        self.ended.store(true, Ordering::SeqCst);
        // Ignores errors of both checks, because unlocking does not depend on their results.
        let was_held = self.has_files().unwrap_or(true);
        // Checks for waiters while the lock is held, because only other holders then check the waiter lock. A
        // check can make a waiter's attempt fail.
        let waiters = WaiterLock::is_held(&self.files.next()).unwrap_or(false);
        self.unlock_files();
        (was_held, waiters)
    }

    /// Unlocks. Skips the checks of the files, because they can wait for the disk. If the record is being written,
    /// its writer unlocks.
    pub(crate) fn unlock(&self) {
        self.ended.store(true, Ordering::SeqCst);
        if !matches!(self.record.try_lock(), Err(TryLockError::WouldBlock)) {
            self.unlock_files();
        }
    }

    fn unlock_files(&self) {
        // Unlocks the status file first, because a process that finds the lock unlocked must not see it held.
        // Unlocks explicitly, because a confirmation or a duplicated descriptor might still have a reference.
        if let StatusLock::Locked(status) = std::mem::replace(&mut *lock(&self.status), StatusLock::Released)
        {
            status.unlock();
        }
        // Unlocks the part before the key, because the part must be free for the next mode.
        if let Some(part) = &self.part {
            part.unlock();
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
    // Ignores poisoning, because values under the mutex are replaced as a whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The locked file of a grant, returned by [`LockGuard::extension`](leasehold_api::LockGuard::extension) for the file
/// store.
///
/// It lets a process pass the lock to a child. If the parent is killed, the lock stays held until the child ends.
#[derive(Clone)]
pub struct HeldFile(Weak<FileHold>);

/// Descriptors that child processes inherit. See [`HeldFile::inheritable`].
#[derive(Debug)]
pub struct Inheritable {
    /// Descriptor of the status file, for inspection. Created first, so an ending process closes it first.
    _status: Option<OwnedFd>,
    /// Descriptor of the part's lock file, unless the grant is exclusive.
    _part: Option<OwnedFd>,
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

    /// Duplicates the descriptors of the lock files and the status file, for child processes to inherit. A shared grant
    /// or a permit has two lock files, and stays held only if a child inherits both.
    ///
    /// The lock belongs to the open file, which all duplicates share. If the guard is released or dropped, the file is
    /// unlocked for all of them. If this process dies first, the lock lasts until all processes with the duplicates
    /// have closed them or died.
    ///
    /// Every process started while the duplicates are open inherits them. Create them just before starting the child,
    /// and drop them just after.
    ///
    /// # Errors
    ///
    /// [`NotFound`](io::ErrorKind::NotFound) if the lock has been released. Otherwise the system's error, such as too
    /// many open files.
    pub fn inheritable(&self) -> io::Result<Inheritable> {
        let released =
            || io::Error::new(io::ErrorKind::NotFound, "the lock has been released; acquire it first");
        let hold = self.0.upgrade().ok_or_else(released)?;
        // Duplicates by `dup`, because its descriptor stays open when another program is executed.
        let status = match hold.status() {
            StatusLock::Released => return Err(released()),
            StatusLock::NotLocked => None,
            StatusLock::Locked(status) => Some(rustix::io::dup(status.file())?),
        };
        let part = hold.part.as_ref().map(|part| rustix::io::dup(part.file())).transpose()?;
        Ok(Inheritable { _status: status, _part: part, main: rustix::io::dup(hold.main.file())? })
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
    use leasehold_api::{ErrorKind, FencingToken, LockKey};
    use std::fs;
    use std::path::Path;

    fn hold(dir: &Path) -> (Arc<FileHold>, KeyFiles) {
        let files = KeyFiles::new(dir, FileMode::PRIVATE, &LockKey::new("k").unwrap());
        let main = lock_at(&files.main(), FileMode::PRIVATE).unwrap().unwrap();
        let numbers = Numbers { token: FencingToken::from_u64(7), next: 1 };
        (Arc::new(FileHold::new(main, files.clone(), numbers)), files)
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

    fn record(token: u64, label: &str) -> Record {
        Record { token, label: Some(label.to_owned()), ..Record::for_tests("k", 9, "b") }
    }

    fn label(files: &KeyFiles) -> Option<String> {
        Record::read_any(files).unwrap().record().unwrap().label.clone()
    }

    #[test]
    fn a_label_is_changed_in_the_record_of_its_grant_alone() {
        let dir = tempfile::tempdir().unwrap();
        let (hold, files) = hold(dir.path());
        record(7, "old").write(&files).unwrap();
        assert!(hold.relabel("new").unwrap());
        assert_eq!(label(&files).as_deref(), Some("new"));
        // Stands for the record of a successor, which got the key after the lock file was removed.
        record(8, "next").write(&files).unwrap();
        assert_eq!(hold.relabel("late").unwrap_err().kind(), ErrorKind::Corrupt);
        fs::remove_file(files.main()).unwrap();
        assert!(!hold.relabel("late").unwrap());
        assert_eq!(label(&files).as_deref(), Some("next"));
    }

    #[test]
    fn a_lock_is_held_until_its_record_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let is_locked = |files: &KeyFiles| lock_at(&files.main(), FileMode::PRIVATE).unwrap().is_none();
        for aborted in [false, true] {
            let (hold, files) = hold(dir.path());
            record(7, "old").write(&files).unwrap();
            // Stands for a write of the record that waits for the disk.
            let writing = lock(&hold.record);
            std::thread::scope(|threads| {
                let release = (!aborted).then(|| threads.spawn(|| hold.free()));
                if aborted {
                    hold.unlock();
                }
                for _ in 0..500 {
                    assert!(is_locked(&files), "a successor would write the same file");
                }
                drop(writing);
                if let Some(release) = release {
                    assert_eq!(release.join().unwrap(), (true, false));
                }
            });
            assert!(!hold.relabel("late").unwrap(), "the grant has ended");
            assert!(!is_locked(&files));
            assert_eq!(label(&files).as_deref(), Some("old"));
        }
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
        // A confirmation that is still under way must not lock the status file of the released lock.
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
