//! The user that runs the servers.

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fs};

use rustix::fs::StatVfsMountFlags;

use crate::Outcome;

/// A file system in memory, if it exists. A new database has some three hundred files, and on a disk the kernel takes
/// four times as long to create them.
const MEMORY: &str = "/dev/shm";

/// Minimum free space of [`MEMORY`]. Twice as much main memory must be available, because no test run must fill it.
const ROOM: u64 = 6 << 30;

/// The medium of a server's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Medium {
    /// A disk.
    Disk,
    /// Memory if enough is free, otherwise a disk.
    Memory,
    /// [`Medium::Memory`] if the file system allows programs, because the server's program is copied to its data.
    MemoryWithProgram,
}

/// The user that runs the servers, or `None` for the current one. Servers refuse root.
#[derive(Debug, Clone, Copy)]
pub(crate) struct User(Option<(u32, u32)>);

impl User {
    pub(crate) fn for_servers() -> Self {
        if !rustix::process::geteuid().is_root() {
            return Self(None);
        }
        let known = fs::read_to_string("/etc/passwd").unwrap_or_default();
        let find = |name: &str| {
            let mut fields = known
                .lines()
                .map(|line| line.split(':'))
                .find_map(|mut fields| (fields.next() == Some(name)).then_some(fields))?;
            let user = fields.nth(1)?.parse().ok()?;
            Some((user, fields.next()?.parse().ok()?))
        };
        Self(Some(find("postgres").or_else(|| find("nobody")).unwrap_or((65_534, 65_534))))
    }

    /// Builds a command that runs as this user in its own process group, because Ctrl-C ends the tests but must not
    /// end the cleanup. Its streams are null, because a reader of the tests' output would otherwise wait for the
    /// command.
    pub(crate) fn command(self, program: impl AsRef<std::ffi::OsStr>, directory: &Path) -> Command {
        let mut command = Command::new(program);
        command.current_dir(directory).process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.env_remove("PGHOST").env_remove("PGPORT").env_remove("PGDATA").env_remove("PGUSER");
        if let Some((user, group)) = self.0 {
            command.uid(user).gid(group);
        }
        command
    }

    /// Creates an empty directory owned by this user.
    pub(crate) fn directory(self, prefix: &str, medium: Medium) -> Outcome<PathBuf> {
        let bases = [env::temp_dir(), "/tmp".into(), "/var/tmp".into()];
        let in_memory = match medium {
            Medium::Disk => false,
            Medium::Memory => has_room(MEMORY.as_ref()),
            Medium::MemoryWithProgram => has_room(MEMORY.as_ref()) && allows_programs(MEMORY.as_ref()),
        };
        let bases = if in_memory { [&[MEMORY.into()][..], &bases].concat() } else { bases.to_vec() };
        // The other user must be able to enter the directory.
        let is_open = |base: &&PathBuf| {
            self.0.is_none()
                || fs::metadata(base).is_ok_and(|data| data.permissions().mode() & 0o003 == 0o003)
        };
        let base = bases.iter().find(is_open).unwrap_or(&bases[0]);
        let made = tempfile::Builder::new().prefix(prefix).tempdir_in(base);
        let made =
            made.map_err(|error| format!("cannot create a directory in {}: {error}", base.display()))?;
        self.give(made.path())?;
        Ok(made.keep())
    }

    /// Makes this user the owner.
    pub(crate) fn give(self, path: &Path) -> Outcome {
        let Some((user, group)) = self.0 else { return Ok(()) };
        std::os::unix::fs::chown(path, Some(user), Some(group))
            .map_err(|error| format!("cannot change the owner of {}: {error}", path.display()))
    }
}

fn allows_programs(memory: &Path) -> bool {
    rustix::fs::statvfs(memory).is_ok_and(|data| !data.f_flag.contains(StatVfsMountFlags::NOEXEC))
}

fn has_room(memory: &Path) -> bool {
    let free = rustix::fs::statvfs(memory).map_or(0, |data| data.f_bavail.saturating_mul(data.f_frsize));
    let known = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kilobytes: Option<u64> = known
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.split_whitespace().next()?.parse().ok());
    free >= ROOM && kilobytes.is_some_and(|kilobytes| kilobytes >= 2 * (ROOM >> 10))
}
