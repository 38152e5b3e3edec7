//! A hold that leaves its client as a text, and one that arrives: what the suite cannot see from outside.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use leasehold_api::{
    Error, ErrorKind, FencingToken, HolderId, Lock as _, LockExt as _, LockKey, Operation, PortableHold,
    Validity,
};
use leasehold_engine::{Attempt, Contended, Engine, Waiting};
use leasehold_memory::{ClientSetup, Fault, MemoryStore, Op};
use tokio::time::{sleep, timeout};
use tokio_test::{assert_pending, assert_ready_ok, task};

use crate::common::relay::{Call, Relay, RelayNet};

const MINUTE: Duration = Duration::from_secs(60);
const MOMENT: Duration = Duration::from_millis(1);

fn relay(net: &Arc<RelayNet>) -> Relay {
    let mut relay = Relay::new(net);
    relay.capabilities.portable = true;
    relay
}

fn client() -> (Engine, Arc<RelayNet>) {
    let net = Arc::new(RelayNet::default());
    (relay(&net).start(), net)
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
    assert_eq!(net.calls()[..2], [Call::Acquire(id), Call::GiveOut(id)]);
    let later = &net.calls()[2..];
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
    assert_eq!(net.calls(), [Call::Acquire(id), Call::Renew(id), Call::GiveOut(id)]);
}

#[tokio::test(start_paused = true)]
async fn a_hold_stays_that_an_unanswered_renewal_can_still_make_shorter_or_longer() {
    for (renewed_for, leaves) in [(MINUTE / 2, false), (MINUTE, true), (MINUTE * 2, false)] {
        let (lock, net) = client();
        let guard = lock.key("k").acquire().await.unwrap();
        net.renewals_wait.store(true, SeqCst);
        let error = guard.renew_for(renewed_for).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutcomeUnknown);
        net.renewals_wait.store(false, SeqCst);
        let (renewed, id) = (guard.renew().await, guard.holder());
        assert_eq!(
            renewed.map_err(|error| error.kind()),
            Ok(()),
            "an answer to a later renewal changes nothing"
        );
        let given_out = guard.into_ref(MINUTE).await;
        assert_eq!(given_out.is_ok(), leaves, "{renewed_for:?}: {given_out:?}");
        assert_eq!(net.calls().contains(&Call::GiveOut(id)), leaves, "the store marks no hold that stays");
        if let Err(error) = given_out {
            assert_eq!((error.kind(), error.operation()), (ErrorKind::Unavailable, Some(Operation::GiveOut)));
            assert!(error.to_string().contains("another time"), "{error}");
        }
        sleep(MINUTE).await;
        assert_eq!(net.is_free(), !leaves, "the guard was released");
    }
}

#[tokio::test(start_paused = true)]
async fn a_hold_whose_extension_is_used_before_it_has_left_stays() {
    let (lock, net) = client();
    let guard = lock.key("k").acquire().await.unwrap();
    let (id, handle) = (guard.holder(), guard.handle());
    net.renewals_wait.store(true, SeqCst);
    let mut leaving = task::spawn(guard.into_ref(MINUTE));
    assert_pending!(leaving.poll());
    sleep(MOMENT).await;
    assert_eq!(handle.extension::<HolderId>(), Some(&id));
    net.renewals_wait.store(false, SeqCst);
    net.answers.notify_waiters();
    let error = leaving.await.unwrap_err();
    assert_eq!((error.kind(), error.operation()), (ErrorKind::InvalidOption, Some(Operation::GiveOut)));
    sleep(MOMENT).await;
    assert_eq!(net.calls(), [Call::Acquire(id), Call::GiveOut(id), Call::Release(id)]);
}

#[tokio::test(start_paused = true)]
async fn a_hold_whose_extension_was_used_is_not_given_out_at_the_store() {
    let (lock, net) = client();
    let guard = lock.key("k").acquire().await.unwrap();
    let id = guard.holder();
    assert_eq!(guard.extension::<HolderId>(), Some(&id));
    assert_eq!(guard.into_ref(MINUTE).await.unwrap_err().kind(), ErrorKind::InvalidOption);
    sleep(MOMENT).await;
    assert_eq!(net.calls(), [Call::Acquire(id), Call::Release(id)]);
}

/// The store has marked the hold, and the call that gives it out is dropped before it sees the answer.
#[tokio::test(start_paused = true)]
async fn a_hold_that_the_store_has_given_out_does_not_pass_to_a_caller_here() {
    let (lock, net) = client();
    let guard = lock.key("k").acquire().await.unwrap();
    let id = guard.holder();
    let mut next = task::spawn(lock.key("k").acquire());
    assert_pending!(next.poll());
    let mut leaving = task::spawn(guard.into_ref(MINUTE));
    assert_pending!(leaving.poll());
    sleep(MOMENT).await;
    drop(leaving);
    let next = next.await.unwrap();
    let expected = [Call::Acquire(id), Call::GiveOut(id), Call::Release(id), Call::Acquire(next.holder())];
    assert_eq!(net.calls(), expected);
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
async fn a_try_after_the_drop_of_an_adopted_guard_waits_for_its_release() {
    let client = MemoryStore::new().client_with(ClientSetup::new()).unwrap();
    let key = client.lock.key("k").ttl(MINUTE);
    let portable = key.acquire().await.unwrap().into_ref(MINUTE).await.unwrap();
    let guard = client.lock.adopt(portable.expose()).await.unwrap();
    client.faults.script(Op::Release, Fault::Delay(MOMENT));
    drop(guard);
    let next = client.lock.key("k").try_acquire().await.unwrap().expect("no other client has the key");
    next.release().await.unwrap();
}

/// The caller that had the key's permit during the adoption has gone.
#[tokio::test(start_paused = true)]
async fn a_try_beside_the_release_of_an_adopted_guard_blames_no_other_client() {
    for is_awaited in [false, true] {
        let store = MemoryStore::new();
        let (a, b) = (store.client().unwrap(), store.client_with(ClientSetup::new()).unwrap());
        let portable = a.key("k").ttl(MINUTE).acquire().await.unwrap().into_ref(MINUTE).await.unwrap();
        let mut waiting = task::spawn(b.lock.key("k").acquire());
        assert_pending!(waiting.poll());
        sleep(MOMENT).await;
        let guard = b.lock.adopt(portable.expose()).await.unwrap();
        drop(waiting);
        sleep(MOMENT).await;
        b.faults.script(Op::Release, Fault::Delay(MOMENT * 2));
        let mut releasing = is_awaited.then_some(guard).map(|guard| task::spawn(guard.release()));
        releasing.iter_mut().for_each(|releasing| assert_pending!(releasing.poll()));
        let tried = b.lock.key("k").try_acquire().await;
        assert_eq!(
            tried.map(|guard| guard.is_some()).map_err(|error| error.kind()),
            Err(ErrorKind::Unavailable)
        );
        sleep(MINUTE / 2).await;
        releasing.iter_mut().for_each(|releasing| assert_ready_ok!(releasing.poll()));
        b.lock.key("k").try_acquire().await.unwrap().expect("released").release().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn an_adopted_hold_does_not_pass_to_the_next_caller() {
    let (lock, net) = client();
    let portable = lock.key("k").acquire().await.unwrap().into_ref(MINUTE).await.unwrap();
    let guard = lock.adopt(portable.expose()).await.unwrap();
    let adopted = guard.holder();
    let mut next = task::spawn(lock.key("k").acquire());
    assert_pending!(next.poll());
    guard.release().await.unwrap();
    let next = next.await.unwrap();
    assert_eq!(net.calls()[3..], [Call::Release(adopted), Call::Acquire(next.holder())]);
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_waits_beside_an_adopted_hold_is_served_at_its_release() {
    let (a, net) = client();
    let portable = a.key("k").acquire().await.unwrap().into_ref(MINUTE).await.unwrap();
    let b = Arc::new(relay(&net).start());
    let waiting = tokio::spawn({
        let b = Arc::clone(&b);
        async move { b.key("k").acquire().await }
    });
    // The store sends no hints, so the caller would poll again after a hundred times as long.
    sleep(MOMENT).await;
    b.adopt(portable.expose()).await.unwrap().release().await.unwrap();
    let next = timeout(MOMENT, waiting).await.expect("served by its next poll").unwrap().unwrap();
    next.release().await.unwrap();
    assert_eq!(b.active_keys(), 0);
}

#[tokio::test(start_paused = true)]
async fn an_adoption_that_the_store_calls_contended_does_not_wait_for_the_key() {
    let net = Arc::new(RelayNet::default());
    let mut relay = relay(&net);
    // This store has no queue, so a wait in it would fail.
    relay.timing.waiting = Waiting::Store;
    let lock = relay.start();
    let portable = lock.key("k").acquire().await.unwrap().into_ref(MINUTE).await.unwrap();
    net.adoptions.lock().unwrap().push_back(Ok(Attempt::Contended(Contended::new())));
    let guard = lock.adopt(portable.expose()).await.unwrap();
    let adopted = Call::Adopt(guard.holder());
    assert_eq!(net.calls()[2..], [adopted, adopted], "the same request again");
}

#[tokio::test(start_paused = true)]
async fn an_adoption_is_undone_if_one_of_its_requests_had_no_answer() {
    let unavailable = || Error::new(ErrorKind::Unavailable, "no answer");
    for (first, is_undone) in [(Ok(Attempt::Refused(unavailable())), false), (Err(unavailable()), true)] {
        let (lock, net) = client();
        let (key, holder) = (LockKey::new("k").unwrap(), HolderId::from_parts(1, 1));
        let ended = PortableHold::new(&key, holder, FencingToken::from_u64(1), MINUTE);
        net.adoptions.lock().unwrap().push_back(first);
        assert_eq!(lock.adopt(ended.expose()).await.unwrap_err().kind(), ErrorKind::Lost);
        sleep(MOMENT).await;
        let calls = net.calls();
        assert!(matches!(calls[..2], [Call::Adopt(one), Call::Adopt(again)] if one == again), "{calls:?}");
        let releases = calls.iter().filter(|call| matches!(call, Call::Release(_))).count();
        assert_eq!((calls.len(), releases), (2 + releases, usize::from(is_undone)));
    }
}

#[tokio::test(start_paused = true)]
async fn an_adoption_of_an_ended_hold_is_no_failure_of_the_store() {
    let (lock, _net) = client();
    let portable = lock.key("k").acquire().await.unwrap().into_ref(MINUTE).await.unwrap();
    lock.adopt(portable.expose()).await.unwrap().release().await.unwrap();
    assert_eq!(lock.adopt(portable.expose()).await.unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(lock.counters().failures, 0);
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
