//! The transactions of this store. Each is safe if a copy of it arrives late.

use leasehold_api::{HolderId, LockKey};

use crate::names::{Names, Span};
use crate::wire::{Compare, KeyValue, RangeRequest, RequestOp, Target, TxnRequest, TxnResponse, delete, put};

/// The names of the keys in etcd for one request.
#[derive(Clone, Debug)]
pub(crate) struct At {
    pub(crate) queue: Span,
    pub(crate) entry: Vec<u8>,
    pub(crate) cooldown: Span,
    pub(crate) own_cooldown: Vec<u8>,
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
    pub(crate) fn new(names: &Names, key: &LockKey, holder: HolderId) -> Self {
        Self {
            queue: names.queue(key),
            entry: names.entry(key, holder),
            cooldown: names.cooldown(key),
            own_cooldown: names.cooldown_of(key, holder),
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

    /// Acquires if the queue is empty and no cooldown lasts. Otherwise reads the queue and the cooldown, and with
    /// `may_queue` also enters the queue.
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
            Self::range(&self.queue).oldest(1).op(),
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
        let compare = vec![
            Self::is_empty(&self.queue),
            conditions.session.clone(),
            conditions.base.clone(),
            Self::is_empty(&self.cooldown),
        ];
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

    /// Reads the entry and the one directly ahead of it, up to the create revision `created`, with session, base,
    /// cooldown and the length of the queue.
    pub(crate) fn prove(&self, created: i64, conditions: &Conditions) -> TxnRequest {
        let mut ahead = Self::range(&self.queue).newest(2);
        ahead.max_create_revision = created;
        let [session, base] = self.conditions(conditions);
        let whole = Self::range(&self.queue).count_only();
        TxnRequest::of_all(vec![ahead.op(), session, base, self.oldest_cooldown(), whole.op()])
    }

    /// Moves the entry under the lease of another session. It keeps its create revision, so also its place and its token.
    pub(crate) fn take_over(&self, entry: &KeyValue, conditions: &Conditions) -> TxnRequest {
        let unchanged = Compare::is(self.entry.clone(), Target::Mod(entry.mod_revision));
        TxnRequest {
            compare: vec![self.entry_is(entry.create_revision), unchanged, conditions.session.clone()],
            success: vec![put(self.entry.clone(), entry.value.clone(), conditions.lease)],
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

    /// Deletes the entry that was created at this revision.
    pub(crate) fn end(&self, created: i64) -> TxnRequest {
        TxnRequest {
            compare: vec![self.entry_is(created)],
            success: vec![delete(self.entry.clone())],
            failure: Vec::new(),
        }
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

impl At {
    /// Deletes the entry at any place in the queue. Also writes the key of each session in `suspects`, because a late
    /// copy with that session then compares an old guard. With `seals` deletes these keys instead, which a full server
    /// still does.
    pub(crate) fn release(
        &self,
        unused: bool,
        note: Option<Vec<u8>>,
        suspects: &[Guarded],
        seals: bool,
    ) -> TxnRequest {
        let mut success = vec![
            Self::range(&self.queue).oldest(1).op(),
            delete(self.entry.clone()),
            Self::range(&self.queue).count_only().op(),
        ];
        success.extend(suspects.iter().map(|session| {
            let change = if seals {
                delete(session.key.clone())
            } else {
                put(session.key.clone(), Vec::new(), session.lease)
            };
            let stands = Compare::is(session.key.clone(), Target::Lease(session.lease));
            TxnRequest { compare: vec![stands], success: vec![change], failure: Vec::new() }.op()
        }));
        // Deletes the cooldown too, if the hold was unused. The deletion of a missing key writes nothing.
        success.extend(unused.then(|| delete(self.own_cooldown.clone())));
        success.extend(note.map(delete));
        TxnRequest::of_all(success)
    }
}

/// The reply to [`At::acquire`], if it did not grant.
#[derive(Debug)]
pub(crate) struct NotFree<'a>(pub(crate) &'a TxnResponse);

impl<'a> NotFree<'a> {
    /// Returns the oldest entry of the queue.
    pub(crate) fn first(&self) -> Option<&'a KeyValue> {
        self.0.range(0).first()
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

/// The reply to [`At::prove`].
#[derive(Debug)]
pub(crate) struct Proven<'a>(pub(crate) &'a TxnResponse);

impl<'a> Proven<'a> {
    /// Returns the entry of the request, whose name is `entry`. `None` if it does not exist.
    pub(crate) fn own(&self, entry: &[u8]) -> Option<&'a KeyValue> {
        self.0.range(0).first().filter(|kv| kv.key == entry)
    }

    /// Returns the entry directly ahead in the queue. `None` for the first one.
    pub(crate) fn ahead(&self) -> Option<&'a KeyValue> {
        self.0.range(0).get(1)
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

/// The reply to [`At::release`].
#[derive(Debug)]
pub(crate) struct Released<'a>(pub(crate) &'a TxnResponse);

impl Released<'_> {
    pub(crate) fn was_deleted(&self) -> bool {
        self.0.deleted(1) == 1
    }

    pub(crate) fn was_first(&self, entry: &[u8]) -> bool {
        self.0.range(0).first().is_some_and(|first| first.key == entry)
    }

    pub(crate) fn has_waiters(&self) -> bool {
        self.0.count(2) > 0
    }

    /// Returns whether the release changed the key of the session at this place of `suspects`.
    pub(crate) fn was_changed(&self, suspect: usize) -> bool {
        self.0.txn(3 + suspect).is_some_and(|changed| changed.succeeded)
    }
}

#[cfg(test)]
mod tests;
