//! The stream of watches.

use std::fmt;
use std::sync::Arc;

use futures_util::{Stream, StreamExt as _, stream};
use tokio::sync::mpsc;
use tonic::Streaming;

use super::heard::Ears;
use super::{Class, Failure};
use crate::wire::{WatchRequest, WatchResponse};

/// The replies of a stream of watches.
pub(crate) struct Watching {
    name: Arc<str>,
    replies: Streaming<WatchResponse>,
    ears: Arc<Ears>,
    store: Arc<str>,
}

impl Watching {
    pub(super) fn new(
        name: Arc<str>,
        replies: Streaming<WatchResponse>,
        ears: Arc<Ears>,
        store: &Arc<str>,
    ) -> Self {
        Self { name, replies, ears, store: Arc::clone(store) }
    }

    /// Returns the next reply, or `None` if the member has ended the stream. Fails also if the server no longer accepts
    /// the token of the stream. If dropped, misses no reply.
    pub(crate) async fn next(&mut self) -> Result<Option<WatchResponse>, Failure> {
        let reply = self
            .replies
            .message()
            .await
            .map_err(|status| Failure::of_status(status, Arc::clone(&self.name)).of_store(&self.store))?;
        if let Some(reply) = &reply {
            if reply.is_denied() {
                return Err(Failure::unsent(Class::EndedToken).of_store(&self.store));
            }
            self.ears.note(reply.header.as_ref()).map_err(|failure| failure.of_store(&self.store))?;
        }
        Ok(reply)
    }
}

impl fmt::Debug for Watching {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watching").field("member", &self.name).finish_non_exhaustive()
    }
}

/// Returns the stream of `first` and of the requests behind it.
pub(super) fn of_requests(
    first: WatchRequest,
    mut requests: mpsc::Receiver<WatchRequest>,
) -> impl Stream<Item = WatchRequest> + Send + 'static {
    stream::iter([first]).chain(stream::poll_fn(move |cx| requests.poll_recv(cx)))
}
