//! New data directories.

use std::env;
use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::guarded::Guarded;
use crate::{Outcome, tree};

/// Creates the directory `data` of a server, without authentication or with the password in the file `password`.
pub(crate) fn data(process: &Guarded, binaries: &Path, has_password: bool) -> Outcome {
    if has_password {
        return initdb(process, binaries, &["-A", "scram-sha-256", "--pwfile=password"]);
    }
    // Copies an earlier result, because `initdb` takes half a second of CPU time and a copy a tenth of it.
    let (data, kept) = (process.directory().join("data"), kept(binaries));
    if let Some(kept) = kept.as_ref().filter(|kept| kept.exists()) {
        tree::copy(kept, &data, |path| process.give(path), |_, _| true)?;
        return tree::close(&data);
    }
    initdb(process, binaries, &["-A", "trust"])?;
    if let Some(kept) = kept {
        keep(&data, &kept);
    }
    Ok(())
}

/// Arguments of `initdb`.
const ARGUMENTS: [&str; 8] = ["-D", "data", "-U", "postgres", "-E", "UTF8", "--locale=C", "--no-sync"];

fn initdb(process: &Guarded, binaries: &Path, login: &[&str]) -> Outcome {
    process.run(&binaries.join("initdb"), |command| {
        command.args(ARGUMENTS).args(login);
    })
}

/// Returns the place of the kept copy. It is beside the running program, so cleaning the build removes it. Another
/// `initdb`, other arguments or another user use another place.
fn kept(binaries: &Path) -> Option<PathBuf> {
    let program = env::current_exe().ok()?;
    let made_by = fs::metadata(binaries.join("initdb")).ok()?;
    let mut made_with = DefaultHasher::new();
    (made_by.ino(), made_by.mtime(), ARGUMENTS, rustix::process::geteuid().as_raw()).hash(&mut made_with);
    Some(program.parent()?.join(format!("initdb-{:016x}", made_with.finish())))
}

/// Keeps a copy, as a whole or not at all, even with concurrent processes. If it cannot be written, each server runs
/// its own `initdb`.
fn keep(data: &Path, kept: &Path) {
    let Some(Ok(part)) = kept.parent().map(tempfile::tempdir_in) else { return };
    let copied = tree::copy(data, part.path(), |_| Ok(()), |_, _| true);
    if copied.is_ok() && fs::rename(part.path(), kept).is_ok() {
        let _ = part.keep();
    }
}
