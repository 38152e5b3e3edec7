//! Transactions that etcd carries out only while a hold stands (hazard E5).

use leasehold_api::{ErrorKind, LockExt as _};
use leasehold_etcd::{EtcdFence, EtcdGuardExt as _, EtcdWrite};
use test_servers::Etcd;

use crate::support::{acquired, client, queue, soon};

/// Returns the value of `name`, which tests write.
async fn value(etcd: &Etcd, name: &str) -> Option<String> {
    let entry = etcd.entries(name).await.pop();
    entry.map(|entry| String::from_utf8(entry.value).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn writes_are_carried_out_together_while_the_hold_stands() {
    let (etcd, prefix) = (Etcd::shared(), Etcd::fresh_prefix());
    let lock = client(etcd, &prefix).await;
    let guard = acquired(&lock, "k").await;
    let (one, two) = (format!("{prefix}-one"), format!("{prefix}-two"));
    guard.write(vec![EtcdWrite::put(&*one, "1"), EtcdWrite::put(&*two, "2")]).await.unwrap();
    assert_eq!(
        (value(etcd, &one).await.as_deref(), value(etcd, &two).await.as_deref()),
        (Some("1"), Some("2"))
    );
    guard.write(vec![EtcdWrite::delete(&*one), EtcdWrite::put(&*two, "3")]).await.unwrap();
    assert_eq!((value(etcd, &one).await, value(etcd, &two).await.as_deref()), (None, Some("3")));
    // Another program adds this condition to its own transaction.
    let fence = guard.extension::<EtcdFence>().unwrap();
    let entries = queue(etcd, &prefix, "k").await;
    assert_eq!(entries[0].key, fence.entry());
    assert_eq!(i64::try_from(entries[0].created).unwrap(), fence.create_revision());
    guard.release().await.unwrap();
}

/// The holder does not know yet that its session has ended, so only the server can refuse its write.
#[tokio::test(flavor = "multi_thread")]
async fn a_holder_whose_lease_has_ended_writes_nothing() {
    let (etcd, prefix) = (Etcd::shared(), Etcd::fresh_prefix());
    let (a, b) = (client(etcd, &prefix).await, client(etcd, &prefix).await);
    let written = format!("{prefix}-written");
    let late = acquired(&a, "k").await;
    let fence = late.extension::<EtcdFence>().unwrap().clone();
    fence.write(vec![EtcdWrite::put(&*written, "first")]).await.unwrap();
    assert!(etcd.revoke(queue(etcd, &prefix, "k").await[0].lease).await);
    let error = fence.write(vec![EtcdWrite::put(&*written, "late")]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost, "{error:?}");
    let next = acquired(&b, "k").await;
    next.write(vec![EtcdWrite::put(&*written, "second")]).await.unwrap();
    for error in [
        fence.write(vec![EtcdWrite::put(&*written, "late")]).await.unwrap_err(),
        late.write(vec![EtcdWrite::put(&*written, "late")]).await.unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Lost, "{error:?}");
    }
    assert_eq!(value(etcd, &written).await.as_deref(), Some("second"));
    next.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_fence_of_a_grant_does_not_fence_the_next_one() {
    let (etcd, prefix) = (Etcd::shared(), Etcd::fresh_prefix());
    let lock = client(etcd, &prefix).await;
    let written = format!("{prefix}-written");
    let guard = acquired(&lock, "k").await;
    let handle = guard.handle();
    let waiter = tokio::spawn({
        let lock = lock.clone();
        async move { lock.key("k").acquire().await }
    });
    // A caller with the fence keeps the hold from passing to another caller of this client.
    let fence = guard.extension::<EtcdFence>().unwrap().clone();
    guard.release().await.unwrap();
    let next = soon("never granted", waiter).await.unwrap().unwrap();
    assert!(handle.extension::<EtcdFence>().is_none());
    let error = fence.write(vec![EtcdWrite::put(&*written, "late")]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost, "{error:?}");
    assert_eq!(value(etcd, &written).await, None);
    next.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn too_many_writes_are_refused_and_change_nothing() {
    let (etcd, prefix) = (Etcd::shared(), Etcd::fresh_prefix());
    let lock = client(etcd, &prefix).await;
    let guard = acquired(&lock, "k").await;
    let writes = |count: usize| (0..count).map(|n| EtcdWrite::put(format!("{prefix}-w{n}"), "1")).collect();
    guard.write(writes(100)).await.unwrap();
    assert_eq!(etcd.delete(format!("{prefix}-w")).await, 100);
    let error = guard.write(writes(101)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidOption, "{error:?}");
    assert_eq!(etcd.delete(format!("{prefix}-w")).await, 0);
    guard.release().await.unwrap();
}
