//! The suite's basic cases on every store, through blocking calls.

use std::sync::Arc;

use leasehold::{Error, Lock, async_trait, blocking};
use leasehold_conformance::{Factory, Harness, Outcome, Run, Time};
use tempfile::TempDir;
use test_servers::{Database, Etcd, fresh_database};

use super::adapter::Adapter;
use super::url_of;

/// The groups that need no fault: exclusion, waiting, releasing, ownership, the end of a hold, holds that change clients.
const BASIC: [&str; 6] =
    ["exclusion::", "timeouts::", "release::", "ownership::", "max_hold::", "portable::"];

/// The cases with many keys, for which the URL of the transaction store has too few sessions.
const SEVERAL: &str = "composite::";

#[derive(Clone, Copy, Debug)]
enum Store {
    Memory,
    File,
    Postgres(&'static str),
    Etcd,
}

#[derive(Debug)]
struct Opened {
    url: String,
    _kept: Option<Kept>,
}

#[derive(Debug)]
enum Kept {
    Directory(#[allow(dead_code)] TempDir),
    Database(#[allow(dead_code)] Database),
}

#[async_trait]
impl Factory for Store {
    fn time(&self) -> Time {
        Time::Real
    }

    async fn open(&self) -> Result<Box<dyn Harness>, Error> {
        let (url, kept) = match self {
            Self::Memory => (format!("memory:{}", fresh_name()), None),
            Self::File => {
                let directory = tempfile::tempdir().unwrap();
                (
                    format!("file://{}", directory.path().join("locks").display()),
                    Some(Kept::Directory(directory)),
                )
            }
            Self::Postgres(scheme) => {
                let database = fresh_database().await;
                (url_of(&database, scheme, ""), Some(Kept::Database(database)))
            }
            Self::Etcd => (Etcd::shared().url(&fresh_name()), None),
        };
        Ok(Box::new(Opened { url, _kept: kept }))
    }
}

/// A name that no other case of this process has.
fn fresh_name() -> String {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("blocking-{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

#[async_trait]
impl Harness for Opened {
    async fn client(&self) -> Result<Arc<dyn Lock>, Error> {
        let url = self.url.clone();
        let connected = tokio::task::spawn_blocking(move || blocking::connect(&url)).await.unwrap();
        Ok(Arc::new(Adapter(connected?)))
    }
}

fn proves(store: Store) {
    let mut run = Run::new(&store).threads(8);
    for group in BASIC {
        run = run.only(group);
    }
    if !matches!(store, Store::Postgres("postgres+advisory-xact")) {
        run = run.only(SEVERAL);
    }
    let report = run.run();
    assert!(report.is_ok(), "{report}");
    let passed = report.cases.iter().filter(|case| case.outcome == Outcome::Passed).count();
    assert!(passed >= 40, "{passed} cases passed\n{report}");
}

#[test]
fn memory_keeps_the_basic_rules_through_blocking_calls() {
    proves(Store::Memory);
}

#[test]
fn file_keeps_the_basic_rules_through_blocking_calls() {
    proves(Store::File);
}

#[test]
fn session_keeps_the_basic_rules_through_blocking_calls() {
    proves(Store::Postgres("postgres+advisory"));
}

#[test]
fn transaction_keeps_the_basic_rules_through_blocking_calls() {
    proves(Store::Postgres("postgres+advisory-xact"));
}

#[test]
fn row_keeps_the_basic_rules_through_blocking_calls() {
    proves(Store::Postgres("postgres+row"));
}

#[test]
fn lease_keeps_the_basic_rules_through_blocking_calls() {
    proves(Store::Postgres("postgres+ttl"));
}

#[test]
fn etcd_keeps_the_basic_rules_through_blocking_calls() {
    // Starts the cluster here, because that blocks and the cases are asynchronous.
    Etcd::shared();
    proves(Store::Etcd);
}
