//! New data directories.

use std::env;
use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::guarded::Guarded;
use crate::{Outcome, tree};

/// Makes the directory `data` of a server that trusts everybody, or asks for the password in the file `password`.
pub(crate) fn data(process: &Guarded, binaries: &Path, has_password: bool) -> Outcome {
    if has_password {
        return initdb(process, binaries, &["-A", "scram-sha-256", "--pwfile=password"]);
    }
    // `initdb` takes half a second of a processor, a copy of what it made a tenth of that.
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

/// What a server is made with.
const ARGUMENTS: [&str; 8] = ["-D", "data", "-U", "postgres", "-E", "UTF8", "--locale=C", "--no-sync"];

fn initdb(process: &Guarded, binaries: &Path, login: &[&str]) -> Outcome {
    process.run(&binaries.join("initdb"), |command| {
        command.args(ARGUMENTS).args(login);
    })
}

/// Where a copy is kept for the next: beside the program that runs, so that it goes away with what was built. Another
/// `initdb`, other arguments and another user have another one.
fn kept(binaries: &Path) -> Option<PathBuf> {
    let program = env::current_exe().ok()?;
    let made_by = fs::metadata(binaries.join("initdb")).ok()?;
    let mut made_with = DefaultHasher::new();
    (made_by.ino(), made_by.mtime(), ARGUMENTS, rustix::process::geteuid().as_raw()).hash(&mut made_with);
    Some(program.parent()?.join(format!("initdb-{:016x}", made_with.finish())))
}

/// Whole or not at all, whoever else does the same. Where it cannot be written, each server has its own `initdb`.
fn keep(data: &Path, kept: &Path) {
    let Some(Ok(part)) = kept.parent().map(tempfile::tempdir_in) else { return };
    let copied = tree::copy(data, part.path(), |_| Ok(()), |_, _| true);
    if copied.is_ok() && fs::rename(part.path(), kept).is_ok() {
        let _ = part.keep();
    }
}
