//! A hold that leaves its client as a text, and one that arrives: what the suite cannot see from outside.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use leasehold_api::{ErrorKind, Lock as _, LockExt as _, Operation, Validity};
use leasehold_engine::Engine;
use leasehold_memory::{ClientSetup, Fault, MemoryStore, Op};
use tokio::time::sleep;
use tokio_test::{assert_pending, task};

use crate::common::relay::{Call, Relay, RelayNet};

const MINUTE: Duration = Duration::from_secs(60);

fn client() -> (Engine, Arc<RelayNet>) {
    let net = Arc::new(RelayNet::default());
    let mut relay = Relay::new(&net);
    relay.capabilities.portable = true;
    (relay.start(), net)
}

#[tokio::test(start_paused = true)]
async fn a_hold_that_was_handed_over_leaves_under_the_id_and_token_of_the_store() {
    let (lock, net) = client();
    let first = lock.key("k").acquire().await.unwrap();
    let (id, token) = (first.holder(), first.token());
    let mut second = task::spawn(lock.key("k").acquire());
    assert_pending!(second.poll());
    first.release().await.unwrap();
    let second = second.await.unwrap();
    assert!(second.holder() != id && second.token() > token, "it was handed over");
    let mut third = task::spawn(lock.key("k").acquire());
    assert_pending!(third.poll());
    let handle = second.handle();
    let portable = second.into_ref(MINUTE * 2).await.unwrap();
    assert_eq!((portable.holder(), Some(portable.token()), portable.ttl()), (id, token, MINUTE * 2));
    assert_eq!((handle.validity(), handle.remaining()), (Validity::Ended, Some(Duration::ZERO)));
    assert_pending!(third.poll(), "handed over to a waiter");
    drop(third);
    sleep(MINUTE * 10).await;
    lock.close().await.unwrap();
    assert_eq!(net.calls()[..3], [Call::Acquire(id), Call::Renew(id), Call::Forget(id)]);
    let later = &net.calls()[3..];
    assert!(!later.contains(&Call::Renew(id)) && !later.contains(&Call::Release(id)), "{later:?}");
    assert_eq!(net.holder("k"), Some(id));
    assert_eq!((lock.counters().granted, lock.counters().lost, lock.active_keys()), (2, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_hold_whose_renewal_is_under_way_leaves_after_a_renewal_of_its_own() {
    let (lock, net) = client();
    let guard = lock.key("k").acquire().await.unwrap();
    let id = guard.holder();
    net.renewals_wait.store(true, SeqCst);
    {
        let mut renewing = task::spawn(guard.renew());
        assert_pending!(renewing.poll());
        sleep(Duration::from_millis(1)).await;
    }
    let mut leaving = task::spawn(guard.into_ref(MINUTE));
    assert_pending!(leaving.poll());
    sleep(Duration::from_millis(1)).await;
    assert_pending!(leaving.poll(), "the earlier renewal can still arrive");
    net.renewals_wait.store(false, SeqCst);
    net.answers.notify_waiters();
    leaving.await.unwrap();
    assert_eq!(net.calls(), [Call::Acquire(id), Call::Renew(id), Call::Renew(id), Call::Forget(id)]);
}

#[tokio::test(start_paused = true)]
async fn a_hold_stays_that_an_unanswered_renewal_can_still_make_shorter() {
    let (lock, net) = client();
    let guard = lock.key("k").acquire().await.unwrap();
    net.renewals_wait.store(true, SeqCst);
    let error = guard.renew_for(MINUTE / 2).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutcomeUnknown);
    net.renewals_wait.store(false, SeqCst);
    let error = guard.into_ref(MINUTE).await.unwrap_err();
    assert_eq!((error.kind(), error.operation()), (ErrorKind::Unavailable, Some(Operation::GiveOut)));
    assert!(error.to_string().contains("shorter"), "{error}");
    sleep(MINUTE).await;
    assert!(net.is_free(), "the guard was released");
}

#[tokio::test(start_paused = true)]
async fn a_hold_in_doubt_stays_and_is_released() {
    let (lock, net) = client();
    let guard = lock.key("k").acquire().await.unwrap();
    net.renewals_wait.store(true, SeqCst);
    while guard.validity() == Validity::Valid {
        sleep(Duration::from_secs(1)).await;
    }
    assert_eq!(guard.validity(), Validity::InDoubt);
    net.renewals_wait.store(false, SeqCst);
    let error = guard.into_ref(MINUTE).await.unwrap_err();
    assert!(error.kind() == ErrorKind::Unavailable && error.to_string().contains("in doubt"), "{error}");
    sleep(Duration::from_secs(1)).await;
    assert!(net.is_free());
}

#[tokio::test(start_paused = true)]
async fn a_store_that_declares_no_portable_holds_is_not_asked() {
    let net = Arc::new(RelayNet::default());
    let lock = Relay::new(&net).start();
    let guard = lock.key("k").acquire().await.unwrap();
    let id = guard.holder();
    assert_eq!(lock.adopt("no text at all").await.unwrap_err().kind(), ErrorKind::Unsupported);
    assert_eq!(guard.into_ref(MINUTE).await.unwrap_err().kind(), ErrorKind::Unsupported);
    sleep(Duration::from_millis(1)).await;
    assert_eq!(net.calls(), [Call::Acquire(id), Call::Release(id)]);
}

#[tokio::test(start_paused = true)]
async fn an_adoption_that_ends_without_an_answer_is_undone() {
    let store = MemoryStore::new();
    let (a, b) = (store.client().unwrap(), store.client_with(ClientSetup::new()).unwrap());
    let portable = a.key("k").ttl(MINUTE * 60).acquire().await.unwrap().into_ref(MINUTE * 60).await.unwrap();
    b.faults.script(Op::Acquire, Fault::LoseReplyHang);
    let error = b.lock.adopt(portable.expose()).await.unwrap_err();
    assert_eq!(
        (error.kind(), error.operation()),
        (ErrorKind::Unavailable, Some(Operation::Adopt)),
        "{error}"
    );
    assert_eq!(error.key(), Some(portable.key()));
    sleep(MINUTE).await;
    let next = a.key("k").try_acquire().await.unwrap().expect("undone long before its lease ends");
    next.release().await.unwrap();
    assert_eq!(b.lock.active_keys(), 0);
}
