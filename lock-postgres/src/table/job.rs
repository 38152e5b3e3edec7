//! What the sessions are asked to do.

use fnv::FnvHashSet;
use leasehold_api::{Error, HoldInfo, HolderId};
use leasehold_engine::{Attempt, Freed, Renewed, Request};
use tokio::sync::oneshot;

use super::registry::{Named, Process};
use crate::lane::{Job, again};

/// One call of the backend.
pub(super) enum TableJob {
    Acquire(Call<Request, Attempt>),
    Renew(Call<(Named, i64), Renewed>),
    Release(Call<Named, Freed>),
    /// Which of these are still held.
    Confirm(Call<Named, bool>),
    Look(Call<Look, Vec<HoldInfo>>),
    Force(Call<Named, bool>),
    /// Removes what ended so many microseconds ago; answers how many rows.
    Purge(Call<i64, u64>),
    /// Ends sessions of ours that are in doubt; answers which of them are gone.
    End(Call<Process, bool>),
}

/// Which holds to show.
#[derive(Clone, Debug)]
pub(super) struct Look {
    pub(super) from: String,
    /// The last key, if there is one.
    pub(super) to: Option<String>,
    pub(super) prefix: String,
    pub(super) ended: bool,
    pub(super) limit: Option<i64>,
}

/// Requests of one caller, who gets as many answers. Dropped, it leaves the outcome unknown.
pub(super) struct Call<Q, A> {
    pub(super) items: Vec<Q>,
    reply: oneshot::Sender<Vec<Result<A, Error>>>,
}

/// The other end of a [`Call`].
pub(super) type Answer<A> = oneshot::Receiver<Vec<Result<A, Error>>>;

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
        let answers = self.items.iter().map(|_| Err(again(error))).collect();
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

impl Job for TableJob {
    /// Releases go alone before what is asked for: both statements take as long as their flush, and whoever is
    /// answered by the first would wait for the second. There are never more releases than there were grants.
    fn later(jobs: &mut Vec<Self>) -> Vec<Self> {
        let asks = |job: &Self| matches!(job, Self::Acquire(_));
        let asked: FnvHashSet<HolderId> = jobs
            .iter()
            .filter_map(|job| if let Self::Acquire(call) = job { Some(&call.items) } else { None })
            .flatten()
            .map(|request| request.holder)
            .collect();
        let late = |call: &Call<Named, Freed>| call.items.iter().any(|hold| asked.contains(&hold.holder));
        let frees = |job: &Self| matches!(job, Self::Release(call) if !late(call));
        if asked.is_empty() || !jobs.iter().any(frees) {
            return Vec::new();
        }
        jobs.extract_if(.., |job| asks(job) || matches!(job, Self::Release(call) if late(call))).collect()
    }

    fn fail(self, error: Error) {
        match self {
            Self::Acquire(call) => call.fail(&error),
            Self::Renew(call) => call.fail(&error),
            Self::Release(call) => call.fail(&error),
            Self::Confirm(call) => call.fail(&error),
            Self::Look(call) => call.fail(&error),
            Self::Force(call) => call.fail(&error),
            Self::Purge(call) => call.fail(&error),
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
        TableJob::Release(Call::new(vec![hold]).0)
    }

    fn names(jobs: &[TableJob]) -> Vec<String> {
        let name = |job: &TableJob| match job {
            TableJob::Acquire(call) => format!("acquire {}", call.items[0].key),
            TableJob::Release(call) => format!("release {}", call.items[0].key),
            _ => "other".to_owned(),
        };
        jobs.iter().map(name).collect()
    }

    #[test]
    fn releases_go_first_unless_they_undo_what_is_asked_for() {
        let other = TableJob::Purge(Call::new(vec![1]).0);
        let mut jobs = vec![acquire("a", 1), release("b", 2), other, acquire("c", 3), release("c", 3)];
        let later = TableJob::later(&mut jobs);
        assert_eq!(names(&jobs), ["release b", "other"]);
        assert_eq!(names(&later), ["acquire a", "acquire c", "release c"]);
        let mut jobs = later;
        assert!(TableJob::later(&mut jobs).is_empty(), "what is left goes together");
        assert_eq!(names(&jobs), ["acquire a", "acquire c", "release c"]);
        let mut jobs = vec![release("a", 1), release("b", 2)];
        assert!(TableJob::later(&mut jobs).is_empty());
    }
}
