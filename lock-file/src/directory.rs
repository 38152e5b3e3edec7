//! The directory and its format marker, whose permissions apply to all files in it.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use leasehold_api::{Error, ErrorKind};

use crate::error::{corrupt, io_error};
use crate::files::{FileMode, open_lock, place, read, sync_dir};
use crate::locked_file::LockedFile;

/// The version of the directory's format. A directory with another version is refused.
pub const FORMAT: u32 = 1;

pub(crate) const MARKER: &str = "leasehold-format";
const MARKER_START: &str = "leasehold file store, format ";

/// Creates the directory if it is missing, and checks that it is a store and writable. Returns its absolute path and
/// the mode of its files, from `mode` if new, otherwise from its marker. A given `mode` must equal the marker's.
pub(crate) fn prepare(dir: &Path, mode: Option<FileMode>) -> Result<(PathBuf, FileMode), Error> {
    let dir = absolute(dir)?;
    make_dir(&dir, mode.unwrap_or(FileMode::PRIVATE))?;
    rustix::fs::access(&dir, rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK)
        .map_err(|e| io_error(e.into(), "write to", &dir))?;
    let found = match check_marker(&dir)? {
        Some(found) => found,
        None => {
            make_marker(&dir, mode.unwrap_or(FileMode::PRIVATE))?;
            // Checks again, because another process might have created the marker first, perhaps with another
            // version.
            let missing = || io_error(io::ErrorKind::NotFound.into(), "read", &dir.join(MARKER));
            check_marker(&dir)?.ok_or_else(missing)?
        }
    };
    if let Some(wanted) = mode.filter(|mode| *mode != found) {
        return Err(Error::new(
            ErrorKind::InvalidOption,
            format!(
                "the files in {dir} have the mode {:04o}, not {wanted:04o}; leave the mode out to follow it, or change it for all of them while no lock is used: `chmod {wanted:04o} {dir}/*; chmod {:o} {dir}`",
                found.bits(),
                wanted.of_directory(),
                wanted = wanted.bits(),
                dir = dir.display(),
            ),
        ));
    }
    try_a_lock(&dir, found)?;
    for caution in cautions(&dir) {
        tracing::warn!("{caution}");
    }
    Ok((dir, found))
}

/// Refuses a file system that grants a lock which is already held, like some network file systems that report
/// success for each request. Tries this on the marker, which other processes lock no longer than this
/// function does.
fn try_a_lock(dir: &Path, mode: FileMode) -> Result<(), Error> {
    let path = marker(dir);
    // Takes a shared lock first, because it does not conflict with other processes that open the directory.
    let locked = open_lock(&path, mode).and_then(LockedFile::shared);
    let held = match locked {
        Ok(Some(held)) => held,
        Ok(None) => return Ok(()),
        // Skips the test: a process without write access to the marker gets the error at its first lock.
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => return Ok(()),
        Err(e) => return Err(io_error(e, "lock", &path)),
    };
    let granted = open_lock(&path, mode).and_then(LockedFile::exclusive);
    drop(held);
    match granted {
        Ok(None) => Ok(()),
        Ok(Some(_)) => Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "the file system of {} grants a lock that is held, so that it would exclude nobody; use a local file system, or a server store",
                dir.display()
            ),
        )),
        Err(e) => Err(io_error(e, "lock", &path)),
    }
}

/// Checks that an existing directory is a store, and creates nothing.
pub(crate) fn look_into(dir: &Path) -> Result<(PathBuf, FileMode), Error> {
    let dir = absolute(dir)?;
    // Without a marker the directory has no locks, because the marker is created first.
    let found = check_marker(&dir)?;
    Ok((dir, found.unwrap_or(FileMode::PRIVATE)))
}

fn absolute(dir: &Path) -> Result<PathBuf, Error> {
    if dir.as_os_str().is_empty() {
        return Err(Error::new(
            ErrorKind::InvalidOption,
            "the directory of the file store has no name; give one (file:///path)",
        ));
    }
    std::path::absolute(dir).map_err(|e| io_error(e, "find", dir))
}

fn make_dir(dir: &Path, mode: FileMode) -> Result<(), Error> {
    let made = if dir.is_dir() { Ok(()) } else { make_new_dir(dir, mode) };
    let what = made.and_then(|()| fs::metadata(dir));
    match what {
        Ok(meta) if meta.is_dir() => Ok(()),
        Ok(_) => Err(io_error(io::ErrorKind::NotADirectory.into(), "use", dir)),
        // Reports a wrong path and not a transient error, because such a parent cannot exist, as in /proc.
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

/// Returns the path of the format marker, whose permissions apply to all files.
pub(crate) fn marker(dir: &Path) -> PathBuf {
    dir.join(MARKER)
}

fn make_new_dir(dir: &Path, mode: FileMode) -> io::Result<()> {
    if !mode.is_shared() {
        return DirBuilder::new().recursive(true).mode(0o700).create(dir);
    }
    if let Some(parent) = dir.parent() {
        DirBuilder::new().recursive(true).mode(0o755).create(parent)?;
    }
    match DirBuilder::new().mode(0o700).create(dir) {
        // Sets the permissions separately, because the umask does not apply to this call.
        Ok(()) => fs::set_permissions(dir, fs::Permissions::from_mode(mode.of_directory())),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(e) => Err(e),
    }
}

/// Returns the mode of the marker, or `None` if it is missing. Refuses an invalid one.
fn check_marker(dir: &Path) -> Result<Option<FileMode>, Error> {
    let path = dir.join(MARKER);
    let found = fs::symlink_metadata(&path).and_then(|meta| {
        let mode = FileMode::of(&meta);
        read(&path).map(|bytes| (String::from_utf8_lossy(&bytes).into_owned(), mode))
    });
    let (text, mode) = match found {
        Ok(found) => found,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(io_error(e, "read", &path)),
    };
    let format = text
        .strip_prefix(MARKER_START)
        .and_then(|t| t.strip_suffix('\n'))
        .and_then(|t| t.parse::<u32>().ok());
    match format {
        Some(FORMAT) => Ok(Some(mode)),
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

fn make_marker(dir: &Path, mode: FileMode) -> Result<(), Error> {
    let path = dir.join(MARKER);
    let text = format!("{MARKER_START}{FORMAT}\n");
    // Places the complete file: the first process wins, and no process reads half a file.
    let made = place(&path, text.as_bytes(), mode, true).and_then(|()| sync_dir(dir));
    made.map_err(|e| io_error(e, "write", &path))
}

/// Returns warnings about a directory as a store, as sentences: other users could remove its files, or its file
/// system's locks might not exclude. Opening a store logs them. Empty for a missing directory.
#[must_use]
pub fn cautions(dir: impl AsRef<Path>) -> Vec<String> {
    let dir = dir.as_ref();
    let mut cautions = Vec::new();
    if fs::metadata(dir).is_ok_and(|m| m.permissions().mode() & 0o1002 == 0o002) {
        cautions.push(format!(
            "everybody can write to {}, and so remove its files and break its locks; `chmod +t` it if its users share it, else `chmod o-w`",
            dir.display()
        ));
    }
    if let Some(kind) = network_file_system(dir) {
        cautions.push(format!(
            "{} is on {kind}, where file locks may not exclude; use a local file system, or a server store between machines",
            dir.display()
        ));
    }
    cautions
}

#[cfg(target_os = "linux")]
fn network_file_system(dir: &Path) -> Option<&'static str> {
    let kind = rustix::fs::statfs(dir).ok()?.f_type;
    // Compares the magic numbers of statfs(2), whose type differs between architectures.
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
