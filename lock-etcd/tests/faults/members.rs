//! Members that die, freeze, or lose each other (hazards E1, E7, E12).

use std::time::Duration;

use leasehold_api::{ErrorKind, LockExt as _, Validity};
use test_servers::{Etcd, EtcdOptions};

use crate::race::Race;
use crate::support::{MINUTES, acquired, client, client_of, cycle, soon, until};

/// TTL of the racing clients, long enough for an election on a busy machine.
const TTL: Duration = Duration::from_secs(10);

/// Starts three members with the usual elections, because shorter ones replace a healthy leader on a busy machine.
fn three() -> Etcd {
    Etcd::start(EtcdOptions::three())
}

/// Starts three clients that race for a key, each with another first member.
async fn race(etcd: &Etcd) -> Race {
    let prefix = Etcd::fresh_prefix();
    let mut clients = Vec::new();
    for first in 0..3 {
        let mut members = etcd.addresses();
        members.rotate_left(first);
        clients.push(client_of(members, &prefix, TTL).await);
    }
    let race = Race::start(clients, "k");
    race.more(20).await;
    race
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_leader_grants_nothing_twice() {
    let etcd = three();
    let race = race(&etcd).await;
    for _ in 0..2 {
        let leader = etcd.leader().await;
        etcd.kill(leader).await;
        race.more(20).await;
        etcd.start_again(leader).await;
        etcd.ready().await;
        race.more(20).await;
    }
    race.end("leader killed twice").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_leader_grants_nothing_twice() {
    let etcd = three();
    let race = race(&etcd).await;
    for _ in 0..2 {
        let leader = etcd.leader().await;
        etcd.pause(leader);
        race.more(20).await;
        etcd.resume(leader);
        race.more(20).await;
    }
    race.end("leader frozen twice").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn frozen_followers_one_after_the_other_grant_nothing_twice() {
    let etcd = three();
    let race = race(&etcd).await;
    let leader = etcd.leader().await;
    for follower in (0..3).filter(|member| *member != leader) {
        etcd.pause(follower);
        race.more(20).await;
        etcd.resume(follower);
        race.more(20).await;
    }
    race.end("each follower frozen").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_without_the_others_grants_nothing() {
    let etcd = three();
    let race = race(&etcd).await;
    for _ in 0..2 {
        let leader = etcd.leader().await;
        etcd.isolate(leader);
        race.more(20).await;
        etcd.rejoin();
        etcd.ready().await;
        race.more(20).await;
    }
    race.end("leader isolated twice").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_of_all_members_grants_nothing_twice() {
    let etcd = three();
    let race = race(&etcd).await;
    etcd.crash().await;
    race.more(20).await;
    race.end("all members killed").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_moves_grants_nothing_twice() {
    let etcd = three();
    let race = race(&etcd).await;
    let mut moved = 0;
    while moved < 5 {
        moved += usize::from(etcd.move_leader().await.is_some());
        race.more(10).await;
    }
    race.end("leader moved five times").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_quorum_calls_end_with_an_error_and_holds_are_lost_in_time() {
    let (etcd, prefix) = (three(), Etcd::fresh_prefix());
    let a = client_of(etcd.addresses(), &prefix, TTL).await;
    let b = client(&etcd, &prefix).await;
    let held = acquired(&a, "k").await;
    let leader = etcd.leader().await;
    let followers: Vec<_> = (0..3).filter(|member| *member != leader).collect();
    followers.iter().for_each(|follower| etcd.pause(*follower));
    let error = soon("a try never ends", b.key("other").try_acquire()).await.unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::OutcomeUnknown), "{error:?}");
    until("the hold is never lost", async || held.validity() == Validity::Lost).await;
    followers.iter().for_each(|follower| etcd.resume(*follower));
    let next = acquired(&b, "k").await;
    assert!(next.token() > held.token());
    cycle(&a, "other").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_outlasts_a_quorum_that_is_away_for_less_than_its_ttl() {
    let (etcd, prefix) = (three(), Etcd::fresh_prefix());
    let a = client_of(etcd.addresses(), &prefix, MINUTES).await;
    let held = acquired(&a, "k").await;
    etcd.crash().await;
    soon("never confirmed", async {
        while held.confirm().await.is_err() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    })
    .await;
    assert_eq!(held.validity(), Validity::Valid);
    held.release().await.unwrap();
}
