//! The first things a user does.

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, ErrorKind, HolderId, Lock, LockExt, LockKey, LossReason, Validity};
use leasehold_engine::{Attempt, Backend as _, HoldRef, Renewed, Request};
use leasehold_memory::{ClientSetup, Fault, MemoryStore, Op};

#[tokio::test(start_paused = true)]
async fn acquire_release_and_contend() {
    let store = MemoryStore::new();
    let (a, b) = (store.client().unwrap(), store.client().unwrap());
    let guard = a.key("k").acquire().await.unwrap();
    assert!(a.key("k").try_acquire().await.unwrap().is_none());
    assert!(b.key("k").try_acquire().await.unwrap().is_none());
    let first = guard.token();
    guard.release().await.unwrap();
    let guard = b.key("k").try_acquire().await.unwrap().unwrap();
    assert!(guard.token() > first);
    drop(guard);
    assert!(a.key("k").try_acquire().await.unwrap().is_some());
    assert_eq!(a.active_keys(), 0);
}

#[tokio::test(start_paused = true)]
async fn waits_across_clients() {
    let store = MemoryStore::new();
    let (a, b) = (Arc::new(store.client().unwrap()), store.client().unwrap());
    let guard = b.key("k").acquire().await.unwrap();
    let waiting = {
        let a = Arc::clone(&a);
        tokio::spawn(async move { a.key("k").acquire().await.map(drop) })
    };
    tokio::task::yield_now().await;
    guard.release().await.unwrap();
    waiting.await.unwrap().unwrap();
    let error = {
        let _held = b.key("k").acquire().await.unwrap();
        a.key("k").wait(Duration::from_secs(5)).acquire().await.unwrap_err()
    };
    assert_eq!(error.kind(), ErrorKind::Timeout);
}

#[tokio::test(start_paused = true)]
async fn leases_are_renewed_and_end_when_the_store_is_silent() {
    let store = MemoryStore::new().default_ttl(Duration::from_secs(30));
    let a = store.client_with(ClientSetup::new()).unwrap();
    let b = store.client().unwrap();
    let guard = a.lock.key("k").acquire().await.unwrap();
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert_eq!(guard.validity(), Validity::Valid);
    assert!(a.faults.calls(Op::Renew) >= 10);
    a.faults.silence(true);
    let begun = tokio::time::Instant::now();
    assert_eq!(guard.lost().await, LossReason::Expired);
    assert!(begun.elapsed() <= Duration::from_secs(30));
    assert!(b.key("k").try_acquire().await.unwrap().is_none(), "the store still has it");
    let next = b.key("k").acquire().await.unwrap();
    a.faults.silence(false);
    assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Lost);
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(next.validity(), Validity::Valid);
}

#[tokio::test(start_paused = true)]
async fn lost_reply_is_undone() {
    let store = MemoryStore::new();
    let a = store.client_with(ClientSetup::new()).unwrap();
    let b = store.client().unwrap();
    a.faults.script(Op::Acquire, Fault::LoseReply);
    let error = a.lock.key("k").give_up_on_failure().acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutcomeUnknown);
    tokio::time::sleep(Duration::from_millis(10)).await;
    assert!(b.key("k").try_acquire().await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn close_ends_everything() {
    let store = MemoryStore::new();
    let (a, b) = (Arc::new(store.client().unwrap()), store.client().unwrap());
    let guard = a.key("k").acquire().await.unwrap();
    let waiting = {
        let a = Arc::clone(&a);
        tokio::spawn(async move { a.key("k").acquire().await.map(drop) })
    };
    tokio::task::yield_now().await;
    a.close().await.unwrap();
    a.close().await.unwrap();
    assert_eq!(waiting.await.unwrap().unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(guard.lost().await, LossReason::Closed);
    assert!(b.key("k").try_acquire().await.unwrap().is_some());
    assert_eq!(a.key("x").acquire().await.unwrap_err().kind(), ErrorKind::Closed);
    let _ = LockKey::new("x");
}

// A repeated request restarts the lease, because an earlier copy might have been granted too late for its caller.
#[tokio::test(start_paused = true)]
async fn asking_again_begins_the_lease_anew() {
    let backend = MemoryStore::new().backend();
    let mut request = Request::new(LockKey::new("k").unwrap(), HolderId::from_parts(7, 1));
    let mut tokens = Vec::new();
    for (pause, ttl) in [(0, 30), (20, 30), (20, 1), (9, 1)] {
        tokio::time::sleep(Duration::from_secs(pause)).await;
        request.ttl = Some(Duration::from_secs(ttl));
        let attempt = backend.acquire(vec![request.clone()]).await.remove(0).unwrap();
        let Attempt::Granted(granted) = attempt else { panic!("{attempt:?}") };
        tokens.push(granted.token);
    }
    tokens.dedup();
    assert_eq!(tokens.len(), 1, "one grant, which never ended in between: {tokens:?}");
    let other = Request::new(request.key, HolderId::from_parts(7, 2));
    let attempt = backend.acquire(vec![other]).await.remove(0).unwrap();
    let Attempt::Contended(contended) = attempt else { panic!("{attempt:?}") };
    assert_eq!(contended.retry_after, Some(Duration::from_secs(1)));
}

/// A store whose clock was set forward ends leases that still read valid (C1). Releasing such a lease must return
/// `Lost`.
#[tokio::test(start_paused = true)]
async fn a_release_of_a_lease_that_has_ended_at_the_store_alone_is_lost() {
    let store = MemoryStore::new().default_ttl(Duration::from_secs(10));
    let a = store.client_with(ClientSetup::new()).unwrap();
    let minute = Duration::from_secs(60);
    for cooldown in [None, Some(Duration::from_secs(1))] {
        let mut request = a.lock.key("k");
        if let Some(cooldown) = cooldown {
            request = request.cooldown(cooldown);
        }
        let guard = request.acquire().await.unwrap();
        a.faults.skew_behind(minute);
        store.advance(minute);
        assert_eq!(guard.validity(), Validity::Valid);
        let error = guard.release().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Lost, "{cooldown:?}: {error}");
        a.faults.skew_behind(Duration::ZERO);
    }
}

/// Calls the store without an engine, because an engine repeats no request that was answered.
#[tokio::test(start_paused = true)]
async fn an_adoption_that_arrives_again_never_shortens_the_lease() {
    let backend = MemoryStore::new().backend();
    let (key, minute) = (LockKey::new("k").unwrap(), Duration::from_secs(60));
    let request = |serial| {
        let mut request = Request::new(key.clone(), HolderId::from_parts(1, serial));
        request.ttl = Some(minute);
        request
    };
    let lasting = |hold: &HoldRef, ttl| {
        let mut hold = hold.clone();
        hold.ttl = Some(ttl);
        hold
    };
    let granted = |attempt: Result<Attempt, Error>| match attempt {
        Ok(Attempt::Granted(granted)) => granted.token,
        Ok(Attempt::Refused(error)) if error.kind() == ErrorKind::Lost => None,
        other => panic!("{other:?}"),
    };
    let first = request(1);
    let mut given = first.hold();
    given.token = granted(backend.acquire(vec![first]).await.remove(0));
    let adopted = async || granted(backend.adopt(request(2), given.clone()).await);
    let shown = async || {
        let info = backend.admin().unwrap().inspect(&key).await.unwrap();
        let hold = info.holder().unwrap().clone();
        (hold.expires_in.unwrap(), hold.owner.is_some())
    };
    assert_eq!((adopted().await, shown().await), (None, (minute, true)), "it was not given out");
    assert_eq!(backend.give_out(given.clone()).await.unwrap(), Renewed::Extended);
    assert_eq!(shown().await, (minute, false), "on its way it has no owner");
    let token = adopted().await;
    assert!(token > given.token);
    let second = request(2).hold();
    assert_eq!(
        backend.renew(vec![lasting(&second, minute * 60)]).await.remove(0).unwrap(),
        Renewed::Extended
    );
    assert_eq!((adopted().await, shown().await), (token, (minute * 60, true)), "the same grant");
    // The same request after its hold has left again.
    assert_eq!(backend.give_out(lasting(&second, minute / 2)).await.unwrap(), Renewed::Extended);
    assert_eq!((adopted().await, shown().await), (None, (minute / 2, false)));
}
