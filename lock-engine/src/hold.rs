//! One grant while it is out: its validity, its loss, its end.

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use leasehold_api::{
    Error, ErrorKind, FencingToken, Grant, LockGuard, LockKey, LossReason, LossSignal, Validity,
};

use crate::backend::{Granted, HoldRef, Request};
use crate::beat::Beat;
use crate::clock::Moment;
use crate::counters::Event;
use crate::shared::Shared;

/// What the engine knows of one grant, from before it asks for it.
///
/// A hold begins with the key's turn. It is asking, then live, and ends released or lost; whoever ends
/// it has the turn to hand on, and nobody else.
pub(crate) struct Hold {
    pub(crate) shared: Arc<Shared>,
    pub(crate) request: Request,
    state: AtomicU8,
    /// The fencing token, or [`NO_TOKEN`].
    token: AtomicU64,
    pub(crate) extension: OnceLock<Box<dyn Any + Send + Sync>>,
    loss: OnceLock<Arc<LossSignal>>,
    /// What renews or confirms this hold; `None` when nothing can end it but a release.
    pub(crate) beat: Option<Box<Beat>>,
}

/// The turn of a hold that has ended. Dropping it hands the turn on.
#[derive(Debug)]
pub(crate) struct Turn {
    shared: Arc<Shared>,
    key: LockKey,
    armed: bool,
}

impl Turn {
    pub(crate) fn key(&self) -> &LockKey {
        &self.key
    }

    /// Leaves the turn to another hold that took this one's seat.
    pub(crate) fn keep(mut self) {
        self.armed = false;
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if self.armed {
            self.shared.queues.pass_on(&self.key);
        }
    }
}

/// No token of a store is as large.
const NO_TOKEN: u64 = u64::MAX;

pub(crate) const ASKING: u8 = 0;
pub(crate) const LIVE: u8 = 1;
const RELEASED: u8 = 2;
/// Lost states are this and the place of the reason in [`REASONS`].
const LOST: u8 = 3;
const REASONS: [LossReason; 6] = [
    LossReason::Expired,
    LossReason::ForcedRelease,
    LossReason::SessionLost,
    LossReason::Gone,
    LossReason::Closed,
    LossReason::RuntimeGone,
];

impl Hold {
    /// A hold that is about to be asked for: [`ASKING`], or [`LIVE`] ahead of a grant that comes at once.
    pub(crate) fn new(shared: &Arc<Shared>, request: Request, state: u8) -> Arc<Self> {
        Arc::new(Self {
            shared: Arc::clone(shared),
            beat: Beat::of(shared, request.ttl).map(Box::new),
            request,
            state: AtomicU8::new(state),
            token: AtomicU64::new(NO_TOKEN),
            extension: OnceLock::new(),
            loss: OnceLock::new(),
        })
    }

    /// The store has granted it, asked by what was sent at `sent`. `Err` when it was lost meanwhile: the
    /// engine was closed, or the store took it back.
    pub(crate) fn granted(self: Arc<Self>, granted: Granted, sent: Moment) -> Result<LockGuard, Error> {
        self.token.store(granted.token.map_or(NO_TOKEN, FencingToken::as_u64), Ordering::Release);
        if let Some(extension) = granted.extension {
            let _ = self.extension.set(extension);
        }
        let sent = granted.asked_at.unwrap_or(sent);
        if let Some(beat) = &self.beat {
            beat.confirmed(sent, beat.window(), &self.shared);
        }
        if let Err(state) = self.go_live() {
            // Whoever ended it did not know that it would be granted after all.
            self.shared.free_later(vec![self.reference()], Vec::new());
            return Err(match reason_of(state) {
                Some(LossReason::Closed | LossReason::RuntimeGone) | None => self.named(Error::closed()),
                Some(reason) => self.named(Error::lost(reason)),
            });
        }
        if let Some(beat) = &self.beat {
            if self.shared.clock.now() >= beat.deadline() {
                // Dropping the guard undoes the grant.
                drop(LockGuard::new(Arc::clone(&self) as Arc<dyn Grant>));
                return Err(self.named(Error::new(
                    ErrorKind::Unavailable,
                    "the store took longer to grant the lease than the lease lasts; use a longer TTL",
                )));
            }
            self.shared.beats.schedule(&self, sent.after(beat.interval(&self.shared)));
        }
        self.shared.tally.publish(Event::Granted);
        Ok(LockGuard::new(self))
    }

    /// The grant did not come at once: the hold is asking from here on, unless it has ended.
    pub(crate) fn still_asking(&self) {
        let _ = self.state.compare_exchange(LIVE, ASKING, Ordering::AcqRel, Ordering::Acquire);
    }

    fn go_live(&self) -> Result<(), u8> {
        match self.state.load(Ordering::Acquire) {
            LIVE => Ok(()),
            _ => self.state.compare_exchange(ASKING, LIVE, Ordering::AcqRel, Ordering::Acquire).map(drop),
        }
    }

    /// How the store knows this hold.
    pub(crate) fn reference(&self) -> HoldRef {
        HoldRef {
            key: self.request.key.clone(),
            holder: self.request.holder,
            mode: self.request.mode,
            token: self.drawn_token(),
            ttl: self.beat.as_ref().and_then(|beat| beat.ttl()),
        }
    }

    pub(crate) fn is_live(&self) -> bool {
        self.state.load(Ordering::Acquire) == LIVE
    }

    pub(crate) fn loss_reason(&self) -> Option<LossReason> {
        reason_of(self.state.load(Ordering::Acquire))
    }

    /// Computed from the clock at each look. A look that finds the deadline passed makes the loss final.
    pub(crate) fn look(&self) -> Validity {
        if self.loss_reason().is_some() {
            return Validity::Lost;
        }
        let Some(beat) = &self.beat else { return Validity::Valid };
        let now = self.shared.clock.now();
        if now >= beat.deadline() {
            self.lose(LossReason::Expired);
            return Validity::Lost;
        }
        if now >= beat.doubt() { Validity::InDoubt } else { Validity::Valid }
    }

    /// The grant is gone: tells everybody, hands on the turn, and has the store let go of what may be
    /// left of it. Final; does nothing to a hold that was released or lost before.
    pub(crate) fn lose(&self, reason: LossReason) {
        let Some(turn) = self.end_lost(reason) else { return };
        // The store may still have it, for instance when only the answer to a renewal was lost.
        if !matches!(reason, LossReason::ForcedRelease | LossReason::SessionLost | LossReason::Gone) {
            self.shared.free_later(vec![self.reference()], vec![turn]);
        }
    }

    /// The part of [`lose`](Self::lose) that concerns the holder alone: `Some` if the hold had not ended.
    pub(crate) fn end_lost(&self, reason: LossReason) -> Option<Turn> {
        let place = REASONS.iter().position(|r| *r == reason).unwrap_or(0);
        let (turn, before) = self.end(LOST + u8::try_from(place).unwrap_or(0)).ok()?;
        if before == LIVE {
            self.shared.beats.forget(self);
            self.shared.tally.count(Event::Lost);
            self.shared.tally.count(Event::EndedOtherwise);
            tracing::warn!(key = %self.request.key, holder = %self.request.holder, token = ?self.drawn_token(), store = %self.shared.name, %reason, "lock lost");
            if let Some(signal) = self.loss.get() {
                signal.fire(reason);
            }
        }
        Some(turn)
    }

    /// Gives up what was asked for; `None` when it ended otherwise before. What the store may have of it
    /// is the caller's to undo.
    pub(crate) fn give_up(&self) -> Option<Turn> {
        self.end(RELEASED).ok().map(|(turn, _)| turn)
    }

    /// Ends the hold for release. `Err` when it was lost; the store is told all the same.
    pub(crate) fn begin_release(&self) -> Result<(), Error> {
        if let Some(beat) = &self.beat {
            if self.shared.clock.now() >= beat.deadline() {
                self.lose(LossReason::Expired);
            }
        }
        match self.state.compare_exchange(LIVE, RELEASED, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                self.shared.beats.forget(self);
                Ok(())
            }
            Err(state) => Err(self.named(Error::lost(reason_of(state).unwrap_or(LossReason::Gone)))),
        }
    }

    /// Moves to a final state: the turn, and the state before; `Err` when it was final already.
    fn end(&self, state: u8) -> Result<(Turn, u8), ()> {
        for before in [LIVE, ASKING, LIVE] {
            if self.state.compare_exchange(before, state, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                return Ok((self.turn(), before));
            }
        }
        Err(())
    }

    /// The turn, for whoever ended the hold, once.
    pub(crate) fn turn(&self) -> Turn {
        Turn { shared: Arc::clone(&self.shared), key: self.request.key.clone(), armed: true }
    }

    pub(crate) fn drawn_token(&self) -> Option<FencingToken> {
        let token = self.token.load(Ordering::Acquire);
        (token != NO_TOKEN).then(|| FencingToken::from_u64(token))
    }

    pub(crate) fn signal(&self) -> &Arc<LossSignal> {
        let signal = self.loss.get_or_init(LossSignal::new);
        // A loss that came before the signal was made did not find it.
        if let Some(reason) = self.loss_reason() {
            signal.fire(reason);
        }
        signal
    }

    pub(crate) fn named(&self, error: Error) -> Error {
        self.shared.name_error(error, Some(&self.request.key))
    }
}

fn reason_of(state: u8) -> Option<LossReason> {
    REASONS.get(usize::from(state.checked_sub(LOST)?)).copied()
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hold")
            .field("key", &self.request.key)
            .field("holder", &self.request.holder)
            .field("token", &self.drawn_token())
            .field("lost", &self.loss_reason())
            .finish_non_exhaustive()
    }
}
