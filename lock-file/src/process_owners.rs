//! Finds the living processes that have a lock file open, because they hold the lock after its holder has died.

use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The locked files of this machine's processes in one directory. Each process is read once, even if it holds several
/// keys.
pub(crate) struct ProcessOwners {
    /// Canonical path of the directory, or `None` if unknown.
    dir: Option<PathBuf>,
    locked: HashMap<u32, io::Result<HashSet<OsString>>>,
    /// The ids of all processes, read at the first search.
    pids: Option<Vec<u32>>,
}

impl ProcessOwners {
    pub(crate) fn of(dir: &Path) -> Self {
        Self { dir: fs::canonicalize(dir).ok(), locked: HashMap::new(), pids: None }
    }

    /// Returns the holders of the lock file `main`: the process `pid` of its record, or processes it has left behind.
    /// If the system does not show this, for example across PID namespaces, returns only the process id.
    pub(crate) fn owner(&mut self, main: &Path, pid: u32) -> String {
        self.find(main, pid).unwrap_or_else(|| format!("pid {pid}"))
    }

    fn find(&mut self, main: &Path, pid: u32) -> Option<String> {
        let file = main.file_name()?.to_owned();
        match self.locked_by(pid)? {
            Ok(locked) if locked.contains(&file) => return Some(named(pid)),
            // Gives up the search, because a process of another user cannot be read and might hold the lock.
            Err(e) if e.kind() != io::ErrorKind::NotFound => return None,
            Ok(_) | Err(_) => {}
        }
        let mut owners = self.pids.get_or_insert_with(processes).clone();
        owners.retain(|pid| matches!(self.locked_by(*pid), Some(Ok(locked)) if locked.contains(&file)));
        let owners: Vec<String> = owners.into_iter().map(named).collect();
        (!owners.is_empty()).then(|| format!("{}, left by pid {pid}", owners.join(" and ")))
    }

    fn locked_by(&mut self, pid: u32) -> Option<&io::Result<HashSet<OsString>>> {
        let dir = self.dir.as_deref()?;
        Some(self.locked.entry(pid).or_insert_with(|| locked_in(dir, pid)))
    }
}

/// Returns the files in `dir` that the process has open and locked. Not every system shows this.
fn locked_in(dir: &Path, pid: u32) -> io::Result<HashSet<OsString>> {
    let mut locked = HashSet::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))?.flatten() {
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        let (true, Some(file)) = (target.parent() == Some(dir), target.file_name()) else { continue };
        let info = Path::new("/proc").join(pid.to_string()).join("fdinfo").join(entry.file_name());
        let info = fs::read_to_string(info).unwrap_or_default();
        if info.lines().any(|line| line.starts_with("lock:") && line.contains("FLOCK")) {
            locked.insert(file.to_owned());
        }
    }
    Ok(locked)
}

/// Returns all process ids, in ascending order.
fn processes() -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut pids: Vec<u32> = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    pids.sort_unstable();
    pids
}

fn named(pid: u32) -> String {
    match fs::read_to_string(format!("/proc/{pid}/comm")) {
        Ok(command) => format!("pid {pid} ({})", command.trim_end()),
        Err(_) => format!("pid {pid}"),
    }
}
