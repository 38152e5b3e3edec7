//! Errors are typed and distinct, and a capability that is not declared is refused.

use std::error::Error as _;
use std::time::Duration;

use leasehold_api::{
    AcquireOptions, ErrorKind, Fencing, LockExt as _, MAX_LABEL_BYTES, Mode, Requirements, Wanted,
};

use crate::case::Need;
use crate::context::{Context, NO_ANSWER, acquire_for, attempt_at, fails};
use crate::harness::{Fault, Op};
use crate::inconclusive::Answered as _;

pub(crate) async fn capabilities_are_coherent(cx: &Context) {
    let (a, b) = cx.two().await;
    let has = a.capabilities();
    assert_eq!(has, b.capabilities(), "two clients of one store declare the same");
    if let Some(lease) = has.lease {
        assert!(lease.min > Duration::ZERO, "a lease of zero ends before it begins");
        assert!(lease.min <= lease.max);
        if let Some(default) = lease.default {
            assert!((lease.min..=lease.max).contains(&default), "the default TTL is within the bounds");
        }
    }
    let day = Duration::from_secs(86_400);
    for (what, bound) in [
        ("undo", has.undo),
        ("handover", has.handover),
        ("loss_detection", has.loss_detection),
        ("crash_release", has.crash_release.unwrap_or_default()),
    ] {
        assert!(bound <= day, "{what} is declared as {bound:?}, which promises nothing");
    }
    assert!(!has.admin.list || a.admin().is_some(), "listing is declared");
    assert!(!has.admin.inspect || a.admin().is_some(), "inspection is declared");
    assert!(!has.admin.force_release || a.admin().is_some(), "forced release is declared");
    assert!(!has.admin.ask || a.admin().is_some(), "requests to release are declared");
    assert!(!a.to_string().is_empty(), "a lock names its store");
}

pub(crate) async fn no_name_shows_a_password(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = cx.take(&a, &key).await;
    let error = fails(acquire_for(&b, &key, Duration::ZERO).await, &[ErrorKind::Timeout]);
    for text in
        [a.to_string(), format!("{a:?}"), error.to_string(), format!("{error:?}"), format!("{guard:?}")]
    {
        // Finds the password in `scheme://user:password@host`.
        let password = text.split("://").skip(1).find_map(|rest| {
            let authority = rest.split(['/', ' ', '"']).next()?;
            authority.split_once('@')?.0.split_once(':')
        });
        assert_eq!(password, None, "{text}");
    }
    cx.give(guard).await;
}

pub(crate) async fn requirements_are_compared(cx: &Context) {
    let lock = cx.client().await;
    let has = cx.capabilities();
    let mut fits = Requirements::new().scope(has.scope).loss_within(has.loss_detection);
    if has.lease.is_some() {
        fits = fits.lease();
    }
    if has.fencing.has_tokens() {
        fits = fits.fencing();
    }
    lock.require(&fits).expect("what is declared is there");
    if has.fencing != Fencing::Durable {
        let error = fails(lock.require(&Requirements::new().durable_fencing()), &[ErrorKind::Unsupported]);
        assert!(error.store().is_some());
    }
    let impossible = Requirements::new().crash_release_within(Duration::ZERO).loss_within(Duration::ZERO);
    if has.crash_release != Some(Duration::ZERO) {
        fails(lock.require(&impossible), &[ErrorKind::Unsupported]);
    }
}

pub(crate) async fn undeclared_is_unsupported(cx: &Context) {
    let has = cx.capabilities();
    let missing = [
        (has.lease.is_none(), Need::Lease),
        (!has.cooldown, Need::Cooldown),
        (!has.fencing.has_tokens(), Need::Tokens),
        (!has.admin.inspect, Need::Inspect),
        (!has.admin.list, Need::List),
        (!has.admin.force_release, Need::ForceRelease),
        (!has.admin.ask, Need::Ask),
        (!has.portable, Need::Portable),
        (!has.modes.shared, Need::Shared),
        (has.modes.max_permits == 0, Need::Permits),
    ];
    for (missing, need) in missing {
        if missing {
            need.assert_refused(cx).await;
        }
    }
}

pub(crate) async fn undeclared_modes_are_unsupported(cx: &Context) {
    let lock = cx.client().await;
    let key = cx.key();
    let modes = cx.capabilities().modes;
    let undeclared =
        [(!modes.shared).then_some(Mode::Shared), (modes.max_permits == 0).then_some(Mode::Permit { of: 2 })];
    for mode in undeclared.into_iter().flatten() {
        let options = AcquireOptions::new().mode(mode);
        fails(lock.try_acquire(&key, &options).await, &[ErrorKind::Unsupported]);
        fails(lock.acquire(&key, &options).await, &[ErrorKind::Unsupported]);
        fails(lock.acquire_all(&[key.clone(), cx.key()], &options).await, &[ErrorKind::Unsupported]);
        let wanted = [Wanted::new(key.clone(), mode), Wanted::new(cx.key(), Mode::Exclusive)];
        fails(lock.acquire_wanted(&wanted, &AcquireOptions::new()).await, &[ErrorKind::Unsupported]);
    }
    cx.give(cx.take(&lock, &key).await).await;
}

pub(crate) async fn bad_options_are_refused(cx: &Context) {
    let lock = cx.client().await;
    let key = cx.key();
    let bad = [
        AcquireOptions::new().ttl(Duration::ZERO),
        AcquireOptions::new().cooldown(Duration::ZERO),
        AcquireOptions::new().label("x".repeat(MAX_LABEL_BYTES + 1)),
        AcquireOptions::new().label("a\0b"),
    ];
    for options in bad {
        // A store without leases or cooldowns can return `Unsupported` instead.
        let kinds = [ErrorKind::InvalidOption, ErrorKind::Unsupported];
        for error in [
            fails(lock.try_acquire(&key, &options).await, &kinds),
            fails(lock.acquire(&key, &options).await, &kinds),
            fails(lock.acquire_all(&[key.clone(), cx.key()], &options).await, &kinds),
        ] {
            assert!(!error.is_retryable(), "{error}");
        }
    }
    cx.give(cx.take(&lock, &key).await).await;
}

pub(crate) async fn an_absurd_ttl_is_refused_or_kept(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    for absurd in [Duration::MAX, Duration::from_secs(u64::MAX / 2)] {
        match a.try_acquire(&key, &AcquireOptions::new().ttl(absurd)).await {
            Ok(Some(guard)) => {
                assert!(cx.lease().max >= absurd, "longer than the declared maximum");
                cx.held(&b, &key).await;
                cx.give(guard).await;
            }
            Ok(None) => panic!("a free key is not held"),
            Err(error) => {
                fails(Err::<(), _>(error), &[ErrorKind::InvalidOption]);
            }
        }
    }
    cx.give(cx.take(&b, &key).await).await;
}

pub(crate) async fn a_failing_store_is_not_held(cx: &Context) {
    let a = cx.faulty().await;
    for kind in [
        ErrorKind::Unavailable,
        ErrorKind::PermissionDenied,
        ErrorKind::SchemaMissing,
        ErrorKind::Corrupt,
        ErrorKind::Capacity,
        ErrorKind::NeedsOperator,
        ErrorKind::Deadlock,
    ] {
        let key = cx.key();
        a.faults.script(Op::Acquire, Fault::Error(kind));
        let attempt = attempt_at(&a.lock, &key);
        let error = fails(cx.within("a failing try", cx.call_limit(), attempt).await, &[kind]);
        assert_eq!(error.is_retryable(), kind.is_transient());
        assert_eq!(error.key(), Some(&key), "{error:?}");
        assert!(error.store().is_some(), "{error:?}");
        // Tries another key too, because the attempt at the first key might still have to be undone.
        let other = cx.key();
        a.faults.script(Op::Acquire, Fault::Error(kind));
        let zero = AcquireOptions::new().wait(Duration::ZERO);
        let attempt = a.lock.acquire(&other, &zero);
        fails(cx.within("a failing acquire", cx.call_limit(), attempt).await, &[kind]);
        // A failed call does not make the next one fail.
        for key in [&key, &other] {
            cx.give(cx.free_within(&a.lock, key, cx.call_limit()).await).await;
        }
    }
}

pub(crate) async fn a_failure_ends_a_wait(cx: &Context) {
    let a = cx.client().await;
    let b = cx.faulty().await;
    let key = cx.key();
    let guard = cx.take(&a, &key).await;
    // The first attempt finds the key held, and the wait after it fails.
    b.faults.script(Op::Acquire, Fault::Pass);
    b.faults.script(Op::Acquire, Fault::Error(ErrorKind::PermissionDenied));
    b.faults.script(Op::Wait, Fault::Error(ErrorKind::PermissionDenied));
    let waiting = acquire_for(&b.lock, &key, cx.patience());
    let outcome = cx.within("a failing wait", cx.handover() + cx.call_limit(), waiting).await;
    let error = fails(outcome, &[ErrorKind::PermissionDenied]);
    assert!(error.source().is_none_or(|s| !s.to_string().is_empty()));
    cx.give(guard).await;
    // The failed wait has left the store's queue.
    let next = cx.free_within(&a, &key, cx.capabilities().undo).await;
    cx.give(next).await;
}

pub(crate) async fn a_silent_store_is_an_error_in_bounded_time(cx: &Context) {
    let a = cx.faulty().await;
    a.faults.silence(true);
    let key = cx.key();
    let attempt = attempt_at(&a.lock, &key);
    fails(cx.within("a try on a silent store", cx.call_limit(), attempt).await, &NO_ANSWER);
    let another = cx.key();
    let attempt = acquire_for(&a.lock, &another, cx.patience());
    fails(cx.within("an acquire on a silent store", cx.patience(), attempt).await, &NO_ANSWER);
    a.faults.silence(false);
    cx.give(cx.free_within(&a.lock, &key, cx.call_limit()).await).await;
}

pub(crate) async fn contention_timeout_and_loss_are_distinct(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = cx.take(&a, &key).await;
    cx.held(&b, &key).await;
    let waiting = acquire_for(&b, &key, cx.short_wait());
    fails(waiting.await, cx.budget_ended());
    cx.lose(&key, leasehold_api::LossReason::Gone).await;
    let lost = fails(guard.release().await, &[ErrorKind::Lost]);
    assert!(lost.loss().is_some());
    assert!(!lost.message().is_empty());
    a.close().await.answered("the store answers");
    fails(a.try_acquire(&key, &AcquireOptions::new()).await, &[ErrorKind::Closed]);
}
