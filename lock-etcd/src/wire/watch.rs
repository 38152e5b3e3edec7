//! Watches.

use super::{KeyValue, ResponseHeader};

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct WatchRequest {
    #[prost(oneof = "WatchWhat", tags = "1, 2")]
    pub(crate) request_union: Option<WatchWhat>,
}

#[derive(Clone, PartialEq, Eq, prost::Oneof)]
pub(crate) enum WatchWhat {
    #[prost(message, tag = "1")]
    Create(WatchCreateRequest),
    #[prost(message, tag = "2")]
    Cancel(WatchCancelRequest),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub(crate) enum FilterType {
    Noput = 0,
    Nodelete = 1,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct WatchCreateRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) range_end: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub(crate) start_revision: i64,
    #[prost(enumeration = "FilterType", repeated, tag = "5")]
    pub(crate) filters: Vec<i32>,
    /// The number of the watch, chosen by the client. The server chooses one for zero.
    #[prost(int64, tag = "7")]
    pub(crate) watch_id: i64,
}

#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub(crate) struct WatchCancelRequest {
    #[prost(int64, tag = "1")]
    pub(crate) watch_id: i64,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct WatchResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) header: Option<ResponseHeader>,
    #[prost(int64, tag = "2")]
    pub(crate) watch_id: i64,
    #[prost(bool, tag = "3")]
    pub(crate) created: bool,
    #[prost(bool, tag = "4")]
    pub(crate) canceled: bool,
    #[prost(int64, tag = "5")]
    pub(crate) compact_revision: i64,
    #[prost(string, tag = "6")]
    pub(crate) cancel_reason: String,
    #[prost(message, repeated, tag = "11")]
    pub(crate) events: Vec<Event>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub(crate) enum EventType {
    Put = 0,
    Delete = 1,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct Event {
    #[prost(enumeration = "EventType", tag = "1")]
    pub(crate) r#type: i32,
    #[prost(message, optional, tag = "2")]
    pub(crate) kv: Option<KeyValue>,
}

impl WatchRequest {
    /// Creates the request that starts a watch.
    pub(crate) const fn create(watch: WatchCreateRequest) -> Self {
        Self { request_union: Some(WatchWhat::Create(watch)) }
    }

    /// Creates the request that ends a watch.
    pub(crate) const fn cancel(watch_id: i64) -> Self {
        Self { request_union: Some(WatchWhat::Cancel(WatchCancelRequest { watch_id })) }
    }

    /// Returns the key of the watch that the request starts. Empty for a request that ends a watch.
    pub(crate) fn key(&self) -> &[u8] {
        match &self.request_union {
            Some(WatchWhat::Create(watch)) => &watch.key,
            _ => &[],
        }
    }
}

impl WatchResponse {
    /// Returns whether the server refuses the user, for example because the token has ended since the stream was opened.
    pub(crate) fn is_denied(&self) -> bool {
        let says = |text| self.cancel_reason.contains(text);
        self.canceled
            && (says("auth token") || says("auth store") || says("user name") || says("permission denied"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_that_ends_with_its_token_is_told_apart() {
        let ended = |canceled, reason: &str| WatchResponse {
            canceled,
            cancel_reason: reason.into(),
            ..WatchResponse::default()
        };
        assert!(
            ended(true, "rpc error: code = Unauthenticated desc = etcdserver: invalid auth token")
                .is_denied()
        );
        assert!(ended(true, "etcdserver: permission denied").is_denied());
        assert!(!ended(true, "etcdserver: mvcc: required revision has been compacted").is_denied());
        assert!(!ended(true, "").is_denied());
        assert!(!ended(false, "etcdserver: permission denied").is_denied());
    }
}
