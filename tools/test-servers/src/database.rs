//! A database per test.

use std::collections::BTreeMap;
use std::env;

use sqlx::{Connection as _, PgConnection};
use tokio::sync::{Mutex, OnceCell};

use crate::{Cluster, ClusterOptions, admin, or_panic};

/// Uses `template0`, because a connection to `template1` would cause an error (55006).
pub(crate) const EMPTY: &str = "TEMPLATE template0";

/// A new, empty database, used by one test only.
#[derive(Debug)]
pub struct Database {
    url: String,
    name: String,
    /// URL of the connection that drops the database. `None` if the whole cluster is removed.
    dropped_by: Option<String>,
}

/// Creates an empty database. If the variable `DATABASE_URL` is set, it is on that server and is dropped at the end.
/// Otherwise it is on the cluster of this process.
///
/// # Panics
///
/// If no server can be started (see [`Cluster::start`]) or the server refuses.
///
/// # Cancel safety
///
/// If dropped, the servers stay in their current state until their values are dropped.
pub async fn fresh_database() -> Database {
    match given() {
        Some(url) => Database::create(&url, EMPTY, true).await,
        None => Cluster::shared().fresh_database().await,
    }
}

/// Creates a database as [`fresh_database`] does, with the objects that `script` creates. On a private cluster, the
/// script runs once per process, and the result is copied.
///
/// # Panics
///
/// As [`fresh_database`].
///
/// # Cancel safety
///
/// As [`fresh_database`].
pub async fn prepared_database(script: &str) -> Database {
    /// Scripts with the databases in which they have run.
    static PREPARED: Mutex<BTreeMap<String, String>> = Mutex::const_new(BTreeMap::new());
    if given().is_some() {
        let database = fresh_database().await;
        or_panic(admin::script(database.url.clone(), script.to_owned()).await);
        return database;
    }
    let cluster = Cluster::shared();
    let mut prepared = PREPARED.lock().await;
    let template = match prepared.get(script) {
        Some(known) => known.clone(),
        None => {
            let template = cluster.fresh_database().await;
            or_panic(admin::script(template.url.clone(), script.to_owned()).await);
            prepared.entry(script.to_owned()).or_insert_with(|| template.name.clone()).clone()
        }
    };
    drop(prepared);
    cluster.copy_of(&template).await
}

/// Starts a separate cluster, for tests that restart it, with a database in which `script` has run. `role` can log in
/// there and is its [user](Database::used_by).
///
/// # Panics
///
/// As [`Cluster::start`].
///
/// # Cancel safety
///
/// As [`fresh_database`].
pub async fn prepared_cluster(role: &str, script: &str) -> (Cluster, Database) {
    let cluster = admin::blocking(|| Cluster::start(ClusterOptions::new())).await;
    cluster.run_sql("postgres", format!("CREATE ROLE {role} LOGIN")).await;
    let database = cluster.fresh_database().await;
    cluster.run_sql(&database.name, script).await;
    (cluster, database.used_by(role))
}

/// Returns a role with only the right to log in, for databases [used by](Database::used_by) it. With `DATABASE_URL`
/// it is the user of that URL.
///
/// # Panics
///
/// As [`fresh_database`].
///
/// # Cancel safety
///
/// As [`fresh_database`].
pub async fn ordinary_role() -> String {
    const NAME: &str = "ordinary";
    static CREATED: OnceCell<()> = OnceCell::const_new();
    if let Some(url) = given() {
        return parsed(&url).username().to_owned();
    }
    let create = || Cluster::shared().run_sql("postgres", format!("CREATE ROLE {NAME} LOGIN"));
    CREATED.get_or_init(create).await;
    NAME.to_owned()
}

/// Returns the URL of the server given for the tests.
fn given() -> Option<String> {
    env::var("DATABASE_URL").ok().filter(|url| !url.is_empty())
}

fn parsed(url: &str) -> url::Url {
    or_panic(url::Url::parse(url).map_err(|error| format!("the server's URL does not parse: {error}")))
}

impl Database {
    /// Creates a database. `like` is the clause for its template and strategy.
    pub(crate) async fn create(admin_url: &str, like: &str, is_dropped: bool) -> Self {
        let mut url = parsed(admin_url);
        let name = format!("test_{}", uuid::Uuid::new_v4().simple());
        let sql = format!("CREATE DATABASE {name} {like}");
        or_panic(admin::rows(admin_url.to_owned(), sql, Vec::new()).await);
        url.set_path(&name);
        Self { url: url.into(), name, dropped_by: is_dropped.then(|| admin_url.to_owned()) }
    }

    /// Returns the URL of this database: as superuser of a private cluster, as the user of `DATABASE_URL`, or as the
    /// role that it is [used by](Self::used_by).
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Returns `HOST:PORT` of the server, for a [`crate::Proxy`].
    #[must_use]
    pub fn address(&self) -> String {
        let url = parsed(&self.url);
        format!("{}:{}", url.host_str().unwrap_or("127.0.0.1"), url.port().unwrap_or(5432))
    }

    /// Returns the database with a URL of that role, which needs no password.
    #[must_use]
    pub fn used_by(mut self, role: &str) -> Self {
        let mut url = parsed(&self.url);
        // Fails only for URLs without a host.
        let _ = url.set_username(role);
        self.url = url.into();
        self
    }

    /// Returns the database's name, which needs no quotes in SQL.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Opens a connection on the caller's runtime.
    ///
    /// # Panics
    ///
    /// If the server refuses it.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn connect(&self) -> PgConnection {
        or_panic(PgConnection::connect(&self.url).await.map_err(|error| format!("cannot connect: {error}")))
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let Some(url) = self.dropped_by.take() else { return };
        let sql = format!("DROP DATABASE {} WITH (FORCE)", self.name);
        // Uses a thread, because this one might drive a runtime, which must not block on another runtime.
        let dropped = std::thread::spawn(move || admin::rows_blocking(&url, sql, Vec::new())).join();
        if let Ok(Err(message)) = dropped {
            eprintln!("a database of the tests stays: {message}");
        }
    }
}
