//! Who really keeps a lock whose holder has died: living processes that have its locked file open.

use std::fs;
use std::io;
use std::path::Path;

/// The owner to show for a lock that is held by the file at `main`, where it is not, or not only, the process `pid` of
/// its record. `None`: show that one, also where the system does not tell.
pub(crate) fn other_owner(main: &Path, pid: u32) -> Option<String> {
    let main = fs::canonicalize(main).ok()?;
    match keeps(pid, &main) {
        Ok(true) => return None,
        // Another user's process, which may well be the one.
        Err(e) if e.kind() != io::ErrorKind::NotFound => return None,
        Ok(false) | Err(_) => {}
    }
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let mut keepers: Vec<u32> = pids.filter(|pid| keeps(*pid, &main).unwrap_or(false)).collect();
    keepers.sort_unstable();
    let named = |pid: &u32| match fs::read_to_string(format!("/proc/{pid}/comm")) {
        Ok(command) => format!("pid {pid} ({})", command.trim_end()),
        Err(_) => format!("pid {pid}"),
    };
    let keepers: Vec<String> = keepers.iter().map(named).collect();
    (!keepers.is_empty()).then(|| format!("{}, left by pid {pid}", keepers.join(" and ")))
}

/// Whether the process has the file at `main` open and locked by what it has open. Not every system tells.
fn keeps(pid: u32, main: &Path) -> io::Result<bool> {
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))?.flatten() {
        if fs::read_link(entry.path()).is_ok_and(|target| target == main) {
            let number = entry.file_name();
            let info = Path::new("/proc").join(pid.to_string()).join("fdinfo").join(number);
            let info = fs::read_to_string(info).unwrap_or_default();
            if info.lines().any(|line| line.starts_with("lock:") && line.contains("FLOCK")) {
                return Ok(true);
            }
        }
    }
    Ok(false)
}
