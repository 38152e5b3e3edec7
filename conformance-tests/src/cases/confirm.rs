//! Confirming a grant: only the store's answer to a request sent after the call counts.

use std::future::{Future as _, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use leasehold_api::{ErrorKind, LossReason, Validity};

use crate::context::{Context, fails};
use crate::harness::{Fault, Op};
use crate::inconclusive::Answered as _;

pub(crate) async fn is_ok_while_it_is_held(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = cx.take(&a, &key).await;
    for _ in 0..5 {
        cx.within("a confirmation", cx.call_limit(), guard.confirm()).await.answered("held");
        cx.assert_valid(&guard);
        cx.held(&b, &key).await;
        cx.sleep(cx.ttl() / 4).await;
    }
    cx.give(guard).await;
}

/// A confirmation calls the store. A client that answers from its own state returns `Ok` although the store is
/// silent.
pub(crate) async fn asks_after_the_call(cx: &Context) {
    let a = cx.faulty().await;
    let key = cx.key();
    let guard = cx.take(&a.lock, &key).await;
    guard.confirm().await.answered("held");
    a.faults.silence(true);
    assert_eq!(guard.validity(), Validity::Valid, "nothing is known yet");
    let answer = cx.within("a confirmation by a silent store", cx.call_limit(), guard.confirm()).await;
    fails(answer, &[ErrorKind::Unavailable, ErrorKind::OutcomeUnknown, ErrorKind::Lost]);
    a.faults.silence(false);
    drop(guard);
}

/// The answer to a renewal sent before the call confirms nothing, because the store can have ended the hold since
/// then.
pub(crate) async fn asks_again_behind_a_renewal(cx: &Context) {
    let a = cx.faulty().await;
    let key = cx.key();
    let guard = cx.take_with(&a.lock, &key, &cx.leased()).await;
    let pause = cx.settling().max(Duration::from_millis(20));
    a.faults.script(Op::Renew, Fault::DelayReply(pause * 2));
    let confirmed = async {
        cx.sleep(pause).await;
        assert!(cx.faults().purge(&key).await, "there was no hold to purge");
        guard.confirm().await
    };
    let both = async { tokio::join!(guard.renew(), confirmed) };
    let (_, confirmed) = cx.within("a confirmation behind a renewal", cx.call_limit(), both).await;
    fails(confirmed, &[ErrorKind::Lost]);
    assert_eq!(guard.validity(), Validity::Lost);
}

pub(crate) async fn finds_what_the_store_has_ended(cx: &Context) {
    let lock = cx.client().await;
    let key = cx.key();
    let guard = cx.take(&lock, &key).await;
    cx.lose(&key, LossReason::Gone).await;
    // A session that ends during a call leaves the outcome unknown, and the next call finds the loss. No call returns
    // `Ok`.
    let answered = async {
        loop {
            let open = [ErrorKind::Lost, ErrorKind::Unavailable, ErrorKind::OutcomeUnknown];
            let error = fails(guard.confirm().await, &open);
            if error.kind() == ErrorKind::Lost {
                return error;
            }
            cx.settle().await;
        }
    };
    let error = cx.within("a confirmation that says so", cx.call_limit(), answered).await;
    assert!(error.loss().is_some());
    assert_eq!(guard.validity(), Validity::Lost);
}

pub(crate) async fn of_several_names_the_lost_one(cx: &Context) {
    let lock = cx.client().await;
    let keys = cx.some_keys(3);
    let guards = cx.within("three free keys", cx.call_limit(), lock.acquire_all(&keys, &cx.patient())).await;
    let guards = guards.answered("free");
    cx.within("a confirmation", cx.call_limit(), guards.confirm()).await.answered("held");
    cx.lose(&keys[1], LossReason::Gone).await;
    let error =
        fails(cx.within("a confirmation", cx.call_limit(), guards.confirm()).await, &[ErrorKind::Lost]);
    assert!(error.to_string().contains(keys[1].as_str()), "the lost key is named: {error}");
}

pub(crate) async fn after_the_end_is_an_error(cx: &Context) {
    let lock = cx.client().await;
    let guard = cx.take(&lock, &cx.key()).await;
    let _ = lock.close().await;
    let answer = cx.within("a confirmation of a closed lock", cx.call_limit(), guard.confirm()).await;
    fails(answer, &[ErrorKind::Lost, ErrorKind::Closed]);
}

pub(crate) async fn dropped_confirmations_change_nothing(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = cx.take(&a, &key).await;
    for polls in 0..4 {
        let mut left = polls;
        let mut confirmation = pin!(guard.confirm());
        let polled = poll_fn(|cx| {
            if left == 0 {
                return Poll::Ready(());
            }
            left -= 1;
            confirmation.as_mut().poll(cx).map(drop)
        });
        let _ = tokio::time::timeout(Duration::from_millis(1), polled).await;
    }
    cx.settle().await;
    guard.confirm().await.answered("held");
    cx.held(&b, &key).await;
    cx.give(guard).await;
    cx.take(&b, &key).await.release().await.answered("held until now");
}
