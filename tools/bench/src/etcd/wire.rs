//! The calls of etcd that a program makes by hand. A message names only the fields that are used here.

use std::time::Duration;

use http::uri::PathAndQuery;
use tonic::client::Grpc;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status, Streaming};
use tonic_prost::ProstCodec;

/// Limit of a connection attempt.
const CONNECT: Duration = Duration::from_secs(5);

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct LockRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) name: Vec<u8>,
    #[prost(int64, tag = "2")]
    pub(crate) lease: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct LockResponse {
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) key: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct UnlockRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) key: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct LeaseGrantRequest {
    #[prost(int64, tag = "1")]
    pub(crate) ttl: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct LeaseGrantResponse {
    #[prost(int64, tag = "2")]
    pub(crate) id: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct LeaseRevokeRequest {
    #[prost(int64, tag = "1")]
    pub(crate) id: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct PutRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) value: Vec<u8>,
}

/// A linearizable read of one key.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct RangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) key: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct WatchRequest {
    #[prost(message, optional, tag = "1")]
    pub(crate) create: Option<RangeRequest>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct WatchResponse {
    #[prost(bool, tag = "3")]
    pub(crate) created: bool,
    #[prost(message, repeated, tag = "11")]
    pub(crate) events: Vec<Nothing>,
}

/// A message whose fields do not matter.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Nothing {}

/// A connection to one member.
#[derive(Clone)]
pub(crate) struct Member(Grpc<Channel>);

impl Member {
    pub(crate) async fn connect(address: &str) -> Self {
        let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
        Self(Grpc::new(endpoint.tcp_nodelay(true).connect_timeout(CONNECT).connect().await.unwrap()))
    }

    /// Returns a connection that opens with the first call.
    pub(crate) fn lazy(address: &str) -> Self {
        let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
        Self(Grpc::new(endpoint.tcp_nodelay(true).connect_timeout(CONNECT).connect_lazy()))
    }

    pub(crate) async fn lock(&mut self, name: &[u8], lease: i64) -> Vec<u8> {
        let request = LockRequest { name: name.to_vec(), lease };
        let reply: LockResponse = self.unary("/v3lockpb.Lock/Lock", request).await.unwrap();
        reply.key
    }

    pub(crate) async fn unlock(&mut self, key: Vec<u8>) {
        let _: Nothing = self.unary("/v3lockpb.Lock/Unlock", UnlockRequest { key }).await.unwrap();
    }

    /// Grants a lease of this many seconds. Returns its id.
    pub(crate) async fn grant(&mut self, ttl: i64) -> i64 {
        let request = LeaseGrantRequest { ttl };
        let reply: LeaseGrantResponse = self.unary("/etcdserverpb.Lease/LeaseGrant", request).await.unwrap();
        reply.id
    }

    pub(crate) async fn revoke(&mut self, id: i64) {
        let _: Nothing =
            self.unary("/etcdserverpb.Lease/LeaseRevoke", LeaseRevokeRequest { id }).await.unwrap();
    }

    pub(crate) async fn put(&mut self, key: &str) -> Result<(), Status> {
        let request = PutRequest { key: key.into(), value: b"x".to_vec() };
        let _: Nothing = self.unary("/etcdserverpb.KV/Put", request).await?;
        Ok(())
    }

    pub(crate) async fn read(&mut self, key: &str) {
        let _: Nothing =
            self.unary("/etcdserverpb.KV/Range", RangeRequest { key: key.into() }).await.unwrap();
    }

    /// Returns the later changes of a key.
    pub(crate) async fn watch(&mut self, key: &str) -> Streaming<WatchResponse> {
        self.0.ready().await.unwrap();
        let create = WatchRequest { create: Some(RangeRequest { key: key.into() }) };
        // Never ends, because the end of the requests would end the watch.
        let requests = futures_util::StreamExt::chain(
            futures_util::stream::iter([create]),
            futures_util::stream::pending(),
        );
        let path = PathAndQuery::from_static("/etcdserverpb.Watch/Watch");
        let codec = ProstCodec::<WatchRequest, WatchResponse>::default();
        let mut changes = self.0.streaming(Request::new(requests), path, codec).await.unwrap().into_inner();
        let first = changes.message().await.unwrap().unwrap();
        assert!(first.created, "the watch was not created");
        changes
    }

    async fn unary<M, R>(&mut self, path: &'static str, message: M) -> Result<R, Status>
    where
        M: prost::Message + 'static,
        R: prost::Message + Default + 'static,
    {
        let unavailable = |error: tonic::transport::Error| Status::unavailable(error.to_string());
        self.0.ready().await.map_err(unavailable)?;
        let codec = ProstCodec::<M, R>::default();
        let reply = self.0.unary(Request::new(message), PathAndQuery::from_static(path), codec).await?;
        Ok(reply.into_inner())
    }
}
