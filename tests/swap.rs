//! The example `swap` on each compiled-in store: its program in a separate process, and its clients. CI also builds it with
//! each of these features alone.

#![allow(clippy::unwrap_used)]
#![cfg(any(feature = "memory", feature = "file", feature = "postgres-ttl", feature = "etcd"))]

use std::path::Path;
use std::process::{Command, Output};

#[allow(dead_code, unreachable_pub)] // A program, of which the tests use parts.
#[path = "../examples/swap.rs"]
mod swap;

/// Variable of the process that runs the program, in place of its other tests.
const PROGRAM: &str = "LEASEHOLD_TEST_SWAP";

/// The program, which runs only in a separate process.
#[test]
fn program() {
    if std::env::var_os(PROGRAM).is_some() {
        swap::main().unwrap();
    }
}

/// Runs the program with the store's URL, or with the store that it chooses by its features. `directory` is the directory
/// of temporary files.
fn run(url: Option<&str>, directory: &Path) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["program", "--exact", "--nocapture"]).env(PROGRAM, "1").env("TMPDIR", directory);
    command.env_remove("LEASEHOLD_URL").envs(url.map(|url| ("LEASEHOLD_URL", url)));
    command.output().unwrap()
}

fn assert_sold(output: &Output) {
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.lines().any(|line| line.ends_with("5 sold of 5")), "{output:?}");
}

/// The features alone choose the store. For a server the program needs the address.
#[test]
fn without_a_url_the_program_uses_the_store_that_it_was_built_with() {
    let directory = tempfile::tempdir().unwrap();
    let output = run(None, directory.path());
    if cfg!(any(feature = "file", feature = "memory")) {
        assert_sold(&output);
    } else {
        let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains("set LEASEHOLD_URL"), "{output:?}");
    }
    assert_eq!(directory.path().join("leasehold-swap").is_dir(), cfg!(feature = "file"));
}

#[cfg(feature = "memory")]
#[test]
fn two_clients_of_a_memory_store_sell_each_item_once() {
    assert_sold(&run(Some("memory:swap"), &std::env::temp_dir()));
}

#[cfg(feature = "file")]
#[test]
fn two_clients_of_a_file_store_sell_each_item_once() {
    let directory = tempfile::tempdir().unwrap();
    let locks = directory.path().join("locks");
    assert_sold(&run(Some(&format!("file://{}", locks.display())), directory.path()));
    assert!(locks.is_dir());
}

#[cfg(feature = "postgres-ttl")]
#[tokio::test]
async fn two_clients_of_a_lease_store_sell_each_item_once() {
    let db = test_servers::fresh_database().await;
    let url = db.url().replacen("postgres:", "postgres+ttl:", 1);
    let url = format!("{url}{}install=true", if url.contains('?') { '&' } else { '?' });
    assert_sold(&run(Some(&url), &std::env::temp_dir()));
    let table = "SELECT to_regclass('leasehold.lease')::text";
    assert_eq!(test_servers::sql::text(&mut db.connect().await, table).await, "leasehold.lease");
}

#[cfg(feature = "etcd")]
#[test]
fn two_clients_of_an_etcd_store_sell_each_item_once() {
    let url = test_servers::Etcd::shared().url("swap");
    assert_sold(&run(Some(&url), &std::env::temp_dir()));
}
