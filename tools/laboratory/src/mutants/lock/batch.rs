//! Releases of several guards that reach the store in one call.

use std::sync::{Arc, Mutex};

use leasehold_api::{Error, Release};
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::client::{CALL, SmallClient, lock};
use super::grant::{Hold, Released};
use leasehold_conformance::Op;

/// The releases of the next call.
#[derive(Default)]
pub(super) struct Batch(Mutex<Vec<Entry>>);

/// One release, and the sender of its result.
struct Entry {
    hold: Arc<Hold>,
    released: Released,
    reply: oneshot::Sender<Result<(), Error>>,
}

impl Batch {
    /// Adds the release of `hold` to the batch. The spawned call runs only when the caller awaits, so it contains all
    /// releases added before.
    pub(super) fn release(client: &Arc<SmallClient>, hold: Arc<Hold>, released: Released) -> Release {
        let (reply, answer) = oneshot::channel();
        let first = {
            let mut batch = lock(&client.batch.0);
            batch.push(Entry { hold, released, reply });
            batch.len() == 1
        };
        if first {
            let client = Arc::clone(client);
            let handle = client.handle.clone();
            handle.spawn(async move { client.release_batch().await });
        }
        Release::pending(async move { answer.await.unwrap_or_else(|_| Err(Error::closed())) })
    }
}

impl SmallClient {
    async fn release_batch(self: &Arc<Self>) {
        let batch = std::mem::take(&mut *lock(&self.batch.0));
        let held = batch.iter().filter(|entry| entry.released.is_ok());
        let references: Vec<_> = held.map(|entry| entry.hold.reference()).collect();
        let call = self.connection.call(Op::Release, |_, requester| {
            references
                .iter()
                .map(|reference| self.connection.release(requester, reference))
                .collect::<Vec<_>>()
        });
        let mut answers = match timeout(CALL, call).await {
            Ok(Ok(freed)) => freed.into_iter().map(Ok).collect::<Vec<_>>(),
            Ok(Err(kind)) => references.iter().map(|_| Ok(Err(kind))).collect(),
            Err(_) => references.iter().map(|_| Err(())).collect(),
        }
        .into_iter();
        for Entry { hold, released, reply } in batch {
            let outcome = match released {
                Ok(permit) => hold.confirm_release(permit, answers.next().unwrap_or(Err(()))),
                Err(reason) => Err(hold.lost_error(reason)),
            };
            // The caller might have dropped the future.
            let _ = reply.send(outcome);
        }
    }
}
