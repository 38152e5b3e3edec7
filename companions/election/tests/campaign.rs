//! A campaign: waiting, failures, pauses, stepping down, and one campaign per client.

#![allow(clippy::unwrap_used)]

#[path = "common/replicas.rs"]
mod common;

use std::sync::Arc;
use std::time::Duration;

use common::*;
use leasehold_api::{ErrorKind, Lock, LockExt as _, LossReason, MAX_LABEL_BYTES, Namespaced};
use leasehold_election::{ElectExt as _, Failure, Next, State};
use leasehold_memory::{ClientSetup, Fault, MemoryStore, Op};
use tokio::time::Instant;

/// All kinds of errors after which a campaign goes on.
const RECOVERABLE: [ErrorKind; 9] = [
    ErrorKind::Unavailable,
    ErrorKind::OutcomeUnknown,
    ErrorKind::Capacity,
    ErrorKind::NeedsOperator,
    ErrorKind::Deadlock,
    ErrorKind::PermissionDenied,
    ErrorKind::SchemaMissing,
    ErrorKind::Corrupt,
    ErrorKind::Lost,
];

fn shows(kind: ErrorKind) -> impl Fn(&State) -> bool {
    move |state| matches!(state, State::Failed { error: Failure::Lock(error), .. } if error.kind() == kind)
}

#[tokio::test(start_paused = true)]
async fn every_failure_that_can_pass_or_be_repaired_is_shown_and_retried() {
    for kind in RECOVERABLE {
        for op in [Op::Acquire, Op::Wait] {
            let store = leases();
            let mut first = Replica::start(&store, "first");
            first.leads().await;
            let client = store.client_with(ClientSetup::new()).unwrap();
            client.faults.script(op, Fault::Error(kind));
            let mut a = Replica::of(Arc::new(client.lock), client.faults, "a", |election| election);
            a.until(shows(kind)).await;
            a.until(is_candidate).await;
            settle().await;
            first.order(Ok(Next::Done));
            a.leads().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_failure_that_no_retry_helps_ends_the_campaign() {
    for kind in [ErrorKind::Unsupported, ErrorKind::InvalidOption, ErrorKind::Closed, ErrorKind::NoRuntime] {
        let client = leases().client_with(ClientSetup::new()).unwrap();
        client.faults.script(Op::Acquire, Fault::Refuse(kind));
        let a = Replica::of(Arc::new(client.lock), client.faults, "a", |election| election);
        let handle = a.handle.clone();
        assert_eq!(a.result().await.unwrap_err().kind(), kind);
        assert!(matches!(handle.state(), State::Idle));
    }
    let lock = leases().client().unwrap();
    let error = lock.elect("").lead(async |_| Ok(Next::Done)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidKey);
}

#[tokio::test(start_paused = true)]
async fn failures_of_the_store_are_retried_after_growing_pauses() {
    let client = leases().client_with(ClientSetup::new()).unwrap();
    for _ in 0..12 {
        client.faults.script(Op::Acquire, Fault::Refuse(ErrorKind::Unavailable));
    }
    let mut a = Replica::of(Arc::new(client.lock), client.faults, "a", |election| election);
    let (mut pauses, mut handle) = (Vec::new(), a.handle.clone());
    while pauses.len() < 12 {
        if let State::Failed { next_try, .. } = in_time("not retried", handle.changed()).await {
            pauses.push(next_try - Instant::now().into_std());
        }
    }
    for (n, pause) in pauses.iter().enumerate() {
        let least = Duration::from_millis(100 << n).min(secs(10));
        assert!(least <= *pause && *pause <= 2 * least + Duration::from_millis(1), "{n}: {pauses:?}");
    }
    a.leads().await;
}

#[tokio::test(start_paused = true)]
async fn a_grant_whose_answer_was_lost_keeps_nobody_out() {
    let store = leases();
    let client = store.client_with(ClientSetup::new()).unwrap();
    client.faults.script(Op::Acquire, Fault::LoseReply);
    let mut a = Replica::of(Arc::new(client.lock), client.faults, "a", |election| election);
    a.until(shows(ErrorKind::OutcomeUnknown)).await;
    let begun = Instant::now();
    let mut b = Replica::start(&store, "b");
    b.leads().await;
    assert!(begun.elapsed() < secs(1), "{:?}", begun.elapsed());
    settle().await;
    b.again();
    a.leads().await;
}

#[tokio::test(start_paused = true)]
async fn a_release_that_fails_is_repeated_until_the_next_one_leads() {
    for fault in [Fault::Error(ErrorKind::Unavailable), Fault::LoseReplyHang, Fault::Hang] {
        let store = leases();
        let mut a = Replica::start(&store, "a");
        a.leads().await;
        let mut b = Replica::start(&store, "b");
        tokio::time::sleep(secs(5)).await;
        a.faults.script(Op::Release, fault);
        let begun = Instant::now();
        a.handle.step_down(secs(1000));
        b.leads().await;
        assert!(begun.elapsed() < TTL / 2, "{fault:?}: {:?}, as if nobody had released", begun.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_that_fails_at_once_doubles_the_pause_and_others_lead_meanwhile() {
    let store = leases();
    let mut a = Replica::start(&store, "a");
    let mut last: Option<Instant> = None;
    for n in 0..9_u32 {
        a.leads().await;
        if let Some(last) = last {
            let least = secs(1 << (n - 1)).min(secs(60));
            let pause = last.elapsed();
            assert!(least <= pause && pause <= 2 * least + secs(1), "{n}: {pause:?}");
        }
        tokio::time::sleep(Duration::from_millis(900)).await;
        a.order(Err("cannot start".into()));
        a.ended().await;
        last = Some(Instant::now());
        let failed = a.until(is_failed).await;
        assert!(
            matches!(&failed, State::Failed { error: Failure::Body(e), .. } if e.to_string() == "cannot start")
        );
        let other = store.client().unwrap();
        assert!(other.key(key()).try_acquire().await.unwrap().is_some(), "a failed body holds the key");
    }
    // A term of a second starts again with the shortest pause.
    a.leads().await;
    tokio::time::sleep(secs(1)).await;
    a.order(Err("later".into()));
    a.ended().await;
    let ended = Instant::now();
    a.leads().await;
    assert!((secs(1)..=secs(3)).contains(&ended.elapsed()), "{:?}", ended.elapsed());
}

#[tokio::test(start_paused = true)]
async fn terms_that_are_lost_or_resigned_at_once_pause_too() {
    let store = leases();
    let mut a = Replica::start(&store, "a");
    for n in 0..4_u32 {
        a.leads().await;
        if n % 2 == 0 {
            assert!(store.lose(&key(), LossReason::SessionLost));
        } else {
            a.again();
        }
        a.ended().await;
        let ended = Instant::now();
        a.until(State::is_leading).await;
        let least = secs(1 << n);
        assert!((least..=2 * least + secs(1)).contains(&ended.elapsed()), "{n}: {:?}", ended.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn stepping_down_rests_this_client_and_no_hint_ends_the_rest() {
    let store = leases();
    let mut a = Replica::start(&store, "a");
    a.leads().await;
    let mut b = Replica::start(&store, "b");
    tokio::time::sleep(secs(5)).await;
    a.handle.step_down(secs(60));
    a.ended().await;
    let rested = Instant::now();
    b.leads().await;
    assert!(rested.elapsed() < secs(1));
    let calls = || (a.faults.calls(Op::Acquire), a.faults.calls(Op::Wait));
    let before = calls();
    tokio::time::sleep(secs(10)).await;
    // Releases of others are hints that the key is free.
    b.handle.step_down(secs(1000));
    b.ended().await;
    for _ in 0..5 {
        tokio::time::sleep(secs(1)).await;
        drop(store.occupy(&key()).unwrap());
    }
    assert!(is_resting(&a.handle.state()), "{}", a.handle.state());
    assert_eq!(before, calls(), "a resting candidate calls nobody");
    a.leads().await;
    assert!((secs(60)..secs(62)).contains(&rested.elapsed()), "{:?}", rested.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_candidate_that_steps_down_leaves_the_queue() {
    let store = leases();
    let mut leader = Replica::start(&store, "leader");
    leader.leads().await;
    let mut a = Replica::start(&store, "a");
    settle().await;
    a.handle.step_down(secs(60));
    a.until(is_resting).await;
    settle().await;
    assert_eq!(a.lock.active_keys(), 0);
    leader.handle.step_down(secs(1000));
    let begun = Instant::now();
    a.leads().await;
    assert!(begun.elapsed() >= secs(59), "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_later_request_to_step_down_lengthens_the_rest() {
    let mut a = Replica::start(&leases(), "a");
    a.leads().await;
    tokio::time::sleep(secs(5)).await;
    let begun = Instant::now();
    a.handle.step_down(secs(10));
    a.ended().await;
    tokio::time::sleep(secs(5)).await;
    a.handle.step_down(secs(20));
    a.leads().await;
    assert!((secs(25)..secs(27)).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    a.handle.step_down(Duration::MAX);
    a.until(is_resting).await;
}

#[tokio::test(start_paused = true)]
async fn a_dropped_campaign_leaves_no_candidate_behind() {
    let store = leases();
    let mut leader = Replica::start(&store, "leader");
    leader.leads().await;
    let a = Replica::start(&store, "a");
    let mut b = Replica::start(&store, "b");
    settle().await;
    a.task.abort();
    settle().await;
    assert!(matches!(a.handle.state(), State::Idle) && a.lock.active_keys() == 0);
    tokio::time::sleep(secs(5)).await;
    leader.again();
    b.leads().await;
}

#[tokio::test(start_paused = true)]
async fn a_new_candidate_waits_for_the_rest_of_a_dead_leaders_lease_only() {
    let store = leases();
    let mut a = Replica::start(&store, "a");
    a.leads().await;
    a.faults.silence(true);
    let dead = Instant::now();
    tokio::time::sleep(secs(25)).await;
    let mut b = Replica::start(&store, "b");
    b.leads().await;
    assert!(dead.elapsed() <= TTL + secs(1), "{:?}", dead.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_client_has_one_campaign_per_key() {
    let store = leases();
    let mut a = Replica::start(&store, "a");
    a.leads().await;
    let again = Arc::clone(&a.lock);
    let dynamic: Arc<dyn Lock> = again.clone();
    for lock in [&*again as &dyn Lock, &*dynamic] {
        let error = lock.elect(key()).lead(async |_| Ok(Next::Done)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption);
        assert!(error.message().contains("already campaigns"), "{error}");
    }
    // Another key, another namespace and another client have their own.
    dynamic.elect("other").lead(async |_| Ok(Next::Done)).await.unwrap();
    let apart = Namespaced::new(dynamic, "apart").unwrap();
    apart.elect(key()).lead(async |_| Ok(Next::Done)).await.unwrap();
    assert!(a.handle.state().is_leading());
    a.order(Ok(Next::Done));
    a.ended().await;
    settle().await;
    again.elect(key()).lead(async |_| Ok(Next::Done)).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_value_has_at_most_256_bytes_without_nul() {
    let store = leases();
    let lock = store.client().unwrap();
    for (value, fits) in [
        ("x".repeat(MAX_LABEL_BYTES), true),
        ("\u{e9}".repeat(MAX_LABEL_BYTES / 2), true),
        ("x".repeat(MAX_LABEL_BYTES + 1), false),
        ("a\0b".to_owned(), false),
    ] {
        let election = lock.elect(key()).value(value.clone());
        let led = election.lead(async |_| {
            let seen = lock.admin().unwrap().inspect(&key()).await?;
            assert_eq!(seen.holder().unwrap().label.as_deref(), Some(&*value));
            Ok(Next::Done)
        });
        match led.await {
            Ok(()) => assert!(fits, "{value}"),
            Err(error) => assert!(!fits && error.kind() == ErrorKind::InvalidOption, "{error}"),
        }
    }
}

/// The stores of twenty candidates fail at random. Two candidates never lead at once, and after each failure one of
/// them leads again.
#[tokio::test(start_paused = true)]
async fn two_never_lead_at_once() {
    for seed in 0..20 {
        let mut random = fastrand::Rng::with_seed(seed);
        let store: MemoryStore = MemoryStore::new().default_ttl(secs(5));
        let all: Vec<_> = (0..20).map(|_| Replica::start(&store, "one of many")).collect();
        let (mut last, mut silent) = (None, [false; 20]);
        for _ in 0..200 {
            let n = random.usize(..20);
            let one = &all[n];
            match random.u8(..6) {
                act @ 0..2 => {
                    silent[n] = act == 0;
                    one.faults.silence(silent[n]);
                }
                2 => one.handle.step_down(secs(random.u64(..20))),
                3 => drop(one.orders.send(Err("fails".into()))),
                4 => one.faults.script(Op::ALL[random.usize(..4)], Fault::Error(ErrorKind::Unavailable)),
                // A leader without a connection would not learn of a forced release before its lease ends.
                _ if (0..20).all(|n| !silent[n] || !all[n].handle.state().is_leading()) => {
                    let _ = store.lose(&key(), LossReason::ForcedRelease);
                }
                _ => {}
            }
            tokio::time::sleep(Duration::from_millis(random.u64(..3000))).await;
            let leaders: Vec<_> = all.iter().filter(|one| one.handle.state().is_leading()).collect();
            assert!(leaders.len() < 2, "seed {seed}: {} lead at once", leaders.len());
            if let [leader] = &leaders[..]
                && let State::Leading { token } = leader.handle.state()
            {
                assert!(token >= last, "seed {seed}");
                last = token;
            }
        }
        all.iter().for_each(|one| one.faults.silence(false));
        let leads = async {
            while !all.iter().any(|one| one.handle.state().is_leading()) {
                settle().await;
                tokio::time::sleep(secs(1)).await;
            }
        };
        in_time("nobody leads", leads).await;
    }
}
