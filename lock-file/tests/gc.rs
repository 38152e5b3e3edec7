//! Removing the files of unused keys.

// The lint's exception for tests does not cover their helpers.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "common/backend.rs"]
mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use common::{LONG, attempt, contended, edit_record, granted, key, open, release, request, token};
use leasehold_api::{ErrorKind, ListQuery, LockAdmin as _};
use leasehold_engine::{Attempt, Backend as _, CancellationToken, Renewed};
use leasehold_file::{Collected, FileConfig};
use test_bounds::within;
use tokio::time::timeout;

fn collect(dir: &tempfile::TempDir) -> Collected {
    FileConfig::new(dir.path()).collect_garbage(Duration::ZERO).unwrap()
}

fn counts(collected: Collected) -> (usize, usize) {
    (collected.removed, collected.kept)
}

fn files(dir: &tempfile::TempDir) -> usize {
    fs::read_dir(dir.path()).unwrap().count()
}

#[tokio::test]
async fn what_is_used_is_kept_and_the_rest_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let (backend, other) = (open(dir.path()), open(dir.path()));
    for name in ["a", "b", "c"] {
        let used = request(name);
        granted(&backend, &used).await;
        release(&backend, &used).await;
    }
    let held = request("held");
    granted(&backend, &held).await;
    let mut cooling = request("cooling");
    cooling.cooldown = Some(LONG);
    granted(&backend, &cooling).await;
    release(&backend, &cooling).await;
    assert_eq!(counts(FileConfig::new(dir.path()).collect_garbage(LONG).unwrap()), (0, 5), "used just now");
    assert_eq!(counts(collect(&dir)), (3, 2));
    // The marker, the floor, and at most four files per remaining key.
    assert!(files(&dir) <= 10, "{}", files(&dir));
    contended(&other, &request("held")).await;
    assert!(contended(&other, &request("cooling")).await.cooling_for.is_some());
    assert_eq!(backend.renew(vec![held.hold()]).await.pop().unwrap().unwrap(), Renewed::Extended);
    assert!(release(&backend, &held).await.was_held);
    let missing = FileConfig::new(dir.path().join("missing")).collect_garbage(Duration::ZERO).unwrap();
    assert_eq!(counts(missing), (0, 0));
    assert!(!dir.path().join("missing").exists());
}

#[tokio::test]
async fn a_key_that_is_awaited_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (open(dir.path()), open(dir.path()));
    let first = request("k");
    granted(&a, &first).await;
    let waiting = b.wait(request("k"), CancellationToken::new());
    let meanwhile = async {
        for _ in 0..20 {
            assert_eq!(counts(collect(&dir)), (0, 1));
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        release(&a, &first).await;
    };
    let (answer, ()) = within(LONG, "not ended", async { tokio::join!(waiting, meanwhile) }).await;
    assert!(matches!(answer, Ok(Attempt::Granted(_))));
}

#[tokio::test]
async fn tokens_never_go_back_also_with_a_clock_that_did() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path());
    let (mine, ahead) = (request("k"), 100 * 365 * 24 * 3_600_000_u64);
    granted(&backend, &mine).await;
    release(&backend, &mine).await;
    // Moves the next token a century ahead, as if it was drawn with a wrong clock.
    edit_record(dir.path(), |record| record["next"] = (record["next"].as_u64().unwrap() + ahead).into());
    let before = token(&backend, &mine).await;
    release(&backend, &mine).await;
    assert_eq!(counts(collect(&dir)), (1, 0));
    assert!(token(&backend, &mine).await > before);
    release(&backend, &mine).await;
    // The floor also applies to keys that were never used, and does not sink.
    assert_eq!(counts(collect(&dir)), (1, 0));
    assert!(token(&backend, &request("another")).await > before);
}

#[test]
fn a_damaged_ceiling_is_left_for_people_to_mend() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let backend = open(dir.path());
        let mine = request("k");
        granted(&backend, &mine).await;
        release(&backend, &mine).await;
    });
    fs::write(common::file(dir.path(), "token"), "{").unwrap();
    assert_eq!(counts(collect(&dir)), (0, 1));
    fs::write(dir.path().join("leasehold-floor"), "{").unwrap();
    let error = FileConfig::new(dir.path()).collect_garbage(Duration::ZERO).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
}

/// In a shared directory any user can create pipes with such names. Neither listing nor removal fails because of
/// them.
#[tokio::test]
async fn what_is_no_plain_file_keeps_its_own_key_alone() {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o1777)).unwrap();
    let backend = open(dir.path());
    for key in ["held", "unused"] {
        granted(&backend, &request(key)).await;
    }
    let held = token(&backend, &request("also held")).await;
    assert!(held.as_u64() > 0);
    for key in ["0", "1"] {
        for kind in ["lock", "seen", "json", "token"] {
            let pipe = dir.path().join(format!("{}.{kind}", key.repeat(64)));
            assert!(std::process::Command::new("mkfifo").arg(pipe).status().unwrap().success());
        }
    }
    let listed = backend.list(&ListQuery::new()).await.unwrap();
    assert_eq!(listed.len(), 3);
    drop(backend);
    assert_eq!(counts(collect(&dir)), (3, 2));
}

/// Another process might be creating this directory.
#[test]
fn a_directory_without_its_marker_has_nothing_to_remove() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(counts(collect(&dir)), (0, 0));
}

/// Many clients wait and try while their files are removed all the time.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_race_with_many_who_take_the_lock_breaks_nothing() {
    const CLIENTS: usize = 6;
    const ROUNDS: usize = 60;
    let dir = Arc::new(tempfile::tempdir().unwrap());
    let inside = Arc::new(AtomicBool::new(false));
    let last = Arc::new(std::sync::atomic::AtomicU64::new(0));
    let done = Arc::new(AtomicUsize::new(0));
    let takers = (0..CLIENTS).map(|client| {
        let (dir, inside, last, done) =
            (Arc::clone(&dir), Arc::clone(&inside), Arc::clone(&last), Arc::clone(&done));
        tokio::spawn(async move {
            let backend = open(dir.path());
            for round in 0..ROUNDS {
                let mine = request("k");
                let answer = if (client + round) % 3 == 0 {
                    attempt(&backend, &mine).await.unwrap()
                } else {
                    backend.wait(mine.clone(), CancellationToken::new()).await.unwrap()
                };
                let Attempt::Granted(granted) = answer else { continue };
                assert!(!inside.swap(true, Ordering::SeqCst), "two holders");
                let token = granted.token.unwrap().as_u64();
                assert!(last.swap(token, Ordering::SeqCst) < token, "tokens went back");
                assert!(inside.swap(false, Ordering::SeqCst));
                assert!(release(&backend, &mine).await.was_held, "its files were removed");
                // A key that no other client uses is always free for a try.
                let own = request(&format!("own {client}"));
                assert!(
                    matches!(attempt(&backend, &own).await, Ok(Attempt::Granted(_))),
                    "a try was turned away"
                );
                assert!(release(&backend, &own).await.was_held);
            }
            done.fetch_add(1, Ordering::SeqCst);
        })
    });
    let takers: Vec<_> = takers.collect();
    let collector = tokio::task::spawn_blocking({
        let (dir, done) = (Arc::clone(&dir), Arc::clone(&done));
        move || {
            let mut removed = 0;
            while done.load(Ordering::SeqCst) < CLIENTS {
                match FileConfig::new(dir.path()).collect_garbage(Duration::ZERO) {
                    Ok(collected) => removed += collected.removed,
                    // Another process checked for a running collection at this moment.
                    Err(error) => assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}"),
                }
            }
            removed
        }
    });
    let outcome = timeout(2 * LONG, futures_util::future::join_all(takers)).await;
    // Stops the collector even if a client failed.
    done.store(CLIENTS, Ordering::SeqCst);
    let removed = collector.await.unwrap();
    outcome.unwrap().into_iter().for_each(|taker| taker.unwrap());
    assert!(removed > 0, "nothing was removed");
    assert!(open(dir.path()).admin().unwrap().inspect(&key("k")).await.unwrap().is_free());
}
