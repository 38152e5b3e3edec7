//! One connection: opened, checked, configured, and watched while idle.

use std::time::Duration;

use leasehold_api::{Error, ErrorKind};
use sqlx::postgres::{PgConnectOptions, PgListener, PgPoolOptions};
use sqlx::{Acquire, Connection, Executor, PgConnection};
use tokio::time::timeout;

use crate::config::{PgConfig, Pooler};
use crate::connect::credentials::Login;
use crate::connect::probe::{ProbeResult, backend_pid, compare};
use crate::connect::route::Route;
use crate::error::{connect_error, store_error};
use crate::sql;

/// Time limit for closing a connection cleanly.
const CLOSE: Duration = Duration::from_millis(500);

/// How long the pool can take to connect before a plain connection is opened to find the cause.
const POOL_DELAY: Duration = Duration::from_millis(500);

/// One connection with the server.
pub(crate) struct Link {
    listener: PgListener,
    pool: sqlx::PgPool,
    pub(crate) pid: i32,
    pub(crate) pooled: bool,
    /// Whether advisory locks of different sessions exclude each other on this server. `true` if untested.
    pub(crate) excludes: bool,
}

impl Link {
    /// Connects, detects poolers, and sets the session's parameters.
    pub(crate) async fn open(config: &PgConfig) -> Result<Self, Error> {
        let login = config.source.login().await?;
        match Self::open_as(config, &login).await {
            // Tries again with fresh credentials, because the secret might have been rotated.
            Err(error) => Self::open_as(config, &config.source.after(&login, error).await?).await,
            opened => opened,
        }
    }

    async fn open_as(config: &PgConfig, login: &Login) -> Result<Self, Error> {
        // Opens the first connection without the pool, which would retry a refused connection and hide the
        // reason.
        let is_probed = !matches!(config.pooler, Pooler::Known | Pooler::Transaction);
        let mut route = Route::find(config, login, is_probed).await?;
        let mut probe = route.first.take();
        if let Some(probe) = probe.take_if(|_| !is_probed) {
            let _ = timeout(CLOSE, probe.close()).await;
        }
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .acquire_timeout(config.connect_timeout)
            .idle_timeout(None)
            .max_lifetime(None)
            .test_before_acquire(false)
            .connect_lazy_with(route.options.clone());
        let listener = listen(&pool, &route.options).await?;
        let pooled = config.pooler == Pooler::Transaction;
        let mut link = Self { listener, pool, pid: 0, pooled, excludes: true };
        link.listener.eager_reconnect(false);
        link.listener.ignore_pool_close_event(true);
        match probe {
            Some(probe) => {
                let ProbeResult { pid, pooled, excludes } = compare(link.connection().await?, probe).await?;
                if pooled && config.pooler == Pooler::None {
                    return Err(denied());
                }
                link.pid = pid;
                link.pooled |= pooled;
                link.excludes = excludes;
            }
            None => {
                let pid = backend_pid(link.connection().await?).await;
                link.pid = pid.map_err(|error| connect_error(error, "connect"))?;
            }
        }
        if link.pooled {
            has_transactions(link.connection().await?).await?;
        } else {
            configure(link.connection().await?, config).await?;
        }
        Ok(link)
    }

    /// Returns the connection for statements. The driver never opens a new one here, because the actor
    /// discards the link once the listener loses its connection.
    pub(crate) async fn connection(&mut self) -> Result<&mut PgConnection, Error> {
        self.listener.acquire().await.map_err(|error| store_error(error, "use the session"))
    }

    /// Reads the idle connection. Returns the next notification, or the error that ended the session.
    pub(crate) async fn next_event(&mut self) -> Result<(String, String), Error> {
        match self.listener.try_recv().await {
            Ok(Some(event)) => Ok((event.channel().to_owned(), event.payload().to_owned())),
            Ok(None) => Err(Error::new(
                ErrorKind::Unavailable,
                "the server closed the connection; it is opened anew, what it held is gone",
            )),
            Err(error) => Err(store_error(error, "keep the session")),
        }
    }

    /// Returns a notification that arrived together with the reply to a statement.
    pub(crate) fn buffered_event(&mut self) -> Option<(String, String)> {
        let event = self.listener.next_buffered()?;
        Some((event.channel().to_owned(), event.payload().to_owned()))
    }

    /// Makes one round trip, to check that the session still exists.
    pub(crate) async fn ping(&mut self) -> Result<(), Error> {
        let answer = self.connection().await?.execute(sql::PING).await;
        answer.map(drop).map_err(|error| store_error(error, "confirm the session"))
    }

    /// Closes the connection cleanly, so the server ends the session immediately.
    pub(crate) async fn close(self) {
        let Self { listener, pool, .. } = self;
        drop(listener);
        // Waits until the dropped listener has returned its connection, and closes the connection.
        let _ = timeout(CLOSE, pool.close()).await;
    }

    /// Abandons a connection in doubt. Once the server answers, the connection is closed without further use.
    pub(crate) fn abandon(self) {
        // Closes the pool without waiting. The driver later returns the connection to the closed pool, which
        // discards it.
        drop(self.pool.close());
    }
}

/// Opens the listener's connection. The pool retries some refused attempts and hides the reason, so after a
/// delay a plain connection is opened to learn the reason.
async fn listen(pool: &sqlx::PgPool, options: &PgConnectOptions) -> Result<PgListener, Error> {
    let mut listening = std::pin::pin!(PgListener::connect_with(pool));
    let outcome = match timeout(POOL_DELAY, &mut listening).await {
        Ok(outcome) => outcome,
        Err(_) => {
            let welcome = connect(options).await?;
            let _ = timeout(CLOSE, welcome.close()).await;
            listening.await
        }
    };
    match outcome {
        Ok(listener) => Ok(listener),
        Err(sqlx::Error::PoolTimedOut) => Err(connect(options).await.err().unwrap_or_else(slow)),
        Err(error) => Err(connect_error(error, "connect")),
    }
}

async fn connect(options: &PgConnectOptions) -> Result<PgConnection, Error> {
    PgConnection::connect_with(options).await.map_err(|error| connect_error(error, "connect"))
}

/// Opens a separate connection for the caller.
pub(crate) async fn connection(config: &PgConfig) -> Result<PgConnection, Error> {
    let connect = async |login: &Login| {
        let route = Route::find(config, login, true).await?;
        route.first.ok_or_else(slow)
    };
    let login = config.source.login().await?;
    match connect(&login).await {
        Err(error) => connect(&config.source.after(&login, error).await?).await,
        opened => opened,
    }
}

fn denied() -> Error {
    Error::new(
        ErrorKind::Unsupported,
        "a pooler in transaction mode is in between, though pooler=none says that there is none; connect to the server directly, or leave pooler=none out for a store that can work behind a pooler",
    )
}

fn slow() -> Error {
    Error::new(ErrorKind::Unavailable, "the server was too slow to open a session; try again")
}

/// Checks that transactions work, because a pooler in statement mode ends a connection that begins one.
async fn has_transactions(connection: &mut PgConnection) -> Result<(), Error> {
    let begun = async {
        connection.execute(sql::BEGIN).await?;
        connection.execute(sql::ROLLBACK).await
    };
    begun.await.map(drop).map_err(|error| connect_error(error, "begin a transaction"))
}

/// Sets the session's parameters, which override the defaults of server, database and role.
async fn configure(connection: &mut PgConnection, config: &PgConfig) -> Result<(), Error> {
    let settings = settings(config);
    let outcome = apply(connection, &settings).await;
    let outcome = match outcome {
        // Leaves out the setting that a server refuses if its operating system cannot detect closed
        // connections.
        Err(error) if error.to_string().contains(sql::CHECK_CLIENT) => {
            let rest: Vec<_> = settings.into_iter().filter(|(name, _)| *name != sql::CHECK_CLIENT).collect();
            apply(connection, &rest).await
        }
        outcome => outcome,
    };
    outcome.map_err(|error| connect_error(error, "set up the session"))
}

async fn apply(connection: &mut PgConnection, settings: &[(&str, String)]) -> Result<(), sqlx::Error> {
    let names: Vec<&str> = settings.iter().map(|(name, _)| *name).collect();
    let values: Vec<&str> = settings.iter().map(|(_, value)| value.as_str()).collect();
    sqlx::query(sql::CONFIGURE).persistent(false).bind(names).bind(values).execute(connection).await?;
    Ok(())
}

/// Returns the session's parameters, each with a reason.
fn settings(config: &PgConfig) -> Vec<(&'static str, String)> {
    let liveness = config.liveness;
    let millis = |duration: Duration| duration.as_millis().to_string();
    // Keepalive probes start after a third of `server_gives_up` and repeat until it is over, in whole
    // seconds.
    let probe = (liveness.server_gives_up.as_secs() / 3).max(1);
    vec![
        // Prevents calls of objects that another role put into another schema.
        ("search_path", "pg_catalog".to_owned()),
        // Turns rows hidden by a policy into an error. Otherwise they would look unlocked.
        ("row_security", "off".to_owned()),
        // Keeps a backslash in a schema name literal.
        ("standard_conforming_strings", "on".to_owned()),
        // Statements read rows committed before they run, not before the transaction began (H29).
        ("default_transaction_isolation", "read committed".to_owned()),
        ("default_transaction_read_only", "off".to_owned()),
        // An answer means that the change survives a crash (H15).
        ("synchronous_commit", "on".to_owned()),
        // The role's limits must not end the stores' waits or sessions (H16, H17).
        ("statement_timeout", millis(config.statement_timeout)),
        ("lock_timeout", "0".to_owned()),
        ("idle_in_transaction_session_timeout", "0".to_owned()),
        ("idle_session_timeout", "0".to_owned()),
        ("transaction_timeout", "0".to_owned()),
        // The server detects a dead client (H07), even during a lock wait (H09).
        ("tcp_keepalives_idle", probe.to_string()),
        ("tcp_keepalives_interval", probe.to_string()),
        ("tcp_keepalives_count", "2".to_owned()),
        ("tcp_user_timeout", millis(liveness.server_gives_up)),
        (sql::CHECK_CLIENT, millis((liveness.server_gives_up / 4).min(Duration::from_secs(1)))),
    ]
}
