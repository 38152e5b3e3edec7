//! A disk that hangs. The record of a key is a pipe without a writer. Opening it hangs in the kernel and cannot be
//! cancelled, as on a disk that does not respond.

// The lint's exception for tests does not cover their helpers.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "common/backend.rs"]
mod common;

use std::fs::{self, File, OpenOptions};
use std::future::Future;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use common::{LONG, attempt, file, granted, key, open, refused, release, request};
use leasehold_api::{ErrorKind, ListQuery};
use leasehold_engine::{Attempt, Backend as _, CancellationToken, ReleaseReply, Renewed};
use leasehold_file::FileBackend;
use test_bounds::within;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{advance, timeout};

/// Number of threads for the operations of one backend.
const THREADS: usize = 16;

/// A pipe in place of a file. Opening or reading it hangs.
struct Hang {
    path: PathBuf,
    /// The writing end, once a thread hangs. The thread hangs until this end is closed.
    other_end: Option<File>,
}

impl Hang {
    fn at(path: PathBuf) -> Self {
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        Self { path, other_end: None }
    }

    /// Makes opening the record of `key` hang. The key was never granted.
    async fn at_record(dir: &Path, key: &str) -> Self {
        // A grant in another directory shows the file's name.
        let other = tempfile::tempdir().unwrap();
        granted(&open(other.path()), &request(key)).await;
        Self::at(dir.join(file(other.path(), "json").file_name().unwrap()))
    }

    /// Makes opening the status file beside the record hang.
    fn at_status(&self) -> Self {
        Self::at(self.path.with_extension("seen"))
    }

    /// Waits in real time until a thread hangs here. The paused clock does not move.
    async fn is_reached(&mut self) {
        for _ in 0..LONG.as_millis() {
            self.other_end = open_other_end(&self.path);
            if self.other_end.is_some() {
                return;
            }
            spawn_blocking(|| std::thread::sleep(Duration::from_millis(1))).await.unwrap();
        }
        panic!("nobody hangs");
    }
}

/// Ends the hang: hanging threads read an empty file, and later ones find no pipe.
impl Drop for Hang {
    fn drop(&mut self) {
        let aside = self.path.with_extension("aside");
        let _ = fs::rename(&self.path, &aside);
        drop(self.other_end.take());
        // Opens the writing end until no reader is left, because that unblocks threads that hang in opening.
        for _ in 0..LONG.as_millis() {
            if open_other_end(&aside).is_none() {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Opens the writing end. Returns `None` if no thread has opened the reading end or hangs in opening it.
fn open_other_end(path: &Path) -> Option<File> {
    let nonblocking = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).unwrap();
    OpenOptions::new().write(true).custom_flags(nonblocking).open(path).ok()
}

/// Runs `call` while moving the paused clock a hundred times as fast as real time, because operations on the disk do
/// not move it.
async fn as_time_passes<T: Send + 'static>(call: impl Future<Output = T> + Send + 'static) -> T {
    let call = tokio::spawn(call);
    for _ in 0..LONG.as_millis() {
        if call.is_finished() {
            return call.await.unwrap();
        }
        // Real time passes too, so that other threads make progress.
        spawn_blocking(|| std::thread::sleep(Duration::from_millis(1))).await.unwrap();
        advance(Duration::from_millis(100)).await;
    }
    panic!("no answer");
}

/// Starts `count` attempts at `key`, each with a new holder id.
fn attempts(
    backend: &Arc<FileBackend>,
    key: &str,
    count: usize,
) -> Vec<JoinHandle<Result<Attempt, leasehold_api::Error>>> {
    let attempt = |_| {
        let (backend, request) = (Arc::clone(backend), request(key));
        tokio::spawn(async move { attempt(&backend, &request).await })
    };
    (0..count).map(attempt).collect()
}

#[test]
fn the_applications_own_threads_are_not_used_up() {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(2).enable_all().max_blocking_threads(THREADS + 1).build().unwrap();
    let dir = tempfile::tempdir().unwrap();
    runtime.block_on(async {
        let backend = Arc::new(open(dir.path()));
        let mut hang = Hang::at_record(dir.path(), "stuck").await;
        let mut calls = attempts(&backend, "stuck", 200);
        hang.is_reached().await;
        // Also dropped calls, waits, inspections, and releases of requests that might never have started.
        let waits = (0..50).map(|_| {
            let (backend, request) = (Arc::clone(&backend), request("stuck"));
            tokio::spawn(async move {
                let stop = CancellationToken::new();
                drop(timeout(Duration::from_millis(1), backend.wait(request.clone(), stop)).await);
                drop(timeout(Duration::from_millis(1), backend.release(vec![request.hold()])).await);
                attempt(&backend, &request).await
            })
        });
        calls.extend(waits);
        let looks: Vec<_> = (0..50)
            .map(|_| {
                let backend = Arc::clone(&backend);
                tokio::spawn(async move { backend.admin().unwrap().inspect(&key("stuck")).await })
            })
            .collect();
        for _ in 0..100 {
            within(LONG, "a thread for the application", spawn_blocking(|| ())).await.unwrap();
        }
        drop(hang);
        for call in calls {
            within(LONG, "not ended", call).await.unwrap().unwrap();
        }
        for look in looks {
            assert!(within(LONG, "not ended", look).await.unwrap().is_ok());
        }
    });
}

#[tokio::test(start_paused = true)]
async fn other_calls_are_told_in_time_and_everything_goes_on_afterwards() {
    let dir = tempfile::tempdir().unwrap();
    let backend = Arc::new(open(dir.path()));
    let holding = request("held");
    granted(&backend, &holding).await;
    let mut hang = Hang::at_record(dir.path(), "stuck").await;
    let calls = attempts(&backend, "stuck", THREADS);
    hang.is_reached().await;
    let (asking, waiting) = (Arc::clone(&backend), Arc::clone(&backend));
    // A call that cannot start is refused, so there is nothing to undo.
    let error = as_time_passes(async move { refused(&asking, &request("free")).await }).await;
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("the disk does not answer"), "{error}");
    assert_eq!(error.key(), Some(&key("free")));
    let stop = CancellationToken::new();
    let answer = as_time_passes(async move { waiting.wait(request("free"), stop).await }).await;
    assert!(matches!(answer, Ok(Attempt::Refused(_))), "{answer:?}");
    drop(hang);
    for call in calls {
        // Calls that could not start were refused. Calls that hung continue, and the first of them gets the key.
        as_time_passes(call).await.unwrap().unwrap();
    }
    granted(&backend, &request("free")).await;
    assert!(release(&backend, &holding).await.was_held);
}

#[tokio::test(start_paused = true)]
async fn those_who_hang_keep_no_holder_from_renewing_and_releasing() {
    let dir = tempfile::tempdir().unwrap();
    let backend = Arc::new(open(dir.path()));
    let holding = request("held");
    granted(&backend, &holding).await;
    let mut hang = Hang::at_record(dir.path(), "stuck").await;
    // The list opens the status files of all keys.
    let mut status = hang.at_status();
    let _calls = attempts(&backend, "stuck", 100);
    let looks: Vec<_> = (0..100)
        .map(|_| {
            let backend = Arc::clone(&backend);
            tokio::spawn(async move { backend.admin().unwrap().list(&ListQuery::new()).await })
        })
        .collect();
    let told = Arc::clone(&backend);
    let looked = as_time_passes(async move { told.admin().unwrap().inspect(&key("held")).await }).await;
    assert_eq!(looked.unwrap_err().kind(), ErrorKind::Unavailable);
    for look in looks {
        assert_eq!(as_time_passes(look).await.unwrap().unwrap_err().kind(), ErrorKind::Unavailable);
    }
    hang.is_reached().await;
    status.is_reached().await;
    // Works at once, although every thread for attempts and inspections hangs.
    assert_eq!(backend.renew(vec![holding.hold()]).await.pop().unwrap().unwrap(), Renewed::Extended);
    assert_eq!(release(&backend, &holding).await, ReleaseReply::new(true));
    // In this order, because a grant opens the status file.
    drop(status);
    drop(hang);
}

#[tokio::test(start_paused = true)]
async fn a_release_waits_for_the_attempt_that_hangs_and_that_attempt_keeps_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let backend = Arc::new(open(dir.path()));
    let (holding, stuck) = (request("held"), request("stuck"));
    granted(&backend, &holding).await;
    let mut hang = Hang::at_record(dir.path(), "stuck").await;
    let attempting = tokio::spawn({
        let (backend, stuck) = (Arc::clone(&backend), stuck.clone());
        async move { attempt(&backend, &stuck).await }
    });
    hang.is_reached().await;
    // The hanging release delays the reply of the call, but not the other release.
    let (releasing, holds) = (Arc::clone(&backend), vec![stuck.hold(), holding.hold()]);
    let answers = as_time_passes(async move { releasing.release(holds).await }).await;
    assert_eq!(answers[0].as_ref().unwrap_err().kind(), ErrorKind::Unavailable);
    assert_eq!(answers[1].as_ref().unwrap(), &ReleaseReply::new(true));
    granted(&backend, &request("held")).await;
    drop(hang);
    let answer = as_time_passes(attempting).await.unwrap();
    assert!(matches!(answer, Ok(Attempt::Contended(_))), "released before it was granted: {answer:?}");
    assert_eq!(release(&backend, &stuck).await, ReleaseReply::new(false));
    granted(&backend, &request("stuck")).await;
}

#[tokio::test(start_paused = true)]
async fn closing_does_not_wait_for_those_who_hang_and_they_keep_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let backend = Arc::new(open(dir.path()));
    let holding = request("held");
    granted(&backend, &holding).await;
    let mut hang = Hang::at_record(dir.path(), "stuck").await;
    let mut calls = attempts(&backend, "stuck", 1);
    hang.is_reached().await;
    // Returns at once, without any time on the paused clock.
    backend.close().await;
    let next = open(dir.path());
    granted(&next, &holding).await;
    drop(hang);
    let answer = as_time_passes(calls.remove(0)).await.unwrap();
    let Ok(Attempt::Refused(error)) = answer else { panic!("{answer:?}") };
    assert_eq!(error.kind(), ErrorKind::Closed);
    granted(&next, &request("stuck")).await;
}

#[tokio::test(start_paused = true)]
async fn whoever_waits_also_waits_for_the_disk_and_is_told_if_it_was_that() {
    let dir = tempfile::tempdir().unwrap();
    let backend = Arc::new(open(dir.path()));
    let mut hang = Hang::at_record(dir.path(), "stuck").await;
    let mut patient = request("stuck");
    patient.waits = true;
    let asking = tokio::spawn({
        let (backend, patient) = (Arc::clone(&backend), patient.clone());
        async move { attempt(&backend, &patient).await }
    });
    hang.is_reached().await;
    // Shorter than the engine's limit of a call, which ends tries.
    advance(Duration::from_secs(5)).await;
    let answer = asking.await.unwrap();
    assert!(matches!(answer, Ok(Attempt::Contended(_))), "it may wait: {answer:?}");
    // A wait that is stopped by its caller reports that the disk hung. Another wait goes on.
    let wait = |request: leasehold_engine::Request, stop: &CancellationToken| {
        let (backend, stop) = (Arc::clone(&backend), stop.clone());
        tokio::spawn(async move { backend.wait(request, stop).await })
    };
    let stop = CancellationToken::new();
    let abandoned = request("stuck");
    let given_up = wait(abandoned.clone(), &stop);
    for _ in 0..100 {
        spawn_blocking(|| std::thread::sleep(Duration::from_millis(1))).await.unwrap();
        advance(Duration::from_millis(600)).await;
    }
    assert!(!given_up.is_finished(), "after a minute");
    stop.cancel();
    let error = as_time_passes(given_up).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("the disk does not answer"), "{error}");
    let patient = wait(patient, &CancellationToken::new());
    spawn_blocking(|| std::thread::sleep(Duration::from_millis(1))).await.unwrap();
    drop(hang);
    // The outcome of the stopped wait is unknown, so its caller releases it.
    let releasing = Arc::clone(&backend);
    as_time_passes(async move { releasing.release(vec![abandoned.hold()]).await.pop().unwrap() })
        .await
        .unwrap();
    let answer = as_time_passes(patient).await.unwrap();
    assert!(matches!(answer, Ok(Attempt::Granted(_))), "{answer:?}");
}
