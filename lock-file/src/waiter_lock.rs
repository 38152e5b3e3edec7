//! The waiter lock: a second lock file of each key, held by the waiter that is next.
//!
//! It is the turnstile of the literature (Downey, "The Little Book of Semaphores"): whoever wants the lock
//! itself has to pass it, so a client that releases and re-acquires in a loop cannot overtake a waiter. The
//! others wait for it in the kernel, which wakes one of them when it is free.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::{Timespec, Timestamps, UTIME_NOW, futimens};

use crate::files::FileMode;
use crate::kernel_wait::{KernelWaits, PendingWait};
use crate::locked_file::{LockedFile, is_locked, lock_at, lock_at_blocking};

/// How often a waiter sends a heartbeat, and for how long one counts.
pub(crate) const HEARTBEAT_EVERY: Duration = Duration::from_millis(300);
const HEARTBEAT_COUNTS_FOR: Duration = Duration::from_millis(1500);

/// Those of this process who wait for waiter locks.
static WAITS: KernelWaits<WaiterLock> = KernelWaits::new();

/// The waiter lock of a key, while this waiter holds it.
///
/// The heartbeat is the modification time of the file. Without it, a waiter that was stopped (SIGSTOP) would
/// keep everybody from a lock that is free. The exclusion of the lock itself never depends on that time.
#[derive(Debug)]
pub(crate) struct WaiterLock {
    locked: Arc<LockedFile>,
    last_heartbeat: Instant,
}

/// The answer to one attempt at a waiter lock.
#[derive(Debug)]
pub(crate) enum EnterResult {
    /// It is ours.
    First(WaiterLock),
    /// Another waiter has it.
    Behind,
    /// A waiter has it whose heartbeat has stopped.
    BehindStopped,
}

impl WaiterLock {
    /// One attempt at the waiter lock at `path`.
    pub(crate) fn enter(path: &Path, mode: FileMode) -> io::Result<EnterResult> {
        match lock_at(path, mode)? {
            Some(locked) => Self::entered(locked).map(EnterResult::First),
            None if has_heartbeat(path)? => Ok(EnterResult::Behind),
            None => Ok(EnterResult::BehindStopped),
        }
    }

    /// Waits for the waiter lock at `path` in the kernel. `None`: there is no thread for it.
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

    /// Whether the waiter that has the waiter lock at `path` has stopped, or has gone with its file.
    pub(crate) fn is_stopped(path: &Path) -> io::Result<bool> {
        match has_heartbeat(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(true),
            answer => answer.map(|beats| !beats),
        }
    }

    /// Whether a waiter that runs has the waiter lock at `path`.
    pub(crate) fn is_held(path: &Path) -> io::Result<bool> {
        Ok(is_locked(path)? && has_heartbeat(path)?)
    }

    /// The next heartbeat, if it is due: for a thread that may wait for the disk.
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
        // A heartbeat that is under way on a thread still refers to the file.
        self.locked.unlock();
    }
}

fn beat(locked: &LockedFile) -> io::Result<()> {
    // "Now" for both times: who may write to the file may set that, any other time only its owner.
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    Ok(futimens(locked.file(), &Timestamps { last_access: now, last_modification: now })?)
}

fn has_heartbeat(path: &Path) -> io::Result<bool> {
    let last = fs::symlink_metadata(path)?.modified()?;
    // A time in the future comes from a clock that has been set back since.
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
