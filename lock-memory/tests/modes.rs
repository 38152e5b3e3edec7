//! Shared grants and permits of the memory store.

#![allow(clippy::unwrap_used, clippy::expect_used)] // A failed `unwrap` fails the test.

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{ErrorKind, Lock, LockAdmin as _, LockExt, LockGuard, LockKey, Mode};
use leasehold_engine::{Engine, Waiting};
use leasehold_memory::{ClientSetup, MemoryStore};

const THREE: Mode = Mode::Permit { of: 3 };

async fn permit(lock: &impl Lock) -> LockGuard {
    lock.key("gpu").mode(THREE).try_acquire().await.unwrap().expect("a free permit")
}

#[tokio::test(start_paused = true)]
async fn a_permit_has_the_smallest_free_number() {
    let store = MemoryStore::new();
    let (a, b) = (store.client().unwrap(), store.client().unwrap());
    let [zero, one, two] = [permit(&a).await, permit(&b).await, permit(&a).await];
    assert_eq!([&zero, &one, &two].map(LockGuard::permit), [Some(0), Some(1), Some(2)]);
    assert!(b.key("gpu").permits(3).try_acquire().await.unwrap().is_none());
    one.release().await.unwrap();
    zero.release().await.unwrap();
    assert_eq!([permit(&b).await, permit(&b).await].map(|guard| guard.permit()), [Some(0), Some(1)]);
    drop(two);
    assert_eq!((a.active_keys(), b.active_keys()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn readers_that_wait_for_a_writer_are_granted_together_and_before_the_next_writer() {
    for waiting in [Waiting::Store, Waiting::Poll { every: Duration::from_millis(100) }] {
        let store = MemoryStore::new().waiting(waiting);
        // The store grants each reader, because they share no hold.
        let alone = store.builder().unwrap().share_for(Duration::ZERO);
        let (a, b) = (Arc::new(store.client().unwrap()), Arc::new(alone.start().unwrap()));
        let writer = a.key("k").acquire().await.unwrap();
        let reader = |lock: &Arc<Engine>| {
            let lock = Arc::clone(lock);
            tokio::spawn(async move { lock.key("k").shared().acquire().await.unwrap() })
        };
        let readers = [reader(&b), reader(&b), reader(&b)];
        tokio::time::sleep(Duration::from_millis(1)).await;
        writer.release().await.unwrap();
        let mut held = Vec::new();
        for reader in readers {
            held.push(reader.await.unwrap());
        }
        assert!(held.iter().all(|guard| guard.mode() == Mode::Shared && guard.permit().is_none()));
        assert!(a.key("k").try_acquire().await.unwrap().is_none());
        let info = a.inspect(&LockKey::new("k").unwrap()).await.unwrap();
        assert!(info.holders.len() == 3 && info.holders.iter().all(|hold| hold.mode == Mode::Shared));
    }
}

#[tokio::test(start_paused = true)]
async fn a_polling_writer_is_served_by_readers_of_other_clients_that_overlap() {
    // Without hints, the writer polls some time after the last reader has left.
    for (hints, crowd) in [(true, 4_u64), (false, 64)] {
        let every = Duration::from_millis(100);
        let store = MemoryStore::new().waiting(Waiting::Poll { every }).hints(hints);
        let writer = store.client().unwrap();
        let mut readers = Vec::new();
        for i in 0..crowd {
            let reader = store.client().unwrap();
            readers.push(tokio::spawn(async move {
                tokio::time::sleep(Duration::from_millis(3 * (i % 4))).await;
                loop {
                    let guard = reader.key("k").shared().acquire().await.unwrap();
                    tokio::time::sleep(Duration::from_millis(10)).await;
                    guard.release().await.unwrap();
                }
            }));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
        for _ in 0..10 {
            writer.key("k").wait(Duration::from_secs(3)).acquire().await.unwrap().release().await.unwrap();
        }
        readers.iter().for_each(tokio::task::JoinHandle::abort);
    }
}

#[tokio::test(start_paused = true)]
async fn a_waiter_for_another_number_of_permits_gets_an_error_when_its_turn_comes() {
    let store = MemoryStore::new();
    let clients = [store.client().unwrap(), store.client().unwrap(), store.client().unwrap()];
    let [a, b, c] = clients.map(Arc::new);
    let writer = a.key("gpu").acquire().await.unwrap();
    let waiting = |lock: &Arc<Engine>, of| {
        let lock = Arc::clone(lock);
        tokio::spawn(async move { lock.key("gpu").permits(of).acquire().await })
    };
    let first = waiting(&b, 3);
    tokio::time::sleep(Duration::from_millis(1)).await;
    let others = [waiting(&b, 5), waiting(&c, 5)];
    tokio::time::sleep(Duration::from_millis(1)).await;
    writer.release().await.unwrap();
    let permit = first.await.unwrap().unwrap();
    for other in others {
        let error = other.await.unwrap().unwrap_err();
        assert_eq!((error.kind(), error.is_retryable()), (ErrorKind::ModeMismatch, false), "{error}");
    }
    permit.release().await.unwrap();
    assert!(c.key("gpu").permits(5).try_acquire().await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn an_expired_reader_keeps_no_writer_out_and_its_late_release_ends_nobody() {
    let store = MemoryStore::new().default_ttl(Duration::from_secs(30));
    let (silent, b) = (store.client_with(ClientSetup::new()).unwrap(), store.client().unwrap());
    let lost = silent.lock.key("k").shared().acquire().await.unwrap();
    let held = b.key("k").shared().acquire().await.unwrap();
    silent.faults.silence(true);
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(b.key("k").try_acquire().await.unwrap().is_none(), "one reader is left");
    held.release().await.unwrap();
    let next = b.key("k").try_acquire().await.unwrap().expect("no reader is left");
    silent.faults.silence(false);
    assert_eq!(lost.release().await.unwrap_err().kind(), ErrorKind::Lost);
    next.confirm().await.unwrap();
}
