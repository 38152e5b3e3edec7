//! The names of a key's files.
//!
//! A key has parts beside its own files if several holders had it at once. Each of these holders locks one part.

use std::path::{Path, PathBuf};

use leasehold_api::LockKey;
use sha2::{Digest as _, Sha256};

use crate::files::FileMode;

/// The files of one key, or of one of its parts.
#[derive(Clone, Debug)]
pub(crate) struct KeyFiles {
    dir: PathBuf,
    mode: FileMode,
    hash: String,
    part: Option<u32>,
}

impl KeyFiles {
    pub(crate) fn new(dir: &Path, mode: FileMode, key: &LockKey) -> Self {
        Self { dir: dir.to_owned(), mode, hash: hash(key.as_str()), part: None }
    }

    /// Returns the files of the key with this status file name, or with a part of this status file name. `None` for
    /// another name.
    pub(crate) fn of_status(dir: &Path, mode: FileMode, name: &str) -> Option<Self> {
        let name = name.strip_suffix(".seen")?;
        let (hash, part) = name.split_once('-').map_or((name, None), |(hash, part)| (hash, Some(part)));
        let hex = hash.len() == 64 && hash.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        let is_number = |part: &str| part.parse::<u32>().is_ok_and(|number| number.to_string() == part);
        let is_status = hex && part.is_none_or(is_number);
        is_status.then(|| Self { dir: dir.to_owned(), mode, hash: hash.to_owned(), part: None })
    }

    /// Returns the files of the key's part with this number.
    pub(crate) fn part(&self, number: u32) -> Self {
        Self { part: Some(number), ..self.clone() }
    }

    /// Returns the parts that exist. A holder takes the first part that is free, so the existing ones have the first
    /// numbers.
    pub(crate) fn parts(&self) -> impl Iterator<Item = Self> {
        (0..u32::MAX).map(|number| self.part(number)).take_while(|part| part.main().exists())
    }

    /// Returns whether these are the files of `key`.
    pub(crate) fn are_of(&self, key: &str) -> bool {
        self.hash == hash(key)
    }

    /// Returns the number of the part, or `None` for the files of the key itself.
    pub(crate) fn part_number(&self) -> Option<u32> {
        self.part
    }

    /// Returns the prefix of the file names, which depends only on the key.
    pub(crate) fn name(&self) -> &str {
        &self.hash
    }

    /// Returns the file with the directory's floor, the largest token ceiling of all removed keys.
    pub(crate) fn floor(&self) -> PathBuf {
        floor(&self.dir)
    }

    /// Returns the permissions of the files.
    pub(crate) fn mode(&self) -> FileMode {
        self.mode
    }

    /// Returns the lock file, which is empty and never replaced while in use.
    pub(crate) fn main(&self) -> PathBuf {
        self.with("lock")
    }

    /// Returns the lock file of the key, which the holders of all parts lock in shared mode.
    pub(crate) fn main_of_key(&self) -> PathBuf {
        self.of_key("lock")
    }

    /// Returns the waiter lock of the key, a second lock file that the next waiter locks.
    pub(crate) fn next(&self) -> PathBuf {
        self.of_key("next")
    }

    /// Returns the status file, which is locked together with the lock, for inspection. Its lines are requests to
    /// release.
    pub(crate) fn status(&self) -> PathBuf {
        self.with("seen")
    }

    /// Returns the record of the current or last holder.
    pub(crate) fn record(&self) -> PathBuf {
        self.with("json")
    }

    /// Returns the file with the ceiling, the largest number that the key's tokens can have without another
    /// write.
    pub(crate) fn token(&self) -> PathBuf {
        self.of_key("token")
    }

    fn with(&self, extension: &str) -> PathBuf {
        match self.part {
            Some(number) => self.dir.join(format!("{}-{number}.{extension}", self.hash)),
            None => self.of_key(extension),
        }
    }

    fn of_key(&self, extension: &str) -> PathBuf {
        self.dir.join(format!("{}.{extension}", self.hash))
    }
}

/// Returns the file with the largest ceiling of all removed keys of this directory.
pub(crate) fn floor(dir: &Path) -> PathBuf {
    dir.join("leasehold-floor")
}

fn hash(key: &str) -> String {
    hex::encode(Sha256::digest(key.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    // Pins the names, because they are part of the format. After a change, two versions could hold one key at
    // once.
    #[test]
    fn names_are_pinned() {
        for (key, hash) in [
            ("a", "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"),
            ("ledger:42", "30654b299df1b98366b156ba2d313566241d9a47b6bcd42cdea373a653b38c94"),
            ("nightly-report", "6743ba10a2b2c4879cf6af5c75140be7135b22597ac428e490673767b538d53e"),
            ("Schlüssel/🔑 ", "676a8cbb73a8225f4121a7083bf6b475fd7361fe98880a6f8cfefaad7a1af5c5"),
        ] {
            let files = KeyFiles::new(Path::new("/store"), FileMode::PRIVATE, &LockKey::new(key).unwrap());
            assert_eq!(files.main(), Path::new("/store").join(format!("{hash}.lock")), "{key}");
            assert_eq!(files.next(), Path::new("/store").join(format!("{hash}.next")));
            assert_eq!(files.status(), Path::new("/store").join(format!("{hash}.seen")));
            assert_eq!(files.record(), Path::new("/store").join(format!("{hash}.json")));
            assert_eq!(files.token(), Path::new("/store").join(format!("{hash}.token")));
            let part = files.part(10);
            assert_eq!(part.main(), Path::new("/store").join(format!("{hash}-10.lock")));
            assert_eq!(part.status(), Path::new("/store").join(format!("{hash}-10.seen")));
            assert_eq!(part.record(), Path::new("/store").join(format!("{hash}-10.json")));
            assert_eq!(
                (part.main_of_key(), part.next(), part.token()),
                (files.main(), files.next(), files.token())
            );
        }
    }

    #[test]
    fn only_status_files_are_listed() {
        let dir = Path::new("/store");
        let hash = "0123456789abcdef".repeat(4);
        for status in [format!("{hash}.seen"), format!("{hash}-0.seen"), format!("{hash}-17.seen")] {
            let files = KeyFiles::of_status(dir, FileMode::PRIVATE, &status).unwrap();
            assert_eq!((files.name(), files.part_number()), (hash.as_str(), None), "{status}");
        }
        for other in [
            format!("{hash}.json"),
            format!("{hash}-.seen"),
            format!("{hash}-01.seen"),
            format!("{hash}-+1.seen"),
            format!("{hash}-4294967296.seen"),
            format!("{hash}-1-1.seen"),
            format!("{hash}.seen.tmp"),
            "a.seen".into(),
            format!("{}.seen", hash.to_uppercase()),
        ] {
            assert!(KeyFiles::of_status(dir, FileMode::PRIVATE, &other).is_none(), "{other}");
        }
    }
}
