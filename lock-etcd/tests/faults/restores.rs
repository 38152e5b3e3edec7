//! Backups that operators restore under live clients: revisions go back, tokens must not.

use std::time::Duration;

use leasehold_api::{FencingToken, Validity};
use leasehold_engine::Engine;
use test_servers::{Etcd, EtcdOptions, EtcdProgram, Loss, Relay};

use crate::support::{MINUTES, acquired, client, client_of, cycle, idle, queue, queue_of, soon, until};

/// The ways to restore: by the tool of operators, and by an earlier copy of the disks.
fn ways() -> [(EtcdOptions, Loss); 2] {
    let copies = (EtcdOptions::new(), Loss::Nothing);
    [(EtcdOptions::new().program(EtcdProgram::Installed), Loss::Log), copies]
}

/// Notes the tokens of all grants, in order.
struct Tokens {
    loss: Loss,
    last: Option<FencingToken>,
}

impl Tokens {
    fn over(loss: Loss) -> Self {
        Self { loss, last: None }
    }

    fn note(&mut self, token: FencingToken) {
        let last = self.last.replace(token);
        assert!(last < Some(token), "a token goes back, loss {:?}: {token} follows {last:?}", self.loss);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_grow_over_two_restores_for_clients_that_stay_and_for_new_ones() {
    for (options, loss) in ways() {
        let (etcd, prefix) = (Etcd::start(options), Etcd::fresh_prefix());
        let (a, b) = (client(&etcd, &prefix).await, client(&etcd, &prefix).await);
        let mut tokens = Tokens::over(loss);
        for _ in 0..5 {
            tokens.note(cycle(&a, "k").await);
        }
        let backup = etcd.backup(loss).await;
        for _ in 0..2 {
            for _ in 0..20 {
                tokens.note(cycle(&b, "k").await);
                tokens.note(cycle(&a, "k").await);
            }
            idle(&a).await;
            idle(&b).await;
            let before = etcd.revision().await;
            etcd.restore(&backup).await;
            assert!(etcd.revision().await < before, "{loss:?}");
            for _ in 0..20 {
                tokens.note(cycle(&a, "k").await);
                tokens.note(cycle(&b, "k").await);
            }
            let new = client(&etcd, &prefix).await;
            tokens.note(cycle(&new, "k").await);
            tokens.note(cycle(&a, "k").await);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_of_a_new_client_grow_over_a_restore_from_a_snapshot() {
    let (options, loss) = ways().into_iter().next().unwrap();
    let (etcd, prefix) = (Etcd::start(options), Etcd::fresh_prefix());
    let mut tokens = Tokens::over(loss);
    let old = client(&etcd, &prefix).await;
    for _ in 0..5 {
        tokens.note(cycle(&old, "k").await);
    }
    let backup = etcd.backup(loss).await;
    for _ in 0..50 {
        tokens.note(cycle(&old, "k").await);
    }
    drop(old);
    for _ in 0..2 {
        etcd.restore(&backup).await;
        let new = client(&etcd, &prefix).await;
        for _ in 0..5 {
            tokens.note(cycle(&new, "k").await);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_grow_behind_a_proxy_that_keeps_the_connection_of_its_client() {
    for (options, loss) in ways() {
        let mut stayed = false;
        // On a busy machine the client can give up its connection during a restore.
        for _ in 0..5 {
            stayed = stays_connected_over_a_restore(options.clone(), loss).await;
            if stayed {
                break;
            }
        }
        assert!(stayed, "{loss:?}: the client never stayed connected");
    }
}

/// Restores a cluster behind a proxy whose connections stay, and checks the tokens of a client. Returns whether the client
/// kept its connection.
async fn stays_connected_over_a_restore(options: EtcdOptions, loss: Loss) -> bool {
    let (etcd, prefix) = (Etcd::start(options), Etcd::fresh_prefix());
    let relay = Relay::start(etcd.address(0));
    let a = client_of(vec![relay.address()], &prefix, Duration::from_secs(30)).await;
    let mut tokens = Tokens::over(loss);
    for _ in 0..5 {
        tokens.note(cycle(&a, "k").await);
    }
    let backup = etcd.backup(loss).await;
    for _ in 0..50 {
        tokens.note(cycle(&a, "k").await);
    }
    idle(&a).await;
    let accepted = relay.accepted();
    etcd.restore(&backup).await;
    for _ in 0..20 {
        tokens.note(cycle(&a, "k").await);
    }
    relay.accepted() == accepted
}

/// Makes a backup with a hold of `a`, releases that hold, and restores the backup. Then acquires the key for `b`, while
/// the session of `a` is still renewed.
async fn no_ghost_stays(etcd: &Etcd, loss: Loss, a: &Engine, b: &Engine) {
    let released = acquired(a, "released").await;
    let old = released.token().unwrap();
    let backup = etcd.backup(loss).await;
    released.release().await.unwrap();
    etcd.restore(&backup).await;
    let guard = soon("a ghost stays", acquired(b, "released")).await;
    assert!(guard.token().unwrap() > old, "{loss:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_that_was_released_after_the_backup_does_not_stay_in_the_restored_cluster() {
    for (options, loss) in ways() {
        let (etcd, prefix) = (Etcd::start(options), Etcd::fresh_prefix());
        // Longer than a busy machine takes for the backup.
        let ttl = Duration::from_secs(20);
        let a = client_of(etcd.addresses(), &prefix, ttl).await;
        let b = client_of(etcd.addresses(), &prefix, ttl).await;
        // A client renews its session only while it has holds.
        let kept = acquired(&a, "kept").await;
        no_ghost_stays(&etcd, loss, &a, &b).await;
        assert!(kept.validity() != Validity::Valid || queue(&etcd, &prefix, "kept").await.len() == 1);
    }
}

/// The engine renews no hold of the client, and its session lasts because of a waiter. The TTL is so long that each poll
/// of the waiter finds a recent proof.
#[tokio::test(flavor = "multi_thread")]
async fn a_hold_that_was_released_after_the_backup_does_not_stay_beside_a_waiter() {
    for (options, loss) in ways() {
        let (etcd, prefix) = (Etcd::start(options), Etcd::fresh_prefix());
        let a = client_of(etcd.addresses(), &prefix, Duration::from_secs(30)).await;
        let b = client_of(etcd.addresses(), &prefix, MINUTES).await;
        let kept = acquired(&b, "kept").await;
        let waiter = tokio::spawn({
            let a = a.clone();
            async move { acquired(&a, "kept").await }
        });
        queue_of(&etcd, &prefix, "kept", 2).await;
        no_ghost_stays(&etcd, loss, &a, &b).await;
        assert!(!waiter.is_finished(), "{loss:?}: the session lasts because of the waiter");
        kept.release().await.unwrap();
        soon("never granted", waiter).await.unwrap().release().await.unwrap();
    }
}

/// A backup lacks the hold of a client that acquired after it.
#[tokio::test(flavor = "multi_thread")]
async fn a_hold_that_a_restore_forgets_is_lost_and_its_token_is_not_given_again() {
    for (options, loss) in ways() {
        let (etcd, prefix) = (Etcd::start(options), Etcd::fresh_prefix());
        let ttl = Duration::from_secs(3);
        let a = client_of(etcd.addresses(), &prefix, ttl).await;
        let b = client_of(etcd.addresses(), &prefix, ttl).await;
        cycle(&a, "warm").await;
        let backup = etcd.backup(loss).await;
        let forgotten = acquired(&a, "k").await;
        etcd.restore(&backup).await;
        assert_eq!(queue(&etcd, &prefix, "k").await, [], "{loss:?}: the backup does not have it");
        until("the loss is never noticed", async || forgotten.validity() == Validity::Lost).await;
        let next = acquired(&b, "k").await;
        assert!(next.token() > forgotten.token());
    }
}
