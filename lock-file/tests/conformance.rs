//! The whole suite on real directories, in real time, with real processes.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, Lock};
use leasehold_conformance::{
    ClientSetup, Disturbed, Factory, FaultSet, Faults, FaultyClient, Harness, Time, async_trait, pace, suite,
};
use leasehold_engine::{Backend, Engine};
use leasehold_file::{FileBackend, FileConfig};

suite!(FileFactory);

struct FileFactory;

#[async_trait]
impl Factory for FileFactory {
    fn time(&self) -> Time {
        Time::Real
    }

    async fn open(&self) -> Result<Box<dyn Harness>, Error> {
        Ok(Box::new(Directory { dir: tempfile::tempdir().unwrap() }))
    }

    async fn connect_child(&self, spec: &str) -> Result<Arc<dyn Lock>, Error> {
        Ok(Arc::new(FileConfig::new(PathBuf::from(spec)).connect()?))
    }
}

/// A fresh directory for each case.
#[derive(Debug)]
struct Directory {
    dir: tempfile::TempDir,
}

#[async_trait]
impl Harness for Directory {
    async fn client(&self) -> Result<Arc<dyn Lock>, Error> {
        Ok(Arc::new(FileConfig::new(self.dir.path()).connect()?))
    }

    fn faults(&self) -> Option<&dyn Faults> {
        Some(self)
    }

    fn child(&self) -> Option<String> {
        Some(self.dir.path().display().to_string())
    }
}

#[async_trait]
impl Faults for Directory {
    fn supports(&self) -> FaultSet {
        let mut set = Disturbed::<FileBackend>::supports();
        // Waiters wait in the kernel, which loses no notification.
        (set.restart, set.hand_over_off, set.mute) = (true, true, true);
        set
    }

    async fn client(&self, setup: ClientSetup) -> Result<FaultyClient, Error> {
        let backend = Disturbed::new(FileConfig::new(self.dir.path()).backend()?);
        let faults = backend.faults();
        // The limit of a call is shorter than in production, to shorten tests without replies.
        let mut timing = backend.timing();
        timing.request_timeout = Duration::from_secs(2) * pace();
        let engine = Engine::builder(backend).timing(timing).handover(!setup.without_hand_over).start()?;
        Ok(FaultyClient::new(Arc::new(engine), faults))
    }

    /// Simulates a restart of the machine: copies the files, so that no process has them open or locked.
    async fn restart(&self) {
        let (place, before) = (self.dir.path(), self.dir.path().with_extension("before"));
        fs::rename(place, &before).unwrap();
        copy(&before, place);
        fs::remove_dir_all(before).unwrap();
    }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    fs::set_permissions(to, fs::metadata(from).unwrap().permissions()).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy(&entry.path(), &to),
            false => drop(fs::copy(entry.path(), to).unwrap()),
        }
    }
}
