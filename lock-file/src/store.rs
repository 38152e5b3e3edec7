//! Single steps in the directory: lock a key, enter its waiter lock, inspect it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, ErrorKind, HoldInfo, HolderId, KeyInfo, ListQuery, LockKey};
use leasehold_engine::{Contended, Request};

use crate::ask::{ask, is_asked};
use crate::directory::{look_into, prepare};
use crate::error::io_error;
use crate::files::FileMode;
use crate::gc;
use crate::hold::FileHold;
use crate::layout::KeyFiles;
use crate::locked_file::{LockedFile, is_locked, lock_at};
use crate::pool::Progress;
use crate::process_owners::ProcessOwners;
use crate::record::{Cooldown, Record, RecordRead, boot_id, ceil_ms, now_ms};
use crate::token::{self, Numbers};
use crate::waiter_lock::{EnterResult, WaiterLock};

/// How often an attempt is repeated, with a pause, while a removal of unused files might hold the lock.
const REMOVAL_TRIES: usize = 2000;
const REMOVAL_PAUSE: Duration = Duration::from_millis(1);
const REMOVAL_LOOKS: usize = 3;

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

/// A locked key that can be granted.
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
        // Checks the cooldown before locking, because an attempt that fails must not make other attempts
        // fail.
        let found = Record::read(files, &request.key)?;
        if let Some(Cooldown::Lasts(left)) = found.record().map(|r| r.cooldown(now_ms())) {
            return Ok(Err(cooling(left)));
        }
        let Some(main) = self.lock_main(files, caller)? else {
            return Ok(Err(Contended::new()));
        };
        if caller == Caller::Newcomer {
            let next = files.next();
            // Checks for a waiter under the lock only, so two checks never collide.
            if WaiterLock::is_held(&next).map_err(|e| io_error(e, "look at", &next))? {
                return Ok(Err(Contended::new()));
            }
        }
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
        let boot = boot_id();
        let numbers = token::draw(files, &request.key, last.as_ref(), boot, now, request.reserve)?;
        let record = Record {
            key: request.key.as_str().to_owned(),
            holder: request.holder.to_string(),
            label: request.label.as_deref().map(str::to_owned),
            pid: std::process::id(),
            since_ms: now,
            token: numbers.token.as_u64(),
            next: numbers.next,
            boot: boot.to_owned(),
            cooldown_ms: request.cooldown.map(ceil_ms),
        };
        Ok(Ok(ReadyToGrant { main, record, numbers }))
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

    /// Returns the state of `key` for inspection.
    pub(crate) fn inspect(&self, key: &LockKey) -> Result<KeyInfo, Error> {
        let info = info(&self.files(key), Some(key), &mut ProcessOwners::of(&self.dir))?;
        Ok(info.unwrap_or_else(|| KeyInfo::free(key.clone())))
    }

    /// Sends the holder a request to release `key`, if it has the key. Returns whether it does.
    pub(crate) fn ask(&self, key: &LockKey, holder: HolderId) -> Result<bool, Error> {
        let holds = self.inspect(key)?.holder().is_some_and(|hold| hold.holder == Some(holder));
        if holds {
            ask(&self.files(key), &holder.to_string())?;
        }
        Ok(holds)
    }

    /// Returns whether the holder has a request to release `key`. An unreadable file counts as no request.
    pub(crate) fn is_asked(&self, key: &LockKey, holder: HolderId) -> bool {
        is_asked(&self.files(key), &holder.to_string()).unwrap_or(false)
    }

    /// Returns the keys selected by `query`. Every file is a step of `progress`.
    pub(crate) fn list(&self, query: &ListQuery, progress: &Progress) -> Result<Vec<KeyInfo>, Error> {
        let unreadable = |e| io_error(e, "list", &self.dir);
        let mut infos = Vec::new();
        let entries = match fs::read_dir(&self.dir) {
            // Returns an empty list, because no key was ever locked in a missing directory.
            Err(e) if self.is_read_only && e.kind() == io::ErrorKind::NotFound => return Ok(infos),
            entries => entries.map_err(unreadable)?,
        };
        let mut owners = ProcessOwners::of(&self.dir);
        for entry in entries {
            progress.step();
            let name = entry.map_err(unreadable)?.file_name();
            let Some(files) = name.to_str().and_then(|n| KeyFiles::of_status(&self.dir, self.mode, n)) else {
                continue;
            };
            match info(&files, None, &mut owners) {
                Ok(info) => infos.extend(info),
                // Leaves out a key whose status file was replaced by another file type. Such a key cannot be
                // locked.
                Err(error) if error.kind() == ErrorKind::Corrupt => {
                    tracing::warn!("left out of the list: {error}");
                }
                // Fails, because an incomplete list would suggest that the omitted key is not held.
                Err(error) => return Err(error),
            }
        }
        infos.retain(|i| i.key.as_str().starts_with(&query.prefix));
        infos.retain(|i| i.is_held() || (query.include_ended && i.cooldown.is_some()));
        infos.sort_by(|a, b| a.key.cmp(&b.key));
        infos.truncate(query.limit.unwrap_or(usize::MAX));
        Ok(infos)
    }
}

fn name(dir: &Path) -> Arc<str> {
    format!("file://{}", dir.display()).into()
}

/// Returns the state of the key with these files, for inspection. The key is `key` if known, otherwise the
/// one in the record. If both are unknown, a held key has its file name as key, and for another key the
/// result is `None`.
fn info(
    files: &KeyFiles,
    key: Option<&LockKey>,
    owners: &mut ProcessOwners,
) -> Result<Option<KeyInfo>, Error> {
    // Reads the status first, because the record read after it is then at least as recent as the hold.
    let is_held = shows(files)?;
    let found = match read_settled(files, key)? {
        // Ignores a copied or forged record of another key.
        RecordRead::Record(record) if !files.are_of(&record.key) => RecordRead::Nothing,
        found => found,
    };
    let (mut info, hold) = match (found, key) {
        (RecordRead::Record(record), _) => {
            let mut info = KeyInfo::free(record.key()?);
            info.cooldown = record.cooldown_left(now_ms());
            let mut hold = record.info();
            hold.asked = is_held && is_asked(files, &record.holder).unwrap_or(false);
            hold.owner = is_held.then(|| owners.owner(&files.main(), record.pid));
            (info, hold)
        }
        (RecordRead::Nothing | RecordRead::Damaged(_), Some(key)) => {
            (KeyInfo::free(key.clone()), HoldInfo::new())
        }
        (RecordRead::Nothing | RecordRead::Damaged(_), None) if !is_held => return Ok(None),
        (RecordRead::Nothing | RecordRead::Damaged(_), None) => {
            // Shows the file name as the key, until the next grant repairs the key's record.
            let mut info = KeyInfo::free(LockKey::new(files.name())?);
            info.named = false;
            (info, HoldInfo::new())
        }
    };
    info.holders.extend(is_held.then_some(hold));
    Ok(Some(info))
}

/// Returns whether the key shows as held: a holder has locked the status file.
fn shows(files: &KeyFiles) -> Result<bool, Error> {
    let status = files.status();
    is_locked(&status).map_err(|e| io_error(e, "look at", &status))
}

/// Reads the record, and reads it again if the first read possibly ran into a concurrent write.
fn read_settled(files: &KeyFiles, key: Option<&LockKey>) -> Result<RecordRead, Error> {
    let mut tries = if files.mode().is_shared() { 5 } else { 1 };
    loop {
        let found = match key {
            Some(key) => Record::read(files, key)?,
            None => Record::read_any(files)?,
        };
        tries -= 1;
        if tries == 0 || !matches!(found, RecordRead::Damaged(_)) {
            return Ok(found);
        }
        std::thread::sleep(Duration::from_micros(200));
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
