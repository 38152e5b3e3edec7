//! What the sessions are asked to do.

use fnv::FnvHashSet;
use leasehold_api::{Error, ErrorKind, HolderId, KeyInfo};
use leasehold_engine::{Attempt, ReleaseReply, Renewed, Request};
use tokio::sync::oneshot;

use super::registry::{Ending, Named, Process};
use crate::job_queue::{Job, Lane};
use crate::upkeep::{Note, Progress};

/// One call of the backend.
pub(super) enum TableJob {
    Acquire(Call<Request, Attempt>),
    Renew(Call<(Named, i64), Renewed>),
    Release(Call<Ending, ReleaseReply>),
    /// Which of these are still held.
    Confirm(Call<Named, bool>),
    Look(Call<Look, Page>),
    Force(Call<Named, bool>),
    Purge(Call<Purge, Purged>),
    /// Claims the task of removing old rows.
    ClaimUpkeep(Call<(), Option<Progress>>),
    /// Notes how far that has come.
    NoteUpkeep(Call<Note, ()>),
    /// Ends sessions of ours that are in doubt; answers which of them are gone.
    End(Call<Process, bool>),
}

/// Which rows to look at: from one key to before another, so many at once.
#[derive(Clone, Debug)]
pub(super) struct Look {
    pub(super) from: String,
    pub(super) to: String,
    pub(super) ended: bool,
    pub(super) rows: i64,
}

/// What was found, and where to go on if that was not all.
#[derive(Debug, Default)]
pub(super) struct Page {
    pub(super) keys: Vec<KeyInfo>,
    pub(super) next: Option<String>,
}

/// Which rows to remove: those behind this key that ended so many microseconds ago.
#[derive(Clone, Debug)]
pub(super) struct Purge {
    pub(super) age: i64,
    pub(super) after: String,
}

/// How many rows were removed, and where to go on if those were not all.
#[derive(Debug)]
pub(super) struct Purged {
    pub(super) removed: u64,
    pub(super) next: Option<String>,
}

/// Requests of one caller, who gets as many answers. Dropped, it leaves the outcome unknown.
pub(super) struct Call<Q, A> {
    pub(super) items: Vec<Q>,
    reply: oneshot::Sender<Vec<Result<A, Error>>>,
}

/// The other end of a [`Call`].
pub(super) type Answer<A> = oneshot::Receiver<Vec<Result<A, Error>>>;

/// Sends one call and waits for the answers.
pub(super) async fn ask<Q, A>(
    lane: &Lane<TableJob>,
    job: fn(Call<Q, A>) -> TableJob,
    items: Vec<Q>,
) -> Vec<Result<A, Error>> {
    let count = items.len();
    let (call, answer): (_, Answer<A>) = Call::new(items);
    lane.push(job(call));
    answer.await.unwrap_or_else(|_| (0..count).map(|_| Err(unknown())).collect())
}

/// The answer to a single item.
pub(super) fn only<A>(answers: Vec<Result<A, Error>>) -> Result<A, Error> {
    answers.into_iter().next().unwrap_or_else(|| Err(unknown()))
}

fn unknown() -> Error {
    Error::new(
        ErrorKind::OutcomeUnknown,
        "the session broke before the server answered; what it did with the request is found out and undone in the background",
    )
}

impl<Q, A> Call<Q, A> {
    pub(super) fn new(items: Vec<Q>) -> (Self, Answer<A>) {
        let (reply, answer) = oneshot::channel();
        (Self { items, reply }, answer)
    }

    /// Whether nobody waits for the answer any more.
    pub(super) fn is_unheard(&self) -> bool {
        self.reply.is_closed()
    }

    /// Answers. Given back if nobody waits any more.
    pub(super) fn answer(self, answers: Vec<Result<A, Error>>) -> Result<(), Vec<Result<A, Error>>> {
        self.reply.send(answers)
    }

    pub(super) fn fail(self, error: &Error) {
        let answers = self.items.iter().map(|_| Err(error.clone())).collect();
        let _ = self.reply.send(answers);
    }
}

impl Call<Request, Attempt> {
    /// Answers that nothing was sent for any of the requests, so that there is nothing to release.
    pub(super) fn refuse(self, error: &Error) {
        let refused = |request: &Request| Ok(Attempt::Refused(error.clone().with_key(&request.key)));
        let answers = self.items.iter().map(refused).collect();
        let _ = self.reply.send(answers);
    }
}

impl TableJob {
    /// Whether it need not be done: its caller has gone. Releases are done all the same.
    pub(super) fn is_needless(&self) -> bool {
        match self {
            Self::Release(_) => false,
            Self::Acquire(call) => call.is_unheard(),
            Self::Renew(call) => call.is_unheard(),
            Self::Confirm(call) => call.is_unheard(),
            Self::Look(call) => call.is_unheard(),
            Self::Force(call) => call.is_unheard(),
            Self::Purge(call) => call.is_unheard(),
            Self::ClaimUpkeep(call) => call.is_unheard(),
            Self::NoteUpkeep(call) => call.is_unheard(),
            Self::End(call) => call.is_unheard(),
        }
    }
}

/// Hands each call as many of `answers` as it has items.
pub(super) fn hand_out<Q, A>(
    calls: Vec<Call<Q, A>>,
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

/// Which statement a job needs, of those of which a round trip had better carry one.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Asks,
    Frees,
}

impl Job for TableJob {
    /// Grants and releases travel in different round trips, the more numerous ones first: each of the two statements
    /// takes as long as its flush to disk, and the callers of the first would wait for the second. A release that
    /// undoes a grant which is asked for here goes with it.
    fn later(jobs: &[&Self]) -> Vec<bool> {
        let asked: FnvHashSet<HolderId> = jobs
            .iter()
            .filter_map(|job| if let Self::Acquire(call) = job { Some(&call.items) } else { None })
            .flatten()
            .map(|request| request.holder)
            .collect();
        let kind = |job: &&Self| match job {
            Self::Acquire(_) => Some(Kind::Asks),
            Self::Release(call) if call.items.iter().any(|ending| asked.contains(&ending.hold.holder)) => {
                Some(Kind::Asks)
            }
            Self::Release(_) => Some(Kind::Frees),
            _ => None,
        };
        let kinds: Vec<_> = jobs.iter().map(kind).collect();
        let count = |wanted| kinds.iter().filter(|kind| **kind == Some(wanted)).count();
        let (asks, frees) = (count(Kind::Asks), count(Kind::Frees));
        if asks == 0 || frees == 0 {
            return Vec::new();
        }
        let waits = if asks > frees { Kind::Frees } else { Kind::Asks };
        kinds.into_iter().map(|kind| kind == Some(waits)).collect()
    }

    fn fail(self, error: Error) {
        match self {
            Self::Acquire(call) => call.refuse(&error),
            Self::Renew(call) => call.fail(&error),
            Self::Release(call) => call.fail(&error),
            Self::Confirm(call) => call.fail(&error),
            Self::Look(call) => call.fail(&error),
            Self::Force(call) => call.fail(&error),
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
    use leasehold_api::LockKey;

    fn acquire(name: &str, serial: u64) -> TableJob {
        let request = Request::new(LockKey::new(name).unwrap(), HolderId::from_parts(1, serial));
        TableJob::Acquire(Call::new(vec![request]).0)
    }

    fn release(name: &str, serial: u64) -> TableJob {
        let hold = Named { key: LockKey::new(name).unwrap(), holder: HolderId::from_parts(1, serial) };
        TableJob::Release(Call::new(vec![Ending { hold, unused: false }]).0)
    }

    fn names(jobs: &[TableJob]) -> Vec<String> {
        let name = |job: &TableJob| match job {
            TableJob::Acquire(call) => format!("acquire {}", call.items[0].key),
            TableJob::Release(call) => format!("release {}", call.items[0].hold.key),
            _ => "other".to_owned(),
        };
        jobs.iter().map(name).collect()
    }

    /// What goes now, and what later.
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
        let other = || TableJob::ClaimUpkeep(Call::new(vec![()]).0);
        let (now, then) = parted(vec![acquire("a", 1), release("b", 2), other()]);
        assert_eq!((now, then), (vec!["release b".into(), "other".into()], vec!["acquire a".into()]));
        let (now, then) = parted(vec![release("a", 1), other(), acquire("b", 2), acquire("c", 3)]);
        assert_eq!(now, ["other", "acquire b", "acquire c"]);
        assert_eq!(then, ["release a"]);
        let (now, then) = parted(vec![release("a", 1), release("b", 2), other()]);
        assert_eq!((now.len(), then.len()), (3, 0), "there is nothing to part");
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
