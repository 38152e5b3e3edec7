//! Opening a session: its lease, then its key.

use std::sync::Arc;
use std::time::Duration;

use super::{Session, whole_seconds};
use crate::backend::Shared;
use crate::lane::NoReply;
use crate::wire::{Compare, LeaseGrantRequest, RangeRequest, Target, TxnRequest, put};

impl Shared {
    /// Returns the session for new requests with this TTL, and opens one if there is none.
    pub(crate) async fn session(&self, ttl: Duration, limit: Duration) -> Result<Arc<Session>, NoReply> {
        let seconds = whole_seconds(ttl);
        if let Some(session) = self.sessions.current(seconds) {
            return Ok(session);
        }
        let _opening = self.sessions.opening.lock().await;
        if let Some(session) = self.sessions.current(seconds) {
            return Ok(session);
        }
        let session = Arc::new(self.open_session(seconds, limit).await?);
        self.sessions.add(seconds, &session);
        Ok(session)
    }

    /// Opens a session: grants its lease, then writes its key. If dropped, a lease without entries can stay, and ends
    /// after its TTL.
    async fn open_session(&self, seconds: u64, limit: Duration) -> Result<Session, NoReply> {
        let ttl = i64::try_from(seconds).unwrap_or(i64::MAX);
        let (lease, sent, granted) = loop {
            // Chooses the id here, because the request is then safe to repeat.
            let (id, sent) = (fastrand::i64(1..), self.now());
            match self.cluster.call(LeaseGrantRequest { ttl, id }, limit).await {
                Ok(answer) => break (id, sent, answer.reply.ttl),
                // An earlier copy of this request was carried out. The TTL that it granted is at least the requested one.
                Err(failure) if failure.lease_exists() && failure.sent() => break (id, sent, ttl),
                Err(failure) if failure.lease_exists() => {}
                Err(failure) => return Err(failure.into()),
            }
        };
        let key = self.names.session(lease);
        let txn = TxnRequest {
            compare: vec![Compare::is(key.clone(), Target::Create(0))],
            success: vec![put(key.clone(), Vec::new(), lease)],
            failure: vec![RangeRequest::key(key.clone()).op()],
        };
        let answer = self.cluster.call(txn, limit).await?;
        let written = answer.reply.range(0).first().map(|kv| kv.mod_revision);
        let guard =
            if answer.reply.succeeded { answer.header().revision } else { written.unwrap_or_default() };
        tracing::debug!(store = %self.cluster.store(), lease, seconds, "opened a session");
        let granted = Duration::from_secs(u64::try_from(granted).unwrap_or(seconds));
        Ok(Session::new(lease, key, (seconds, granted), guard, sent))
    }
}
