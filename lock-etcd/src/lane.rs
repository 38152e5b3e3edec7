//! Batches of transactions. The transactions that arrive during a round trip are nested in the next request.
//!
//! One request is one entry of the raft log and one write to the disks of the members, however many transactions are nested
//! in it. A server evaluates the compares of all nested transactions before any of them writes, so no two transactions of
//! one batch touch the same key.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, LockKey};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::cluster::{Answer, Class, Cluster, Failure, Heard};
use crate::wire::{ResponseHeader, TxnRequest, TxnResponse};

/// The most transactions in one request. A server accepts 128 operations by default, and counts the operations of nested
/// transactions too.
const BATCH: usize = 60;

/// The number of requests at the same time. More of them make smaller batches, and are not faster.
const WIDTH: usize = 2;

/// The reply to one transaction.
#[derive(Clone, Debug)]
pub(crate) struct Reply {
    pub(crate) txn: TxnResponse,
    /// The header of the whole request. All writes of a batch share its revision.
    pub(crate) header: ResponseHeader,
    /// Whether an earlier copy of the transaction can still arrive and be carried out.
    pub(crate) unsure: bool,
    /// The greatest numbers of all replies before the first copy was sent.
    pub(crate) heard_before: Heard,
}

/// Sends transactions in batches. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Lane {
    jobs: mpsc::UnboundedSender<Job>,
}

/// The reason for which a transaction has no reply.
#[derive(Clone, Debug)]
pub(crate) enum NoReply {
    Failed(Failure),
    /// The lane has ended. The transaction was possibly sent.
    Closed,
}

impl NoReply {
    /// Returns whether the transaction was possibly carried out, or can still be.
    pub(crate) fn sent(&self) -> bool {
        match self {
            Self::Failed(failure) => failure.sent(),
            Self::Closed => true,
        }
    }

    pub(crate) fn is_no_space(&self) -> bool {
        matches!(self, Self::Failed(failure) if failure.is_no_space())
    }

    pub(crate) fn error(&self, key: &LockKey) -> Error {
        match self {
            Self::Failed(failure) => failure.error(Some(key)),
            Self::Closed => Error::closed().with_key(key),
        }
    }
}

impl From<Failure> for NoReply {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

#[derive(Debug)]
struct Job {
    /// The names of the keys, or of the queues, that the transaction reads under a condition or writes.
    touches: Vec<Vec<u8>>,
    txn: TxnRequest,
    limit: Duration,
    /// Whether an earlier copy can still arrive.
    unsure: bool,
    /// The greatest numbers of all replies before the first copy was sent. Set when the job is sent.
    heard_before: Heard,
    reply: oneshot::Sender<Result<Reply, NoReply>>,
}

impl Lane {
    /// Starts the lane, which ends with `closed`.
    pub(crate) fn start(cluster: &Arc<Cluster>, tasks: &TaskTracker, closed: CancellationToken) -> Self {
        let (jobs, arrived) = mpsc::unbounded_channel();
        let (cluster, inner) = (Arc::clone(cluster), tasks.clone());
        tasks.spawn(async move {
            tokio::select! {
                () = closed.cancelled() => {}
                () = run(cluster, arrived, inner) => {}
            }
        });
        Self { jobs }
    }

    /// Carries out `txn`, which must be safe to repeat, within `limit`. `touches` are the names that no other transaction
    /// of its batch must have. If dropped before its batch is sent, sends nothing.
    pub(crate) async fn call(
        &self,
        touches: Vec<Vec<u8>>,
        txn: TxnRequest,
        limit: Duration,
    ) -> Result<Reply, NoReply> {
        let (reply, replied) = oneshot::channel();
        let job = Job { touches, txn, limit, unsure: false, heard_before: Heard::default(), reply };
        self.jobs.send(job).map_err(|_| NoReply::Closed)?;
        replied.await.unwrap_or(Err(NoReply::Closed))
    }
}

async fn run(cluster: Arc<Cluster>, mut arrived: mpsc::UnboundedReceiver<Job>, tasks: TaskTracker) {
    let slots = Arc::new(Semaphore::new(WIDTH));
    let mut waiting = VecDeque::new();
    loop {
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
        if waiting.is_empty() {
            let Some(job) = arrived.recv().await else { return };
            waiting.push_back(job);
        }
        while let Ok(job) = arrived.try_recv() {
            waiting.push_back(job);
        }
        let batch = take_batch(&mut waiting);
        let cluster = Arc::clone(&cluster);
        tasks.spawn(async move {
            carry_out(batch, cluster.heard(), |request, limit| cluster.call(request, limit)).await;
            drop(slot);
        });
    }
}

/// Takes the next batch from `waiting`. Jobs that touch a key of the batch stay there, in their order.
fn take_batch(waiting: &mut VecDeque<Job>) -> Vec<Job> {
    let (mut touched, mut batch, mut later) = (HashSet::new(), Vec::new(), VecDeque::new());
    while let Some(job) = waiting.pop_front() {
        if job.reply.is_closed() {
            continue;
        }
        let is_free = batch.len() < BATCH && !job.touches.iter().any(|name| touched.contains(name));
        // Marks the names of a job that stays too, because a later job must not overtake it.
        touched.extend(job.touches.iter().cloned());
        if is_free {
            batch.push(job);
        } else {
            later.push_back(job);
        }
        if batch.len() == BATCH {
            later.append(waiting);
        }
    }
    *waiting = later;
    batch
}

/// Sends the batch by `call` in one request, and passes each job its reply. `heard` are the numbers of the replies so far.
async fn carry_out<F>(mut batch: Vec<Job>, heard: Heard, call: impl Fn(TxnRequest, Duration) -> F)
where
    F: Future<Output = Result<Answer<TxnResponse>, Failure>>,
{
    let Some(limit) = batch.iter().map(|job| job.limit).max() else { return };
    batch.iter_mut().for_each(|job| job.heard_before = heard);
    let request = request_of(&batch);
    match call(request, limit).await {
        Ok(answer) => deliver(batch, answer),
        // Sends each transaction again alone, because the server refused the whole request for one of them.
        Err(failure) if batch.len() > 1 && is_about_one(failure.class()) => {
            for mut job in batch {
                job.unsure |= failure.sent();
                let single = vec![job];
                let request = request_of(&single);
                match call(request, limit).await {
                    Ok(answer) => deliver(single, answer),
                    Err(alone) => fail(single, if failure.sent() { &failure } else { &alone }),
                }
            }
        }
        Err(failure) => fail(batch, &failure),
    }
}

fn request_of(batch: &[Job]) -> TxnRequest {
    match batch {
        [alone] => alone.txn.clone(),
        all => TxnRequest::of_all(all.iter().map(|job| job.txn.clone().op()).collect()),
    }
}

/// Returns whether a server might have refused the whole request because of one of its transactions.
const fn is_about_one(class: Class) -> bool {
    use Class::{Denied, Invalid, LeaseNotFound, NoSpace, TooLarge};
    matches!(class, NoSpace | Denied | LeaseNotFound | TooLarge | Invalid)
}

fn deliver(batch: Vec<Job>, answer: Answer<TxnResponse>) {
    let header = answer.header();
    let Answer { reply, unsure, .. } = answer;
    let is_alone = batch.len() == 1;
    for (at, job) in batch.into_iter().enumerate() {
        let txn = if is_alone { Some(&reply) } else { reply.txn(at) };
        // A missing part reads as a transaction that changed and found nothing.
        let txn = txn.cloned().unwrap_or_default();
        let (unsure, heard_before) = (unsure || job.unsure, job.heard_before);
        let _ = job.reply.send(Ok(Reply { txn, header, unsure, heard_before }));
    }
}

fn fail(batch: Vec<Job>, failure: &Failure) {
    for job in batch {
        let _ = job.reply.send(Err(NoReply::Failed(failure.clone())));
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::future::ready;

    use super::*;
    use crate::wire::put;

    type Replies = Vec<oneshot::Receiver<Result<Reply, NoReply>>>;

    fn jobs(touches: &[&[&str]]) -> (VecDeque<Job>, Replies) {
        let job = |names: &&[&str]| {
            let (reply, replied) = oneshot::channel();
            let touches = names.iter().map(|name| name.as_bytes().to_vec()).collect();
            let (txn, limit) = (TxnRequest::default(), Duration::from_secs(1));
            (Job { touches, txn, limit, unsure: false, heard_before: Heard::default(), reply }, replied)
        };
        touches.iter().map(job).unzip()
    }

    fn names(batch: &[Job]) -> Vec<String> {
        let first = |job: &Job| String::from_utf8(job.touches.concat()).unwrap();
        batch.iter().map(first).collect()
    }

    #[test]
    fn no_two_of_a_batch_touch_the_same_key_and_the_order_per_key_stays() {
        let (mut waiting, _replies) = jobs(&[&["a"], &["b"], &["a", "s"], &["s"], &["c"], &["a"]]);
        assert_eq!(names(&take_batch(&mut waiting)), ["a", "b", "c"]);
        assert_eq!(names(&take_batch(&mut waiting)), ["as"]);
        assert_eq!(names(&take_batch(&mut waiting)), ["s", "a"]);
        assert!(waiting.is_empty());
    }

    #[test]
    fn a_batch_is_limited_and_the_rest_follows() {
        let keys: Vec<String> = (0..BATCH + 5).map(|n| format!("{n:04}")).collect();
        let touches: Vec<Vec<&str>> = keys.iter().map(|key| vec![key.as_str()]).collect();
        let slices: Vec<&[&str]> = touches.iter().map(Vec::as_slice).collect();
        let (mut waiting, _replies) = jobs(&slices);
        assert_eq!(names(&take_batch(&mut waiting)), keys[..BATCH]);
        assert_eq!(names(&take_batch(&mut waiting)), keys[BATCH..]);
    }

    #[test]
    fn a_job_whose_caller_has_gone_is_not_sent() {
        let (mut waiting, mut replies) = jobs(&[&["a"], &["a"]]);
        drop(replies.remove(0));
        assert_eq!(take_batch(&mut waiting).len(), 1);
        assert!(waiting.is_empty());
    }

    /// Carries out three transactions of one batch. The server refuses the second one, and each request with it, by `failure`.
    /// Returns the replies and the number of requests.
    async fn with_a_bad_second_one(failure: Failure) -> (Vec<Result<Reply, NoReply>>, u32) {
        let (mut waiting, mut replies) = jobs(&[&["a"], &["b"], &["c"]]);
        for job in &mut waiting {
            job.txn = TxnRequest::of_all(vec![put(job.touches.concat(), "", 7)]);
        }
        let batch = take_batch(&mut waiting);
        let (bad, requests) = (batch[1].txn.clone(), Cell::new(0));
        carry_out(batch, Heard::default(), |request, _| {
            requests.set(requests.get() + 1);
            if request == bad || request.success.len() > 1 {
                return ready(Err(failure.clone()));
            }
            let reply = TxnResponse { succeeded: true, ..TxnResponse::default() };
            ready(Ok(Answer { reply, unsure: false, heard_before: Heard::default() }))
        })
        .await;
        (replies.iter_mut().map(|reply| reply.try_recv().unwrap()).collect(), requests.get())
    }

    #[tokio::test]
    async fn a_transaction_that_the_server_refuses_spares_the_others_of_its_batch() {
        for failure in [Failure::unsent(Class::LeaseNotFound), Failure::maybe_sent(Class::NoSpace)] {
            let (replies, requests) = with_a_bad_second_one(failure.clone()).await;
            assert_eq!(requests, 4, "one request of all, then one of each");
            assert!(
                matches!(&replies[1], Err(NoReply::Failed(refused)) if refused.class() == failure.class())
            );
            for spared in [&replies[0], &replies[2]] {
                let reply = spared.as_ref().unwrap();
                assert_eq!((reply.txn.succeeded, reply.unsure), (true, failure.sent()));
            }
        }
    }

    #[tokio::test]
    async fn a_request_that_gets_no_reply_fails_for_its_whole_batch() {
        let (replies, requests) = with_a_bad_second_one(Failure::maybe_sent(Class::Lost)).await;
        assert_eq!(requests, 1);
        assert!(replies.iter().all(|reply| reply.as_ref().is_err_and(NoReply::sent)));
    }
}
