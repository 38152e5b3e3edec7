//! Handlers: the shortest way to have claims worked on.

use std::any::Any;
use std::fmt::Display;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::task::JoinSet;

use super::Claimer;
use super::builder::OnFailure;
use crate::claim::Claim;
use crate::error::ClaimError;
use crate::store::Outcome;

impl Claimer {
    /// Works on claims with `handler`, as many as `concurrency` at once (at least one), until the claimer is
    /// closed. Each handler is a task of the current runtime.
    ///
    /// `Ok` settles the claim as done. An error settles it as failed or has it tried again, as
    /// [`on_failure`](super::ClaimerBuilder::on_failure) says, with the error's text as the message. A handler
    /// that panics, or that is dropped, returns the claim to where it can be taken, and the attempt counts.
    /// A handler whose claim is lost is dropped where it is. A handler that settles the claim itself has done
    /// so, whatever it answers.
    ///
    /// Errors of settling go to [`on_error`](super::ClaimerBuilder::on_error).
    ///
    /// # Cancel safety
    ///
    /// A dropped call drops the handlers that are running, whose claims are returned.
    pub async fn run<H, F, E>(&self, concurrency: usize, handler: H)
    where
        H: Fn(Arc<Claim>) -> F,
        F: Future<Output = Result<(), E>> + Send + 'static,
        E: Display + Send + 'static,
    {
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
            let claim = Arc::new(claim);
            let on_failure = self.shared.config.on_failure;
            let work = work(Arc::clone(&claim), AssertUnwindSafe(handler(claim)), on_failure);
            let shared = Arc::clone(&self.shared);
            running.spawn(async move {
                if let Err(error) = work.await {
                    shared.report(&error);
                }
            });
        }
        while running.join_next().await.is_some() {}
    }
}

async fn work<F, E>(
    claim: Arc<Claim>,
    handler: AssertUnwindSafe<F>,
    on_failure: OnFailure,
) -> Result<(), ClaimError>
where
    F: Future<Output = Result<(), E>> + Send + 'static,
    E: Display + Send,
{
    let answer = tokio::select! {
        biased;
        answer = handler.catch_unwind() => answer,
        reason = claim.lost() => {
            tracing::warn!(?claim, %reason, "the claim was lost, its handler is dropped");
            return Ok(());
        }
    };
    let outcome = match answer {
        Ok(Ok(())) => Outcome::Done,
        Ok(Err(error)) => match on_failure {
            OnFailure::Fail => Outcome::Failed(error.to_string()),
            OnFailure::Retry(after) => Outcome::Retry { error: Some(error.to_string()), after },
        },
        Err(panic) => {
            let error = Some(format!("the handler panicked: {}", message(&*panic)));
            Outcome::Retry { error, after: Duration::ZERO }
        }
    };
    match claim.settle_shared(outcome).await {
        Some(settled) => settled.map(drop),
        None => Ok(()),
    }
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}
