//! The user and password of a new session: fixed, taken from the options of the program's pool, or returned by a callback.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use leasehold_api::{Error, ErrorKind};
use sqlx::PgPool;
use sqlx::postgres::PgConnectOptions;

use crate::config::ours;
use crate::connect::libpq::{Environment, Target, parse};

/// A user, a password or both, for the next sessions. See [`PgConfig::credentials`](crate::PgConfig::credentials).
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Credentials {
    pub(crate) user: Option<String>,
    pub(crate) password: Option<String>,
}

impl Credentials {
    /// Creates credentials with another password for the configured user.
    #[must_use]
    pub fn password(password: impl Into<String>) -> Self {
        Self { user: None, password: Some(password.into()) }
    }

    /// Sets the user as well.
    #[must_use]
    pub fn user(mut self, user: impl Into<String>) -> Self {
        self.user = Some(user.into());
        self
    }

    /// Reads the credentials of a URL, or of the environment if the URL has none, as
    /// [`PgConfig::from_url`](crate::PgConfig::from_url) does. The rest of the URL is ignored.
    ///
    /// # Errors
    ///
    /// As [`PgConfig::from_url`](crate::PgConfig::from_url).
    pub fn from_url(url: &str) -> Result<Self, Error> {
        Ok(parse(url, &Environment::of_process())?.credentials)
    }
}

/// Hides the password.
impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("user", &self.user).finish_non_exhaustive()
    }
}

type CredentialsFuture = Pin<Box<dyn Future<Output = Result<Credentials, Error>> + Send>>;

/// The source of a session's credentials.
#[derive(Clone)]
pub(crate) enum Source {
    /// The user and password of the configured options.
    Fixed,
    /// The user and password of the pool's options, read when a session is opened.
    Pool(PgPool),
    /// A callback of the program, called when a session is opened.
    Program(Arc<dyn Fn() -> CredentialsFuture + Send + Sync>),
}

/// The credentials of one login attempt.
#[derive(Clone)]
pub(crate) enum Login {
    Fixed,
    Pool(Arc<PgConnectOptions>),
    Program(Credentials),
}

impl Source {
    pub(crate) async fn login(&self) -> Result<Login, Error> {
        match self {
            Self::Fixed => Ok(Login::Fixed),
            Self::Pool(pool) => Ok(Login::Pool(pool.connect_options())),
            Self::Program(call) => call().await.map(Login::Program),
        }
    }

    /// Returns the login to try after `login` failed with `error`. Returns the error if a retry cannot help.
    pub(crate) async fn after(&self, login: &Login, error: Error) -> Result<Login, Error> {
        if error.kind() != ErrorKind::PermissionDenied {
            return Err(error);
        }
        match self.login().await {
            Ok(changed) if changed.differs_from(login) => Ok(changed),
            Ok(_) | Err(_) => Err(error),
        }
    }
}

impl Login {
    fn differs_from(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Pool(a), Self::Pool(b)) => !Arc::ptr_eq(a, b),
            (Self::Program(a), Self::Program(b)) => a != b,
            _ => false,
        }
    }

    /// Returns `targets` with this login.
    pub(crate) fn apply(&self, targets: &[Target]) -> Vec<Target> {
        let mut targets = targets.to_vec();
        for target in &mut targets {
            match self {
                Self::Fixed => {}
                Self::Pool(options) => {
                    let name = target.options.get_application_name().map(str::to_owned);
                    target.options = ours(options.as_ref().clone());
                    if let Some(name) = name {
                        target.options = target.options.clone().application_name(&name);
                    }
                }
                Self::Program(Credentials { user, password }) => {
                    if let Some(user) = user {
                        target.options = target.options.clone().username(user);
                    }
                    if let Some(password) = password {
                        target.options = target.options.clone().password(password);
                    }
                }
            }
        }
        targets
    }
}
