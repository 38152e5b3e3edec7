//! Opens, reads and writes single files, even in another user's directory.
//!
//! Users with write access to the directory might be hostile to the superuser or to each other. No link is followed and
//! no file is truncated. Only plain files are opened, unless the directory belongs to this user alone. If the sticky
//! bit prevents replacing another user's file, it is written in place.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, fchown};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::io::Errno;

/// Limit above the size of any valid file.
const LARGEST: u64 = 64 * 1024;

/// The permissions of all files in a directory, independent of the umask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileMode(u32);

impl FileMode {
    /// Access only for the directory's user.
    pub(crate) const PRIVATE: Self = Self(0o600);

    /// Returns the mode with these bits, or `None` if a class of users would get an unusable combination.
    pub(crate) fn new(bits: u32) -> Option<Self> {
        let for_others = [bits >> 3 & 7, bits & 7];
        let is_usable = bits >> 6 == 6 && for_others.iter().all(|who| [0, 4, 6].contains(who));
        is_usable.then_some(Self(bits))
    }

    /// Returns the mode of an existing file.
    pub(crate) fn of(file: &fs::Metadata) -> Self {
        Self(file.mode() & 0o666)
    }

    pub(crate) fn bits(self) -> u32 {
        self.0
    }

    pub(crate) fn is_shared(self) -> bool {
        self.0 & 0o077 != 0
    }

    /// Returns the permissions of a new directory for such files. Readers can enter it, and writers can add files. New
    /// files inherit the directory's group, or, if all users can write, only a file's owner can remove it.
    pub(crate) fn of_directory(self) -> u32 {
        let enter = (self.0 & 0o444) >> 2;
        let special = match self.0 {
            everybody if everybody & 0o002 != 0 => 0o1000,
            group if group & 0o070 != 0 => 0o2000,
            _ => 0,
        };
        self.0 | enter | special
    }

    /// Creates a file under a new name.
    fn create(self, path: &Path, bytes: &[u8], durable: bool) -> io::Result<()> {
        let mut file = options().write(true).create_new(true).open(path)?;
        if self.is_shared() {
            file.set_permissions(fs::Permissions::from_mode(self.0))?;
        }
        // Changes the owner of a new file only, because an existing file could belong to any user.
        if let Some(owner) = is_for_another(path) {
            fchown(&file, Some(owner), None)?;
        }
        file.write_all(bytes)?;
        if durable { file.sync_all() } else { Ok(()) }
    }
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.mode(0o600);
    options
}

fn open(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let is_own = is_in_own_directory(path);
    // Opens without blocking, because another user could have placed a pipe at this path.
    let flags = if is_own { OFlags::NOFOLLOW } else { OFlags::NOFOLLOW | OFlags::NONBLOCK };
    options.custom_flags(flags.bits().cast_signed());
    let not_plain = || io::Error::new(io::ErrorKind::InvalidData, "it is not a plain file");
    let is = |e: &io::Error, errno: Errno| e.raw_os_error() == Some(errno.raw_os_error());
    match options.open(path) {
        Ok(file) if is_own || file.metadata()?.is_file() => Ok(file),
        Ok(_) => Err(not_plain()),
        // The system returns these errors for a link and for a pipe without a reader.
        Err(e) if is(&e, Errno::LOOP) || is(&e, Errno::NXIO) => Err(not_plain()),
        Err(e) => Err(e),
    }
}

/// Returns whether only this user and the superuser can write to the directory.
fn is_in_own_directory(path: &Path) -> bool {
    let directory = path.parent().and_then(|directory| fs::metadata(directory).ok());
    directory.is_some_and(|directory| {
        directory.uid() == rustix::process::geteuid().as_raw() && directory.mode() & 0o022 == 0
    })
}

/// Returns the directory's user if the superuser creates a file in it, because that user must be able to open the file.
fn is_for_another(path: &Path) -> Option<u32> {
    let directory = path.parent().filter(|_| rustix::process::geteuid().is_root())?;
    fs::metadata(directory).ok().map(|directory| directory.uid()).filter(|owner| *owner != 0)
}

/// Opens a lock file for locking, and creates it if it is missing.
pub(crate) fn open_lock(path: &Path, mode: FileMode) -> io::Result<File> {
    let mut options = options();
    options.read(true).write(true);
    if !mode.is_shared() && is_for_another(path).is_none() {
        return open(options.create(true).truncate(false), path);
    }
    // Opens first and then creates, because in a sticky directory Linux refuses to open another user's file
    // with `O_CREAT`.
    match open(&mut options, path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            place(path, b"", mode, false)?;
            open(&mut options, path)
        }
        answer => answer,
    }
}

/// Opens a file of the store for reading.
pub(crate) fn open_to_look(path: &Path) -> io::Result<File> {
    open(options().read(true), path)
}

/// Reads the content of the file at `path`.
pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_to_look(path)?.take(LARGEST).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Reads the end of the file at `path`, up to the limit of a valid file.
pub(crate) fn read_end(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = open_to_look(path)?;
    let start = file.metadata()?.len().saturating_sub(LARGEST);
    file.seek(SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    file.take(LARGEST).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Appends to the existing file at `path` by one call, so the writes of several processes do not mix.
pub(crate) fn append(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = open(options().append(true), path)?;
    has_one_name(&file.metadata()?)?;
    file.write_all(bytes)
}

/// Creates a file with this content unless it exists. A reader always finds the complete content.
pub(crate) fn place(path: &Path, bytes: &[u8], mode: FileMode, durable: bool) -> io::Result<()> {
    let temporary = temporary(path);
    let placed = mode.create(&temporary, bytes, durable).and_then(|()| {
        match fs::hard_link(&temporary, path) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            // Renames instead on a file system without hard links, which also has no permissions that matter.
            Err(_) => fs::rename(&temporary, path),
            Ok(()) => Ok(()),
        }
    });
    // Removes the temporary name and ignores the result: after a rename the name is gone, and other failures
    // are reported.
    let _ = fs::remove_file(&temporary);
    placed
}

/// Replaces the content of `path`. If `durable`, the new content survives a crash of the machine after the call.
///
/// In a private directory, a reader finds the old content or the new one. In a shared one the file is written in place,
/// by one call and never shorter. The file is then complete even if this process dies, but a concurrent reader might
/// have to read again.
///
/// Only one process can write `path` at a time: the holder of its key's lock.
pub(crate) fn replace(path: &Path, bytes: &[u8], mode: FileMode, durable: bool) -> io::Result<()> {
    if mode.is_shared() {
        match open(options().read(true).write(true), path) {
            Ok(file) => return overwrite(&file, bytes, durable),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
    }
    let temporary = if mode.is_shared() { temporary(path) } else { with_suffix(path, "tmp") };
    let create = || mode.create(&temporary, bytes, durable);
    let created = match create() {
        // Removes the file that a crash has left, because in a private directory the temporary name is fixed.
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
            fs::remove_file(&temporary).and_then(|()| create())
        }
        created => created,
    };
    let replaced = created.and_then(|()| fs::rename(&temporary, path));
    if replaced.is_err() {
        // Removes the incomplete file, because it would occupy space on a full disk.
        let _ = fs::remove_file(&temporary);
        return replaced;
    }
    match path.parent() {
        Some(dir) if durable => sync_dir(dir),
        _ => Ok(()),
    }
}

fn overwrite(file: &File, bytes: &[u8], durable: bool) -> io::Result<()> {
    let there = file.metadata()?;
    has_one_name(&there)?;
    // Overwrites the rest of a longer old content with white space, which JSON permits at the end.
    let mut text = bytes.to_vec();
    text.resize(bytes.len().max(usize::try_from(there.len().min(LARGEST)).unwrap_or(0)), b'\n');
    file.write_all_at(&text, 0)?;
    if durable { file.sync_data() } else { Ok(()) }
}

/// Refuses a file with another name.
fn has_one_name(file: &fs::Metadata) -> io::Result<()> {
    if file.nlink() > 1 {
        let why = "it has another name (a hard link), so it may be somebody's own file";
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    Ok(())
}

pub(crate) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

fn temporary(path: &Path) -> PathBuf {
    with_suffix(path, &format!("{}-{:x}.tmp", std::process::id(), fastrand::u64(..)))
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".");
    name.push(suffix);
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    const EVERYBODY: FileMode = FileMode(0o666);

    #[test]
    fn modes_let_read_or_read_and_write() {
        for (bits, directory) in
            [(0o600, 0o700), (0o640, 0o2750), (0o660, 0o2770), (0o664, 0o2775), (0o666, 0o1777)]
        {
            assert_eq!(FileMode::new(bits).unwrap().of_directory(), directory, "{bits:o}");
        }
        for bits in [0, 0o066, 0o400, 0o700, 0o620, 0o661, 0o602, 0o1600, 0o4666] {
            assert_eq!(FileMode::new(bits), None, "{bits:o}");
        }
    }

    #[test]
    fn a_failed_replacement_leaves_the_old_text_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        replace(&path, b"old", FileMode::PRIVATE, true).unwrap();
        fs::create_dir(dir.path().join("x.tmp")).unwrap();
        assert!(replace(&path, b"new", FileMode::PRIVATE, false).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"old");
    }

    #[test]
    fn a_shared_file_is_written_in_place_and_reads_as_what_was_written_last() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        replace(&path, b"[1,2,3]", EVERYBODY, true).unwrap();
        let before = fs::metadata(&path).unwrap();
        assert_eq!(before.mode() & 0o777, 0o666, "whatever the umask is");
        for text in ["[1]", "[1,2,3,4,5,6]"] {
            replace(&path, text.as_bytes(), EVERYBODY, true).unwrap();
            let read: Vec<u32> = serde_json::from_slice(&read(&path).unwrap()).unwrap();
            assert_eq!(serde_json::to_string(&read).unwrap(), text);
        }
        assert_eq!(fs::metadata(&path).unwrap().ino(), before.ino());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn what_others_put_there_is_neither_followed_nor_written_nor_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o1777)).unwrap();
        let (victim, path) = (dir.path().join("victim"), dir.path().join("x"));
        fs::write(&victim, "precious").unwrap();
        let refused = |what: &str| {
            for mode in [EVERYBODY, FileMode::PRIVATE] {
                for opened in [open_lock(&path, mode), open_to_look(&path)] {
                    assert_eq!(opened.unwrap_err().to_string(), "it is not a plain file", "{what}");
                }
            }
            assert!(replace(&path, b"[]", EVERYBODY, false).is_err(), "{what}");
            assert_eq!(fs::read(&victim).unwrap(), b"precious", "{what}");
            fs::remove_file(&path).unwrap();
        };
        symlink(&victim, &path).unwrap();
        refused("a link");
        symlink(dir.path().join("missing"), &path).unwrap();
        refused("a link to nothing");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        refused("a pipe");
        // The name of the temporary file by which a private directory replaces its file `x`.
        let temporary = dir.path().join("x.tmp");
        symlink(&victim, &temporary).unwrap();
        replace(&path, b"[]", FileMode::PRIVATE, false).unwrap();
        assert_eq!(
            (read(&path).unwrap(), fs::read(&victim).unwrap()),
            (b"[]".to_vec(), b"precious".to_vec())
        );
        fs::remove_file(&path).unwrap();
        fs::hard_link(&victim, &path).unwrap();
        assert!(replace(&path, b"[]", EVERYBODY, false).is_err());
        assert_eq!(fs::read(&victim).unwrap(), b"precious");
    }
}
