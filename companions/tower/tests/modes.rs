//! Layers for readers and for a number of requests at once, on the memory store.

#![allow(clippy::unwrap_used)]

#[path = "common/layers.rs"]
mod common;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use common::*;
use http::{Request, StatusCode};
use leasehold_api::{ErrorKind, Lock, LockExt as _, Mode};
use leasehold_tower::Held;
use tokio::task::JoinSet;
use tower::{Layer as _, ServiceExt as _, service_fn};

#[tokio::test]
async fn readers_run_together_and_a_writer_runs_alone() {
    let (_, lock) = memory();
    let (reads, writes, gate) = (layer(&lock).shared(), layer(&lock), Gate::new());
    let mut readers = JoinSet::new();
    for _ in 0..3 {
        readers.spawn(reads.layer(gate.service()).oneshot(get("/k")));
    }
    // All of them are in the handler before one leaves.
    for _ in 0..3 {
        gate.reached().await;
    }
    let writer = tokio::spawn(writes.layer(answering(StatusCode::OK)).oneshot(get("/k")));
    until("the writer waits", || writes.stats().waiting == 1).await;
    let refused = send(&reads.clone().fail_fast().layer(answering(StatusCode::OK)), get("/k")).await;
    assert_eq!(
        refused.status(),
        StatusCode::SERVICE_UNAVAILABLE,
        "a later reader does not overtake the writer"
    );
    assert!(!writer.is_finished());
    (0..3).for_each(|_| gate.open());
    assert!(readers.join_all().await.into_iter().all(|answer| answer.unwrap().status() == StatusCode::OK));
    assert_eq!(writer.await.unwrap().unwrap().status(), StatusCode::OK);
    assert_eq!((reads.stats().granted, writes.stats().granted), (3, 1));
}

#[tokio::test]
async fn at_most_as_many_requests_run_as_there_are_permits_each_with_its_number() {
    let (_, lock) = memory();
    let (layer, gate) = (layer(&lock).permits(2), Gate::new());
    let numbers = Arc::new(Mutex::new(Vec::new()));
    let handler = {
        let (gate, numbers) = (gate.clone(), Arc::clone(&numbers));
        service_fn(move |request: Request<Body>| {
            let held = request.extensions().get::<Held>().unwrap().clone();
            assert_eq!(held.mode(), Mode::Permit { of: 2 });
            numbers.lock().unwrap().push(held.permit().unwrap());
            gate.service::<Body>().oneshot(request)
        })
    };
    let service = layer.layer(handler);
    let mut requests = JoinSet::new();
    for _ in 0..4 {
        requests.spawn(service.clone().oneshot(get("/k")));
    }
    gate.reached().await;
    gate.reached().await;
    until("two wait", || layer.stats().waiting == 2).await;
    assert_eq!(numbers.lock().unwrap().iter().copied().collect::<BTreeSet<_>>(), [0, 1].into());
    assert!(lock.key("k").permits(2).try_acquire().await.unwrap().is_none());
    (0..4).for_each(|_| gate.open());
    assert!(requests.join_all().await.into_iter().all(|answer| answer.unwrap().status() == StatusCode::OK));
    assert_eq!(numbers.lock().unwrap().iter().max(), Some(&1));
}

#[tokio::test]
async fn a_layer_inside_another_one_of_the_same_key_is_refused_in_every_mode() {
    let (_, lock) = memory();
    for outer in [layer(&lock), layer(&lock).shared()] {
        let service = outer.layer(layer(&lock).shared().layer(answering(StatusCode::OK)));
        let refused = send(&service, get("/k")).await;
        assert_eq!(refused.status(), StatusCode::INTERNAL_SERVER_ERROR);
    }
}

#[tokio::test]
async fn a_mode_that_the_store_lacks_is_told_at_start_up() {
    let (_, lock) = memory();
    assert!(layer(&lock).shared().check().is_ok() && layer(&lock).permits(8).check().is_ok());
    assert_eq!(layer(&lock).permits(0).check().unwrap_err().kind(), ErrorKind::InvalidOption);
    let directory = tempfile::tempdir().unwrap();
    let file: Arc<dyn Lock> = Arc::new(leasehold_file::connect(directory.path()).unwrap());
    let error = layer(&file).permits(u32::MAX).check().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}
