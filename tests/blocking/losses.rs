//! Losses that a store causes, as a program without an async runtime notices them.

use std::fs;
use std::sync::mpsc;

use leasehold::blocking::connect;
use leasehold::{LossReason, Validity};
use test_servers::{fresh_database, sql};
use tokio::runtime::Runtime;

use super::{LIVENESS, url_of};

/// Takes a lock, ends it by `end`, and checks that the callback gets `reason` once.
fn is_reported(url: &str, reason: LossReason, end: impl FnOnce()) {
    let lock = connect(url).unwrap();
    let (lost, released) = (lock.key("lost").acquire().unwrap(), lock.key("released").acquire().unwrap());
    let (sender, losses) = mpsc::channel();
    for guard in [&lost, &released] {
        let (sender, key) = (sender.clone(), guard.key().to_string());
        guard.when_lost(move |reason| sender.send((key, reason)).unwrap());
    }
    drop(sender);
    released.release().unwrap();
    end();
    assert_eq!(losses.recv_timeout(LIVENESS), Ok(("lost".to_owned(), reason)), "{url}");
    assert_eq!(lost.validity(), Validity::Lost, "{url}");
    assert_eq!(lost.release().unwrap_err().loss(), Some(reason), "{url}");
    // Both callbacks are gone.
    assert_eq!(losses.recv_timeout(LIVENESS), Err(mpsc::RecvTimeoutError::Disconnected), "{url}");
}

#[test]
fn the_end_of_a_backend_reaches_the_callback_of_its_holder() {
    let runtime = Runtime::new().unwrap();
    let database = runtime.block_on(fresh_database());
    for scheme in ["postgres", "postgres+advisory-xact"] {
        is_reported(&url_of(&database, scheme, ""), LossReason::SessionLost, || {
            runtime.block_on(async {
                let holders =
                    "SELECT pg_terminate_backend(pid) FROM pg_locks JOIN pg_database d ON d.oid = database
                               WHERE locktype = 'advisory' AND granted AND datname = current_database()";
                let ended = sql::try_run(&mut database.connect().await, holders).await.unwrap();
                assert!(ended > 0, "{scheme}: a backend holds the lock");
            });
        });
    }
}

#[test]
fn a_forced_release_reaches_the_callback_of_its_holder() {
    let runtime = Runtime::new().unwrap();
    let database = runtime.block_on(fresh_database());
    for scheme in ["postgres+row", "postgres+ttl"] {
        let url = url_of(&database, scheme, "");
        let operator = connect(&url).unwrap();
        is_reported(&url, LossReason::ForcedRelease, || {
            runtime.block_on(async {
                let admin = operator.as_async().admin().unwrap();
                let key = "lost".try_into().unwrap();
                let holder = admin.inspect(&key).await.unwrap().holder().unwrap().holder.unwrap();
                assert!(admin.force_release(&key, holder).await.unwrap(), "{scheme}");
            });
        });
    }
}

#[test]
fn a_removed_directory_reaches_the_callback_of_its_holder() {
    let directory = tempfile::tempdir().unwrap();
    let locks = directory.path().join("locks");
    is_reported(&format!("file://{}", locks.display()), LossReason::Gone, || {
        fs::remove_dir_all(&locks).unwrap();
    });
}
