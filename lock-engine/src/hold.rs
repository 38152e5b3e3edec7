//! One grant while it is out: its validity, its loss, its end.

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering, fence};
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
/// A hold begins with the key's turn. It is asking, then live, and ends released or lost. While it is
/// asking the turn belongs to whoever asks; once it is live, to whoever ends it, and nobody else.
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
/// Added to a lost state when the hold was still asking: the turn stays with whoever asks.
const ASKED: u8 = 16;
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
            let turn = self.turn_of_asker(state);
            self.shared.free_later(vec![self.reference()], turn.into_iter().collect());
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

    /// The grant did not come at once: the hold is asking from here on. Whether it had not ended before.
    pub(crate) fn still_asking(&self) -> bool {
        self.state.compare_exchange(LIVE, ASKING, Ordering::AcqRel, Ordering::Acquire).is_ok()
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

    /// Whether the store is being asked for it, also if it has been closed meanwhile.
    pub(crate) fn is_asking(&self) -> bool {
        let state = self.state.load(Ordering::Acquire);
        state == ASKING || state & ASKED != 0
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
        // Handed on at once: the next in line is told by the store whether it still has the old hold.
        if self.end_lost(reason).is_none() {
            return;
        }
        // The store may still have it, for instance when only the answer to a renewal was lost.
        let ended = matches!(reason, LossReason::ForcedRelease | LossReason::SessionLost | LossReason::Gone);
        let stays = reason == LossReason::Expired && self.shared.timing.confirm.is_some_and(|c| c.stays);
        if !ended && !stays {
            self.shared.free_later(vec![self.reference()], Vec::new());
        }
    }

    /// The part of [`lose`](Self::lose) that concerns the holder alone: the turn, if the hold was live.
    /// One that was asking keeps its turn until whoever asks has undone what it asked for.
    pub(crate) fn end_lost(&self, reason: LossReason) -> Option<Turn> {
        let place = REASONS.iter().position(|r| *r == reason).unwrap_or(0);
        let lost = LOST + u8::try_from(place).unwrap_or(0);
        let mut before = self.state.load(Ordering::Acquire);
        loop {
            let after = match before {
                LIVE => lost,
                ASKING => lost | ASKED,
                _ => return None,
            };
            match self.state.compare_exchange(before, after, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) if before == LIVE => break,
                Ok(_) => return None,
                Err(now) => before = now,
            }
        }
        // Pairs with the one in `signal`: either it sees the state, or we see the signal.
        fence(Ordering::SeqCst);
        self.shared.beats.forget(self);
        self.shared.tally.count(Event::Lost);
        self.shared.tally.count(Event::EndedOtherwise);
        tracing::warn!(key = %self.request.key, holder = %self.request.holder, token = ?self.drawn_token(), store = %self.shared.name, %reason, "lock lost");
        if let Some(signal) = self.loss.get() {
            signal.fire(reason);
        }
        Some(self.turn())
    }

    /// Gives up what was asked for: the turn, unless a loss took it. What the store may have of it is the
    /// caller's to undo.
    pub(crate) fn give_up(&self) -> Option<Turn> {
        let mut before = self.state.load(Ordering::Acquire);
        while matches!(before, LIVE | ASKING) {
            match self.state.compare_exchange(before, RELEASED, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(self.turn()),
                Err(now) => before = now,
            }
        }
        self.turn_of_asker(before)
    }

    /// The turn of a hold that was lost while it was asking.
    fn turn_of_asker(&self, state: u8) -> Option<Turn> {
        (state & ASKED != 0).then(|| self.turn())
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
        fence(Ordering::SeqCst);
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
    REASONS.get(usize::from((state & !ASKED).checked_sub(LOST)?)).copied()
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
