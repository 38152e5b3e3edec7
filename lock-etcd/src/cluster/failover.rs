//! The order in which a request goes to the members.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::{Class, Failure};

/// The time without a reply after which a copy also goes to the next member.
const BESIDE: Duration = Duration::from_millis(500);

/// The time without a reply after which the next copy is sent, if the member is slow but alive, or the only one.
const AGAIN: Duration = Duration::from_secs(2);

/// The most copies of a request without a reply at the same time. A new copy above this number replaces the oldest one,
/// which is then at least two seconds old.
const COPIES: usize = 6;

/// The pause after all members have failed. An election takes one or two seconds.
const PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(400);

/// The members, with the facts that the order depends on.
pub(super) trait Members: Sync {
    /// The state of the connections with a member at the start of a call.
    type Mark: Copy + Send;

    fn choice(&self) -> &Choice;

    fn mark(&self, member: usize) -> Self::Mark;

    /// Returns whether a call that started at `mark` was possibly sent.
    fn may_have_left(&self, member: usize, mark: Self::Mark) -> bool;

    /// Returns whether the member has replied to another call since `mark`. More copies would then only add to its load.
    fn is_alive(&self, member: usize, mark: Self::Mark) -> bool;

    /// Notes that a call was dropped before the member has replied.
    fn gave_up(&self, member: usize);
}

/// The chosen member, which gets each request first.
pub(super) struct Choice {
    count: usize,
    chosen: AtomicUsize,
    moved: watch::Sender<u64>,
}

impl Choice {
    pub(super) fn new(count: usize) -> Self {
        Self { count, chosen: AtomicUsize::new(0), moved: watch::Sender::new(0) }
    }

    pub(super) fn chosen(&self) -> usize {
        self.chosen.load(Ordering::SeqCst)
    }

    pub(super) fn moved(&self) -> watch::Receiver<u64> {
        self.moved.subscribe()
    }

    /// Chooses the member behind `member`, if `member` is still the chosen one.
    pub(super) fn leave(&self, member: usize) {
        self.choose(member, (member + 1) % self.count);
    }

    /// Chooses `to`, if `from` is still the chosen member.
    pub(super) fn choose(&self, from: usize, to: usize) {
        if from != to && self.chosen.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            self.moved.send_modify(|moves| *moves += 1);
        }
    }
}

/// The time limit of a request, and whether another copy can follow a copy that was possibly carried out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) limit: Duration,
    pub(super) repeat: bool,
}

/// The first reply.
#[derive(Debug)]
pub(super) struct Won<R> {
    pub(super) reply: R,
    /// Whether an earlier copy can still be carried out.
    pub(super) unsure: bool,
}

/// A copy of the request on its way.
struct Copied<'a, R, K> {
    member: usize,
    turn: usize,
    start: Instant,
    mark: K,
    reply: Pin<Box<dyn Future<Output = Result<R, Failure>> + Send + 'a>>,
}

/// The state of one request.
struct Asking<'a, M: Members, R> {
    members: &'a M,
    copies: Vec<Copied<'a, R, M::Mark>>,
    /// The number of copies sent, which selects the next member.
    turn: usize,
    first: usize,
    failures: usize,
    /// Whether a copy that is no longer in `copies` can still be carried out.
    unsure: bool,
    last: Option<Failure>,
}

/// Sends a request by `send` to one member after another, until one has replied or `plan.limit` has passed.
pub(super) async fn ask<'a, M, R, F>(
    members: &'a M,
    plan: Plan,
    send: impl Fn(usize) -> F,
) -> Result<Won<R>, Failure>
where
    M: Members,
    F: Future<Output = Result<R, Failure>> + Send + 'a,
{
    let start = Instant::now();
    let end = start + plan.limit;
    let beside = pace(plan.limit, members.choice().count);
    let mut asking = Asking::new(members);
    if plan.limit.is_zero() {
        return Err(asking.ended());
    }
    // Waits for no timer, because a timer that is due still costs a millisecond.
    asking.start(&send);
    let mut next_copy = start + asking.interval(beside);
    loop {
        let may_send = plan.repeat || asking.copies.is_empty();
        tokio::select! {
            biased;
            (member, turn, result) = first_of(&mut asking.copies) => match result {
                Ok(reply) => return Ok(asking.won(member, turn, reply)),
                Err(failure) => {
                    asking.failed(member, failure, plan.repeat)?;
                    next_copy = Instant::now() + asking.pause();
                }
            },
            () = sleep_until(end) => return Err(asking.ended()),
            () = sleep_until(next_copy), if may_send => {
                if !asking.is_answered_slowly() {
                    asking.start(&send);
                }
                next_copy = Instant::now() + asking.interval(beside);
            }
        }
    }
}

/// Returns the time after which a copy goes to the next of `count` members. A short `limit` leaves time for all of them.
fn pace(limit: Duration, count: usize) -> Duration {
    if count == 1 { (limit / 2).clamp(BESIDE, AGAIN) } else { (limit / 4).clamp(BESIDE / 10, BESIDE) }
}

/// Waits for the first copy that ends, and returns its member, its turn and its result. Pending without a copy.
async fn first_of<R, K>(copies: &mut Vec<Copied<'_, R, K>>) -> (usize, usize, Result<R, Failure>) {
    poll_fn(|cx| {
        for at in 0..copies.len() {
            if let Poll::Ready(result) = copies[at].reply.as_mut().poll(cx) {
                let copy = copies.remove(at);
                return Poll::Ready((copy.member, copy.turn, result));
            }
        }
        Poll::Pending
    })
    .await
}

impl<'a, M: Members, R> Asking<'a, M, R> {
    fn new(members: &'a M) -> Self {
        let first = members.choice().chosen();
        Self { members, copies: Vec::new(), turn: 0, first, failures: 0, unsure: false, last: None }
    }

    /// Returns whether the member of the newest copy is alive, so only slow.
    fn is_answered_slowly(&self) -> bool {
        self.copies
            .last()
            .is_some_and(|copy| copy.start.elapsed() < AGAIN && self.members.is_alive(copy.member, copy.mark))
    }

    /// Returns the time until the next copy, given the usual time `beside`. It is shorter in the second round, because
    /// the first copies were possibly lost with the leader, and a copy has to follow soon after the election.
    fn interval(&self, beside: Duration) -> Duration {
        let count = self.members.choice().count;
        if count > 1 && self.turn / count == 1 { beside / 2 } else { beside }
    }

    /// Sends a copy to the next member.
    fn start<F>(&mut self, send: &impl Fn(usize) -> F)
    where
        F: Future<Output = Result<R, Failure>> + Send + 'a,
    {
        let turn = self.turn;
        let member = (self.first + turn) % self.members.choice().count;
        self.turn += 1;
        if self.copies.len() >= COPIES {
            self.give_up(0);
        }
        // Takes the mark first, because the future can send at its first poll.
        let mark = self.members.mark(member);
        let start = Instant::now();
        self.copies.push(Copied { member, turn, start, mark, reply: Box::pin(send(member)) });
    }

    fn give_up(&mut self, at: usize) {
        let copy = self.copies.remove(at);
        // Drops the future first, because it can send until it is dropped.
        drop(copy.reply);
        self.unsure |= self.members.may_have_left(copy.member, copy.mark);
        self.members.gave_up(copy.member);
        self.members.choice().leave(copy.member);
    }

    /// Returns whether a copy without a reply can still be carried out.
    fn is_unsure(&self) -> bool {
        let may_have_left =
            |copy: &Copied<'_, R, M::Mark>| self.members.may_have_left(copy.member, copy.mark);
        self.unsure || self.copies.iter().any(may_have_left)
    }

    fn won(self, member: usize, turn: usize, reply: R) -> Won<R> {
        if turn > 0 {
            let choice = self.members.choice();
            choice.choose(choice.chosen(), member);
        }
        let unsure = self.is_unsure();
        Won { reply, unsure }
    }

    /// Notes the failure of a copy. Returns the failure if no other copy can help, or if `repeat` is `false` and a copy
    /// was possibly carried out.
    fn failed(&mut self, member: usize, failure: Failure, repeat: bool) -> Result<(), Failure> {
        self.failures += 1;
        self.unsure |= failure.sent();
        if !failure.may_pass() {
            return Err(failure.or_sent(self.is_unsure()));
        }
        self.members.choice().leave(member);
        if self.unsure && !repeat {
            return Err(failure.or_sent(true));
        }
        self.last = Some(failure.or_more_telling(self.last.take()));
        Ok(())
    }

    /// Returns the pause before the next copy. It is zero unless all members have failed since the last pause.
    fn pause(&self) -> Duration {
        let count = self.members.choice().count;
        if !self.failures.is_multiple_of(count) {
            return Duration::ZERO;
        }
        let rounds = u32::try_from(self.failures / count).unwrap_or(u32::MAX);
        let longest = PAUSE.saturating_mul(2_u32.saturating_pow(rounds)).min(LONGEST_PAUSE);
        longest.mul_f64(0.5 + fastrand::f64() / 2.0)
    }

    /// Returns the failure of a request whose time has passed.
    fn ended(mut self) -> Failure {
        while !self.copies.is_empty() {
            self.give_up(0);
        }
        let class = if self.unsure { Class::Late } else { Class::Unreachable };
        Failure::unsent(class).or_more_telling(self.last).or_sent(self.unsure)
    }
}

#[cfg(test)]
mod tests;
