//! The transactions of permits. Each permit has a number, which is a key under the lease of its entry. No two requests take
//! the same number, because each compares the revision of that key.

use super::{At, Conditions};
use crate::wire::{Compare, RequestOp, Target, TxnRequest, delete, put};

/// A number that a request can take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Number {
    pub(crate) number: u32,
    /// The revision of the last write of the number's key, or zero if the key does not exist.
    pub(crate) modified: i64,
    /// The lease of the number's key if the request has the number, otherwise zero.
    pub(crate) own_lease: i64,
}

impl At {
    /// Returns the name of a number.
    pub(crate) fn number(&self, number: u32) -> Vec<u8> {
        let mut name = self.numbers.begin.clone();
        name.extend_from_slice(number.to_string().as_bytes());
        name
    }

    /// Reads the state of the request, the oldest entries of the queue, and all numbers. One entry more than there are
    /// permits is enough, because a request with `of` entries ahead waits.
    pub(crate) fn survey(&self, of: u32, conditions: &Conditions) -> TxnRequest {
        let mut oldest = Self::range(&self.queue).oldest(i64::from(of).saturating_add(1));
        oldest.keys_only = true;
        let mut reads = self.own_state(conditions);
        reads.extend([oldest.op(), Self::range(&self.numbers).op()]);
        TxnRequest::of_all(reads)
    }

    /// Enters the queue and takes a number, if no entry is newer than the revision `read` of the survey that found the number
    /// free. Otherwise another request was possibly ahead.
    pub(crate) fn acquire_permit(
        &self,
        value: &[u8],
        number: Number,
        read: i64,
        conditions: &Conditions,
    ) -> TxnRequest {
        let newest = Target::Create(read.saturating_add(1));
        let no_newer = Compare::is(self.queue.begin.clone(), newest).less().up_to(self.queue.end.clone());
        let mut compare = vec![no_newer, Self::is_empty(&self.cooldown)];
        compare.extend(self.can_take(number, conditions));
        let entry = put(self.entry.clone(), value, conditions.lease);
        TxnRequest {
            compare,
            success: vec![entry, self.put_number(number.number, conditions.lease)],
            failure: self.conditions(conditions).into(),
        }
    }

    /// Takes a number for the entry that was created at revision `created`, if the entry is under the lease of the session.
    pub(crate) fn take(&self, created: i64, number: Number, conditions: &Conditions) -> TxnRequest {
        let same_lease = Compare::is(self.entry.clone(), Target::Lease(conditions.lease));
        let mut compare = vec![self.entry_is(created), same_lease];
        compare.extend(self.can_take(number, conditions));
        TxnRequest {
            compare,
            success: vec![self.put_number(number.number, conditions.lease)],
            failure: self.conditions(conditions).into(),
        }
    }

    fn can_take(&self, number: Number, conditions: &Conditions) -> [Compare; 3] {
        let unchanged = Compare::is(self.number(number.number), Target::Mod(number.modified));
        [unchanged, conditions.session.clone(), conditions.base.clone()]
    }

    fn put_number(&self, number: u32, lease: i64) -> RequestOp {
        put(self.number(number), self.holder.clone(), lease)
    }

    /// Moves the number under another lease, if the request has the number.
    pub(super) fn move_number(&self, number: u32, lease: i64) -> RequestOp {
        self.if_own(number, self.put_number(number, lease))
    }

    /// Deletes the number, if the request has it.
    pub(crate) fn end_number(&self, number: u32) -> RequestOp {
        self.if_own(number, delete(self.number(number)))
    }

    fn if_own(&self, number: u32, change: RequestOp) -> RequestOp {
        let is_own = Compare::is(self.number(number), Target::Value(self.holder.clone()));
        TxnRequest { compare: vec![is_own], success: vec![change], failure: Vec::new() }.op()
    }
}
