//! Helpers of this crate's tests.
#![allow(dead_code)] // Each test binary uses a part of it.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use leasehold_api::{Error, FencingToken, HolderId, LockKey};
use leasehold_engine::{Attempt, Backend, Contended, Granted, ReleaseReply, Request};
use leasehold_file::{FileBackend, FileConfig};

/// Time limit of a step, which no slow machine reaches.
pub(crate) const LONG: Duration = Duration::from_secs(60);

pub(crate) fn open(dir: &Path) -> FileBackend {
    FileConfig::new(dir).backend().unwrap()
}

pub(crate) fn key(text: &str) -> LockKey {
    LockKey::new(text).unwrap()
}

/// Returns a request for `key` with a new holder id.
pub(crate) fn request(key: &str) -> Request {
    static SERIAL: AtomicU64 = AtomicU64::new(0);
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    Request::new(self::key(key), HolderId::from_parts(u128::from(std::process::id()), serial))
}

pub(crate) async fn attempt(backend: &FileBackend, request: &Request) -> Result<Attempt, Error> {
    backend.acquire(vec![request.clone()]).await.pop().unwrap()
}

pub(crate) async fn granted(backend: &FileBackend, request: &Request) -> Granted {
    match attempt(backend, request).await.unwrap() {
        Attempt::Granted(granted) => granted,
        other => panic!("not granted: {other:?}"),
    }
}

pub(crate) async fn token(backend: &FileBackend, request: &Request) -> FencingToken {
    granted(backend, request).await.token.unwrap()
}

pub(crate) async fn contended(backend: &FileBackend, request: &Request) -> Contended {
    match attempt(backend, request).await.unwrap() {
        Attempt::Contended(contended) => contended,
        other => panic!("not contended: {other:?}"),
    }
}

/// Returns the error of a request that the store refuses.
pub(crate) async fn refused(backend: &FileBackend, request: &Request) -> Error {
    match attempt(backend, request).await.unwrap() {
        Attempt::Refused(error) => error,
        other => panic!("not refused: {other:?}"),
    }
}

pub(crate) async fn release(backend: &FileBackend, request: &Request) -> ReleaseReply {
    backend.release(vec![request.hold()]).await.pop().unwrap().unwrap()
}

/// Returns whether `owner` shows the process `pid`, with its name if the system provides it.
pub(crate) fn is_process(owner: Option<&str>, pid: u32) -> bool {
    let number = format!("pid {pid}");
    owner
        .and_then(|owner| owner.strip_prefix(&number))
        .is_some_and(|name| name.is_empty() || name.starts_with(" ("))
}

/// Returns the only file of the directory with this extension.
pub(crate) fn file(dir: &Path, extension: &str) -> PathBuf {
    let mut found: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.extension().is_some_and(|e| e == extension))
        .collect();
    assert_eq!(found.len(), 1, "{extension}: {found:?}");
    found.remove(0)
}

/// Changes the record of the directory's only key.
pub(crate) fn edit_record(dir: &Path, edit: impl FnOnce(&mut serde_json::Value)) {
    let path = file(dir, "json");
    let mut record = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    edit(&mut record);
    std::fs::write(&path, serde_json::to_vec(&record).unwrap()).unwrap();
}
