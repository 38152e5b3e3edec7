//! A database of a test's own.

use std::collections::BTreeMap;
use std::env;

use sqlx::{Connection as _, PgConnection};
use tokio::sync::{Mutex, OnceCell};

use crate::{Cluster, ClusterOptions, admin, or_panic};

/// Unlike `template1`, nobody can be connected to this one, which would be an error (55006).
pub(crate) const EMPTY: &str = "TEMPLATE template0";

/// A new, empty database, which no other test uses.
#[derive(Debug)]
pub struct Database {
    url: String,
    name: String,
    /// The URL through which it is dropped; `None` where the whole cluster goes away.
    dropped_by: Option<String>,
}

/// A new, empty database: on the server that the variable `DATABASE_URL` names and dropped at the end, or
/// else on the cluster of this process.
///
/// # Panics
///
/// When there is no server (see [`Cluster::start`]) or it refuses.
///
/// # Cancel safety
///
/// Dropping it leaves the servers as they are at that moment; they end with their values.
pub async fn fresh_database() -> Database {
    match given() {
        Some(url) => Database::create(&url, EMPTY, true).await,
        None => Cluster::shared().fresh_database().await,
    }
}

/// As [`fresh_database`], with what `script` makes in it: run once for a process on a cluster of its own, and copied.
///
/// # Panics
///
/// As [`fresh_database`].
///
/// # Cancel safety
///
/// As [`fresh_database`].
pub async fn prepared_database(script: &str) -> Database {
    /// Scripts, and the databases that they were run in.
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

/// A cluster of a test's own, for tests that restart it, with a database in which `script` has made what it makes. `role` may
/// log in there, and is its [user](Database::used_by).
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

/// A role that may log in, and nothing else: for databases that are [used by](Database::used_by) it. With `DATABASE_URL` it
/// is the user there.
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

/// The server that the tests are to use.
fn given() -> Option<String> {
    env::var("DATABASE_URL").ok().filter(|url| !url.is_empty())
}

fn parsed(url: &str) -> url::Url {
    or_panic(url::Url::parse(url).map_err(|error| format!("the server's URL does not parse: {error}")))
}

impl Database {
    /// `like`: what it is made of, and how.
    pub(crate) async fn create(admin_url: &str, like: &str, is_dropped: bool) -> Self {
        let mut url = parsed(admin_url);
        let name = format!("test_{}", uuid::Uuid::new_v4().simple());
        let sql = format!("CREATE DATABASE {name} {like}");
        or_panic(admin::rows(admin_url.to_owned(), sql, Vec::new()).await);
        url.set_path(&name);
        Self { url: url.into(), name, dropped_by: is_dropped.then(|| admin_url.to_owned()) }
    }

    /// The URL of this database: as superuser of a private cluster, as the user of `DATABASE_URL`, or as the role that it is
    /// [used by](Self::used_by).
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The same, with a URL of that role, which the server asks for no password.
    #[must_use]
    pub fn used_by(mut self, role: &str) -> Self {
        let mut url = parsed(&self.url);
        // Refused only for URLs without a host.
        let _ = url.set_username(role);
        self.url = url.into();
        self
    }

    /// Its name, which needs no quotes.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A new connection, on the caller's runtime.
    ///
    /// # Panics
    ///
    /// When the server refuses it.
    ///
    /// # Cancel safety
    ///
    /// Dropping it leaves the servers as they are at that moment; they end with their values.
    pub async fn connect(&self) -> PgConnection {
        or_panic(PgConnection::connect(&self.url).await.map_err(|error| format!("cannot connect: {error}")))
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let Some(url) = self.dropped_by.take() else { return };
        let sql = format!("DROP DATABASE {} WITH (FORCE)", self.name);
        // In a thread, because this one may drive a runtime, which must not block on another.
        let dropped = std::thread::spawn(move || admin::rows_blocking(&url, sql, Vec::new())).join();
        if let Ok(Err(message)) = dropped {
            eprintln!("a database of the tests stays: {message}");
        }
    }
}
