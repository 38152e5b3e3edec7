//! The waiter lock: a second lock file of each key, held by the next waiter.
//!
//! It is a turnstile (Downey, "The Little Book of Semaphores"). A caller must pass it to get the lock, so a client that
//! releases and re-acquires in a loop cannot overtake a waiter. The other waiters wait for it in the kernel, which
//! wakes one of them when it is released.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::{Timespec, Timestamps, UTIME_NOW, futimens};

use crate::files::FileMode;
use crate::kernel_wait::{KernelWaits, PendingWait};
use crate::locked_file::{LockedFile, is_locked, lock_at, lock_at_blocking};

/// Interval of a waiter's heartbeats. A waiter whose last heartbeat is too old counts as stopped.
pub(crate) const HEARTBEAT_EVERY: Duration = Duration::from_millis(300);
const HEARTBEAT_COUNTS_FOR: Duration = Duration::from_millis(1500);

/// The waits of this process for waiter locks.
static WAITS: KernelWaits<WaiterLock> = KernelWaits::new();

/// The waiter lock of a key, held by this waiter.
///
/// The heartbeat is the modification time of the file. Without it, a stopped waiter (SIGSTOP) would block all callers
/// from a free lock. The exclusion of the lock itself never depends on that time.
#[derive(Debug)]
pub(crate) struct WaiterLock {
    locked: Arc<LockedFile>,
    last_heartbeat: Instant,
}

/// The result of one attempt at a waiter lock.
#[derive(Debug)]
pub(crate) enum EnterResult {
    /// This waiter holds the lock.
    First(WaiterLock),
    /// Another waiter holds the lock.
    Behind,
    /// A waiter without a recent heartbeat, which counts as stopped, holds the lock.
    BehindStopped,
}

impl WaiterLock {
    /// Makes one attempt at the waiter lock at `path`.
    pub(crate) fn enter(path: &Path, mode: FileMode) -> io::Result<EnterResult> {
        match lock_at(path, mode)? {
            Some(locked) => Self::entered(locked).map(EnterResult::First),
            None if has_heartbeat(path)? => Ok(EnterResult::Behind),
            None => Ok(EnterResult::BehindStopped),
        }
    }

    /// Waits for the waiter lock at `path` in the kernel. Returns `None` if no thread is available.
    pub(crate) fn wait_for(path: &Path, mode: FileMode) -> Option<PendingWait<Self>> {
        let at = path.to_owned();
        WAITS.wait_for(path, move |is_wanted| match lock_at_blocking(&at, mode, is_wanted)? {
            Some(locked) => Self::entered(locked).map(Some),
            None => Ok(None),
        })
    }

    fn entered(locked: LockedFile) -> io::Result<Self> {
        beat(&locked)?;
        Ok(Self { locked: Arc::new(locked), last_heartbeat: Instant::now() })
    }

    /// Returns whether the holder of the waiter lock at `path` has no recent heartbeat, or whether the file
    /// is gone.
    pub(crate) fn is_stopped(path: &Path) -> io::Result<bool> {
        match has_heartbeat(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(true),
            answer => answer.map(|beats| !beats),
        }
    }

    /// Returns whether a running waiter holds the waiter lock at `path`.
    pub(crate) fn is_held(path: &Path) -> io::Result<bool> {
        Ok(is_locked(path)? && has_heartbeat(path)?)
    }

    /// Returns the next heartbeat if it is due, for a thread that can wait for the disk.
    pub(crate) fn heartbeat(&mut self) -> Option<impl FnOnce() -> io::Result<()> + Send + 'static> {
        if self.last_heartbeat.elapsed() < HEARTBEAT_EVERY {
            return None;
        }
        self.last_heartbeat = Instant::now();
        let locked = Arc::clone(&self.locked);
        Some(move || beat(&locked))
    }
}

impl Drop for WaiterLock {
    fn drop(&mut self) {
        // Unlocks explicitly, because a heartbeat under way on a thread still refers to the file.
        self.locked.unlock();
    }
}

fn beat(locked: &LockedFile) -> io::Result<()> {
    // Sets both times to "now", because any user with write access can do that, and only the owner can set
    // another time.
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    Ok(futimens(locked.file(), &Timestamps { last_access: now, last_modification: now })?)
}

fn has_heartbeat(path: &Path) -> io::Result<bool> {
    let last = fs::symlink_metadata(path)?.modified()?;
    // Takes the distance to a time in the future, which comes from a clock that was set back since.
    let ago = SystemTime::now().duration_since(last).unwrap_or_else(|future| future.duration());
    Ok(ago <= HEARTBEAT_COUNTS_FOR)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_waiter_counts_while_its_heartbeat_lasts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("next");
        assert!(!WaiterLock::is_held(&path).unwrap());
        let EnterResult::First(mut waiter) = WaiterLock::enter(&path, FileMode::PRIVATE).unwrap() else {
            panic!("not free")
        };
        assert!(WaiterLock::is_held(&path).unwrap());
        assert!(matches!(WaiterLock::enter(&path, FileMode::PRIVATE).unwrap(), EnterResult::Behind));
        let (past, future) =
            (SystemTime::now() - 2 * HEARTBEAT_COUNTS_FOR, SystemTime::now() + 9 * HEARTBEAT_COUNTS_FOR);
        for long_ago in [past, future] {
            waiter.locked.file().set_modified(long_ago).unwrap();
            assert!(!WaiterLock::is_held(&path).unwrap());
            assert!(matches!(
                WaiterLock::enter(&path, FileMode::PRIVATE).unwrap(),
                EnterResult::BehindStopped
            ));
        }
        waiter.last_heartbeat -= HEARTBEAT_EVERY;
        waiter.heartbeat().unwrap()().unwrap();
        assert!(WaiterLock::is_held(&path).unwrap());
        drop(waiter);
        assert!(!WaiterLock::is_held(&path).unwrap());
        assert!(matches!(WaiterLock::enter(&path, FileMode::PRIVATE).unwrap(), EnterResult::First(_)));
    }
}
