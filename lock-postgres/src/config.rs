//! Where the server is and how sessions with it are kept.

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

/// The schema that is used unless another is named.
pub const DEFAULT_SCHEMA: &str = "leasehold";

/// The longest timeout that is accepted.
const LONGEST: Duration = Duration::from_secs(3600);

/// How often a session is confirmed, and when either side gives the other up.
///
/// The client's limit has to pass before the server's, so that a holder knows of its loss before the
/// server lets somebody else in (rule C9). [`PgConfig::check`] refuses anything else.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Liveness {
    /// How often the client confirms what it holds. Default: 3 s.
    pub confirm_every: Duration,
    /// How long after the last answered confirmation was sent the client counts its session as lost.
    /// Default: 10 s.
    pub lost_after: Duration,
    /// How long the server waits for a client that does not answer on the network before it ends the
    /// session (`tcp_user_timeout`, and the same time divided into keepalive probes). Default: 15 s.
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
    /// Confirms `confirm_every`, lost after `lost_after`; the server gives up after `server_gives_up`.
    #[must_use]
    pub const fn new(confirm_every: Duration, lost_after: Duration, server_gives_up: Duration) -> Self {
        Self { confirm_every, lost_after, server_gives_up }
    }
}

/// Whether a connection pooler in transaction mode stands between us and the server.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Pooler {
    /// Find out when connecting. Stores that need a session of their own refuse a pooler; the others
    /// adapt to it.
    #[default]
    Detect,
    /// There is one: every statement runs in a transaction of its own that sets what it needs.
    Transaction,
    /// There is none: if one is found when connecting, every store refuses it.
    None,
    /// There is none, as an earlier session of the same client has found out: it is not looked for. For the
    /// stores' own further sessions. Statements of sessions that hold locks still check that they reach the
    /// process they expect.
    Known,
}

/// How to reach the server, and how the stores use it. Cheap to clone.
///
/// The library opens sessions of its own and never borrows one from the application's pool: a lock
/// must not cost the application a connection, and a lock session must not be handed to others.
#[derive(Clone)]
pub struct PgConfig {
    /// At least one; in the order in which they are tried.
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
    /// From a URL, `postgres://user:password@host:5432/database?sslmode=require`, as libpq and
    /// [`PgConnectOptions`] read it, also with several hosts. What it leaves out comes from the environment (`PGHOST`,
    /// `PGUSER`, ..., `PGCONNECT_TIMEOUT`) and the password file, as with `psql`. What asks for more than is done is
    /// refused.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption) if it is not such a URL, for a parameter or a variable of libpq that is
    /// refused, which the error names, without a user, and if `PGCONNECT_TIMEOUT` is no whole number of seconds (0: an
    /// hour, which is the longest). The error does not repeat the URL, which may hold a password.
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
            // Without an end, to libpq.
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

    /// From the driver's own options.
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

    /// From the options of the application's pool, which keeps all its connections: ours are opened
    /// beside it.
    ///
    /// The pool's options are read whenever a session is opened, so a password that
    /// [`set_connect_options`](PgPool::set_connect_options) changes is used from then on. This value has a handle of the pool,
    /// and so have the stores made of it: end the pool by [`close`](PgPool::close).
    #[must_use]
    pub fn from_pool(pool: &PgPool) -> Self {
        let config = Self::from_options(pool.connect_options().as_ref().clone());
        Self { source: Source::Pool(pool.clone()), ..config }
    }

    /// Calls `credentials` whenever a session is opened, for passwords that change: tokens of a cloud, rotated secrets.
    /// If the server refuses what it returned, it is called again, and what has changed is tried once before the refusal
    /// is an error.
    ///
    /// The call is part of [`connect_timeout`](Self::connect_timeout). An error of it is the error of the session, which is
    /// opened again if its kind is [transient](ErrorKind::is_transient).
    #[must_use]
    pub fn credentials<F, C>(mut self, credentials: C) -> Self
    where
        F: Future<Output = Result<Credentials, Error>> + Send + 'static,
        C: Fn() -> F + Send + Sync + 'static,
    {
        self.source = Source::Program(Arc::new(move || Box::pin(credentials())));
        self
    }

    /// Opens a connection of the caller's own, as the sessions of the stores are opened: at whichever of the hosts takes
    /// it, with the present credentials.
    ///
    /// # Errors
    ///
    /// What keeps the connection from being opened, within [`connect_timeout`](Self::connect_timeout). Of a transient
    /// [kind](ErrorKind::is_transient) is only what may pass by itself.
    ///
    /// # Cancel safety
    ///
    /// A dropped call closes what it has opened.
    pub async fn connect(&self) -> Result<PgConnection, Error> {
        let limit = self.connect_timeout;
        let opened = limited(limit, crate::connect::link::connection(self)).await.unwrap_or_else(|overrun| {
            Err(overrun.into_error(format!(
                "the server did not answer within {limit:?}; check host, port and network, then try again"
            )))
        });
        opened.map_err(|error| error.with_store(self.to_string()))
    }

    /// The schema of our tables. Default: [`DEFAULT_SCHEMA`]. Two schemas of one database are two
    /// stores that do not exclude each other.
    #[must_use]
    pub fn schema(mut self, schema: Identifier) -> Self {
        self.schema = schema;
        self
    }

    /// Installs or completes the schema when connecting, which needs the privilege to create it.
    /// Default: no; a missing schema is an error that says how to install it.
    #[must_use]
    pub fn install_schema(mut self, install: bool) -> Self {
        self.install = install;
        self
    }

    /// Whether a transaction pooler is in between. Default: [`Pooler::Detect`].
    #[must_use]
    pub fn pooler(mut self, pooler: Pooler) -> Self {
        self.pooler = pooler;
        self
    }

    /// How death on the network is noticed.
    #[must_use]
    pub fn liveness(mut self, liveness: Liveness) -> Self {
        self.liveness = liveness;
        self
    }

    /// How long opening a session may take. Default: 5 s, or what [`from_url`](Self::from_url) found in the environment.
    #[must_use]
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// How long one statement that does not wait for a lock may take, on either side. Default: 5 s.
    #[must_use]
    pub fn statement_timeout(mut self, timeout: Duration) -> Self {
        self.statement_timeout = timeout;
        self
    }

    /// Closes the sessions once nothing was held, awaited or called for this long, and opens them again with the next
    /// call, for a database that is stopped while nobody is connected. Default: they stay open. The first call afterwards
    /// takes as long as connecting.
    #[must_use]
    pub fn idle(mut self, idle: Duration) -> Self {
        self.idle = Some(idle);
        self
    }

    /// Whether the sessions of a client that was not used for as long as `unused` are to be closed.
    #[must_use]
    pub fn closes_when_idle(&self, unused: Duration) -> bool {
        self.idle.is_some_and(|idle| unused >= idle)
    }

    /// How long a session that is opened only when it is needed stays open without use.
    #[must_use]
    pub fn spare_time(&self) -> Duration {
        const SPARE: Duration = Duration::from_secs(20);
        self.idle.map_or(SPARE, |idle| idle.min(SPARE))
    }

    /// The name by which the server knows our sessions (`pg_stat_activity.application_name`). Default:
    /// that of the options, else `leasehold`.
    #[must_use]
    pub fn application_name(mut self, name: &str) -> Self {
        for target in &mut self.targets {
            target.options = target.options.clone().application_name(name);
        }
        self
    }

    /// The schema in use.
    #[must_use]
    pub const fn schema_name(&self) -> &Identifier {
        &self.schema
    }

    /// The driver's options, of the first host if there are several. Their `Debug` shows the password: do not print them.
    #[must_use]
    pub fn options(&self) -> &PgConnectOptions {
        &self.targets[0].options
    }

    /// How long one statement that does not wait for a lock may take.
    #[must_use]
    pub const fn statement_limit(&self) -> Duration {
        self.statement_timeout
    }

    /// How long one call of a store may take in all: opening a session and running statements on it.
    #[must_use]
    pub fn call_limit(&self) -> Duration {
        self.connect_timeout + self.statement_timeout + Duration::from_secs(2)
    }

    /// How long a session may take to confirm what it keeps, which does not count as lost before.
    #[must_use]
    pub fn confirmation_limit(&self) -> Duration {
        let Liveness { confirm_every, lost_after, .. } = self.liveness;
        let usual = self.statement_timeout + Duration::from_secs(1);
        usual.max(lost_after.saturating_sub(confirm_every))
    }

    /// How death on the network is noticed.
    #[must_use]
    pub const fn liveness_settings(&self) -> Liveness {
        self.liveness
    }

    /// Installs the schema if that was asked for, and checks what these stores can do on this server.
    ///
    /// # Errors
    ///
    /// As [`install`](crate::schema::install) and [`access`](crate::schema::access).
    ///
    /// # Cancel safety
    ///
    /// A dropped call may have installed the schema.
    pub async fn prepare(&self, connection: &mut PgConnection, stores: Stores) -> Result<Access, Error> {
        if self.install && !schema::install_for(connection, &self.schema, stores).await? {
            return Ok(Access::Full);
        }
        schema::access(connection, &self.schema, stores).await
    }

    /// Refuses settings under which the promises could not be kept.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption) that says what to set instead.
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

/// The driver's options as our sessions have them.
pub(crate) fn ours(options: PgConnectOptions) -> PgConnectOptions {
    // Poolers refuse this start-up parameter, and nothing here reads floats.
    let options = without_slow_statements(options.extra_float_digits(None));
    match options.get_application_name() {
        Some(_) => options,
        None => options.application_name("leasehold"),
    }
}

/// `database` on `host:port`: what an error may show.
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

/// Without the password.
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
