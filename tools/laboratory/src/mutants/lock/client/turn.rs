//! The turn of a caller among the callers of its client.

use leasehold_api::{AcquireOptions, LockKey, OnCooldown};
use tokio::time::{Instant, timeout};

use super::super::fault::LockFault as Fault;
use super::super::outage::no_answer;
use super::super::permits::{Permit, Waiter};
use super::{AcquireFailure, CALL, SmallClient};
use leasehold_conformance::Op;

impl SmallClient {
    /// Waits for the permit of the key behind other callers of this client.
    pub(super) async fn permit(
        &self,
        key: &LockKey,
        options: &AcquireOptions,
        end: Option<Instant>,
        once: bool,
        waiter: Waiter,
    ) -> Result<Permit, AcquireFailure> {
        if options.on_cooldown == OnCooldown::NotDue && self.fault != Fault::NotDueQueues {
            // A budget of zero covers one answer of the store.
            self.bounded(key, end.filter(|_| !once), self.check_due(key)).await??;
        }
        let hears = self.fault != Fault::OutageIsContended;
        if !once {
            let failed = async {
                match options.give_up_on_failure && hears {
                    true => self.outages.begun(key).await,
                    false => std::future::pending().await,
                }
            };
            let permit = async {
                tokio::select! {
                    permit = waiter.permit() => permit.ok_or(AcquireFailure::Contended),
                    error = failed => Err(AcquireFailure::Failed(error)),
                    refusal = self.told(key, options) => Err(refusal),
                }
            };
            return self.bounded(key, end, permit).await?;
        }
        if let Some(error) = self.outages.of(key).filter(|_| hears) {
            return Err(AcquireFailure::Failed(error));
        }
        if !waiter.behind_release || self.fault == Fault::OwnReleaseIsContended {
            return Err(AcquireFailure::Contended);
        }
        // Only an unanswered release of this client is ahead, so only the store knows whether the key is free.
        match self.bounded(key, None, timeout(CALL, waiter.permit())).await? {
            Ok(permit) => permit.ok_or(AcquireFailure::Contended),
            Err(_) => Err(AcquireFailure::Failed(self.named(no_answer(), key))),
        }
    }

    /// Resolves when another caller of this client has started a cooldown that blocks this one. Never resolves if
    /// the caller waits for cooldowns.
    async fn told(&self, key: &LockKey, options: &AcquireOptions) -> AcquireFailure {
        let deaf = matches!(self.fault, Fault::NotDueQueues | Fault::NotDueHearsOfNoBegin);
        if deaf || options.on_cooldown != OnCooldown::NotDue {
            std::future::pending::<()>().await;
        }
        loop {
            self.windows.notified().await;
            if let Err(refusal) = self.check_due(key).await {
                return refusal;
            }
        }
    }

    /// Checks at the store that the key has no cooldown. Called for callers that do not wait for its end.
    async fn check_due(&self, key: &LockKey) -> Result<(), AcquireFailure> {
        let asked = self.connection.call(Op::Acquire, |server, requester| server.cooldown(requester, key));
        match timeout(CALL, asked).await {
            Ok(Ok(Some(_))) if self.fault == Fault::NotDueIsTimeout => Err(AcquireFailure::Contended),
            Ok(Ok(Some(retry_after))) if self.fault != Fault::NotDueWaits => {
                Err(AcquireFailure::NotDue(retry_after))
            }
            Ok(Ok(_)) => Ok(()),
            Ok(Err(kind)) => Err(AcquireFailure::Failed(self.named(self.store_error(kind), key))),
            Err(_) => Err(AcquireFailure::Failed(self.named(no_answer(), key))),
        }
    }

    /// Waits for the permits of all keys before it requests any key, for [`Fault::BatonKeptForTwoKeys`].
    pub(in super::super) async fn permits_of(
        &self,
        keys: &[&LockKey],
        options: &AcquireOptions,
    ) -> Result<Vec<Permit>, AcquireFailure> {
        let mut permits = Vec::new();
        for key in keys {
            let request = self.request(key, options).map_err(AcquireFailure::Failed)?;
            permits.push(match self.permits.enter(&request) {
                Ok(permit) => permit,
                Err(waiter) => self.permit(key, options, self.deadline(options.wait), false, waiter).await?,
            });
        }
        Ok(permits)
    }
}
