//! One member: its channel and its single calls.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::Stream;
use http::uri::PathAndQuery;
use leasehold_api::Error;
use tokio::time::Instant;
use tonic::client::Grpc;
use tonic::metadata::MetadataValue;
use tonic::transport::{Channel, Endpoint};
use tonic::{IntoStreamingRequest, Request, Status, Streaming};
use tonic_prost::ProstCodec;

use super::heard::Ears;
use super::login::Token;
use super::socket::{Connections, Connector};
use super::tls::Trust;
use super::{Failure, Leader};
use crate::config::Address;
use crate::error::invalid;
use crate::wire::{Call, Headed};

/// The interval of HTTP/2 pings during a call. Servers close connections with more than one ping in 5 s.
const PING_EVERY: Duration = Duration::from_secs(6);

/// The time for the reply to a ping.
const PING_LIMIT: Duration = Duration::from_secs(3);

/// The time without any reply after which the end of a dropped call closes the channel, because the connection might be
/// dead.
const SILENT_LIMIT: Duration = Duration::from_secs(2);

/// The most bytes of a reply. A page of holds has far fewer.
const LARGEST_REPLY: usize = 64 << 20;

/// The state of a member at the start of a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mark {
    /// The number of connections made so far. The next number is of the open ones.
    made: u64,
    open: u64,
    /// The results so far.
    results: u64,
}

/// A member of the cluster.
pub(super) struct Member {
    name: Arc<str>,
    endpoint: Endpoint,
    connector: Connector,
    channel: Mutex<Channel>,
    /// The start of the oldest call since the last reply.
    silent_since: Mutex<Option<Instant>>,
    /// The number of calls that the member has carried out, which it can do only with a leader.
    results: AtomicU64,
}

impl Member {
    /// Makes the channel. Must be called within a runtime, on which the tasks of the channel run.
    pub(super) fn new(address: Address, trust: Option<&Trust>, ears: &Arc<Ears>) -> Result<Self, Error> {
        let name: Arc<str> = address.to_string().into();
        let scheme = if trust.is_some() { "https" } else { "http" };
        let endpoint = Endpoint::from_shared(format!("{scheme}://{name}"))
            .map_err(|error| invalid("the address of a member is no host").with_source(error))?
            .http2_keep_alive_interval(PING_EVERY)
            .keep_alive_timeout(PING_LIMIT);
        let endpoint = match trust {
            Some(trust) => trust.apply(endpoint, &address)?,
            None => endpoint,
        };
        let connector =
            Connector { address, connections: Arc::new(Connections::default()), ears: Arc::clone(ears) };
        let channel = Mutex::new(endpoint.connect_with_connector_lazy(connector.clone()));
        Ok(Self {
            name,
            endpoint,
            connector,
            channel,
            silent_since: Mutex::default(),
            results: AtomicU64::new(0),
        })
    }

    pub(super) const fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// Makes one call.
    pub(super) async fn unary<C: Call>(
        &self,
        request: C,
        token: &Token,
        leader: Leader,
    ) -> Result<C::Reply, Failure> {
        let mut grpc = self.start();
        let mut request = Request::new(request);
        dress(&mut request, token, leader);
        let path = PathAndQuery::from_static(C::PATH);
        let called = async {
            grpc.ready().await.map_err(|error| Status::from_error(Box::new(error)))?;
            grpc.unary(request, path, ProstCodec::<C, C::Reply>::default()).await
        };
        match called.await {
            Ok(reply) => {
                self.results.fetch_add(1, Ordering::SeqCst);
                self.replied();
                Ok(reply.into_inner())
            }
            Err(status) => Err(self.failure(status)),
        }
    }

    /// Opens a stream in both directions. Waits for the member's first reply.
    pub(super) async fn stream<Q, R>(
        &self,
        requests: impl Stream<Item = Q> + Send + 'static,
        path: &'static str,
        token: &Token,
    ) -> Result<Streaming<R>, Failure>
    where
        Q: prost::Message + 'static,
        R: Headed,
    {
        let mut grpc = self.start();
        let mut requests = requests.into_streaming_request();
        dress(&mut requests, token, Leader::Needed);
        let path = PathAndQuery::from_static(path);
        let called = async {
            grpc.ready().await.map_err(|error| Status::from_error(Box::new(error)))?;
            grpc.streaming(requests, path, ProstCodec::<Q, R>::default()).await
        };
        match called.await {
            Ok(replies) => {
                self.replied();
                Ok(replies.into_inner())
            }
            Err(status) => Err(self.failure(status)),
        }
    }

    fn start(&self) -> Grpc<Channel> {
        self.silence().get_or_insert_with(Instant::now);
        let channel = self.channel.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Grpc::new(channel).max_decoding_message_size(LARGEST_REPLY)
    }

    /// Returns the failure of a call, and notes whether the member has replied.
    pub(super) fn failure(&self, status: Status) -> Failure {
        let failure = Failure::of_status(status, Arc::clone(&self.name));
        if failure.is_reply() {
            self.replied();
        }
        failure
    }

    fn replied(&self) {
        *self.silence() = None;
    }

    /// Notes that a call was dropped. Replaces the channel if the member has not replied for [`SILENT_LIMIT`], because
    /// the pings notice a dead connection only after 9 s.
    pub(super) fn gave_up(&self) {
        let mut silent_since = self.silence();
        if silent_since.is_some_and(|since| since.elapsed() >= SILENT_LIMIT) {
            *silent_since = None;
            self.replace_channel();
        }
    }

    pub(super) fn replace_channel(&self) {
        let channel = self.endpoint.connect_with_connector_lazy(self.connector.clone());
        *self.channel.lock().unwrap_or_else(PoisonError::into_inner) = channel;
    }

    fn silence(&self) -> std::sync::MutexGuard<'_, Option<Instant>> {
        self.silent_since.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the state now, before a call starts.
    pub(super) fn mark(&self) -> Mark {
        // Reads the numbers in this order, because a connection that is made between the two reads then shows in one of
        // them.
        let made = self.connector.connections.made();
        let open = self.connector.connections.open();
        Mark { made, open, results: self.results.load(Ordering::SeqCst) }
    }

    /// Returns whether a call that started at `mark` has possibly left this machine. It needs a connection that was open
    /// at `mark` or made later.
    pub(super) fn may_have_left(&self, mark: Mark) -> bool {
        mark.open != 0 || self.connector.connections.made() != mark.made
    }

    /// Returns whether another call has had a result since `mark`.
    pub(super) fn is_alive(&self, mark: Mark) -> bool {
        self.results.load(Ordering::SeqCst) != mark.results
    }
}

fn dress<T>(request: &mut Request<T>, token: &Token, leader: Leader) {
    let metadata = request.metadata_mut();
    if leader == Leader::Needed {
        metadata.insert("hasleader", MetadataValue::from_static("true"));
    }
    if let Some(token) = &token.value {
        metadata.insert("token", token.clone());
    }
}
