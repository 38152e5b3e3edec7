use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use cookbook::leader::lead;
use leasehold_api::{Error, ErrorKind, GrantHandle, Lock as _, LockExt as _, LockKey, Validity};
use leasehold_engine::Engine;
use leasehold_postgres::PgConfig;
use leasehold_postgres_ttl::TtlConfig;
use test_bounds::within;
use test_servers::{Cluster, Proxy};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinHandle;

use crate::support::{LONG, database};

/// Reports of replicas: a new leader, or the end of a term.
#[derive(Debug)]
enum Event {
    Leads(&'static str, GrantHandle),
    Ended(&'static str),
}

/// Reports the end of a term in every case.
struct Term(&'static str, UnboundedSender<Event>);

impl Drop for Term {
    fn drop(&mut self) {
        let _ = self.1.send(Event::Ended(self.0));
    }
}

fn key() -> LockKey {
    LockKey::new("leader").unwrap()
}

/// Connects a client with this TTL, which is short only in tests of ended leases.
async fn client_with(url: &str, ttl: Duration) -> Arc<Engine> {
    let server = PgConfig::from_url(url).unwrap().install_schema(true);
    Arc::new(TtlConfig::new(server).ttl(ttl).connect().await.unwrap())
}

async fn client(url: &str) -> Arc<Engine> {
    client_with(url, Duration::from_secs(300)).await
}

fn replica(name: &'static str, lock: &Arc<Engine>, events: &UnboundedSender<Event>) -> JoinHandle<Error> {
    let (lock, events) = (Arc::clone(lock), events.clone());
    tokio::spawn(async move {
        lead(&*lock, &key(), |guard| {
            let (term, handle) = (Term(name, events.clone()), guard.handle());
            let _ = events.send(Event::Leads(name, handle));
            Box::pin(async move {
                let _term = term;
                pending::<()>().await;
            })
        })
        .await
    })
}

async fn leads(events: &mut UnboundedReceiver<Event>) -> (&'static str, GrantHandle) {
    match within(LONG, "not ended", events.recv()).await.unwrap() {
        Event::Leads(name, handle) => (name, handle),
        event @ Event::Ended(_) => panic!("{event:?}"),
    }
}

async fn ended(events: &mut UnboundedReceiver<Event>) -> &'static str {
    match within(LONG, "not ended", events.recv()).await.unwrap() {
        Event::Ended(name) => name,
        event @ Event::Leads(..) => panic!("{event:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn leader_is_replaced_when_its_lease_is_ended() {
    let db = database("").await;
    let lock = client(db.url()).await;
    let (sender, mut events) = unbounded_channel();
    let replica = replica("a", &lock, &sender);
    let (_, first) = leads(&mut events).await;
    let operator = client(db.url()).await;
    assert!(operator.admin().unwrap().force_release(&key(), first.holder()).await.unwrap());
    assert_eq!(ended(&mut events).await, "a", "the body was dropped");
    let (_, second) = leads(&mut events).await;
    assert!(second.token() > first.token());
    assert_eq!((first.validity(), second.validity()), (Validity::Lost, Validity::Valid));
    replica.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn leader_that_is_cut_off_has_lost_before_the_next_one_begins() {
    let db = Cluster::shared().fresh_database().await;
    let proxy = Proxy::start(Cluster::shared().address()).await;
    let ttl = Duration::from_secs(3);
    let (a, b) = (client_with(&proxy.url(db.url()), ttl).await, client_with(db.url(), ttl).await);
    let ((a_sender, mut a_events), (b_sender, mut b_events)) = (unbounded_channel(), unbounded_channel());
    let first = replica("a", &a, &a_sender);
    let (_, a_term) = leads(&mut a_events).await;
    let second = replica("b", &b, &b_sender);
    proxy.cut();
    let (_, b_term) = leads(&mut b_events).await;
    // Checked by the clock, because its task might get the loss late.
    assert_eq!(a_term.validity(), Validity::Lost);
    assert!(b_term.token() > a_term.token());
    assert_eq!(ended(&mut a_events).await, "a");
    first.abort();
    second.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn leader_that_closes_is_replaced_and_returns() {
    let db = database("").await;
    let (a, b) = (client(db.url()).await, client(db.url()).await);
    let (sender, mut events) = unbounded_channel();
    let first = replica("a", &a, &sender);
    leads(&mut events).await;
    let second = replica("b", &b, &sender);
    a.close().await.unwrap();
    assert_eq!(within(LONG, "not ended", first).await.unwrap().kind(), ErrorKind::Closed);
    let (mut names, mut b_leads) = (Vec::new(), false);
    while !b_leads {
        match within(LONG, "not ended", events.recv()).await.unwrap() {
            Event::Leads(name, _) => b_leads = name == "b",
            Event::Ended(name) => names.push(name),
        }
    }
    // The tasks of a and b report separately, so their order in the channel has no meaning.
    if names.is_empty() {
        names.push(ended(&mut events).await);
    }
    assert_eq!(names, ["a"]);
    second.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_a_flag_outlives_the_lease() {
    let db = database("").await;
    let (a, b) = (client(db.url()).await, client(db.url()).await);
    let guard = a.key(key()).acquire().await.unwrap();
    let a_leads = guard.validity() == Validity::Valid;
    assert!(b.admin().unwrap().force_release(&key(), guard.holder()).await.unwrap());
    let other = b.key(key()).acquire().await.unwrap();
    let b_leads = other.validity() == Validity::Valid;
    assert!(a_leads && b_leads, "two leaders");
    within(LONG, "not ended", guard.lost()).await;
    assert_eq!(guard.validity(), Validity::Lost, "whoever asks the guard knows");
}
