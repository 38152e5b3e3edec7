//! The sessions behind advisory locks, for operators: the server frees such a lock by force only with its session.

use std::fmt;
use std::sync::Arc;

use futures_util::FutureExt as _;
use leasehold_api::{Error, ErrorKind, KeyInfo, LockKey};
use sqlx::Row as _;

use crate::admin::sql::END_SESSION;
use crate::common::Common;
use crate::registry::names::space_of;

/// The sessions of the server that hold advisory locks, those of other programs included.
///
/// The server cannot take one advisory lock from a session: an operator looks at all that the session holds, and ends
/// it as a whole. That is not part of [`LockAdmin`](leasehold_api::LockAdmin); this type is reached through it:
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

/// A session of the server, and what it holds.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionInfo {
    /// The number of its process, and when it began in microseconds since 1970: it names no later session.
    pub id: String,
    /// Whose it is: user, address, application, process.
    pub owner: Option<String>,
    /// Every advisory lock that it holds exclusively, each with one holder.
    pub holds: Vec<KeyInfo>,
}

impl Sessions {
    pub(crate) fn new(common: &Arc<Common>) -> Self {
        Self { common: Arc::clone(common) }
    }

    /// The session that holds `key`, with all else that it holds; `None` if none holds it, or one that the role may not
    /// see (`pg_read_all_stats` shows all).
    ///
    /// # Errors
    ///
    /// [`Unsupported`](ErrorKind::Unsupported) if a prepared transaction holds it, which has no session;
    /// [`Closed`](ErrorKind::Closed) after `close`; [`InvalidKey`](ErrorKind::InvalidKey) for a key that the hasher
    /// does not take; else what the server answers.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future has no effect on any lock.
    pub async fn session_of(&self, key: &LockKey) -> Result<Option<SessionInfo>, Error> {
        let common = &self.common;
        let number = common.number(key)?;
        let locks = common.look(None).await?;
        let space = space_of(common.space());
        let of_key = locks.iter().find(|lock| (lock.space, lock.number) == (space, number));
        if of_key.is_some_and(|lock| lock.pid.is_none()) {
            return Err(Error::new(ErrorKind::Unsupported, PREPARED).with_key(key));
        }
        let Some((pid, started, owner)) =
            of_key.and_then(|lock| Some((lock.pid?, lock.started?, lock.owner())))
        else {
            return Ok(None);
        };
        let holds = locks.into_iter().filter(|lock| lock.pid == Some(pid));
        let holds = holds.filter_map(|lock| lock.describe(common, None)).collect();
        Ok(Some(SessionInfo { id: format!("{pid}-{started}"), owner: Some(owner), holds }))
    }

    /// Ends a session that [`session_of`](Self::session_of) has found, and with it all that it holds. `Ok(true)`: its
    /// end was asked for, and its holders' guards read lost within
    /// [`Capabilities::loss_detection`](leasehold_api::Capabilities::loss_detection). `Ok(false)`: it had ended before.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption) for an id that is none of a session;
    /// [`PermissionDenied`](ErrorKind::PermissionDenied) for a session of another role, unless this one has
    /// `pg_signal_backend`; else as [`session_of`](Self::session_of).
    ///
    /// # Cancel safety
    ///
    /// A dropped call may or may not have ended the session; look again.
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

/// What holds a key that no session holds.
const PREPARED: &str = "a prepared transaction holds it, which has no session that could be ended; end it by its name in pg_prepared_xacts, with COMMIT PREPARED or ROLLBACK PREPARED";

impl fmt::Debug for Sessions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sessions").field("server", &self.common.config).finish_non_exhaustive()
    }
}
