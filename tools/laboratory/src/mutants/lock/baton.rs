//! Hand-over: one hold of the store that several local grants have in turn.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use leasehold_api::{FencingToken, HolderId, LossReason};
use leasehold_engine::{HoldRef, Request};
use tokio::time::Instant;

use super::super::backend::HAND_OVER;
use super::client::{SmallClient, lock};
use super::fault::LockFault as Fault;
use super::grant::{Hold, Phase};
use super::permits::Permit;

/// A grant of the store, and the local grants that continue it.
pub(super) struct Tenure {
    pub(super) holder: HolderId,
    /// The token of the store's grant, and the last token that the store reserved for it.
    pub(super) token: u64,
    last: u64,
    /// When the request of the store's grant was sent.
    sent: Instant,
    request: Request,
    awaited: AtomicBool,
    /// The local grants so far, for [`Fault::LostToldToTheEarlierGuard`].
    earlier: Mutex<Vec<Weak<Hold>>>,
}

/// A hold of the store on its way from one local grant to the next. Its drop releases the hold at the store.
pub(super) struct Baton {
    client: Arc<SmallClient>,
    pub(super) tenure: Arc<Tenure>,
    /// The token of the local grant before.
    pub(super) token: u64,
    pub(super) lease: Lease,
    /// End of the maximum hold of the grant before, for [`Fault::MaxHoldPassedOn`].
    pub(super) ends: Option<Instant>,
    armed: bool,
}

/// The lease of a hold as the client knows it.
#[derive(Clone, Copy)]
pub(super) struct Lease {
    pub(super) ttl: Duration,
    /// Longest lease sent to the store so far, whether or not the store answered.
    pub(super) longest: Duration,
    /// When the last request that the store confirmed was sent.
    pub(super) confirmed: Instant,
    pub(super) deadline: Instant,
    pub(super) doubt: Instant,
    /// Whether a renewal for a shorter lease was sent, and not answered.
    pub(super) unsettled: bool,
}

impl Tenure {
    pub(super) fn new(request: &Request, token: u64, reserved: u64, sent: Instant) -> Arc<Self> {
        Arc::new(Self {
            holder: request.holder,
            token,
            last: token + reserved,
            sent,
            request: request.clone(),
            awaited: AtomicBool::new(false),
            earlier: Mutex::default(),
        })
    }

    /// Records that another client waits for the key.
    pub(super) fn note_awaited(&self) {
        self.awaited.store(true, Ordering::Release);
    }

    /// Returns whether another local grant may continue this tenure after one with `token`.
    fn goes_on(&self, client: &SmallClient, token: u64) -> bool {
        let fault = client.fault;
        let lasts = match fault {
            Fault::HandsOverWhenOff => HAND_OVER,
            Fault::NeverHandsOver => Duration::ZERO,
            _ => client.capabilities.handover_for,
        };
        let in_time = self.sent.elapsed() < lasts || fault == Fault::ChainNeverEnds;
        let alone = !self.awaited.load(Ordering::Acquire) || fault == Fault::ChainIgnoresRemote;
        let reserved = token < self.last || fault == Fault::TokenBeyondBlock;
        let cools = self.request.cooldown.is_some() && fault != Fault::HandedOverWithCooldown;
        in_time && alone && reserved && !cools
    }

    /// Tells the earlier grants of a loss, for [`Fault::LostToldToTheEarlierGuard`].
    pub(super) fn tell_earlier(&self, reason: LossReason) {
        for hold in lock(&self.earlier).iter().filter_map(Weak::upgrade) {
            lock(&hold.life).phase = Phase::Lost(reason);
        }
    }

    fn reference(&self, lease: &Lease) -> HoldRef {
        let mut reference = self.request.hold();
        reference.ttl = Some(lease.longest);
        reference.token = Some(FencingToken::from_u64(self.token));
        reference
    }
}

impl Lease {
    pub(super) fn begin(sent: Instant, ttl: Duration) -> Self {
        Self { ttl, longest: ttl, confirmed: sent, deadline: sent, doubt: sent, unsettled: false }
    }

    /// Counts the lease from a confirmed request that was sent at `sent`.
    pub(super) fn confirm(&mut self, fault: Fault, sent: Instant, ttl: Duration) {
        let far = Duration::from_secs(1 << 30);
        let margin = if fault == Fault::NoMargin { Duration::ZERO } else { ttl / 10 };
        (self.ttl, self.confirmed, self.unsettled) = (ttl, sent, false);
        self.deadline = sent + (ttl - margin).min(far);
        self.doubt = match fault {
            Fault::NoDoubt => self.deadline,
            _ => sent + (ttl * 2 / 3).min(far),
        };
    }
}

/// Returns whether `request` can get the hold of `baton`.
pub(super) fn fits(fault: Fault, baton: &Baton, request: &Request) -> bool {
    let ttl = request.ttl == Some(baton.lease.ttl) || fault == Fault::HandedOverToAnotherTtl;
    let label = request.label == baton.tenure.request.label || fault == Fault::HandedOverToAnotherLabel;
    let plain = request.cooldown.is_none() || fault == Fault::HandedOverToACooldown;
    ttl && label && plain
}

impl Hold {
    /// Ends the hold, and passes it to the next local caller if there is one. Otherwise returns the permit for a
    /// release at the store.
    pub(super) fn end_or_hand_over(self: &Arc<Self>) -> Option<super::grant::Released> {
        let doubtful = Instant::now() >= lock(&self.life).lease.doubt;
        let permit = match self.end() {
            Ok(Some(permit)) => permit,
            other => return Some(other),
        };
        if doubtful || !self.may_hand_over() {
            return Some(Ok(Some(permit)));
        }
        lock(&self.tenure.earlier).push(Arc::downgrade(self));
        match permit.hand_over(self.baton()) {
            Ok(()) => None,
            Err((permit, baton)) => {
                baton.forget();
                Some(Ok(Some(permit)))
            }
        }
    }

    fn may_hand_over(&self) -> bool {
        let fault = self.client.fault;
        let fenced = self.extended.load(Ordering::Acquire) && fault != Fault::HandedOverUnderAFence;
        let unsettled = lock(&self.life).lease.unsettled && fault != Fault::ShorterTtlForgotten;
        let renews = self.renewing.try_lock().is_err();
        let closing = *self.client.closing.borrow();
        !fenced && !unsettled && !renews && !closing && self.tenure.goes_on(&self.client, self.token())
    }

    /// Returns the hold for the next local caller.
    pub(super) fn baton(&self) -> Box<Baton> {
        let fault = self.client.fault;
        let mut lease = lock(&self.life).lease;
        match fault {
            Fault::DeadlineBeginsAnew | Fault::HandedOverWhenExpired => {
                lease.confirm(fault, Instant::now(), lease.ttl);
            }
            Fault::ShorterTtlForgotten => lease.confirm(fault, lease.confirmed, lease.ttl),
            _ => {}
        }
        let (client, tenure) = (Arc::clone(&self.client), Arc::clone(&self.tenure));
        Box::new(Baton { client, tenure, token: self.token(), lease, ends: self.ends, armed: true })
    }
}

impl Baton {
    /// Returns whether the hold is not in doubt.
    pub(super) fn is_valid(&self) -> bool {
        Instant::now() < self.lease.doubt
    }

    /// Ends the baton. The hold stays in the store.
    pub(super) fn forget(mut self) {
        self.armed = false;
    }

    /// Ends the baton. Returns the hold as the store knows it, which the caller releases.
    pub(super) fn into_reference(mut self) -> HoldRef {
        self.armed = false;
        self.tenure.reference(&self.lease)
    }

    /// Releases the hold at the store, then passes `permit` on.
    pub(super) fn release(self, permit: Option<Permit>) {
        let client = Arc::clone(&self.client);
        let reference = self.into_reference();
        client.begin_undo(&reference);
        let handle = client.handle.clone();
        handle.spawn(async move {
            client.undo(reference).await;
            drop(permit);
        });
    }
}

impl Drop for Baton {
    fn drop(&mut self) {
        if self.armed {
            self.armed = false;
            let (client, reference) = (Arc::clone(&self.client), self.tenure.reference(&self.lease));
            let handle = client.handle.clone();
            handle.spawn(async move { client.undo(reference).await });
        }
    }
}

impl fmt::Debug for Baton {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Baton").field("holder", &self.tenure.holder).field("token", &self.token).finish()
    }
}
