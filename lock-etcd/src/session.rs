//! Sessions: one lease for all entries of a client with the same TTL in whole seconds.
//!
//! Each session has a key under its lease. Every grant compares the revision of that key, the *guard*. A release whose
//! request can still arrive writes the key, so the late copy compares an old guard and is refused.

mod flight;
mod keeper;
mod open;
mod proof;

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use leasehold_engine::Moment;

use crate::wire::{Compare, KeyValue, Target};

use flight::Flight;
pub(crate) use proof::Proof;

/// The most entries of one session. A cluster revokes the lease of a dead client in one step, which delays all other
/// requests by about 60 ms for this many entries.
const MOST_ENTRIES: usize = 5_000;

/// The age of a listing after which the next one is due, while the last one had entries that this client does not know.
const STRANGE_FOR: Duration = Duration::from_secs(1);

/// One lease of this client.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) lease: i64,
    pub(crate) key: Vec<u8>,
    /// The TTL of its requests, in seconds.
    pub(crate) seconds: u64,
    /// The TTL that the server granted, in whole seconds. It is longer than `seconds` if the server has a longer shortest
    /// TTL.
    pub(crate) ttl: Duration,
    /// The greatest revision at which this client knows that the session's key was written.
    guard: AtomicI64,
    /// The time at which the last keep-alive was sent of which a proof shows that it extended the lease.
    confirmed: AtomicU64,
    /// The time at which the last keep-alive was sent.
    kept: AtomicU64,
    /// The last keep-alive that got a reply.
    answered: Mutex<Option<KeptAlive>>,
    /// Whether the lease has ended, or must not be used for another reason.
    ended: AtomicBool,
    /// Whether the session's key was deleted, because a full server refused to write it. No later request is granted
    /// under this session. Its entries stay.
    sealed: AtomicBool,
    /// The number of requests and holds of this client with this session.
    pub(crate) entries: AtomicUsize,
    proving: tokio::sync::Mutex<()>,
    /// The proofs of renewals, which extend the lease.
    renewals: Flight<Proof>,
    /// The proofs of looks.
    looks: Flight<Proof>,
    /// The time at which the last listing of its entries was sent that got a reply.
    listed: AtomicU64,
    /// Entries that the last proof found under the lease and that this client does not know.
    strange: Mutex<HashSet<Vec<u8>>>,
}

/// A keep-alive that got a reply. It has extended the lease if a linearizable read that was sent later is served in the
/// same raft term, because a replaced leader still replies to keep-alives until it notices that.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeptAlive {
    sent: Moment,
    term: u64,
}

impl Session {
    fn new(lease: i64, key: Vec<u8>, (seconds, ttl): (u64, Duration), guard: i64, granted: Moment) -> Self {
        Self {
            lease,
            key,
            seconds,
            ttl,
            guard: AtomicI64::new(guard),
            confirmed: AtomicU64::new(granted.as_nanos()),
            kept: AtomicU64::new(granted.as_nanos()),
            answered: Mutex::default(),
            ended: AtomicBool::new(false),
            sealed: AtomicBool::new(false),
            entries: AtomicUsize::new(0),
            proving: tokio::sync::Mutex::default(),
            renewals: Flight::new(),
            looks: Flight::new(),
            // A new lease has no entries.
            listed: AtomicU64::new(granted.as_nanos()),
            strange: Mutex::default(),
        }
    }

    #[cfg(test)]
    pub(crate) fn for_tests(lease: i64, ttl: Duration, guard: i64) -> Self {
        let key = format!("p/s/{lease}").into_bytes();
        Self::new(lease, key, (whole_seconds(ttl), ttl), guard, Moment::from_nanos(0))
    }

    pub(crate) fn guard(&self) -> i64 {
        self.guard.load(Ordering::Acquire)
    }

    /// Returns the condition that the guard is still `guard`.
    pub(crate) fn compare(&self, guard: i64) -> Compare {
        Compare::is(self.key.clone(), Target::Mod(guard))
    }

    /// Learns the guard from a write of the session's key.
    pub(crate) fn learn_guard(&self, revision: i64) {
        self.guard.fetch_max(revision, Ordering::AcqRel);
    }

    /// Learns from a read of the session's key, in the reply to a request with the guard `used`. A key that does not exist, or
    /// that was written earlier than `used`, ends the session: its lease is over, or a backup was restored.
    pub(crate) fn learn(&self, read: Option<&KeyValue>, used: i64) {
        match read {
            Some(kv) if kv.lease == self.lease && kv.mod_revision >= used => {
                self.learn_guard(kv.mod_revision);
            }
            _ if self.is_sealed() => {}
            _ => self.end(),
        }
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Release);
    }

    pub(crate) fn is_sealed(&self) -> bool {
        self.sealed.load(Ordering::Acquire)
    }

    pub(crate) fn seal(&self) {
        self.sealed.store(true, Ordering::Release);
    }

    /// Returns whether a new request can use the session.
    pub(crate) fn is_usable(&self) -> bool {
        !self.has_ended() && !self.is_sealed()
    }

    /// Returns the time from which the lease lasts for its TTL.
    pub(crate) fn confirmed(&self) -> Moment {
        Moment::from_nanos(self.confirmed.load(Ordering::Acquire))
    }

    fn kept(&self) -> Moment {
        Moment::from_nanos(self.kept.load(Ordering::Acquire))
    }

    /// Notes that a keep-alive is sent now, unless one was sent less than `apart` ago. Returns whether it is noted.
    fn note_kept(&self, now: Moment, apart: Duration) -> bool {
        let kept = self.kept.load(Ordering::Acquire);
        now.since(Moment::from_nanos(kept)) >= apart
            && self.kept.compare_exchange(kept, now.as_nanos(), Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    fn note_answered(&self, sent: Moment, term: u64) {
        *self.answered.lock().unwrap_or_else(PoisonError::into_inner) = Some(KeptAlive { sent, term });
    }

    /// Returns the last keep-alive that got a reply. The caller takes it before it sends the request whose reply
    /// [proves](Self::prove) it.
    pub(crate) fn answered(&self) -> Option<KeptAlive> {
        *self.answered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a request that was sent after `answered` found the session's key in this raft term.
    pub(crate) fn prove(&self, answered: Option<KeptAlive>, term: u64) {
        if let Some(kept) = answered.filter(|kept| kept.term == term) {
            self.confirm(kept.sent);
        }
    }

    fn confirm(&self, sent: Moment) {
        self.confirmed.fetch_max(sent.as_nanos(), Ordering::AcqRel);
    }

    /// Forgets every proof, because the store has possibly gone back.
    fn distrust(&self) {
        *self.answered.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.confirmed.store(0, Ordering::Release);
        self.listed.store(0, Ordering::Release);
    }

    /// Notes that a listing of the entries got a reply.
    fn note_listed(&self, sent: Moment) {
        self.listed.fetch_max(sent.as_nanos(), Ordering::AcqRel);
    }

    /// Returns whether the last listing of the entries is young enough. A session that only waiters keep alive needs
    /// listings too, because its ghosts would otherwise stay while the wait lasts.
    fn is_listed(&self, now: Moment) -> bool {
        let has_strange = !self.strange.lock().unwrap_or_else(PoisonError::into_inner).is_empty();
        let age = if has_strange { STRANGE_FOR.min(self.ttl / 6) } else { self.ttl / 2 };
        now.since(Moment::from_nanos(self.listed.load(Ordering::Acquire))) < age
    }

    /// Returns the names that are among `listed` for the second time in a row although `is_known` does not know them. A
    /// restored backup brings such entries back, and the session would keep them alive indefinitely.
    fn ghosts(&self, listed: &HashSet<Vec<u8>>, is_known: impl Fn(&[u8]) -> bool) -> Vec<Vec<u8>> {
        let unknown = |name: &&Vec<u8>| **name != self.key && !is_known(name);
        let now: HashSet<Vec<u8>> = listed.iter().filter(unknown).cloned().collect();
        let mut before = self.strange.lock().unwrap_or_else(PoisonError::into_inner);
        let ghosts = now.intersection(&before).cloned().collect();
        *before = now;
        ghosts
    }
}

/// All sessions of one client.
#[derive(Debug, Default)]
pub(crate) struct Sessions {
    /// The session for new requests, by TTL in seconds.
    current: Mutex<HashMap<u64, Arc<Session>>>,
    all: Mutex<Vec<Arc<Session>>>,
    opening: tokio::sync::Mutex<()>,
}

impl Sessions {
    fn current(&self, seconds: u64) -> Option<Arc<Session>> {
        let current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let is_free = |session: &&Arc<Session>| {
            session.is_usable() && session.entries.load(Ordering::Acquire) < MOST_ENTRIES
        };
        current.get(&seconds).filter(is_free).cloned()
    }

    fn add(&self, seconds: u64, session: &Arc<Session>) {
        self.current.lock().unwrap_or_else(PoisonError::into_inner).insert(seconds, Arc::clone(session));
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|session| !session.has_ended());
        all.push(Arc::clone(session));
    }

    /// Returns the sessions that this client does not know to have ended.
    pub(crate) fn live(&self) -> Vec<Arc<Session>> {
        let all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().filter(|session| !session.has_ended()).cloned().collect()
    }

    /// Returns the live session with this lease.
    pub(crate) fn by_lease(&self, lease: i64) -> Option<Arc<Session>> {
        self.live().into_iter().find(|session| session.lease == lease)
    }

    /// Forgets every proof, because the store has possibly gone back.
    pub(crate) fn distrust(&self) {
        self.live().iter().for_each(|session| session.distrust());
    }
}

/// Returns the TTL in whole seconds, rounded up, because a lease must not end early.
pub(crate) fn whole_seconds(ttl: Duration) -> u64 {
    ttl.as_secs().saturating_add(u64::from(ttl.subsec_nanos() > 0))
}

#[cfg(test)]
mod tests;
