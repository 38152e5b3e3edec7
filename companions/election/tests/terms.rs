//! A term: its begin, its end, and the order of body, state and release.

#![allow(clippy::unwrap_used)]

#[path = "common/replicas.rs"]
mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::*;
use leasehold_api::{ErrorKind, GrantHandle, Lock as _, LockExt as _, LossReason, Validity};
use leasehold_election::{ElectExt as _, Election, Failure, Next, State};
use leasehold_memory::{Fault, Op};
use tokio::time::Instant;

fn is_lost(state: &State) -> bool {
    matches!(state, State::Failed { error: Failure::Lock(error), .. } if error.kind() == ErrorKind::Lost)
}

#[tokio::test(start_paused = true)]
async fn each_term_has_a_greater_token_and_ends_only_if_it_has_begun() {
    let mut a = Replica::start(&leases(), "a");
    let mut last = None;
    for _ in 0..3 {
        let grant = a.leads().await;
        assert!(grant.token() > last);
        last = grant.token();
        assert!(matches!(a.handle.state(), State::Leading { token } if token == last));
        tokio::time::sleep(secs(5)).await;
        a.again();
        a.ended().await;
    }
    let second = a.leads().await;
    a.order(Ok(Next::Done));
    a.ended().await;
    assert!(second.token() > last && a.reports().is_empty());
    a.result().await.unwrap();
}

/// The body ends first, then the state changes, then the release is sent.
#[tokio::test(start_paused = true)]
async fn the_key_is_released_when_the_body_has_ended_and_the_state_has_changed() {
    type Act = fn(&Replica);
    type Shown = fn(&State) -> bool;
    let acts: [(&str, Act, Shown); 5] = [
        ("done", |a| a.order(Ok(Next::Done)), |state| matches!(state, State::Idle)),
        ("again", |a| a.again(), is_candidate),
        (
            "error",
            |a| a.order(Err("the body failed".into())),
            |state| matches!(state, State::Failed { error: Failure::Body(_), .. }),
        ),
        ("step down", |a| a.handle.step_down(secs(60)), is_resting),
        ("drop", |a| a.task.abort(), |state| matches!(state, State::Idle)),
    ];
    for (name, act, is_shown) in acts {
        let store = leases();
        let mut a = Replica::start(&store, "a");
        let grant = a.leads().await;
        tokio::time::sleep(secs(5)).await;
        a.faults.script(Op::Release, Fault::Delay(secs(1)));
        act(&a);
        let (validity, state) = a.ended().await;
        assert_eq!(validity, Validity::Valid, "{name}: released before the body had ended");
        assert!(state.is_leading(), "{name}: {state}");
        settle().await;
        assert_eq!(grant.validity(), Validity::Ended, "{name}");
        assert!(is_shown(&a.handle.state()), "{name}: {}", a.handle.state());
        let b = store.client().unwrap();
        assert!(b.key(key()).try_acquire().await.unwrap().is_none(), "{name}: the release is under way");
        drop(in_time("not released", b.key(key()).wait(LONG).acquire()).await.unwrap());
    }
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_is_asked_steps_down_where_that_is_set() {
    let store = leases();
    let operator = store.client().unwrap();
    let ask = async |grant: &GrantHandle| {
        assert!(operator.admin().unwrap().ask(grant.key(), grant.holder()).await.unwrap());
        in_time("not asked", grant.asked()).await;
        settle().await;
    };
    let mut a = Replica::with(&store, "a", |election| election.step_down_if_asked(secs(60)));
    let grant = a.leads().await;
    let mut b = Replica::start(&store, "b");
    settle().await;
    ask(&grant).await;
    let (validity, state) = a.ended().await;
    assert!(validity == Validity::Valid && state.is_leading(), "the body ends first: {validity} {state}");
    a.until(is_resting).await;
    let grant = b.leads().await;
    ask(&grant).await;
    tokio::time::sleep(secs(120)).await;
    assert!(b.handle.state().is_leading() && grant.validity() == Validity::Valid, "it may go on");
    assert!(b.reports().is_empty() && a.reports().is_empty());
}

#[tokio::test(start_paused = true)]
async fn no_watcher_sees_a_term_during_its_release() {
    let store = leases();
    let mut a = Replica::start(&store, "a");
    a.leads().await;
    let mut handle = a.handle.clone();
    let watcher = tokio::spawn(async move {
        let mut seen = Vec::new();
        while seen.last() != Some(&"no candidate".to_owned()) {
            let state = handle.changed().await.to_string();
            seen.push(state.split(" for ").next().unwrap_or_default().to_owned());
        }
        seen
    });
    tokio::time::sleep(secs(5)).await;
    a.handle.step_down(secs(7));
    a.until(is_resting).await;
    a.until(State::is_leading).await;
    a.order(Ok(Next::Done));
    let seen = in_time("not idle", watcher).await.unwrap();
    let words = seen.iter().map(|state| state.split(" with ").next().unwrap_or_default());
    // A candidacy that is granted at once can be skipped.
    let words: Vec<_> = words.filter(|word| *word != "candidate").collect();
    assert_eq!(words, ["leading", "resting", "leading", "no candidate"], "{seen:?}");
}

#[tokio::test(start_paused = true)]
async fn a_panic_of_the_body_is_the_callers_and_the_next_candidate_leads() {
    let store = leases();
    let mut b = Replica::start(&store, "b");
    b.leads().await;
    let lock = Arc::new(store.client().unwrap());
    let election = Election::new(Arc::clone(&lock), key());
    let handle = election.handle();
    let task = tokio::spawn(async move {
        election
            .lead(async |_| {
                tokio::time::sleep(secs(5)).await;
                panic!("a body of a test panics")
            })
            .await
    });
    settle().await;
    b.again();
    b.ended().await;
    assert!(in_time("no panic", task).await.unwrap_err().is_panic());
    assert!(matches!(handle.state(), State::Idle), "{}", handle.state());
    let begun = Instant::now();
    b.leads().await;
    assert!(begun.elapsed() < secs(1), "the lock was not released");
    // The client can campaign again.
    b.again();
    in_time("refused", lock.elect(key()).lead(async |_| Ok(Next::Done))).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_term_that_is_lost_before_its_body_starts_takes_no_step() {
    let store = leases();
    let lock = store.client().unwrap();
    let (starts, steps) = (AtomicUsize::new(0), Arc::new(AtomicUsize::new(0)));
    let election = lock.elect(key());
    let campaign = election.lead_boxed(|_| {
        if starts.fetch_add(1, Ordering::SeqCst) == 0 {
            assert!(store.lose(&key(), LossReason::SessionLost));
        }
        let steps = Arc::clone(&steps);
        Box::pin(async move {
            steps.fetch_add(1, Ordering::SeqCst);
            Ok(Next::Done)
        })
    });
    in_time("never done", campaign).await.unwrap();
    assert_eq!((starts.load(Ordering::SeqCst), steps.load(Ordering::SeqCst)), (2, 1));
}

#[tokio::test(start_paused = true)]
async fn a_loss_drops_the_body_is_shown_and_the_campaign_goes_on() {
    let store = leases();
    let mut a = Replica::start(&store, "a");
    for reason in [LossReason::ForcedRelease, LossReason::SessionLost, LossReason::Gone] {
        let first = a.leads().await;
        tokio::time::sleep(secs(5)).await;
        assert!(store.lose(&key(), reason));
        let (validity, state) = a.ended().await;
        assert!(validity == Validity::Lost && is_lost(&state), "{reason}: {state}");
        let begun = Instant::now();
        let second = a.leads().await;
        assert!(begun.elapsed() < secs(1), "a term of five seconds is no failed start");
        assert!(second.token() > first.token());
        tokio::time::sleep(secs(5)).await;
        a.again();
        a.ended().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_leader_whose_renewals_hang_has_ended_before_the_next_one_starts() {
    let store = leases();
    let mut a = Replica::start(&store, "a");
    let first = a.leads().await;
    let mut b = Replica::start(&store, "b");
    tokio::time::sleep(secs(120)).await;
    a.faults.silence(true);
    let second = b.leads().await;
    assert_eq!(first.validity(), Validity::Lost);
    let reports = a.reports();
    assert!(matches!(&reports[..], [Event::Ended(Validity::Lost, _)]), "{reports:?}");
    assert!(!a.handle.state().is_leading() && b.handle.state().is_leading());
    assert!(second.token() > first.token());
}

#[tokio::test(start_paused = true)]
async fn doubt_begins_and_ends_while_the_term_goes_on() {
    let store = leases();
    let mut a = Replica::start(&store, "a");
    let grant = a.leads().await;
    tokio::time::sleep(secs(60)).await;
    a.faults.silence(true);
    let cut = Instant::now();
    let in_doubt = a.until(|state| matches!(state, State::InDoubt { .. })).await;
    assert!(matches!(in_doubt, State::InDoubt { token } if token == grant.token()));
    assert!(cut.elapsed() <= TTL * 2 / 3 + secs(1), "{:?}", cut.elapsed());
    a.faults.silence(false);
    a.until(State::is_leading).await;
    assert!(cut.elapsed() < TTL * 9 / 10, "{:?}", cut.elapsed());
    assert!(a.reports().is_empty(), "it is the same term");
}

#[tokio::test(start_paused = true)]
async fn the_end_of_an_old_term_does_not_end_the_new_one() {
    let store = leases();
    let mut a = Replica::start(&store, "a");
    let first = a.leads().await;
    a.faults.silence(true);
    a.ended().await;
    a.faults.silence(false);
    let second = a.leads().await;
    tokio::time::sleep(TTL * 10).await;
    assert_eq!((first.validity(), second.validity()), (Validity::Lost, Validity::Valid));
    assert!(a.handle.state().is_leading() && a.reports().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_body_that_is_told_of_its_loss_ends_by_itself() {
    let store = leases();
    let mut a = Replica::with(&store, "a", telling);
    a.leads().await;
    tokio::time::sleep(secs(5)).await;
    let mut b = Replica::start(&store, "b");
    settle().await;
    assert!(store.lose(&key(), LossReason::ForcedRelease));
    a.until(is_lost).await;
    b.leads().await;
    tokio::time::sleep(secs(5)).await;
    assert!(a.reports().is_empty(), "the body was not dropped");
    assert!(is_lost(&a.handle.state()), "it leads no more: {}", a.handle.state());
    a.again();
    a.ended().await;
    a.until(is_candidate).await;
    b.again();
    a.leads().await;
}

#[tokio::test(start_paused = true)]
async fn over_tells_a_body_of_a_loss_and_of_a_request_to_step_down() {
    let store = leases();
    let lock = store.client().unwrap();
    let election = telling_ref(&lock);
    let handle = election.handle();
    let ends = AtomicUsize::new(0);
    let campaign = election.lead(async |term| {
        let over = term.over();
        match ends.fetch_add(1, Ordering::SeqCst) {
            0 => assert!(store.lose(&key(), LossReason::Gone)),
            1 => handle.step_down(secs(3)),
            2 => term.step_down(secs(3)),
            _ => return Ok(Next::Done),
        }
        over.await;
        term.over().await;
        Ok(Next::Again)
    });
    in_time("not told", campaign).await.unwrap();
    assert_eq!(ends.load(Ordering::SeqCst), 4);
}

fn telling_ref<L: leasehold_api::Lock>(lock: &L) -> Election<&L> {
    lock.elect(key()).on_loss(leasehold_election::OnLoss::Tell)
}

#[tokio::test(start_paused = true)]
async fn a_closed_lock_ends_the_term_and_the_campaign() {
    let store = leases();
    let mut leader = Replica::start(&store, "leader");
    leader.leads().await;
    let candidate = Replica::start(&store, "candidate");
    settle().await;
    candidate.lock.close().await.unwrap();
    assert_eq!(candidate.result().await.unwrap_err().kind(), ErrorKind::Closed);
    leader.lock.close().await.unwrap();
    leader.ended().await;
    let handle = leader.handle.clone();
    assert_eq!(leader.result().await.unwrap_err().kind(), ErrorKind::Closed);
    assert!(matches!(handle.state(), State::Idle));
}

#[tokio::test(start_paused = true)]
async fn done_reports_whether_the_term_was_held_until_its_end() {
    let store = leases();
    let lock = store.client().unwrap();
    let election = lock.elect(key());
    let lost = election.lead(async |_| {
        assert!(store.purge(&key()), "unnoticed");
        Ok(Next::Done)
    });
    assert_eq!(lost.await.unwrap_err().kind(), ErrorKind::Lost);
    lock.elect(key()).lead(async |_| Ok(Next::Done)).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn the_ttl_is_that_of_the_election() {
    let lock = leases().client().unwrap();
    let election = lock.elect(key()).ttl(secs(300));
    let left = async |term: &leasehold_election::Term| {
        assert!(term.guard().remaining() > Some(Duration::from_secs(200)));
        Ok(Next::Done)
    };
    election.lead(left).await.unwrap();
}
