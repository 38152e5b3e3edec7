//! The whole suite on real directories, in real time, with real processes.

#![allow(clippy::unwrap_used)]

use std::path::PathBuf;
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
        Disturbed::<FileBackend>::supports()
    }

    async fn client(&self, _: ClientSetup) -> Result<FaultyClient, Error> {
        let backend = Disturbed::new(FileConfig::new(self.dir.path()).backend()?);
        let faults = backend.faults();
        // Calls that never answer are given up sooner than in production, to spare the tests the wait.
        let mut timing = backend.timing();
        timing.request_timeout = Duration::from_secs(2) * pace();
        let engine = Engine::builder(backend).timing(timing).start()?;
        Ok(FaultyClient::new(Arc::new(engine), faults))
    }
}
