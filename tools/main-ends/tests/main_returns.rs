//! What a program without an async runtime leaves behind when its `main` returns, on every store that processes share.
//! Each test looks from its own process.

#![allow(clippy::unwrap_used)]

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use leasehold::{Lock, LockExt as _, LockKey, connect};
use test_servers::fresh_database;
use tokio::task::spawn_blocking;

/// Limit of a wait for a key. The leases are longer than all waits together, so their end frees no key.
const LIVENESS: Duration = Duration::from_secs(60);

/// The longest that the drop of a guard waits for the store. A program that ends sooner has released. On a busy machine the
/// wait may be too short.
const RELEASE: Duration = Duration::from_secs(1);

/// Number of such slow programs that may leave a key held before a test fails.
const PROGRAMS: u32 = 4;

/// The ways in which `main` drops its guards.
const DROPPED: [&str; 6] = [
    "guard in a variable",
    "guard that outlives its lock",
    "guards of several keys",
    "lock in a static",
    "guard in a thread-local",
    "panic",
];

/// The ways in which `main` returns without a drop of its guard.
const LEAKED: [&str; 3] = ["guard in a static", "forgotten guard", "guard of a thread that runs"];

/// `main` closes the lock, but does not drop its guard.
const CLOSED: &str = "closed lock, and a guard in a static";

/// Runs the program to its end. Returns its duration.
async fn program(way: &str, url: &str, key: &str) -> Duration {
    let begun = Instant::now();
    let mut program = Command::new(env!("CARGO_BIN_EXE_main-ends"));
    program.args([way, url, key]).stdout(Stdio::null());
    let output = spawn_blocking(move || program.output()).await.unwrap().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    // 101 is the code of a panic. An abort, for example of a destructor that panics, has none.
    let expected = if way == "panic" { 101 } else { 0 };
    assert_eq!(output.status.code(), Some(expected), "{way} on {url}: {said}");
    begun.elapsed()
}

/// Checks that the key is free after each program that drops its guard or closes its lock.
async fn is_free(other: &dyn Lock, url: &str) {
    for way in DROPPED.into_iter().chain([CLOSED]) {
        let mut number = 0;
        loop {
            // No program runs into a key that an earlier one left held.
            let key = format!("{way} {number}");
            let took = program(way, url, &key).await;
            match other.key(&*key).wait(LIVENESS).acquire().await {
                Ok(guard) => break guard.release().await.unwrap(),
                Err(error) => {
                    number += 1;
                    let is_excused = took >= RELEASE && number < PROGRAMS;
                    assert!(is_excused, "{way} on {url}, after {took:?}: {error}");
                }
            }
        }
    }
}

/// Checks that the death of the program frees the key, which it leaked.
async fn dies_with_its_process(other: &dyn Lock, url: &str) {
    for way in LEAKED {
        program(way, url, way).await;
        let guard = other.key(way).wait(LIVENESS).acquire().await;
        guard.unwrap_or_else(|error| panic!("{way} on {url}: {error}")).release().await.unwrap();
    }
}

/// Checks that the key is held after the death of the program, which leaked it, and that an operator can release it.
async fn outlives_its_process(other: &dyn Lock, url: &str) {
    let admin = other.admin().unwrap();
    for way in LEAKED {
        program(way, url, way).await;
        assert!(other.key(way).try_acquire().await.unwrap().is_none(), "{way} on {url}");
        let key = LockKey::new(way).unwrap();
        let holder = admin.inspect(&key).await.unwrap().holder().unwrap().holder.unwrap();
        assert!(admin.force_release(&key, holder).await.unwrap());
        other.key(way).try_acquire().await.unwrap().unwrap().release().await.unwrap();
    }
}

/// Returns a database with the schema of the store, its URL and a client.
async fn postgres(
    scheme: &str,
    parameters: &str,
) -> (test_servers::Database, String, std::sync::Arc<dyn Lock>) {
    let database = fresh_database().await;
    let url = database.url().replacen("postgres", scheme, 1);
    let sign = if url.contains('?') { '&' } else { '?' };
    let url = format!("{url}{sign}install=true{parameters}");
    let other = connect(&url).await.unwrap();
    (database, url, other)
}

#[tokio::test]
async fn a_file_is_free_when_main_has_returned() {
    let directory = tempfile::tempdir().unwrap();
    let url = format!("file://{}", directory.path().join("locks").display());
    let other = connect(&url).await.unwrap();
    is_free(&*other, &url).await;
    dies_with_its_process(&*other, &url).await;
}

#[tokio::test]
async fn a_session_lock_is_free_when_main_has_returned() {
    let (_database, url, other) = postgres("postgres", "").await;
    is_free(&*other, &url).await;
    dies_with_its_process(&*other, &url).await;
}

#[tokio::test]
async fn a_transaction_lock_is_free_when_main_has_returned() {
    let (_database, url, other) = postgres("postgres+advisory-xact", "").await;
    is_free(&*other, &url).await;
    dies_with_its_process(&*other, &url).await;
}

#[tokio::test]
async fn a_row_is_free_when_main_has_returned_unless_main_leaked_it() {
    let (_database, url, other) = postgres("postgres+row", "").await;
    is_free(&*other, &url).await;
    outlives_its_process(&*other, &url).await;
}

#[tokio::test]
async fn a_lease_is_free_when_main_has_returned_unless_main_leaked_it() {
    let (_database, url, other) = postgres("postgres+ttl", "&ttl=1h").await;
    is_free(&*other, &url).await;
    outlives_its_process(&*other, &url).await;
}
