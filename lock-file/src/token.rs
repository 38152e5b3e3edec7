//! The numbers of grants, drawn from blocks. A block's ceiling is on disk before its first number is used.

use std::io;
use std::path::Path;

use leasehold_api::{Error, ErrorKind, FencingToken, LockKey};
use leasehold_engine::token::{self, Reserved};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::{corrupt, io_error};
use crate::files::{self, FileMode, replace};
use crate::layout::{KeyFiles, floor};
use crate::record::Record;

/// The size of a block: the numbers that one write of the ceiling covers.
const BLOCK: u64 = 1024;

/// Numbers for one grant: its token, further tokens for hand-overs, and the first number of the next grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Numbers {
    pub(crate) token: FencingToken,
    pub(crate) next: u64,
}

impl Numbers {
    /// Returns the tokens between the grant's own and the next grant's.
    pub(crate) fn reserved(self) -> Reserved {
        let next = self.next.saturating_mul(1 << token::LOCAL_BITS);
        Reserved::following(next.saturating_sub(self.token.as_u64() + 1))
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Ceiling {
    /// The largest number of the last block. It is the first field, because a file written in place then
    /// changes within one disk sector.
    ceiling: u64,
    key: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct Floor {
    floor: u64,
}

/// Draws numbers larger than all earlier numbers of `key`. Called by the holder of the key's lock.
///
/// `last` is the record of the latest grant. The record might not be on disk, so it counts only within the boot that
/// wrote it. After another boot, or without a record, a new block starts above the ceiling. A new block also starts at
/// least at the time in milliseconds. Tokens therefore grow even if the directory was removed, or replaced by a copy
/// from an earlier boot.
pub(crate) fn draw(
    files: &KeyFiles,
    key: &LockKey,
    last: Option<&Record>,
    boot: &str,
    now_ms: u64,
    reserve: u16,
) -> Result<Numbers, Error> {
    let ceiling = read(files, key)?;
    // One number of the store is enough for 1024 tokens of local callers.
    let width = 1 + (u64::from(reserve) >> token::LOCAL_BITS);
    let in_block = last.filter(|r| r.boot == boot).map(|r| r.next);
    // Draws from the current block, if the record is in it. A record below that block is an old copy, or
    // damaged.
    if let (Some(first), Some(ceiling)) = (in_block, ceiling)
        && first.saturating_add(width - 1) <= ceiling
        && first.saturating_add(BLOCK) > ceiling
    {
        return numbers(first, width);
    }
    // Starts from the floor only if the ceiling was removed, because a key's own ceiling is above the floor.
    let known = match ceiling {
        Some(ceiling) => Some(ceiling),
        None => read_floor(&files.floor())?,
    };
    let above = known.map_or(1, |c| c.saturating_add(1)).max(last.map_or(1, |r| r.next));
    // Ignores a clock in the far future, which must not use up the numbers.
    let first = if now_ms <= token::MAX_STORE_NUMBER / 2 { above.max(now_ms) } else { above };
    let drawn = numbers(first, width)?;
    write(files, key, first.saturating_add(BLOCK.max(width) - 1))?;
    Ok(drawn)
}

fn numbers(first: u64, width: u64) -> Result<Numbers, Error> {
    let next = first.saturating_add(width);
    let within = next <= token::MAX_STORE_NUMBER;
    token::from_store_number(first).filter(|_| within).map(|token| Numbers { token, next }).ok_or_else(|| {
        Error::new(ErrorKind::Capacity, "the fencing tokens of this key are used up; use another key")
    })
}

/// Reads the ceiling of the key with these files.
pub(crate) fn ceiling(files: &KeyFiles) -> Result<Option<u64>, Error> {
    let found: Option<Ceiling> = read_number(&files.token())?;
    Ok(found.map(|ceiling| ceiling.ceiling))
}

/// Raises the floor (the ceiling of all keys whose files are removed) to at least `least`, and returns it.
/// Only one process can call it at a time.
pub(crate) fn raise_floor(dir: &Path, mode: FileMode, least: u64) -> Result<u64, Error> {
    let path = floor(dir);
    let before = read_floor(&path)?.unwrap_or(0);
    if least > before {
        write_number(&path, mode, &Floor { floor: least })?;
    }
    Ok(least.max(before))
}

/// Checks that new keys in the directory can get fencing tokens, which needs a readable floor or none.
///
/// # Errors
///
/// [`PermissionDenied`](ErrorKind::PermissionDenied) if the floor belongs to another user.
/// [`Corrupt`](ErrorKind::Corrupt) if it is damaged. Otherwise the error that prevented reading it.
pub fn check_tokens(dir: impl AsRef<Path>) -> Result<(), Error> {
    read_floor(&floor(dir.as_ref())).map(drop)
}

fn read_floor(path: &Path) -> Result<Option<u64>, Error> {
    let found: Option<Floor> = read_number(path)?;
    Ok(found.map(|floor| floor.floor))
}

fn read(files: &KeyFiles, key: &LockKey) -> Result<Option<u64>, Error> {
    let path = &files.token();
    let ceiling: Option<Ceiling> = read_number(path)?;
    if let Some(foreign) = ceiling.as_ref().filter(|ceiling| ceiling.key != key.as_str()) {
        let why = format!("belongs to the key {:?}, not to {:?}", foreign.key, key.as_str());
        return Err(damaged(path, &why));
    }
    Ok(ceiling.map(|ceiling| ceiling.ceiling))
}

fn read_number<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, Error> {
    match files::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|e| damaged(path, "is damaged or foreign").with_source(e)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(io_error(e, "read", path)),
    }
}

fn damaged(path: &Path, why: &str) -> Error {
    corrupt(
        path,
        why,
        "nothing was granted, because a token could repeat. If no resource remembers this key's tokens, or this machine's clock is right, remove that file: tokens go on from the time",
    )
}

fn write(files: &KeyFiles, key: &LockKey, ceiling: u64) -> Result<(), Error> {
    let ceiling = Ceiling { key: key.as_str().to_owned(), ceiling };
    write_number(&files.token(), files.mode(), &ceiling)
}

fn write_number(path: &Path, mode: FileMode, number: &impl Serialize) -> Result<(), Error> {
    let text = serde_json::to_vec(number).map_err(|e| {
        Error::new(ErrorKind::Unavailable, "cannot write the token ceiling as JSON").with_source(e)
    })?;
    replace(path, &text, mode, true).map_err(|e| io_error(e, "write", path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    struct Case {
        _dir: tempfile::TempDir,
        files: KeyFiles,
        key: LockKey,
    }

    fn case() -> Case {
        let dir = tempfile::tempdir().unwrap();
        let key = LockKey::new("k").unwrap();
        Case { files: KeyFiles::new(dir.path(), FileMode::PRIVATE, &key), _dir: dir, key }
    }

    impl Case {
        fn draw(&self, last: Option<&Record>, boot: &str, now_ms: u64) -> Numbers {
            draw(&self.files, &self.key, last, boot, now_ms, 0).unwrap()
        }

        fn record(&self, numbers: Numbers, boot: &str) -> Record {
            Record::for_tests(self.key.as_str(), numbers.next, boot)
        }

        fn ceiling(&self) -> Option<u64> {
            read(&self.files, &self.key).unwrap()
        }
    }

    fn number(n: Numbers) -> u64 {
        n.token.as_u64() >> token::LOCAL_BITS
    }

    #[test]
    fn one_write_is_good_for_a_block() {
        let c = case();
        let mut last = c.draw(None, "b", 5_000);
        assert_eq!(number(last), 5_000);
        assert_eq!(c.ceiling(), Some(5_000 + BLOCK - 1));
        for i in 1..BLOCK {
            let drawn = c.draw(Some(&c.record(last, "b")), "b", 9_000_000);
            assert_eq!(number(drawn), 5_000 + i);
            last = drawn;
        }
        assert_eq!(c.ceiling(), Some(5_000 + BLOCK - 1), "not written meanwhile");
        let drawn = c.draw(Some(&c.record(last, "b")), "b", 0);
        assert_eq!(number(drawn), 5_000 + BLOCK);
        assert_eq!(c.ceiling(), Some(5_000 + 2 * BLOCK - 1));
    }

    #[test]
    fn an_older_record_of_this_boot_goes_above_the_ceiling() {
        let c = case();
        let first = c.draw(None, "b", 5_000);
        let old = c.record(first, "b");
        let last = c.draw(Some(&Record { next: 5_000 + BLOCK, ..old.clone() }), "b", 0);
        assert_eq!(number(last), 5_000 + BLOCK);
        assert_eq!(number(c.draw(Some(&old), "b", 0)), 5_000 + 2 * BLOCK);
    }

    #[test]
    fn another_boot_or_no_record_goes_above_the_ceiling_whatever_the_clock_says() {
        let c = case();
        let first = c.draw(None, "b", 5_000);
        let other = c.draw(Some(&c.record(first, "b")), "c", 0);
        assert_eq!(number(other), 5_000 + BLOCK);
        let lost = c.draw(None, "c", 0);
        assert_eq!(number(lost), 5_000 + 2 * BLOCK);
    }

    #[test]
    fn a_record_above_its_ceiling_is_believed() {
        let c = case();
        c.draw(None, "b", 5_000);
        let above = Record::for_tests("k", 70_000, "b");
        assert_eq!(number(c.draw(Some(&above), "b", 0)), 70_000);
        assert_eq!(c.ceiling(), Some(70_000 + BLOCK - 1));
    }

    #[test]
    fn a_clock_of_the_far_future_is_not_believed() {
        let c = case();
        assert_eq!(number(c.draw(None, "b", u64::MAX)), 1);
    }

    #[test]
    fn a_reserve_beyond_one_number_takes_more() {
        let c = case();
        let wide = draw(&c.files, &c.key, None, "b", 5_000, 1024).unwrap();
        assert_eq!((number(wide), wide.next), (5_000, 5_002));
        let narrow = draw(&c.files, &c.key, None, "c", 50_000, 1023).unwrap();
        assert_eq!((number(narrow), narrow.next), (50_000, 50_001));
        assert_eq!((narrow.reserved().len(), wide.reserved().len()), (1023, 2047));
    }

    #[test]
    fn used_up_tokens_are_an_error() {
        let c = case();
        let last = Record::for_tests("k", token::MAX_STORE_NUMBER + 1, "b");
        let error = draw(&c.files, &c.key, Some(&last), "b", 0, 0).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Capacity);
    }

    #[test]
    fn a_damaged_or_foreign_ceiling_grants_nothing() {
        let c = case();
        c.draw(None, "b", 5_000);
        let whole = fs::read(c.files.token()).unwrap();
        let foreign = br#"{"key":"other","ceiling":1}"#.to_vec();
        for bad in [whole[..whole.len() / 2].to_vec(), Vec::new(), b"hello".to_vec(), foreign] {
            fs::write(c.files.token(), &bad).unwrap();
            let error = draw(&c.files, &c.key, None, "b", 6_000, 0).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt);
            assert!(error.to_string().contains("remove that file"), "{error}");
            assert_eq!(fs::read(c.files.token()).unwrap(), bad, "left as it was");
        }
    }
}
