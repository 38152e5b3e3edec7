//! Elections on a real server, with the session and the lease store.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, ErrorKind, Lock, Validity};
use leasehold_election::{BodyError, Election, ElectionHandle, Next, Observer, State};
use leasehold_engine::Engine;
use leasehold_postgres::schema::grants_to_read;
use leasehold_postgres::{Identifier, PgConfig};
use leasehold_postgres_advisory::AdvisoryConfig;
use leasehold_postgres_ttl::TtlConfig;
use test_bounds::within;
use test_servers::{Cluster, ClusterOptions, Database, Proxy, Standby, StopMode, sql};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinHandle;

const LONG: Duration = Duration::from_secs(180);

/// A store under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Store {
    Session,
    Lease,
}

const STORES: [Store; 2] = [Store::Session, Store::Lease];

impl Store {
    async fn connect(self, url: &str, name: &str) -> Arc<Engine> {
        let server = PgConfig::from_url(url).unwrap().install_schema(true).application_name(name);
        let engine = match self {
            Self::Session => AdvisoryConfig::new(server).connect().await,
            Self::Lease => TtlConfig::new(server).ttl(Duration::from_secs(3)).connect().await,
        };
        Arc::new(engine.unwrap())
    }
}

/// A candidate whose body waits for an order.
struct Replica {
    handle: ElectionHandle,
    task: JoinHandle<Result<(), Error>>,
    _orders: UnboundedSender<Result<Next, BodyError>>,
}

impl Drop for Replica {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A body has started: its candidate, and the validity of all terms before.
type Starts = UnboundedReceiver<(&'static str, leasehold_api::GrantHandle)>;
type Started = UnboundedSender<(&'static str, leasehold_api::GrantHandle)>;

fn start(lock: &Arc<Engine>, name: &'static str, started: &Started) -> Replica {
    let election = Election::new(Arc::clone(lock), "leader").value(name);
    let (handle, started, (orders, order)) = (election.handle(), started.clone(), unbounded_channel());
    let order = Arc::new(tokio::sync::Mutex::new(order));
    let task = tokio::spawn(async move {
        let campaign = election.lead_boxed(|term| {
            let (started, order) = (started.clone(), Arc::clone(&order));
            Box::pin(async move {
                let _ = started.send((name, term.guard().handle()));
                order.lock().await.recv().await.unwrap_or(Ok(Next::Done))
            })
        });
        campaign.await
    });
    Replica { handle, task, _orders: orders }
}

async fn leads(starts: &mut Starts) -> (&'static str, leasehold_api::GrantHandle) {
    within(LONG, "nobody leads", starts.recv()).await.unwrap()
}

async fn until(handle: &ElectionHandle, is_wanted: impl Fn(&State) -> bool) {
    let mut handle = handle.clone();
    let wait = async {
        let mut state = handle.state();
        while !is_wanted(&state) {
            state = handle.changed().await;
        }
    };
    within(LONG, "never in this state", wait).await;
}

/// Ends every session of the client `name`. Returns how many there were.
async fn end_sessions(db: &Database, name: &str) -> i64 {
    let end = format!(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = '{name}' AND datname = current_database()"
    );
    sql::number(&mut db.connect().await, end).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_candidate_whose_sessions_end_while_it_waits_leads_later() {
    for store in STORES {
        let db = Cluster::shared().fresh_database().await;
        let (a, b) = (store.connect(db.url(), "a").await, store.connect(db.url(), "b").await);
        let (started, mut starts) = unbounded_channel();
        let first = start(&a, "a", &started);
        assert_eq!(leads(&mut starts).await.0, "a");
        let second = start(&b, "b", &started);
        let mut observer = db.connect().await;
        let mut before = 0;
        for round in 0..3 {
            if store == Store::Session {
                let waits = "FROM pg_locks WHERE locktype = 'advisory' AND NOT granted";
                sql::until(&mut observer, &format!("EXISTS (SELECT {waits} AND pid <> {before})")).await;
                before = sql::number(&mut observer, format!("SELECT pid {waits}")).await;
            }
            // A lease client has no session until its next poll.
            assert!(end_sessions(&db, "b").await > 0 || (store == Store::Lease && round > 0));
        }
        until(&second.handle, |state| matches!(state, State::Candidate)).await;
        assert!(first.handle.state().is_leading(), "{store:?}");
        first.handle.step_down(Duration::from_secs(1000));
        assert_eq!(leads(&mut starts).await.0, "b", "{store:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_is_cut_off_has_ended_before_the_next_one_starts() {
    for store in STORES {
        let db = Cluster::shared().fresh_database().await;
        let proxy = Proxy::start(Cluster::shared().address()).await;
        let a = store.connect(&proxy.url(db.url()), "a").await;
        let b = store.connect(db.url(), "b").await;
        let (started, mut starts) = unbounded_channel();
        let first = start(&a, "a", &started);
        let (_, a_term) = leads(&mut starts).await;
        let _second = start(&b, "b", &started);
        proxy.cut();
        let (name, b_term) = leads(&mut starts).await;
        assert_eq!((name, b_term.validity()), ("b", Validity::Valid), "{store:?}");
        // A session ends with its connection, and the holder reads that at the same time. A lease ends by the clock.
        if store == Store::Lease {
            assert_eq!(a_term.validity(), Validity::Lost, "{store:?}");
        }
        until(&first.handle, |state| matches!(state, State::Failed { .. })).await;
        assert!(b_term.token() > a_term.token());
        proxy.restore();
        until(&first.handle, |state| matches!(state, State::Candidate)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_of_the_server_ends_no_campaign() {
    for store in STORES {
        let cluster = tokio::task::spawn_blocking(|| Cluster::start(ClusterOptions::new())).await.unwrap();
        let db = cluster.fresh_database().await;
        let (a, b) = (store.connect(db.url(), "a").await, store.connect(db.url(), "b").await);
        let (started, mut starts) = unbounded_channel();
        let replicas = [start(&a, "a", &started), start(&b, "b", &started)];
        let (_, mut last) = leads(&mut starts).await;
        for mode in [StopMode::Fast, StopMode::Immediate] {
            cluster.restart(mode).await;
            // A lease can outlast the restart. Then its leader goes on.
            let term = tokio::select! {
                (_, term) = leads(&mut starts) => term,
                () = until_leading(&replicas) => last.clone(),
            };
            assert!(term.token() >= last.token(), "{store:?}");
            last = term;
        }
        for one in &replicas {
            one.handle.step_down(Duration::from_secs(1));
        }
        let (_, term) = leads(&mut starts).await;
        assert!(term.token() > last.token(), "{store:?}: nobody campaigns any more");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_promoted_standby_has_one_leader_with_a_greater_token() {
    for store in STORES {
        let primary = tokio::task::spawn_blocking(|| Cluster::start(ClusterOptions::new())).await.unwrap();
        let db = primary.fresh_database().await;
        let proxy = Proxy::start(primary.address()).await;
        let url = proxy.url(db.url());
        let (a, b) = (store.connect(&url, "a").await, store.connect(&url, "b").await);
        let (started, mut starts) = unbounded_channel();
        let replicas = [start(&a, "a", &started), start(&b, "b", &started)];
        let standby = Standby::of(&primary).await;
        let (_, first) = leads(&mut starts).await;
        standby.wait_for_replay(&primary).await;
        primary.stop(StopMode::Immediate).await;
        standby.promote().await;
        proxy.retarget(standby.cluster().address());
        proxy.reset();
        let term = tokio::select! {
            (_, term) = leads(&mut starts) => term,
            () = until_leading(&replicas) => first.clone(),
        };
        assert!(term.token() >= first.token(), "{store:?}");
        replicas.iter().for_each(|one| one.handle.step_down(Duration::from_secs(1)));
        let (_, next) = leads(&mut starts).await;
        assert!(next.token() > term.token(), "{store:?}: nobody campaigns any more");
    }
}

/// Waits until a replica leads and has led for longer than a loss goes unnoticed.
async fn until_leading(replicas: &[Replica]) {
    let mut since = tokio::time::Instant::now();
    while since.elapsed() < Duration::from_secs(15) {
        if !replicas.iter().any(|one| one.handle.state().is_leading()) {
            since = tokio::time::Instant::now();
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_hundred_candidates_one_leads_at_a_time() {
    let db = Cluster::shared().fresh_database().await;
    let (started, mut starts) = unbounded_channel();
    let mut replicas = Vec::new();
    for _ in 0..200 {
        let lock = Store::Lease.connect(db.url(), "many").await;
        replicas.push(start(&lock, "one of many", &started));
    }
    let mut last: Option<leasehold_api::GrantHandle> = None;
    for _ in 0..10 {
        let (_, term) = leads(&mut starts).await;
        if let Some(last) = last {
            assert!(term.token() > last.token() && last.validity() != Validity::Valid, "{last:?} {term:?}");
        }
        let leaders = replicas.iter().filter(|one| one.handle.state().is_leading());
        let leaders: Vec<_> = leaders.collect();
        let [leader] = &leaders[..] else { panic!("{} lead", leaders.len()) };
        leader.handle.step_down(Duration::from_secs(1000));
        last = Some(term);
    }
    let failed = replicas.iter().filter(|one| matches!(one.handle.state(), State::Failed { .. })).count();
    assert_eq!(failed, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_observer_without_rights_is_told_so_and_sees_the_leader_once_it_has_them() {
    let db = Cluster::shared().fresh_database().await;
    let lock = Store::Lease.connect(db.url(), "a").await;
    let (started, mut starts) = unbounded_channel();
    let _leader = start(&lock, "a", &started);
    leads(&mut starts).await;
    let mut admin = db.connect().await;
    let (schema, role): (Identifier, Identifier) =
        ("leasehold".parse().unwrap(), "looks_on".parse().unwrap());
    sql::run(&mut admin, "CREATE ROLE looks_on LOGIN").await;
    sql::run(&mut admin, grants_to_read(&schema, &role)).await;
    let db = db.used_by("looks_on");
    let server = PgConfig::from_url(db.url()).unwrap();
    let lock: Arc<dyn Lock> = Arc::new(TtlConfig::new(server).connect().await.unwrap());
    sql::run(&mut admin, "REVOKE SELECT ON ALL TABLES IN SCHEMA leasehold FROM looks_on").await;
    let mut observer = Observer::new(lock, "leader");
    for _ in 0..2 {
        let error = within(LONG, "no answer", observer.changed()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
    }
    sql::run(&mut admin, grants_to_read(&schema, &role)).await;
    let leader = within(LONG, "no answer", observer.changed()).await.unwrap();
    assert_eq!(leader.unwrap().label.as_deref(), Some("a"));
}
