//! Readers of one client share one hold of the store, and each of them is a grant.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::join_all;
use leasehold_api::{ErrorKind, Lock as _, LockExt as _, LockGuard, LockKey, LossReason, Validity};
use leasehold_engine::{Engine, Timing, TokioClock};
use leasehold_memory::MemoryStore;
use tokio::task::yield_now;
use tokio::time::{advance, sleep, timeout};
use tokio_test::{assert_pending, task};

use crate::common::relay::{Call, Early, Relay, RelayNet};

/// The store grants a key to one holder at a time, so each further call for it is contended.
fn client() -> (Engine, Arc<RelayNet>) {
    client_with(|_| {})
}

fn client_with(change: impl FnOnce(&mut Relay)) -> (Engine, Arc<RelayNet>) {
    let net = Arc::new(RelayNet::default());
    let mut relay = Relay::new(&net);
    relay.capabilities.modes.shared = true;
    change(&mut relay);
    (relay.start(), net)
}

fn key() -> LockKey {
    LockKey::new("k").unwrap()
}

fn share_for() -> Duration {
    Timing::default().share_for
}

async fn read(lock: &Engine) -> LockGuard {
    lock.key("k").shared().acquire().await.unwrap()
}

/// Acquires `n` readers, one after another.
async fn readers(lock: &Engine, n: usize) -> Vec<LockGuard> {
    let mut readers = Vec::new();
    for _ in 0..n {
        readers.push(read(lock).await);
    }
    readers
}

/// Tries to read. Returns whether the store was called for it, and has refused.
async fn is_refused(lock: &Engine, net: &RelayNet) -> bool {
    let before = net.calls().len();
    let refused = lock.key("k").shared().try_acquire().await.unwrap().is_none();
    assert_eq!(net.calls().len() - before, usize::from(refused), "a call for each refusal");
    refused
}

#[tokio::test(start_paused = true)]
async fn sixty_four_readers_are_one_acquire_and_one_release_at_the_store() {
    let (lock, net) = client();
    let mut guards = readers(&lock, 64).await;
    let stored = guards[0].stored_holder();
    let ids: HashSet<_> = guards.iter().map(LockGuard::holder).collect();
    assert_eq!((ids.len(), net.calls()), (64, vec![Call::Acquire(stored)]));
    for guard in &guards {
        assert_eq!((guard.stored_holder(), guard.token()), (stored, guards[0].token()));
        assert_eq!((guard.validity(), guard.remaining()), (Validity::Valid, guards[0].remaining()));
    }
    let counters = lock.counters();
    assert_eq!((counters.granted, counters.released, lock.active_keys()), (64, 0, 1));
    let last = guards.remove(40);
    for guard in guards {
        guard.release().await.unwrap();
        assert_eq!(last.validity(), Validity::Valid);
    }
    assert_eq!(net.calls(), [Call::Acquire(stored)], "the last one has the hold");
    assert_eq!(lock.counters().released, 63);
    last.release().await.unwrap();
    assert_eq!(net.calls(), [Call::Acquire(stored), Call::Release(stored)]);
    let counters = lock.counters();
    assert_eq!((counters.granted, counters.released, counters.lost), (64, 64, 0));
    assert!(net.is_free() && lock.active_keys() == 0);
}

#[tokio::test(start_paused = true)]
async fn readers_that_come_at_the_same_time_share_the_hold_of_the_first() {
    let (lock, net) = client();
    let guards = join_all((0..64).map(|_| read(&lock))).await;
    assert_eq!(net.calls().len(), 1);
    // Tries wait for the reply to the first one, too.
    drop(guards);
    sleep(Duration::from_millis(1)).await;
    let tries = join_all((0..64).map(|_| lock.key("k").shared().try_acquire())).await;
    assert!(tries.iter().all(|guard| matches!(guard, Ok(Some(_)))));
    drop(tries);
    sleep(Duration::from_millis(1)).await;
    let calls: Vec<_> = net.calls().iter().map(|call| matches!(call, Call::Acquire(_))).collect();
    assert_eq!(calls, [true, false, true, false]);
    assert_eq!((lock.counters().granted, lock.active_keys()), (128, 0));
}

#[tokio::test(start_paused = true)]
async fn after_share_for_a_reader_calls_the_store_and_does_not_join_the_old_hold() {
    let (lock, net) = client();
    let first = read(&lock).await;
    advance(share_for() - Duration::from_nanos(1)).await;
    assert!(!is_refused(&lock, &net).await, "within the time");
    let second = read(&lock).await;
    // Counts from the call of the store, and not from the last reader.
    advance(Duration::from_nanos(1)).await;
    assert!(is_refused(&lock, &net).await, "later readers take their turn at the store");
    let mut waiting = task::spawn(read(&lock));
    assert_pending!(waiting.poll());
    first.release().await.unwrap();
    let stored = second.stored_holder();
    second.release().await.unwrap();
    assert_eq!(net.calls().last(), Some(&Call::Release(stored)), "the old hold ends with its readers");
    let next = waiting.await;
    assert_ne!(next.stored_holder(), stored);
    assert!(!is_refused(&lock, &net).await, "a new hold, a new time");
}

#[tokio::test(start_paused = true)]
async fn another_client_that_waits_ends_the_sharing_at_once() {
    let (lock, net) = client();
    let first = read(&lock).await;
    net.tell(|events| events.awaited(&key()));
    assert!(is_refused(&lock, &net).await);
    first.release().await.unwrap();
    // The event can overtake the reply with the grant.
    *net.early.lock().unwrap() = Some(Early::Awaited);
    let second = read(&lock).await;
    *net.early.lock().unwrap() = None;
    assert!(is_refused(&lock, &net).await);
    second.release().await.unwrap();
    assert!(net.is_free());
}

#[tokio::test(start_paused = true)]
async fn with_a_time_of_zero_each_reader_calls_the_store() {
    let net = Arc::new(RelayNet::default());
    let mut relay = Relay::new(&net);
    relay.capabilities.modes.shared = true;
    let builder = Engine::builder(relay).clock(Arc::new(TokioClock::new())).share_for(Duration::ZERO);
    let lock = builder.start().unwrap();
    assert_eq!(lock.capabilities().share_for, Duration::ZERO);
    let first = read(&lock).await;
    assert_eq!(first.stored_holder(), first.holder());
    assert!(is_refused(&lock, &net).await);
    assert_eq!(client().0.capabilities().share_for, share_for());
}

#[tokio::test(start_paused = true)]
async fn one_loss_ends_all_sixty_four_readers() {
    let (lock, net) = client();
    let guards = readers(&lock, 64).await;
    let lost: Vec<_> = guards.iter().map(LockGuard::lost).collect();
    assert!(lost.iter().all(|lost| lost.clone().now_or_never().is_none()));
    let stored = guards[0].stored_holder();
    net.tell(|events| events.lost(&key(), stored, LossReason::ForcedRelease));
    assert!(lost.into_iter().all(|lost| lost.now_or_never() == Some(LossReason::ForcedRelease)));
    let counters = lock.counters();
    assert_eq!((counters.granted, counters.lost, lock.active_keys()), (64, 64, 0));
    for guard in guards {
        assert_eq!(guard.validity(), Validity::Lost);
        assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Lost);
    }
    assert_eq!(net.calls(), [Call::Acquire(stored)], "the store has ended it");
}

#[tokio::test(start_paused = true)]
async fn the_end_of_the_lease_and_a_renewal_that_finds_none_end_all_readers() {
    for ends in [false, true] {
        let (lock, net) = client();
        let guards = readers(&lock, 3).await;
        if ends {
            net.renewals_wait.store(true, SeqCst);
        } else {
            net.rows.lock().unwrap().clear();
        }
        let lost: Vec<_> = guards.iter().map(LockGuard::lost).collect();
        let expected = if ends { LossReason::Expired } else { LossReason::Gone };
        assert_eq!(join_all(lost).await, [expected; 3]);
        assert_eq!((lock.counters().lost, lock.active_keys()), (3, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn the_shared_hold_is_renewed_once_until_its_last_reader_leaves() {
    let (lock, net) = client();
    let mut guards = readers(&lock, 3).await;
    let stored = guards[0].stored_holder();
    drop(guards.remove(0));
    sleep(Duration::from_secs(70)).await;
    assert_eq!(guards[1].validity(), Validity::Valid, "longer than one lease");
    let renewals = net.calls().iter().filter(|call| **call == Call::Renew(stored)).count();
    assert!((3..=4).contains(&renewals), "{renewals} renewals at thirds of a minute");
    assert_eq!(net.calls().len(), 1 + renewals);
    drop(guards);
    sleep(Duration::from_secs(60)).await;
    assert_eq!((net.calls().len(), net.calls().last()), (2 + renewals, Some(&Call::Release(stored))));
}

#[tokio::test(start_paused = true)]
async fn a_maximum_hold_ends_its_own_reader_alone() {
    let (lock, net) = client();
    let longest = Duration::from_secs(5);
    let limited = lock.key("k").shared().max_hold(longest).acquire().await.unwrap();
    let other = read(&lock).await;
    let joined = lock.key("k").shared().max_hold(longest / 5).acquire().await.unwrap();
    assert_eq!((limited.remaining(), joined.remaining()), (Some(longest), Some(longest / 5)));
    assert_eq!(joined.lost().await, LossReason::HeldTooLong);
    assert_eq!((limited.validity(), limited.lost().await), (Validity::Valid, LossReason::HeldTooLong));
    assert_eq!((other.validity(), net.calls().len()), (Validity::Valid, 1));
    other.release().await.unwrap();
    assert_eq!((net.calls().len(), net.is_free()), (2, true));
    // The last one has the store's hold released.
    let last = lock.key("k").shared().max_hold(longest).acquire().await.unwrap();
    assert_eq!(last.lost().await, LossReason::HeldTooLong);
    sleep(Duration::from_millis(1)).await;
    assert!(net.is_free() && lock.active_keys() == 0);
}

#[tokio::test(start_paused = true)]
async fn readers_with_another_ttl_or_label_do_not_share() {
    let (lock, net) = client();
    let first = read(&lock).await;
    let ttl = lock.key("k").shared().ttl(Duration::from_secs(30)).try_acquire().await.unwrap();
    let label = lock.key("k").shared().label("another").try_acquire().await.unwrap();
    assert_eq!((ttl.is_none(), label.is_none(), net.calls().len()), (true, true, 3));
    assert!(!is_refused(&lock, &net).await);
    first.relabel("new").await.unwrap();
    assert!(is_refused(&lock, &net).await, "operators would see a wrong label");
}

#[tokio::test(start_paused = true)]
async fn a_renewal_lengthens_the_lease_of_all_and_shortens_none() {
    let (lock, net) = client();
    let guards = readers(&lock, 2).await;
    let (one, other) = (&guards[0], &guards[1]);
    let before = other.remaining();
    one.renew_for(Duration::from_secs(1)).await.unwrap();
    assert_eq!(other.remaining(), before);
    one.renew_for(Duration::from_secs(600)).await.unwrap();
    assert!(other.remaining() > before && one.remaining() == other.remaining());
    assert_eq!(one.renew_for(Duration::ZERO).await.unwrap_err().kind(), ErrorKind::InvalidOption);
    let calls = net.calls().len();
    other.confirm().await.unwrap();
    assert_eq!(net.calls().last(), Some(&Call::Renew(one.stored_holder())));
    assert_eq!(net.calls().len(), calls + 1);
}

#[tokio::test(start_paused = true)]
async fn a_reader_does_not_join_in_doubt_and_follows_the_shared_doubt() {
    let (lock, net) = client_with(|relay| relay.timing.share_for = Duration::from_secs(3600));
    let guards = readers(&lock, 2).await;
    net.renewals_wait.store(true, SeqCst);
    let seen = guards[1].validity_changed(Validity::Valid).await;
    assert_eq!((seen, guards[0].validity()), (Validity::InDoubt, Validity::InDoubt));
    assert!(is_refused(&lock, &net).await, "another call of the store");
}

#[tokio::test(start_paused = true)]
async fn a_request_to_release_reaches_all_readers_and_ends_the_sharing() {
    let (lock, net) = client();
    let guards = readers(&lock, 3).await;
    let admin = lock.admin().unwrap();
    let stored = guards[0].stored_holder();
    admin.ask(&key(), guards[2].holder()).await.unwrap();
    assert_eq!(net.calls().last(), Some(&Call::Ask(stored)), "the store knows one of the ids");
    net.tell(|events| events.asked(&key(), stored));
    assert!(guards.iter().all(|guard| guard.asked().now_or_never().is_some()));
    assert!(is_refused(&lock, &net).await);
}

#[tokio::test(start_paused = true)]
async fn close_releases_the_shared_hold_once() {
    let (lock, net) = client();
    let guards = readers(&lock, 3).await;
    let stored = guards[0].stored_holder();
    lock.close().await.unwrap();
    for guard in guards {
        assert_eq!((guard.validity(), guard.lost().await), (Validity::Lost, LossReason::Closed));
    }
    assert_eq!(net.calls(), [Call::Acquire(stored), Call::Release(stored)]);
    assert!(net.is_free());
}

#[tokio::test(start_paused = true)]
async fn a_writer_of_the_client_waits_for_the_release_that_the_last_reader_has_sent() {
    let (lock, net) = client();
    let guards = readers(&lock, 3).await;
    let stored = guards[0].stored_holder();
    let mut writer = task::spawn(lock.key("k").acquire());
    assert_pending!(writer.poll());
    assert!(lock.key("k").shared().try_acquire().await.unwrap().is_none(), "no reader overtakes it");
    drop(guards);
    let writer = writer.await.unwrap();
    let id = writer.holder();
    assert_eq!(net.calls(), [Call::Acquire(stored), Call::Release(stored), Call::Acquire(id)]);
}

#[tokio::test(start_paused = true)]
async fn readers_that_give_up_at_any_point_leave_nothing() {
    // The second poll makes both guards.
    for polls in 0..=2 {
        let (lock, net) = client();
        let mut first = task::spawn(read(&lock));
        let mut behind = task::spawn(read(&lock));
        for _ in 0..polls {
            drop((first.poll(), behind.poll()));
        }
        drop((behind, first));
        let kept = read(&lock).await;
        kept.confirm().await.unwrap();
        kept.release().await.unwrap();
        sleep(Duration::from_secs(1)).await;
        assert!(net.is_free() && lock.active_keys() == 0, "after {polls} polls");
    }
}

/// Readers join, leave and call the store at the same time, because they share for a moment only.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn readers_that_share_and_writers_exclude_each_other_on_many_threads() {
    const ROUNDS: usize = 200;
    let store = MemoryStore::new();
    let client = || store.builder().unwrap().share_for(Duration::from_millis(1)).start().unwrap();
    let clients = [Arc::new(client()), Arc::new(client())];
    let (reading, writing) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let mut tasks = Vec::new();
    for task in 0..12 {
        let lock = Arc::clone(&clients[task % 2]);
        let (reading, writing) = (Arc::clone(&reading), Arc::clone(&writing));
        tasks.push(tokio::spawn(async move {
            for round in 0..ROUNDS {
                let guard = if task < 8 {
                    let guard = read(&lock).await;
                    reading.fetch_add(1, SeqCst);
                    assert_eq!(writing.load(SeqCst), 0, "a writer beside a reader");
                    yield_now().await;
                    reading.fetch_sub(1, SeqCst);
                    guard
                } else {
                    let guard = lock.key("k").acquire().await.unwrap();
                    assert_eq!(writing.fetch_add(1, SeqCst), 0, "two writers");
                    yield_now().await;
                    assert_eq!(reading.load(SeqCst), 0, "a reader beside a writer");
                    writing.fetch_sub(1, SeqCst);
                    guard
                };
                if round % 2 == 0 {
                    guard.release().await.unwrap();
                }
            }
        }));
    }
    for task in tasks {
        timeout(Duration::from_secs(60), task).await.expect("each caller is served").unwrap();
    }
    for lock in clients {
        let counters = lock.counters();
        assert_eq!((counters.granted, counters.released), (6 * ROUNDS as u64, 6 * ROUNDS as u64));
        assert_eq!((counters.lost, lock.active_keys()), (0, 0));
    }
}
