//! The operators' view of a directory.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::time::Duration;

use leasehold_api::{Error, ErrorKind, HoldInfo, HolderId, KeyInfo, ListQuery, LockKey, Mode};

use super::{FileStore, shows};
use crate::ask::{ask, is_asked};
use crate::error::io_error;
use crate::layout::KeyFiles;
use crate::pool::Progress;
use crate::process_owners::ProcessOwners;
use crate::record::{Record, RecordRead, SharedMode, now_ms};

impl FileStore {
    /// Returns the state of `key` for inspection.
    pub(crate) fn inspect(&self, key: &LockKey) -> Result<KeyInfo, Error> {
        let info = info(&self.files(key), Some(key), &mut ProcessOwners::of(&self.dir))?;
        Ok(info.unwrap_or_else(|| KeyInfo::free(key.clone())))
    }

    /// Sends the holder a request to release `key`, if it has the key. Returns whether it does.
    pub(crate) fn ask(&self, key: &LockKey, holder: HolderId) -> Result<bool, Error> {
        let files = self.files(key);
        for files in files.parts().chain([files.clone()]) {
            let is_holder = shows(&files)?
                && read_settled(&files, Some(key))?
                    .record()
                    .is_some_and(|record| record.info().holder == Some(holder));
            if is_holder {
                ask(&files, &holder.to_string())?;
                return Ok(true);
            }
        }
        Ok(false)
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
        let mut seen = BTreeSet::new();
        for entry in entries {
            progress.step();
            let name = entry.map_err(unreadable)?.file_name();
            let Some(files) = name.to_str().and_then(|n| KeyFiles::of_status(&self.dir, self.mode, n)) else {
                continue;
            };
            // A key with parts has several status files.
            if !seen.insert(files.name().to_owned()) {
                continue;
            }
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

/// Returns the state of the key with these files, for inspection. The key is `key` if known, otherwise the
/// one in the record. If both are unknown, a held key has its file name as key, and for another key the
/// result is `None`.
fn info(
    files: &KeyFiles,
    key: Option<&LockKey>,
    owners: &mut ProcessOwners,
) -> Result<Option<KeyInfo>, Error> {
    // Reads the status first, because the record read after it is then at least as recent as the hold.
    let is_held_alone = shows(files)?;
    let found = read_own(files, key)?;
    let record = found.record();
    let mut holders = Vec::new();
    if is_held_alone {
        holders.push(hold_info(files, record, owners));
    } else {
        add_parts(files, record.and_then(|record| record.mode), owners, &mut holders)?;
    }
    let mut info = match (record, key) {
        (Some(record), _) => {
            let mut info = KeyInfo::free(record.key()?);
            info.cooldown = record.cooldown_left(now_ms());
            info
        }
        (None, Some(key)) => KeyInfo::free(key.clone()),
        (None, None) if holders.is_empty() => return Ok(None),
        (None, None) => {
            // Shows the file name as the key, until the next grant repairs the key's record.
            let mut info = KeyInfo::free(LockKey::new(files.name())?);
            info.named = false;
            info
        }
    };
    info.holders = holders;
    Ok(Some(info))
}

/// Adds the holders of the key's parts. `mode` is the mode of a holder whose record is damaged.
fn add_parts(
    files: &KeyFiles,
    mode: Option<SharedMode>,
    owners: &mut ProcessOwners,
    holders: &mut Vec<HoldInfo>,
) -> Result<(), Error> {
    for part in files.parts() {
        if !shows(&part)? {
            continue;
        }
        let found = read_own(&part, None)?;
        let mut hold = hold_info(&part, found.record(), owners);
        if found.record().is_none() {
            hold.mode = mode.map_or(Mode::Shared, SharedMode::mode);
        }
        hold.permit = part.part_number().filter(|_| matches!(hold.mode, Mode::Permit { .. }));
        holders.push(hold);
    }
    Ok(())
}

/// Returns the holder that has locked the status file of `files`.
fn hold_info(files: &KeyFiles, record: Option<&Record>, owners: &mut ProcessOwners) -> HoldInfo {
    let Some(record) = record else { return HoldInfo::new() };
    let mut hold = record.info();
    hold.asked = is_asked(files, &record.holder).unwrap_or(false);
    hold.owner = Some(owners.owner(&files.main(), record.pid));
    hold
}

/// Reads the record, and ignores a copied or forged record of another key.
fn read_own(files: &KeyFiles, key: Option<&LockKey>) -> Result<RecordRead, Error> {
    Ok(match read_settled(files, key)? {
        RecordRead::Record(record) if !files.are_of(&record.key) => RecordRead::Nothing,
        found => found,
    })
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
