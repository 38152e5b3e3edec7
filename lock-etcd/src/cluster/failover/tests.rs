use std::sync::{Mutex, PoisonError};

use tokio::time::sleep;

use super::*;

/// How a member of the fake cluster behaves.
#[derive(Clone, Copy)]
enum Manner {
    /// Replies after this many milliseconds.
    Answers(u64),
    /// Fails after this many milliseconds with this class. The last part is whether the request was sent.
    Fails(u64, Class, bool),
    /// Never replies.
    Silent,
    /// Never gets a connection.
    Unconnected,
}

use Manner::{Answers, Fails, Silent, Unconnected};

struct Fake {
    choice: Choice,
    manners: Vec<Manner>,
    start: Instant,
    /// The members that got a copy, each with the milliseconds since the start.
    asked: Mutex<Vec<(usize, u64)>>,
    given_up: Mutex<Vec<usize>>,
    /// Whether the members reply to other calls.
    is_alive: bool,
}

impl Members for Fake {
    type Mark = ();

    fn choice(&self) -> &Choice {
        &self.choice
    }

    fn mark(&self, _: usize) {}

    fn may_have_left(&self, member: usize, (): ()) -> bool {
        !matches!(self.manners[member], Unconnected)
    }

    fn is_alive(&self, _: usize, (): ()) -> bool {
        self.is_alive
    }

    fn gave_up(&self, member: usize) {
        self.given_up.lock().unwrap_or_else(PoisonError::into_inner).push(member);
    }
}

impl Fake {
    fn new(manners: &[Manner]) -> Self {
        Self {
            choice: Choice::new(manners.len()),
            manners: manners.to_vec(),
            start: Instant::now(),
            asked: Mutex::default(),
            given_up: Mutex::default(),
            is_alive: false,
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_millis()).unwrap()
    }

    async fn answer(&self, member: usize) -> Result<usize, Failure> {
        self.asked.lock().unwrap().push((member, self.now()));
        match self.manners[member] {
            Answers(after) => {
                sleep(Duration::from_millis(after)).await;
                Ok(member)
            }
            Fails(after, class, sent) => {
                sleep(Duration::from_millis(after)).await;
                Err(Failure::unsent(class).or_sent(sent))
            }
            Silent | Unconnected => std::future::pending().await,
        }
    }

    async fn ask(&self, limit: u64, repeat: bool) -> Result<Won<usize>, Failure> {
        let plan = Plan { limit: Duration::from_millis(limit), repeat };
        ask(self, plan, |member| self.answer(member)).await
    }

    fn asked(&self) -> Vec<(usize, u64)> {
        self.asked.lock().unwrap().clone()
    }
}

fn shown(won: &Won<usize>) -> (usize, bool) {
    (won.reply, won.unsure)
}

#[tokio::test(start_paused = true)]
async fn a_member_that_answers_is_asked_alone() {
    let fake = Fake::new(&[Answers(499), Answers(0), Answers(0)]);
    assert_eq!(shown(&fake.ask(8000, true).await.unwrap()), (0, false));
    assert_eq!((fake.asked(), fake.choice.chosen()), (vec![(0, 0)], 0));
}

/// Sends it at the first poll, because even a timer that is due costs a millisecond.
#[tokio::test(start_paused = true)]
async fn the_first_copy_waits_for_no_timer() {
    // Starts between two milliseconds, because a timer that is due then fires at the next millisecond.
    tokio::time::advance(Duration::from_micros(500)).await;
    let fake = Fake::new(&[Silent, Silent]);
    let asking = std::pin::pin!(fake.ask(8000, true));
    assert!(futures_util::poll!(asking).is_pending());
    assert_eq!(fake.asked(), [(0, 0)]);
    let failure = fake.ask(0, true).await.unwrap_err();
    assert!(!failure.sent(), "a request without time is not sent: {failure:?}");
    assert_eq!(fake.asked(), [(0, 0)]);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_was_not_sent_goes_to_the_next_member_at_once() {
    let fake = Fake::new(&[Fails(3, Class::Unreachable, false), Answers(1), Silent]);
    let mut moved = fake.choice.moved();
    assert_eq!(shown(&fake.ask(8000, true).await.unwrap()), (1, false));
    assert_eq!((fake.asked(), fake.choice.chosen()), (vec![(0, 0), (1, 3)], 1));
    assert!(moved.has_changed().unwrap());
    moved.mark_unchanged();
    assert_eq!(shown(&fake.ask(8000, true).await.unwrap()), (1, false));
    assert!(!moved.has_changed().unwrap(), "stays with the member that answers");
}

#[tokio::test(start_paused = true)]
async fn a_second_member_is_asked_beside_a_silent_one_and_its_answer_leaves_a_copy_open() {
    let fake = Fake::new(&[Silent, Answers(10), Answers(0)]);
    assert_eq!(shown(&fake.ask(8000, true).await.unwrap()), (1, true));
    assert_eq!((fake.asked(), fake.choice.chosen()), (vec![(0, 0), (1, 500)], 1));
}

#[tokio::test(start_paused = true)]
async fn the_first_answer_wins_also_from_the_slower_member() {
    let fake = Fake::new(&[Answers(600), Answers(500), Answers(0)]);
    assert_eq!(shown(&fake.ask(8000, true).await.unwrap()), (0, true));
    assert_eq!(fake.choice.chosen(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_copy_without_a_connection_leaves_nothing_open() {
    let fake = Fake::new(&[Unconnected, Answers(10), Answers(0)]);
    assert_eq!(shown(&fake.ask(8000, true).await.unwrap()), (1, false));
}

#[tokio::test(start_paused = true)]
async fn silent_members_are_asked_in_turn_until_the_limit() {
    let fake = Fake::new(&[Silent, Silent, Silent]);
    let failure = fake.ask(2400, true).await.unwrap_err();
    assert_eq!((failure.class(), failure.sent()), (Class::Late, true));
    assert_eq!(fake.asked(), [(0, 0), (1, 500), (2, 1000), (0, 1250), (1, 1500), (2, 1750), (0, 2250)]);
    assert_eq!(fake.now(), 2400);
    // The first copy makes room for the seventh, and the others are on their way at the end.
    assert_eq!(*fake.given_up.lock().unwrap(), [0, 1, 2, 0, 1, 2, 0]);
}

#[tokio::test(start_paused = true)]
async fn a_slow_member_that_answers_other_calls_gets_time() {
    let mut fake = Fake::new(&[Answers(1900), Answers(0), Answers(0)]);
    fake.is_alive = true;
    assert_eq!(shown(&fake.ask(8000, true).await.unwrap()), (0, false));
    assert_eq!(fake.asked(), [(0, 0)]);

    let mut fake = Fake::new(&[Silent, Answers(0), Answers(0)]);
    fake.is_alive = true;
    assert_eq!(shown(&fake.ask(8000, true).await.unwrap()), (1, true));
    assert_eq!(fake.asked(), [(0, 0), (1, 2000)], "but a lost copy is repeated");
}

#[tokio::test(start_paused = true)]
async fn no_more_than_six_copies_are_on_their_way() {
    let fake = Fake::new(&[Silent; 5]);
    fake.ask(3000, true).await.unwrap_err();
    let asked = [(0, 0), (1, 500), (2, 1000), (3, 1500), (4, 2000), (0, 2250), (1, 2500), (2, 2750)];
    assert_eq!(fake.asked(), asked);
    assert_eq!(*fake.given_up.lock().unwrap(), [0, 1, 2, 3, 4, 0, 1, 2], "the oldest copy goes first");
}

#[tokio::test(start_paused = true)]
async fn a_short_limit_leaves_time_for_every_member() {
    let fake = Fake::new(&[Silent, Silent, Answers(1)]);
    assert_eq!(shown(&fake.ask(200, true).await.unwrap()), (2, true));
    assert_eq!(fake.asked(), [(0, 0), (1, 50), (2, 100)]);
}

#[tokio::test(start_paused = true)]
async fn the_only_member_is_asked_again_after_two_seconds() {
    let fake = Fake::new(&[Silent]);
    fake.ask(5000, true).await.unwrap_err();
    assert_eq!(fake.asked(), [(0, 0), (0, 2000), (0, 4000)]);
}

#[tokio::test(start_paused = true)]
async fn members_without_a_leader_are_asked_in_rounds_with_pauses() {
    let fake = Fake::new(&[
        Fails(0, Class::Unreachable, false),
        Fails(0, Class::NoLeader, false),
        Fails(0, Class::Busy, false),
    ]);
    let failure = fake.ask(1000, true).await.unwrap_err();
    assert_eq!((failure.class(), failure.sent()), (Class::NoLeader, false), "tells more than the others");
    let asked = fake.asked();
    let members: Vec<_> = asked.iter().map(|(member, _)| *member).collect();
    let turns: Vec<_> = (0..members.len()).map(|turn| turn % 3).collect();
    assert_eq!(members, turns);
    let rounds: Vec<_> = asked.iter().step_by(3).map(|(_, at)| *at).collect();
    assert!((4..=8).contains(&rounds.len()), "{rounds:?}");
    assert!(rounds.windows(2).all(|two| (50..=401).contains(&(two[1] - two[0]))), "{rounds:?}");
}

#[tokio::test(start_paused = true)]
async fn a_refusal_that_all_members_would_give_ends_the_question() {
    for class in [Class::Denied, Class::NoSpace, Class::LeaseNotFound, Class::Invalid, Class::Corrupt] {
        let fake = Fake::new(&[Fails(5, class, false), Answers(0), Answers(0)]);
        let failure = fake.ask(8000, true).await.unwrap_err();
        assert_eq!((failure.class(), failure.sent(), fake.asked()), (class, false, vec![(0, 0)]));
    }
}

#[tokio::test(start_paused = true)]
async fn a_refusal_beside_a_silent_copy_counts_as_sent() {
    let fake = Fake::new(&[Silent, Fails(0, Class::LeaseNotFound, false)]);
    let failure = fake.ask(8000, true).await.unwrap_err();
    assert_eq!((failure.class(), failure.sent()), (Class::LeaseNotFound, true));
}

#[tokio::test(start_paused = true)]
async fn a_failure_after_sending_is_repeated_and_stays_open() {
    let fake = Fake::new(&[Fails(2, Class::Lost, true), Answers(1)]);
    assert_eq!(shown(&fake.ask(8000, true).await.unwrap()), (1, true));
    assert_eq!(fake.asked(), [(0, 0), (1, 2)]);
}

#[tokio::test(start_paused = true)]
async fn a_call_made_once_is_repeated_only_if_it_was_not_sent() {
    let fake = Fake::new(&[Fails(1, Class::Unreachable, false), Fails(1, Class::Lost, true), Answers(0)]);
    let failure = fake.ask(8000, false).await.unwrap_err();
    assert_eq!((failure.class(), failure.sent()), (Class::Lost, true));
    assert_eq!(fake.asked(), [(0, 0), (1, 1)]);
    assert_eq!(fake.choice.chosen(), 2);

    let fake = Fake::new(&[Silent, Answers(0)]);
    let failure = fake.ask(8000, false).await.unwrap_err();
    assert_eq!((failure.class(), failure.sent(), fake.now()), (Class::Late, true, 8000));
    assert_eq!(fake.asked(), [(0, 0)], "no second member beside it");
    assert_eq!(fake.choice.chosen(), 1, "the next question goes elsewhere");
}

#[tokio::test(start_paused = true)]
async fn members_that_cannot_be_reached_are_told_apart_from_silent_ones() {
    let fake = Fake::new(&[Unconnected, Unconnected]);
    let failure = fake.ask(3000, true).await.unwrap_err();
    assert_eq!((failure.class(), failure.sent()), (Class::Unreachable, false));
}
