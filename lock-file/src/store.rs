//! One step at a time in the directory: take a key's lock, stand in its turnstile, look at it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, ErrorKind, HoldInfo, HoldState, ListQuery, LockKey};
use leasehold_engine::{Held, Request};

use crate::error::io_error;
use crate::hold::{Hold, is_locked, lock_at};
use crate::layout::{KeyFiles, prepare};
use crate::record::{Cooldown, Found, Record, boot_id, ceil_ms, now_ms};
use crate::token;
use crate::turnstile::{AtTurnstile, Turnstile};

/// The directory. Nothing here waits for another holder; everything here may wait for the disk.
#[derive(Debug)]
pub(crate) struct Store {
    dir: PathBuf,
    name: Arc<str>,
}

/// The outcome of one attempt.
#[derive(Debug)]
pub(crate) enum Taken {
    Hold(Hold),
    Not(Held),
}

/// Where an attempt stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// It comes from the street: whoever waits in the turnstile goes first.
    Street,
    /// It comes from within the turnstile.
    Turnstile,
}

impl Store {
    pub(crate) fn open(dir: &Path) -> Result<Self, Error> {
        let name = |dir: &Path| -> Arc<str> { format!("file://{}", dir.display()).into() };
        let dir = prepare(dir).map_err(|e| e.with_store(name(dir)))?;
        Ok(Self { name: name(&dir), dir })
    }

    pub(crate) fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// One attempt at the lock of the request's key.
    pub(crate) fn take(&self, request: &Request, standing: Standing) -> Result<Taken, Error> {
        let files = KeyFiles::new(&self.dir, &request.key);
        // Before the lock is touched, so that an attempt which must fail disturbs nobody's.
        let found = Record::read(&files, &request.key)?;
        if let Some(Cooldown::Lasts(left)) = found.record().map(|r| r.cooldown(now_ms())) {
            return Ok(Taken::Not(cooling(left)));
        }
        let Some(main) = self.with_dir(&files.main(), lock_at)? else {
            return Ok(Taken::Not(Held::new()));
        };
        if standing == Standing::Street {
            let next = files.next();
            // Only looked at by whoever has the lock, so that those who look do not meet.
            if Turnstile::is_occupied(&next).map_err(|e| io_error(e, "look at", &next))? {
                return Ok(Taken::Not(Held::new()));
            }
        }
        let last = match Record::read(&files, &request.key)? {
            Found::Record(record) => Some(record),
            Found::Nothing => None,
            Found::Damaged(error) => {
                tracing::warn!(%error, file = %files.record().display(), key = %request.key,
                    "the record of the last grant is damaged and is written anew; tokens are safe, a cooldown in it is lost");
                None
            }
        };
        let now = now_ms();
        match last.as_ref().map(|r| (r, r.cooldown(now))) {
            None | Some((_, Cooldown::Over)) => {}
            Some((_, Cooldown::Lasts(left))) => return Ok(Taken::Not(cooling(left))),
            Some((last, Cooldown::ClockWentBack(window))) => {
                // Counted from now on: nobody comes early, and nobody waits for the clock to catch up.
                Record { since_ms: now, ..last.clone() }.write(&files)?;
                return Ok(Taken::Not(cooling(window)));
            }
        }
        let boot = boot_id();
        let numbers = token::draw(&files, &request.key, last.as_ref(), boot, now, request.reserve)?;
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
        record.write(&files)?;
        Ok(Taken::Hold(Hold::new(main, files, numbers.token)))
    }

    /// One attempt at the turnstile of `key`: whoever has it is the next to get the lock.
    pub(crate) fn enter_turnstile(&self, key: &LockKey) -> Result<AtTurnstile, Error> {
        self.with_dir(&KeyFiles::new(&self.dir, key).next(), Turnstile::enter)
    }

    /// Locks the file at `path` by `lock`, and makes the directory anew if it is gone.
    fn with_dir<T>(&self, path: &Path, lock: impl Fn(&Path) -> io::Result<T>) -> Result<T, Error> {
        let answer = match lock(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                // The directory was removed under us. What was held in it is lost at its next beat.
                prepare(&self.dir)?;
                lock(path)
            }
            answer => answer,
        };
        answer.map_err(|e| io_error(e, "lock", path))
    }

    /// The hold of `key`, or its cooldown.
    pub(crate) fn look(&self, key: &LockKey) -> Result<Option<HoldInfo>, Error> {
        info(&KeyFiles::new(&self.dir, key), Some(key))
    }

    /// The keys that `query` selects.
    pub(crate) fn list(&self, query: &ListQuery) -> Result<Vec<HoldInfo>, Error> {
        let unreadable = |e| io_error(e, "list", &self.dir);
        let mut infos = Vec::new();
        for entry in fs::read_dir(&self.dir).map_err(unreadable)? {
            let name = entry.map_err(unreadable)?.file_name();
            let Some(files) = name.to_str().and_then(|n| KeyFiles::of_witness(&self.dir, n)) else {
                continue;
            };
            // The record of one key must not hide the others.
            match info(&files, None) {
                Ok(Some(info)) => infos.push(info),
                Ok(None) => {}
                Err(error) => tracing::warn!(%error, "left out of the list"),
            }
        }
        infos.retain(|i| i.key.as_str().starts_with(&query.prefix));
        infos.retain(|i| query.include_ended || i.state == HoldState::Held);
        infos.sort_by(|a, b| a.key.cmp(&b.key));
        infos.truncate(query.limit.unwrap_or(usize::MAX));
        Ok(infos)
    }
}

/// What operators see of the key with these files, which is `key` if that is known.
fn info(files: &KeyFiles, key: Option<&LockKey>) -> Result<Option<HoldInfo>, Error> {
    let seen = files.seen();
    // The witness first: the record that is read after it is not older than the hold that was seen.
    let is_held = is_locked(&seen).map_err(|e| io_error(e, "look at", &seen))?;
    let found = match key {
        Some(key) => Record::read(files, key)?,
        None => Record::read_any(files)?,
    };
    let mut info = match (found, key) {
        (Found::Record(record), _) => record.info(now_ms())?,
        (_, _) if !is_held => return Ok(None),
        (Found::Nothing | Found::Damaged(_), Some(key)) => HoldInfo::new(key.clone()),
        (Found::Nothing | Found::Damaged(_), None) => {
            return Err(Error::new(
                ErrorKind::Corrupt,
                format!(
                    "{} is held, but its record is damaged; the next grant mends it",
                    files.main().display()
                ),
            ));
        }
    };
    if is_held {
        return Ok(Some(info));
    }
    info.state = HoldState::Cooling;
    Ok(info.cooling_for.is_some().then_some(info))
}

fn cooling(left: Duration) -> Held {
    let mut held = Held::new();
    held.retry_after = Some(left);
    held.cooling_for = Some(left);
    held
}

#[cfg(test)]
mod tests {
    use super::*;
    use leasehold_api::HolderId;

    #[test]
    fn whoever_waits_goes_first() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let key = LockKey::new("k").unwrap();
        let request = Request::new(key.clone(), HolderId::from_parts(1, 1));
        let AtTurnstile::Entered(waiter) = store.enter_turnstile(&key).unwrap() else {
            panic!("occupied");
        };
        for _ in 0..3 {
            // Although the lock is free.
            let refused = store.take(&request, Standing::Street).unwrap();
            assert!(matches!(refused, Taken::Not(_)));
        }
        let taken = store.take(&request, Standing::Turnstile).unwrap();
        assert!(matches!(taken, Taken::Hold(_)));
        drop((taken, waiter));
        let taken = store.take(&request, Standing::Street).unwrap();
        assert!(matches!(taken, Taken::Hold(_)));
    }
}
