//! The two instances of the service whose requests the page shows in lanes.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use axum::extract::{Path, Request, State};
use axum::http::Method;
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use leasehold::Lock;
use leasehold::postgres::{DEFAULT_SCHEMA, Identifier, PgConfig};
use leasehold::postgres_advisory::XactLocks;
use leasehold::postgres_ttl::TtlConfig;
use leasehold_tower::OnLost;
use serde::{Deserialize, Serialize};
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use tokio_util::sync::{CancellationToken, DropGuard};
use tower_service::Service as _;

use crate::control::Refusal;
use crate::domain::Entries as _;
use crate::handlers::Transactions;
use crate::mode::Mode;
use crate::postgres::Database;
use crate::routes::{Guarded, Terms};
use crate::service::{Error, Parts, Service};
use crate::store::{OPENING, ROUNDS, Store};
use crate::trace::{LaneName, Round, TracedRequest};

/// TTL of the leases in a round with an instance that stands still, because 30 seconds, the default, are long to watch.
const BRIEF: Duration = Duration::from_secs(1);
/// Number of rounds whose records are kept.
const KEPT: usize = 100;

pub(crate) fn routes() -> Router<Arc<Service>> {
    Router::new()
        .route("/lanes", get(lanes))
        .route("/lanes/{lane}/{mode}/accounts/{account}/spend", post(spend))
        .route("/rounds", post(begin))
        .route("/rounds/{account}", get(round))
}

/// Two instances. Each has its own thread, connections and locks, because one of them stands still in some rounds.
pub(crate) struct Lanes {
    a: Lane,
    b: Lane,
    rounds: Mutex<VecDeque<Arc<Round>>>,
    /// Ends the time for which an instance stands still.
    stop: CancellationToken,
    /// Closes both instances, also when this value is dropped.
    close: DropGuard,
}

struct Lane {
    runtime: Handle,
    /// The guards, with the store's leases.
    guards: Vec<Arc<Guarded>>,
    /// The guards, with brief leases.
    brief: Vec<Arc<Guarded>>,
    /// Ends when the instance is closed.
    closed: Mutex<Option<oneshot::Receiver<Result<(), Error>>>>,
}

/// The shared parts of the instances: the storage in this process with its lock, or a database.
#[derive(Clone)]
enum Shared {
    Process { store: Store, lock: Arc<dyn Lock> },
    Database { url: String },
}

impl Service {
    async fn lanes(&self) -> Result<&Lanes, Error> {
        self.lanes.get_or_try_init(|| Lanes::start(self)).await
    }
}

impl Lanes {
    async fn start(service: &Service) -> Result<Self, Error> {
        let Parts { store, locks, .. } = &service.parts;
        let shared = match (&service.options.database_url, locks.first()) {
            (None, Some(lock)) => Shared::Process { store: store.clone(), lock: Arc::clone(lock) },
            (url, _) => Shared::Database { url: url.clone().unwrap_or_default() },
        };
        // Dropped if an instance does not start, which closes the other one.
        let close = CancellationToken::new().drop_guard();
        let token = close.token();
        let wait = service.options.wait;
        let (a, b) =
            tokio::try_join!(Lane::start(shared.clone(), wait, token), Lane::start(shared, wait, token))?;
        Ok(Self { a, b, rounds: Mutex::default(), stop: CancellationToken::new(), close })
    }

    /// Ends the time for which an instance stands still, because its requests have to end before the service does.
    pub(crate) fn stop(&self) {
        self.stop.cancel();
    }

    /// Closes both instances, after their last requests.
    pub(crate) async fn close(&self) -> Result<(), Error> {
        self.close.token().cancel();
        let mut outcome = Ok(());
        for lane in [&self.a, &self.b] {
            let closed = lane.closed.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(closed) = closed {
                outcome = outcome.and(closed.await.unwrap_or(Err(Error::Instance)));
            }
        }
        outcome
    }

    fn lane(&self, name: LaneName) -> &Lane {
        match name {
            LaneName::A => &self.a,
            LaneName::B => &self.b,
        }
    }

    fn round(&self, account: i64) -> Option<Arc<Round>> {
        self.rounds().iter().find(|round| round.account == account).cloned()
    }

    fn rounds(&self) -> MutexGuard<'_, VecDeque<Arc<Round>>> {
        self.rounds.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lane {
    async fn start(shared: Shared, wait: Duration, close: &CancellationToken) -> Result<Self, Error> {
        let close = close.clone();
        let (ready, started) = oneshot::channel();
        let (closing, closed) = oneshot::channel();
        let runtime = Builder::new_current_thread().enable_all().build()?;
        thread::Builder::new().name("instance".to_owned()).spawn(move || {
            runtime.block_on(async {
                let begun = shared.parts(wait).await.map(|(parts, brief)| {
                    let guards = (parts.guards.clone(), brief.clone());
                    (parts, brief, guards)
                });
                match begun {
                    Ok((mut parts, brief, guards)) => {
                        let _ = ready.send(Ok((Handle::current(), guards)));
                        close.cancelled().await;
                        parts.guards.extend(brief);
                        let _ = closing.send(parts.close().await);
                    }
                    Err(error) => drop(ready.send(Err(error))),
                }
            });
        })?;
        let (runtime, (guards, brief)) = started.await.unwrap_or(Err(Error::Instance))?;
        Ok(Self { runtime, guards, brief, closed: Mutex::new(Some(closed)) })
    }
}

impl Shared {
    /// Returns the parts of one instance, and its guards with brief leases.
    async fn parts(self, wait: Duration) -> Result<(Parts, Vec<Arc<Guarded>>), Error> {
        let usual = Terms::new(wait);
        // The handler goes on after a loss, as one without a layer does. To drop it at its next await, the default,
        // makes a late write rare and does not exclude it.
        let brief = Terms { ttl: Some(BRIEF), on_lost: OnLost::Tell, ..usual };
        match self {
            Self::Process { store, lock } => {
                let guarded =
                    [Guarded::by_nothing(&store), Guarded::by_lock(Mode::Memory, &store, &lock, usual)?];
                // The service closes the shared parts.
                Ok((Parts { store, locks: Vec::new(), guards: guarded.map(Arc::new).into() }, Vec::new()))
            }
            Self::Database { url } => {
                let lease: Arc<dyn Lock> =
                    Arc::new(TtlConfig::new(PgConfig::from_url(&url)?).connect().await?);
                let database = Database::connect(&url, wait).await?;
                let pool = database.pool.clone();
                let store = Store::Postgres(database);
                let locks = XactLocks::new(Identifier::new(DEFAULT_SCHEMA)?);
                let guards = |terms: Terms| -> Result<Vec<_>, Error> {
                    let transactions = Transactions { locks: locks.clone(), pool: pool.clone(), wait };
                    let guarded = [
                        Guarded::by_nothing(&store),
                        Guarded::by_lock(Mode::Lease, &store, &lease, terms)?,
                        Guarded::by_fence(&store, &pool, &lease, terms)?,
                        Guarded::by_key(&store, &pool),
                        Guarded::by_own_tx(&store, transactions),
                    ];
                    Ok(guarded.map(Arc::new).into())
                };
                let (guards, brief) = (guards(usual)?, guards(brief)?);
                Ok((Parts { store, locks: vec![lease], guards }, brief))
            }
        }
    }
}

#[derive(Serialize)]
struct About {
    store: &'static str,
    /// The guards of a round.
    modes: Vec<Mode>,
    /// Whether an instance can stand still while the other one goes on.
    freezes: bool,
}

async fn lanes(State(service): State<Arc<Service>>) -> Result<Json<About>, Refusal> {
    let lane = &service.lanes().await?.a;
    Ok(Json(About {
        store: service.parts.store.name(),
        modes: lane.guards.iter().map(|guarded| guarded.mode).collect(),
        freezes: !lane.brief.is_empty(),
    }))
}

#[derive(Deserialize)]
struct NewRound {
    /// Whether instance A stands still between reading and writing.
    freezes: bool,
}

#[derive(Serialize)]
struct Begun {
    account: i64,
}

/// Opens an account for a round.
async fn begin(
    State(service): State<Arc<Service>>,
    Json(NewRound { freezes }): Json<NewRound>,
) -> Result<Json<Begun>, Refusal> {
    let lanes = service.lanes().await?;
    // At most the largest integer that JavaScript represents exactly.
    let account = fastrand::i64(ROUNDS..1 << 53);
    service.parts.store.entries().await?.append(account, OPENING).await?;
    let round = Round::new(account, freezes, service.options.work, lanes.stop.clone());
    let mut rounds = lanes.rounds();
    rounds.push_back(Arc::new(round));
    if rounds.len() > KEPT {
        rounds.pop_front();
    }
    Ok(Json(Begun { account }))
}

#[derive(Serialize)]
struct Progress {
    /// Milliseconds since the round began.
    now: u64,
    balance: i64,
    double_spends: i64,
    requests: Vec<TracedRequest>,
}

async fn round(
    State(service): State<Arc<Service>>,
    Path(account): Path<i64>,
) -> Result<Json<Progress>, Refusal> {
    let round = service.lanes().await?.round(account).ok_or(Refusal::NoRound)?;
    let account = service.parts.store.account(account).await?.ok_or(Refusal::NoRound)?;
    Ok(Json(Progress {
        now: round.now(),
        balance: account.balance,
        double_spends: account.double_spends,
        requests: round.requests(),
    }))
}

/// Sends a request of the page to one of the instances.
async fn spend(
    State(service): State<Arc<Service>>,
    Path((lane, mode, account)): Path<(LaneName, Mode, i64)>,
    request: Request,
) -> Result<Response, Refusal> {
    let lanes = service.lanes().await?;
    let round = lanes.round(account).ok_or(Refusal::NoRound)?;
    let Lane { runtime, guards, brief, .. } = lanes.lane(lane);
    let guards = if round.freezes { brief } else { guards };
    let guarded = guards.iter().find(|guarded| guarded.mode == mode).ok_or(Refusal::NotThere(mode))?;
    let trace = round.arrive(lane);
    let (parts, body) = request.into_parts();
    // A new request, because both instances have to see the same path: idempotency keys compare it.
    let mut request = Request::new(body);
    *request.method_mut() = Method::POST;
    *request.uri_mut() = format!("/accounts/{account}/spend").parse().map_err(|_| Refusal::NoRound)?;
    *request.headers_mut() = parts.headers;
    request.extensions_mut().insert(trace.clone());
    let mut routes = guarded.routes.clone();
    let served = runtime.spawn(async move {
        let response = routes.call(request).await.into_response();
        trace.answered(&response);
        response
    });
    served.await.map_err(|_| Refusal::Panicked)
}
