//! Full disks: a small file system for the file store, and the check for the tool that limits a server's files.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A file system in memory of one megabyte.
#[derive(Debug)]
pub(crate) struct Disk(PathBuf);

impl Disk {
    /// Mounts a new file system on this directory.
    pub(crate) fn mount(directory: &Path) -> Result<Self, String> {
        let mut command = Command::new("mount");
        command.args(["-t", "tmpfs", "-o", "size=1m,mode=700", "leasehold-torture"]).arg(directory);
        let output = command.stdin(Stdio::null()).output().map_err(|error| format!("no `mount`: {error}"))?;
        if output.status.success() {
            return Ok(Self(directory.to_owned()));
        }
        let said = String::from_utf8_lossy(&output.stderr);
        Err(format!("a file system in memory has to be mounted, as root: {}", said.trim()))
    }

    /// Fills the free space.
    pub(crate) fn fill(&self) {
        let mut ballast = std::fs::File::create(self.ballast()).unwrap();
        while ballast.write_all(&[0; 4096]).is_ok() {}
    }

    pub(crate) fn free(&self) {
        std::fs::remove_file(self.ballast()).unwrap();
    }

    fn ballast(&self) -> PathBuf {
        self.0.join("ballast")
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // `-l` unmounts even if a process has a file open.
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// Checks that `prlimit` exists, which limits the files of a running server.
pub(crate) fn prlimit() -> Result<(), String> {
    let found = Command::new("prlimit").arg("--version").stdout(Stdio::null()).status();
    let missing = "prlimit is missing; it is part of util-linux, on Linux alone";
    found.map(drop).map_err(|_| missing.to_owned())
}
