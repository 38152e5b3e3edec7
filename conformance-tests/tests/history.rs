//! Tests the checker of histories: good histories pass, and each kind of corruption is reported as its
//! violation.

// All corruptions have one function type.
#![allow(clippy::unwrap_used, clippy::ptr_arg)]

use std::time::Duration;

use leasehold_api::{
    Capabilities, ErrorKind, Fencing, FencingToken, HolderId, LockKey, LossReason, Mode, Scope,
};
use leasehold_conformance::history::{Event, EventKind, History, ViolationKind, check};
use proptest::prelude::*;

fn capabilities() -> Capabilities {
    let mut has = Capabilities::new(Scope::Process);
    has.fencing = Fencing::Volatile;
    has.loss_detection = Duration::from_secs(1);
    has
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

    #[test]
    fn good_histories_pass(seed: u64) {
        let history = good(seed);
        prop_assert_eq!(check(&history, &capabilities()), Ok(()), "{}", show(&history));
    }

    #[test]
    fn spoilt_histories_are_flagged(seed: u64, pick: usize) {
        for (name, spoil, kind) in SPOILERS {
            let mut history = good(seed);
            // A history can lack the events that this function corrupts.
            if spoil(&mut history.events, pick).is_none() {
                continue;
            }
            let violations = check(&history, &capabilities()).err().unwrap_or_default();
            prop_assert!(
                violations.iter().any(|v| v.kind == *kind),
                "{} should be flagged as {:?}, was {:?}\n{}", name, kind, violations, show(&history)
            );
        }
    }
}

#[test]
fn every_spoiler_finds_something_to_spoil() {
    for (name, spoil, _) in SPOILERS {
        let hits = (0..50).filter(|seed| spoil(&mut good(*seed).events, 3).is_some()).count();
        assert!(hits >= 10, "{name} spoilt {hits} of 50 histories");
    }
}

type Spoiler = fn(&mut Vec<Event>, usize) -> Option<()>;

const SPOILERS: &[(&str, Spoiler, ViolationKind)] = &[
    ("two tokens swapped", swap_tokens, ViolationKind::TokenNotGreater),
    ("a token repeated", repeat_token, ViolationKind::TokenNotGreater),
    ("a token taken away", remove_token, ViolationKind::TokenMismatch),
    ("a hold stretched", stretch_hold, ViolationKind::Overlap),
    ("a grant doubled", double_grant, ViolationKind::GrantedTwice),
    ("a release dropped", drop_release, ViolationKind::Overlap),
    ("the last release dropped", drop_last_release, ViolationKind::NeverEnded),
    ("an answer dropped", drop_answer, ViolationKind::NeverEnded),
    ("a question dropped", drop_question, ViolationKind::NotAsked),
    ("a lost guard released with Ok", lost_release_ok, ViolationKind::ReleasedUnheld),
    ("a release begun by nobody", drop_releasing, ViolationKind::ReleasedUnheld),
    ("a loss after the release", lose_released, ViolationKind::LostAfterRelease),
    ("a loss doubled", double_loss, ViolationKind::LostTwice),
    ("a lost guard renewed", renew_lost, ViolationKind::RenewedUnheld),
    ("a stranger dropped", strange_holder, ViolationKind::UnknownHolder),
    ("a budget lengthened", early_timeout, ViolationKind::TimedOutEarly),
    ("a timeout of a wait for ever", forever_timeout, ViolationKind::TimeoutUnasked),
    ("time turned back", turn_back, ViolationKind::TimeWentBack),
];

// ---- random good histories ----

struct Pen {
    rng: fastrand::Rng,
    at: Duration,
    events: Vec<Event>,
    calls: u64,
    tokens: u64,
    /// The key, the client, the holder and whether the hold is lost.
    held: Vec<(LockKey, u32, HolderId, bool)>,
}

impl Pen {
    fn write(&mut self, client: u32, key: &LockKey, what: EventKind) {
        self.events.push(Event::new(self.at, client, key.clone(), what));
        self.at += Duration::from_millis(self.rng.u64(1..50));
    }

    fn ask(&mut self, client: u32, key: &LockKey, budget: Option<Duration>) -> u64 {
        self.calls += 1;
        self.write(client, key, EventKind::Asked { call: self.calls, budget });
        self.calls
    }

    fn step(&mut self) {
        let key = LockKey::new(["a", "b", "c"][self.rng.usize(..3)]).unwrap();
        let client = self.rng.u32(1..4);
        let good = self.held.iter().position(|(k, _, _, lost)| *k == key && !lost);
        match (self.rng.u32(..10), good) {
            (0..=3, None) => {
                let budget = [Some(Duration::ZERO), Some(Duration::from_secs(5)), None][self.rng.usize(..3)];
                let call = self.ask(client, &key, budget);
                self.tokens += self.rng.u64(1..5);
                let holder = HolderId::from_parts(u128::from(client), self.tokens);
                let token = Some(FencingToken::from_u64(self.tokens));
                self.write(client, &key, EventKind::Granted { call, holder, token, mode: Mode::Exclusive });
                self.held.push((key, client, holder, false));
            }
            (0..=1, Some(_)) => {
                let call = self.ask(client, &key, Some(Duration::ZERO));
                self.write(client, &key, EventKind::Contended { call });
            }
            (2, Some(_)) => {
                let budget = Duration::from_millis(self.rng.u64(1..500));
                let call = self.ask(client, &key, Some(budget));
                self.at += budget;
                self.write(client, &key, EventKind::Failed { call, kind: ErrorKind::Timeout });
            }
            (3 | 4, _) => {
                let call = self.ask(client, &key, None);
                self.write(client, &key, EventKind::Cancelled { call });
            }
            (5, Some(i)) => {
                let (key, client, holder, _) = self.held[i].clone();
                self.held[i].3 = true;
                self.write(client, &key, EventKind::Lost { holder, reason: LossReason::ForcedRelease });
            }
            (6, Some(i)) => {
                let (key, client, holder, _) = self.held[i].clone();
                self.write(client, &key, EventKind::Renewed { holder });
            }
            _ if !self.held.is_empty() => {
                let i = self.rng.usize(..self.held.len());
                self.end(i);
            }
            _ => {}
        }
    }

    fn end(&mut self, i: usize) {
        let (key, client, holder, lost) = self.held.remove(i);
        if self.rng.u32(..4) == 0 {
            self.write(client, &key, EventKind::Dropped { holder });
            return;
        }
        self.write(client, &key, EventKind::Releasing { holder });
        let failed = lost.then_some(ErrorKind::Lost);
        self.write(client, &key, EventKind::Released { holder, failed });
    }
}

fn good(seed: u64) -> History {
    let rng = fastrand::Rng::with_seed(seed);
    let mut pen = Pen { rng, at: Duration::ZERO, events: Vec::new(), calls: 0, tokens: 0, held: Vec::new() };
    for _ in 0..80 {
        pen.step();
    }
    while !pen.held.is_empty() {
        pen.end(0);
    }
    History::new(pen.events, true)
}

fn show(history: &History) -> String {
    history.events.iter().enumerate().map(|(i, e)| format!("{i:>3} {e}\n")).collect()
}

// ---- the corruptions ----

/// Returns one of the events that `wanted` accepts, selected by `pick`.
fn find(events: &[Event], pick: usize, wanted: impl Fn(usize, &Event) -> bool) -> Option<usize> {
    let places: Vec<_> = (0..events.len()).filter(|i| wanted(*i, &events[*i])).collect();
    (!places.is_empty()).then(|| places[pick % places.len()])
}

fn is_grant(event: &Event) -> bool {
    matches!(event.kind, EventKind::Granted { .. })
}

fn next_grant(events: &[Event], after: usize) -> Option<usize> {
    (after + 1..events.len()).find(|i| is_grant(&events[*i]) && events[*i].key == events[after].key)
}

fn holder_of(event: &Event) -> Option<HolderId> {
    match event.kind {
        EventKind::Granted { holder, .. }
        | EventKind::Releasing { holder }
        | EventKind::Released { holder, .. } => Some(holder),
        _ => None,
    }
}

fn token_of(event: &mut Event) -> Option<&mut Option<FencingToken>> {
    match &mut event.kind {
        EventKind::Granted { token, .. } => Some(token),
        _ => None,
    }
}

fn swap_tokens(events: &mut Vec<Event>, pick: usize) -> Option<()> {
    let first = find(events, pick, |i, e| is_grant(e) && next_grant(events, i).is_some())?;
    let second = next_grant(events, first)?;
    let later = *token_of(&mut events[second])?;
    let earlier = token_of(&mut events[first])?.take();
    *token_of(&mut events[first])? = later;
    *token_of(&mut events[second])? = earlier;
    Some(())
}

fn repeat_token(events: &mut Vec<Event>, pick: usize) -> Option<()> {
    let first = find(events, pick, |i, e| is_grant(e) && next_grant(events, i).is_some())?;
    let second = next_grant(events, first)?;
    let earlier = *token_of(&mut events[first])?;
    *token_of(&mut events[second])? = earlier;
    Some(())
}

fn remove_token(events: &mut Vec<Event>, pick: usize) -> Option<()> {
    let grant = find(events, pick, |_, e| is_grant(e))?;
    token_of(&mut events[grant])?.take();
    Some(())
}

/// Returns the two events of a release and the next grant of its key.
fn release_before_grant(events: &[Event], pick: usize) -> Option<(usize, usize, usize)> {
    let begin = find(events, pick, |i, e| {
        let lost =
            |h| events.iter().any(|e| matches!(e.kind, EventKind::Lost { holder, .. } if Some(holder) == h));
        matches!(e.kind, EventKind::Releasing { .. })
            && next_grant(events, i).is_some()
            && !lost(holder_of(e))
    })?;
    let end = (begin + 1..events.len()).find(|i| holder_of(&events[*i]) == holder_of(&events[begin]))?;
    Some((begin, end, next_grant(events, begin)?))
}

fn stretch_hold(events: &mut Vec<Event>, pick: usize) -> Option<()> {
    let (begin, end, grant) = release_before_grant(events, pick)?;
    let at = events[grant].at;
    let mut released = events.remove(end);
    let mut releasing = events.remove(begin);
    (released.at, releasing.at) = (at, at);
    // Two events before the grant were removed.
    events.insert(grant - 1, releasing);
    events.insert(grant, released);
    Some(())
}

fn double_grant(events: &mut Vec<Event>, pick: usize) -> Option<()> {
    let grant = find(events, pick, |_, e| is_grant(e))?;
    events.insert(grant + 1, events[grant].clone());
    Some(())
}

fn drop_release(events: &mut Vec<Event>, pick: usize) -> Option<()> {
    let (begin, end, _) = release_before_grant(events, pick)?;
    events.remove(end);
    events.remove(begin);
    Some(())
}

fn drop_last_release(events: &mut Vec<Event>, _: usize) -> Option<()> {
    let end = events.iter().rposition(|e| matches!(e.kind, EventKind::Released { .. }))?;
    events.remove(end);
    Some(())
}

fn drop_answer(events: &mut Vec<Event>, pick: usize) -> Option<()> {
    let answer = find(events, pick, |_, e| {
        matches!(e.kind, EventKind::Contended { .. } | EventKind::Cancelled { .. })
    })?;
    events.remove(answer);
    Some(())
}

fn drop_question(events: &mut Vec<Event>, pick: usize) -> Option<()> {
    let question = find(events, pick, |_, e| matches!(e.kind, EventKind::Asked { .. }))?;
    events.remove(question);
    Some(())
}

fn lost_release_ok(events: &mut Vec<Event>, pick: usize) -> Option<()> {
    let release = find(events, pick, |_, e| matches!(e.kind, EventKind::Released { failed: Some(_), .. }))?;
    if let EventKind::Released { failed, .. } = &mut events[release].kind {
        *failed = None;
    }
    Some(())
}

fn drop_releasing(events: &mut Vec<Event>, pick: usize) -> Option<()> {
    let end = find(events, pick, |_, e| matches!(e.kind, EventKind::Released { failed: None, .. }))?;
    let begin = (0..end).rev().find(|i| {
        matches!(events[*i].kind, EventKind::Releasing { .. })
            && holder_of(&events[*i]) == holder_of(&events[end])
    })?;
    events.remove(begin);
    Some(())
}

fn lose_released(events: &mut Vec<Event>, pick: usize) -> Option<()> {
    let release = find(events, pick, |_, e| matches!(e.kind, EventKind::Released { failed: None, .. }))?;
    let holder = holder_of(&events[release])?;
    let what = EventKind::Lost { holder, reason: LossReason::Gone };
    insert_after(events, release, what);
    Some(())
}

fn double_loss(events: &mut Vec<Event>, pick: usize) -> Option<()> {
    let loss = find(events, pick, |_, e| matches!(e.kind, EventKind::Lost { .. }))?;
    events.insert(loss + 1, events[loss].clone());
    Some(())
}

fn renew_lost(events: &mut Vec<Event>, pick: usize) -> Option<()> {
    let loss = find(events, pick, |_, e| matches!(e.kind, EventKind::Lost { .. }))?;
    let EventKind::Lost { holder, .. } = events[loss].kind else { return None };
    insert_after(events, loss, EventKind::Renewed { holder });
    Some(())
}

fn insert_after(events: &mut Vec<Event>, at: usize, what: EventKind) {
    let mut event = events[at].clone();
    event.kind = what;
    events.insert(at + 1, event);
}

fn strange_holder(events: &mut Vec<Event>, pick: usize) -> Option<()> {
    let dropped = find(events, pick, |_, e| matches!(e.kind, EventKind::Dropped { .. }))?;
    events[dropped].kind = EventKind::Dropped { holder: HolderId::from_parts(0, 0) };
    Some(())
}

fn timed_out_question(events: &mut [Event], pick: usize) -> Option<&mut Option<Duration>> {
    let timeout =
        find(events, pick, |_, e| matches!(e.kind, EventKind::Failed { kind: ErrorKind::Timeout, .. }))?;
    let EventKind::Failed { call: wanted, .. } = events[timeout].kind else { return None };
    events.iter_mut().find_map(|e| match &mut e.kind {
        EventKind::Asked { call, budget } if *call == wanted => Some(budget),
        _ => None,
    })
}

fn early_timeout(events: &mut Vec<Event>, pick: usize) -> Option<()> {
    let budget = timed_out_question(events, pick)?;
    *budget = Some(budget.as_mut()?.saturating_mul(10) + Duration::from_secs(1));
    Some(())
}

fn forever_timeout(events: &mut Vec<Event>, pick: usize) -> Option<()> {
    timed_out_question(events, pick)?.take();
    Some(())
}

fn turn_back(events: &mut Vec<Event>, pick: usize) -> Option<()> {
    let later = find(events, pick, |i, _| i > 0)?;
    events[later].at = events[later - 1].at.checked_sub(Duration::from_nanos(1))?;
    Some(())
}
