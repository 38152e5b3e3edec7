//! The workflows of a project with screens in an object store: `docs/cookbook/projects.md`.

use std::error::Error;
use std::time::{Duration, SystemTime};

use sqlx::{PgConnection, PgPool};

use crate::sql;
use crate::transaction::begin;

/// The page with this recipe and its SQL.
pub const PAGE: &str = include_str!("../../../docs/cookbook/projects.md");

/// Maximum number of copies of one name.
pub const MAX_COPIES: i32 = 50;

const LOCK_OWNER: &str = sql(PAGE, "lock owner");
const RECOMPUTE: &str = sql(PAGE, "recompute");
const VALIDATE: &str = sql(PAGE, "validate");
const CREATE: &str = sql(PAGE, "create");
const ARCHIVE: &str = sql(PAGE, "archive");
const ACTIVATE: &str = sql(PAGE, "activate");
const ARCHIVE_SCREEN: &str = sql(PAGE, "archive screen");
const ACTIVATE_SCREEN: &str = sql(PAGE, "activate screen");
const IS_SCREEN_TAKEN: &str = sql(PAGE, "is screen taken");
const RESERVE: &str = sql(PAGE, "reserve");
const CREATE_SCREEN: &str = sql(PAGE, "create screen");
const PUBLISH: &str = sql(PAGE, "publish");
const ABANDONED: &str = sql(PAGE, "abandoned");
const FORGET: &str = sql(PAGE, "forget");
const LOG: &str = sql(PAGE, "log");
const ENQUEUE: &str = sql(PAGE, "enqueue");
const TOMBSTONE: &str = sql(PAGE, "tombstone");
const NEXT_JOB: &str = sql(PAGE, "next job");
const DUE_ASSETS: &str = sql(PAGE, "due assets");
const POSTPONE: &str = sql(PAGE, "postpone");
const DELETE_SCREENS: &str = sql(PAGE, "delete screens");
const DELETE_ROOT: &str = sql(PAGE, "delete root");

/// The reason why a workflow changed nothing. After an upload with this error a reserved object might exist, which
/// [`sweep_uploads`] removes.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProjectError {
    /// The project does not exist, belongs to another owner, or is being deleted.
    #[error("there is no such project")]
    NoSuchProject,
    /// An active project of the owner has the name.
    #[error("the name is taken; choose another name")]
    NameTaken,
    /// The name and all its copies are taken.
    #[error("the name and its {MAX_COPIES} copies are taken; rename the project or the screen")]
    TooManyCopies,
    /// The project or screen is active already.
    #[error("it is not archived, so there is nothing to activate")]
    NotArchived,
    /// The project is archived.
    #[error("the project is archived; activate it first")]
    Archived,
    /// The project must be kept for now.
    #[error("the project is on hold; lift the hold first")]
    OnHold,
    /// No active project of the owner has the screen.
    #[error("there is no such screen in an active project")]
    NoSuchScreen,
    /// An active screen of the project has the base name.
    #[error("the project has a screen of this name; archive it, or upload under another name")]
    ScreenTaken,
    /// The time limit of the upload has ended.
    #[error("the upload took too long; upload again")]
    UploadExpired,
    /// An error of the object store.
    #[error("the object store has failed; try again")]
    Assets(#[source] Box<dyn Error + Send + Sync>),
    /// Another error of the server.
    #[error("the database has failed; try again")]
    Database(#[from] sqlx::Error),
}

impl ProjectError {
    fn assets(error: impl Error + Send + Sync + 'static) -> Self {
        Self::Assets(Box::new(error))
    }
}

/// An object store whose writes have a time limit, as presigned URLs do.
pub trait Assets: Sync {
    /// The store's error.
    type Error: Error + Send + Sync + 'static;

    /// Writes an object. Fails after `until`, also if the call has started before.
    fn put(
        &self,
        object: &str,
        body: Vec<u8>,
        until: SystemTime,
    ) -> impl Future<Output = Result<(), Self::Error>> + Send;

    /// Deletes an object. A missing object is no error.
    fn delete(&self, object: &str) -> impl Future<Output = Result<(), Self::Error>> + Send;
}

/// Runs `change` on the owner's projects under the owner's lock and corrects the quota flags, in one transaction.
///
/// # Errors
///
/// The error of `change` or of the server. Nothing was changed then.
///
/// # Cancel safety
///
/// If dropped, it rolls back, or has committed if the commit had begun.
pub async fn change<T>(
    pool: &PgPool,
    owner: i64,
    change: impl AsyncFnOnce(&mut PgConnection) -> Result<T, ProjectError>,
) -> Result<T, ProjectError> {
    let mut tx = begin(pool).await?;
    sqlx::query(LOCK_OWNER).bind(owner).execute(&mut *tx).await?;
    let value = change(&mut tx).await?;
    sqlx::query(RECOMPUTE).bind(owner).execute(&mut *tx).await?;
    tx.commit().await?;
    Ok(value)
}

/// Creates a project and returns its id.
///
/// # Errors
///
/// [`NameTaken`](ProjectError::NameTaken), also if an earlier call created the project, or an error of the server.
///
/// # Cancel safety
///
/// As [`change`].
pub async fn create(pool: &PgPool, owner: i64, name: &str) -> Result<i64, ProjectError> {
    change(pool, owner, async |tx| {
        let created = sqlx::query_scalar(CREATE).bind(owner).bind(name).fetch_optional(tx).await?;
        created.ok_or(ProjectError::NameTaken)
    })
    .await
}

/// Archives a project. Its name is free then.
///
/// # Errors
///
/// [`Archived`](ProjectError::Archived), [`NoSuchProject`](ProjectError::NoSuchProject), or an error of the server.
///
/// # Cancel safety
///
/// As [`change`].
pub async fn archive(pool: &PgPool, owner: i64, project: i64) -> Result<(), ProjectError> {
    change(pool, owner, async |tx| {
        active(tx, owner, project).await?;
        sqlx::query(ARCHIVE).bind(project).bind(owner).execute(tx).await?;
        Ok(())
    })
    .await
}

/// Activates an archived project under the first free name and returns that name.
///
/// # Errors
///
/// [`NotArchived`](ProjectError::NotArchived), also if an earlier call activated the project,
/// [`NoSuchProject`](ProjectError::NoSuchProject), [`TooManyCopies`](ProjectError::TooManyCopies), or an error of the
/// server.
///
/// # Cancel safety
///
/// As [`change`].
pub async fn activate(pool: &PgPool, owner: i64, project: i64) -> Result<String, ProjectError> {
    change(pool, owner, async |tx| {
        match active(tx, owner, project).await {
            Err(ProjectError::Archived) => {}
            other => return Err(other.err().unwrap_or(ProjectError::NotArchived)),
        }
        let activated =
            sqlx::query_scalar(ACTIVATE).bind(project).bind(MAX_COPIES).fetch_optional(tx).await?;
        activated.ok_or(ProjectError::TooManyCopies)
    })
    .await
}

/// Archives a screen. Its base name is free then. Returns whether an active screen was found.
///
/// # Errors
///
/// An error of the server.
///
/// # Cancel safety
///
/// As [`change`].
pub async fn archive_screen(pool: &PgPool, owner: i64, screen: i64) -> Result<bool, ProjectError> {
    change(pool, owner, async |tx| {
        let done = sqlx::query(ARCHIVE_SCREEN).bind(screen).bind(owner).execute(tx).await?;
        Ok(done.rows_affected() == 1)
    })
    .await
}

/// Activates an archived screen and returns its file name, which is another one if its base name was taken.
///
/// # Errors
///
/// [`NotArchived`](ProjectError::NotArchived), [`NoSuchScreen`](ProjectError::NoSuchScreen),
/// [`TooManyCopies`](ProjectError::TooManyCopies), or an error of the server.
///
/// # Cancel safety
///
/// As [`change`].
pub async fn activate_screen(pool: &PgPool, owner: i64, screen: i64) -> Result<String, ProjectError> {
    const IS_ARCHIVED: &str =
        "SELECT s.archived_at IS NOT NULL FROM screen s JOIN project p ON p.id = s.project_id
        WHERE s.id = $1 AND p.owner_id = $2 AND p.archived_at IS NULL";
    change(pool, owner, async |tx| {
        let activated = sqlx::query_scalar(ACTIVATE_SCREEN).bind(screen).bind(owner).bind(MAX_COPIES);
        if let Some(file) = activated.fetch_optional(&mut *tx).await? {
            return Ok(file);
        }
        let archived = sqlx::query_scalar(IS_ARCHIVED).bind(screen).bind(owner).fetch_optional(tx).await?;
        Err(match archived {
            None => ProjectError::NoSuchScreen,
            Some(false) => ProjectError::NotArchived,
            Some(true) => ProjectError::TooManyCopies,
        })
    })
    .await
}

/// An object whose name was reserved for an upload.
#[derive(Debug)]
#[non_exhaustive]
pub struct Reserved {
    /// The row that names the object.
    pub asset: i64,
    /// The object's name in the store.
    pub object: String,
    /// The time limit for its write.
    pub until: SystemTime,
}

/// Uploads a file as a new screen and returns the screen's id.
///
/// # Errors
///
/// [`ProjectError`]. The object might have been written, and [`sweep_uploads`] removes it after its time limit.
///
/// # Cancel safety
///
/// As after an error.
pub async fn upload<A: Assets>(
    pool: &PgPool,
    assets: &A,
    owner: i64,
    project: i64,
    file: &str,
    body: Vec<u8>,
) -> Result<i64, ProjectError> {
    let reserved = reserve(pool, owner, project, file).await?;
    assets.put(&reserved.object, body, reserved.until).await.map_err(ProjectError::assets)?;
    publish(pool, owner, project, file, &reserved).await
}

/// Validates an upload and commits the row that names its object.
///
/// # Errors
///
/// [`NoSuchProject`](ProjectError::NoSuchProject), [`Archived`](ProjectError::Archived),
/// [`ScreenTaken`](ProjectError::ScreenTaken), or an error of the server.
///
/// # Cancel safety
///
/// As [`change`].
pub async fn reserve(pool: &PgPool, owner: i64, project: i64, file: &str) -> Result<Reserved, ProjectError> {
    change(pool, owner, async |tx| {
        active(tx, owner, project).await?;
        if sqlx::query_scalar(IS_SCREEN_TAKEN).bind(project).bind(file).fetch_one(&mut *tx).await? {
            return Err(ProjectError::ScreenTaken);
        }
        let (asset, object, until) = sqlx::query_as(RESERVE).bind(project).fetch_one(tx).await?;
        Ok(Reserved { asset, object, until: SystemTime::UNIX_EPOCH + Duration::from_secs_f64(until) })
    })
    .await
}

/// Creates the screen of an uploaded object and returns its id.
///
/// # Errors
///
/// As [`reserve`], and [`UploadExpired`](ProjectError::UploadExpired).
///
/// # Cancel safety
///
/// As [`change`].
pub async fn publish(
    pool: &PgPool,
    owner: i64,
    project: i64,
    file: &str,
    reserved: &Reserved,
) -> Result<i64, ProjectError> {
    change(pool, owner, async |tx| {
        active(tx, owner, project).await?;
        let created =
            sqlx::query_scalar(CREATE_SCREEN).bind(project).bind(file).fetch_optional(&mut *tx).await?;
        let screen: i64 = created.ok_or(ProjectError::ScreenTaken)?;
        let published = sqlx::query(PUBLISH).bind(reserved.asset).bind(screen).execute(tx).await?;
        if published.rows_affected() == 0 {
            return Err(ProjectError::UploadExpired);
        }
        Ok(screen)
    })
    .await
}

/// Removes at most `batch` abandoned uploads, objects before rows. Returns the number of removed rows.
///
/// # Errors
///
/// An error of the server or of the object store. All rows of the batch stay then.
///
/// # Cancel safety
///
/// If dropped, it rolls back, or has committed if the commit had begun. It can be repeated.
pub async fn sweep_uploads<A: Assets>(pool: &PgPool, assets: &A, batch: i64) -> Result<u64, ProjectError> {
    let mut tx = begin(pool).await?;
    let due = sqlx::query_as(ABANDONED).bind(batch).fetch_all(&mut *tx).await?;
    let swept = remove(&mut tx, assets, due).await?;
    tx.commit().await?;
    Ok(swept)
}

/// Requests the deletion of a project and hides it. A worker deletes it. A repeated request is only logged.
///
/// # Errors
///
/// [`NoSuchProject`](ProjectError::NoSuchProject), [`OnHold`](ProjectError::OnHold), or an error of the server.
///
/// # Cancel safety
///
/// As [`change`].
pub async fn request_deletion(pool: &PgPool, owner: i64, project: i64) -> Result<(), ProjectError> {
    change(pool, owner, async |tx| {
        let (on_hold, ..) = state(tx, owner, project).await?;
        if on_hold {
            return Err(ProjectError::OnHold);
        }
        for statement in [LOG, ENQUEUE, TOMBSTONE] {
            changed(tx, statement, project).await?;
        }
        Ok(())
    })
    .await
}

/// The result of a worker's step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Step {
    /// No job is free. Other workers might have claimed some.
    Idle,
    /// This many objects or screens were deleted, and more rows remain.
    Deleted(u64),
    /// Objects of the project can still be written, so its job is postponed until that ends.
    Postponed(i64),
    /// The project and its job were deleted.
    Finished(i64),
}

/// Runs one step of the first free job, in a separate transaction.
///
/// # Errors
///
/// An error of the server or of the object store. The rows of the batch stay then, and the step can be repeated.
///
/// # Cancel safety
///
/// As [`sweep_uploads`].
pub async fn step<A: Assets>(pool: &PgPool, assets: &A, batch: i64) -> Result<Step, ProjectError> {
    let mut tx = begin(pool).await?;
    let Some(project): Option<i64> = sqlx::query_scalar(NEXT_JOB).fetch_optional(&mut *tx).await? else {
        return Ok(Step::Idle);
    };
    let due = sqlx::query_as(DUE_ASSETS).bind(project).bind(batch).fetch_all(&mut *tx).await?;
    let mut done = Step::Deleted(remove(&mut tx, assets, due).await?);
    if done == Step::Deleted(0) && changed(&mut tx, POSTPONE, project).await? == 1 {
        done = Step::Postponed(project);
    }
    if done == Step::Deleted(0) {
        let screens = sqlx::query(DELETE_SCREENS).bind(project).bind(batch).execute(&mut *tx).await?;
        done = Step::Deleted(screens.rows_affected());
    }
    if done == Step::Deleted(0) {
        changed(&mut tx, DELETE_ROOT, project).await?;
        done = Step::Finished(project);
    }
    tx.commit().await?;
    Ok(done)
}

/// Deletes objects from the store, and then their rows, which are only gone with the commit.
async fn remove<A: Assets>(
    tx: &mut PgConnection,
    assets: &A,
    due: Vec<(i64, String)>,
) -> Result<u64, ProjectError> {
    for (_, object) in &due {
        assets.delete(object).await.map_err(ProjectError::assets)?;
    }
    let ids: Vec<i64> = due.into_iter().map(|(id, _)| id).collect();
    Ok(sqlx::query(FORGET).bind(ids).execute(tx).await?.rows_affected())
}

/// Returns an error unless the project is active.
async fn active(tx: &mut PgConnection, owner: i64, project: i64) -> Result<(), ProjectError> {
    match state(tx, owner, project).await? {
        (_, _, true) => Err(ProjectError::NoSuchProject),
        (_, true, false) => Err(ProjectError::Archived),
        (_, false, false) => Ok(()),
    }
}

/// Returns three facts about a project: whether it is on hold, is archived, is being deleted.
async fn state(tx: &mut PgConnection, owner: i64, project: i64) -> Result<(bool, bool, bool), ProjectError> {
    let found = sqlx::query_as(VALIDATE).bind(project).bind(owner).fetch_optional(tx).await?;
    found.ok_or(ProjectError::NoSuchProject)
}

/// Runs a statement on a project. Returns the number of changed rows.
async fn changed(tx: &mut PgConnection, statement: &'static str, project: i64) -> sqlx::Result<u64> {
    Ok(sqlx::query(statement).bind(project).execute(tx).await?.rows_affected())
}
