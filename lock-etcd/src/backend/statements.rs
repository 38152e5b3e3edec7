//! The transactions of this store. Each is safe if a copy of it arrives late.

mod permits;

use leasehold_api::{HolderId, LockKey, Mode};

use crate::names::{Names, Span};
use crate::wire::{Compare, KeyValue, RangeRequest, RequestOp, Target, TxnRequest, TxnResponse, delete, put};

pub(crate) use self::permits::Number;

/// The names of the keys in etcd for one request.
#[derive(Clone, Debug)]
pub(crate) struct At {
    pub(crate) queue: Span,
    /// The part of the queue whose older entries exclude the request: all of it, or for a shared request the entries that
    /// are not shared.
    pub(crate) rivals: Span,
    pub(crate) entry: Vec<u8>,
    pub(crate) cooldown: Span,
    pub(crate) own_cooldown: Vec<u8>,
    pub(crate) numbers: Span,
    /// The value of the number of the request's permit, which names the holder.
    pub(crate) holder: Vec<u8>,
}

/// The session and the base that a grant compares.
#[derive(Clone, Debug)]
pub(crate) struct Conditions {
    pub(crate) session_key: Vec<u8>,
    pub(crate) base_key: Vec<u8>,
    pub(crate) session: Compare,
    pub(crate) base: Compare,
    pub(crate) lease: i64,
}

/// A cooldown that a grant starts.
#[derive(Clone, Debug)]
pub(crate) struct StartsCooldown {
    pub(crate) value: Vec<u8>,
    /// The lease of the cooldown. It is separate, because the cooldown outlasts the hold.
    pub(crate) lease: i64,
}

impl At {
    pub(crate) fn new(names: &Names, key: &LockKey, holder: HolderId, mode: Mode) -> Self {
        Self {
            queue: names.queue(key),
            rivals: if mode == Mode::Shared { names.not_shared(key) } else { names.queue(key) },
            entry: names.entry(key, holder, mode),
            cooldown: names.cooldown(key),
            own_cooldown: names.cooldown_of(key, holder),
            numbers: names.numbers(key),
            holder: holder.to_string().into_bytes(),
        }
    }

    /// Returns the names that two transactions of one batch must not share.
    pub(crate) fn touches(&self) -> Vec<Vec<u8>> {
        vec![self.queue.begin.clone()]
    }

    fn range(span: &Span) -> RangeRequest {
        RangeRequest::range(span.begin.clone(), span.end.clone())
    }

    /// Returns the condition that the range is empty. One condition is enough, because etcd gives an empty range the
    /// create revision zero, which no key has.
    fn is_empty(span: &Span) -> Compare {
        Compare::is(span.begin.clone(), Target::Create(0)).up_to(span.end.clone())
    }

    fn entry_is(&self, created: i64) -> Compare {
        Compare::is(self.entry.clone(), Target::Create(created))
    }

    fn conditions(&self, conditions: &Conditions) -> [RequestOp; 2] {
        [
            RangeRequest::key(conditions.session_key.clone()).op(),
            RangeRequest::key(conditions.base_key.clone()).op(),
        ]
    }

    fn oldest_cooldown(&self) -> RequestOp {
        Self::range(&self.cooldown).oldest(1).op()
    }

    /// Acquires an exclusive or shared hold if rivals and cooldowns are absent. Otherwise reads the oldest
    /// rival and the cooldown, and with `may_queue` also enters the queue.
    pub(crate) fn acquire(
        &self,
        value: &[u8],
        conditions: &Conditions,
        cooldown: Option<StartsCooldown>,
        may_queue: bool,
    ) -> TxnRequest {
        let entry = || put(self.entry.clone(), value, conditions.lease);
        let mut success = vec![entry()];
        success.extend(cooldown.map(|new| put(self.own_cooldown.clone(), new.value, new.lease)));
        let [session, base] = self.conditions(conditions);
        let mut failure = vec![
            Self::range(&self.rivals).oldest(1).op(),
            session,
            base,
            self.oldest_cooldown(),
            RangeRequest::key(self.entry.clone()).op(),
        ];
        if may_queue {
            let enter = TxnRequest {
                compare: vec![self.entry_is(0), conditions.session.clone(), conditions.base.clone()],
                success: vec![entry()],
                failure: Vec::new(),
            };
            failure.push(enter.op());
        }
        let mut compare = vec![
            Self::is_empty(&self.rivals),
            conditions.session.clone(),
            conditions.base.clone(),
            Self::is_empty(&self.cooldown),
        ];
        // The entry of a shared request is none of its rivals. A repeated request must keep its create revision.
        compare.extend((self.rivals != self.queue).then(|| self.entry_is(0)));
        TxnRequest { compare, success, failure }
    }

    /// Enters the queue if the request has no entry. A copy that arrives after the entry was moved, granted or deleted by a
    /// release is refused.
    pub(crate) fn enter(&self, value: &[u8], conditions: &Conditions) -> TxnRequest {
        let [session, base] = self.conditions(conditions);
        TxnRequest {
            compare: vec![self.entry_is(0), conditions.session.clone(), conditions.base.clone()],
            success: vec![put(self.entry.clone(), value, conditions.lease)],
            failure: vec![RangeRequest::key(self.entry.clone()).op(), session, base],
        }
    }

    /// Reads the entry that was created at revision `created`, session, base, cooldown, the length of the queue, and the
    /// rival directly ahead of the entry.
    pub(crate) fn prove(&self, created: i64, conditions: &Conditions) -> TxnRequest {
        let mut ahead = Self::range(&self.rivals).newest(1);
        ahead.max_create_revision = created.saturating_sub(1);
        let mut reads = self.own_state(conditions);
        reads.extend([Self::range(&self.queue).count_only().op(), ahead.op()]);
        TxnRequest::of_all(reads)
    }

    /// Returns the reads of the entry, session, base and cooldown.
    fn own_state(&self, conditions: &Conditions) -> Vec<RequestOp> {
        let [session, base] = self.conditions(conditions);
        vec![RangeRequest::key(self.entry.clone()).op(), session, base, self.oldest_cooldown()]
    }

    /// Moves the entry under the lease of another session, and each of `numbers` that the request has. It keeps its create
    /// revision, so also its place and its token.
    pub(crate) fn take_over(&self, entry: &KeyValue, numbers: &[u32], conditions: &Conditions) -> TxnRequest {
        let unchanged = Compare::is(self.entry.clone(), Target::Mod(entry.mod_revision));
        let mut success = vec![put(self.entry.clone(), entry.value.clone(), conditions.lease)];
        success.extend(numbers.iter().map(|number| self.move_number(*number, conditions.lease)));
        TxnRequest {
            compare: vec![self.entry_is(entry.create_revision), unchanged, conditions.session.clone()],
            success,
            failure: self.conditions(conditions).into(),
        }
    }

    /// Starts the cooldown of a grant that waited in the queue.
    pub(crate) fn start_cooldown(
        &self,
        created: i64,
        conditions: &Conditions,
        cooldown: StartsCooldown,
    ) -> TxnRequest {
        TxnRequest {
            compare: vec![self.entry_is(created), conditions.session.clone(), Self::is_empty(&self.cooldown)],
            success: vec![put(self.own_cooldown.clone(), cooldown.value, cooldown.lease)],
            failure: vec![RangeRequest::key(self.own_cooldown.clone()).op()],
        }
    }

    /// Deletes the entry that was created at this revision, and each of `numbers` that the request has.
    pub(crate) fn end(&self, created: i64, numbers: &[u32]) -> TxnRequest {
        let mut success = vec![delete(self.entry.clone())];
        success.extend(numbers.iter().map(|number| self.end_number(*number)));
        TxnRequest { compare: vec![self.entry_is(created)], success, failure: Vec::new() }
    }

    /// Deletes the cooldown that this grant started.
    pub(crate) fn end_cooldown(&self) -> TxnRequest {
        TxnRequest::of_all(vec![delete(self.own_cooldown.clone())])
    }
}

/// A session whose guard a release changes.
#[derive(Clone, Debug)]
pub(crate) struct Guarded {
    pub(crate) key: Vec<u8>,
    pub(crate) lease: i64,
}

/// The keys that a release deletes or changes beside the entry.
#[derive(Clone, Debug, Default)]
pub(crate) struct Leaves {
    /// Whether no caller had the guard. The cooldown of the grant then ends too.
    pub(crate) unused: bool,
    pub(crate) note: Option<Vec<u8>>,
    /// The numbers of permits that the request has, or tried to take.
    pub(crate) numbers: Vec<u32>,
    /// The sessions with which a copy of the request can still arrive.
    pub(crate) suspects: Vec<Guarded>,
}

impl At {
    /// Deletes the entry at any place in the queue. Also writes the key of each session in the suspects, because a late
    /// copy with that session then compares an old guard. With `seals` deletes these keys instead, which a full server
    /// still does.
    pub(crate) fn release(&self, leaves: &Leaves, seals: bool) -> TxnRequest {
        let mut success = vec![
            Self::range(&self.rivals).oldest(1).op(),
            RangeRequest::key(self.entry.clone()).op(),
            delete(self.entry.clone()),
            Self::range(&self.rivals).count_only().op(),
        ];
        success.extend(leaves.numbers.iter().map(|number| self.end_number(*number)));
        success.extend(leaves.suspects.iter().map(|session| {
            let change = if seals {
                delete(session.key.clone())
            } else {
                put(session.key.clone(), Vec::new(), session.lease)
            };
            let stands = Compare::is(session.key.clone(), Target::Lease(session.lease));
            TxnRequest { compare: vec![stands], success: vec![change], failure: Vec::new() }.op()
        }));
        // Deletes the cooldown too, if the hold was unused. The deletion of a missing key writes nothing.
        success.extend(leaves.unused.then(|| delete(self.own_cooldown.clone())));
        success.extend(leaves.note.clone().map(delete));
        TxnRequest::of_all(success)
    }
}

/// The reply to [`At::acquire`], if it did not grant.
#[derive(Debug)]
pub(crate) struct NotFree<'a>(pub(crate) &'a TxnResponse);

impl<'a> NotFree<'a> {
    /// Returns the oldest rival of the request. For an exclusive request that has an entry, possibly its own.
    pub(crate) fn first(&self) -> Option<&'a KeyValue> {
        self.0.range(0).first()
    }

    /// Returns whether no rival is older than `own`, the entry of the request.
    pub(crate) fn is_first(&self, own: &KeyValue) -> bool {
        self.first().is_none_or(|first| first.create_revision >= own.create_revision)
    }

    pub(crate) fn session(&self) -> Option<&'a KeyValue> {
        self.0.range(1).first()
    }

    pub(crate) fn base(&self) -> Option<&'a KeyValue> {
        self.0.range(2).first()
    }

    pub(crate) fn cooldown(&self) -> Option<&'a KeyValue> {
        self.0.range(3).first()
    }

    /// Returns the entry of this request from before the transaction.
    pub(crate) fn own(&self) -> Option<&'a KeyValue> {
        self.0.range(4).first()
    }

    /// Returns whether the transaction has put this request into the queue.
    pub(crate) fn has_entered(&self) -> bool {
        self.0.txn(5).is_some_and(|enter| enter.succeeded)
    }
}

/// The reply to [`At::prove`], or to [`At::survey`], which reads the first four keys too.
#[derive(Debug)]
pub(crate) struct Proven<'a>(pub(crate) &'a TxnResponse);

impl<'a> Proven<'a> {
    /// Returns the entry of the request. `None` if it does not exist.
    pub(crate) fn own(&self) -> Option<&'a KeyValue> {
        self.0.range(0).first()
    }

    /// Returns the rival directly ahead in the queue. `None` for the first one.
    pub(crate) fn ahead(&self) -> Option<&'a KeyValue> {
        self.0.range(5).first()
    }

    pub(crate) fn session(&self) -> Option<&'a KeyValue> {
        self.0.range(1).first()
    }

    pub(crate) fn base(&self) -> Option<&'a KeyValue> {
        self.0.range(2).first()
    }

    pub(crate) fn cooldown(&self) -> Option<&'a KeyValue> {
        self.0.range(3).first()
    }

    /// Returns whether the queue has other entries.
    pub(crate) fn has_others(&self) -> bool {
        self.0.count(4) > 1
    }
}

/// The reply to [`At::release`] with this many numbers.
#[derive(Debug)]
pub(crate) struct Released<'a> {
    pub(crate) txn: &'a TxnResponse,
    pub(crate) numbers: usize,
}

impl Released<'_> {
    pub(crate) fn was_deleted(&self) -> bool {
        self.txn.deleted(2) == 1
    }

    /// Returns whether the entry existed, and no rival was older.
    pub(crate) fn was_first(&self) -> bool {
        let own = self.txn.range(1).first();
        own.is_some_and(|own| {
            self.txn.range(0).first().is_none_or(|first| first.create_revision >= own.create_revision)
        })
    }

    /// Returns whether rivals of the request remain.
    pub(crate) fn has_rivals(&self) -> bool {
        self.txn.count(3) > 0
    }

    /// Returns whether the request had a number.
    pub(crate) fn had_number(&self) -> bool {
        (0..self.numbers).any(|at| self.was_done(at))
    }

    /// Returns whether the release changed the key of the session at this place of the suspects.
    pub(crate) fn was_changed(&self, suspect: usize) -> bool {
        self.was_done(self.numbers.saturating_add(suspect))
    }

    fn was_done(&self, at: usize) -> bool {
        self.txn.txn(at.saturating_add(4)).is_some_and(|done| done.succeeded)
    }
}

#[cfg(test)]
mod tests;
