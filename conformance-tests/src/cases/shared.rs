//! Shared grants: any number of readers, or one writer.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{AcquireOptions, ErrorKind, Lock, LockExt as _, LockGuard, LockKey, LossReason, Mode};
use tokio::task::JoinHandle;

use super::inspection::admin;
use crate::context::{Context, fails, joined};
use crate::harness::Op;
use crate::inconclusive::{Answered as _, call_failed};

/// Returns the options of a reader's try.
pub(super) fn reader() -> AcquireOptions {
    AcquireOptions::new().mode(Mode::Shared)
}

async fn read(cx: &Context, lock: &Arc<dyn Lock>, key: &LockKey) -> LockGuard {
    cx.take_with(lock, key, &reader()).await
}

/// Tries once with `options`. Fails the case unless the try returns `None`.
pub(super) async fn refused(lock: &Arc<dyn Lock>, key: &LockKey, options: &AcquireOptions) {
    match lock.try_acquire(key, options).await {
        Ok(None) => {}
        Ok(Some(guard)) => panic!("{key:?} was granted beside a holder that excludes it: {guard:?}"),
        Err(error) => call_failed(&format!("that {key:?} is held is no error"), &error),
    }
}

pub(crate) async fn readers_hold_together(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let mut guards = Vec::new();
    for lock in [&a, &a, &b, &b] {
        guards.push(read(cx, lock, &key).await);
    }
    let ids: BTreeSet<_> = guards.iter().map(LockGuard::holder).collect();
    assert_eq!(ids.len(), guards.len(), "each reader has its own id");
    for guard in &guards {
        assert_eq!((guard.mode(), guard.permit()), (Mode::Shared, None));
        cx.assert_valid(guard);
    }
    for guard in guards {
        cx.give(guard).await;
    }
}

pub(crate) async fn readers_and_a_writer_exclude_each_other(cx: &Context) {
    let (a, b) = cx.two().await;
    for reads_in in [&a, &b] {
        let key = cx.key();
        let guard = read(cx, reads_in, &key).await;
        for lock in [&a, &b] {
            cx.held(lock, &key).await;
        }
        cx.give(guard).await;
        let guard = cx.take(reads_in, &key).await;
        assert_eq!(guard.mode(), Mode::Exclusive);
        for lock in [&a, &b] {
            refused(lock, &key, &reader()).await;
        }
        cx.give(guard).await;
    }
}

pub(crate) async fn the_release_of_one_reader_ends_no_other(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guards = [read(cx, &a, &key).await, read(cx, &a, &key).await, read(cx, &b, &key).await];
    let mut guards = Vec::from(guards);
    while guards.len() > 1 {
        cx.give(guards.remove(0)).await;
        for guard in &guards {
            guard.confirm().await.answered("held until now");
            cx.assert_valid(guard);
        }
        for lock in [&a, &b] {
            cx.held(lock, &key).await;
        }
    }
    for guard in guards {
        cx.give(guard).await;
    }
    cx.give(cx.take(&a, &key).await).await;
}

pub(crate) async fn a_writer_is_served_after_the_last_reader(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let [one, two] = [read(cx, &a, &key).await, read(cx, &b, &key).await];
    // Not at the store yet, because its own client has a reader.
    let writer = cx.queue(&a, &key).await;
    cx.give(one).await;
    cx.settle().await;
    assert!(!writer.is_done(), "one reader is left");
    cx.give(two).await;
    cx.give(writer.granted(cx, cx.handover()).await).await;
}

pub(crate) async fn waiting_readers_are_served_together(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let writer = cx.take(&a, &key).await;
    let mut readers = Vec::new();
    for lock in [&a, &a, &b, &b] {
        readers.push(cx.queue_with(lock, &key, cx.patient().mode(Mode::Shared)).await);
    }
    cx.give(writer).await;
    // No reader leaves before the last one is in.
    let mut guards = Vec::new();
    for reader in readers {
        guards.push(reader.granted(cx, cx.handover() * 2).await);
    }
    cx.held(&a, &key).await;
    for guard in guards {
        cx.give(guard).await;
    }
}

pub(crate) async fn a_waiting_writer_comes_before_later_readers_of_its_client(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = read(cx, &a, &key).await;
    let writer = cx.queue(&a, &key).await;
    refused(&a, &key, &reader()).await;
    let later = cx.queue_with(&a, &key, cx.patient().mode(Mode::Shared)).await;
    assert!(!later.is_done(), "a reader overtook a writer of its client");
    cx.give(guard).await;
    let writer = writer.granted(cx, cx.handover()).await;
    assert!(!later.is_done(), "a reader beside the writer");
    refused(&b, &key, &reader()).await;
    cx.give(writer).await;
    cx.give(later.granted(cx, cx.handover()).await).await;
}

pub(crate) async fn a_writer_that_gives_up_lets_the_readers_behind_it_in(cx: &Context) {
    let a = cx.client().await;
    let key = cx.key();
    let guard = read(cx, &a, &key).await;
    let writer = cx.queue(&a, &key).await;
    let later = cx.queue_with(&a, &key, cx.patient().mode(Mode::Shared)).await;
    writer.cancel().await;
    let later = later.granted(cx, cx.handover()).await;
    cx.give(guard).await;
    cx.give(later).await;
    cx.undone(&a, &key).await;
}

/// Readers of two clients, of which one at least always holds the key.
pub(crate) async fn a_crowd_of_readers_starves_no_writer(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let crowd: Vec<JoinHandle<()>> = (0..4_u32)
        .map(|i| {
            let (lock, key) = (Arc::clone(if i % 2 == 0 { &a } else { &b }), key.clone());
            let options = cx.patient().mode(Mode::Shared);
            let (begins, holds) = (cx.interval() * i, cx.interval() * 4);
            tokio::spawn(async move {
                tokio::time::sleep(begins).await;
                while let Ok(guard) = lock.acquire(&key, &options).await {
                    tokio::time::sleep(holds).await;
                    drop(guard);
                }
            })
        })
        .collect();
    cx.sleep(cx.interval() * 8).await;
    for writer in [cx.client().await, Arc::clone(&a)] {
        for _ in 0..3 {
            let guard = match writer.acquire(&key, &cx.patient()).await {
                Ok(guard) => guard,
                Err(error) => call_failed("a writer must be served", &error),
            };
            refused(&b, &key, &reader()).await;
            cx.give(guard).await;
        }
    }
    crowd.iter().for_each(JoinHandle::abort);
}

pub(crate) async fn nothing_is_upgraded(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = read(cx, &a, &key).await;
    cx.held(&a, &key).await;
    let options = AcquireOptions::new().wait(cx.short_wait());
    fails(a.acquire(&key, &options).await, cx.budget_ended());
    guard.confirm().await.answered("a reader that waits for itself keeps its hold");
    // The reader left the queue, so others get in again.
    let other =
        cx.within("another reader", cx.handover(), b.acquire(&key, &cx.patient().mode(Mode::Shared))).await;
    cx.give(other.answered("a reader beside another")).await;
    cx.give(guard).await;
    let guard = cx.free_within(&a, &key, cx.handover()).await;
    refused(&a, &key, &reader()).await;
    fails(a.acquire(&key, &options.mode(Mode::Shared)).await, cx.budget_ended());
    cx.give(guard).await;
}

pub(crate) async fn a_dead_reader_ends_alone(cx: &Context) {
    let a = cx.faulty().await;
    let (b, c) = cx.two().await;
    let key = cx.key();
    let leased = || cx.leased().mode(Mode::Shared);
    let dead = cx.take_with(&a.lock, &key, &leased()).await;
    let live = cx.take_with(&b, &key, &leased()).await;
    a.faults.silence(true);
    let reason = cx.within("the loss", cx.ttl(), dead.lost()).await;
    assert_eq!(reason, LossReason::Expired);
    cx.sleep(cx.ttl() + cx.slack()).await;
    live.confirm().await.answered("the other reader is alive");
    cx.assert_valid(&live);
    cx.held(&c, &key).await;
    cx.give(live).await;
    // Its renewals have not lengthened the dead one's lease.
    let writer = cx.take(&c, &key).await;
    a.faults.silence(false);
    let _ = dead.release().await;
    writer.confirm().await.answered("a late release ends no other hold");
    cx.give(writer).await;
}

pub(crate) async fn a_short_lease_cuts_no_longer_one(cx: &Context) {
    let (a, b) = (cx.faulty().await, cx.faulty().await);
    let c = cx.client().await;
    let key = cx.key();
    let (short, long) = (cx.ttl(), (cx.ttl() * 4).min(cx.lease().max));
    let kept = cx.take_with(&a.lock, &key, &reader().ttl(long)).await;
    let ended = cx.take_with(&b.lock, &key, &reader().ttl(short)).await;
    for client in [&a, &b] {
        client.faults.silence(true);
    }
    cx.within("the loss", short, ended.lost()).await;
    cx.sleep(short / 2).await;
    if long > short * 2 {
        cx.held(&c, &key).await;
    }
    let writer = cx.free_within(&c, &key, long).await;
    assert!(!kept.validity().is_held(), "the writer was granted beside a reader");
    cx.give(writer).await;
}

pub(crate) async fn tokens_of_writers_are_above_those_of_readers(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    for _ in 0..3 {
        let writer = cx.take(&a, &key).await;
        let below = writer.token();
        cx.give(writer).await;
        let readers = [read(cx, &a, &key).await, read(cx, &b, &key).await];
        let highest = readers.iter().map(LockGuard::token).max().flatten();
        assert!(readers.iter().all(|reader| reader.token() > below), "readers come after {below:?}");
        for reader in readers {
            cx.give(reader).await;
        }
        let writer = cx.take(&b, &key).await;
        assert!(writer.token() > highest, "{:?} comes after {highest:?}", writer.token());
        cx.give(writer).await;
    }
}

pub(crate) async fn several_keys_have_a_mode_each(cx: &Context) {
    let (a, b) = cx.two().await;
    let (shared, own) = (cx.key(), cx.key());
    let guard = read(cx, &b, &shared).await;
    let wanted = || [(&shared, Mode::Shared), (&own, Mode::Exclusive)];
    let guards = a.wanting(wanted()).wait(cx.patience()).acquire().await.answered("both are free");
    assert_eq!((guards[0].mode(), guards[1].mode()), (Mode::Shared, Mode::Exclusive));
    assert_eq!((guards[0].key(), guards[1].key()), (&shared, &own));
    cx.held(&b, &shared).await;
    refused(&b, &own, &reader()).await;
    assert!(b.wanting(wanted()).try_acquire().await.answered("an answer").is_none());
    cx.give(read(cx, &b, &shared).await).await;
    guards.release().await.answered("held until now");
    cx.give(guard).await;
    let twice = a.wanting([(&own, Mode::Shared), (&own, Mode::Exclusive)]).acquire().await;
    fails(twice, &[ErrorKind::InvalidOption]);
    let both = a.keys([&shared, &own]).shared().acquire().await.answered("one mode for all");
    assert!(both.iter().all(|guard| guard.mode() == Mode::Shared));
    both.release().await.answered("held until now");
}

/// Writers in opposite orders with a reader between them: the keys are taken in one order.
pub(crate) async fn callers_of_several_keys_do_not_block_each_other(cx: &Context) {
    let (a, b) = cx.two().await;
    let keys = [cx.key(), cx.key()];
    let mut tasks: Vec<JoinHandle<()>> = Vec::new();
    for (lock, modes) in [
        (&a, [Mode::Exclusive, Mode::Shared]),
        (&b, [Mode::Shared, Mode::Exclusive]),
        (&a, [Mode::Shared, Mode::Shared]),
        (&b, [Mode::Exclusive, Mode::Exclusive]),
    ] {
        let (lock, keys, patience) = (Arc::clone(lock), keys.clone(), cx.patience());
        tasks.push(tokio::spawn(async move {
            for _ in 0..5 {
                let wanted = [(&keys[1], modes[1]), (&keys[0], modes[0])];
                let guards = lock.wanting(wanted).wait(patience).acquire().await.answered("granted in time");
                tokio::task::yield_now().await;
                guards.release().await.answered("held until now");
            }
        }));
    }
    for task in tasks {
        joined(task).await;
    }
}

pub(crate) async fn dropped_readers_leave_nothing(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let writer = cx.take(&a, &key).await;
    for lock in [&a, &b] {
        cx.queue_with(lock, &key, cx.patient().mode(Mode::Shared)).await.cancel().await;
    }
    cx.give(writer).await;
    cx.undone(&b, &key).await;
    for lock in [&a, &b] {
        drop(read(cx, lock, &key).await);
    }
    cx.undone(&a, &key).await;
}

pub(crate) async fn inspection_shows_all_readers(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guards = [read(cx, &a, &key).await, read(cx, &a, &key).await, read(cx, &b, &key).await];
    let mut expected: Vec<_> = guards.iter().map(LockGuard::stored_holder).collect();
    expected.sort();
    expected.dedup();
    let shown = async {
        loop {
            let info = admin(&b).inspect(&key).await.answered("the store answers");
            let mut ids: Vec<_> = info.holders.iter().filter_map(|hold| hold.holder).collect();
            ids.sort();
            if ids == expected {
                return info;
            }
            cx.sleep(cx.interval()).await;
        }
    };
    let lag = cx.capabilities().admin.lag;
    let info = cx.within("a look at all readers", lag, shown).await;
    assert!(info.holders.iter().all(|hold| hold.mode == Mode::Shared), "{info:?}");
    for guard in guards {
        cx.give(guard).await;
    }
}

pub(crate) async fn a_forced_release_ends_one_reader(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let [one, other] = [read(cx, &a, &key).await, read(cx, &b, &key).await];
    assert!(admin(&b).force_release(&key, one.stored_holder()).await.answered("the store answers"));
    let bound = cx.capabilities().loss_detection;
    assert_eq!(cx.within("the loss", bound, one.lost()).await, LossReason::ForcedRelease);
    other.confirm().await.answered("the other reader keeps its hold");
    cx.held(&a, &key).await;
    cx.give(other).await;
    cx.give(cx.free_within(&a, &key, Duration::ZERO).await).await;
}

pub(crate) async fn a_cooldown_needs_an_exclusive_grant(cx: &Context) {
    let lock = cx.client().await;
    let key = cx.key();
    let options = reader().cooldown(cx.ttl());
    fails(lock.try_acquire(&key, &options).await, &[ErrorKind::InvalidOption]);
    fails(lock.acquire(&key, &options).await, &[ErrorKind::InvalidOption]);
    cx.give(cx.take(&lock, &key).await).await;
}

/// Returns three readers of one client that share a hold of the store.
async fn sharing(cx: &Context, lock: &Arc<dyn Lock>, key: &LockKey) -> Vec<LockGuard> {
    // Repeats, because a call on a slow machine can take longer than readers share a hold.
    for _ in 0..20 {
        let guards =
            Vec::from([read(cx, lock, key).await, read(cx, lock, key).await, read(cx, lock, key).await]);
        let stored = guards[0].stored_holder();
        if guards.iter().all(|guard| guard.stored_holder() == stored) {
            return guards;
        }
        for guard in guards {
            cx.give(guard).await;
        }
    }
    panic!("readers of one client never share a hold of the store");
}

pub(crate) async fn sixty_four_readers_are_one_hold_of_the_store(cx: &Context) {
    let (a, b) = (cx.faulty().await, cx.client().await);
    let key = cx.key();
    let asked = || a.faults.calls(Op::Acquire) + a.faults.calls(Op::Wait);
    let (before, released) = (asked(), a.faults.calls(Op::Release));
    let mut guards = Vec::new();
    for _ in 0..64 {
        guards.push(read(cx, &a.lock, &key).await);
    }
    let calls = asked() - before;
    // In real time the sharing can end between two readers, and the next one calls the store.
    assert!(calls < 64 && (calls == 1 || !cx.is_virtual()), "{calls} calls for 64 readers");
    let ids: BTreeSet<_> = guards.iter().map(LockGuard::holder).collect();
    assert_eq!(ids.len(), 64, "each reader has its own id");
    let last = guards.swap_remove(31);
    for guard in guards {
        cx.give(guard).await;
    }
    if cx.is_virtual() {
        assert_eq!(a.faults.calls(Op::Release), released, "the last reader still has the hold");
    }
    last.confirm().await.answered("the last reader is alone");
    cx.held(&b, &key).await;
    cx.give(last).await;
    cx.give(cx.take(&b, &key).await).await;
}

/// Of two readers of one client at least one always holds the key.
pub(crate) async fn readers_that_share_keep_no_remote_writer_waiting(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let share_for = cx.capabilities().share_for;
    let holds = (share_for / 2).max(cx.interval());
    let crowd: Vec<JoinHandle<()>> = (0..2_u32)
        .map(|i| {
            let (lock, key) = (Arc::clone(&a), key.clone());
            let options = cx.patient().mode(Mode::Shared);
            tokio::spawn(async move {
                tokio::time::sleep(holds * i).await;
                while let Ok(guard) = lock.acquire(&key, &options).await {
                    tokio::time::sleep(holds * 2).await;
                    drop(guard);
                }
            })
        })
        .collect();
    for _ in 0..3 {
        cx.sleep(holds * 3).await;
        let writer = cx.queue(&b, &key).await;
        cx.give(writer.granted(cx, cx.handover() + share_for + holds * 2).await).await;
    }
    crowd.iter().for_each(JoinHandle::abort);
}

pub(crate) async fn a_loss_ends_all_readers_that_share_a_hold(cx: &Context) {
    let lock = cx.client().await;
    let key = cx.key();
    let guards = sharing(cx, &lock, &key).await;
    cx.lose(&key, LossReason::ForcedRelease).await;
    for guard in &guards {
        cx.within("the loss", cx.capabilities().loss_detection, guard.lost()).await;
        assert!(!guard.validity().is_held(), "{guard:?}");
    }
    for guard in guards {
        fails(guard.release().await, &[ErrorKind::Lost]);
    }
    cx.give(cx.take(&lock, &key).await).await;
}
