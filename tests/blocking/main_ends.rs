//! A program whose `main` returns holds nothing afterwards.

use std::process::{Command, Stdio};
use std::sync::OnceLock;

use leasehold::LockExt as _;
use leasehold::blocking::{Lock, connect};
use test_servers::fresh_database;

/// Set for a child: how its `main` ends, and the URL of its store, whose lease is longer than all waits here.
const CHILD: &str = "LEASEHOLD_TEST_BLOCKING_MAIN_ENDS";

/// The drop of a guard waits a second for the store, which a busy machine may not give to each child. A release that is never sent
/// fails in all of them.
const CHILDREN: u32 = 4;

/// Never dropped, so its connection ends with the process.
static KEPT: OnceLock<Lock> = OnceLock::new();

/// The `main` of a child, which is this test alone in a process of its own.
#[test]
fn child() {
    let Ok(spec) = std::env::var(CHILD) else { return };
    let (key, url) = spec.split_once('=').unwrap();
    let (shape, _) = key.rsplit_once(' ').unwrap();
    let lock = connect(url).unwrap();
    match shape {
        "lock before guard" => {
            let guard = lock.key(key).acquire().unwrap();
            drop(lock);
            drop(guard);
        }
        "guard before lock" => {
            drop(lock.keys([key, "other"]).acquire().unwrap());
            drop(lock);
        }
        "lock in a static" => drop(KEPT.get_or_init(|| lock).key(key).acquire().unwrap()),
        _ => panic!("{shape}"),
    }
    std::process::exit(0);
}

/// Runs a child with a key that its `number` names, and tries that key once.
async fn is_free_after_child(other: &dyn leasehold::Lock, url: &str, shape: &str, number: u32) -> bool {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["main_ends::child", "--exact", "--nocapture"]).env(CHILD, format!("{shape} {number}={url}"));
    let status = tokio::task::spawn_blocking(move || child.stdout(Stdio::null()).status());
    assert!(status.await.unwrap().unwrap().success(), "{shape}");
    let tried = other.key(format!("{shape} {number}")).try_acquire().await.unwrap();
    tried.is_some()
}

#[tokio::test]
async fn nothing_stays_held_when_main_returns() {
    let database = fresh_database().await;
    let url = database.url().replacen("postgres:", "postgres+ttl:", 1);
    let url = format!("{url}{}install=true&ttl=1h", if url.contains('?') { '&' } else { '?' });
    let other = leasehold::connect(&url).await.unwrap();
    for shape in ["lock before guard", "guard before lock", "lock in a static"] {
        let mut number = 0;
        while !is_free_after_child(&*other, &url, shape, number).await {
            number += 1;
            assert!(number < CHILDREN, "{shape}");
        }
    }
    other.close().await.unwrap();
}
