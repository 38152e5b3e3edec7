//! Converts errors of the operating system into lock errors.

use std::fmt::Display;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use leasehold_api::{Error, ErrorKind};

use crate::directory::MARKER;

/// Creates the error of an operation on `path`, which `doing` names by a verb such as *read*.
pub(crate) fn io_error(error: io::Error, doing: impl Display, path: &Path) -> Error {
    let (kind, advice) = judge(&error);
    let advice = match (kind, owner_of(path)) {
        (ErrorKind::PermissionDenied, Some(owner)) => owner.advice(),
        _ => advice.to_owned(),
    };
    Error::new(kind, format!("cannot {doing} {}: {error}; {advice}", path.display())).with_source(error)
}

/// Returns whether `error` means a full disk or quota.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// Returns whether `error` is an [`io_error`] of a full disk or quota.
pub(crate) fn wants_room(error: &Error) -> bool {
    let source = std::error::Error::source(error).and_then(|source| source.downcast_ref());
    source.is_some_and(is_full)
}

/// Creates the error for a file with invalid content.
pub(crate) fn corrupt(path: &Path, why: impl Display, advice: impl Display) -> Error {
    Error::new(ErrorKind::Corrupt, format!("{} {why}; {advice}", path.display()))
}

/// The owner of a path in a store, if it is another user.
struct Owner<'a> {
    id: u32,
    dir: &'a Path,
    /// The user id of the directory's owner, if it differs from the file's owner.
    of_dir: Option<u32>,
    /// Permissions of the directory.
    mode_of_dir: u32,
}

impl Owner<'_> {
    fn advice(&self) -> String {
        let Self { id, dir, of_dir, mode_of_dir } = self;
        let dir = dir.display();
        let everybody = mode_of_dir & 0o002 != 0;
        if of_dir.is_some() && (everybody || mode_of_dir & 0o020 != 0) {
            let mode = if everybody { "0666" } else { "0660" };
            return format!(
                "it belongs to the user with ID {id}, who alone may use it, though the directory is shared: no mode was named at first. While no lock is used, have the superuser run `find {dir} -maxdepth 1 -type f -links 1 -exec chmod {mode} {{}} +`, or that user; from then on the files have that mode, and new ones too"
            );
        }
        if let Some(of_dir) = of_dir {
            return format!(
                "it belongs to the user with ID {id}, and its directory to {of_dir}, as after a run with sudo; while no lock is used, have the superuser run `find {dir} -maxdepth 1 -type f -links 1 -exec chown -h --reference={dir} {{}} +`, or remove it"
            );
        }
        let shared = "to share a directory between users, name a new one with a mode, file:///DIRECTORY?mode=0660 for one group or ?mode=0666 for everybody";
        // Advises these commands only for a directory with a marker, because they could ruin a system
        // directory.
        let change = if fs::symlink_metadata(self.dir.join(MARKER)).is_ok() {
            format!(
                ", or have its owner run, while no lock is used, `chmod 0660 {dir}/*; chmod 2770 {dir}` or the same with 0666 and 1777"
            )
        } else {
            String::new()
        };
        format!("it belongs to the user with ID {id}; {shared}{change}")
    }
}

fn owner_of(path: &Path) -> Option<Owner<'_>> {
    let at = |path| fs::symlink_metadata(path).ok();
    let dir = match at(path) {
        // Uses a directory itself, because its owner is visible even without access to its content.
        Some(meta) if meta.is_dir() => path,
        _ => path.parent()?,
    };
    let meta_of_dir = at(dir)?;
    let of_dir = meta_of_dir.uid();
    let id = at(path).map_or(of_dir, |meta| meta.uid());
    // Returns `None` for the superuser, because the owner is then never the reason for a refusal.
    let me = rustix::process::geteuid();
    let is_other = !me.is_root() && id != me.as_raw();
    is_other.then(|| Owner {
        id,
        dir,
        of_dir: (of_dir != id).then_some(of_dir),
        mode_of_dir: meta_of_dir.mode(),
    })
}

fn judge(error: &io::Error) -> (ErrorKind, &'static str) {
    use io::ErrorKind as Io;
    // Compares the error numbers, because the standard library has no kind for too many open files.
    if [rustix::io::Errno::MFILE, rustix::io::Errno::NFILE].iter().any(|e| e.raw_os_error() == code(error)) {
        return (
            ErrorKind::Capacity,
            "no more files can be opened: raise the limit (`ulimit -n`) or hold fewer locks, each of which keeps two or three files open",
        );
    }
    if rustix::io::Errno::NOLCK.raw_os_error() == code(error) {
        return (ErrorKind::Capacity, "the kernel has no room for another file lock: hold fewer locks");
    }
    match error.kind() {
        Io::PermissionDenied => (
            ErrorKind::PermissionDenied,
            "give this user write access to the directory or choose another directory",
        ),
        Io::ReadOnlyFilesystem => (
            ErrorKind::PermissionDenied,
            "the file system is read-only: choose a directory on a writable one",
        ),
        Io::StorageFull | Io::QuotaExceeded => {
            (ErrorKind::Capacity, "free some space, or choose a directory on another file system")
        }
        Io::NotADirectory | Io::IsADirectory | Io::AlreadyExists | Io::InvalidInput | Io::InvalidFilename => {
            (ErrorKind::InvalidOption, "choose a path that is a directory or does not exist yet")
        }
        Io::Unsupported => {
            (ErrorKind::Unsupported, "this file system has no file locks: choose a directory on a local one")
        }
        Io::InvalidData => (
            ErrorKind::Corrupt,
            "see who put it there, and remove it while nobody holds a lock of this directory",
        ),
        Io::NotFound => (
            ErrorKind::Unavailable,
            "the directory was removed or replaced meanwhile: leave it alone while locks are in use, and try again",
        ),
        _ => (ErrorKind::Unavailable, "check the file system and try again"),
    }
}

fn code(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::Errno;

    #[test]
    fn what_the_system_says_becomes_a_kind_and_an_advice() {
        for (errno, kind, advice) in [
            (Errno::NOSPC, ErrorKind::Capacity, "free some space"),
            (Errno::DQUOT, ErrorKind::Capacity, "free some space"),
            (Errno::MFILE, ErrorKind::Capacity, "ulimit -n"),
            (Errno::NFILE, ErrorKind::Capacity, "ulimit -n"),
            (Errno::NOLCK, ErrorKind::Capacity, "hold fewer"),
            (Errno::ACCESS, ErrorKind::PermissionDenied, "write access"),
            (Errno::PERM, ErrorKind::PermissionDenied, "write access"),
            (Errno::ROFS, ErrorKind::PermissionDenied, "read-only"),
            (Errno::NOTDIR, ErrorKind::InvalidOption, "is a directory"),
            (Errno::NOTSUP, ErrorKind::Unsupported, "file locks"),
            (Errno::IO, ErrorKind::Unavailable, "try again"),
        ] {
            let error = io_error(errno.into(), "write", Path::new("/store/x"));
            assert_eq!(error.kind(), kind, "{errno:?}");
            let text = error.to_string();
            assert!(text.contains(advice) && text.contains("/store/x"), "{errno:?}: {text}");
            assert!(std::error::Error::source(&error).is_some());
        }
    }

    #[test]
    fn only_a_store_is_to_be_opened_to_others() {
        let dir = tempfile::tempdir().unwrap();
        let of = |of_dir, mode_of_dir| Owner { id: 1000, dir: dir.path(), of_dir, mode_of_dir }.advice();
        let advice = |of_dir| of(of_dir, 0o700);
        assert!(!advice(None).contains("chmod") && advice(None).contains("mode=0660"), "{}", advice(None));
        fs::write(dir.path().join(MARKER), "").unwrap();
        assert!(advice(None).contains("chmod 0660"), "{}", advice(None));
        // The advice must not contain `chmod`, because the directory's owner cannot change another user's
        // file either.
        assert!(advice(Some(0)).contains("chown -h --reference") && !advice(Some(0)).contains("chmod"));
        for (mode_of_dir, mode) in [(0o2770, "chmod 0660"), (0o1777, "chmod 0666")] {
            let advice = of(Some(0), mode_of_dir);
            assert!(
                advice.contains(mode) && !advice.contains("chown") && !advice.contains("sudo"),
                "{advice}"
            );
        }
    }
}
