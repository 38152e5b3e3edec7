//! A separate wall clock for some processes, through the library of `faketime`.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

/// A wall clock that replaces the kernel's.
#[derive(Debug)]
pub(crate) struct Clock {
    library: PathBuf,
    /// Directory of the file with the clock's lead. Other users can read it, because servers run as another user.
    directory: TempDir,
    ahead: i64,
}

impl Clock {
    /// Creates a clock that shows the right time.
    pub(crate) fn new(library: &Path) -> Self {
        let directory = tempfile::Builder::new().prefix("leasehold-clock-").tempdir_in("/tmp").unwrap();
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let mut clock = Self { library: library.to_owned(), directory, ahead: 0 };
        clock.step(0);
        clock
    }

    /// Returns the environment variables of processes with this clock.
    pub(crate) fn variables(&self) -> [(&'static str, String); 4] {
        let text = |path: &Path| path.to_str().unwrap().to_owned();
        [
            ("LD_PRELOAD", text(&self.library)),
            ("FAKETIME_TIMESTAMP_FILE", text(&self.directory.path().join("ahead"))),
            ("FAKETIME_NO_CACHE", "1".to_owned()),
            // Steps affect only the wall clock.
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1".to_owned()),
        ]
    }

    /// Moves the clock. Returns its lead in seconds.
    pub(crate) fn step(&mut self, seconds: i64) -> i64 {
        self.ahead += seconds;
        let path = self.directory.path().join("ahead");
        let new = path.with_extension("new");
        std::fs::write(&new, format!("{:+}\n", self.ahead)).unwrap();
        std::fs::rename(new, path).unwrap();
        self.ahead
    }
}

/// Returns the path of `faketime`'s library for programs with threads.
pub(crate) fn faketime() -> Result<PathBuf, String> {
    let parents = ["/usr/lib", "/usr/local/lib", "/usr/lib64"].map(PathBuf::from);
    // Debian has a folder for each architecture.
    let folders = std::fs::read_dir("/usr/lib").into_iter().flatten().flatten().map(|folder| folder.path());
    let library = |parent: PathBuf| parent.join("faketime/libfaketimeMT.so.1");
    let missing = "faketime is missing; install it with: apt-get install faketime";
    let mut libraries = parents.into_iter().chain(folders).map(library);
    libraries.find(|library| library.exists()).ok_or_else(|| missing.to_owned())
}
