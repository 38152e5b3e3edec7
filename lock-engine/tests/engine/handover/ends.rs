//! A hold on its way whose caller leaves, is late, closes or loses it, callers of several keys, and the key that is left to
//! other clients.

use super::*;

#[tokio::test(start_paused = true)]
async fn a_caller_that_gives_up_passes_the_hold_on() {
    let (lock, net) = client();
    let first = lock.key("k").acquire().await.unwrap();
    let id = first.holder();
    let quitter = waiting!(lock.key("k").acquire());
    let stayer = waiting!(lock.key("k").acquire());
    first.release().await.unwrap();
    drop(quitter);
    let stayer = stayer.await.unwrap();
    assert_eq!((stayer.stored_holder(), net.calls()), (id, vec![Call::Acquire(id)]));
    stayer.release().await.unwrap();
    assert!(net.is_free());
}

#[tokio::test(start_paused = true)]
async fn a_hold_whose_caller_gives_up_is_released_before_the_next_one_asks() {
    for has_next in [false, true] {
        let (lock, net) = client();
        let first = lock.key("k").acquire().await.unwrap();
        let id = first.holder();
        let quitter = waiting!(lock.key("k").acquire());
        let next = has_next.then(|| waiting!(lock.key("k").label("another").acquire()));
        first.release().await.unwrap();
        drop(quitter);
        sleep(Duration::from_millis(1)).await;
        let mut expected = vec![Call::Acquire(id), Call::Release(id)];
        if let Some(next) = next {
            let next = next.await.unwrap();
            expected.push(Call::Acquire(next.holder()));
            drop(next);
        }
        assert_eq!(net.calls()[..expected.len()], expected, "has next: {has_next}");
        sleep(Duration::from_secs(1)).await;
        assert!(net.is_free() && lock.active_keys() == 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_is_not_polled_loses_the_hold_when_the_chain_ends() {
    let net = Arc::new(RelayNet::default());
    let (lock, other) = (Relay::new(&net).start(), Relay::new(&net).start());
    let first = lock.key("k").acquire().await.unwrap();
    let id = first.holder();
    let unpolled = waiting!(lock.key("k").acquire());
    first.release().await.unwrap();
    assert_eq!(net.holder("k"), Some(id));
    sleep(CHAIN + Duration::from_millis(2)).await;
    assert!(net.is_free(), "nobody renews it");
    let theirs = other.key("k").acquire().await.unwrap();
    // The caller still has its place, and asks the store.
    let mut late = unpolled;
    assert_pending!(late.poll());
    theirs.release().await.unwrap();
    let late = late.await.unwrap();
    assert_eq!(late.stored_holder(), late.holder());
}

/// A clock that runs ahead of the timers, as if the runtime were busy.
#[derive(Debug)]
struct Ahead(TokioClock, AtomicU64);

impl Clock for Ahead {
    fn now(&self) -> Moment {
        self.0.now().after(Duration::from_secs(self.1.load(SeqCst)))
    }
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_is_polled_too_late_asks_the_store() {
    // After the end of its lease, and after the end of its chain alone.
    for ttl in [3, 600].map(Duration::from_secs) {
        let net = Arc::new(RelayNet::default());
        let clock = Arc::new(Ahead(TokioClock::new(), AtomicU64::new(0)));
        let lock = Engine::builder(Relay::new(&net)).clock(Arc::clone(&clock) as _).start().unwrap();
        let first = lock.key("k").ttl(ttl).acquire().await.unwrap();
        let id = first.holder();
        let late = waiting!(lock.key("k").ttl(ttl).acquire());
        first.release().await.unwrap();
        // The driver is not woken before the caller.
        clock.1.store(10, SeqCst);
        let late = late.await.unwrap();
        assert_ne!(late.stored_holder(), id, "{ttl:?}");
        assert_eq!(late.validity(), Validity::Valid);
        late.release().await.unwrap();
        sleep(Duration::from_secs(1)).await;
        assert!(net.is_free());
    }
}

#[tokio::test(start_paused = true)]
async fn a_loss_ends_whoever_has_the_hold() {
    let (lock, net) = client();
    let first = lock.key("k").acquire().await.unwrap();
    let (id, earlier) = (first.holder(), first.handle());
    let second = pass(&lock, first, true).await;
    net.tell(|events| events.lost(&key(), second.holder(), LossReason::Gone));
    assert_eq!(second.validity(), Validity::Valid, "the store does not know this id");
    net.tell(|events| events.lost(&key(), id, LossReason::ForcedRelease));
    assert_eq!(second.lost().await, LossReason::ForcedRelease);
    assert_eq!(earlier.ended().await, End::Released);
    assert_eq!(second.release().await.unwrap_err().kind(), ErrorKind::Lost);
}

#[tokio::test(start_paused = true)]
async fn a_hold_that_is_lost_on_its_way_is_not_given_to_the_caller() {
    let (lock, net) = client();
    let first = lock.key("k").acquire().await.unwrap();
    let id = first.holder();
    let next = waiting!(lock.key("k").acquire());
    first.release().await.unwrap();
    net.rows.lock().unwrap().clear();
    net.tell(|events: &Events| events.lost(&key(), id, LossReason::ForcedRelease));
    let next = next.await.unwrap();
    assert_eq!(next.stored_holder(), next.holder(), "a grant of the store");
    next.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_renewal_that_finds_nothing_ends_the_caller_who_took_over() {
    let (lock, net) = client();
    let first = lock.key("k").acquire().await.unwrap();
    let second = pass(&lock, first, true).await;
    net.rows.lock().unwrap().clear();
    assert_eq!(second.renew().await.unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(second.validity(), Validity::Lost);
}

#[tokio::test(start_paused = true)]
async fn closing_releases_a_hold_that_nobody_has_picked_up() {
    for drops in [false, true] {
        let (lock, net) = client();
        let first = lock.key("k").acquire().await.unwrap();
        let waiters = [waiting!(lock.key("k").acquire()), waiting!(lock.key("k").acquire())];
        first.release().await.unwrap();
        assert!(!net.is_free());
        if drops {
            let [first, second] = waiters;
            drop(first);
            lock.close().await.unwrap();
            assert_eq!(second.await.unwrap_err().kind(), ErrorKind::Closed);
        } else {
            lock.close().await.unwrap();
            for waiter in waiters {
                assert_eq!(waiter.await.unwrap_err().kind(), ErrorKind::Closed);
            }
        }
        assert!(net.is_free(), "drops: {drops}");
    }
}

#[tokio::test(start_paused = true)]
async fn closing_releases_a_hold_that_was_taken_over() {
    let (lock, net) = client();
    let first = lock.key("k").acquire().await.unwrap();
    let id = first.holder();
    let second = pass(&lock, first, true).await;
    lock.close().await.unwrap();
    assert_eq!(second.validity(), Validity::Lost);
    assert_eq!(net.calls(), [Call::Acquire(id), Call::Release(id)]);
}

#[tokio::test(start_paused = true)]
async fn a_caller_of_several_keys_takes_over_only_the_last_one_it_needs() {
    let (lock, net) = client();
    // It waits for the second key, and the store has not been asked for the first.
    let first = lock.key("b").acquire().await.unwrap();
    let id = first.holder();
    let both = waiting!(lock.keys(["a", "b"]).acquire());
    first.release().await.unwrap();
    let both = both.await.unwrap();
    assert!(both.iter().all(|guard| guard.holder() == guard.stored_holder() && guard.holder() != id));
    both.release().await.unwrap();
    // A caller of several keys passes each of them on.
    let both = lock.keys(["a", "b"]).acquire().await.unwrap();
    let stored: Vec<_> = both.iter().map(LockGuard::holder).collect();
    let (a, b) = (waiting!(lock.key("a").acquire()), waiting!(lock.key("b").acquire()));
    both.release().await.unwrap();
    let (a, b) = (a.await.unwrap(), b.await.unwrap());
    assert_eq!([a.stored_holder(), b.stored_holder()], stored[..]);
    drop((a, b));
    sleep(Duration::from_secs(1)).await;
    assert!(net.is_free());
}

#[tokio::test(start_paused = true)]
async fn a_try_does_not_jump_the_chain() {
    let (lock, _) = client();
    let first = lock.key("k").acquire().await.unwrap();
    let mut second = waiting!(lock.key("k").acquire());
    first.release().await.unwrap();
    assert!(lock.key("k").try_acquire().await.unwrap().is_none(), "the key goes to the waiter");
    let second = assert_ready!(second.poll()).unwrap();
    assert!(lock.key("k").try_acquire().await.unwrap().is_none());
    second.release().await.unwrap();
    assert!(lock.key("k").try_acquire().await.unwrap().is_some());
}

/// Releases a key for which another client waits, and returns how long this client leaves it alone. The other client is
/// seen served after `served`.
async fn yields(served: Option<Duration>) -> (Duration, usize) {
    let (lock, net) = client_with(|relay| relay.reserves = 0);
    net.has_waiters.store(true, SeqCst);
    *net.served.lock().unwrap() = served.map(|_| false);
    let first = lock.key("k").acquire().await.unwrap();
    let id = first.holder();
    first.release().await.unwrap();
    let begun = tokio::time::Instant::now();
    let mut next = waiting!(lock.key("k").acquire());
    if let Some(served) = served {
        sleep(served).await;
        assert_pending!(next.poll());
        *net.served.lock().unwrap() = Some(true);
    }
    let _ = next.await.unwrap();
    let looks = net.looks_for_served.lock().unwrap().clone();
    assert!(looks.iter().all(|after| *after == id));
    (begun.elapsed(), looks.len())
}

#[tokio::test(start_paused = true)]
async fn a_key_is_left_to_another_client_until_it_was_seen_served() {
    // One and a half polls of the default timing.
    let whole = Duration::from_millis(150);
    let (took, looks) = yields(None).await;
    assert!(took >= whole && looks == 1, "a store that cannot tell is asked once: {took:?}, {looks}");
    let (took, looks) = yields(Some(Duration::from_millis(20))).await;
    assert!(took < whole / 2, "{took:?}");
    assert!(looks < 10, "{looks}");
    // A waiter whose notifications are lost is served at its next poll.
    let (took, looks) = yields(Some(whole * 2 / 3)).await;
    assert!(took > whole * 2 / 3 && took <= whole + Duration::from_millis(1), "{took:?}");
    assert!(looks < 12, "{looks}");
}

/// Returns how long a caller of both keys leaves them alone after a release of both, if a waiter of `served` alone was
/// seen served.
async fn leaves_two(served: &'static str) -> Duration {
    let (lock, net) = client_with(|relay| relay.reserves = 0);
    net.has_waiters.store(true, SeqCst);
    let keys = ["a", "b"].map(|key| LockKey::new(key).unwrap());
    for key in &keys {
        lock.key(key.clone()).acquire().await.unwrap().release().await.unwrap();
        sleep(Duration::from_millis(1)).await;
    }
    *net.served_key.lock().unwrap() = Some(LockKey::new(served).unwrap());
    let begun = tokio::time::Instant::now();
    drop(lock.acquire_all(&keys, &AcquireOptions::new()).await.unwrap());
    begun.elapsed()
}

#[tokio::test(start_paused = true)]
async fn each_of_several_keys_is_left_alone_for_its_own_time() {
    for served in ["a", "b"] {
        let took = leaves_two(served).await;
        assert!(took >= Duration::from_millis(145), "the other key has a waiter too: {served}, {took:?}");
    }
}

/// A waiter that only polls would miss each end that comes with the grant of a faster one.
#[tokio::test(start_paused = true)]
async fn one_of_many_yields_lasts_its_whole_time_whoever_is_served() {
    let (lock, net) = client_with(|relay| relay.reserves = 0);
    net.has_waiters.store(true, SeqCst);
    *net.served.lock().unwrap() = Some(true);
    let mut whole = 0;
    for _ in 0..=256 {
        let begun = tokio::time::Instant::now();
        lock.key("k").acquire().await.unwrap().release().await.unwrap();
        whole += u32::from(begun.elapsed() >= Duration::from_millis(150));
    }
    assert_eq!(whole, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_callers_of_one_key_exclude_each_other_and_leave_nothing() {
    let net = Arc::new(RelayNet::default());
    let lock = Arc::new(Relay::new(&net).start());
    let inside = Arc::new(AtomicU64::new(0));
    let last = Arc::new(AtomicU64::new(0));
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..16_u64 {
        let (lock, inside, last) = (Arc::clone(&lock), Arc::clone(&inside), Arc::clone(&last));
        tasks.spawn(async move {
            for round in 0..100 {
                if (n + round) % 7 == 0 {
                    // Gives up somewhere on the way.
                    let wait = Duration::from_micros(round * 3);
                    drop(tokio::time::timeout(wait, lock.key("k").acquire()).await);
                    continue;
                }
                let guard = lock.key("k").acquire().await.unwrap();
                assert_eq!(inside.fetch_add(1, SeqCst), 0);
                let token = guard.token().unwrap().as_u64();
                assert!(last.swap(token, SeqCst) < token);
                tokio::task::yield_now().await;
                inside.fetch_sub(1, SeqCst);
                if round % 2 == 0 { drop(guard) } else { guard.release().await.unwrap() }
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    assert!(lock.counters().handed_over > 0);
    lock.close().await.unwrap();
    assert!(net.is_free());
}
