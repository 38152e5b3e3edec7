//! One connection: opened, checked, given its settings, watched while idle.

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

/// How long closing a connection in good order may take.
const CLOSE: Duration = Duration::from_millis(500);

/// How long the pool may take to connect before a plain connection is opened, which tells the cause.
const POOL_DELAY: Duration = Duration::from_millis(500);

/// One connection with the server.
pub(crate) struct Link {
    listener: PgListener,
    pool: sqlx::PgPool,
    pub(crate) pid: i32,
    pub(crate) pooled: bool,
    /// Whether advisory locks exclude on this server, if that was tried.
    pub(crate) excludes: bool,
}

impl Link {
    /// Connects, finds out about poolers, and sets what our statements rely on.
    pub(crate) async fn open(config: &PgConfig) -> Result<Self, Error> {
        let login = config.source.login().await?;
        match Self::open_as(config, &login).await {
            // Secrets are rotated.
            Err(error) => Self::open_as(config, &config.source.after(&login, error).await?).await,
            opened => opened,
        }
    }

    async fn open_as(config: &PgConfig, login: &Login) -> Result<Self, Error> {
        // The pool would retry a refused connection and hide why it was refused; the first connection says it.
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

    /// The connection, for statements. It is never a new one: once the listener has lost its
    /// connection, the actor does not use it again.
    pub(crate) async fn connection(&mut self) -> Result<&mut PgConnection, Error> {
        self.listener.acquire().await.map_err(|error| store_error(error, "use the session"))
    }

    /// Reads the idle connection: the next notification, or the error that ended the session.
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

    /// A notification that came along with an answer.
    pub(crate) fn buffered_event(&mut self) -> Option<(String, String)> {
        let event = self.listener.next_buffered()?;
        Some((event.channel().to_owned(), event.payload().to_owned()))
    }

    /// One round trip.
    pub(crate) async fn ping(&mut self) -> Result<(), Error> {
        let answer = self.connection().await?.execute(sql::PING).await;
        answer.map(drop).map_err(|error| store_error(error, "confirm the session"))
    }

    /// Closes the connection in good order, so that the server ends the session immediately.
    pub(crate) async fn close(self) {
        let Self { listener, pool, .. } = self;
        drop(listener);
        // Waits for the listener's connection to come back, and closes it.
        let _ = timeout(CLOSE, pool.close()).await;
    }

    /// Leaves a connection in doubt: once it answers again it is closed, and never used.
    pub(crate) fn abandon(self) {
        // The driver returns the connection to this pool, which nobody else has and which is closed.
        drop(self.pool.close());
    }
}

/// The listener's connection. The pool repeats some refused attempts until its time is over and hides why
/// they were refused, so that a plain connection is asked when it takes long.
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

/// A connection of the caller's own.
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

/// Whether there are transactions: a pooler in statement mode ends the connection of whoever begins one.
async fn has_transactions(connection: &mut PgConnection) -> Result<(), Error> {
    let begun = async {
        connection.execute(sql::BEGIN).await?;
        connection.execute(sql::ROLLBACK).await
    };
    begun.await.map(drop).map_err(|error| connect_error(error, "begin a transaction"))
}

/// Sets what our statements rely on, whatever the defaults of server, database and role are.
async fn configure(connection: &mut PgConnection, config: &PgConfig) -> Result<(), Error> {
    let settings = settings(config);
    let outcome = apply(connection, &settings).await;
    let outcome = match outcome {
        // A server on a system that cannot watch its clients refuses this one setting.
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

/// The settings of a session, each with a reason.
fn settings(config: &PgConfig) -> Vec<(&'static str, String)> {
    let liveness = config.liveness;
    let millis = |duration: Duration| duration.as_millis().to_string();
    // Probes begin after a third of the time and are repeated until it is over; whole seconds.
    let probe = (liveness.server_gives_up.as_secs() / 3).max(1);
    vec![
        // Nothing that a user put into another schema is called by name.
        ("search_path", "pg_catalog".to_owned()),
        // Rows that a policy hides would read as free: with this it is an error.
        ("row_security", "off".to_owned()),
        // A backslash in the name of a schema is a backslash.
        ("standard_conforming_strings", "on".to_owned()),
        // Statements look at what is committed when they run, not when a transaction began (H29).
        ("default_transaction_isolation", "read committed".to_owned()),
        ("default_transaction_read_only", "off".to_owned()),
        // An answer means that it survives a crash (H15).
        ("synchronous_commit", "on".to_owned()),
        // A role's own limits must not end our waits or our sessions (H16, H17).
        ("statement_timeout", millis(config.statement_timeout)),
        ("lock_timeout", "0".to_owned()),
        ("idle_in_transaction_session_timeout", "0".to_owned()),
        ("idle_session_timeout", "0".to_owned()),
        ("transaction_timeout", "0".to_owned()),
        // The server notices a dead client (H07), also while it waits for a lock (H09).
        ("tcp_keepalives_idle", probe.to_string()),
        ("tcp_keepalives_interval", probe.to_string()),
        ("tcp_keepalives_count", "2".to_owned()),
        ("tcp_user_timeout", millis(liveness.server_gives_up)),
        (sql::CHECK_CLIENT, millis((liveness.server_gives_up / 4).min(Duration::from_secs(1)))),
    ]
}
