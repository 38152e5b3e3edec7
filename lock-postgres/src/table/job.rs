//! The jobs of the sessions: calls of the backend, each with its reply.

use std::sync::Arc;

use fnv::FnvHashSet;
use leasehold_api::{Error, ErrorKind, HolderId, KeyInfo};
use leasehold_engine::{Attempt, ReleaseReply, Renewed, Request};
use tokio::sync::oneshot;

use super::registry::{HoldId, Process, ReleaseRequest};
use crate::job_queue::{Job, JobQueue};
use crate::upkeep::{Note, Progress};

/// One call of the backend.
pub(super) enum TableJob {
    Acquire(PendingCall<Request, Attempt>),
    Renew(PendingCall<(HoldId, i64), Renewed>),
    Release(PendingCall<ReleaseRequest, ReleaseReply>),
    /// Checks which holds are still held.
    Confirm(PendingCall<HoldId, bool>),
    /// Checks whether another client was served after a hold was released.
    Served(PendingCall<HoldId, bool>),
    /// Replaces the labels of holds. Replies for each whether it is still held.
    Relabel(PendingCall<(HoldId, Arc<str>), bool>),
    /// Renews holds for a TTL and marks them as given out. Replies for each whether it is still held.
    GiveOut(PendingCall<(HoldId, i64), bool>),
    Adopt(PendingCall<Adoption, Attempt>),
    List(PendingCall<ListRequest, ListPage>),
    Force(PendingCall<HoldId, bool>),
    Ask(PendingCall<HoldId, bool>),
    Purge(PendingCall<PurgeRequest, PurgedPage>),
    /// Claims the task of removing old rows for this client.
    ClaimUpkeep(PendingCall<(), Option<Progress>>),
    /// Stores how far the task of removing old rows has got.
    NoteUpkeep(PendingCall<Note, ()>),
    /// Ends sessions in doubt. Replies for each whether it is gone.
    End(PendingCall<Process, bool>),
}

/// A request that takes over the hold of `holder` with the token of `number`.
#[derive(Clone, Debug)]
pub(super) struct Adoption {
    pub(super) request: Request,
    pub(super) holder: HolderId,
    pub(super) number: i64,
}

/// A page to list: at most `rows` rows with `from <= key < to`.
#[derive(Clone, Debug)]
pub(super) struct ListRequest {
    pub(super) from: String,
    pub(super) to: String,
    pub(super) ended: bool,
    pub(super) rows: i64,
}

/// A page of the list, and the key where the next page starts, if there is one.
#[derive(Debug, Default)]
pub(super) struct ListPage {
    pub(super) keys: Vec<KeyInfo>,
    pub(super) next: Option<String>,
}

/// A page to purge: rows after the key `after` that ended more than `age` microseconds ago.
#[derive(Clone, Debug)]
pub(super) struct PurgeRequest {
    pub(super) age: i64,
    pub(super) after: String,
}

/// The number of rows removed, and the key after which the next page starts, if there is one.
#[derive(Debug)]
pub(super) struct PurgedPage {
    pub(super) removed: u64,
    pub(super) next: Option<String>,
}

/// A batch of requests of one caller, with one reply for each. If dropped, their outcome is unknown.
pub(super) struct PendingCall<Q, A> {
    pub(super) items: Vec<Q>,
    reply: oneshot::Sender<Vec<Result<A, Error>>>,
}

/// Receives the replies of a [`PendingCall`].
pub(super) type ReplyReceiver<A> = oneshot::Receiver<Vec<Result<A, Error>>>;

/// Queues one call and returns the replies.
pub(super) async fn ask<Q, A>(
    queue: &JobQueue<TableJob>,
    job: fn(PendingCall<Q, A>) -> TableJob,
    items: Vec<Q>,
) -> Vec<Result<A, Error>> {
    let count = items.len();
    let (call, answer): (_, ReplyReceiver<A>) = PendingCall::new(items);
    queue.push(job(call));
    answer.await.unwrap_or_else(|_| (0..count).map(|_| Err(unknown())).collect())
}

/// Returns the only reply of a call with one item.
pub(super) fn only<A>(answers: Vec<Result<A, Error>>) -> Result<A, Error> {
    answers.into_iter().next().unwrap_or_else(|| Err(unknown()))
}

fn unknown() -> Error {
    Error::new(
        ErrorKind::OutcomeUnknown,
        "the session broke before the server answered; what it did with the request is found out and undone in the background",
    )
}

impl<Q, A> PendingCall<Q, A> {
    pub(super) fn new(items: Vec<Q>) -> (Self, ReplyReceiver<A>) {
        let (reply, answer) = oneshot::channel();
        (Self { items, reply }, answer)
    }

    /// Returns whether the caller no longer waits for the reply.
    pub(super) fn caller_gone(&self) -> bool {
        self.reply.is_closed()
    }

    /// Sends the replies, or returns them if the caller is gone.
    pub(super) fn answer(self, answers: Vec<Result<A, Error>>) -> Result<(), Vec<Result<A, Error>>> {
        self.reply.send(answers)
    }

    pub(super) fn fail(self, error: &Error) {
        let answers = self.items.iter().map(|_| Err(error.clone())).collect();
        let _ = self.reply.send(answers);
    }
}

impl<Q> PendingCall<Q, Attempt> {
    /// Replies that no request was sent, so there is no grant to release.
    pub(super) fn refuse(self, error: &Error, request_of: fn(&Q) -> &Request) {
        let refused = |item: &Q| Ok(Attempt::Refused(error.clone().with_key(&request_of(item).key)));
        let answers = self.items.iter().map(refused).collect();
        let _ = self.reply.send(answers);
    }
}

impl TableJob {
    /// Returns whether the job can be skipped because its caller is gone. Releases always run.
    pub(super) fn can_skip(&self) -> bool {
        match self {
            Self::Release(_) => false,
            Self::Acquire(call) => call.caller_gone(),
            Self::Renew(call) => call.caller_gone(),
            Self::Confirm(call) | Self::Served(call) => call.caller_gone(),
            Self::Relabel(call) => call.caller_gone(),
            Self::GiveOut(call) => call.caller_gone(),
            Self::Adopt(call) => call.caller_gone(),
            Self::List(call) => call.caller_gone(),
            Self::Force(call) => call.caller_gone(),
            Self::Ask(call) => call.caller_gone(),
            Self::Purge(call) => call.caller_gone(),
            Self::ClaimUpkeep(call) => call.caller_gone(),
            Self::NoteUpkeep(call) => call.caller_gone(),
            Self::End(call) => call.caller_gone(),
        }
    }
}

/// Distributes `answers` to the calls, as many to each as it has items. Calls `unheard` for each reply whose caller is
/// gone.
pub(super) fn hand_out<Q, A>(
    calls: Vec<PendingCall<Q, A>>,
    answers: impl IntoIterator<Item = Result<A, Error>>,
    mut unheard: impl FnMut(&Q, Result<A, Error>),
) {
    let mut answers = answers.into_iter();
    for mut call in calls {
        let items = std::mem::take(&mut call.items);
        let own = answers.by_ref().take(items.len()).collect();
        if let Err(own) = call.answer(own) {
            items.iter().zip(own).for_each(|(item, answer)| unheard(item, answer));
        }
    }
}

/// The kind of a job. Grants and releases are best sent in separate round trips.
#[derive(Clone, Copy, PartialEq)]
enum BatchKind {
    Grants,
    Releases,
}

impl Job for TableJob {
    /// Defers the less numerous of grants and releases. Each statement takes as long as its disk flush, and the callers
    /// of the first would wait for the second. A release that undoes a grant requested here goes with that grant.
    fn later(jobs: &[&Self]) -> Vec<bool> {
        let asked: FnvHashSet<HolderId> = jobs
            .iter()
            .filter_map(|job| if let Self::Acquire(call) = job { Some(&call.items) } else { None })
            .flatten()
            .map(|request| request.holder)
            .collect();
        let kind = |job: &&Self| match job {
            Self::Acquire(_) => Some(BatchKind::Grants),
            Self::Release(call) if call.items.iter().any(|release| asked.contains(&release.hold.holder)) => {
                Some(BatchKind::Grants)
            }
            Self::Release(_) => Some(BatchKind::Releases),
            _ => None,
        };
        let kinds: Vec<_> = jobs.iter().map(kind).collect();
        let count = |wanted| kinds.iter().filter(|kind| **kind == Some(wanted)).count();
        let (grants, releases) = (count(BatchKind::Grants), count(BatchKind::Releases));
        if grants == 0 || releases == 0 {
            return Vec::new();
        }
        let waits = if grants > releases { BatchKind::Releases } else { BatchKind::Grants };
        kinds.into_iter().map(|kind| kind == Some(waits)).collect()
    }

    fn fail(self, error: Error) {
        match self {
            Self::Acquire(call) => call.refuse(&error, |request| request),
            Self::Renew(call) => call.fail(&error),
            Self::Release(call) => call.fail(&error),
            Self::Confirm(call) | Self::Served(call) => call.fail(&error),
            Self::Relabel(call) => call.fail(&error),
            Self::GiveOut(call) => call.fail(&error),
            Self::Adopt(call) => call.refuse(&error, |adoption| &adoption.request),
            Self::List(call) => call.fail(&error),
            Self::Force(call) => call.fail(&error),
            Self::Ask(call) => call.fail(&error),
            Self::Purge(call) => call.fail(&error),
            Self::ClaimUpkeep(call) => call.fail(&error),
            Self::NoteUpkeep(call) => call.fail(&error),
            Self::End(call) => call.fail(&error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use leasehold_api::{LockKey, Mode};

    fn acquire(name: &str, serial: u64) -> TableJob {
        let request = Request::new(LockKey::new(name).unwrap(), HolderId::from_parts(1, serial));
        TableJob::Acquire(PendingCall::new(vec![request]).0)
    }

    fn release(name: &str, serial: u64) -> TableJob {
        let hold = HoldId::new(LockKey::new(name).unwrap(), HolderId::from_parts(1, serial), Mode::Exclusive);
        TableJob::Release(PendingCall::new(vec![ReleaseRequest { hold, unused: false }]).0)
    }

    fn names(jobs: &[TableJob]) -> Vec<String> {
        let name = |job: &TableJob| match job {
            TableJob::Acquire(call) => format!("acquire {}", call.items[0].key),
            TableJob::Release(call) => format!("release {}", call.items[0].hold.key),
            _ => "other".to_owned(),
        };
        jobs.iter().map(name).collect()
    }

    /// Splits jobs into those for this round trip and those for a later one.
    fn parted(jobs: Vec<TableJob>) -> (Vec<String>, Vec<String>) {
        let later = TableJob::later(&jobs.iter().collect::<Vec<_>>());
        let (mut now, mut then) = (Vec::new(), Vec::new());
        for (index, job) in jobs.into_iter().enumerate() {
            if later.get(index) == Some(&true) { then.push(job) } else { now.push(job) }
        }
        (names(&now), names(&then))
    }

    #[test]
    fn kinds_go_apart_and_the_more_numerous_first() {
        let other = || TableJob::ClaimUpkeep(PendingCall::new(vec![()]).0);
        let (now, then) = parted(vec![acquire("a", 1), release("b", 2), other()]);
        assert_eq!((now, then), (vec!["release b".into(), "other".into()], vec!["acquire a".into()]));
        let (now, then) = parted(vec![release("a", 1), other(), acquire("b", 2), acquire("c", 3)]);
        assert_eq!(now, ["other", "acquire b", "acquire c"]);
        assert_eq!(then, ["release a"]);
        let (now, then) = parted(vec![release("a", 1), release("b", 2), other()]);
        assert_eq!((now.len(), then.len()), (3, 0), "there is nothing to part");
    }

    #[tokio::test]
    async fn an_adoption_that_was_not_sent_is_refused() {
        let request = Request::new(LockKey::new("k").unwrap(), HolderId::from_parts(1, 2));
        let (call, answer) =
            PendingCall::new(vec![Adoption { request, holder: HolderId::from_parts(1, 1), number: 7 }]);
        TableJob::Adopt(call).fail(Error::new(ErrorKind::Unavailable, "not connected"));
        assert!(matches!(answer.await.unwrap()[..], [Ok(Attempt::Refused(_))]));
    }

    #[test]
    fn a_release_that_undoes_what_is_asked_for_goes_with_it() {
        let (now, then) =
            parted(vec![acquire("a", 1), release("b", 2), release("a", 1), release("c", 3), release("d", 4)]);
        assert_eq!(now, ["release b", "release c", "release d"]);
        assert_eq!(then, ["acquire a", "release a"]);
        let (now, then) = parted(vec![acquire("a", 1), release("a", 1), release("b", 2)]);
        assert_eq!(now, ["acquire a", "release a"]);
        assert_eq!(then, ["release b"]);
        let (now, then) = parted(vec![acquire("a", 1), release("a", 1)]);
        assert_eq!((now.len(), then.len()), (2, 0));
    }
}
