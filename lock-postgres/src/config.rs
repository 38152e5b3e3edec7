//! Configuration of the server's address and of the sessions with it.

use std::ffi::OsStr;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, ErrorKind};
use sqlx::postgres::PgConnectOptions;
use sqlx::{PgConnection, PgPool};

use crate::connect::credentials::{Credentials, Source};
use crate::connect::libpq::{self, Environment, Target, Wanted};
use crate::connect::route::LastGood;
use crate::connect::slow_statements::without_slow_statements;
use crate::ident::Identifier;
use crate::schema::{self, Access, Stores};
use crate::time_limit::limited;

/// The schema used unless another one is named.
pub const DEFAULT_SCHEMA: &str = "leasehold";

/// The longest timeout accepted.
const LONGEST: Duration = Duration::from_secs(3600);

/// The interval at which a session is confirmed, and the times after which client and server give each other
/// up.
///
/// The client's limit must pass before the server's. Otherwise the server could let another client in before the holder
/// knows of its loss (rule C9). [`PgConfig::check`] enforces this.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Liveness {
    /// How often the client confirms its locks. Default: 3 s.
    pub confirm_every: Duration,
    /// Time since the last answered confirmation was sent after which the client counts its session as lost. Default:
    /// 10 s.
    pub lost_after: Duration,
    /// How long the server waits for an unresponsive client before it ends the session (`tcp_user_timeout`, and the
    /// same time divided into keepalive probes). Default: 15 s.
    pub server_gives_up: Duration,
}

impl Default for Liveness {
    fn default() -> Self {
        Self {
            confirm_every: Duration::from_secs(3),
            lost_after: Duration::from_secs(10),
            server_gives_up: Duration::from_secs(15),
        }
    }
}

impl Liveness {
    /// Creates settings from the three durations.
    #[must_use]
    pub const fn new(confirm_every: Duration, lost_after: Duration, server_gives_up: Duration) -> Self {
        Self { confirm_every, lost_after, server_gives_up }
    }
}

/// Whether a connection pooler in transaction mode stands between client and server.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Pooler {
    /// Detect a pooler on connect. Stores that need a dedicated session refuse a pooler, the others adapt to it.
    #[default]
    Detect,
    /// A pooler: every statement runs in a separate transaction with its own settings.
    Transaction,
    /// No pooler. If one is detected on connect, every store refuses the connection.
    None,
    /// No pooler, because an earlier session of this client found none. Used for the stores' further
    /// sessions, which skip the detection. Statements of sessions that hold locks still check the server
    /// process.
    Known,
}

/// Connection settings of a store. Cheap to clone.
///
/// The library opens its own sessions and never borrows one from the application's pool. A lock therefore costs the
/// application no connection, and a lock session is never passed to other code.
#[derive(Clone)]
pub struct PgConfig {
    /// At least one target, in the order of the attempts.
    pub(crate) targets: Vec<Target>,
    pub(crate) wanted: Wanted,
    pub(crate) shuffled: bool,
    pub(crate) source: Source,
    pub(crate) last_good: LastGood,
    pub(crate) schema: Identifier,
    pub(crate) install: bool,
    pub(crate) pooler: Pooler,
    pub(crate) liveness: Liveness,
    pub(crate) connect_timeout: Duration,
    pub(crate) statement_timeout: Duration,
    pub(crate) idle: Option<Duration>,
    pub(crate) name: Arc<str>,
}

impl PgConfig {
    /// Creates a configuration from `postgres://user:password@host:5432/database?sslmode=require`, read as libpq and
    /// [`PgConnectOptions`] read it. Several hosts are possible. Missing parts come from the environment (`PGHOST`,
    /// `PGUSER`, ..., `PGCONNECT_TIMEOUT`) and the password file, as with `psql`. Parameters that demand an unsupported
    /// feature are refused.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption) if the URL is invalid, has no user, or if it or the environment has
    /// a refused libpq parameter, which the error names. Also if `PGCONNECT_TIMEOUT` is not a whole number of seconds
    /// (0 means the maximum, an hour). The error does not repeat the URL, because it can contain a password.
    pub fn from_url(url: &str) -> Result<Self, Error> {
        let parsed = libpq::parse(url, &Environment::of_process())?;
        let variable = std::env::var_os("PGCONNECT_TIMEOUT");
        let timeout = parsed.connect_timeout.map(Into::into).or(variable);
        let targets =
            parsed.targets.into_iter().map(|target| Target { options: ours(target.options), ..target });
        let config = Self::of(targets.collect());
        Self { wanted: parsed.wanted, shuffled: parsed.shuffled, ..config }
            .connect_timeout_of(timeout.as_deref())
    }

    fn connect_timeout_of(self, given: Option<&OsStr>) -> Result<Self, Error> {
        let Some(given) = given.filter(|given| !given.is_empty()) else { return Ok(self) };
        match given.to_str().and_then(|given| given.trim().parse::<i32>().ok()) {
            // Uses the longest timeout, because libpq reads zero or less as no timeout.
            Some(..=0) => Ok(self.connect_timeout(LONGEST)),
            Some(seconds) => {
                let seconds = Duration::from_secs(seconds.unsigned_abs().into());
                Ok(self.connect_timeout(seconds.min(LONGEST)))
            }
            None => Err(Error::new(
                ErrorKind::InvalidOption,
                "connect_timeout, or the environment variable PGCONNECT_TIMEOUT, is a whole number of seconds: write 5, or unset it",
            )),
        }
    }

    /// Creates a configuration from the driver's options.
    #[must_use]
    pub fn from_options(options: PgConnectOptions) -> Self {
        Self::of(vec![Target { options: ours(options), address: None }])
    }

    fn of(targets: Vec<Target>) -> Self {
        Self {
            name: describe(&targets).into(),
            targets,
            wanted: Wanted::default(),
            shuffled: false,
            source: Source::Fixed,
            last_good: LastGood::default(),
            schema: Identifier::known(DEFAULT_SCHEMA),
            install: false,
            pooler: Pooler::default(),
            liveness: Liveness::default(),
            connect_timeout: Duration::from_secs(5),
            statement_timeout: Duration::from_secs(5),
            idle: None,
        }
    }

    /// Creates a configuration from the options of the application's pool. The pool keeps all its connections, because
    /// the stores open their sessions beside it.
    ///
    /// The pool's options are read whenever a session is opened, so a password changed by
    /// [`set_connect_options`](PgPool::set_connect_options) takes effect. This value and the stores made from it hold a
    /// handle of the pool. End the pool by [`close`](PgPool::close).
    #[must_use]
    pub fn from_pool(pool: &PgPool) -> Self {
        let config = Self::from_options(pool.connect_options().as_ref().clone());
        Self { source: Source::Pool(pool.clone()), ..config }
    }

    /// Calls `credentials` whenever a session is opened, for passwords that change: cloud tokens, rotated secrets. If
    /// the server refuses the credentials, they are fetched again and, if changed, tried once before the refusal
    /// becomes an error.
    ///
    /// The call counts against [`connect_timeout`](Self::connect_timeout). Its error becomes the session's error. The
    /// session is opened again if that error's kind is [transient](ErrorKind::is_transient).
    #[must_use]
    pub fn credentials<F, C>(mut self, credentials: C) -> Self
    where
        F: Future<Output = Result<Credentials, Error>> + Send + 'static,
        C: Fn() -> F + Send + Sync + 'static,
    {
        self.source = Source::Program(Arc::new(move || Box::pin(credentials())));
        self
    }

    /// Opens a separate connection for the caller, in the same way as the stores' sessions: to the first host that
    /// accepts it, with the current credentials.
    ///
    /// # Errors
    ///
    /// The error that prevented the connection, within [`connect_timeout`](Self::connect_timeout). Its
    /// [kind](ErrorKind::is_transient) is transient only if the cause can pass without a change.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the call closes any connection it has opened.
    pub async fn connect(&self) -> Result<PgConnection, Error> {
        let limit = self.connect_timeout;
        let opened = limited(limit, crate::connect::link::connection(self)).await.unwrap_or_else(|overrun| {
            Err(overrun.into_error(format!(
                "the server did not answer within {limit:?}; check host, port and network, then try again"
            )))
        });
        opened.map_err(|error| error.with_store(self.to_string()))
    }

    /// Sets the schema of the stores' tables. Default: [`DEFAULT_SCHEMA`]. Two schemas of one database are two stores
    /// that do not exclude each other.
    #[must_use]
    pub fn schema(mut self, schema: Identifier) -> Self {
        self.schema = schema;
        self
    }

    /// Installs or completes the schema on connect, which needs the privilege to create it. Default: no, and a missing
    /// schema is an error that explains the installation.
    #[must_use]
    pub fn install_schema(mut self, install: bool) -> Self {
        self.install = install;
        self
    }

    /// Sets whether to expect a transaction pooler. Default: [`Pooler::Detect`].
    #[must_use]
    pub fn pooler(mut self, pooler: Pooler) -> Self {
        self.pooler = pooler;
        self
    }

    /// Sets the intervals that detect a dead connection.
    #[must_use]
    pub fn liveness(mut self, liveness: Liveness) -> Self {
        self.liveness = liveness;
        self
    }

    /// Sets the time limit for opening a session. Default: 5 s, or the limit that [`from_url`](Self::from_url) found in
    /// the environment.
    #[must_use]
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Sets the time limit, on client and server, for a statement that does not wait for a lock. Default: 5 s.
    #[must_use]
    pub fn statement_timeout(mut self, timeout: Duration) -> Self {
        self.statement_timeout = timeout;
        self
    }

    /// Closes the sessions after this long without a lock, a waiter or a call, so a database can be stopped while
    /// unused. The next call opens them again and takes as long as connecting. Default: they stay open.
    #[must_use]
    pub fn idle(mut self, idle: Duration) -> Self {
        self.idle = Some(idle);
        self
    }

    /// Returns whether the sessions of a client unused for `unused` should be closed.
    #[must_use]
    pub fn closes_when_idle(&self, unused: Duration) -> bool {
        self.idle.is_some_and(|idle| unused >= idle)
    }

    /// Returns how long a session opened on demand stays open without use.
    #[must_use]
    pub fn spare_time(&self) -> Duration {
        const SPARE: Duration = Duration::from_secs(20);
        self.idle.map_or(SPARE, |idle| idle.min(SPARE))
    }

    /// Sets the sessions' name on the server (`pg_stat_activity.application_name`). Default: the name in the options,
    /// else `leasehold`.
    #[must_use]
    pub fn application_name(mut self, name: &str) -> Self {
        for target in &mut self.targets {
            target.options = target.options.clone().application_name(name);
        }
        self
    }

    /// Returns the schema.
    #[must_use]
    pub const fn schema_name(&self) -> &Identifier {
        &self.schema
    }

    /// Returns the driver's options, for the first host if there are several. Their `Debug` shows the password: do not
    /// print them.
    #[must_use]
    pub fn options(&self) -> &PgConnectOptions {
        &self.targets[0].options
    }

    /// Returns the time limit for a statement that does not wait for a lock.
    #[must_use]
    pub const fn statement_limit(&self) -> Duration {
        self.statement_timeout
    }

    /// Returns the time limit for one call of a store: opening a session and running statements on it.
    #[must_use]
    pub fn call_limit(&self) -> Duration {
        self.connect_timeout + self.statement_timeout + Duration::from_secs(2)
    }

    /// Returns the time limit of a confirmation, long enough that a session is not closed before it counts as lost.
    #[must_use]
    pub fn confirmation_limit(&self) -> Duration {
        let Liveness { confirm_every, lost_after, .. } = self.liveness;
        let usual = self.statement_timeout + Duration::from_secs(1);
        usual.max(lost_after.saturating_sub(confirm_every))
    }

    /// Returns the intervals that detect a dead connection.
    #[must_use]
    pub const fn liveness_settings(&self) -> Liveness {
        self.liveness
    }

    /// Installs the schema if configured, and checks which operations these stores can perform on this server.
    ///
    /// # Errors
    ///
    /// As [`install`](crate::schema::install) and [`access`](crate::schema::access).
    ///
    /// # Cancel safety
    ///
    /// If dropped, the call might have installed the schema.
    pub async fn prepare(&self, connection: &mut PgConnection, stores: Stores) -> Result<Access, Error> {
        if self.install && !schema::install_for(connection, &self.schema, stores).await? {
            return Ok(Access::Full);
        }
        schema::access(connection, &self.schema, stores).await
    }

    /// Refuses settings that would break the stores' guarantees.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption), with the setting to use instead.
    pub fn check(&self) -> Result<(), Error> {
        let invalid = |message: String| Err(Error::new(ErrorKind::InvalidOption, message));
        let Liveness { confirm_every, lost_after, server_gives_up } = self.liveness;
        let smallest = Duration::from_millis(20);
        if confirm_every < smallest || self.connect_timeout < smallest || self.statement_timeout < smallest {
            return invalid(format!(
                "an interval or timeout below {smallest:?} cannot be kept; choose a longer one"
            ));
        }
        if self.connect_timeout > LONGEST || self.statement_timeout > LONGEST {
            return invalid(format!("a timeout above {LONGEST:?} is no timeout; choose a shorter one"));
        }
        if self.idle.is_some_and(|idle| idle < Duration::from_secs(1)) {
            return invalid("sessions that are closed sooner than a second after their last use (idle) would be opened for each call; choose a longer time".to_owned());
        }
        if confirm_every > lost_after / 2 {
            return invalid(format!(
                "a session that is confirmed every {confirm_every:?} (confirm_every) cannot count as lost after {lost_after:?} (lost_after); leave room for two confirmations"
            ));
        }
        if lost_after >= server_gives_up {
            return invalid(format!(
                "the client must give its session up (lost_after, {lost_after:?}) before the server does (server_gives_up, {server_gives_up:?})"
            ));
        }
        if server_gives_up > Duration::from_secs(24 * 3600) {
            return invalid("the server may wait for a silent client for a day at most".to_owned());
        }
        Ok(())
    }
}

/// Adapts the driver's options for the stores' sessions: logging, start-up parameters and a default name.
pub(crate) fn ours(options: PgConnectOptions) -> PgConnectOptions {
    // Leaves out a start-up parameter that poolers refuse. It only concerns floats, and the stores read none.
    let options = without_slow_statements(options.extra_float_digits(None));
    match options.get_application_name() {
        Some(_) => options,
        None => options.application_name("leasehold"),
    }
}

/// Returns `database` on `host:port`, which an error can show.
fn describe(targets: &[Target]) -> String {
    let place = |Target { options, .. }: &Target| match options.get_socket() {
        Some(socket) => socket.display().to_string(),
        None if options.get_host().contains(':') => {
            format!("[{}]:{}", options.get_host(), options.get_port())
        }
        None => format!("{}:{}", options.get_host(), options.get_port()),
    };
    let places: Vec<_> = targets.iter().map(place).collect();
    let options = targets.first().map(|target| &target.options);
    let database = options.map(|options| options.get_database().unwrap_or_else(|| options.get_username()));
    format!("postgres {} at {}", database.unwrap_or_default(), places.join(","))
}

impl fmt::Display for PgConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.name)?;
        if self.schema.as_str() != DEFAULT_SCHEMA {
            write!(f, " schema {}", self.schema)?;
        }
        Ok(())
    }
}

/// Shows no password.
impl fmt::Debug for PgConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PgConfig")
            .field("server", &self.name)
            .field("user", &self.options().get_username())
            .field("schema", &self.schema)
            .field("install", &self.install)
            .field("pooler", &self.pooler)
            .field("liveness", &self.liveness)
            .field("connect_timeout", &self.connect_timeout)
            .field("statement_timeout", &self.statement_timeout)
            .field("idle", &self.idle)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_shows_the_password() {
        let config = PgConfig::from_url("postgres://app:hunter2@db.example:5433/ledger").unwrap();
        for text in [format!("{config:?}"), config.to_string()] {
            assert!(!text.contains("hunter2"), "{text}");
            assert!(text.contains("db.example:5433"), "{text}");
        }
        for bad in ["postgres://app:hunter2@db:notaport/x", "mysql://app:hunter2@db/x", "hunter2"] {
            let error = PgConfig::from_url(bad).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidOption);
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
        }
    }

    #[test]
    fn an_address_of_six_has_brackets_in_urls_and_errors_alone() {
        let config = PgConfig::from_url("postgres://app@[2001:db8::1]:5433/x").unwrap();
        assert_eq!((config.options().get_host(), config.options().get_port()), ("2001:db8::1", 5433));
        assert_eq!(config.to_string(), "postgres x at [2001:db8::1]:5433");
    }

    #[test]
    fn the_environment_says_how_long_a_connection_may_take() {
        let with = |variable: &str| {
            let options = PgConnectOptions::new_without_pgpass();
            let config = PgConfig::from_options(options).connect_timeout_of(Some(OsStr::new(variable)))?;
            Ok::<_, Error>(config.connect_timeout.as_secs())
        };
        assert_eq!([with("1").unwrap(), with(" 3600 ").unwrap(), with("").unwrap()], [1, 3600, 5]);
        assert_eq!(
            [with("0").unwrap(), with("-1").unwrap(), with("3601").unwrap()],
            [3600; 3],
            "the longest"
        );
        for bad in ["5s", "hunter2", "99999999999999999999"] {
            let error = with(bad).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidOption);
            assert!(!error.to_string().contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn the_client_gives_up_before_the_server() {
        let config = PgConfig::from_url("postgres://app@db/x").unwrap();
        assert!(config.check().is_ok());
        let s = Duration::from_secs;
        for bad in [
            Liveness::new(s(3), s(5), s(15)),
            Liveness::new(s(3), s(15), s(15)),
            Liveness::new(Duration::ZERO, s(10), s(15)),
            Liveness::new(s(3), s(10), Duration::MAX),
            Liveness::new(Duration::MAX, s(10), s(15)),
        ] {
            assert_eq!(config.clone().liveness(bad).check().unwrap_err().kind(), ErrorKind::InvalidOption);
        }
        let endless = [
            config.clone().connect_timeout(Duration::MAX),
            config.clone().statement_timeout(Duration::MAX),
            config.connect_timeout(s(3601)),
        ];
        for bad in endless {
            assert_eq!(bad.check().unwrap_err().kind(), ErrorKind::InvalidOption);
        }
    }
}
