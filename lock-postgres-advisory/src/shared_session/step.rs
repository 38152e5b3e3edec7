//! The steps of a statement: attempts and unlocks, with the server's replies and the replies to their callers.

use leasehold_api::{Error, FencingToken, HolderId};
use leasehold_engine::ReleaseReply;

use crate::reply::ReplySender;
use crate::sql::LockMode;
use crate::try_outcome::{TryOutcome, token_of};

/// An attempt or an unlock in a statement.
pub(super) struct Step {
    pub(super) number: i64,
    pub(super) holder: HolderId,
    pub(super) mode: LockMode,
    pub(super) kind: StepKind,
}

pub(super) enum StepKind {
    /// An attempt, and whether its caller waits.
    Try(bool, ReplySender<TryOutcome>),
    Unlock(ReplySender<ReleaseReply>),
}

/// The server's reply to one step.
#[derive(Clone, Copy)]
pub(super) struct StepReply {
    pub(super) ok: bool,
    pub(super) waiters: bool,
    pub(super) token: Option<FencingToken>,
}

/// Reads the server's replies to a number of `steps` from the codes of a statement, in any order, and the number that
/// it drew for all grants.
pub(super) fn read(codes: &[i64], number: i64, steps: usize) -> Result<Vec<StepReply>, sqlx::Error> {
    let unreadable = || sqlx::Error::Protocol("the server's replies do not belong to the numbers".into());
    let mut replies = vec![None; steps];
    for code in codes {
        let place = usize::try_from((code >> 2) - 1).map_err(|_| unreadable())?;
        let reply = replies.get_mut(place).ok_or_else(unreadable)?;
        let token = token_of(number, place as u64)?;
        *reply = Some(StepReply { ok: code & 1 != 0, waiters: code & 2 != 0, token });
    }
    replies.into_iter().collect::<Option<Vec<_>>>().ok_or_else(unreadable)
}

/// A reply that is ready for its caller.
pub(super) enum Reply {
    Try(ReplySender<TryOutcome>, Result<TryOutcome, Error>),
    Unlock(ReplySender<ReleaseReply>, Result<ReleaseReply, Error>),
}

impl Reply {
    /// Sends the reply, and ignores a caller that is gone.
    pub(super) fn send(self) {
        match self {
            Self::Try(answer, outcome) => drop(answer.send(outcome)),
            Self::Unlock(answer, outcome) => drop(answer.send(outcome)),
        }
    }
}

/// Sends the replies, the last one first, because a caller of several keys awaits them in order and then wakes once.
pub(super) fn send_all(replies: Vec<Reply>) {
    replies.into_iter().rev().for_each(Reply::send);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::Pin;
    use std::sync::{Arc, Mutex};
    use std::task::{Context, Wake, Waker};

    use tokio::sync::oneshot;

    #[test]
    fn a_reply_belongs_to_the_step_at_its_position_in_any_order() {
        let read = |codes: &[i64]| {
            let replies = read(codes, 7, 3).ok()?;
            let shown = |reply: &StepReply| (reply.ok, reply.waiters, reply.token.map(FencingToken::as_u64));
            Some(replies.iter().map(shown).collect::<Vec<_>>())
        };
        let token = |place: u64| Some((7 << 10) + place);
        let expected = vec![(true, false, token(0)), (false, false, token(1)), (true, true, token(2))];
        assert_eq!(read(&[5, 8, 15]), Some(expected.clone()));
        assert_eq!(read(&[15, 5, 8]), Some(expected));
        for foreign in [&[5, 8][..], &[5, 8, 17], &[5, 8, 0], &[-1, 5, 8, 15]] {
            assert_eq!(read(foreign), None, "{foreign:?}");
        }
    }

    type Caller = Pin<Box<dyn Future<Output = ()> + Send>>;

    /// Polls a caller at each wake-up, like an idle thread. Notes for each poll whether it was the last one.
    struct Eager {
        caller: Mutex<Caller>,
        polls: Mutex<Vec<bool>>,
    }

    impl Wake for Eager {
        fn wake(self: Arc<Self>) {
            let waker = Waker::from(Arc::clone(&self));
            let polled = self.caller.lock().unwrap().as_mut().poll(&mut Context::from_waker(&waker));
            self.polls.lock().unwrap().push(polled.is_ready());
        }
    }

    #[test]
    fn a_caller_of_several_keys_wakes_once() {
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..64).map(|_| oneshot::channel()).unzip();
        let caller: Caller = Box::pin(async move {
            for receiver in receivers {
                let reply: Result<ReleaseReply, Error> = receiver.await.unwrap();
                assert!(reply.unwrap().was_held);
            }
        });
        let eager = Arc::new(Eager { caller: Mutex::new(caller), polls: Mutex::default() });
        Arc::clone(&eager).wake();
        let released = |answer| Reply::Unlock(answer, Ok(ReleaseReply::new(true)));
        send_all(senders.into_iter().map(released).collect());
        assert_eq!(*eager.polls.lock().unwrap(), [false, true]);
    }
}
