//! The choice of host and address for a session.

#[cfg(test)]
mod tests;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use leasehold_api::{Error, ErrorKind};
use sqlx::postgres::{PgConnectOptions, PgSslMode};
use sqlx::{Connection, Executor, PgConnection, Row};
use tokio::net::lookup_host;
use tokio::time::{Instant, timeout};

use crate::config::PgConfig;
use crate::connect::credentials::Login;
use crate::connect::libpq::{Target, Wanted};
#[cfg(unix)]
use crate::connect::relay::Relay;
use crate::error::{connect_error, connect_error_at};
use crate::sql;
use crate::time_limit::limited;

/// Time limit for closing a connection cleanly.
const CLOSE: Duration = Duration::from_millis(500);

/// Host and address of the last opened session, which the next one tries first.
#[derive(Clone, Debug, Default)]
pub(crate) struct LastGood(Arc<Mutex<Option<HostAddress>>>);

type HostAddress = (String, Option<IpAddr>);

/// A server that accepts sessions.
pub(crate) struct Route {
    /// The driver's options for this server.
    pub(crate) options: PgConnectOptions,
    /// The connection by which the server was found, if one was needed.
    pub(crate) first: Option<PgConnection>,
    #[cfg(unix)]
    _relay: Option<Relay>,
}

/// One address of one host.
#[derive(Clone)]
struct Candidate {
    options: PgConnectOptions,
    /// The address to connect to. `None` if the driver resolves it: a socket, or a name with one address.
    address: Option<SocketAddr>,
}

/// Why a candidate was rejected.
struct CandidateFailure {
    place: String,
    error: Error,
    /// Whether all other addresses would fail in the same way.
    is_final: bool,
    /// Whether the server was rejected only because its transactions are read-only by default.
    is_read_only: bool,
}

impl Route {
    /// Finds the first suitable server. With `connects`, opens a connection even if there is only one candidate.
    pub(crate) async fn find(config: &PgConfig, login: &Login, connects: bool) -> Result<Self, Error> {
        let mut targets = login.apply(&config.targets);
        if config.shuffled {
            fastrand::shuffle(&mut targets);
        }
        // Leaves a tenth of the time for setting up the session.
        let end = Instant::now() + config.connect_timeout * 9 / 10;
        let several = targets.len() > 1;
        let resolved = join_all(targets.iter().map(|target| resolve(target, several.then_some(end)))).await;
        let (mut candidates, mut failures) = (Vec::new(), Vec::new());
        for outcome in resolved {
            match outcome {
                Ok(of_host) => candidates.extend(of_host),
                Err(failure) => failures.push(failure),
            }
        }
        if let ([one], true, Wanted::Any) = (candidates.as_slice(), failures.is_empty(), config.wanted) {
            if connects || one.is_relayed() {
                return one.open().await.map_err(|failure| failure.error);
            }
            return Ok(Self::by(one.directly(), None));
        }
        config.last_good.first(&mut candidates);
        Self::search(config, &candidates, failures, end).await
    }

    async fn search(
        config: &PgConfig,
        candidates: &[Candidate],
        mut failures: Vec<CandidateFailure>,
        end: Instant,
    ) -> Result<Self, Error> {
        let mut read_only = None;
        for (at, candidate) in candidates.iter().enumerate() {
            let left = end.saturating_duration_since(Instant::now());
            let share = left / u32::try_from(candidates.len() - at).unwrap_or(u32::MAX);
            let attempt = async {
                let mut route = candidate.open().await?;
                candidate.check(config.wanted, &mut route).await.map(|()| route)
            };
            let outcome = limited(share, attempt).await.unwrap_or_else(|overrun| {
                let message = format!("no answer within {share:?}");
                Err(CandidateFailure {
                    is_final: overrun.is_paused(),
                    ..candidate.failed(overrun.into_error(message))
                })
            });
            match outcome {
                Ok(route) => {
                    config.last_good.set(candidate);
                    return Ok(route);
                }
                Err(failure) if failure.is_final => return Err(failure.error),
                Err(failure) => {
                    read_only = read_only.or(failure.is_read_only.then_some(candidate));
                    failures.push(failure);
                }
            }
        }
        // Accepts a server that is only read-only by default, because the session overrides this default and
        // no other server is better.
        if let (Some(candidate), true) = (read_only, config.wanted == Wanted::Any) {
            return candidate.open().await.map_err(|failure| failure.error);
        }
        Err(none_of(failures))
    }

    const fn by(options: PgConnectOptions, first: Option<PgConnection>) -> Self {
        Self {
            options,
            first,
            #[cfg(unix)]
            _relay: None,
        }
    }
}

impl LastGood {
    fn set(&self, candidate: &Candidate) {
        let here = (candidate.options.get_host().to_owned(), candidate.address.map(|address| address.ip()));
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(here);
    }

    /// Moves the last used one of `candidates` to the front.
    fn first(&self, candidates: &mut [Candidate]) {
        let last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((host, address)) = &*last else { return };
        let is_last = |candidate: &Candidate| {
            candidate.options.get_host() == host && candidate.address.map(|address| address.ip()) == *address
        };
        if let Some(at) = candidates.iter().position(is_last) {
            candidates[..=at].rotate_right(1);
        }
    }
}

/// Resolves the addresses of a host. If there are other hosts, `end` is the end of the time for all of them.
async fn resolve(target: &Target, end: Option<Instant>) -> Result<Vec<Candidate>, CandidateFailure> {
    let options = &target.options;
    let candidate = |address| Candidate { options: options.clone(), address };
    let (host, port) = (options.get_host(), options.get_port());
    if options.get_socket().is_some() || host.starts_with('/') {
        return Ok(vec![candidate(None)]);
    }
    if let Some(address) = target.address {
        let is_named = host.parse::<IpAddr>().is_err();
        return Ok(vec![candidate(is_named.then_some(SocketAddr::new(address, port)))]);
    }
    if host.parse::<IpAddr>().is_ok() {
        return Ok(vec![candidate(None)]);
    }
    let looking = lookup_host((host, port));
    let found = match end {
        // Uses a third of the time that is left, to leave time for the other hosts.
        Some(end) => {
            let share = end.saturating_duration_since(Instant::now()) / 3;
            limited(share, looking).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
        }
        None => looking.await,
    };
    let mut addresses: Vec<SocketAddr> = match found {
        Ok(found) => found.collect(),
        Err(error) => return Err(candidate(None).failed(connect_error(sqlx::Error::Io(error), "connect"))),
    };
    addresses.dedup();
    match addresses.as_slice() {
        // Leaves a single address to the driver, which resolves the name again and verifies it.
        [] | [_] => Ok(vec![candidate(None)]),
        several => Ok(several.iter().map(|address| candidate(Some(*address))).collect()),
    }
}

impl Candidate {
    /// Returns the host, and the address if one was chosen, for error messages.
    fn place(&self) -> String {
        let (host, port) = (self.options.get_host(), self.options.get_port());
        match (self.options.get_socket(), self.address) {
            (Some(socket), _) => format!("{}:{port}", socket.display()),
            (None, Some(address)) => format!("{host} ({address})"),
            (None, None) if host.contains(':') => format!("[{host}]:{port}"),
            (None, None) => format!("{host}:{port}"),
        }
    }

    /// Returns whether a relay is needed, because the driver must reach this address but send or verify the host name.
    fn is_relayed(&self) -> bool {
        let encrypts = !matches!(self.options.get_ssl_mode(), PgSslMode::Disable | PgSslMode::Allow);
        let verifies = matches!(self.options.get_ssl_mode(), PgSslMode::VerifyFull);
        cfg!(unix) && encrypts && self.address.is_some_and(|address| verifies || !address.ip().is_loopback())
    }

    /// Returns options that connect to the address itself, without a relay.
    fn directly(&self) -> PgConnectOptions {
        match self.address {
            Some(address) => self.options.clone().host(&address.ip().to_string()),
            None => self.options.clone(),
        }
    }

    async fn open(&self) -> Result<Route, CandidateFailure> {
        #[cfg(unix)]
        if let Some(address) = self.address.filter(|_| self.is_relayed()) {
            let relay = Relay::to(address, self.options.get_port()).await;
            let relay = relay.map_err(|error| self.failed_by(sqlx::Error::Io(error)))?;
            let options = self.options.clone().socket(relay.directory());
            let opened = PgConnection::connect_with(&options).await;
            let first = Some(opened.map_err(|error| self.failed_by(error))?);
            return Ok(Route { options, first, _relay: Some(relay) });
        }
        let options = self.directly();
        let opened = PgConnection::connect_with(&options).await;
        Ok(Route::by(options, Some(opened.map_err(|error| self.failed_by(error))?)))
    }

    /// Rejects a standby and, depending on `wanted`, a server that is read-only by default.
    async fn check(&self, wanted: Wanted, route: &mut Route) -> Result<(), CandidateFailure> {
        let Some(connection) = route.first.as_mut() else { return Ok(()) };
        // Uses the simple protocol, because prepared statements fail behind some poolers.
        let row = connection.fetch_one(sqlx::raw_sql(sql::IS_READ_ONLY)).await;
        let row = row.map_err(|error| self.failed_by(error))?;
        let columns = row.try_get(0).and_then(|standby: bool| Ok((standby, row.try_get::<bool, _>(1)?)));
        let (is_standby, is_read_only) = columns.map_err(|error| self.failed_by(error))?;
        if !is_standby && (!is_read_only || wanted == Wanted::Primary) {
            return Ok(());
        }
        if let Some(connection) = route.first.take() {
            let _ = timeout(CLOSE, connection.close()).await;
        }
        let what = if is_standby { "a standby" } else { "read-only by default" };
        let error =
            Error::new(ErrorKind::Unavailable, format!("the server is {what}; connect to the primary"));
        Err(CandidateFailure { is_read_only: !is_standby, ..self.failed(error) })
    }

    fn failed(&self, error: Error) -> CandidateFailure {
        CandidateFailure { place: self.place(), error, is_final: false, is_read_only: false }
    }

    fn failed_by(&self, error: sqlx::Error) -> CandidateFailure {
        let is_answer = matches!(error, sqlx::Error::Database(_));
        let has_socket = self.options.get_socket().is_some() || self.options.get_host().starts_with('/');
        let error = connect_error_at(error, "connect", has_socket);
        CandidateFailure { is_final: is_answer && !error.kind().is_transient(), ..self.failed(error) }
    }
}

/// Creates an error that names every tried address. It is transient if any of their errors is.
fn none_of(failures: Vec<CandidateFailure>) -> Error {
    if let [only] = failures.as_slice() {
        return only.error.clone();
    }
    let worth = failures.iter().find(|failure| failure.error.kind().is_transient()).or(failures.last());
    let Some(worth) = worth else {
        return Error::new(ErrorKind::Unavailable, "the name of the server has no address; check it");
    };
    let said = |failure: &CandidateFailure| {
        let message = failure.error.message();
        format!("{}: {}", failure.place, message.strip_prefix("could not connect: ").unwrap_or(message))
    };
    let all = failures.iter().map(said).collect::<Vec<_>>().join("; ");
    Error::new(worth.error.kind(), format!("no server could be connected to: {all}"))
        .with_source(worth.error.clone())
}
