//! A cluster that has reached its space quota (hazard E9).

use leasehold_api::{ErrorKind, ListQuery, Lock as _, LockExt as _, Validity};
use test_servers::{Etcd, EtcdOptions, EtcdProgram};

use crate::support::{MINUTES, acquired, client, client_of, cycle, key, queue, renewed, soon};

#[tokio::test]
async fn holds_outlast_a_full_cluster_and_grants_wait_for_an_operator() {
    for program in [EtcdProgram::Vendored, EtcdProgram::Installed] {
        let etcd = Etcd::start(EtcdOptions::new().program(program).quota(4 << 20));
        let prefix = Etcd::fresh_prefix();
        let lock = client_of(etcd.addresses(), &prefix, MINUTES).await;
        let other = client(&etcd, &prefix).await;
        let (kept, released) = (acquired(&lock, "kept").await, acquired(&lock, "released").await);
        etcd.fill().await;

        renewed(&kept).await;
        kept.confirm().await.unwrap();
        let listed = other.admin().unwrap().list(&ListQuery::new()).await.unwrap();
        assert_eq!(listed.len(), 2, "{program:?}");
        released.release().await.unwrap();
        assert_eq!(queue(&etcd, &prefix, "released").await, [], "{program:?}");

        let waiting = lock.key("new").wait(MINUTES).acquire();
        let error = soon("an acquire waits for an operator", waiting).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NeedsOperator, "{program:?}: {error:?}");
        assert!(!error.is_retryable(), "{error:?}");
        let error = other.key("new").try_acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NeedsOperator, "{program:?}: {error:?}");

        etcd.make_room().await;
        cycle(&other, "new").await;
        cycle(&lock, "released").await;
        assert_eq!(kept.validity(), Validity::Valid, "{program:?}");
        kept.release().await.unwrap();
        assert_eq!(queue(&etcd, &prefix, "kept").await, []);
    }
}

#[tokio::test]
async fn a_new_client_of_a_full_cluster_lists_and_releases_by_force() {
    for program in [EtcdProgram::Vendored, EtcdProgram::Installed] {
        let etcd = Etcd::start(EtcdOptions::new().program(program).quota(4 << 20));
        let prefix = Etcd::fresh_prefix();
        let lock = client(&etcd, &prefix).await;
        let held = acquired(&lock, "k").await;
        etcd.fill().await;

        let operator = client(&etcd, &prefix).await;
        let admin = operator.admin().unwrap();
        let listed = admin.list(&ListQuery::new()).await.unwrap();
        let holders: Vec<_> = listed.iter().map(|info| info.holder().unwrap().holder).collect();
        assert_eq!(holders, [Some(held.stored_holder())], "{program:?}");
        assert!(admin.force_release(held.key(), held.stored_holder()).await.unwrap(), "{program:?}");
        assert_eq!(queue(&etcd, &prefix, "k").await, [], "{program:?}");
        soon("the loss is never noticed", held.lost()).await;
        let error = operator.key("k").try_acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NeedsOperator, "{program:?}: {error:?}");

        etcd.make_room().await;
        // The client takes the TTL that the server grants, although it could not read the shortest one.
        cycle(&operator, "k").await;
    }
}

/// The base of the tokens does not exist yet, and a full cluster refuses to write it.
#[tokio::test]
async fn a_client_of_a_prefix_that_was_never_used_connects_to_a_full_cluster() {
    for program in [EtcdProgram::Vendored, EtcdProgram::Installed] {
        let etcd = Etcd::start(EtcdOptions::new().program(program).quota(4 << 20));
        let prefix = Etcd::fresh_prefix();
        etcd.fill().await;

        let (a, b) = (client(&etcd, &prefix).await, client(&etcd, &prefix).await);
        let admin = a.admin().unwrap();
        assert!(admin.inspect(&key("k")).await.unwrap().is_free(), "{program:?}");
        assert!(admin.list(&ListQuery::new()).await.unwrap().is_empty(), "{program:?}");
        assert!(admin.facts().await.unwrap().iter().any(|fact| fact.advice.is_some()), "{program:?}");
        let error = a.key("k").try_acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NeedsOperator, "{program:?}: {error:?}");
        assert_eq!(etcd.entries(format!("{prefix}/")).await, [], "{program:?}");

        etcd.make_room().await;
        let tokens = [cycle(&a, "k").await, cycle(&b, "k").await, cycle(&a, "k").await];
        assert!(tokens.is_sorted_by(|before, after| before < after), "{program:?}: {tokens:?}");
        // A base is the time in microseconds. Without one the token is a small number.
        assert!(tokens[0].as_u64() > 1 << 50, "{program:?}: {tokens:?} have no base");
        assert_eq!(etcd.entries(format!("{prefix}//base")).await.len(), 1, "{program:?}");
    }
}

#[tokio::test]
async fn a_full_cluster_and_its_room_are_facts_for_operators() {
    let etcd = Etcd::start(EtcdOptions::new().quota(4 << 20));
    let lock = client(&etcd, &Etcd::fresh_prefix()).await;
    let names = |facts: &[leasehold_api::StoreFact]| -> Vec<String> {
        facts.iter().filter(|fact| fact.advice.is_some()).map(|fact| fact.name.clone()).collect()
    };
    let healthy = names(&lock.admin().unwrap().facts().await.unwrap());
    etcd.fill().await;
    let full = names(&lock.admin().unwrap().facts().await.unwrap());
    assert!(full.len() > healthy.len(), "the alarm is no fact: {healthy:?}, then {full:?}");
    etcd.make_room().await;
    assert_eq!(names(&lock.admin().unwrap().facts().await.unwrap()), healthy);
}
