//! Shared holds and permits: their entries, and the numbers of the permits.

use std::time::Duration;

use leasehold_api::{Lock as _, LockExt as _, LossReason, Mode, Validity};
use test_servers::{Entry, Etcd};

use crate::support::{MINUTES, client, client_of, idle, key, queue, queue_of, soon, until};

/// Returns the numbers of the permits of a key that are taken.
pub(crate) async fn numbers(etcd: &Etcd, prefix: &str, name: &str) -> Vec<Entry> {
    etcd.entries(format!("{prefix}//p/{name}\0")).await
}

#[tokio::test(flavor = "multi_thread")]
async fn holders_of_permits_have_a_number_under_the_lease_of_their_entry() {
    let (etcd, prefix) = (Etcd::shared(), Etcd::fresh_prefix());
    let (a, b) = (client(etcd, &prefix).await, client(etcd, &prefix).await);
    let first = a.key("k").permits(2).acquire().await.unwrap();
    let second = b.key("k").permits(2).acquire().await.unwrap();
    assert_eq!((first.permit(), second.permit()), (Some(0), Some(1)));
    let waiter = tokio::spawn({
        let a = a.clone();
        async move { a.key("k").permits(2).acquire().await }
    });
    let entries = queue_of(etcd, &prefix, "k", 3).await;
    let taken = numbers(etcd, &prefix, "k").await;
    assert_eq!(
        taken.iter().map(|number| number.lease).collect::<Vec<_>>(),
        [entries[0].lease, entries[1].lease]
    );
    second.release().await.unwrap();
    let third = soon("never granted", waiter).await.unwrap().unwrap();
    assert_eq!(third.permit(), Some(1));
    // The entry and its number move to the session of the new TTL together.
    third.renew_for(MINUTES).await.unwrap();
    let (entry, number) =
        (queue_of(etcd, &prefix, "k", 2).await.remove(1), numbers(etcd, &prefix, "k").await.remove(1));
    assert_ne!(entry.lease, entries[2].lease);
    assert_eq!(number.lease, entry.lease);
    third.release().await.unwrap();
    first.release().await.unwrap();
    assert_eq!((queue(etcd, &prefix, "k").await, numbers(etcd, &prefix, "k").await), (vec![], vec![]));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_session_ends_its_readers_and_permits_alone() {
    let (etcd, prefix) = (Etcd::shared(), Etcd::fresh_prefix());
    let (a, b) = (client_of(etcd.addresses(), &prefix, MINUTES).await, client(etcd, &prefix).await);
    let dead = [a.key("r").shared().acquire().await.unwrap(), a.key("p").permits(1).acquire().await.unwrap()];
    let live = b.key("r").shared().acquire().await.unwrap();
    assert!(etcd.revoke(queue(etcd, &prefix, "p").await[0].lease).await);
    let next = soon("never granted", b.key("p").permits(1).wait(MINUTES).acquire()).await.unwrap();
    assert_eq!(next.permit(), Some(0));
    for guard in &dead {
        soon("the loss is never noticed", guard.lost()).await;
    }
    live.confirm().await.unwrap();
    assert!(b.key("r").try_acquire().await.unwrap().is_none(), "one reader is left");
    live.release().await.unwrap();
    b.key("r").acquire().await.unwrap().release().await.unwrap();
    next.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn operators_see_all_holders_and_end_one() {
    let (etcd, prefix) = (Etcd::shared(), Etcd::fresh_prefix());
    let (a, b) = (client(etcd, &prefix).await, client(etcd, &prefix).await);
    let of = Mode::Permit { of: 2 };
    let (ended, kept) =
        (a.key("k").mode(of).acquire().await.unwrap(), b.key("k").mode(of).acquire().await.unwrap());
    let admin = b.admin().unwrap();
    let shown = |info: leasehold_api::KeyInfo| -> Vec<_> {
        info.holders.iter().map(|hold| (hold.holder, hold.mode, hold.permit)).collect()
    };
    let both = [(Some(ended.stored_holder()), of, Some(0)), (Some(kept.stored_holder()), of, Some(1))];
    assert_eq!(shown(admin.inspect(&key("k")).await.unwrap()), both);
    let listed = admin.list(&leasehold_api::ListQuery::new()).await.unwrap();
    assert_eq!(listed.into_iter().flat_map(shown).collect::<Vec<_>>(), both);
    assert!(admin.ask(&key("k"), ended.stored_holder()).await.unwrap());
    soon("never asked", ended.asked()).await;
    assert!(admin.force_release(&key("k"), ended.stored_holder()).await.unwrap());
    assert_eq!(numbers(etcd, &prefix, "k").await.len(), 1);
    assert_eq!(soon("the loss is never noticed", ended.lost()).await, LossReason::ForcedRelease);
    let next = a.key("k").mode(of).acquire().await.unwrap();
    assert_eq!((next.permit(), kept.validity()), (Some(0), Validity::Valid));
    next.release().await.unwrap();
    kept.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_number_ends_its_hold_and_a_number_without_an_entry_is_free() {
    let (etcd, prefix) = (Etcd::shared(), Etcd::fresh_prefix());
    let (a, b) = (client(etcd, &prefix).await, client(etcd, &prefix).await);
    let first = a.key("k").permits(1).acquire().await.unwrap();
    assert_eq!(etcd.delete(&numbers(etcd, &prefix, "k").await[0].key).await, 1);
    assert_eq!(soon("the loss is never noticed", first.lost()).await, LossReason::Gone);
    idle(&a).await;
    let second = a.key("k").permits(1).acquire().await.unwrap();
    assert_eq!(etcd.delete(&queue(etcd, &prefix, "k").await[0].key).await, 1);
    let third = soon("never granted", b.key("k").permits(1).wait(MINUTES).acquire()).await.unwrap();
    assert_eq!(third.permit(), Some(0));
    soon("the loss is never noticed", second.lost()).await;
    idle(&a).await;
    // The release of the lost hold spares the number of the next one.
    third.confirm().await.unwrap();
    assert_eq!(numbers(etcd, &prefix, "k").await.len(), 1);
    third.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_writer_of_an_older_library_excludes_readers_and_permits() {
    let (etcd, prefix) = (Etcd::shared(), Etcd::fresh_prefix());
    let lock = client(etcd, &prefix).await;
    // Its entry has no mode.
    let entry = format!("{prefix}//q/k\0{:032x}-1", 7);
    etcd.put(&entry, "{}").await.unwrap();
    assert!(lock.key("k").shared().try_acquire().await.unwrap().is_none());
    assert!(lock.key("k").permits(2).try_acquire().await.unwrap().is_none());
    let reader = tokio::spawn({
        let lock = lock.clone();
        async move { lock.key("k").shared().wait(MINUTES).acquire().await }
    });
    queue_of(etcd, &prefix, "k", 2).await;
    assert_eq!(etcd.delete(&entry).await, 1);
    soon("never granted", reader).await.unwrap().unwrap().release().await.unwrap();
    until("an entry stays", async || queue(etcd, &prefix, "k").await.is_empty()).await;
    assert!(lock.key("k").wait(Duration::ZERO).acquire().await.is_ok());
}
