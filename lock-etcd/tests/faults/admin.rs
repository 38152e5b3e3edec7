//! The operators' view, and keys that other programs write under the prefix.

use leasehold_api::{ListQuery, Lock as _, LockExt as _, LossReason, Validity};
use test_servers::{Etcd, EtcdOptions, EtcdProgram};

use crate::support::{acquired, client, cycle, key, queue_of, soon};

#[tokio::test(flavor = "multi_thread")]
async fn operators_see_holders_and_waiters() {
    let (etcd, prefix) = (Etcd::shared(), Etcd::fresh_prefix());
    let (a, b) = (client(etcd, &prefix).await, client(etcd, &prefix).await);
    let held = a.key("ledger:1").label("nightly").acquire().await.unwrap();
    let other = acquired(&a, "other").await;
    let waiter = tokio::spawn({
        let b = b.clone();
        async move { b.key("ledger:1").acquire().await }
    });
    queue_of(etcd, &prefix, "ledger:1", 2).await;
    let admin = b.admin().unwrap();
    let info = admin.inspect(&key("ledger:1")).await.unwrap();
    let holder = info.holder().unwrap();
    assert_eq!((holder.holder, holder.token), (Some(held.stored_holder()), held.token()));
    assert_eq!((holder.label.as_deref(), info.waiters), (Some("nightly"), Some(1)));
    let (user, host) = (whoami::username().unwrap(), whoami::hostname().unwrap());
    assert_eq!(holder.owner, Some(format!("{user}@{host} pid {}", std::process::id())));
    let ledger = admin.list(&ListQuery::new().prefix("ledger:")).await.unwrap();
    assert_eq!(ledger.iter().map(|info| info.key.as_str()).collect::<Vec<_>>(), ["ledger:1"]);
    let all = admin.list(&ListQuery::new()).await.unwrap();
    assert_eq!(all.iter().map(|info| info.key.as_str()).collect::<Vec<_>>(), ["ledger:1", "other"]);
    assert_eq!(admin.list(&ListQuery::new().limit(1)).await.unwrap().len(), 1);
    let before = etcd.revision().await;
    assert!(admin.inspect(&key("free")).await.unwrap().is_free());
    assert!(etcd.entries(format!("{prefix}//q/free")).await.is_empty(), "a look writes nothing");
    assert!(etcd.revision().await >= before);
    held.release().await.unwrap();
    soon("never granted", waiter).await.unwrap().unwrap().release().await.unwrap();
    other.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forced_release_ends_that_hold_alone() {
    let (etcd, prefix) = (Etcd::shared(), Etcd::fresh_prefix());
    let (a, b) = (client(etcd, &prefix).await, client(etcd, &prefix).await);
    let (held, other) = (acquired(&a, "k").await, acquired(&a, "other").await);
    let admin = b.admin().unwrap();
    assert!(!admin.force_release(held.key(), other.stored_holder()).await.unwrap());
    assert!(admin.force_release(held.key(), held.stored_holder()).await.unwrap());
    let next = acquired(&b, "k").await;
    assert_eq!(soon("the loss is never noticed", held.lost()).await, LossReason::ForcedRelease);
    assert_eq!((other.validity(), next.validity()), (Validity::Valid, Validity::Valid));
    next.release().await.unwrap();
    other.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_hears_a_request_to_release() {
    let (etcd, prefix) = (Etcd::shared(), Etcd::fresh_prefix());
    let (a, b) = (client(etcd, &prefix).await, client(etcd, &prefix).await);
    let held = acquired(&a, "k").await;
    let admin = b.admin().unwrap();
    assert!(admin.ask(held.key(), held.stored_holder()).await.unwrap());
    soon("never asked", held.asked()).await;
    assert!(admin.inspect(held.key()).await.unwrap().holder().unwrap().asked);
    held.release().await.unwrap();
}

#[tokio::test]
async fn entries_of_other_programs_do_no_harm() {
    let (etcd, prefix) = (Etcd::shared(), Etcd::fresh_prefix());
    let lock = client(etcd, &prefix).await;
    for name in ["q/", "q/no holder", "q/\0", "s/not a session", "c/", "n/", "unknown"] {
        etcd.put(format!("{prefix}/{name}"), [0xff, 0]).await.unwrap();
    }
    cycle(&lock, "k").await;
    let held = acquired(&lock, "held").await;
    let all = lock.admin().unwrap().list(&ListQuery::new().include_ended()).await.unwrap();
    assert_eq!(all.iter().map(|info| info.key.as_str()).collect::<Vec<_>>(), ["held"]);
    held.release().await.unwrap();
}

#[tokio::test]
async fn facts_name_the_version_and_warn_of_old_servers() {
    let mut advice = Vec::new();
    for program in [EtcdProgram::Vendored, EtcdProgram::Installed] {
        let etcd = Etcd::start(EtcdOptions::new().program(program).auto_compaction(1_000));
        let version = etcd.status(0).await.unwrap().version;
        let facts = client(&etcd, &Etcd::fresh_prefix()).await.admin().unwrap().facts().await.unwrap();
        let fact = facts.iter().find(|fact| fact.value.contains(&version));
        advice.push((version, fact.unwrap_or_else(|| panic!("no version in {facts:?}")).advice.is_some()));
    }
    assert!(!advice[0].1, "{advice:?}");
    if advice[1].0.starts_with("3.4.2") {
        assert!(advice[1].1, "E2 is fixed in 3.4.31: {advice:?}");
    }
}
