//! The messages of etcd's API v3 that a lock needs, written by hand, and their calls.
//!
//! The tags are the ones in `rpc.proto` and `kv.proto` of etcd 3.4 to 3.7. The test `messages` compares them. A message
//! names only the fields that this crate uses, because `prost` skips the others. So the build runs without `protoc`.

mod kv;
mod lease;
mod maintenance;
mod watch;

pub(crate) use kv::{
    Compare, DeleteRangeRequest, DeleteRangeResponse, KeyValue, PutRequest, PutResponse, RangeRequest,
    RangeResponse, RequestOp, Target, TxnRequest, TxnResponse, delete, put,
};
#[cfg(test)]
pub(crate) use kv::{Request, Response, ResponseOp};
pub(crate) use lease::{
    LeaseGrantRequest, LeaseGrantResponse, LeaseKeepAliveRequest, LeaseKeepAliveResponse, LeaseRevokeRequest,
    LeaseRevokeResponse, LeaseTimeToLiveRequest, LeaseTimeToLiveResponse,
};
pub(crate) use maintenance::{
    AlarmMember, AlarmRequest, AlarmResponse, AlarmType, AuthenticateRequest, AuthenticateResponse,
    StatusRequest, StatusResponse,
};
pub(crate) use watch::{FilterType, WatchCreateRequest, WatchRequest, WatchResponse};

/// The header of every reply.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub(crate) struct ResponseHeader {
    #[prost(uint64, tag = "1")]
    pub(crate) cluster_id: u64,
    #[prost(uint64, tag = "2")]
    pub(crate) member_id: u64,
    #[prost(int64, tag = "3")]
    pub(crate) revision: i64,
    #[prost(uint64, tag = "4")]
    pub(crate) raft_term: u64,
}

/// The request of a unary call.
pub(crate) trait Call: prost::Message + Clone + Default + Send + Sync + 'static {
    /// The path of the call, `/SERVICE/METHOD`.
    const PATH: &'static str;
    /// The message of the reply.
    type Reply: Headed;
}

/// A reply with a header.
pub(crate) trait Headed: prost::Message + Default + Send + 'static {
    /// Returns the header, which every server since 3.0 sends.
    fn header(&self) -> Option<&ResponseHeader>;
}

macro_rules! headed {
    ($($reply:ty),+ $(,)?) => {
        $(impl Headed for $reply {
            fn header(&self) -> Option<&ResponseHeader> {
                self.header.as_ref()
            }
        })+
    };
}

macro_rules! calls {
    ($($request:ty => $reply:ty, $path:literal;)+) => {
        $(impl Call for $request {
            const PATH: &'static str = $path;
            type Reply = $reply;
        })+
        headed!($($reply),+);
    };
}

calls! {
    RangeRequest => RangeResponse, "/etcdserverpb.KV/Range";
    PutRequest => PutResponse, "/etcdserverpb.KV/Put";
    DeleteRangeRequest => DeleteRangeResponse, "/etcdserverpb.KV/DeleteRange";
    TxnRequest => TxnResponse, "/etcdserverpb.KV/Txn";
    LeaseGrantRequest => LeaseGrantResponse, "/etcdserverpb.Lease/LeaseGrant";
    LeaseRevokeRequest => LeaseRevokeResponse, "/etcdserverpb.Lease/LeaseRevoke";
    LeaseTimeToLiveRequest => LeaseTimeToLiveResponse, "/etcdserverpb.Lease/LeaseTimeToLive";
    StatusRequest => StatusResponse, "/etcdserverpb.Maintenance/Status";
    AlarmRequest => AlarmResponse, "/etcdserverpb.Maintenance/Alarm";
    AuthenticateRequest => AuthenticateResponse, "/etcdserverpb.Auth/Authenticate";
}
headed!(LeaseKeepAliveResponse, WatchResponse);

/// The path of the stream that extends leases.
pub(crate) const KEEP_ALIVE: &str = "/etcdserverpb.Lease/LeaseKeepAlive";
/// The path of the stream of watches.
pub(crate) const WATCH: &str = "/etcdserverpb.Watch/Watch";
