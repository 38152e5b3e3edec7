//! Inspection changes nothing, and a forced release is reported to the holder that it ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use leasehold_api::{
    AcquireOptions, HoldInfo, HoldState, KeyInfo, ListQuery, Lock, LockAdmin, LockGuard, LockKey, Validity,
};
use tokio::time::Instant;

use crate::context::{Context, joined};
use crate::inconclusive::Answered as _;

pub(super) fn admin(lock: &Arc<dyn Lock>) -> &dyn LockAdmin {
    lock.admin().expect("a store that declares inspection has an operator's view")
}

async fn inspected(lock: &Arc<dyn Lock>, key: &LockKey) -> KeyInfo {
    let info = admin(lock).inspect(key).await.answered("the store answers");
    assert_eq!(info.key, *key);
    assert!(info.named);
    info
}

/// Returns the live hold of `key`. `None` if the key is free.
pub(super) async fn look(lock: &Arc<dyn Lock>, key: &LockKey) -> Option<HoldInfo> {
    let info = inspected(lock, key).await;
    assert!(info.holders.len() <= 1, "an exclusive key has one holder: {info:?}");
    info.holder().cloned()
}

/// Returns the hold that `lock` shows for the guard's key. Waits up to the declared lag for the holder id by which the
/// store knows the guard's hold.
pub(super) async fn look_at(cx: &Context, lock: &Arc<dyn Lock>, guard: &LockGuard) -> HoldInfo {
    let end = Instant::now() + lag(cx);
    loop {
        let info = look(lock, guard.key()).await.expect("a held key reads held");
        if info.holder == Some(guard.stored_holder()) || Instant::now() >= end {
            return info;
        }
        cx.sleep(cx.interval()).await;
    }
}

/// Returns the keys that `query` selects. Waits up to the declared lag for `expected`.
async fn keys_listed(
    cx: &Context,
    lock: &Arc<dyn Lock>,
    query: &ListQuery,
    expected: &[LockKey],
) -> Vec<LockKey> {
    let end = Instant::now() + lag(cx);
    loop {
        let infos = listed(lock, query).await;
        assert!(infos.iter().all(KeyInfo::is_held));
        let found: Vec<LockKey> = infos.into_iter().map(|i| i.key).collect();
        if found == expected || Instant::now() >= end {
            return found;
        }
        cx.sleep(cx.interval()).await;
    }
}

fn lag(cx: &Context) -> Duration {
    let lag = cx.capabilities().admin.lag;
    if lag.is_zero() { lag } else { lag + cx.slack() }
}

async fn listed(lock: &Arc<dyn Lock>, query: &ListQuery) -> Vec<KeyInfo> {
    admin(lock).list(query).await.answered("the store answers")
}

pub(crate) async fn shows_who_holds(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let options = AcquireOptions::new().label("who, \"why\" \u{1f512}");
    let guard = cx.take_with(&a, &key, &options).await;
    for lock in [&a, &b] {
        let info = look_at(cx, lock, &guard).await;
        assert_eq!(info.holder, Some(guard.holder()), "the holder as the guard knows it");
        assert_eq!(info.token, guard.token());
        assert_eq!(info.label.as_deref(), options.label.as_deref());
    }
    cx.give(guard).await;
    assert_eq!(look(&b, &key).await, None, "a released key reads free");
}

pub(crate) async fn shows_the_same_token_after_a_renewal(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = cx.take_with(&a, &key, &cx.leased()).await;
    for _ in 0..3 {
        let info = look_at(cx, &b, &guard).await;
        assert_eq!(info.token, guard.token());
        assert_eq!(info.holder, Some(guard.holder()));
        guard.renew().await.answered("held until now");
    }
    cx.give(guard).await;
}

pub(crate) async fn shows_how_long_a_lease_lasts(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = cx.take_with(&a, &key, &cx.leased()).await;
    for _ in 0..4 {
        let info = look(&b, &key).await.expect("a held key reads held");
        let left = info.expires_in.expect("a lease has an end");
        let ttl = cx.ttl() + cx.lateness();
        assert!(left <= ttl && left > Duration::ZERO, "a renewed lease of {ttl:?} is shown to last {left:?}");
        cx.sleep(cx.ttl() / 2).await;
    }
    cx.give(guard).await;
}

pub(crate) async fn a_hand_over_shows_the_new_holder(cx: &Context) {
    let (a, b) = cx.two().await;
    for lock in [&a, &b] {
        let key = cx.key();
        let guard = cx.take(&a, &key).await;
        let waiter = cx.queue(lock, &key).await;
        let (old, token) = (guard.holder(), guard.token());
        cx.give(guard).await;
        let guard = waiter.granted(cx, cx.handover()).await;
        let info = look_at(cx, &b, &guard).await;
        assert_eq!(info.holder, Some(guard.stored_holder()));
        if guard.stored_holder() == guard.holder() {
            assert_ne!(guard.holder(), old);
            assert_eq!(info.token, guard.token());
        } else {
            // The client has passed its hold to its next caller without the store.
            assert!(Arc::ptr_eq(lock, &a) && !cx.capabilities().handover_for.is_zero());
            assert_eq!((info.holder, info.token), (Some(old), token));
        }
        cx.give(guard).await;
    }
}

pub(crate) async fn looking_takes_nothing(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    for _ in 0..50 {
        assert_eq!(look(&b, &key).await, None, "a free key looks held");
        cx.give(cx.take(&a, &key).await).await;
    }
    let guard = cx.take(&a, &key).await;
    for _ in 0..50 {
        assert!(look(&b, &key).await.is_some(), "a held key looks free");
    }
    cx.assert_valid(&guard);
    cx.give(guard).await;
    cx.give(cx.take(&b, &key).await).await;
}

pub(crate) async fn listing_takes_nothing(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let admin = b.admin().expect("listing is declared");
    for all in [false, true] {
        for _ in 0..20 {
            cx.give(cx.take(&a, &key).await).await;
            let mut query = ListQuery::new();
            query.include_ended = all;
            let listed = admin.list(&query).await.answered("the store answers");
            assert!(
                !listed.iter().any(|info| info.key == key && info.is_held()),
                "a free key is listed: {listed:?}"
            );
        }
    }
    let guard = cx.take(&a, &key).await;
    let listed = admin.list(&ListQuery::new()).await.answered("the store answers");
    // Checks only that a held key is listed, because a key's name can appear later or never.
    assert!(listed.iter().any(KeyInfo::is_held), "a held key is not listed: {listed:?}");
    cx.give(guard).await;
}

pub(crate) async fn a_free_key_never_looks_held_to_lookers(cx: &Context) {
    let key = cx.key();
    let stop = Arc::new(AtomicBool::new(false));
    let mut lookers = Vec::new();
    for _ in 0..3 {
        let (lock, key, stop) = (cx.client().await, key.clone(), Arc::clone(&stop));
        lookers.push(tokio::spawn(async move {
            let mut looks = 0u64;
            while !stop.load(Ordering::SeqCst) {
                assert_eq!(look(&lock, &key).await, None, "a free key looks held to one of several lookers");
                looks += 1;
                tokio::time::sleep(Duration::from_micros(200)).await;
            }
            looks
        }));
    }
    cx.sleep(Duration::from_millis(400)).await;
    stop.store(true, Ordering::SeqCst);
    for looker in lookers {
        assert!(joined(looker).await > 0);
    }
}

pub(crate) async fn no_try_fails_because_somebody_looks(cx: &Context) {
    let taker = cx.client().await;
    let key = cx.key();
    let stop = Arc::new(AtomicBool::new(false));
    let mut lookers = Vec::new();
    for _ in 0..3 {
        let (lock, key, stop) = (cx.client().await, key.clone(), Arc::clone(&stop));
        lookers.push(tokio::spawn(async move {
            for look in 1.. {
                if stop.load(Ordering::SeqCst) {
                    return;
                }
                // The key is held or free, depending on the moment.
                admin(&lock).inspect(&key).await.answered("the store answers");
                // Sleeps at times, because virtual time stands still during the calls.
                if look % 16 == 0 {
                    tokio::time::sleep(Duration::from_micros(500)).await;
                } else {
                    tokio::task::yield_now().await;
                }
            }
        }));
    }
    for _ in 0..cx.many(300, 200) {
        cx.give(cx.take(&taker, &key).await).await;
        tokio::task::yield_now().await;
    }
    stop.store(true, Ordering::SeqCst);
    for looker in lookers {
        joined(looker).await;
    }
}

/// Inspecting a key does not count as waiting for it: the client that released the key takes it again without the yield
/// that it would owe to a waiter.
pub(crate) async fn looking_delays_no_try(cx: &Context) {
    let (a, b) = cx.two().await;
    let mut undisturbed = None;
    for looks in [0, 1, 20] {
        let key = cx.key();
        let guard = cx.take(&a, &key).await;
        for _ in 0..looks {
            for lock in [&a, &b] {
                look(lock, &key).await.expect("a held key reads held");
                if cx.capabilities().admin.list {
                    listed(lock, &ListQuery::new()).await;
                }
            }
        }
        cx.give(guard).await;
        let (guard, took) = cx.timed(cx.take(&a, &key)).await;
        let most = *undisturbed.get_or_insert(took);
        assert!(took <= most, "a try after {looks} looks took {took:?}, and {most:?} without");
        drop(guard);
        cx.undone(&b, &key).await;
    }
}

pub(crate) async fn looking_lengthens_nothing(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    let key = cx.key();
    let guard = cx.take_with(&a.lock, &key, &cx.leased()).await;
    a.faults.silence(true);
    let granted = Instant::now();
    while look(&b, &key).await.is_some() {
        assert!(granted.elapsed() < cx.ttl() + cx.slack(), "a lease that is looked at does not end");
        cx.sleep(cx.interval()).await;
    }
    let next = cx.take(&b, &key).await;
    assert_eq!(guard.validity(), Validity::Lost);
    cx.give(next).await;
}

pub(crate) async fn looking_disturbs_no_waiter(cx: &Context) {
    let (a, b) = cx.two().await;
    let c = cx.client().await;
    let key = cx.key();
    let guard = cx.take(&a, &key).await;
    let waiters = [cx.queue(&b, &key).await, cx.queue(&b, &key).await];
    look_at(cx, &c, &guard).await;
    for _ in 0..20 {
        let info = cx.soon("a look while others wait", look(&c, &key)).await;
        assert_eq!(info.expect("a held key reads held").holder, Some(guard.holder()));
    }
    cx.give(guard).await;
    for waiter in waiters {
        let guard = waiter.granted(cx, cx.handover()).await;
        look(&c, &key).await.expect("a held key reads held");
        cx.give(guard).await;
    }
}

pub(crate) async fn lists_what_is_held(cx: &Context) {
    let (a, b) = cx.two().await;
    let names = ["list:b", "list:a", "list:A", "list", "list:a:1", "other:a", "list_a", "listXa"];
    let keys = names.map(|n| LockKey::new(n).expect("a valid key"));
    let mut guards = Vec::new();
    for (i, key) in keys.iter().enumerate() {
        guards.push(cx.take(if i % 2 == 0 { &a } else { &b }, key).await);
    }
    let mut all = keys.to_vec();
    all.sort();
    for lock in [&a, &b] {
        assert_eq!(
            keys_listed(cx, lock, &ListQuery::new(), &all).await,
            all,
            "every live hold, ordered by key"
        );
    }
    let of =
        |prefix: &str| all.iter().filter(|k| k.as_str().starts_with(prefix)).cloned().collect::<Vec<_>>();
    for prefix in ["list:", "list_", "list%", "list:a", "LIST", "other", "*", "list:*", ""] {
        let query = ListQuery::new().prefix(prefix);
        assert_eq!(
            keys_listed(cx, &b, &query, &of(prefix)).await,
            of(prefix),
            "the prefix {prefix:?} is literal"
        );
    }
    for limit in [0, 1, 3, 100] {
        let found = listed(&b, &ListQuery::new().limit(limit)).await;
        assert_eq!(found.len(), limit.min(all.len()));
    }
    for guard in &guards {
        look_at(cx, &a, guard).await;
        let info = listed(&a, &ListQuery::new().prefix(guard.key().as_str())).await.swap_remove(0);
        assert_eq!(&info.key, guard.key());
        let hold = info.holder().expect("a held key is listed with its holder");
        assert_eq!((hold.holder, hold.token), (Some(guard.holder()), guard.token()));
    }
    cx.give(guards.swap_remove(0)).await;
    assert_eq!(listed(&b, &ListQuery::new()).await.len(), all.len() - 1);
    for guard in guards {
        cx.give(guard).await;
    }
    assert_eq!(listed(&a, &ListQuery::new()).await, []);
}

pub(crate) async fn an_ended_lease_is_not_listed(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    let key = cx.key();
    let _guard = cx.take_with(&a.lock, &key, &cx.leased()).await;
    assert_eq!(listed(&b, &ListQuery::new()).await.len(), 1);
    a.faults.silence(true);
    cx.sleep(cx.ttl() + cx.slack()).await;
    assert_eq!(listed(&b, &ListQuery::new()).await, [], "an ended lease is not a live hold");
    for info in listed(&b, &ListQuery::new().include_ended()).await {
        assert_eq!(info.key, key);
        assert!(info.holders.iter().all(|hold| hold.state == HoldState::Expired), "{info:?}");
    }
    cx.give(cx.take(&b, &key).await).await;
}

/// A limit counts live holds. A store that counts ended leases and free keys too returns pages that are not full.
pub(crate) async fn a_limit_counts_what_is_listed(cx: &Context) {
    let (a, b) = (cx.faulty().await, cx.client().await);
    let keys = ["page:1", "page:2", "page:3", "page:4"].map(|n| LockKey::new(n).expect("a valid key"));
    let mut ended = Vec::new();
    for key in [&keys[0], &keys[2]] {
        ended.push(cx.take_with(&a.lock, key, &cx.leased()).await);
    }
    let free = cx.take(&b, &LockKey::new("page:0").expect("a valid key")).await;
    cx.give(free).await;
    a.faults.silence(true);
    cx.sleep(cx.ttl() + cx.slack()).await;
    let mut guards = Vec::new();
    for key in [&keys[1], &keys[3]] {
        guards.push(cx.take(&b, key).await);
    }
    for limit in [1, 2, 3] {
        let query = ListQuery::new().prefix("page:").limit(limit);
        let expected: Vec<_> = guards.iter().map(|guard| guard.key().clone()).take(limit).collect();
        assert_eq!(keys_listed(cx, &b, &query, &expected).await, expected, "a page of {limit}");
    }
    for guard in guards {
        cx.give(guard).await;
    }
}

/// Returns the label of the guard's grant as `lock` shows it.
async fn shown_label(cx: &Context, lock: &Arc<dyn Lock>, guard: &LockGuard) -> Option<String> {
    look_at(cx, lock, guard).await.label.map(|label| label.to_string())
}

/// Shows each grant's own label, granted at once or after a wait. A store that keeps an earlier holder's label fails.
pub(crate) async fn shows_the_label_of_each_grant(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    for label in [Some("one"), None, Some("two")] {
        let labelled = |options: AcquireOptions| match label {
            Some(label) => options.label(label),
            None => options,
        };
        let guard = cx.take_with(&a, &key, &labelled(AcquireOptions::new())).await;
        assert_eq!(shown_label(cx, &b, &guard).await.as_deref(), label, "granted at once");
        for lock in [&a, &b] {
            let other = cx.key();
            let first = cx.take_with(&a, &other, &AcquireOptions::new().label("first")).await;
            let waiter = cx.queue_with(lock, &other, labelled(cx.patient())).await;
            cx.give(first).await;
            let next = waiter.granted(cx, cx.handover()).await;
            assert_eq!(shown_label(cx, &b, &next).await.as_deref(), label, "granted after a wait");
            cx.give(next).await;
        }
        cx.give(guard).await;
    }
}

pub(crate) async fn a_label_ends_with_its_lease(cx: &Context) {
    let (a, b) = (cx.faulty().await, cx.client().await);
    let key = cx.key();
    let _guard = cx.take_with(&a.lock, &key, &cx.leased().label("ended")).await;
    a.faults.silence(true);
    cx.sleep(cx.ttl() + cx.slack()).await;
    let next = cx.take(&b, &key).await;
    assert_eq!(shown_label(cx, &b, &next).await, None, "that of a grant without a label");
    cx.give(next).await;
}

/// A forced release of an ended lease returns `false`. A store that compares only the recorded holder id returns
/// `true`.
pub(crate) async fn force_ends_no_lease_that_has_ended(cx: &Context) {
    let (a, b) = (cx.faulty().await, cx.client().await);
    let key = cx.key();
    let guard = cx.take_with(&a.lock, &key, &cx.leased()).await;
    a.faults.silence(true);
    cx.sleep(cx.ttl() + cx.slack()).await;
    assert!(!admin(&b).force_release(&key, guard.holder()).await.answered("the store answers"));
    cx.give(cx.take(&b, &key).await).await;
}

pub(crate) async fn a_forced_release_frees(cx: &Context) {
    let (a, b) = cx.two().await;
    let keys = cx.some_keys(2);
    let guard = cx.take(&a, &keys[0]).await;
    let bystander = cx.take(&a, &keys[1]).await;
    assert!(admin(&b).force_release(&keys[0], guard.holder()).await.answered("the store answers"));
    let next = cx.free_within(&b, &keys[0], cx.handover()).await;
    let bound = cx.capabilities().loss_detection;
    cx.within("the loss", bound, guard.lost()).await;
    assert_eq!(guard.validity(), Validity::Lost);
    // Neither the lost guard nor its client disturbs the successor.
    drop(guard);
    cx.sleep(cx.capabilities().undo.min(cx.ttl())).await;
    cx.held(&a, &keys[0]).await;
    cx.assert_valid(&next);
    cx.give(next).await;
    // A forced release of another key does not end this one.
    cx.assert_valid(&bystander);
    cx.give(bystander).await;
}

pub(crate) async fn force_names_whom_it_breaks(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let old = cx.take(&a, &key).await;
    let old_holder = old.holder();
    let force = async |holder| admin(&b).force_release(&key, holder).await.answered("the store answers");
    cx.give(old).await;
    assert!(!force(old_holder).await, "the key is free");
    let guard = cx.take(&a, &key).await;
    assert!(!force(old_holder).await, "that holder has it no more");
    let other = cx.take(&b, &cx.key()).await;
    assert!(!force(other.holder()).await, "that holder has another key");
    cx.settle().await;
    cx.assert_valid(&guard);
    cx.held(&b, &key).await;
    assert!(force(guard.holder()).await);
    assert!(!force(guard.holder()).await, "it can be broken once");
    cx.give(other).await;
}

pub(crate) async fn a_forced_release_serves_a_waiter(cx: &Context) {
    let (a, b) = cx.two().await;
    for lock in [&a, &b] {
        let key = cx.key();
        let guard = cx.take(&a, &key).await;
        let waiter = cx.queue(lock, &key).await;
        assert!(admin(&b).force_release(&key, guard.holder()).await.answered("the store answers"));
        let bound = cx.capabilities().loss_detection + cx.handover();
        let next = waiter.granted(cx, bound).await;
        assert!(next.token() > guard.token() || guard.token().is_none());
        drop(guard);
        cx.settle().await;
        cx.assert_valid(&next);
        cx.give(next).await;
    }
}
