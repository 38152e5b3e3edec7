//! Checks the effect of the example.

#![allow(clippy::unwrap_used)]

#[allow(dead_code, unreachable_pub)] // A program, of which the test uses parts.
#[path = "../examples/fenced_write.rs"]
mod fenced_write;

use leasehold_etcd::EtcdConfig;
use test_servers::Etcd;

#[tokio::test(flavor = "multi_thread")]
async fn only_the_write_under_the_lock_is_carried_out() {
    let etcd = Etcd::shared();
    let lock = EtcdConfig::new(etcd.addresses(), Etcd::fresh_prefix()).connect().await.unwrap();
    fenced_write::fenced_write(&lock).await.unwrap();
    let values: Vec<_> =
        etcd.entries("example/ledger/42").await.into_iter().map(|entry| entry.value).collect();
    assert_eq!(values, [b"90"]);
}
