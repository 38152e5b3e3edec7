//! Shared grants and permits in one client.

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{ErrorKind, Lock as _, LockExt as _, LossReason, Mode, Validity};
use leasehold_engine::Engine;
use leasehold_memory::{Client, ClientSetup, Fault, MemoryStore, Op};
use tokio::task::yield_now;
use tokio::time::Instant;

fn client(store: &MemoryStore) -> Client {
    store.client_with(ClientSetup::new()).unwrap()
}

/// A time that is short against the limit of a call.
const SHORT: Duration = Duration::from_millis(100);

#[tokio::test(start_paused = true)]
async fn tries_of_readers_at_the_same_time_are_all_granted() {
    let a = client(&MemoryStore::new());
    for _ in 0..3 {
        a.faults.script(Op::Acquire, Fault::DelayReply(SHORT));
    }
    let read = || a.lock.key("k").shared().try_acquire();
    let (one, two, three) = tokio::join!(read(), read(), read());
    for guard in [one, two, three] {
        assert_eq!(guard.unwrap().expect("no writer is there").mode(), Mode::Shared);
    }
}

#[tokio::test(start_paused = true)]
async fn a_reader_that_tries_behind_one_that_waits_for_a_writer_is_refused_at_once() {
    let store = MemoryStore::new();
    let (a, b) = (Arc::new(client(&store).lock), client(&store).lock);
    let writer = b.key("k").acquire().await.unwrap();
    let waiting = {
        let a = Arc::clone(&a);
        tokio::spawn(async move { a.key("k").shared().acquire().await.unwrap() })
    };
    yield_now().await;
    let begun = Instant::now();
    assert!(a.key("k").shared().try_acquire().await.unwrap().is_none());
    assert!(begun.elapsed() < SHORT);
    writer.release().await.unwrap();
    let reader = waiting.await.unwrap();
    assert!(a.key("k").shared().try_acquire().await.unwrap().is_some());
    reader.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn of_two_tries_for_the_last_permit_one_is_refused_with_the_reply_to_the_other() {
    let a = client(&MemoryStore::new());
    a.faults.script(Op::Acquire, Fault::DelayReply(SHORT));
    let attempt = || a.lock.key("k").permits(1).try_acquire();
    let begun = Instant::now();
    let (one, two) = tokio::join!(attempt(), attempt());
    assert!(begun.elapsed() < SHORT * 3, "{:?}", begun.elapsed());
    let (one, two) = (one.unwrap(), two.unwrap());
    assert_eq!((one.is_some(), two.is_some()), (true, false));
}

#[tokio::test(start_paused = true)]
async fn a_waiter_for_another_number_leaves_when_a_permit_joins_one_that_is_being_released() {
    let a = client(&MemoryStore::new());
    let lock: Arc<Engine> = Arc::new(a.lock);
    let ending = lock.key("k").permits(3).acquire().await.unwrap();
    a.faults.script(Op::Release, Fault::DelayReply(SHORT * 3));
    a.faults.script(Op::Acquire, Fault::DelayReply(SHORT));
    let begun = Instant::now();
    let of = |of| {
        let lock = Arc::clone(&lock);
        tokio::spawn(async move { lock.key("k").permits(of).acquire().await })
    };
    let releasing = tokio::spawn(ending.release());
    yield_now().await;
    let joining = of(3);
    yield_now().await;
    let error = of(5).await.unwrap().unwrap_err();
    assert_eq!((error.kind(), begun.elapsed() < SHORT * 2), (ErrorKind::ModeMismatch, true), "{error}");
    joining.await.unwrap().unwrap().release().await.unwrap();
    releasing.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn each_reader_counts_as_one_grant_and_one_release() {
    let lock = MemoryStore::new().client().unwrap();
    let mut guards = Vec::new();
    for held in 1..=3 {
        guards.push(lock.key("k").shared().acquire().await.unwrap());
        let counters = lock.counters();
        assert_eq!((counters.granted, counters.released), (held, 0));
    }
    assert_eq!(lock.active_keys(), 1);
    for guard in guards {
        guard.release().await.unwrap();
    }
    let counters = lock.counters();
    assert_eq!((counters.granted, counters.released, counters.lost), (3, 3, 0));
    assert_eq!(lock.active_keys(), 0);
}

#[tokio::test(start_paused = true)]
async fn close_ends_readers_and_a_writer_that_waits_for_them() {
    let store = MemoryStore::new();
    let (a, b) = (Arc::new(store.client().unwrap()), store.client().unwrap());
    let readers =
        [a.key("k").shared().acquire().await.unwrap(), a.key("k").shared().acquire().await.unwrap()];
    let writer = {
        let a = Arc::clone(&a);
        tokio::spawn(async move { a.key("k").acquire().await.map(drop) })
    };
    yield_now().await;
    a.close().await.unwrap();
    assert_eq!(writer.await.unwrap().unwrap_err().kind(), ErrorKind::Closed);
    for reader in readers {
        assert_eq!((reader.validity(), reader.lost().await), (Validity::Lost, LossReason::Closed));
    }
    assert!(b.key("k").try_acquire().await.unwrap().is_some());
    assert_eq!(a.active_keys(), 0);
}

#[tokio::test(start_paused = true)]
async fn an_exclusive_request_does_not_reach_the_store_before_the_readers_of_its_client_have_left() {
    let store = MemoryStore::new();
    let a = client(&store);
    let lock: Arc<Engine> = Arc::new(a.lock);
    let reader = lock.key("k").shared().acquire().await.unwrap();
    let calls = || a.faults.calls(Op::Acquire) + a.faults.calls(Op::Wait);
    let before = calls();
    let writer = {
        let lock = Arc::clone(&lock);
        tokio::spawn(async move { lock.key("k").acquire().await.unwrap() })
    };
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(calls(), before);
    reader.release().await.unwrap();
    writer.await.unwrap().release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_shared_hold_is_not_given_out() {
    let store = MemoryStore::new().default_ttl(Duration::from_secs(30));
    let lock = store.client().unwrap();
    let reader = lock.key("k").shared().acquire().await.unwrap();
    assert_eq!(reader.into_ref(SHORT * 10).await.unwrap_err().kind(), ErrorKind::InvalidOption);
    assert!(lock.key("k").try_acquire().await.unwrap().is_some(), "the guard was released");
}

#[tokio::test(start_paused = true)]
async fn a_lost_reply_to_a_reader_is_undone_and_ends_no_other_reader() {
    let store = MemoryStore::new();
    let (a, b) = (client(&store), store.client().unwrap());
    let reader = b.key("k").shared().acquire().await.unwrap();
    a.faults.script(Op::Acquire, Fault::LoseReply);
    let error = a.lock.key("k").shared().try_acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutcomeUnknown);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(reader.validity(), Validity::Valid);
    reader.release().await.unwrap();
    assert!(b.key("k").try_acquire().await.unwrap().is_some());
}
