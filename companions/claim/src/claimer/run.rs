//! Runs handlers, which are the shortest way to work on claims.

use std::any::Any;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use leasehold_api::LossReason;
use tokio::task::JoinSet;

use super::Claimer;
use super::on_failure::OnFailure;
use crate::claimer::Claim;
use crate::error::ClaimError;
use crate::store::Outcome;

type Panic = Box<dyn Any + Send>;

impl Claimer {
    /// Works on claims with `handler`, up to `concurrency` at once (at least one), until the claimer is closed. Each
    /// handler is a task of the current runtime.
    ///
    /// The result of the handler ends its claim: `Ok(())` as done, `Ok` of an [`Outcome`] with that outcome. After an
    /// error, [`on_failure`](super::ClaimerBuilder::on_failure) decides whether the claim fails or is tried again, with
    /// the error's text as the message. A handler can also end the claim itself, for example with
    /// [`Claim::settle_with`] in the transaction of its work. Then its result does not count. If the handler moves the
    /// claim elsewhere, it cannot be settled after the handler has ended.
    ///
    /// If a handler panics or is dropped, the claim is put back and the attempt counts. After a panic, the row waits
    /// for the same pause as after an error that is retried. If a claim is lost, its handler is dropped, unless it is
    /// writing the end itself. A handler that hangs loses its claim if a [`max_hold`](super::ClaimerBuilder::max_hold)
    /// is set.
    ///
    /// Errors of settling go to [`on_error`](super::ClaimerBuilder::on_error).
    ///
    /// # Errors
    ///
    /// [`Unsupported`](ClaimError::Unsupported) at once if the spec lacks a state for failed claims and `on_failure`
    /// was not called.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the running handlers are dropped and their claims put back. The attempts count, unless the claimer
    /// was closed before.
    ///
    /// ```
    /// use leasehold_claim::{Claim, ClaimError, Claimer, Outcome, PgClaims, sqlx};
    ///
    /// async fn work(claimer: &Claimer, claims: &PgClaims) -> Result<(), ClaimError> {
    ///     let handler = |mut claim: Claim| {
    ///         let claims = claims.clone();
    ///         async move {
    ///             let Some(account) = claim.work::<Option<i64>>()? else { return Ok(Outcome::PutBack) };
    ///             let mut transaction = claims.pool().begin().await?;
    ///             let book = sqlx::query("UPDATE account SET charged = true WHERE id = $1").bind(account);
    ///             book.execute(&mut *transaction).await?;
    ///             claim.settle_with(&claims, transaction, Outcome::Done).await?; // both count, or neither
    ///             Ok::<_, Box<dyn std::error::Error + Send + Sync>>(Outcome::Done)
    ///         }
    ///     };
    ///     claimer.run(8, handler).await
    /// }
    /// ```
    pub async fn run<H, F, O, E>(&self, concurrency: usize, handler: H) -> Result<(), ClaimError>
    where
        H: Fn(Claim) -> F,
        F: Future<Output = Result<O, E>> + Send + 'static,
        O: Into<Outcome> + Send + 'static,
        E: Display + Send + 'static,
    {
        let on_failure = match self.shared.config.on_failure {
            Some(policy) => policy,
            None => OnFailure::usual(self.shared.store.spec())?,
        };
        let mut running = JoinSet::new();
        loop {
            while running.len() >= concurrency.max(1) {
                running.join_next().await;
            }
            let claim = tokio::select! {
                claim = self.next() => claim,
                Some(_) = running.join_next() => continue,
            };
            let Some(claim) = claim else { break };
            let theirs = claim.for_handler();
            // Catches a panic of the call, because a handler can panic before it has built its future.
            let begun = catch_unwind(AssertUnwindSafe(|| handler(theirs)));
            let work = work(claim, begun, on_failure);
            let shared = Arc::clone(&self.shared);
            running.spawn(async move {
                if let Err(error) = work.await {
                    shared.report(&error);
                }
            });
        }
        while running.join_next().await.is_some() {}
        Ok(())
    }
}

async fn work<F, O, E>(claim: Claim, begun: Result<F, Panic>, on_failure: OnFailure) -> Result<(), ClaimError>
where
    F: Future<Output = Result<O, E>> + Send + 'static,
    O: Into<Outcome> + Send,
    E: Display + Send,
{
    let answer = match begun {
        Ok(handler) => tokio::select! {
            biased;
            answer = AssertUnwindSafe(handler).catch_unwind() => answer,
            reason = claim.lost_in_hand() => {
                tracing::warn!(?claim, %reason, "the claim was lost, its handler is dropped");
                if reason == LossReason::HeldTooLong {
                    claim.overdue();
                }
                return Ok(());
            }
        },
        Err(panic) => Err(panic),
    };
    let pause = || match on_failure {
        OnFailure::Fail => Duration::ZERO,
        OnFailure::Retry(backoff) => backoff.after(claim.tries()),
    };
    let (outcome, trouble) = match answer {
        Ok(Ok(outcome)) => (outcome.into(), None),
        Ok(Err(error)) => {
            let error = error.to_string();
            let outcome = match on_failure {
                OnFailure::Fail => Outcome::Failed(error.clone()),
                OnFailure::Retry(_) => Outcome::Retry { error: Some(error.clone()), after: pause() },
            };
            (outcome, Some(error))
        }
        Err(panic) => {
            let error = format!("the handler panicked: {}", message(&*panic));
            (Outcome::Retry { error: Some(error.clone()), after: pause() }, Some(error))
        }
    };
    match (claim.settle_shared(outcome).await, trouble) {
        (Some(settled), _) => settled.map(drop).map_err(|error| claim.named(error)),
        (None, Some(error)) => {
            tracing::warn!(?claim, %error, "a handler failed that had ended its claim itself");
            Ok(())
        }
        (None, None) => Ok(()),
    }
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}
