//! One stream for all watches of this client.
//!
//! A watch fires once, on its first event. It also fires if an event was possibly missed, because the stream has ended,
//! the client has moved to another member, or the revision was compacted. A watch is a hint, so its owner reads the key
//! after it.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::cluster::{Cluster, Watching};
use crate::names::Span;
use crate::wire::{FilterType, WatchCreateRequest, WatchRequest, WatchResponse};

/// The most requests that are queued for the stream.
const REQUESTS: usize = 64;

/// The pause before the next stream if one could not be opened.
const PAUSE: Duration = Duration::from_millis(200);

/// The events that fire a watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum On {
    Put,
    Delete,
}

/// Called when a watch fires. Must not block.
type Signal = Box<dyn FnOnce() + Send>;

/// Starts watches. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Watcher {
    wishes: mpsc::UnboundedSender<Wish>,
    last: Arc<AtomicI64>,
}

/// A watch, which ends when this value is dropped.
pub(crate) struct Watched {
    id: i64,
    wishes: mpsc::UnboundedSender<Wish>,
}

enum Wish {
    Start { watch: WatchCreateRequest, signal: Signal },
    End { id: i64 },
}

impl Watcher {
    /// Starts the task of the stream, which ends with `closed`.
    pub(crate) fn start(cluster: &Arc<Cluster>, tasks: &TaskTracker, closed: CancellationToken) -> Self {
        let (wishes, wished) = mpsc::unbounded_channel();
        let stream = Stream { cluster: Arc::clone(cluster), wished, signals: HashMap::new() };
        tasks.spawn(async move {
            tokio::select! {
                () = closed.cancelled() => {}
                () = stream.run() => {}
            }
        });
        Self { wishes, last: Arc::default() }
    }

    /// Watches a range of keys for events with the revision `from` or a later one, or for later events only if it is
    /// zero. Calls `signal` when the watch fires.
    pub(crate) fn span(
        &self,
        span: Span,
        from: i64,
        on: On,
        signal: impl FnOnce() + Send + 'static,
    ) -> Watched {
        let id = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        let watch = create(id, span, from, on);
        // If this fails, the task has ended because the backend is closed.
        let _ = self.wishes.send(Wish::Start { watch, signal: Box::new(signal) });
        Watched { id, wishes: self.wishes.clone() }
    }
}

fn create(id: i64, span: Span, from: i64, on: On) -> WatchCreateRequest {
    let filters = match on {
        On::Put => vec![FilterType::Nodelete.into()],
        On::Delete => vec![FilterType::Noput.into()],
    };
    WatchCreateRequest { key: span.begin, range_end: span.end, start_revision: from, filters, watch_id: id }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let _ = self.wishes.send(Wish::End { id: self.id });
    }
}

struct Stream {
    cluster: Arc<Cluster>,
    wished: mpsc::UnboundedReceiver<Wish>,
    signals: HashMap<i64, Signal>,
}

impl Stream {
    /// Opens a stream for the first wish, and the next one when that stream has ended.
    async fn run(mut self) {
        let mut moved = self.cluster.moved();
        while let Some(wish) = self.wished.recv().await {
            let Wish::Start { watch, signal } = wish else { continue };
            moved.mark_unchanged();
            let (requests, received) = mpsc::channel(REQUESTS);
            self.signals.insert(watch.watch_id, signal);
            // Queues the request first, because a server accepts the call only with the first reply of the stream.
            if requests.send(WatchRequest::create(watch)).await.is_err() {
                return;
            }
            match self.cluster.watch(received).await {
                Ok(watching) => {
                    tokio::select! {
                        _ = moved.changed() => {}
                        () = self.serve(watching, &requests) => {}
                    }
                }
                // Pauses, because every owner of a watch that fires starts the next one.
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
            self.fire_all();
        }
    }

    async fn serve(&mut self, mut watching: Watching, requests: &mpsc::Sender<WatchRequest>) {
        loop {
            let request = tokio::select! {
                wish = self.wished.recv() => match wish {
                    None => return,
                    Some(Wish::Start { watch, signal }) => {
                        self.signals.insert(watch.watch_id, signal);
                        Some(WatchRequest::create(watch))
                    }
                    Some(Wish::End { id }) => self.signals.remove(&id).map(|_| WatchRequest::cancel(id)),
                },
                reply = watching.next() => match reply {
                    Ok(Some(reply)) => self.settle(&reply),
                    Ok(None) | Err(_) => return,
                },
            };
            if let Some(request) = request
                && requests.send(request).await.is_err()
            {
                return;
            }
        }
    }

    /// Fires the watch of this reply if it has an event, or if the server has ended the watch. Returns the request that
    /// ends the watch at the server.
    fn settle(&mut self, reply: &WatchResponse) -> Option<WatchRequest> {
        if !reply.canceled && reply.events.is_empty() {
            return None;
        }
        let signal = self.signals.remove(&reply.watch_id)?;
        signal();
        (!reply.canceled).then(|| WatchRequest::cancel(reply.watch_id))
    }

    fn fire_all(&mut self) {
        self.signals.drain().for_each(|(_, signal)| signal());
    }
}

impl fmt::Debug for Watcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watcher").finish_non_exhaustive()
    }
}

impl fmt::Debug for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watched").field("id", &self.id).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_names_its_range_its_revision_and_the_events_it_leaves_out() {
        let span = Span { begin: b"a".to_vec(), end: b"b".to_vec() };
        let of = |on| create(3, span.clone(), 7, on);
        assert_eq!(of(On::Put).filters, [i32::from(FilterType::Nodelete)]);
        assert_eq!(of(On::Delete).filters, [i32::from(FilterType::Noput)]);
        let watch = of(On::Put);
        assert_eq!((watch.watch_id, watch.start_revision), (3, 7));
        assert_eq!((watch.key, watch.range_end), (span.begin, span.end));
    }

    #[test]
    fn a_watch_that_is_dropped_ends() {
        let (wishes, mut wished) = mpsc::unbounded_channel();
        let watcher = Watcher { wishes, last: Arc::default() };
        let first = watcher.span(Span::key(b"a".to_vec()), 1, On::Delete, || ());
        let second = watcher.span(Span::key(b"a".to_vec()), 1, On::Delete, || ());
        drop(first);
        drop(second);
        let mut seen = Vec::new();
        while let Ok(wish) = wished.try_recv() {
            seen.push(match wish {
                Wish::Start { watch, .. } => (true, watch.watch_id),
                Wish::End { id } => (false, id),
            });
        }
        assert_eq!(seen, [(true, 1), (true, 2), (false, 1), (false, 2)]);
    }
}
