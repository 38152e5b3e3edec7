//! Fuzz test of damaged, truncated, foreign and huge files, and of other file types. The store must not
//! panic, and each token must be larger than all known ones.

use std::fs;
use std::path::Path;

use fuzzing::{Fuzz, parts, text};
use leasehold_api::{Error, ErrorKind, HolderId, ListQuery, LockKey};
use leasehold_engine::{Request, token::LOCAL_BITS};
use serde_json::Value;
use tempfile::TempDir;

use crate::files::FileMode;
use crate::gc::collect;
use crate::layout::KeyFiles;
use crate::pool::Progress;
use crate::record::{Record, boot_id, now_ms};
use crate::store::{Caller, FileStore, TakeResult};

const FILES: Fuzz<'_> = Fuzz {
    target: "files",
    inputs: 300,
    examples: &[
        "{\"key\":\"k\",\"holder\":\"0123456789abcdef0123456789abcdef-1\",\"label\":null,\"pid\":1,\"since_ms\":1000,\"token\":5120,\"next\":9006,\"boot\":\"BOOT\",\"cooldown_ms\":null}\u{1f}{\"ceiling\":10029,\"key\":\"k\"}",
        "{\"key\":\"k\",\"holder\":\"x\",\"label\":\"a\",\"pid\":4294967295,\"since_ms\":1000,\"token\":0,\"next\":9006,\"boot\":\"b\",\"cooldown_ms\":5}\u{1f}{\"ceiling\":10029,\"key\":\"k\"}\u{1f}{\"floor\":20000}",
        "{\"key\":\"other\",\"holder\":\"\",\"label\":null,\"pid\":0,\"since_ms\":18446744073709551615,\"token\":18446744073709551615,\"next\":18446744073709551615,\"boot\":\"BOOT\",\"cooldown_ms\":18446744073709551615}\u{1f}\u{1f}{\"floor\":9007199254740991}\u{1f}leasehold file store, format 1\n",
        "\u{1f}{\"ceiling\":10029,\"key\":\"k\"}\u{1f}\u{1f}leasehold file store, format 2\n\u{1f}8254c329a92850f6d539dd376f4816ee2764517da5e0235514af433164480d7a.json",
        "{\"key\":\"\",\"holder\":\"\",\"label\":null,\"pid\":0,\"since_ms\":0,\"token\":0,\"next\":0,\"boot\":\"BOOT\",\"cooldown_ms\":null}\u{1f}{\"ceiling\":0,\"key\":\"k\"}\u{1f}\u{1f}\u{1f}a.seen\u{1f}shared",
    ],
    words: &[
        "\"key\":\"k\"",
        "\"ceiling\":",
        "\"floor\":",
        "\"next\":",
        "\"boot\":\"BOOT\"",
        "BOOT",
        "null",
        "[",
        "{}",
        "[[[[[[[[[[[[[[[[",
        "1e400",
        "-1",
        "9007199254740991",
        "\\u0000",
        "\\ud800",
        ".seen",
        ".tmp",
        "shared",
    ],
};

const BLOCK: u64 = 1024;

#[test]
fn fuzz_files() {
    let key = LockKey::new("k").unwrap();
    FILES.check(|input| {
        let pieces = parts(input);
        let piece = |at: usize| pieces.get(at).copied().unwrap_or_default();
        let dir = directory();
        let mode = if piece(5) == b"shared" { FileMode::new(0o666).unwrap() } else { FileMode::PRIVATE };
        let store = FileStore::open(dir.path(), Some(mode)).unwrap();
        let files = store.files(&key);
        let record = text(piece(0)).replace("BOOT", boot_id());
        for (path, content) in
            [(files.record(), record.as_bytes()), (files.token(), piece(1)), (files.floor(), piece(2))]
        {
            if !content.is_empty() {
                fs::write(path, content).unwrap();
            }
        }
        // Creates the status file, by which the key appears in lists.
        fs::write(files.status(), "").unwrap();
        another_file(dir.path(), piece(4));
        look(&store, &key);
        let known = Known::of(record.as_bytes(), piece(1), piece(2));
        let first = known.check(take(&store, &key));
        if let Some(first) = first {
            let second = take(&store, &key).expect("it was mended");
            assert!(second > first, "{second} after {first}");
            collected(&store, dir.path(), &key, second);
        } else {
            collect(dir.path(), std::time::Duration::ZERO).map_or_else(typed, drop);
        }
        marker(dir.path(), piece(3));
    });
}

/// Returns a directory in memory if possible, because disk flushes are slow.
fn directory() -> TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// Makes one attempt, releases the lock, and returns the number of its token.
fn take(store: &FileStore, key: &LockKey) -> Option<u64> {
    let request = Request::new(key.clone(), HolderId::from_parts(7, 1));
    match store.take(&request, Caller::Newcomer) {
        Ok(TakeResult::Hold(hold)) => {
            look(store, key);
            let shown = store.inspect(key).unwrap();
            assert_eq!(shown.holders[0].token, Some(hold.numbers().token));
            Some(hold.numbers().token.as_u64() >> LOCAL_BITS)
        }
        Ok(TakeResult::Contended(contended)) => {
            assert!(contended.cooling_for.is_some(), "nobody holds it");
            None
        }
        Ok(TakeResult::Refused(error)) | Err(error) => {
            typed(error);
            None
        }
    }
}

/// Checks that inspection shows data of this key only.
fn look(store: &FileStore, key: &LockKey) {
    store.inspect(key).map_or_else(typed, |info| assert_eq!(info.key, *key));
    let mut all = ListQuery::default();
    all.include_ended = true;
    store.list(&all, &Progress::default()).map_or_else(typed, |infos| {
        for info in infos.iter().filter(|info| info.named) {
            assert_eq!(info.key, *key, "of no other key there are files");
        }
    });
}

fn typed(error: Error) {
    let expected =
        [ErrorKind::Corrupt, ErrorKind::Capacity, ErrorKind::SchemaMissing, ErrorKind::InvalidOption];
    assert!(expected.contains(&error.kind()), "{error}");
    assert!(!error.to_string().is_empty());
}

/// The largest numbers drawn, as the files show them.
struct Known {
    record: Option<Record>,
    /// The ceiling in the token file. `Err` if the file exists but cannot be read.
    ceiling: Option<Result<u64, ()>>,
    floor: Option<Result<u64, ()>>,
    since: u64,
}

impl Known {
    fn of(record: &[u8], token: &[u8], floor: &[u8]) -> Self {
        let number = |bytes: &[u8], name: &str| {
            let value = serde_json::from_slice::<Value>(bytes).map_err(drop)?;
            value[name].as_u64().ok_or(())
        };
        Self {
            record: serde_json::from_slice(record).ok(),
            ceiling: (!token.is_empty()).then(|| number(token, "ceiling")),
            floor: (!floor.is_empty()).then(|| number(floor, "floor")),
            since: now_ms(),
        }
    }

    fn check(&self, drawn: Option<u64>) -> Option<u64> {
        let number = drawn?;
        if let Some(record) = &self.record {
            assert!(number >= record.next && record.key == "k", "{number} was drawn before");
        }
        let is_next = self.record.as_ref().is_some_and(|r| r.boot == boot_id() && r.next == number);
        match (self.ceiling, self.floor) {
            (Some(Err(())), _) | (None, Some(Err(()))) => panic!("{number} without knowing what was drawn"),
            (Some(Ok(ceiling)), _) if is_next && number <= ceiling => {
                assert!(number + BLOCK > ceiling, "{number} is not of the block below {ceiling}");
            }
            (Some(Ok(least)), _) | (None, Some(Ok(least))) => {
                assert!(number > least && number >= self.since, "{number} may have been drawn");
            }
            (None, None) => assert!(number >= self.since),
        }
        Some(number)
    }
}

/// Checks that tokens keep growing after the files are removed.
fn collected(store: &FileStore, dir: &Path, key: &LockKey, last: u64) {
    if collect(dir, std::time::Duration::ZERO).map_or_else(
        |error| {
            typed(error);
            false
        },
        |_| true,
    ) {
        let next = take(store, key).expect("it was free");
        assert!(next > last, "{next} after {last}");
    }
}

/// Creates a file with any name that the store does not use.
fn another_file(dir: &Path, name: &[u8]) {
    let name = text(name);
    let is_own = name.starts_with("leasehold-") || name.is_empty() || name == "." || name == "..";
    let is_status = KeyFiles::of_status(dir, FileMode::PRIVATE, &name).is_some();
    let stem = name.strip_suffix(".seen").filter(|stem| stem.len() >= 64 && stem.is_char_boundary(64));
    let is_expected = stem.map(|stem| stem.split_at(64)).is_some_and(|(hash, part)| {
        is_hash(hash) && (part.is_empty() || part.starts_with('-') && part[1..].parse::<u32>().is_ok())
    });
    assert!(is_expected || !is_status, "{name}");
    assert!(is_status || stem.is_none_or(|stem| stem.len() > 64 || !is_hash(stem)), "{name}");
    if !is_own && !name.contains(['/', '\0']) && name.len() < 256 && !dir.join(&name).exists() {
        fs::write(dir.join(&name), "?").unwrap();
    }
}

fn is_hash(text: &str) -> bool {
    text.bytes().all(|byte| b"0123456789abcdef".contains(&byte))
}

/// Writes this content to the directory's marker and opens the store.
fn marker(dir: &Path, content: &[u8]) {
    fs::write(dir.join("leasehold-format"), content).unwrap();
    let is_ours = content == b"leasehold file store, format 1\n";
    for opened in [FileStore::open(dir, None), FileStore::open_read_only(dir)] {
        assert!(
            opened.is_ok() == is_ours
                || text(content).contains("format 0")
                || text(content).contains("format +")
        );
        opened.map_or_else(typed, drop);
    }
}

/// Checks that only a bounded part of a large file is read.
#[test]
fn files_of_a_gigabyte_are_not_read_whole() {
    let (dir, key) = (directory(), LockKey::new("k").unwrap());
    let store = FileStore::open(dir.path(), None).unwrap();
    let files = store.files(&key);
    for path in [files.record(), files.token(), files.floor()] {
        fs::File::create(&path).unwrap().set_len(1 << 30).unwrap();
        assert!(crate::files::read(&path).unwrap().len() <= 1 << 16);
    }
    assert_eq!(take(&store, &key), None, "the ceiling is not known");
    look(&store, &key);
    fs::remove_file(files.token()).unwrap();
    assert_eq!(take(&store, &key), None, "nor the floor");
    fs::remove_file(files.floor()).unwrap();
    assert!(take(&store, &key).is_some());
}
