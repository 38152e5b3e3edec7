//! Running a body under the lock. The lock is released on every way out, and a loss stops the body.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::FutureExt as _;
use leasehold_api::{Error, ErrorKind, LockExt as _, LossReason, RunError, WindowOutcome};
use tokio::sync::Notify;

use crate::context::{Context, fails};
use crate::harness::{Fault, Op};

pub(crate) async fn gives_the_bodys_value(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let value = a.key(&key).run(async |guard| guard.key().as_str().len()).await;
    assert_eq!(value.expect("a free key"), key.as_str().len());
    cx.give(cx.take(&b, &key).await).await;
    let refused: Result<Result<(), &str>, _> = a.key(&key).run(async |_| Err("the body's own error")).await;
    assert_eq!(refused.expect("the lock was there"), Err("the body's own error"));
    cx.give(cx.take(&b, &key).await).await;
    let tried = a.key(&key).try_run(async |_| 7).await;
    assert_eq!(tried.expect("a free key"), Some(7));
    cx.give(cx.take(&b, &key).await).await;
}

pub(crate) async fn holds_during_the_body(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let ran = a
        .key(&key)
        .run(async |guard| {
            assert!(guard.validity().is_held());
            cx.held(&b, &key).await;
            cx.held(&a, &key).await;
            cx.settle().await;
            cx.held(&b, &key).await;
        })
        .await;
    ran.expect("a free key");
}

pub(crate) async fn says_when_it_did_not_run(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = cx.take(&b, &key).await;
    let ran = AtomicBool::new(false);
    let body = async |_: &leasehold_api::LockGuard| ran.store(true, Ordering::SeqCst);
    let outcome = a.key(&key).wait(cx.short_wait()).run(body).await;
    let Err(RunError::NotRun(error)) = outcome else { panic!("{outcome:?}") };
    assert!(cx.budget_ended().contains(&error.kind()) && error.is_retryable(), "{error}");
    assert_eq!(a.key(&key).try_run(body).await.expect("a held key is no error"), None);
    let both = [key.clone(), cx.key()];
    let outcome = a.keys(&both).wait(Duration::ZERO).run(async |_| ran.store(true, Ordering::SeqCst)).await;
    let Err(RunError::NotRun(error)) = outcome else { panic!("{outcome:?}") };
    assert!(error.kind() == ErrorKind::Timeout && error.is_retryable(), "{error}");
    assert!(!ran.load(Ordering::SeqCst), "the body ran without the lock");
    cx.give(guard).await;
}

pub(crate) async fn a_panic_releases_and_goes_on(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let run = a.key(&key).run(async |_| {
        tokio::task::yield_now().await;
        // Panics without `panic!`, because its hook would print a failure.
        std::panic::resume_unwind(Box::new("the body's panic"))
    });
    let outcome: Result<Result<(), _>, _> = AssertUnwindSafe(run).catch_unwind().await;
    let Err(panic) = outcome else { panic!("the panic of the body was swallowed") };
    assert_eq!(crate::runner::panic_text(&*panic), "the body's panic");
    cx.undone(&b, &key).await;
}

pub(crate) async fn a_loss_stops_the_body(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let dropped = Arc::new(AtomicBool::new(false));
    let witness = Witness(Arc::clone(&dropped));
    let begun = Notify::new();
    let run = a.key(&key).run(async |_| {
        let _witness = witness;
        begun.notify_one();
        std::future::pending::<()>().await;
    });
    let lose = async {
        begun.notified().await;
        cx.lose(&key, LossReason::SessionLost).await;
    };
    let bound = cx.capabilities().loss_detection;
    let (outcome, ()) = cx.within("the end of the body", bound, async { tokio::join!(run, lose) }).await;
    assert!(stopped(outcome).loss().is_some());
    assert!(dropped.load(Ordering::SeqCst), "the body goes on after the loss");
    cx.give(cx.free_within(&b, &key, cx.capabilities().undo).await).await;
}

/// Returns the error of a body that a loss stopped. Asserts that the error is not retryable.
#[track_caller]
fn stopped<T: std::fmt::Debug>(outcome: Result<T, RunError<T>>) -> Error {
    let Err(RunError::Stopped(error)) = outcome else { panic!("not stopped: {outcome:?}") };
    assert!(error.kind() == ErrorKind::Lost && !error.is_retryable(), "{error}");
    error
}

struct Witness(Arc<AtomicBool>);

impl Drop for Witness {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

pub(crate) async fn a_loss_of_one_key_stops_the_body(cx: &Context) {
    let a = cx.client().await;
    let keys = cx.some_keys(3);
    let begun = Notify::new();
    let run = a.keys(&keys).run(async |_| {
        begun.notify_one();
        std::future::pending::<()>().await;
    });
    let lose = async {
        begun.notified().await;
        cx.lose(&keys[1], LossReason::Gone).await;
    };
    let bound = cx.capabilities().loss_detection;
    let (outcome, ()) = cx.within("the end of the body", bound, async { tokio::join!(run, lose) }).await;
    stopped(outcome);
    for key in &keys {
        cx.undone(&a, key).await;
    }
}

pub(crate) async fn a_silent_store_stops_the_body_in_time(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    let key = cx.key();
    let run = a.lock.key(&key).ttl(cx.ttl()).run(async |_| {
        a.faults.silence(true);
        std::future::pending::<()>().await;
    });
    let outcome = cx.within("the end of the body", cx.ttl(), run).await;
    stopped(outcome);
    if cx.is_virtual() {
        cx.held(&b, &key).await;
    }
    cx.give(cx.free_within(&b, &key, cx.ttl()).await).await;
}

pub(crate) async fn a_body_that_outran_its_lock_is_told(cx: &Context) {
    let a = cx.client().await;
    let key = cx.key();
    // The body ends before it could be stopped. The result is still an error, because the lock was lost.
    let outcome = a.key(&key).run(async |_| cx.lose(&key, LossReason::Gone).await).await;
    let Err(error) = outcome else { panic!("the lock was gone before the end") };
    assert!(!matches!(error, RunError::NotRun(_)) && !error.is_retryable(), "{error:?}");
    fails(Err::<(), _>(error), &[ErrorKind::Lost]);
    cx.undone(&a, &key).await;
}

pub(crate) async fn several_keys(cx: &Context) {
    let (a, b) = cx.two().await;
    let keys = cx.some_keys(3);
    let value = a
        .keys(&keys)
        .run(async |guards| {
            for key in &keys {
                cx.held(&b, key).await;
            }
            guards.len()
        })
        .await;
    assert_eq!(value.expect("free keys"), 3);
    for key in &keys {
        cx.give(cx.take(&b, key).await).await;
    }
}

/// A caller that repeats retryable errors runs a body only once and gets its value, even if the release
/// fails.
pub(crate) async fn a_finished_body_is_not_run_again(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    let runs = Arc::new(AtomicUsize::new(0));
    for how in 0..4 {
        let key = cx.key();
        runs.store(0, Ordering::SeqCst);
        let outcome = loop {
            let (faults, count) = (Arc::clone(&a.faults), Arc::clone(&runs));
            let fail = move || {
                faults.script(Op::Release, Fault::Error(ErrorKind::Unavailable));
                count.fetch_add(1, Ordering::SeqCst)
            };
            let outcome = match how {
                0 => a.lock.key(&key).run(async |_| fail()).await,
                1 => a.lock.key(&key).try_run(async |_| fail()).await.map(|ran| ran.expect("a free key")),
                2 => a.lock.keys([&key]).run(async |_| fail()).await,
                _ => a.lock.key(&key).run_boxed(|_| Box::pin(async move { fail() })).await,
            };
            match outcome {
                Err(error) if error.is_retryable() => cx.settle().await,
                outcome => break outcome,
            }
        };
        assert_eq!(runs.load(Ordering::SeqCst), 1, "the body ran again");
        let Err(RunError::Unconfirmed { value, error }) = outcome else { panic!("{outcome:?}") };
        assert_eq!(value, 0);
        assert!(!error.is_retryable(), "{error}");
        // The release continues in the background.
        cx.give(cx.free_within(&b, &key, cx.call_limit()).await).await;
    }
}

pub(crate) async fn a_finished_window_is_not_run_again(cx: &Context) {
    let a = cx.faulty().await;
    let key = cx.key();
    let hour = Duration::from_secs(3_600);
    let outcome = a.lock.key(&key).at_most_once_per(hour).run(async |_| {
        a.faults.script(Op::Release, Fault::Error(ErrorKind::Unavailable));
        7
    });
    match outcome.await {
        Err(error) if !error.is_retryable() => assert_eq!(error.into_value(), Some(7)),
        other => panic!("{other:?}"),
    }
    let again = a.lock.key(&key).at_most_once_per(hour).run(async |_| 8).await;
    assert!(matches!(again, Ok(WindowOutcome::NotDue { .. })), "{again:?}");
}
