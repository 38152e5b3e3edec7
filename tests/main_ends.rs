//! Checks that a program whose `main` returns just after the drop of a guard holds no lock afterwards, on every store that
//! processes share.
#![allow(clippy::unwrap_used)]
#![cfg(all(
    feature = "file",
    feature = "postgres-advisory",
    feature = "postgres-row",
    feature = "postgres-ttl",
    feature = "etcd"
))]

use std::process::{Command, Stdio};
use std::time::Duration;

use leasehold::{Error, Lock, LockExt as _, connect};
use test_servers::{Etcd, fresh_database};
use tokio::runtime::Builder;

/// Limit of a wait for a released key. The lease below is longer than all waits together, so its end does not free the key.
const LONG: Duration = Duration::from_secs(60);

/// Number of children that may leave their keys held before the test fails. A process that ends has a second for its
/// releases, which may be too short on a busy machine. A release that is never sent fails in every child.
const CHILDREN: u32 = 4;

/// Variable of a child: the number of its threads, its own number, its shape, and the URL of its store.
const CHILD: &str = "LEASEHOLD_TEST_MAIN_ENDS";

const SHAPES: [&str; 4] = ["guard", "guard and lock", "many guards", "guard still out"];

/// The `main` of a child, which runs only this test in a separate process.
#[test]
fn child() {
    let Ok(spec) = std::env::var(CHILD) else { return };
    let (keys, url) = spec.split_once('=').unwrap();
    let (threads, rest) = keys.split_once(' ').unwrap();
    let (_, shape) = rest.split_once(' ').unwrap();
    let mut runtime = match threads {
        "0" => Builder::new_current_thread(),
        _ => Builder::new_multi_thread(),
    };
    let runtime = runtime.enable_all().build().unwrap();
    let out = runtime.block_on(async {
        let lock = connect(url).await.unwrap();
        let guard = lock.key(format!("{keys} k")).acquire().await.unwrap();
        match shape {
            "guard" => drop(guard),
            "guard and lock" => {
                drop(guard);
                drop(lock);
                return None;
            }
            "many guards" => {
                let others = lock.keys((0..200).map(|n| format!("{keys} k{n}"))).acquire().await.unwrap();
                drop((guard, others));
            }
            _ => return Some((lock, Some(guard))),
        }
        Some((lock, None))
    });
    // The runtime ends before the process, as under `#[tokio::main]`.
    drop(runtime);
    drop(out);
    std::process::exit(0);
}

async fn nothing_stays_held(url: &str, shapes: &[&str]) {
    let other = connect(url).await.unwrap();
    for threads in ["0", "2"] {
        for shape in shapes {
            let mut number = 0;
            while let Err(error) = free_after_child(&*other, url, threads, number, shape).await {
                number += 1;
                assert!(number < CHILDREN, "{url}, {threads} threads, {shape}: {error}");
            }
        }
    }
    other.close().await.unwrap();
}

/// Runs the child, whose keys contain `number`, and then acquires these keys.
async fn free_after_child(
    other: &dyn Lock,
    url: &str,
    threads: &str,
    number: u32,
    shape: &str,
) -> Result<(), Error> {
    // No child meets a key that an earlier one left held.
    let keys = format!("{threads} {number} {shape}");
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["child", "--exact", "--nocapture"]).env(CHILD, format!("{keys}={url}"));
    let status = tokio::task::spawn_blocking(move || child.stdout(Stdio::null()).status());
    assert!(status.await.unwrap().unwrap().success(), "{url}, {threads} threads, {shape}");
    for key in ["k", "k199"] {
        other.key(format!("{keys} {key}")).wait(LONG).acquire().await?.release().await?;
    }
    Ok(())
}

async fn on_postgres(scheme: &str, parameters: &str, shapes: &[&str]) {
    let database = fresh_database().await;
    let url = database.url().replacen("postgres", scheme, 1);
    let sign = if url.contains('?') { '&' } else { '?' };
    nothing_stays_held(&format!("{url}{sign}install=true{parameters}"), shapes).await;
}

#[tokio::test]
async fn a_file_is_free_after_main() {
    let directory = tempfile::tempdir().unwrap();
    nothing_stays_held(&format!("file://{}", directory.path().display()), &SHAPES).await;
}

#[tokio::test]
async fn a_session_lock_is_free_after_main() {
    on_postgres("postgres", "", &SHAPES).await;
}

#[tokio::test]
async fn a_transaction_lock_is_free_after_main() {
    // Without many guards, because each of these locks uses a session.
    on_postgres("postgres+advisory-xact", "", &["guard", "guard and lock", "guard still out"]).await;
}

#[tokio::test]
async fn a_row_is_free_after_main() {
    on_postgres("postgres+row", "", &SHAPES).await;
}

#[tokio::test]
async fn a_lease_is_free_after_main_long_before_its_end() {
    on_postgres("postgres+ttl", "&ttl=1h", &SHAPES).await;
}

#[tokio::test]
async fn an_etcd_lock_is_free_after_main_long_before_its_end() {
    let url = tokio::task::spawn_blocking(|| Etcd::shared().url("main-ends")).await.unwrap();
    nothing_stays_held(&format!("{url}?ttl=1h"), &SHAPES).await;
}
