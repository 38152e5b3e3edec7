//! The server's state of one key.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, SystemTime};

use leasehold_api::{FencingToken, HoldInfo, HoldState, HolderId, KeyInfo, LockKey};
use leasehold_engine::{Attempt, Contended, Request};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::super::backend::fault::BackendFault as Fault;
use super::Requester;

/// Time by which leases and cooldowns end late under [`Fault::EndsLate`].
pub(crate) const LATE_BY: Duration = Duration::from_secs(1);

/// Longest cooldown, because later instants might overflow.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 86_400);

/// Time after its last attempt for which a poller counts as waiting, a little longer than its interval.
const WAITS_FOR: Duration = Duration::from_millis(400);

#[derive(Default)]
pub(super) struct Record {
    pub(super) hold: Option<StoredHold>,
    /// The key of the latest grant, before a fault changed its name.
    pub(super) key: Option<LockKey>,
    pub(super) not_before: Option<Instant>,
    pub(super) last_token: u64,
    pub(super) permits: u32,
    /// Latest refused attempt of each client. One entry is enough because a client makes one attempt at a time.
    pub(super) refused: BTreeMap<u64, RefusedAttempt>,
    pub(super) queue: VecDeque<QueuedRequest>,
    /// Holders whose release was answered. A later copy of their requests is refused.
    pub(super) released: BTreeSet<HolderId>,
    /// Next holder in the queue after the latest grant from it, for [`Fault::QueueTellsTheNextAlone`].
    pub(super) told: Option<HolderId>,
    /// Whether the key was held at its latest inspection under [`Fault::LookCountsAsWaiting`], or at its latest try
    /// under [`Fault::TryCountsAsWaiting`].
    pub(super) looked_at: bool,
    /// The holder of the last request to release the key.
    pub(super) asked: Option<HolderId>,
    /// Number of open transactions that fence a grant of the key.
    pub(super) fences: u32,
}

/// A refused attempt and its retries.
pub(super) struct RefusedAttempt {
    holder: HolderId,
    times: u32,
    first: Instant,
    last: Instant,
}

pub(super) struct StoredHold {
    pub(super) key: LockKey,
    pub(super) holder: HolderId,
    pub(super) client: u64,
    pub(super) token: u64,
    pub(super) ends: Option<Instant>,
    pub(super) since: SystemTime,
    pub(super) request: Request,
    pub(super) given_out: bool,
}

/// A waiter in the store's queue.
pub(super) struct QueuedRequest {
    pub(super) requester: Requester,
    pub(super) request: Request,
    pub(super) reply: oneshot::Sender<Attempt>,
}

impl Record {
    /// Returns why the key cannot be granted now. `None` if it can.
    pub(super) fn hindrance(&mut self, fault: Fault, requester: Requester) -> Option<Contended> {
        let mut held = Contended::new();
        held.cooling_for = self.cooldown(requester.now);
        if let Some(stored) = self.hold.as_ref().filter(|h| h.is_live(fault, requester.now)) {
            if fault == Fault::ReleaseAddsPermit && self.permits > 0 {
                self.permits -= 1;
                return None;
            }
            if stored.request.ttl.is_some() && fault != Fault::NoPollAtExpiry && fault != Fault::NoPollNoWake
            {
                held.retry_after = stored.ends.map(|at| at.saturating_duration_since(requester.now));
            }
            if fault == Fault::HeldHidesCooldown {
                held.cooling_for = None;
            }
            return Some(held);
        }
        held.retry_after = held.cooling_for;
        (held.cooling_for.is_some() || self.fences > 0).then_some(held)
    }

    /// Returns the rest of the cooldown.
    pub(super) fn cooldown(&self, now: Instant) -> Option<Duration> {
        self.not_before.filter(|at| *at > now).map(|at| at - now)
    }

    /// Returns whether another waiter comes before `request`: the first in the store's queue, or another client that
    /// has polled for longer.
    pub(super) fn is_awaited(&mut self, fault: Fault, requester: Requester, request: &Request) -> bool {
        let is_lapsed = self.hold.as_ref().is_none_or(|h| !h.is_live(fault, requester.now));
        let is_passed = fault == Fault::QueueIsPassedAtALapse && is_lapsed;
        if !is_passed && self.queue.front().is_some_and(|t| t.request.holder != request.holder) {
            return true;
        }
        if fault == Fault::TryCountsAsWaiting && !request.waits {
            self.looked_at = self.hold.is_some();
        }
        let hidden = match fault {
            Fault::HidesWaiters | Fault::FifoIsPolled => true,
            Fault::TryOvertakes => !request.waits,
            Fault::WindowOvertakes => request.cooldown.is_some(),
            _ => false,
        };
        if hidden {
            return false;
        }
        let now = requester.now;
        self.refused.retain(|_, asked| now.saturating_duration_since(asked.last) < WAITS_FOR);
        let own = self.refused.get(&requester.client).filter(|asked| asked.holder == request.holder);
        let own = own.map_or(now, |asked| asked.first);
        // Only a client that retries counts as waiting. Callers of one client are ordered by their permits.
        self.refused
            .iter()
            .any(|(client, asked)| *client != requester.client && asked.times > 1 && asked.first < own)
    }

    pub(super) fn refuse(&mut self, requester: Requester, holder: HolderId) {
        let fresh = || RefusedAttempt { holder, times: 0, first: requester.now, last: requester.now };
        let asked = self.refused.entry(requester.client).or_insert_with(fresh);
        if asked.holder != holder {
            *asked = fresh();
        }
        asked.times += 1;
        asked.last = requester.now;
    }

    pub(super) fn info(&self, key: &LockKey, fault: Fault, now: Instant, ended: bool) -> KeyInfo {
        let mut info = KeyInfo::free(self.hold.as_ref().map_or(key, |stored| &stored.key).clone());
        info.cooldown = self.cooldown(now);
        if let Some(stored) = self.hold.as_ref().filter(|h| ended || h.is_live(fault, now)) {
            let mut hold = HoldInfo::new();
            if !stored.is_live(fault, now) && fault != Fault::ListShowsExpired {
                hold.state = HoldState::Expired;
            }
            hold.holder = Some(stored.holder);
            hold.token = Some(FencingToken::from_u64(stored.token));
            hold.label.clone_from(&stored.request.label);
            hold.since = Some(stored.since);
            hold.expires_in = stored.ends.map(|at| at.saturating_duration_since(now));
            hold.owner = Some(format!("client {}", stored.client));
            hold.asked = match fault {
                Fault::AskIsNotShown => false,
                Fault::AskStaysWithKey => self.asked.is_some(),
                _ => self.asked == Some(stored.holder),
            };
            info.holders.push(hold);
        }
        info
    }
}

impl StoredHold {
    pub(super) fn new(fault: Fault, requester: Requester, request: &Request, token: u64) -> Self {
        Self {
            key: request.key.clone(),
            holder: request.holder,
            client: requester.client,
            token,
            ends: request.ttl.and_then(|ttl| ends(fault, requester.now, ttl)),
            since: SystemTime::now(),
            request: request.clone(),
            given_out: false,
        }
    }

    pub(super) fn is_live(&self, fault: Fault, now: Instant) -> bool {
        fault == Fault::NeverExpires || self.ends.is_none_or(|at| now < at)
    }
}

pub(super) fn ends(fault: Fault, now: Instant, ttl: Duration) -> Option<Instant> {
    now.checked_add(match fault {
        Fault::ExpiresAtHalf => ttl / 2,
        Fault::TtlInWholeSeconds => Duration::from_secs(ttl.as_secs()),
        Fault::EndsLate => ttl + LATE_BY,
        Fault::TtlRoundedUp => Duration::from_secs(ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0)),
        _ => ttl,
    })
}

/// Returns the end of a cooldown that begins now.
pub(super) fn cools(fault: Fault, now: Instant, cooldown: Duration) -> Option<Instant> {
    let late = matches!(fault, Fault::EndsLate | Fault::CooldownEndsLate);
    now.checked_add(cooldown.min(LONGEST) + if late { LATE_BY } else { Duration::ZERO })
}

/// Returns the lease that a renewal for `ttl` gives.
pub(super) fn renewed_for(fault: Fault, ttl: Duration) -> Duration {
    let whole = Duration::from_secs(ttl.as_secs());
    if fault == Fault::RenewInWholeSeconds && !whole.is_zero() { whole } else { ttl }
}

/// Returns the name under which the store keeps a key.
pub(super) fn name_of(fault: Fault, client: u64, text: &str) -> String {
    match fault {
        Fault::ExcludesPerClient if client != 0 => format!("{client}/{text}"),
        Fault::KeyColonsDropped => text.replace(':', ""),
        Fault::KeyLowerCased => text.to_lowercase(),
        Fault::KeyTrimmed => text.trim_end_matches([' ', '.']).to_owned(),
        Fault::KeyCut => text.chars().take(63).collect(),
        Fault::KeyNormalised => text.replace("e\u{301}", "é"),
        Fault::KeyHashed => {
            let hash = text.bytes().fold(0u8, |hash, b| hash.wrapping_mul(31).wrapping_add(b));
            hash.to_string()
        }
        _ => text.to_owned(),
    }
}
