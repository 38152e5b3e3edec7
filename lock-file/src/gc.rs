//! Removing the files of keys that nobody uses.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

use leasehold_api::{Error, ErrorKind};

use crate::directory::{look_into, marker};
use crate::error::io_error;
use crate::files::{FileMode, open_to_look};
use crate::hold::{Locked, lock_at};
use crate::layout::KeyFiles;
use crate::record::{Cooldown, Found, Record, now_ms};
use crate::token;

const BEGIN_TRIES: usize = 50;
const BEGIN_PAUSE: Duration = Duration::from_millis(1);

/// What was removed, counted in keys.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// Keys whose files are gone.
    pub removed: usize,
    /// Keys that are held, awaited, cooling, used too recently, damaged, or whose files this user may not remove.
    pub kept: usize,
}

/// Removes the files of the keys in `dir` that nobody holds or awaits and that were last granted `unused_for` ago.
pub(crate) fn collect(dir: &Path, unused_for: Duration) -> Result<Collected, Error> {
    let (dir, mode) = look_into(dir)?;
    let keys = match keys(&dir, mode) {
        Ok(keys) => keys,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Collected::default()),
        Err(e) => return Err(io_error(e, "list", &dir)),
    };
    let Some(_collecting) = begin(&dir)? else { return Ok(Collected { removed: 0, kept: keys.len() }) };
    // What is remembered of all keys in place of their ceilings, on disk before the first of those is removed.
    let candidates: Vec<_> =
        keys.iter().filter_map(|files| Some((files, last_number(files, unused_for)?))).collect();
    let floor = candidates.iter().map(|(_, last)| *last).max().unwrap_or(0);
    let floor = token::raise_floor(&dir, mode, floor)?;
    let mut removed = 0;
    for (files, _) in candidates {
        match remove(files, floor) {
            Ok(is_removed) => removed += usize::from(is_removed),
            // Another user's, in a directory where only the owner of a file may remove it; or no plain file.
            Err(e) if [io::ErrorKind::PermissionDenied, io::ErrorKind::InvalidData].contains(&e.kind()) => {}
            Err(e) => return Err(io_error(e, "remove the files of an unused key beside", &files.main())),
        }
    }
    Ok(Collected { removed, kept: keys.len() - removed })
}

/// Whether files are being removed just now, so that a lock that is taken may be held by that.
pub(crate) fn is_under_way(dir: &Path) -> bool {
    let look = open_to_look(&marker(dir)).and_then(Locked::shared);
    matches!(look, Ok(None))
}

/// `None` where there is no store yet: somebody is just making one.
fn begin(dir: &Path) -> Result<Option<Locked>, Error> {
    let path = marker(dir);
    for _ in 0..BEGIN_TRIES {
        match open_to_look(&path).and_then(Locked::exclusive) {
            Ok(Some(locked)) => return Ok(Some(locked)),
            Ok(None) => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(io_error(e, "lock", &path)),
        }
        // Perhaps only somebody who looks whether this is under way.
        std::thread::sleep(BEGIN_PAUSE);
    }
    let message = format!("unused files are being removed from {} already; try again", dir.display());
    Err(Error::new(ErrorKind::Unavailable, message))
}

/// The files of every key of which there is any.
fn keys(dir: &Path, mode: FileMode) -> io::Result<Vec<KeyFiles>> {
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(dir)? {
        let name = entry?.file_name();
        names.extend(name.to_str().and_then(|name| name.split_once('.')).map(|(hash, _)| hash.to_owned()));
    }
    Ok(names.iter().filter_map(|hash| KeyFiles::of_status(dir, mode, &format!("{hash}.seen"))).collect())
}

/// The largest number that was drawn for the key, if it seems to be unused for so long and nothing is damaged.
fn last_number(files: &KeyFiles, unused_for: Duration) -> Option<u64> {
    let last_used = [files.record(), files.next(), files.main()].into_iter().filter_map(|path| {
        let meta = fs::symlink_metadata(path).ok()?;
        meta.modified().ok()
    });
    // A time in the future comes from a clock that has been set back since, and is none to go by.
    let age = |time| SystemTime::now().duration_since(time).unwrap_or_default();
    if last_used.map(age).min().is_some_and(|age| age < unused_for) {
        return None;
    }
    let drawn = match Record::read_any(files).ok()? {
        Found::Nothing => 0,
        Found::Damaged(_) => return None,
        Found::Record(record) => match record.cooldown(now_ms()) {
            Cooldown::Over => record.next.saturating_sub(1),
            Cooldown::Lasts(_) | Cooldown::ClockWentBack(_) => return None,
        },
    };
    Some(token::ceiling(files).ok()?.unwrap_or(0).max(drawn))
}

/// Removes the files unless somebody uses them by now. Under both locks of the key, and the lock last: whoever takes
/// that at its path afterwards has all the others to himself, and whoever has opened it before finds it gone from there.
fn remove(files: &KeyFiles, floor: u64) -> io::Result<bool> {
    let Some(_main) = lock_at(&files.main(), files.mode())? else { return Ok(false) };
    let Some(_next) = lock_at(&files.next(), files.mode())? else { return Ok(false) };
    // Once more, as nobody changes it now.
    let last = last_number(files, Duration::ZERO);
    if last.is_none_or(|last| last > floor) {
        return Ok(false);
    }
    for path in [files.record(), files.token(), files.status(), files.next(), files.main()] {
        match fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
    }
    Ok(true)
}
