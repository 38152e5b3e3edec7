//! The directory: its format marker, the names of a key's files, and how files are written.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use leasehold_api::{Error, ErrorKind, LockKey};
use sha2::{Digest as _, Sha256};

use crate::error::{corrupt, io_error};

/// The version of what is kept in the directory. A store of another version is refused.
pub const FORMAT: u32 = 1;

const MARKER: &str = "leasehold-format";
const MARKER_START: &str = "leasehold file store, format ";

/// Makes the directory if it is missing, checks that it is ours and can be written, and returns its
/// absolute path.
pub(crate) fn prepare(dir: &Path) -> Result<PathBuf, Error> {
    if dir.as_os_str().is_empty() {
        return Err(Error::new(
            ErrorKind::InvalidOption,
            "the directory of the file store has no name; give one (file:///path)",
        ));
    }
    let dir = std::path::absolute(dir).map_err(|e| io_error(e, "find", dir))?;
    make_dir(&dir)?;
    rustix::fs::access(&dir, rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK)
        .map_err(|e| io_error(e.into(), "write to", &dir))?;
    match check_marker(&dir)? {
        Marker::Ours => {}
        Marker::Missing => {
            make_marker(&dir)?;
            // Another process may have been first, perhaps one of another version.
            if let Marker::Missing = check_marker(&dir)? {
                return Err(io_error(io::ErrorKind::NotFound.into(), "read", &dir.join(MARKER)));
            }
        }
    }
    warn_about(&dir);
    Ok(dir)
}

fn make_dir(dir: &Path) -> Result<(), Error> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(dir);
    let what = made.and_then(|()| fs::metadata(dir));
    match what {
        Ok(meta) if meta.is_dir() => Ok(()),
        Ok(_) => Err(io_error(io::ErrorKind::NotADirectory.into(), "use", dir)),
        // A parent that cannot exist, as in /proc, is a wrong path rather than a passing trouble.
        Err(e) if e.kind() == io::ErrorKind::NotFound => Err(Error::new(
            ErrorKind::InvalidOption,
            format!(
                "cannot make the directory {}: {e}; choose a path whose parents exist or can be made",
                dir.display()
            ),
        )
        .with_source(e)),
        Err(e) => Err(io_error(e, "make the directory", dir)),
    }
}

enum Marker {
    Ours,
    Missing,
}

fn check_marker(dir: &Path) -> Result<Marker, Error> {
    let path = dir.join(MARKER);
    let text = match fs::read(&path) {
        Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Marker::Missing),
        Err(e) => return Err(io_error(e, "read", &path)),
    };
    let format = text
        .strip_prefix(MARKER_START)
        .and_then(|t| t.strip_suffix('\n'))
        .and_then(|t| t.parse::<u32>().ok());
    match format {
        Some(FORMAT) => Ok(Marker::Ours),
        Some(other) => Err(Error::new(
            ErrorKind::SchemaMissing,
            format!(
                "{} is a file store of format {other}, and this version works with format {FORMAT}; use the same version of leasehold everywhere, or another directory",
                dir.display()
            ),
        )),
        None => Err(corrupt(
            &path,
            "is not the marker of a file store",
            "if nothing else uses the directory, remove that file; else choose another directory",
        )),
    }
}

fn make_marker(dir: &Path) -> Result<(), Error> {
    let path = dir.join(MARKER);
    let temporary = dir.join(format!("{MARKER}.{}-{:x}.tmp", std::process::id(), fastrand::u64(..)));
    let text = format!("{MARKER_START}{FORMAT}\n");
    // A link does not replace what is there, so that the first process wins and nobody reads half a file.
    let made = write_new(&temporary, text.as_bytes(), true).and_then(|()| {
        match fs::hard_link(&temporary, &path) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            // File systems without links: the text is the same whoever writes it.
            Err(_) => fs::rename(&temporary, &path),
            Ok(()) => sync_dir(dir),
        }
    });
    // It is only left over when there was no link to make, or by a failure that is reported.
    let _ = fs::remove_file(&temporary);
    made.map_err(|e| io_error(e, "write", &path))
}

fn warn_about(dir: &Path) {
    if fs::metadata(dir).is_ok_and(|m| m.permissions().mode() & 0o002 != 0) {
        tracing::warn!(dir = %dir.display(), "everybody can write to the directory of the file store, and so take or break its locks; `chmod o-w` it");
    }
    if let Some(kind) = network_file_system(dir) {
        tracing::warn!(dir = %dir.display(), "the file store is on {kind}, where file locks may not exclude; use a local file system, or a server store between machines");
    }
}

#[cfg(target_os = "linux")]
fn network_file_system(dir: &Path) -> Option<&'static str> {
    let kind = rustix::fs::statfs(dir).ok()?.f_type;
    // The magic numbers of statfs(2), whose type differs between architectures.
    match u32::try_from(i128::from(kind) & 0xffff_ffff).ok()? {
        0x6969 => Some("NFS"),
        0x517b | 0xff53_4d42 | 0xfe53_4d42 => Some("SMB"),
        0x6573_5546 => Some("FUSE"),
        0x0102_1997 => Some("9P"),
        0x00c3_6400 => Some("Ceph"),
        0x5346_414f => Some("AFS"),
        0x0bd0_0bd0 => Some("Lustre"),
        _ => None,
    }
}

#[cfg(not(target_os = "linux"))]
fn network_file_system(_: &Path) -> Option<&'static str> {
    None
}

/// The files of one key.
#[derive(Clone, Debug)]
pub(crate) struct KeyFiles {
    dir: PathBuf,
    hash: String,
}

impl KeyFiles {
    pub(crate) fn new(dir: &Path, key: &LockKey) -> Self {
        Self { dir: dir.to_owned(), hash: hash(key) }
    }

    /// The files of the key whose status file has this name, if that is the name of one.
    pub(crate) fn of_status(dir: &Path, name: &str) -> Option<Self> {
        let hash = name.strip_suffix(".seen")?;
        let hex = hash.len() == 64 && hash.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        hex.then(|| Self { dir: dir.to_owned(), hash: hash.to_owned() })
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// The lock itself: empty, never replaced, never removed.
    pub(crate) fn main(&self) -> PathBuf {
        self.with("lock")
    }

    /// The waiter lock: locked by the waiter that is next.
    pub(crate) fn next(&self) -> PathBuf {
        self.with("next")
    }

    /// The status file: locked along with the lock, for those who only look.
    pub(crate) fn status(&self) -> PathBuf {
        self.with("seen")
    }

    /// Who holds or last held.
    pub(crate) fn record(&self) -> PathBuf {
        self.with("json")
    }

    /// The ceiling of the tokens.
    pub(crate) fn token(&self) -> PathBuf {
        self.with("token")
    }

    fn with(&self, extension: &str) -> PathBuf {
        self.dir.join(format!("{}.{extension}", self.hash))
    }
}

fn hash(key: &LockKey) -> String {
    hex::encode(Sha256::digest(key.as_str().as_bytes()))
}

/// Opens a lock file for locking, making it if it is missing.
pub(crate) fn open_lock(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

/// Replaces `path` as a whole: whoever reads it finds the old text or the new one. If `durable`, the new
/// one also survives a crash of the machine from here on.
///
/// Only one process may write `path` at a time: the holder of its key's lock.
pub(crate) fn replace(dir: &Path, path: &Path, bytes: &[u8], durable: bool) -> io::Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".tmp");
    let temporary = Path::new(&temporary);
    let replaced = write_new(temporary, bytes, durable).and_then(|()| fs::rename(temporary, path));
    if replaced.is_err() {
        // On a full disk half a file would take the space that is missing.
        let _ = fs::remove_file(temporary);
        return replaced;
    }
    if durable { sync_dir(dir) } else { Ok(()) }
}

fn write_new(path: &Path, bytes: &[u8], durable: bool) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    if durable { file.sync_all() } else { Ok(()) }
}

fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    // These names are the format: a change lets two versions hold one key at once.
    #[test]
    fn names_are_pinned() {
        for (key, hash) in [
            ("a", "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"),
            ("ledger:42", "30654b299df1b98366b156ba2d313566241d9a47b6bcd42cdea373a653b38c94"),
            ("nightly-report", "6743ba10a2b2c4879cf6af5c75140be7135b22597ac428e490673767b538d53e"),
            ("Schlüssel/🔑 ", "676a8cbb73a8225f4121a7083bf6b475fd7361fe98880a6f8cfefaad7a1af5c5"),
        ] {
            let files = KeyFiles::new(Path::new("/store"), &LockKey::new(key).unwrap());
            assert_eq!(files.main(), Path::new("/store").join(format!("{hash}.lock")), "{key}");
            assert_eq!(files.next(), Path::new("/store").join(format!("{hash}.next")));
            assert_eq!(files.status(), Path::new("/store").join(format!("{hash}.seen")));
            assert_eq!(files.record(), Path::new("/store").join(format!("{hash}.json")));
            assert_eq!(files.token(), Path::new("/store").join(format!("{hash}.token")));
        }
    }

    #[test]
    fn only_status_files_are_listed() {
        let dir = Path::new("/store");
        let hash = "0123456789abcdef".repeat(4);
        assert!(KeyFiles::of_status(dir, &format!("{hash}.seen")).is_some());
        for other in [
            format!("{hash}.json"),
            format!("{hash}.seen.tmp"),
            "a.seen".into(),
            format!("{}.seen", hash.to_uppercase()),
        ] {
            assert!(KeyFiles::of_status(dir, &other).is_none(), "{other}");
        }
    }

    #[test]
    fn a_failed_replacement_leaves_the_old_text_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        replace(dir.path(), &path, b"old", true).unwrap();
        fs::create_dir(dir.path().join("x.tmp")).unwrap();
        assert!(replace(dir.path(), &path, b"new", false).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"old");
    }
}
