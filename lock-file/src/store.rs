//! Single steps in the directory: lock a key, enter its waiter lock.

mod inspect;
mod shared;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, LockKey, Mode};
use leasehold_engine::{Contended, Request};

use crate::directory::{look_into, prepare};
use crate::error::io_error;
use crate::files::FileMode;
use crate::gc;
use crate::hold::FileHold;
use crate::layout::KeyFiles;
use crate::locked_file::{LockedFile, is_locked, lock_at};
use crate::record::{Cooldown, Record, RecordRead, SharedMode, boot_id, ceil_ms, is_boot_known, now_ms};
use crate::token::{self, Numbers};
use crate::waiter_lock::{EnterResult, WaiterLock};

/// How often an attempt is repeated, with a pause, while a removal of unused files might hold the lock.
const REMOVAL_TRIES: usize = 2000;
const REMOVAL_PAUSE: Duration = Duration::from_millis(1);
const REMOVAL_LOOKS: usize = 3;

/// The largest number of permits of one key. An attempt at a full semaphore tries the file of each permit.
pub(crate) const MAX_PERMITS: u32 = 1024;

/// The directory. Its methods never wait for another holder, but can wait for the disk.
#[derive(Debug)]
pub(crate) struct FileStore {
    dir: PathBuf,
    mode: FileMode,
    is_read_only: bool,
    name: Arc<str>,
}

/// The result of one attempt.
#[derive(Debug)]
pub(crate) enum TakeResult {
    Hold(FileHold),
    Contended(Contended),
    /// The attempt failed without effect: it holds no lock and wrote no record.
    Refused(Error),
}

/// The kind of caller that makes an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Caller {
    /// A caller that has not waited, and yields to a waiter.
    Newcomer,
    /// The holder of the waiter lock, or a waiter behind a stopped holder.
    Waiter,
}

/// A locked key that can be granted exclusively.
struct ReadyToGrant {
    main: LockedFile,
    record: Record,
    numbers: Numbers,
}

impl FileStore {
    /// Opens the directory with files of this mode, and creates it if it is missing.
    pub(crate) fn open(dir: &Path, mode: Option<FileMode>) -> Result<Self, Error> {
        let (dir, mode) = prepare(dir, mode).map_err(|e| e.with_store(name(dir)))?;
        Ok(Self { name: name(&dir), dir, mode, is_read_only: false })
    }

    /// Opens the directory for inspection, and creates nothing.
    pub(crate) fn open_read_only(dir: &Path) -> Result<Self, Error> {
        let (dir, mode) = look_into(dir).map_err(|e| e.with_store(name(dir)))?;
        Ok(Self { name: name(&dir), dir, mode, is_read_only: true })
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.is_read_only
    }

    pub(crate) fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// Makes one attempt at the key's lock. After an error the key is not held, but its cooldown might have begun and
    /// could not be undone.
    pub(crate) fn take(&self, request: &Request, caller: Caller) -> Result<TakeResult, Error> {
        let files = self.files(&request.key);
        match request.mode {
            Mode::Exclusive => {}
            Mode::Shared => return Ok(self.take_part(&files, request, SharedMode::Shared, caller)),
            Mode::Permit { of } if (1..=MAX_PERMITS).contains(&of) => {
                return Ok(self.take_part(&files, request, SharedMode::Permits(of), caller));
            }
            _ => return Ok(TakeResult::Refused(Error::unsupported("such mode").with_key(&request.key))),
        }
        let ready = match self.lock(&files, request, caller) {
            Ok(Ok(ready)) => ready,
            Ok(Err(contended)) => return Ok(TakeResult::Contended(contended)),
            Err(error) => return Ok(TakeResult::Refused(error)),
        };
        match ready.record.write(&files) {
            Ok(()) => Ok(TakeResult::Hold(FileHold::new(ready.main, files, ready.numbers))),
            // Writes the record again without its cooldown: it is flushed after the rename, so it exists even
            // if the flush failed.
            Err(error) if request.cooldown.is_some() => {
                let undone = ready.record.without_cooldown().write(&files);
                if undone.is_ok() { Ok(TakeResult::Refused(error)) } else { Err(error) }
            }
            Err(error) => Ok(TakeResult::Refused(error)),
        }
    }

    /// Prepares a grant, up to writing the record. An error leaves no lock.
    fn lock(
        &self,
        files: &KeyFiles,
        request: &Request,
        caller: Caller,
    ) -> Result<Result<ReadyToGrant, Contended>, Error> {
        if let Some(left) = cooling_for(files, &request.key)? {
            return Ok(Err(cooling(left)));
        }
        let Some(main) = self.lock_main(files, caller)? else {
            return Ok(Err(Contended::new()));
        };
        // Checks for a waiter under the lock only, because a check can make a waiter's attempt fail.
        if must_yield(files, caller)? {
            return Ok(Err(Contended::new()));
        }
        let next = next_grant(files, request)?;
        Ok(next.map(|(record, numbers)| ReadyToGrant { main, record, numbers }))
    }

    pub(crate) fn files(&self, key: &LockKey) -> KeyFiles {
        KeyFiles::new(&self.dir, self.mode, key)
    }

    /// Makes one attempt at the lock itself. A newcomer is not rejected because of a removal of unused files, which
    /// holds the lock briefly. The lock counts as taken if the status file is locked, or if several checks find no
    /// removal.
    fn lock_main(&self, files: &KeyFiles, caller: Caller) -> Result<Option<LockedFile>, Error> {
        let (main, mut looks) = (files.main(), 0);
        for _ in 0..REMOVAL_TRIES {
            let locked = self.with_dir(&main, lock_at)?;
            if locked.is_some() || caller == Caller::Waiter || shows(files)? {
                return Ok(locked);
            }
            if gc::is_under_way(&self.dir) {
                looks = 0;
                std::thread::sleep(REMOVAL_PAUSE);
            } else {
                looks += 1;
                if looks == REMOVAL_LOOKS {
                    break;
                }
            }
        }
        Ok(None)
    }

    /// Makes one attempt at the waiter lock of `key`, whose holder gets the lock next.
    pub(crate) fn enter_waiter_lock(&self, key: &LockKey) -> Result<EnterResult, Error> {
        self.with_dir(&self.files(key).next(), WaiterLock::enter)
    }

    /// Locks the file at `path` by `lock`, and creates the directory again if it is gone.
    fn with_dir<T>(&self, path: &Path, lock: impl Fn(&Path, FileMode) -> io::Result<T>) -> Result<T, Error> {
        let answer = match lock(path, self.mode) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                // Creates the removed directory again. The next confirmation reports its earlier holds as
                // lost.
                prepare(&self.dir, Some(self.mode))?;
                lock(path, self.mode)
            }
            answer => answer,
        };
        answer.map_err(|e| io_error(e, "lock", path))
    }
}

fn name(dir: &Path) -> Arc<str> {
    format!("file://{}", dir.display()).into()
}

/// Returns whether a holder has locked the status file of the key (an exclusive holder) or of the part.
fn shows(files: &KeyFiles) -> Result<bool, Error> {
    let status = files.status();
    is_locked(&status).map_err(|e| io_error(e, "look at", &status))
}

/// Returns the rest of a cooldown. Checked before locking, because an attempt that fails must not make other attempts
/// fail.
fn cooling_for(files: &KeyFiles, key: &LockKey) -> Result<Option<Duration>, Error> {
    match Record::read(files, key)?.record().map(|record| record.cooldown(now_ms())) {
        Some(Cooldown::Lasts(left)) => Ok(Some(left)),
        _ => Ok(None),
    }
}

/// Returns whether a waiter is ahead of this caller, which has the key's lock.
fn must_yield(files: &KeyFiles, caller: Caller) -> Result<bool, Error> {
    let next = files.next();
    Ok(caller == Caller::Newcomer && WaiterLock::is_held(&next).map_err(|e| io_error(e, "look at", &next))?)
}

/// Draws the token of the next grant, and returns its record to be written. The caller has the key's exclusive lock. A
/// shared request gets the record of its mode.
fn next_grant(files: &KeyFiles, request: &Request) -> Result<Result<(Record, Numbers), Contended>, Error> {
    let last = match Record::read(files, &request.key)? {
        RecordRead::Record(record) => Some(record),
        RecordRead::Nothing => None,
        RecordRead::Damaged(error) => {
            tracing::warn!(%error, file = %files.record().display(), key = %request.key,
                "the record of the last grant is damaged and is written anew; tokens are safe, a cooldown in it is lost");
            None
        }
    };
    let now = now_ms();
    match last.as_ref().map(|r| (r, r.cooldown(now))) {
        None | Some((_, Cooldown::Over)) => {}
        Some((_, Cooldown::Lasts(left))) => return Ok(Err(cooling(left))),
        Some((last, Cooldown::ClockWentBack(window))) => {
            // Restarts the cooldown now. Otherwise callers would be early, or wait until the clock
            // catches up.
            Record { since_ms: now, ..last.clone() }.write(files)?;
            return Ok(Err(cooling(window)));
        }
    }
    let mode = SharedMode::of(request.mode);
    let reserve = if mode.is_none() { request.reserve } else { 0 };
    let numbers = token::draw(files, &request.key, last.as_ref(), boot_id(), now, reserve)?;
    let leaves_mode = mode.is_none() && last.is_some_and(|last| last.mode.is_some());
    Ok(Ok((grant_record(request, numbers, leaves_mode && !is_boot_known()), numbers)))
}

fn grant_record(request: &Request, numbers: Numbers, is_flushed: bool) -> Record {
    Record {
        key: request.key.as_str().to_owned(),
        holder: request.holder.to_string(),
        label: request.label.as_deref().map(str::to_owned),
        pid: std::process::id(),
        since_ms: now_ms(),
        token: numbers.token.as_u64(),
        next: numbers.next,
        boot: boot_id().to_owned(),
        cooldown_ms: request.cooldown.map(ceil_ms),
        mode: SharedMode::of(request.mode),
        is_flushed,
    }
}

fn cooling(left: Duration) -> Contended {
    let mut contended = Contended::new();
    contended.retry_after = Some(left);
    contended.cooling_for = Some(left);
    contended
}

#[cfg(test)]
mod tests {
    use std::fs;

    use leasehold_api::HolderId;

    use super::*;

    #[test]
    fn whoever_waits_goes_first() {
        let dir = tempfile::tempdir().unwrap();
        let store = FileStore::open(dir.path(), None).unwrap();
        let key = LockKey::new("k").unwrap();
        let request = Request::new(key.clone(), HolderId::from_parts(1, 1));
        let EnterResult::First(waiter) = store.enter_waiter_lock(&key).unwrap() else { panic!("not free") };
        for _ in 0..3 {
            // The attempt is contended although the lock is free.
            let answer = store.take(&request, Caller::Newcomer).unwrap();
            assert!(matches!(answer, TakeResult::Contended(_)));
        }
        let taken = store.take(&request, Caller::Waiter).unwrap();
        assert!(matches!(taken, TakeResult::Hold(_)));
        drop((taken, waiter));
        let taken = store.take(&request, Caller::Newcomer).unwrap();
        assert!(matches!(taken, TakeResult::Hold(_)));
    }

    #[test]
    fn what_fails_after_a_cooldown_may_have_begun_is_not_known() {
        let dir = tempfile::tempdir().unwrap();
        let store = FileStore::open(dir.path(), None).unwrap();
        let mut request = Request::new(LockKey::new("k").unwrap(), HolderId::from_parts(1, 1));
        // Puts a directory in place of the record's temporary file, so the record cannot be written.
        let mut temporary = KeyFiles::new(&store.dir, store.mode, &request.key).record().into_os_string();
        temporary.push(".tmp");
        fs::create_dir(&temporary).unwrap();
        assert!(matches!(store.take(&request, Caller::Newcomer).unwrap(), TakeResult::Refused(_)));
        request.cooldown = Some(Duration::from_secs(1));
        assert!(store.take(&request, Caller::Newcomer).is_err());
        fs::remove_dir(&temporary).unwrap();
        assert!(matches!(store.take(&request, Caller::Newcomer).unwrap(), TakeResult::Hold(_)));
    }
}
