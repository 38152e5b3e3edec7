//! What the holder of a guard can do with its hold.

use std::any::{Any, TypeId};
use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{
    BoxFuture, Error, ErrorKind, FencingToken, Grant, HolderId, LockKey, LossReason, Lost, Release, Validity,
};
use tokio::time::timeout;
use tokio_util::context::TokioContext;

use crate::backend::{Freed, Waiting, short_answer};
use crate::clock::{Moment, scaled};
use crate::counters::Event;
use crate::hold::Hold;

impl Grant for Hold {
    fn key(&self) -> &LockKey {
        &self.request.key
    }

    fn holder(&self) -> HolderId {
        self.request.holder
    }

    fn token(&self) -> Option<FencingToken> {
        self.drawn_token()
    }

    fn validity(&self) -> Validity {
        self.look()
    }

    fn remaining(&self) -> Option<Duration> {
        if self.look() == Validity::Lost {
            return Some(Duration::ZERO);
        }
        let beat = self.beat.as_ref()?;
        let deadline = beat.deadline();
        (deadline != Moment::NEVER).then(|| deadline.since(self.shared.clock.now()))
    }

    fn lost(&self) -> Lost {
        self.signal().subscribe()
    }

    fn extension(&self, id: TypeId) -> Option<&(dyn Any + Send + Sync)> {
        self.extension.get().map(|e| &**e).filter(|e| (*e).type_id() == id)
    }

    fn renew(&self, ttl: Option<Duration>) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(self.shared.renew(self, ttl))
    }

    fn release(self: Arc<Self>) -> Release {
        if let Err(error) = self.begin_release() {
            return Release::Done(Err(error));
        }
        match self.shared.backend.release_now(&self.request.key, self.request.holder) {
            Some(answer) => Release::Done(self.released(answer)),
            None => Release::pending(Releasing { hold: Some(self) }.run()),
        }
    }

    fn abandon(self: Arc<Self>) {
        if self.begin_release().is_err() {
            return;
        }
        match self.shared.backend.release_now(&self.request.key, self.request.holder) {
            // Nobody is there to be told; a failure is retried in the background.
            Some(answer) => drop(self.released(answer)),
            None => self.release_later(),
        }
    }
}

impl Hold {
    /// Settles the answer to a release, and hands on the turn.
    fn released(&self, answer: Result<Freed, Error>) -> Result<(), Error> {
        match answer {
            Ok(freed) => {
                let courtesy = match self.shared.timing.waiting {
                    // A poll is jittered by a quarter.
                    Waiting::Poll { every } => Some(scaled(every, 1.5)),
                    Waiting::Store => self.shared.timing.courtesy,
                };
                if let (true, Some(courtesy)) = (freed.waiters, courtesy) {
                    let now = self.shared.clock.now();
                    self.shared.courtesy.leave(&self.request.key, now, now.after(courtesy));
                }
                if !freed.was_held {
                    self.shared.queues.pass_on(&self.request.key);
                    self.shared.tally.count(Event::EndedOtherwise);
                    return Err(self.named(Error::lost(LossReason::Gone)));
                }
                self.shared.tally.publish(Event::Released);
                self.shared.queues.pass_on_released(&self.request.key);
                Ok(())
            }
            Err(error) => {
                self.shared.tally.count(Event::Failure);
                self.shared.tally.count(Event::EndedOtherwise);
                let error = self.named(error);
                tracing::debug!(key = %self.request.key, store = %self.shared.name, %error, "release failed; it is retried in the background");
                self.release_later();
                Err(error)
            }
        }
    }

    /// Leaves the release to the driver, which hands on the turn after its first try.
    fn release_later(&self) {
        self.shared.free_later(vec![self.reference()], vec![self.turn()]);
    }
}

/// A release that somebody waits for. Dropped before the store has answered, it leaves the rest to the
/// driver.
struct Releasing {
    /// `None` once the answer was settled.
    hold: Option<Arc<Hold>>,
}

impl Releasing {
    async fn run(mut self) -> Result<(), Error> {
        let Some(hold) = &self.hold else { return Ok(()) };
        let (backend, limit) = (Arc::clone(&hold.shared.backend), hold.shared.timing.call);
        let (reference, handle) = (hold.reference(), hold.shared.handle.clone());
        // The timer needs the engine's runtime; the caller may be polled by another executor.
        let call = async move { timeout(limit, backend.release(vec![reference])).await };
        let mut closed = hold.shared.closed.clone();
        let answered = tokio::select! {
            biased;
            // Without its driver the engine has no runtime to trust, and nothing to retry with.
            _ = closed.wait_for(Option::is_some) => None,
            answered = TokioContext::new(call, handle) => Some(answered),
        };
        let answer = match answered {
            None => Err(Error::new(
                ErrorKind::OutcomeUnknown,
                "the lock was closed, or its runtime ended, before the store answered the release",
            )),
            Some(Ok(mut answers)) => answers.pop().unwrap_or_else(|| Err(short_answer())),
            Some(Err(_)) => Err(Error::new(
                ErrorKind::OutcomeUnknown,
                format!(
                    "the store did not answer the release within {limit:?}; it is repeated in the background"
                ),
            )),
        };
        self.hold.take().map_or(Ok(()), |hold| hold.released(answer))
    }
}

impl Drop for Releasing {
    fn drop(&mut self) {
        if let Some(hold) = self.hold.take() {
            hold.release_later();
        }
    }
}
