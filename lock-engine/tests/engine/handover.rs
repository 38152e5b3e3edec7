//! A released hold passes to the next caller of this client without a call of the store, if nothing forbids it.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use futures_util::FutureExt as _;
use leasehold_api::{
    AcquireOptions, End, ErrorKind, FencingToken, HolderId, Lock as _, LockExt as _, LockGuard, LockKey,
    LossReason, Validity,
};
use leasehold_engine::{Clock, Engine, Events, Moment, TokioClock};
use tokio::time::{advance, sleep};
use tokio_test::{assert_pending, assert_ready, task};

use crate::common::relay::{CHAIN, Call, Early, Relay, RelayNet};

/// One client of a store, and the store.
fn client() -> (Engine, Arc<RelayNet>) {
    client_with(|_| {})
}

fn client_with(change: impl FnOnce(&mut Relay)) -> (Engine, Arc<RelayNet>) {
    let net = Arc::new(RelayNet::default());
    let mut relay = Relay::new(&net);
    change(&mut relay);
    (relay.start(), net)
}

fn key() -> LockKey {
    LockKey::new("k").unwrap()
}

/// A future that was polled once and waits for the key.
macro_rules! waiting {
    ($future:expr) => {{
        let mut waiting = task::spawn($future);
        assert_pending!(waiting.poll());
        waiting
    }};
}

mod ends;

/// Releases `first` while a caller waits, and returns that caller's guard. Asserts whether the hold passed to it.
async fn pass(lock: &Engine, first: LockGuard, passes: bool) -> LockGuard {
    let stored = first.stored_holder();
    let next = waiting!(lock.key("k").acquire());
    first.release().await.unwrap();
    let next = next.await.unwrap();
    assert_eq!(next.stored_holder() == stored, passes, "passed on: {passes}");
    assert_eq!(next.stored_holder() == next.holder(), !passes);
    next
}

#[tokio::test(start_paused = true)]
async fn a_released_hold_passes_to_the_next_caller_without_a_call_of_the_store() {
    let (lock, net) = client();
    let first = lock.key("k").acquire().await.unwrap();
    let (id, token) = (first.holder(), first.token());
    let mut second = waiting!(lock.key("k").acquire());
    let third = waiting!(lock.key("k").acquire());
    let handle = first.handle();
    first.release().await.unwrap();
    assert_eq!(handle.validity(), Validity::Ended, "before the next caller has a guard");
    let second = assert_ready!(second.poll()).unwrap();
    assert_eq!(second.token().map(FencingToken::as_u64), token.map(|t| t.as_u64() + 1));
    let ids = [second.holder()];
    drop(second);
    let third = third.await.unwrap();
    assert_eq!(third.token().map(FencingToken::as_u64), token.map(|t| t.as_u64() + 2));
    assert!(third.holder() != id && ids[0] != id && third.holder() != ids[0], "each grant has its own id");
    assert_eq!((third.stored_holder(), net.calls()), (id, vec![Call::Acquire(id)]));
    third.release().await.unwrap();
    assert_eq!(net.calls(), [Call::Acquire(id), Call::Release(id)]);
    assert!(net.is_free());
    let counters = lock.counters();
    assert_eq!((counters.granted, counters.released, counters.handed_over), (3, 3, 2));
    assert_eq!((counters.lost, lock.active_keys()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn tokens_are_asked_for_only_while_callers_wait() {
    let (lock, net) = client();
    let first = lock.key("k").acquire().await.unwrap();
    advance(CHAIN).await;
    let (second, third) = (waiting!(lock.key("k").acquire()), waiting!(lock.key("k").acquire()));
    first.release().await.unwrap();
    let second = second.await.unwrap();
    let asked = net.asked.lock().unwrap().clone();
    assert_eq!(asked.len(), 2);
    assert!(asked[0] == 0 && asked[1] > 0, "{asked:?}");
    drop((second, third));
}

#[tokio::test(start_paused = true)]
async fn with_hand_over_off_the_store_is_asked_for_each_grant() {
    let net = Arc::new(RelayNet::default());
    let lock = Engine::builder(Relay::new(&net)).handover(false).start().unwrap();
    assert_eq!(lock.capabilities().handover_for, Duration::ZERO);
    let first = lock.key("k").acquire().await.unwrap();
    pass(&lock, first, false).await.release().await.unwrap();
    let (lock, _) = client();
    assert_eq!(lock.capabilities().handover_for, CHAIN);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_sets_no_tokens_aside_is_asked_for_each_grant() {
    let (lock, _) = client_with(|relay| relay.reserves = 0);
    let first = lock.key("k").acquire().await.unwrap();
    pass(&lock, first, false).await.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_chain_ends_with_its_tokens() {
    let (lock, _) = client_with(|relay| relay.reserves = 2);
    let mut guard = lock.key("k").acquire().await.unwrap();
    for passes in [true, true, false, true, true, false] {
        guard = pass(&lock, guard, passes).await;
    }
    guard.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_chain_ends_with_its_time_however_it_is_divided() {
    for parts in [1, 4] {
        let (lock, _) = client();
        let mut guard = lock.key("k").acquire().await.unwrap();
        for _ in 1..parts {
            advance(CHAIN * 3 / 4 / parts).await;
            guard = pass(&lock, guard, true).await;
        }
        advance(CHAIN * 3 / 4 / parts).await;
        pass(&lock, guard, false).await.release().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_chain_ends_as_another_client_waits() {
    let (lock, net) = client();
    let first = lock.key("k").acquire().await.unwrap();
    let second = pass(&lock, first, true).await;
    net.tell(|events| events.awaited(&key()));
    let third = pass(&lock, second, false).await;
    pass(&lock, third, true).await.release().await.unwrap();
}

/// The event can overtake the reply with the grant.
#[tokio::test(start_paused = true)]
async fn an_event_before_the_grant_is_known_ends_the_chain_too() {
    let (lock, net) = client();
    for early in [Early::Awaited, Early::Asked] {
        *net.early.lock().unwrap() = Some(early);
        let first = lock.key("k").acquire().await.unwrap();
        *net.early.lock().unwrap() = None;
        assert_eq!(first.asked().now_or_never().is_some(), early == Early::Asked);
        let second = pass(&lock, first, false).await;
        pass(&lock, second, true).await.release().await.unwrap();
    }
}

/// An operator in this program can name the grant by its own id, which the store has never seen.
#[tokio::test(start_paused = true)]
async fn a_call_by_the_id_of_a_grant_that_took_over_concerns_that_grant_alone() {
    let (lock, net) = client();
    let admin = lock.admin().unwrap();
    for ends in [true, false] {
        let first = lock.key("k").acquire().await.unwrap();
        let stored = first.holder();
        let second = pass(&lock, first, true).await;
        let (id, call) = (second.holder(), if ends { Call::End(stored) } else { Call::Ask(stored) });
        let done = if ends { admin.force_release(&key(), id).await } else { admin.ask(&key(), id).await };
        assert_eq!((done.unwrap(), net.calls().last()), (true, Some(&call)));
        // The call can reach the store after the release of its grant.
        let next = waiting!(lock.key("k").acquire());
        drop(second);
        let next = next.await.unwrap();
        assert_ne!(next.stored_holder(), stored, "a grant of the store");
        next.release().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn callers_with_other_options_ask_the_store() {
    let (lock, _) = client();
    for plain_first in [true, false] {
        for other in ["ttl", "label", "cooldown"] {
            let acquire = |other: &str| {
                let call = lock.key("k");
                match other {
                    "ttl" => call.ttl(Duration::from_secs(30)),
                    "label" => call.label("another"),
                    "cooldown" => call.cooldown(Duration::from_millis(1)),
                    _ => call,
                }
            };
            let (first, second) = if plain_first { ("", other) } else { (other, "") };
            let first = acquire(first).acquire().await.unwrap();
            let stored = first.stored_holder();
            let next = waiting!(acquire(second).acquire());
            first.release().await.unwrap();
            let next = next.await.unwrap();
            assert_ne!(next.stored_holder(), stored, "{other}, plain first: {plain_first}");
            next.release().await.unwrap();
            sleep(CHAIN).await;
        }
    }
    // The same options are no obstacle.
    let ttl = Duration::from_secs(30);
    let first = lock.key("k").ttl(ttl).label("same").acquire().await.unwrap();
    let stored = first.stored_holder();
    let next = waiting!(lock.key("k").ttl(ttl).label("same").acquire());
    first.release().await.unwrap();
    assert_eq!(next.await.unwrap().stored_holder(), stored);
}

#[tokio::test(start_paused = true)]
async fn the_first_in_line_decides_even_if_the_second_could_take_over() {
    let (lock, _) = client();
    let first = lock.key("k").acquire().await.unwrap();
    let stored = first.stored_holder();
    let other = waiting!(lock.key("k").label("another").acquire());
    let mut alike = waiting!(lock.key("k").acquire());
    first.release().await.unwrap();
    let other = other.await.unwrap();
    assert_ne!(other.stored_holder(), stored);
    assert_pending!(alike.poll());
    other.release().await.unwrap();
    alike.await.unwrap().release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_hold_whose_extension_was_asked_for_is_released() {
    let (lock, net) = client();
    let first = lock.key("k").acquire().await.unwrap();
    let second = pass(&lock, first, true).await;
    assert_eq!(second.extension::<HolderId>(), Some(&second.stored_holder()), "the store's");
    let third = pass(&lock, second, false).await;
    assert_eq!(net.calls().iter().filter(|call| matches!(call, Call::Release(_))).count(), 1);
    assert!(
        third.extension::<String>().is_none(),
        "the store has none of this type, so nothing outlives the guard"
    );
    pass(&lock, third, true).await.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_hold_whose_label_was_changed_is_released() {
    let (lock, _) = client();
    let first = lock.key("k").acquire().await.unwrap();
    let second = pass(&lock, first, true).await;
    second.relabel("step 2").await.unwrap();
    let third = pass(&lock, second, false).await;
    pass(&lock, third, true).await.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_released_grant_has_no_extension_and_a_lost_one_passes_nothing_on() {
    let (lock, net) = client();
    let first = lock.key("k").acquire().await.unwrap();
    let handle = first.handle();
    let second = pass(&lock, first, true).await;
    assert!(handle.extension::<HolderId>().is_none(), "it would work under its successor");
    let stored = second.stored_holder();
    net.tell(|events| events.lost(&key(), stored, LossReason::ForcedRelease));
    assert_eq!(second.extension::<HolderId>(), Some(&stored), "the store refuses what is done with it");
    let third = waiting!(lock.key("k").acquire());
    net.rows.lock().unwrap().clear();
    assert_eq!(second.release().await.unwrap_err().kind(), ErrorKind::Lost);
    let third = third.await.unwrap();
    assert_ne!(third.stored_holder(), stored);
}

#[tokio::test(start_paused = true)]
async fn a_hold_with_a_renewal_under_way_is_released() {
    let (lock, net) = client();
    let first = lock.key("k").acquire().await.unwrap();
    net.renewals_wait.store(true, SeqCst);
    {
        let mut renewing = waiting!(first.renew_for(Duration::from_secs(30)));
        sleep(Duration::from_millis(1)).await;
        assert_pending!(renewing.poll());
    }
    assert_eq!(net.calls().last(), Some(&Call::Renew(first.holder())));
    let second = pass(&lock, first, false).await;
    net.renewals_wait.store(false, SeqCst);
    net.answers.notify_waiters();
    pass(&lock, second, true).await.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_hold_whose_lease_was_made_shorter_or_longer_is_released() {
    for ttl in [30, 90].map(Duration::from_secs) {
        let (lock, _) = client();
        let first = lock.key("k").acquire().await.unwrap();
        first.renew_for(ttl).await.unwrap();
        first.renew_for(Duration::from_secs(60)).await.unwrap();
        let passes = ttl < Duration::from_secs(60);
        // After a longer lease it is not certain how long the store keeps the hold.
        pass(&lock, first, passes).await.release().await.unwrap();
        let first = lock.key("k").acquire().await.unwrap();
        first.renew_for(ttl).await.unwrap();
        pass(&lock, first, false).await.release().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn the_next_caller_has_the_time_that_is_left() {
    let (lock, net) = client();
    let first = lock.key("k").acquire().await.unwrap();
    let end = first.remaining().unwrap();
    advance(CHAIN / 4).await;
    let second = pass(&lock, first, true).await;
    assert_eq!(second.remaining(), Some(end - CHAIN / 4), "the store has not extended the lease");
    // It is renewed when the store's grant is due, under the id that the store knows.
    sleep(Duration::from_secs(21)).await;
    let id = second.stored_holder();
    assert_eq!(net.calls(), [Call::Acquire(id), Call::Renew(id)]);
    sleep(Duration::from_secs(300)).await;
    assert_eq!(second.validity(), Validity::Valid);
    second.confirm().await.unwrap();
    second.renew().await.unwrap();
    second.release().await.unwrap();
    assert!(
        net.calls().iter().all(|call| [Call::Acquire(id), Call::Renew(id), Call::Release(id)].contains(call))
    );
    assert!(net.is_free());
}

#[tokio::test(start_paused = true)]
async fn a_confirmed_hold_passes_on_and_is_confirmed_under_the_id_of_the_store() {
    let net = Arc::new(RelayNet::default());
    let lock = Relay::new(&net).confirmed().start();
    let first = lock.key("k").acquire().await.unwrap();
    let id = first.holder();
    let second = pass(&lock, first, true).await;
    sleep(Duration::from_secs(4)).await;
    assert_eq!(net.calls(), [Call::Acquire(id), Call::Renew(id)]);
    second.release().await.unwrap();
    assert!(net.is_free());
}

#[tokio::test(start_paused = true)]
async fn a_maximum_hold_counts_from_the_own_grant() {
    let (lock, _) = client();
    let (longest, part) = (Duration::from_secs(5), CHAIN / 2);
    let first = lock.key("k").max_hold(longest).acquire().await.unwrap();
    let second = waiting!(lock.key("k").max_hold(longest).acquire());
    advance(part).await;
    let stored = first.stored_holder();
    first.release().await.unwrap();
    let second = second.await.unwrap();
    assert_eq!((second.stored_holder(), second.remaining()), (stored, Some(longest)));
    assert_eq!(second.lost().await, LossReason::HeldTooLong);
}

/// A clock beside a wall clock that can be set ahead, as after a time in which the machine stood still.
#[derive(Debug)]
struct Walled(TokioClock, AtomicU64);

impl Clock for Walled {
    fn now(&self) -> Moment {
        self.0.now()
    }

    fn wall(&self) -> Option<Duration> {
        let ahead = Duration::from_secs(self.1.load(SeqCst));
        Some(Duration::from_nanos(self.0.now().as_nanos()) + ahead)
    }
}

#[tokio::test(start_paused = true)]
async fn a_hold_in_doubt_is_released_also_on_its_way() {
    for on_its_way in [false, true] {
        let net = Arc::new(RelayNet::default());
        let clock = Arc::new(Walled(TokioClock::new(), AtomicU64::new(0)));
        let lock = Engine::builder(Relay::new(&net)).clock(Arc::clone(&clock) as _).start().unwrap();
        let first = lock.key("k").acquire().await.unwrap();
        // The driver has compared the clocks once.
        sleep(Duration::from_millis(1)).await;
        let id = first.holder();
        let next = waiting!(lock.key("k").acquire());
        let mut first = Some(first);
        if on_its_way {
            first.take().unwrap().release().await.unwrap();
        }
        net.renewals_wait.store(true, SeqCst);
        clock.1.store(30, SeqCst);
        net.tell(Events::resync);
        sleep(Duration::from_millis(1)).await;
        if let Some(first) = first {
            assert_eq!(first.validity(), Validity::InDoubt);
            first.release().await.unwrap();
        }
        let next = next.await.unwrap();
        assert_ne!(next.stored_holder(), id, "on its way: {on_its_way}");
        assert_eq!(next.validity(), Validity::Valid);
    }
}
