//! Notes of operators to the holders of this client: a request to release, or the end of a hold.
//!
//! A client has one watch for all of its holds. Each renewal and look reads the notes too, because a watch can miss one.

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::LossReason;

use super::Shared;
use crate::watcher::On;
use crate::wire::{KeyValue, RangeRequest, TxnRequest};

/// The value of a note that requests a release from the holder.
pub(crate) const ASKED: &[u8] = b"asked";

/// The value of a note that an operator has ended the hold.
pub(crate) const FORCED: &[u8] = b"forced";

const LIMIT: Duration = Duration::from_secs(5);

/// The pause before a read that failed is repeated.
const AGAIN: Duration = Duration::from_secs(1);

impl Shared {
    /// Watches for notes with the revision `from` or a later one. Zero stands for later notes only.
    pub(super) fn watch_notes(self: &Arc<Self>, from: i64) {
        let Some(span) = self.notes_span() else { return };
        // Is weak, because the stream of watches would otherwise keep the client alive.
        let shared = Arc::downgrade(self);
        let signal = move || {
            if let Some(shared) = shared.upgrade() {
                let reader = Arc::clone(&shared);
                shared.in_background(async move { reader.read_notes().await });
            }
        };
        self.keep_watch(Some(self.watcher.span(span, from, On::Put, signal)));
    }

    /// Reads the notes, then watches for the next ones.
    async fn read_notes(self: &Arc<Self>) {
        let Some(span) = self.notes_span() else { return };
        loop {
            let read = RangeRequest::range(span.begin.clone(), span.end.clone());
            if let Ok(answer) = self.cluster.call(read, LIMIT).await {
                answer.reply.kvs.iter().for_each(|note| self.note_arrived(note));
                return self.watch_notes(answer.header().revision.saturating_add(1));
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    /// Handles one note. A repeated note changes nothing.
    pub(crate) fn note_arrived(&self, note: &KeyValue) {
        let Some((key, holder)) = self.names.parse_note(&note.key) else { return };
        let Some(mode) = self.requests.noted(holder) else { return };
        let Some(events) = self.events.get().cloned() else { return };
        if note.value == ASKED {
            events.asked(&key, holder);
        } else if note.value == FORCED {
            let (lane, at) = (self.lane.clone(), self.at(&key, holder, mode));
            self.in_background(async move {
                // Reads the entry, because only the store knows whether the hold has ended.
                let read = TxnRequest::of_all(vec![RangeRequest::key(at.entry.clone()).op()]);
                if let Ok(reply) = lane.call(at.touches(), read, LIMIT).await
                    && reply.txn.range(0).is_empty()
                {
                    events.lost(&key, holder, LossReason::ForcedRelease);
                }
            });
        }
    }
}
