//! The store's part of a chain of local callers: tokens set aside, and whether another client was served since.

use leasehold_api::FencingToken;
use leasehold_engine::{Attempt, Backend as _, Granted, HoldRef, Request};
use leasehold_postgres_ttl::TtlBackend;

use crate::support::{config, holder, installed, key, request};

/// Returns the grant of `name` to holder `n`, with tokens set aside if callers wait.
async fn granted(backend: &TtlBackend, names: &[&str], n: u64, reserve: u16) -> Vec<Granted> {
    let request = |name: &&str| {
        let mut request = request(name, n);
        request.reserve = reserve;
        request
    };
    let requests: Vec<Request> = names.iter().map(request).collect();
    let holds: Vec<HoldRef> = requests.iter().map(Request::hold).collect();
    let mut grants = Vec::new();
    for answer in backend.acquire(requests).await {
        let Attempt::Granted(granted) = answer.unwrap() else { panic!("{names:?} are free") };
        grants.push(granted);
    }
    for freed in backend.release(holds).await {
        assert!(freed.unwrap().was_held);
    }
    grants
}

#[tokio::test]
async fn tokens_that_are_set_aside_are_between_a_grant_and_the_next() {
    let database = installed().await;
    let backend = config(&database).backend().await.unwrap();
    let last = |granted: &Granted| granted.reserved.token(granted.token, granted.reserved.len());
    let mut before: [Option<FencingToken>; 2] = [None; 2];
    // A row that is inserted, one that is taken again, and several in one statement. Without waiting callers a grant
    // has the rest of its number.
    for (n, reserve, least) in [(1, 10_000, 10_000), (2, 10_000, 10_000), (3, 0, 1_023)] {
        for names in [&["a"][..], &["b", "a"]] {
            let mut grants = granted(&backend, names, n, reserve).await;
            grants.reverse();
            // A row that is inserted beside others is granted by the statement that also explains, which draws no more.
            let least = if n == 1 && names.len() > 1 { 1_023 } else { least };
            for (granted, before) in grants.iter().zip(&mut before) {
                assert!(granted.reserved.len() >= least, "{names:?}, {n}: {}", granted.reserved.len());
                assert!(granted.token > *before, "{names:?}, {n}");
                assert!(last(granted) > granted.token);
                *before = last(granted);
            }
        }
    }
}

#[tokio::test]
async fn a_client_sees_that_another_one_was_served() {
    let database = installed().await;
    let backend = config(&database).backend().await.unwrap();
    assert_eq!(backend.was_served(&key("k"), holder(1)).await, Some(false), "there is no row");
    granted(&backend, &["k"], 1, 0).await;
    assert_eq!(backend.was_served(&key("k"), holder(1)).await, Some(false), "released, and free");
    granted(&backend, &["k"], 2, 0).await;
    assert_eq!(backend.was_served(&key("k"), holder(1)).await, Some(true), "although it is free again");
}
