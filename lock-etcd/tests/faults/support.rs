//! Clients of a cluster, and the entries of a key in etcd.

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{FencingToken, LockExt as _, LockGuard, LockKey};
use leasehold_engine::Engine;
use leasehold_etcd::EtcdConfig;
use test_bounds::{Bound, within};
use test_servers::{Entry, Etcd};

use crate::LONG;

/// The TTL of clients whose holds must outlast the fault.
pub(crate) const MINUTES: Duration = Duration::from_secs(300);

/// Interval of polls.
const PAUSE: Duration = Duration::from_millis(10);

pub(crate) fn key(text: &str) -> LockKey {
    LockKey::new(text).unwrap()
}

/// Returns the settings of a client of all members.
pub(crate) fn config(etcd: &Etcd, prefix: &str) -> EtcdConfig {
    EtcdConfig::new(etcd.addresses(), prefix)
}

/// Connects a client of all members.
pub(crate) async fn client(etcd: &Etcd, prefix: &str) -> Arc<Engine> {
    Arc::new(config(etcd, prefix).connect().await.unwrap())
}

/// Connects a client of these addresses.
pub(crate) async fn client_of(addresses: Vec<String>, prefix: &str, ttl: Duration) -> Arc<Engine> {
    Arc::new(EtcdConfig::new(addresses, prefix).ttl(ttl).connect().await.unwrap())
}

/// Acquires `name`, and tries again after failures that can be repeated.
pub(crate) async fn acquired(lock: &Engine, name: &str) -> LockGuard {
    let bound = Bound::new(LONG);
    loop {
        match lock.key(name).wait(LONG).acquire().await {
            Ok(guard) => return guard,
            Err(error) => assert!(error.is_retryable(), "{error:?}"),
        }
        bound.check("not granted");
        tokio::time::sleep(PAUSE).await;
    }
}

/// Renews a hold, and tries again after failures that can be repeated.
pub(crate) async fn renewed(guard: &LockGuard) {
    let bound = Bound::new(LONG);
    while let Err(error) = guard.renew().await {
        assert!(error.is_retryable(), "{error:?}");
        bound.check("not renewed");
        tokio::time::sleep(PAUSE).await;
    }
}

/// Acquires and releases `name`. Returns the token. The release can fail while the cluster does.
pub(crate) async fn cycle(lock: &Engine, name: &str) -> FencingToken {
    let guard = acquired(lock, name).await;
    let token = guard.token().unwrap();
    let _ = guard.release().await;
    token
}

/// Waits until `is_true`.
pub(crate) async fn until(what: &str, mut is_true: impl AsyncFnMut() -> bool) {
    let bound = Bound::new(LONG);
    while !is_true().await {
        bound.check(what);
        tokio::time::sleep(PAUSE).await;
    }
}

/// Waits until a client has released everything, also in the background.
pub(crate) async fn idle(lock: &Engine) {
    until("a client never becomes idle", async || lock.active_keys() == 0).await;
}

/// Returns the entries of a key, the oldest first: its holder and the waiters.
pub(crate) async fn queue(etcd: &Etcd, prefix: &str, name: &str) -> Vec<Entry> {
    etcd.entries(format!("{prefix}//q/{name}\0")).await
}

/// Waits until a key has this many entries, and returns them.
pub(crate) async fn queue_of(etcd: &Etcd, prefix: &str, name: &str, length: usize) -> Vec<Entry> {
    until(&format!("{name} never has {length} entries"), async || {
        queue(etcd, prefix, name).await.len() == length
    })
    .await;
    queue(etcd, prefix, name).await
}

/// Returns the output of `future`, which ends without a fault.
pub(crate) async fn soon<F: Future>(what: &str, future: F) -> F::Output {
    within(LONG, what, future).await
}
