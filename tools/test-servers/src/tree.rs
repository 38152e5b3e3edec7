//! Copies of data directories.

use std::fs;
use std::io::{Error, ErrorKind};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use crate::Outcome;

/// Copies the wanted files of `from` and passes each created path to `give`. `is_wanted` gets the names of the
/// topmost folder and of the file. Skips files that a server removes during the copy.
pub(crate) fn copy(
    from: &Path,
    to: &Path,
    give: impl Fn(&Path) -> Outcome,
    is_wanted: fn(&str, &str) -> bool,
) -> Outcome {
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        let failed = |error: Error| format!("cannot copy {}: {error}", from.join(&folder).display());
        let top = folder.iter().next().map(|top| top.to_string_lossy().into_owned()).unwrap_or_default();
        let entries = match fs::read_dir(from.join(&folder)) {
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            entries => entries.map_err(failed)?,
        };
        let target = to.join(&folder);
        fs::create_dir_all(&target).map_err(failed)?;
        give(&target)?;
        for entry in entries {
            let entry = entry.map_err(failed)?;
            let path = folder.join(entry.file_name());
            if !is_wanted(&top, &entry.file_name().to_string_lossy()) {
                continue;
            }
            if entry.file_type().map_err(failed)?.is_dir() {
                folders.push(path);
                continue;
            }
            match fs::copy(from.join(&path), to.join(&path)) {
                Ok(_) => give(&to.join(&path))?,
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(failed(error)),
            }
        }
    }
    Ok(())
}

/// Restricts a data directory to its owner, as the server requires.
pub(crate) fn close(directory: &Path) -> Outcome {
    fs::set_permissions(directory, fs::Permissions::from_mode(0o700))
        .map_err(|error| format!("cannot change the mode of {}: {error}", directory.display()))
}
