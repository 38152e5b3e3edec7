//! Does expensive work once for many requests: `docs/cookbook/render-once.md`.

use std::time::Duration;

use leasehold_api::{Lock, RunError, key};
use rustix::time::{ClockId, clock_gettime};
use sqlx::PgPool;

use crate::duty::{Duty, run_for};
use crate::sql;

/// The page with this recipe and its SQL.
pub const PAGE: &str = include_str!("../../../docs/cookbook/render-once.md");

const FIND: &str = sql(PAGE, "find");
const STORE: &str = sql(PAGE, "store");

/// A rendered document.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rendering {
    /// The content.
    pub body: Vec<u8>,
    /// The processor time that rendering took.
    pub cpu: Duration,
}

/// The outcome of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Rendered {
    /// This call rendered the document.
    Made(Rendering),
    /// The result was in the table, so its processor time was saved.
    Stored(Rendering),
    /// Another call is rendering the document. The client has to repeat its request.
    Busy,
}

/// The reason why a request has no outcome.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RenderError {
    /// The lock was refused or lost. An outage of its store is no error.
    #[error("the document was not rendered: {0}")]
    Lock(leasehold_api::Error),
    /// The work panicked. The next request tries again.
    #[error("rendering has failed")]
    Render(#[from] tokio::task::JoinError),
    /// An error of the server.
    #[error("the results cannot be read or stored; try again")]
    Database(#[from] sqlx::Error),
}

/// Returns the stored result, or renders it unless another call is doing so.
///
/// # Errors
///
/// [`RenderError`].
///
/// # Cancel safety
///
/// If dropped, the lock is released, and the thread that renders goes on without a result.
pub async fn render_once(
    pool: &PgPool,
    lock: &dyn Lock,
    document: &str,
    version: i64,
    render: impl Fn() -> Vec<u8> + Clone + Send + 'static,
) -> Result<Rendered, RenderError> {
    match find(pool, document, version).await? {
        Some(stored) => Ok(Rendered::Stored(stored)),
        None => render_missing(pool, lock, document, version, render).await,
    }
}

/// Renders a document after [`find`] has returned `None`. Returns the result of another call that was faster.
///
/// # Errors
///
/// [`RenderError`].
///
/// # Cancel safety
///
/// As [`render_once`].
pub async fn render_missing(
    pool: &PgPool,
    lock: &dyn Lock,
    document: &str,
    version: i64,
    render: impl Fn() -> Vec<u8> + Clone + Send + 'static,
) -> Result<Rendered, RenderError> {
    let key = key!["render", document, version].map_err(RenderError::Lock)?;
    let work = async |_token| {
        if let Some(stored) = find(pool, document, version).await? {
            return Ok(Rendered::Stored(stored));
        }
        let render = render.clone();
        let made = tokio::task::spawn_blocking(move || measured(render)).await?;
        store(pool, document, version, &made).await?;
        Ok(Rendered::Made(made))
    };
    match run_for(Duty::SaveWork, lock, &key, work).await {
        Ok(Some(done)) | Err(RunError::Unconfirmed { value: done, .. }) => done,
        Ok(None) => Ok(Rendered::Busy),
        Err(RunError::NotRun(error) | RunError::Stopped(error)) => Err(RenderError::Lock(error)),
    }
}

/// Returns the stored result.
///
/// # Errors
///
/// The server's error.
///
/// # Cancel safety
///
/// Safe, because it only reads.
pub async fn find(pool: &PgPool, document: &str, version: i64) -> sqlx::Result<Option<Rendering>> {
    let found: Option<(Vec<u8>, i64)> =
        sqlx::query_as(FIND).bind(document).bind(version).fetch_optional(pool).await?;
    Ok(found.map(|(body, micros)| Rendering { body, cpu: Duration::from_micros(micros.unsigned_abs()) }))
}

async fn store(pool: &PgPool, document: &str, version: i64, made: &Rendering) -> sqlx::Result<()> {
    let micros = i64::try_from(made.cpu.as_micros()).unwrap_or(i64::MAX);
    let stored = sqlx::query(STORE).bind(document).bind(version).bind(&made.body).bind(micros);
    stored.execute(pool).await.map(|_| ())
}

/// Renders and measures the processor time of this thread.
fn measured(render: impl Fn() -> Vec<u8>) -> Rendering {
    let begun = clock_gettime(ClockId::ThreadCPUTime);
    let body = render();
    let cpu = clock_gettime(ClockId::ThreadCPUTime) - begun;
    // Rounds to whole microseconds, as they are stored. Negative times do not occur.
    let cpu = Duration::try_from(cpu).unwrap_or_default();
    Rendering { body, cpu: Duration::from_micros(u64::try_from(cpu.as_micros()).unwrap_or(u64::MAX)) }
}
