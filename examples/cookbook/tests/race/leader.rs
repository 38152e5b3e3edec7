use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode};
use cookbook::leader::{Inbox, KEY, lead, pages};
use http_body_util::BodyExt as _;
use leasehold_api::{Error, ErrorKind, FencingToken, Lock, LockExt as _, LockKey, Validity};
use leasehold_election::{Election, ElectionHandle, State};
use leasehold_engine::Engine;
use leasehold_postgres::PgConfig;
use leasehold_postgres_ttl::TtlConfig;
use test_bounds::within;
use test_servers::{Cluster, Proxy};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::task::JoinHandle;
use tower::ServiceExt as _;

use crate::support::{LONG, database};

fn key() -> LockKey {
    LockKey::new(KEY).unwrap()
}

/// Connects a client with this TTL, which is short only in tests of ended leases.
async fn client_with(url: &str, ttl: Duration) -> Arc<Engine> {
    let server = PgConfig::from_url(url).unwrap().install_schema(true);
    Arc::new(TtlConfig::new(server).ttl(ttl).connect().await.unwrap())
}

async fn client(url: &str) -> Arc<Engine> {
    client_with(url, Duration::from_secs(300)).await
}

/// A replica that campaigns.
struct Replica {
    handle: ElectionHandle,
    pages: Router,
    rounds: UnboundedReceiver<Option<FencingToken>>,
    campaign: JoinHandle<Result<(), Error>>,
}

impl Drop for Replica {
    fn drop(&mut self) {
        self.campaign.abort();
    }
}

fn replica(name: &'static str, lock: &Arc<Engine>) -> Replica {
    let lock: Arc<dyn Lock> = lock.clone();
    let election = Election::new(Arc::clone(&lock), KEY).value(name);
    let (handle, (sender, rounds)) = (election.handle(), unbounded_channel());
    let pages = pages(handle.clone(), lock);
    let campaign = tokio::spawn(async move { lead(&election, &Inbox::new(sender)).await });
    Replica { handle, pages, rounds, campaign }
}

impl Replica {
    /// Waits for the next round of the work. Returns its token.
    async fn works(&mut self) -> Option<FencingToken> {
        within(LONG, "no round", self.rounds.recv()).await.unwrap()
    }

    async fn works_with_another(&mut self, than: Option<FencingToken>) -> Option<FencingToken> {
        loop {
            let token = self.works().await;
            if token != than {
                return token;
            }
        }
    }

    async fn request(&self, request: Request<Body>) -> String {
        let answer = self.pages.clone().oneshot(request).await.unwrap();
        assert_eq!(answer.status(), StatusCode::OK);
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        String::from_utf8(body.to_vec()).unwrap()
    }

    async fn page(&self) -> String {
        self.request(Request::get("/leader").body(Body::empty()).unwrap()).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn leader_is_replaced_when_its_lease_is_ended() {
    let db = database("").await;
    let (lock, operator) = (client(db.url()).await, client(db.url()).await);
    let mut a = replica("a", &lock);
    let first = a.works().await;
    let admin = operator.admin().unwrap();
    let holder = admin.inspect(&key()).await.unwrap().holder().unwrap().holder.unwrap();
    assert!(admin.force_release(&key(), holder).await.unwrap());
    let second = a.works_with_another(first).await;
    assert!(second > first);
}

#[tokio::test(flavor = "multi_thread")]
async fn leader_that_is_cut_off_has_lost_before_the_next_one_begins() {
    let db = Cluster::shared().fresh_database().await;
    let proxy = Proxy::start(Cluster::shared().address()).await;
    let ttl = Duration::from_secs(3);
    let (a, b) = (client_with(&proxy.url(db.url()), ttl).await, client_with(db.url(), ttl).await);
    let mut first = replica("a", &a);
    let a_token = first.works().await;
    let mut second = replica("b", &b);
    proxy.cut();
    let b_token = second.works().await;
    // Checked by the clock, because its task might get the loss late.
    assert!(!matches!(first.handle.state(), State::Leading { .. } | State::InDoubt { .. }));
    assert!(b_token > a_token);
}

#[tokio::test(flavor = "multi_thread")]
async fn leader_that_closes_is_replaced_and_returns() {
    let db = database("").await;
    let (a, b) = (client(db.url()).await, client(db.url()).await);
    let mut first = replica("a", &a);
    let a_token = first.works().await;
    let mut second = replica("b", &b);
    a.close().await.unwrap();
    let ended = within(LONG, "not ended", &mut first.campaign).await.unwrap();
    assert_eq!(ended.unwrap_err().kind(), ErrorKind::Closed);
    assert!(second.works().await > a_token);
}

#[tokio::test(flavor = "multi_thread")]
async fn each_replica_shows_who_leads_and_steps_down_on_request() {
    let db = database("").await;
    let (a, b) = (client(db.url()).await, client(db.url()).await);
    let mut first = replica("10.0.0.1:80", &a);
    let token = first.works().await.unwrap();
    let mut second = replica("10.0.0.2:80", &b);
    assert_eq!(
        first.page().await,
        format!("leader: 10.0.0.1:80\nthis replica: leading with token {token}\n")
    );
    let page = second.page().await;
    assert_eq!(page, "leader: 10.0.0.1:80\nthis replica: candidate\n");
    first.request(Request::post("/leader/step-down").body(Body::empty()).unwrap()).await;
    let token = second.works().await.unwrap();
    let page = first.page().await;
    assert!(page.starts_with("leader: 10.0.0.2:80\nthis replica: resting for "), "{page}");
    assert!(second.page().await.ends_with(&format!("leading with token {token}\n")));
    // The first one rests, so nobody leads when the second is gone.
    b.close().await.unwrap();
    assert!(first.page().await.starts_with("leader: nobody\n"));
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
