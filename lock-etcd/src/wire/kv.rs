//! Keys, ranges and transactions.

use super::ResponseHeader;

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct KeyValue {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) key: Vec<u8>,
    #[prost(int64, tag = "2")]
    pub(crate) create_revision: i64,
    #[prost(int64, tag = "3")]
    pub(crate) mod_revision: i64,
    #[prost(int64, tag = "4")]
    pub(crate) version: i64,
    #[prost(bytes = "vec", tag = "5")]
    pub(crate) value: Vec<u8>,
    /// The lease that the key is attached to, or zero. A server 3.7 also sends zero for `keys_only`, so no read that
    /// needs leases uses it.
    #[prost(int64, tag = "6")]
    pub(crate) lease: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub(crate) enum SortOrder {
    None = 0,
    Ascend = 1,
    Descend = 2,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub(crate) enum SortTarget {
    Key = 0,
    Version = 1,
    Create = 2,
    Mod = 3,
    Value = 4,
}

/// A read. The field `serializable` is left out, so every read is linearizable.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct RangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) range_end: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub(crate) limit: i64,
    #[prost(int64, tag = "4")]
    pub(crate) revision: i64,
    #[prost(enumeration = "SortOrder", tag = "5")]
    pub(crate) sort_order: i32,
    #[prost(enumeration = "SortTarget", tag = "6")]
    pub(crate) sort_target: i32,
    #[prost(bool, tag = "8")]
    pub(crate) keys_only: bool,
    #[prost(bool, tag = "9")]
    pub(crate) count_only: bool,
    #[prost(int64, tag = "13")]
    pub(crate) max_create_revision: i64,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct RangeResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) header: Option<ResponseHeader>,
    #[prost(message, repeated, tag = "2")]
    pub(crate) kvs: Vec<KeyValue>,
    #[prost(bool, tag = "3")]
    pub(crate) more: bool,
    #[prost(int64, tag = "4")]
    pub(crate) count: i64,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct PutRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) value: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub(crate) lease: i64,
    #[prost(bool, tag = "5")]
    pub(crate) ignore_value: bool,
    #[prost(bool, tag = "6")]
    pub(crate) ignore_lease: bool,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct PutResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) header: Option<ResponseHeader>,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct DeleteRangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) range_end: Vec<u8>,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct DeleteRangeResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) header: Option<ResponseHeader>,
    #[prost(int64, tag = "2")]
    pub(crate) deleted: i64,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct RequestOp {
    #[prost(oneof = "Request", tags = "1, 2, 3, 4")]
    pub(crate) request: Option<Request>,
}

#[derive(Clone, PartialEq, Eq, prost::Oneof)]
pub(crate) enum Request {
    #[prost(message, tag = "1")]
    Range(RangeRequest),
    #[prost(message, tag = "2")]
    Put(PutRequest),
    #[prost(message, tag = "3")]
    DeleteRange(DeleteRangeRequest),
    #[prost(message, tag = "4")]
    Txn(TxnRequest),
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct ResponseOp {
    #[prost(oneof = "Response", tags = "1, 2, 3, 4")]
    pub(crate) response: Option<Response>,
}

#[derive(Clone, PartialEq, Eq, prost::Oneof)]
pub(crate) enum Response {
    #[prost(message, tag = "1")]
    Range(RangeResponse),
    #[prost(message, tag = "2")]
    Put(PutResponse),
    #[prost(message, tag = "3")]
    DeleteRange(DeleteRangeResponse),
    #[prost(message, tag = "4")]
    Txn(TxnResponse),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub(crate) enum CompareResult {
    Equal = 0,
    Greater = 1,
    Less = 2,
    NotEqual = 3,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub(crate) enum CompareTarget {
    Version = 0,
    Create = 1,
    Mod = 2,
    Value = 3,
    Lease = 4,
}

/// A condition of a transaction. With a `range_end` it has to hold for each key in the range.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct Compare {
    #[prost(enumeration = "CompareResult", tag = "1")]
    pub(crate) result: i32,
    #[prost(enumeration = "CompareTarget", tag = "2")]
    pub(crate) target: i32,
    #[prost(bytes = "vec", tag = "3")]
    pub(crate) key: Vec<u8>,
    #[prost(oneof = "Target", tags = "4, 5, 6, 7, 8")]
    pub(crate) target_union: Option<Target>,
    #[prost(bytes = "vec", tag = "64")]
    pub(crate) range_end: Vec<u8>,
}

#[derive(Clone, PartialEq, Eq, prost::Oneof)]
pub(crate) enum Target {
    #[prost(int64, tag = "4")]
    Version(i64),
    #[prost(int64, tag = "5")]
    Create(i64),
    #[prost(int64, tag = "6")]
    Mod(i64),
    #[prost(bytes = "vec", tag = "7")]
    Value(Vec<u8>),
    #[prost(int64, tag = "8")]
    Lease(i64),
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct TxnRequest {
    #[prost(message, repeated, tag = "1")]
    pub(crate) compare: Vec<Compare>,
    #[prost(message, repeated, tag = "2")]
    pub(crate) success: Vec<RequestOp>,
    #[prost(message, repeated, tag = "3")]
    pub(crate) failure: Vec<RequestOp>,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct TxnResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) header: Option<ResponseHeader>,
    #[prost(bool, tag = "2")]
    pub(crate) succeeded: bool,
    #[prost(message, repeated, tag = "3")]
    pub(crate) responses: Vec<ResponseOp>,
}

impl RangeRequest {
    /// Makes a read of one key.
    pub(crate) fn key(key: impl Into<Vec<u8>>) -> Self {
        Self { key: key.into(), ..Self::default() }
    }

    /// Makes a read of the keys from `key` to before `end`.
    pub(crate) fn range(key: impl Into<Vec<u8>>, end: impl Into<Vec<u8>>) -> Self {
        Self { key: key.into(), range_end: end.into(), ..Self::default() }
    }

    /// Limits the reply to the oldest keys by their create revision, oldest first. Zero is no limit.
    pub(crate) fn oldest(self, limit: i64) -> Self {
        self.by_create(SortOrder::Ascend, limit)
    }

    /// Limits the reply to the newest keys by their create revision, newest first. Zero is no limit.
    pub(crate) fn newest(self, limit: i64) -> Self {
        self.by_create(SortOrder::Descend, limit)
    }

    fn by_create(mut self, order: SortOrder, limit: i64) -> Self {
        self.set_sort_order(order);
        self.set_sort_target(SortTarget::Create);
        self.limit = limit;
        self
    }

    /// Limits the reply to the number of keys.
    pub(crate) fn count_only(mut self) -> Self {
        self.count_only = true;
        self
    }

    /// Makes the read an operation of a transaction.
    pub(crate) fn op(self) -> RequestOp {
        Request::Range(self).into()
    }
}

impl DeleteRangeRequest {
    /// Makes the deletion an operation of a transaction.
    pub(crate) fn op(self) -> RequestOp {
        Request::DeleteRange(self).into()
    }
}

impl TxnRequest {
    /// Makes a transaction of `success`, without a condition.
    pub(crate) fn of_all(success: Vec<RequestOp>) -> Self {
        Self { success, ..Self::default() }
    }

    /// Makes the transaction an operation of another one.
    pub(crate) fn op(self) -> RequestOp {
        Request::Txn(self).into()
    }
}

/// Makes the operation that puts `value` under a lease, or without one for zero.
pub(crate) fn put(key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>, lease: i64) -> RequestOp {
    Request::Put(PutRequest { key: key.into(), value: value.into(), lease, ..PutRequest::default() }).into()
}

/// Makes the operation that deletes one key.
pub(crate) fn delete(key: impl Into<Vec<u8>>) -> RequestOp {
    DeleteRangeRequest { key: key.into(), ..DeleteRangeRequest::default() }.op()
}

impl From<Request> for RequestOp {
    fn from(request: Request) -> Self {
        Self { request: Some(request) }
    }
}

impl Compare {
    /// Makes the condition that `key` equals `target`. A key that does not exist has revisions and a lease of zero.
    pub(crate) fn is(key: impl Into<Vec<u8>>, target: Target) -> Self {
        let kind = match target {
            Target::Version(_) => CompareTarget::Version,
            Target::Create(_) => CompareTarget::Create,
            Target::Mod(_) => CompareTarget::Mod,
            Target::Value(_) => CompareTarget::Value,
            Target::Lease(_) => CompareTarget::Lease,
        };
        Self { target: kind.into(), key: key.into(), target_union: Some(target), ..Self::default() }
    }

    /// Changes the condition from "equals" to "is less than".
    pub(crate) fn less(mut self) -> Self {
        self.set_result(CompareResult::Less);
        self
    }

    /// Extends the condition to each key from its key to before `end`.
    pub(crate) fn up_to(mut self, end: impl Into<Vec<u8>>) -> Self {
        self.range_end = end.into();
        self
    }
}

impl TxnResponse {
    fn response(&self, at: usize) -> Option<&Response> {
        self.responses.get(at)?.response.as_ref()
    }

    /// Returns the keys of the read that is operation number `at`. Empty for another operation.
    pub(crate) fn range(&self, at: usize) -> &[KeyValue] {
        match self.response(at) {
            Some(Response::Range(range)) => &range.kvs,
            _ => &[],
        }
    }

    /// Returns the number of keys in the range of the read that is operation number `at`, also beyond the read's limit.
    pub(crate) fn count(&self, at: usize) -> i64 {
        match self.response(at) {
            Some(Response::Range(range)) => range.count,
            _ => 0,
        }
    }

    /// Returns the number of keys that operation number `at` has deleted.
    pub(crate) fn deleted(&self, at: usize) -> i64 {
        match self.response(at) {
            Some(Response::DeleteRange(deleted)) => deleted.deleted,
            _ => 0,
        }
    }

    /// Returns the reply to the nested transaction that is operation number `at`.
    pub(crate) fn txn(&self, at: usize) -> Option<&Self> {
        match self.response(at) {
            Some(Response::Txn(txn)) => Some(txn),
            _ => None,
        }
    }
}
