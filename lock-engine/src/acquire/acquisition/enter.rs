//! The way to the store: the permits of the keys, and the time that is left to the waiters of other clients.

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, ErrorKind, LockKey, Mode, OnCooldown};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};

use super::Acquisition;
use crate::acquire::budget::{Budget, Limit, Refusal};
use crate::acquire::entry::Stage;
use crate::acquire::owner::{Owner, Permit};
use crate::acquire::queue::{EnterResult, QueuesClosed, Yield};
use crate::acquire::waiting::{Paused, failure_of, is_ending, mismatch, not_due, pause, permitted};
use crate::core::Core;
use crate::hold::Hold;
use crate::hold::tenure::Baton;

/// The time until the first query whether a waiter of another client was served.
const FIRST_LOOK: Duration = Duration::from_millis(1);

/// How a caller waits for a permit.
#[derive(Clone, Copy)]
struct Patience {
    budget: Budget,
    policy: OnCooldown,
    gives_up: bool,
    /// Whether the caller still needs only this key.
    is_last: bool,
}

impl Acquisition {
    /// Waits until the store can be called for the remaining keys, or the next one of them, or until a taken key is lost.
    pub(super) async fn enter(&mut self) -> Result<(), Refusal> {
        let any_lost = self.any_lost();
        let entering = async {
            self.queue().await?;
            self.yield_to_remote().await
        };
        tokio::select! {
            biased;
            outcome = entering => outcome,
            error = any_lost => Err(error.into()),
        }
    }

    /// Waits for this client's permit of each key, in order, or of the next one alone. The permit can come with the store's
    /// hold.
    async fn queue(&mut self) -> Result<(), Refusal> {
        let core = Arc::clone(&self.core);
        let (budget, policy, gives_up) = (self.budget, self.policy, self.gives_up);
        let left = self.first_untaken();
        for at in left..self.end_of_permits(left) {
            if self.entries[at].permit.is_some() {
                continue;
            }
            let is_last = at == left && at + 1 == self.entries.len();
            let hold = Arc::clone(&self.entries[at].hold);
            let mut permit = permit_for(&core, &hold, Patience { budget, policy, gives_up, is_last }).await?;
            let baton = permit.take_baton();
            self.entries[at].permit = Some(permit);
            match baton {
                Some(baton) => self.take_over(at, baton)?,
                None => self.share(at),
            }
        }
        Ok(())
    }

    /// Makes a guard of the hold that was passed on with the permit of the entry at `at`.
    fn take_over(&mut self, at: usize, baton: Baton) -> Result<(), Refusal> {
        let entry = &mut self.entries[at];
        match entry.permit.take() {
            Some(permit) if baton.is_in_time(self.core.clock.now()) => {
                baton.keep();
                entry.stage = Stage::Taken(Arc::clone(&entry.hold).taken_over(permit)?);
            }
            // The caller was polled too late, and calls the store. It can run into its own hold there, which is being
            // released.
            permit => {
                entry.permit = permit;
                drop(self.replace_hold(at));
                drop(baton);
            }
        }
        Ok(())
    }

    /// Makes a guard of the entry at `at` if other readers of this client share their hold of the store with it, and passes
    /// the permit on.
    fn share(&mut self, at: usize) {
        let entry = &mut self.entries[at];
        if let Some(guard) = entry.hold.share(true) {
            entry.stage = Stage::Taken(guard);
            drop(entry.permit.take());
        } else if entry.hold.place().is_some() {
            // The hold has joined the others and was lost with them, so the caller calls the store.
            drop(self.replace_hold(at));
        }
    }

    /// Leaves keys that were just released here to the waiters of other clients for a while, or until one was served.
    async fn yield_to_remote(&mut self) -> Result<(), Refusal> {
        if self.adopts.is_some() {
            return Ok(());
        }
        let core = Arc::clone(&self.core);
        let begun = Instant::now();
        let budget = match self.budget {
            // Half of the budget stays for at least one attempt at the store.
            Budget::Until(end) => end.saturating_duration_since(begun) / 2,
            // A try waits for the whole yield: the reply *contended* would not be true, and tries in a loop
            // would starve other clients.
            Budget::Once | Budget::Forever => Duration::MAX,
        };
        while let Some((key, yields)) = self.longest_yield() {
            let longest = budget.saturating_sub(begun.elapsed());
            if longest.is_zero() {
                break;
            }
            let limit = self.budget.of_wait();
            match Box::pin(leave(&core, &key, yields, longest, limit)).await? {
                Paused::Over => {}
                Paused::OutOfBudget => return Err(self.out_of_budget()),
            }
        }
        Ok(())
    }

    /// Returns the remaining key with the longest yield, and that yield.
    fn longest_yield(&self) -> Option<(LockKey, Yield)> {
        let core = &self.core;
        let keys = self.entries[self.first_untaken()..].iter().map(|entry| entry.hold.key());
        let yields = keys.filter_map(|key| Some((key, core.queues.yields(key, || core.clock.now())?)));
        yields.max_by_key(|(_, yields)| yields.until).map(|(key, yields)| (key.clone(), yields))
    }
}

/// Waits for this client's permit of the key of `hold`.
async fn permit_for(core: &Core, hold: &Arc<Hold>, patience: Patience) -> Result<Permit, Refusal> {
    let Patience { budget, policy, gives_up, is_last } = patience;
    let (key, mode, is_try) = (hold.key(), hold.mode(), budget == Budget::Once);
    let closed = |QueuesClosed| core.name_error(Error::closed(), Some(key));
    // Even a try waits for the release of the previous local hold, because only the store's reply shows whether the key
    // is held. A shared try also waits for the reply to an attempt that can be granted beside it.
    let should_wait = |owner: &Owner, waiters| !is_try || (waiters == 0 && owner.is_soon_past(mode));
    let contended = || {
        let error = mismatch(core, key, mode).or_else(|| failure_of(core, key));
        error.map_or_else(|| Refusal::Contended(Some(key.clone())), Refusal::Failed)
    };
    let owner = Owner::new(hold).takes_over(is_last).once(is_try);
    let waiter = match core.queues.enter_if(key, owner, should_wait).map_err(closed)? {
        None => return Err(contended()),
        Some(EnterResult::Permit(permit)) => return Ok(permit),
        Some(EnterResult::Waiter(waiter)) => waiter,
    };
    let limit = match budget {
        Budget::Once => budget.of_call(core.timing.request_timeout),
        _ => budget.of_wait(),
    };
    let leaves = || {
        let failure = || gives_up.then(|| failure_of(core, key)).flatten();
        let error = not_due(core, key, policy).or_else(failure).or_else(|| mismatch(core, key, mode));
        let is_contended = || is_try && mode != Mode::Exclusive && has_to_wait(core, key, mode);
        error.map(Refusal::Failed).or_else(|| is_contended().then(contended))
    };
    tokio::select! {
        biased;
        permit = permitted(core, waiter, key, leaves) => permit,
        () = limit.passed() => {
            // Reports `Unavailable`, because this client's own unconfirmed release blocks the key, not another holder.
            if is_ending(core, key) == Some(true) || matches!(limit, Limit::Call(_)) {
                let message = "the store has not answered yet whether the hold of this key that was released here before is gone";
                let error = Error::new(ErrorKind::Unavailable, message);
                return Err(core.name_error(error, Some(key)).into());
            }
            Err(contended())
        }
    }
}

/// Returns whether a queued try in `mode` would wait for a holder, and not only for a reply of the store.
fn has_to_wait(core: &Core, key: &LockKey, mode: Mode) -> bool {
    let is_soon_past = core.queues.with(key, |owner| owner.is_soon_past(mode));
    is_soon_past == Some(false) || core.queues.is_excluded(key, mode)
}

/// Leaves `key` to other clients, for at most `longest`, until one was served or the yield ends.
async fn leave(
    core: &Core,
    key: &LockKey,
    yields: Yield,
    longest: Duration,
    limit: Limit,
) -> Result<Paused, Refusal> {
    let begun = Instant::now();
    let whole = yields.until.since(core.clock.now());
    let longest = whole.min(longest);
    // Queries the store soon, because a notified waiter is served at once, then more and more rarely, because other
    // waiters poll.
    let mut next = FIRST_LOOK;
    loop {
        let left = longest.saturating_sub(begun.elapsed());
        if let Paused::OutOfBudget = pause(core, key, &Notify::new(), left.min(next), limit).await? {
            return Ok(Paused::OutOfBudget);
        }
        let left = longest.saturating_sub(begun.elapsed());
        if left.is_zero() {
            if longest == whole {
                core.queues.end_yield(key, yields);
            }
            return Ok(Paused::Over);
        }
        let Some(after) = yields.after else {
            next = Duration::MAX;
            continue;
        };
        let served = tokio::select! {
            biased;
            () = core.closing.cancelled() => return Err(core.name_error(Error::closed(), Some(key)).into()),
            () = limit.passed() => return Ok(Paused::OutOfBudget),
            served = timeout(left, core.backend.was_served(key, after)) => served,
        };
        match served {
            Ok(Some(true)) => {
                core.queues.end_yield(key, yields);
                return Ok(Paused::Over);
            }
            Ok(Some(false)) | Err(_) => next = next.saturating_mul(2),
            Ok(None) => next = Duration::MAX,
        }
    }
}
