//! The sessions behind advisory locks, for operators. The server can release an advisory lock by force only by ending
//! its session.

use std::fmt;
use std::sync::Arc;

use futures_util::FutureExt as _;
use leasehold_api::{Error, ErrorKind, KeyInfo, LockKey};
use sqlx::Row as _;

use crate::admin::sql::END_SESSION;
use crate::admin::{ObservedLock, described};
use crate::common::Common;
use crate::registry::names::space_of;

/// The server's sessions that hold advisory locks, including other programs' sessions.
///
/// The server cannot take a single advisory lock from a session. An operator therefore checks all locks of the session
/// and ends the session. [`LockAdmin`](leasehold_api::LockAdmin) has no such call, but gives access to this type:
///
/// ```no_run
/// use leasehold_api::Lock as _;
/// use leasehold_postgres::PgConfig;
/// use leasehold_postgres_advisory::{AdvisoryConfig, Sessions};
///
/// # async fn example() -> Result<(), leasehold_api::Error> {
/// let lock = AdvisoryConfig::new(PgConfig::from_url("postgres://ops@db/ledger")?).connect().await?;
/// if let Some(sessions) = lock.admin().and_then(|admin| admin.extension::<Sessions>())
///     && let Some(session) = sessions.session_of(&"ledger:42".parse()?).await?
/// {
///     println!("{:?} goes, and with it {} locks", session.owner, session.holds.len());
///     sessions.end_session(&session).await?;
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Sessions {
    common: Arc<Common>,
}

/// A session of the server with its locks.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionInfo {
    /// Process id and start time (in microseconds since 1970) of the session. No later session has the same.
    pub id: String,
    /// User, address, application and process of the session.
    pub owner: Option<String>,
    /// Every advisory lock that the session holds. A shared lock is listed with this session's holders only.
    pub holds: Vec<KeyInfo>,
}

impl Sessions {
    pub(crate) fn new(common: &Arc<Common>) -> Self {
        Self { common: Arc::clone(common) }
    }

    /// Returns the session that holds `key`, with all its locks. `None` if no session holds the key, or the role cannot
    /// see the session (`pg_read_all_stats` shows all).
    ///
    /// # Errors
    ///
    /// - [`Unsupported`](ErrorKind::Unsupported) if a prepared transaction, which has no session, holds the key.
    /// - [`Closed`](ErrorKind::Closed) after `close`.
    /// - [`InvalidKey`](ErrorKind::InvalidKey) if the hasher does not take the key.
    /// - Otherwise the server's error.
    ///
    /// # Cancel safety
    ///
    /// If dropped, no lock is affected.
    pub async fn session_of(&self, key: &LockKey) -> Result<Option<SessionInfo>, Error> {
        Ok(self.sessions_of(key).await?.into_iter().next())
    }

    /// Returns every session that holds `key`, each with all its locks. More than one only if they share the key.
    /// Sessions that the role cannot see are left out.
    ///
    /// # Errors
    ///
    /// See [`session_of`](Self::session_of).
    ///
    /// # Cancel safety
    ///
    /// If dropped, no lock is affected.
    pub async fn sessions_of(&self, key: &LockKey) -> Result<Vec<SessionInfo>, Error> {
        let common = &self.common;
        let identity = (space_of(common.space()), common.number(key)?);
        let mut by_session: Vec<(i32, Vec<ObservedLock>)> = Vec::new();
        let locks = common.look(None).await?;
        let of_key = locks.iter().filter(|lock| (lock.space, lock.number) == identity);
        for lock in of_key {
            let Some(pid) = lock.pid else {
                return Err(Error::new(ErrorKind::Unsupported, PREPARED).with_key(key));
            };
            by_session.push((pid, Vec::new()));
        }
        for lock in locks {
            if let Some((_, locks)) = by_session.iter_mut().find(|(pid, _)| lock.pid == Some(*pid)) {
                locks.push(lock);
            }
        }
        let session = |(pid, locks): (i32, Vec<ObservedLock>)| {
            let lock = locks.first()?;
            let (id, owner) = (format!("{pid}-{}", lock.started?), Some(lock.owner()));
            Some(SessionInfo { id, owner, holds: described(locks, common, None) })
        };
        Ok(by_session.into_iter().filter_map(session).collect())
    }

    /// Ends a session found by [`session_of`](Self::session_of), and with it all its locks. Returns whether the session
    /// still existed. If so, its holders' guards report the loss within
    /// [`Capabilities::loss_detection`](leasehold_api::Capabilities::loss_detection).
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption) if the id is malformed.
    /// [`PermissionDenied`](ErrorKind::PermissionDenied) if the session belongs to another role and this role lacks
    /// `pg_signal_backend`. Otherwise see [`session_of`](Self::session_of).
    ///
    /// # Cancel safety
    ///
    /// If dropped, the session might have been ended. Check again.
    pub async fn end_session(&self, session: &SessionInfo) -> Result<bool, Error> {
        let parts = session.id.split_once('-');
        let parsed =
            parts.and_then(|(pid, started)| Some((pid.parse::<i32>().ok()?, started.parse::<i64>().ok()?)));
        let Some((pid, started)) = parsed else {
            let message =
                format!("{:?} is not a session of this store; look for it with session_of", session.id);
            return Err(Error::new(ErrorKind::InvalidOption, message));
        };
        self.common.open()?;
        self.common
            .query("end a session", move |connection| {
                async move {
                    let query = sqlx::query(END_SESSION).persistent(false).bind(pid).bind(started);
                    query.fetch_one(connection).await?.try_get(0)
                }
                .boxed()
            })
            .await
    }
}

/// The error for a key held by a prepared transaction.
const PREPARED: &str = "a prepared transaction holds it, which has no session that could be ended; end it by its name in pg_prepared_xacts, with COMMIT PREPARED or ROLLBACK PREPARED";

impl fmt::Debug for Sessions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sessions").field("server", &self.common.config).finish_non_exhaustive()
    }
}
