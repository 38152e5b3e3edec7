//! The state of the cluster, and authentication.

use std::fmt;

use super::ResponseHeader;

#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub(crate) struct StatusRequest {}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct StatusResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) header: Option<ResponseHeader>,
    #[prost(string, tag = "2")]
    pub(crate) version: String,
    /// Bytes.
    #[prost(int64, tag = "3")]
    pub(crate) db_size: i64,
    /// The member id of the leader. Zero if this member knows none.
    #[prost(uint64, tag = "4")]
    pub(crate) leader: u64,
    #[prost(uint64, tag = "5")]
    pub(crate) raft_index: u64,
    #[prost(uint64, tag = "6")]
    pub(crate) raft_term: u64,
    #[prost(uint64, tag = "7")]
    pub(crate) raft_applied_index: u64,
    #[prost(string, repeated, tag = "8")]
    pub(crate) errors: Vec<String>,
    #[prost(int64, tag = "9")]
    pub(crate) db_size_in_use: i64,
    #[prost(bool, tag = "10")]
    pub(crate) is_learner: bool,
    /// The quota in bytes. Zero from a server before 3.6.
    #[prost(int64, tag = "12")]
    pub(crate) db_size_quota: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub(crate) enum AlarmType {
    None = 0,
    Nospace = 1,
    Corrupt = 2,
}

/// Lists the alarms. The field `action` is left out, because zero is the action that lists.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub(crate) struct AlarmRequest {
    #[prost(uint64, tag = "2")]
    pub(crate) member_id: u64,
    #[prost(enumeration = "AlarmType", tag = "3")]
    pub(crate) alarm: i32,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct AlarmResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) header: Option<ResponseHeader>,
    #[prost(message, repeated, tag = "2")]
    pub(crate) alarms: Vec<AlarmMember>,
}

#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub(crate) struct AlarmMember {
    #[prost(uint64, tag = "1")]
    pub(crate) member_id: u64,
    #[prost(enumeration = "AlarmType", tag = "2")]
    pub(crate) alarm: i32,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
#[prost(skip_debug)]
pub(crate) struct AuthenticateRequest {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    #[prost(string, tag = "2")]
    pub(crate) password: String,
}

/// Shows no password.
impl fmt::Debug for AuthenticateRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AuthenticateRequest").field("name", &self.name).finish_non_exhaustive()
    }
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
#[prost(skip_debug)]
pub(crate) struct AuthenticateResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) header: Option<ResponseHeader>,
    #[prost(string, tag = "2")]
    pub(crate) token: String,
}

/// Shows no token.
impl fmt::Debug for AuthenticateResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AuthenticateResponse").field("header", &self.header).finish_non_exhaustive()
    }
}
