//! Removes the files of unused keys.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

use leasehold_api::{Error, ErrorKind};

use crate::directory::{look_into, marker};
use crate::error::{io_error, is_full, wants_room};
use crate::files::{FileMode, open_to_look};
use crate::layout::KeyFiles;
use crate::locked_file::{LockedFile, lock_at};
use crate::record::{Cooldown, Record, RecordRead, now_ms};
use crate::token;

const BEGIN_TRIES: usize = 50;
const BEGIN_PAUSE: Duration = Duration::from_millis(1);

/// The outcome of a removal, in keys.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// Keys whose files were removed.
    pub removed: usize,
    /// Keys that are held, awaited, cooling down, recently used or damaged, or whose files this user cannot remove.
    pub kept: usize,
}

/// Removes the files of keys in `dir` without a holder or waiter that were last granted `unused_for` ago.
pub(crate) fn collect(dir: &Path, unused_for: Duration) -> Result<Collected, Error> {
    let (dir, mode) = look_into(dir)?;
    collect_below(&dir, mode, unused_for, &|least| token::raise_floor(&dir, mode, least))
}

/// Works like [`collect`], but stores the floor (the largest number drawn for any removed key) by
/// `raise_floor`, which tests replace.
fn collect_below(
    dir: &Path,
    mode: FileMode,
    unused_for: Duration,
    raise_floor: &dyn Fn(u64) -> Result<u64, Error>,
) -> Result<Collected, Error> {
    let keys = match keys(dir, mode) {
        Ok(keys) => keys,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Collected::default()),
        Err(e) => return Err(io_error(e, "list", dir)),
    };
    let Some(_collecting) = begin(dir)? else { return Ok(Collected { removed: 0, kept: keys.len() }) };
    // Stores the floor before the first removal, because it replaces the token ceilings of all removed keys.
    let candidates: Vec<_> =
        keys.iter().filter_map(|files| Some((files, last_number(files, unused_for)?))).collect();
    let floor = candidates.iter().map(|(_, last)| *last).max().unwrap_or(0);
    let mut raised = raise_floor(floor);
    // If a full disk has no room for the floor, first removes files that the tokens do not need.
    for (files, _) in &candidates {
        if !raised.as_ref().is_err_and(wants_room) {
            break;
        }
        if unless_foreign(make_room(files), files)? {
            raised = raise_floor(floor);
        }
    }
    let floor = raised?;
    let mut removed = 0;
    for (files, _) in candidates {
        removed += usize::from(unless_foreign(remove(files, floor), files)?);
    }
    Ok(Collected { removed, kept: keys.len() - removed })
}

/// Returns whether files were removed. Files that this user cannot remove count as kept: another user's files
/// in a sticky directory, and paths that are not plain files. So does a key whose missing lock file does not
/// fit on the disk.
fn unless_foreign(removed: io::Result<bool>, files: &KeyFiles) -> Result<bool, Error> {
    match removed {
        Err(e) if [io::ErrorKind::PermissionDenied, io::ErrorKind::InvalidData].contains(&e.kind()) => {
            Ok(false)
        }
        Err(e) if is_full(&e) => Ok(false),
        answer => answer.map_err(|e| io_error(e, "remove the files of an unused key beside", &files.main())),
    }
}

/// Returns whether a removal is running, which might be the holder of a lock.
pub(crate) fn is_under_way(dir: &Path) -> bool {
    let look = open_to_look(&marker(dir)).and_then(LockedFile::shared);
    matches!(look, Ok(None))
}

/// Starts a removal. Returns `None` if the store has no marker yet.
fn begin(dir: &Path) -> Result<Option<LockedFile>, Error> {
    let path = marker(dir);
    for _ in 0..BEGIN_TRIES {
        match open_to_look(&path).and_then(LockedFile::exclusive) {
            Ok(Some(locked)) => return Ok(Some(locked)),
            Ok(None) => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(io_error(e, "lock", &path)),
        }
        // Tries again, because the lock might belong to a process that only checks whether a removal is
        // running.
        std::thread::sleep(BEGIN_PAUSE);
    }
    let message = format!("unused files are being removed from {} already; try again", dir.display());
    Err(Error::new(ErrorKind::Unavailable, message))
}

/// Returns the files of all keys with any file.
fn keys(dir: &Path, mode: FileMode) -> io::Result<Vec<KeyFiles>> {
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(dir)? {
        let name = entry?.file_name();
        names.extend(name.to_str().and_then(|name| name.split_once('.')).map(|(hash, _)| hash.to_owned()));
    }
    let files = names.iter().filter_map(|name| KeyFiles::of_status(dir, mode, &format!("{name}.seen")));
    // A key with parts has several names.
    let by_key: BTreeMap<_, _> = files.map(|files| (files.name().to_owned(), files)).collect();
    Ok(by_key.into_values().collect())
}

/// Returns the largest number drawn for the key. `None` if the key was used within `unused_for`, cools down or is
/// damaged.
fn last_number(files: &KeyFiles, unused_for: Duration) -> Option<u64> {
    let used = [files.record(), files.next(), files.main()];
    let used = used.into_iter().chain(files.parts().map(|part| part.record()));
    let last_used = used.filter_map(|path| {
        let meta = fs::symlink_metadata(path).ok()?;
        meta.modified().ok()
    });
    // Counts a time in the future as now, because it comes from a clock that was set back since.
    let age = |time| SystemTime::now().duration_since(time).unwrap_or_default();
    if last_used.map(age).min().is_some_and(|age| age < unused_for) {
        return None;
    }
    let drawn = match Record::read_any(files).ok()? {
        RecordRead::Nothing => 0,
        RecordRead::Damaged(_) => return None,
        RecordRead::Record(record) => match record.cooldown(now_ms()) {
            Cooldown::Over => record.next.saturating_sub(1),
            Cooldown::Lasts(_) | Cooldown::ClockWentBack(_) => return None,
        },
    };
    Some(token::ceiling(files).ok()?.unwrap_or(0).max(drawn))
}

/// The lock file and the waiter lock of an unused key, both locked.
struct Locks {
    next: Option<LockedFile>,
    _main: LockedFile,
}

impl Locks {
    /// Locks both files, or returns `None` if the key is in use. A missing waiter lock is not created,
    /// because the disk might be full. A waiter that creates one then waits for the lock, and finds the lock
    /// file removed.
    fn of(files: &KeyFiles) -> io::Result<Option<Self>> {
        let Some(main) = lock_at(&files.main(), files.mode())? else { return Ok(None) };
        let path = files.next();
        let next = match open_to_look(&path).and_then(LockedFile::exclusive) {
            Ok(Some(next)) => Some(next).filter(|next| next.is_at(&path).unwrap_or(false)),
            Ok(None) => return Ok(None),
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            Err(e) => return Err(e),
        };
        Ok(Some(Self { next, _main: main }))
    }
}

/// Removes the files of an unused key that its fencing tokens do not need. Returns whether any was removed. The ceiling
/// stays, and the lock file, because without it the ceiling could not be removed on a full disk.
fn make_room(files: &KeyFiles) -> io::Result<bool> {
    let Some(locks) = Locks::of(files)? else { return Ok(false) };
    if last_number(files, Duration::ZERO).is_none() {
        return Ok(false);
    }
    // Keeps the record if it has a number above the ceiling, because without its record, the key's next grant
    // draws just above the ceiling.
    let drawn = Record::read_any(files).ok().and_then(|found| found.record().map(|record| record.next));
    let ceiling = token::ceiling(files).ok().flatten();
    let is_covered =
        drawn.is_none_or(|next| ceiling.is_some_and(|ceiling| next <= ceiling.saturating_add(1)));
    let spare =
        [is_covered.then(|| files.record()), Some(files.status()), locks.next.as_ref().map(|_| files.next())];
    let mut is_removed = false;
    for path in spare.into_iter().flatten() {
        is_removed |= remove_file(&path)?;
    }
    Ok(remove_parts(files)? || is_removed)
}

/// Removes the parts of an unused key, whose lock the caller has. Returns whether any existed.
fn remove_parts(files: &KeyFiles) -> io::Result<bool> {
    let parts: Vec<_> = files.parts().collect();
    // The last part goes first, because a missing part hides those behind it.
    for part in parts.iter().rev() {
        for path in [part.record(), part.status(), part.main()] {
            remove_file(&path)?;
        }
    }
    Ok(!parts.is_empty())
}

/// Removes the files of a key unless it is in use. Holds both locks and removes the lock file last. A process that
/// locks a new file at that path has the other files to itself, and a process that opened the old file finds it
/// removed.
fn remove(files: &KeyFiles, floor: u64) -> io::Result<bool> {
    let Some(locks) = Locks::of(files)? else { return Ok(false) };
    // Checks the last number again, because only now the locks prevent changes.
    let last = last_number(files, Duration::ZERO);
    if last.is_none_or(|last| last > floor) {
        return Ok(false);
    }
    remove_parts(files)?;
    let next = locks.next.as_ref().map(|_| files.next());
    for path in [files.record(), files.token(), files.status()].into_iter().chain(next).chain([files.main()])
    {
        remove_file(&path)?;
    }
    Ok(true)
}

/// Removes a file and returns whether it existed.
fn remove_file(path: &Path) -> io::Result<bool> {
    match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::path::PathBuf;

    use leasehold_api::LockKey;

    use super::*;
    use crate::files::open_lock;
    use crate::record::boot_id;

    const KEYS: [&str; 3] = ["a", "b", "c"];

    /// Creates a directory with three keys used once each, without waiter locks.
    fn used() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::write(marker(dir.path()), "").unwrap();
        for key in KEYS {
            let (files, key) = files(dir.path(), key);
            let numbers = token::draw(&files, &key, None, boot_id(), now_ms(), 0).unwrap();
            Record::for_tests(key.as_str(), numbers.next, boot_id()).write(&files).unwrap();
            for path in [files.main(), files.status()] {
                open_lock(&path, FileMode::PRIVATE).unwrap();
            }
        }
        dir
    }

    fn files(dir: &Path, key: &str) -> (KeyFiles, LockKey) {
        let key = LockKey::new(key).unwrap();
        (KeyFiles::new(dir, FileMode::PRIVATE, &key), key)
    }

    /// Draws the next token of the key.
    fn draw(dir: &Path, key: &str) -> u64 {
        let (files, key) = files(dir, key);
        let found = Record::read(&files, &key).unwrap();
        token::draw(&files, &key, found.record(), boot_id(), 0, 0).unwrap().token.as_u64()
    }

    fn names(dir: &Path) -> Vec<PathBuf> {
        let mut names: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
        names.sort();
        names
    }

    /// Collects as if on a full disk, which has room for the floor only once the directory has at most `room`
    /// files. Also returns the number of attempts to store the floor.
    fn collect_with_room(dir: &Path, room: usize) -> (Result<Collected, Error>, usize) {
        let tries = Cell::new(0);
        let collected = collect_below(dir, FileMode::PRIVATE, Duration::ZERO, &|least| {
            tries.set(tries.get() + 1);
            if names(dir).len() <= room {
                return token::raise_floor(dir, FileMode::PRIVATE, least);
            }
            Err(io_error(io::ErrorKind::StorageFull.into(), "write", dir))
        });
        (collected, tries.get())
    }

    #[test]
    fn unused_files_are_removed_from_a_full_disk() {
        let dir = used();
        let before =
            KEYS.map(|key| files(dir.path(), key)).map(|(files, _)| token::ceiling(&files).unwrap().unwrap());
        let all = names(dir.path()).len();
        // There is room once the record and the status file of the first two keys are removed.
        let (collected, tries) = collect_with_room(dir.path(), all - 4);
        assert_eq!((collected.unwrap().removed, tries), (KEYS.len(), 3));
        assert_eq!(names(dir.path()).len(), 2, "{:?}", names(dir.path()));
        for (key, before) in KEYS.iter().zip(before) {
            assert!(draw(dir.path(), key) >> leasehold_engine::token::LOCAL_BITS > before, "{key}");
        }
    }

    #[test]
    fn a_removal_that_found_no_room_at_last_leaves_tokens_that_grow() {
        let dir = used();
        let before = KEYS.map(|key| draw(dir.path(), key));
        let (collected, tries) = collect_with_room(dir.path(), 0);
        assert_eq!((collected.unwrap_err().kind(), tries), (ErrorKind::Capacity, KEYS.len() + 1));
        let mut left: Vec<_> = KEYS
            .iter()
            .map(|key| files(dir.path(), key).0)
            .flat_map(|files| [files.main(), files.token()])
            .collect();
        left.push(marker(dir.path()));
        left.sort();
        assert_eq!(names(dir.path()), left);
        for (key, before) in KEYS.iter().zip(before) {
            assert!(draw(dir.path(), key) > before, "{key}");
        }
    }

    #[test]
    fn a_record_above_its_ceiling_is_not_removed_to_make_room() {
        let dir = used();
        let (ahead, key) = files(dir.path(), "b");
        let last = token::ceiling(&ahead).unwrap().unwrap() + 10;
        Record::for_tests(key.as_str(), last, boot_id()).write(&ahead).unwrap();
        let (cooling, key) = files(dir.path(), "c");
        let record = Record {
            since_ms: now_ms(),
            cooldown_ms: Some(60_000),
            ..Record::for_tests(key.as_str(), 1, "b")
        };
        record.write(&cooling).unwrap();
        assert!(!make_room(&cooling).unwrap(), "a cooldown lasts");
        collect_with_room(dir.path(), 0).0.unwrap_err();
        assert!(ahead.record().exists() && !ahead.status().exists());
        assert!(cooling.record().exists() && cooling.status().exists(), "a cooldown lasts");
        assert!(draw(dir.path(), "b") >> leasehold_engine::token::LOCAL_BITS >= last);
    }

    #[test]
    fn a_key_that_is_locked_or_awaited_makes_no_room() {
        let dir = used();
        let (held, awaited) = (files(dir.path(), "a").0, files(dir.path(), "b").0);
        let locked =
            [held.main(), awaited.next()].map(|path| lock_at(&path, FileMode::PRIVATE).unwrap().unwrap());
        collect_with_room(dir.path(), 0).0.unwrap_err();
        for files in [&held, &awaited] {
            assert!(files.record().exists() && files.status().exists());
        }
        drop(locked);
        assert!(!files(dir.path(), "c").0.record().exists());
    }
}
