//! A program whose `main` returns with a guard just dropped holds nothing afterwards, on every store that processes share.
#![allow(clippy::unwrap_used)]
#![cfg(all(
    feature = "file",
    feature = "postgres-advisory",
    feature = "postgres-row",
    feature = "postgres-ttl"
))]

use std::process::{Command, Stdio};
use std::time::Duration;

use leasehold::{Error, Lock, LockExt as _, connect};
use test_servers::fresh_database;
use tokio::runtime::Builder;

/// A key that was released is granted at once. The lease below is longer than all waits together.
const LONG: Duration = Duration::from_secs(20);

/// A process that ends has a second for its releases. A busy machine may not give that second to each of them, so a child that
/// left its key held is followed by others. A release that is never sent fails in all of them.
const CHILDREN: u32 = 4;

/// Set for a child: the URL of its store, the number of its threads, and what it does.
const CHILD: &str = "LEASEHOLD_TEST_MAIN_ENDS";

const SHAPES: [&str; 4] = ["guard", "guard and lock", "many guards", "guard still out"];

/// The `main` of a child, which is this test alone in a process of its own.
#[test]
fn child() {
    let Ok(spec) = std::env::var(CHILD) else { return };
    let (threads, rest) = spec.split_once(' ').unwrap();
    let (number, rest) = rest.split_once(' ').unwrap();
    let (shape, url) = rest.split_once('=').unwrap();
    let mut runtime = match threads {
        "0" => Builder::new_current_thread(),
        _ => Builder::new_multi_thread(),
    };
    let runtime = runtime.enable_all().build().unwrap();
    let out = runtime.block_on(async {
        let lock = connect(url).await.unwrap();
        let guard = lock.key(format!("{number} k")).acquire().await.unwrap();
        match shape {
            "guard" => drop(guard),
            "guard and lock" => {
                drop(guard);
                drop(lock);
                return None;
            }
            "many guards" => {
                let others = lock.keys((0..200).map(|n| format!("{number} k{n}"))).acquire().await.unwrap();
                drop((guard, others));
            }
            _ => return Some((lock, Some(guard))),
        }
        Some((lock, None))
    });
    // As `#[tokio::main]` does it: the runtime ends, and then the process.
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

/// Runs the child with keys that its `number` names, and takes them.
async fn free_after_child(
    other: &dyn Lock,
    url: &str,
    threads: &str,
    number: u32,
    shape: &str,
) -> Result<(), Error> {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["child", "--exact", "--nocapture"]).env(CHILD, format!("{threads} {number} {shape}={url}"));
    let status = tokio::task::spawn_blocking(move || child.stdout(Stdio::null()).status());
    assert!(status.await.unwrap().unwrap().success(), "{url}, {threads} threads, {shape}");
    for key in ["k", "k199"] {
        other.key(format!("{number} {key}")).wait(LONG).acquire().await?.release().await?;
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
    // Each of these locks takes a session, so not many at once.
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
