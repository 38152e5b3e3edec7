//! One layer type, three transports: gRPC over real sockets, and messages.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../common/layers.rs"]
mod common;
mod grpc_echo;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{Gate, LONG, key, memory, until};
use grpc_echo::{call, serve, stream};
use leasehold_api::{Error, LockExt as _, LockKey, LossReason, Validity};
use leasehold_tower::{Grpc, Held, LockLayer, Message, Refused, RequestHold, Template, Transport, Until};
use tokio::task::JoinSet;
use tonic::Code;
use tower::{Layer as _, Service as _, ServiceExt as _, service_fn};

fn by_header() -> Template {
    Template::parse("ledger:{header.x-holder|int}").unwrap()
}

#[tokio::test]
async fn grpc_calls_of_one_key_run_one_after_the_other() {
    let (_, lock) = memory();
    let layer = LockLayer::with(lock.clone(), by_header(), Grpc::new()).wait(LONG);
    let (calls, client) = serve(&layer).await;
    let mut at_once = JoinSet::new();
    for n in 0..20_u8 {
        at_once.spawn(call(client.clone(), "Echo", Some("42"), vec![n]));
    }
    let mut answers: Vec<_> = at_once.join_all().await.into_iter().map(|answer| answer.unwrap()[0]).collect();
    answers.sort_unstable();
    assert_eq!(answers, (0..20).collect::<Vec<_>>(), "each its own, whole");
    assert_eq!(calls.most_at_once(), 1);
    assert_eq!(layer.stats().granted, 20);
    assert!(lock.key("ledger:42").try_acquire().await.unwrap().is_some());

    // Errors of the service itself pass through.
    let status = call(client.clone(), "Fail", Some("42"), vec![]).await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::FailedPrecondition, "short"));
    assert!(lock.key("ledger:42").try_acquire().await.unwrap().is_some());
}

#[tokio::test]
async fn grpc_refusals_are_statuses() {
    let (store, lock) = memory();
    let layer = LockLayer::with(lock.clone(), by_header(), Grpc::new()).fail_fast();
    let (calls, client) = serve(&layer).await;
    let held = lock.key("ledger:1").acquire().await.unwrap();
    let status = call(client.clone(), "Echo", Some("1"), vec![]).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert_eq!(status.metadata().get("grpc-retry-pushback-ms").unwrap(), "1000");
    assert_eq!(status.message(), "another request holds the lock; try again");
    drop(held);
    for bad in [None, Some("x"), Some("")] {
        let status = call(client.clone(), "Echo", bad, vec![]).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{bad:?}");
    }
    assert_eq!(calls.total(), 0);

    let waiting = tokio::spawn(call(client.clone(), "Wait", Some("2"), vec![]));
    calls.gate.reached().await;
    assert!(store.lose(&key("ledger:2"), LossReason::ForcedRelease));
    let status = waiting.await.unwrap().unwrap_err();
    assert_eq!(status.code(), Code::Aborted, "what was done is not known: {status}");

    let config = LockLayer::with(
        lock.clone(),
        |_: &http::Request<tonic::body::Body>| Err::<LockKey, _>(Error::closed()),
        Grpc::new(),
    );
    let (_, client) = serve(&config).await;
    assert_eq!(call(client, "Echo", Some("1"), vec![]).await.unwrap_err().code(), Code::Internal);
    lock.close().await.unwrap();
}

#[tokio::test]
async fn a_cancelled_grpc_call_finishes_under_the_lock() {
    let (_, lock) = memory();
    let layer = LockLayer::with(lock.clone(), by_header(), Grpc::new()).wait(LONG);
    let (calls, client) = serve(&layer).await;
    let waiting = tokio::spawn(call(client.clone(), "Wait", Some("2"), vec![]));
    calls.gate.reached().await;
    waiting.abort();
    waiting.await.unwrap_err();
    // A reply on a second stream of the same connection shows that the server has seen the first stream's reset.
    call(client.clone(), "Echo", Some("3"), vec![]).await.unwrap();
    assert!(lock.key("ledger:2").try_acquire().await.unwrap().is_none());
    calls.gate.open();
    layer.idle().await;
    assert_eq!(calls.gate.ended(), 1);
    assert!(lock.key("ledger:2").try_acquire().await.unwrap().is_some());
}

#[tokio::test]
async fn a_grpc_stream_keeps_its_lock_until_it_ends_or_is_reset() {
    let (_, lock) = memory();
    let layer = LockLayer::with(lock.clone(), by_header(), Grpc::new()).until(Until::BodyEnd).wait(LONG);
    let (calls, client) = serve(&layer).await;
    for ends_in_order in [true, false] {
        let mut answers = stream(client.clone(), Some("4")).await.unwrap();
        calls.send(b"a");
        assert_eq!(answers.message().await.unwrap(), Some(b"a".to_vec()));
        assert!(lock.key("ledger:4").try_acquire().await.unwrap().is_none());
        if ends_in_order {
            calls.end();
            assert_eq!(answers.message().await.unwrap(), None);
        } else {
            drop(answers);
        }
        lock.key("ledger:4").wait(LONG).acquire().await.unwrap().release().await.unwrap();
        until("nobody in flight", || layer.stats().in_flight == 0).await;
    }
}

/// A message of a bus.
#[derive(Debug, Default)]
struct Spend {
    holder: u32,
    held: Option<Held>,
}

#[derive(Debug, PartialEq)]
enum BusError {
    Requeue(Duration),
    Dead(String),
}

fn by_holder(message: &Spend) -> Result<LockKey, Error> {
    leasehold_api::key!["ledger", message.holder]
}

#[tokio::test]
async fn messages_are_locked_by_the_same_layer() {
    let (_, lock) = memory();
    let gate = Gate::new();
    let refused = |why: Refused| match why.retry_after() {
        Some(after) => Err(BusError::Requeue(after)),
        None => Err(BusError::Dead(why.to_string())),
    };
    let layer = LockLayer::with(lock.clone(), by_holder, Message(refused)).fail_fast();
    let order = Arc::new(Mutex::new(VecDeque::new()));
    let (log, entered) = (Arc::clone(&order), gate.clone());
    let handler = service_fn(move |message: Spend| {
        let (log, mut gate) = (Arc::clone(&log), entered.service::<()>());
        async move {
            let passed: Result<_, Infallible> =
                gate.ready().await.unwrap().call(http::Request::new(())).await;
            passed.unwrap();
            log.lock().unwrap().push_back(message.holder);
            Ok::<_, BusError>(message.holder)
        }
    });
    let service = layer.layer(handler);
    let of = |holder| Spend { holder, held: None };
    let first = tokio::spawn(service.clone().oneshot(of(1)));
    gate.reached().await;
    let second = service.clone().oneshot(of(1)).await;
    assert_eq!(second, Err(BusError::Requeue(Duration::from_secs(1))));
    gate.open();
    assert_eq!(first.await.unwrap(), Ok(1));
    gate.open();
    assert_eq!(service.oneshot(of(2)).await, Ok(2));
    assert_eq!(*order.lock().unwrap(), [1, 2]);
    assert!(lock.key("ledger:1").try_acquire().await.unwrap().is_some());
}

/// A custom transport whose messages can carry the held lock to their handler.
#[derive(Clone, Debug)]
struct Bus;

impl Transport<Spend, u32, BusError> for Bus {
    type Response = u32;

    fn attach(&self, message: &mut Spend, held: Held) {
        message.held = Some(held);
    }

    fn held<'a>(&self, message: &'a Spend) -> Option<&'a Held> {
        message.held.as_ref()
    }

    fn refuse(&self, why: Refused) -> Result<u32, BusError> {
        Err(BusError::Dead(format!("{why:?}")))
    }

    fn pass(&self, response: u32, hold: Option<RequestHold>) -> (u32, Option<RequestHold>) {
        (response, hold)
    }
}

#[tokio::test]
async fn a_custom_transport_carries_the_lock_and_detects_nested_layers() {
    let (_, lock) = memory();
    let layer = || LockLayer::with(lock.clone(), by_holder, Bus).wait(LONG);
    let handler = service_fn(async |message: Spend| {
        let held = message.held.unwrap();
        assert_eq!((held.key().as_str(), held.validity()), ("ledger:7", Validity::Valid));
        Ok::<_, BusError>(message.holder)
    });
    let of = || Spend { holder: 7, held: None };
    assert_eq!(layer().layer(handler).oneshot(of()).await, Ok(7));
    let nested = layer().layer(layer().layer(handler)).oneshot(of()).await;
    assert_eq!(nested, Err(BusError::Dead("Nested(\"ledger:7\")".into())));
}
