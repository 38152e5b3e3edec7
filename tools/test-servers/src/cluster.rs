//! A private Postgres cluster.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use rustix::process::{Pid, Signal};
use test_setup::programs;

use crate::database::EMPTY;
use crate::guarded::{Guarded, send};
use crate::user::Medium;
use crate::{Database, Outcome, admin, fresh, observe, or_panic, port::Port};

/// The way to stop a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopMode {
    /// Waits until all clients have disconnected, at most two minutes.
    Smart,
    /// Ends all sessions, rolls back their transactions, and writes a checkpoint.
    Fast,
    /// Ends at once. The next start recovers, which empties unlogged tables.
    Immediate,
}

/// The setup of a cluster.
#[derive(Debug, Clone, Default)]
pub struct ClusterOptions {
    durable: bool,
    password: Option<String>,
    tls: Option<(String, String)>,
    settings: Vec<(String, String)>,
    environment: Vec<(String, String)>,
}

impl ClusterOptions {
    /// Creates the defaults: a quick start that skips authentication and the wait for the disk.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Waits for the disk at every commit, as in production. For benchmarks.
    #[must_use]
    pub fn durable(mut self) -> Self {
        self.durable = true;
        self
    }

    /// Requires this password of the user `postgres`, by SCRAM. URLs of the cluster contain it.
    #[must_use]
    pub fn password(mut self, password: impl Into<String>) -> Self {
        self.password = Some(password.into());
        self
    }

    /// Offers encrypted connections with this certificate and its key, both in PEM. Unencrypted connections are
    /// accepted too.
    #[must_use]
    pub fn tls(mut self, certificate: impl Into<String>, key: impl Into<String>) -> Self {
        self.tls = Some((certificate.into(), key.into()));
        self
    }

    /// Adds a line to `postgresql.conf`. Later lines override earlier ones and this crate's defaults.
    #[must_use]
    pub fn setting(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.settings.push((name.into(), value.into()));
        self
    }

    /// Adds an environment variable for the processes of the server and of its standbys.
    #[must_use]
    pub fn variable(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.environment.push((name.into(), value.into()));
        self
    }

    fn configuration(&self) -> String {
        let mut settings = vec![
            // A store that uses a connection per lock is tested with hundreds of locks.
            ("max_connections", "1000"),
            ("max_prepared_transactions", "4"),
            ("wal_level", "replica"),
            ("max_wal_senders", "8"),
            // Keeps WAL after checkpoints, because a standby is copied without a replication slot.
            ("wal_keep_size", "512MB"),
            ("hot_standby", "on"),
            ("shared_buffers", "64MB"),
            ("timezone", "UTC"),
            ("log_line_prefix", "%m [%p] %a "),
        ];
        if !self.durable {
            settings.extend([("fsync", "off"), ("full_page_writes", "off")]);
        }
        if self.tls.is_some() {
            settings.extend([("ssl", "on"), ("ssl_cert_file", "server.crt"), ("ssl_key_file", "server.key")]);
        }
        let own = self.settings.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let line = |(name, value): (&str, &str)| format!("{name} = '{}'\n", value.replace('\'', "''"));
        settings.into_iter().chain(own).map(line).collect()
    }
}

/// A Postgres server with its own data. It ends when its value is dropped or this process ends in any way.
#[derive(Debug)]
pub struct Cluster {
    server: Arc<Mutex<Server>>,
    port: Port,
    password: Option<String>,
}

#[derive(Debug)]
struct Server {
    process: Guarded,
    program: PathBuf,
}

impl Cluster {
    /// Returns the cluster of this process. The first call starts it, which blocks for about a second.
    ///
    /// # Panics
    ///
    /// As [`Cluster::start`].
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<Cluster> = OnceLock::new();
        SHARED.get_or_init(|| Self::start(ClusterOptions::new()))
    }

    /// Starts a separate cluster, for tests that stop or configure it. Blocks for about a second.
    ///
    /// # Panics
    ///
    /// If the server binaries are missing (the message names the package to install) or fail.
    #[track_caller]
    #[must_use]
    pub fn start(options: ClusterOptions) -> Self {
        or_panic(Self::try_start(&options))
    }

    fn try_start(options: &ClusterOptions) -> Outcome<Self> {
        let binaries = programs::postgres()?;
        let medium = if options.durable { Medium::Disk } else { Medium::Memory };
        let process = Guarded::new("leasehold-pg-", "data/postmaster.pid", medium)?
            .with_environment(options.environment.clone());
        if let Some(password) = &options.password {
            process.write("password", password)?;
        }
        fresh::data(&process, &binaries, options.password.is_some())?;
        if let Some((certificate, key)) = &options.tls {
            process.write("data/server.crt", certificate)?;
            process.write_secret("data/server.key", key)?;
        }
        let configuration = process.directory().join("data/postgresql.conf");
        let known = fs::read_to_string(&configuration)
            .map_err(|error| format!("cannot read {}: {error}", configuration.display()))?;
        process.write("data/postgresql.conf", &(known + &options.configuration()))?;
        Self::launch(process, &binaries, options.password.clone())
    }

    /// Starts a server on the data in the directory, on a free port.
    pub(crate) fn launch(process: Guarded, binaries: &Path, password: Option<String>) -> Outcome<Self> {
        let mut server = Server { process, program: binaries.join("postgres") };
        for _ in 0..10 {
            let port = Port::reserve();
            match server.start(port.number()) {
                Ok(()) => return Ok(Self { server: Arc::new(Mutex::new(server)), port, password }),
                // Retries with another port, because another process took this one.
                Err(message) if message.contains("could not create any TCP/IP sockets") => {}
                Err(message) => return Err(message),
            }
        }
        Err("ten random ports were taken one after the other".to_owned())
    }

    /// Returns the URL of a database as superuser, over TCP.
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        // The `url` type percent-encodes names and passwords.
        let mut url = or_panic(
            url::Url::parse(&format!("postgres://postgres@127.0.0.1:{}/", self.port.number()))
                .map_err(|error| format!("a URL of ours does not parse: {error}")),
        );
        url.set_path(database);
        // Fails only for URLs without a host.
        let _ = url.set_password(self.password.as_deref());
        url.into()
    }

    /// Returns the URL of the database `postgres`.
    #[must_use]
    pub fn admin_url(&self) -> String {
        self.url("postgres")
    }

    /// Returns `127.0.0.1:PORT`, for a [`crate::Proxy`].
    #[must_use]
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port.number())
    }

    /// Returns the TCP port, which stays the same over restarts.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// Returns the directory of the Unix socket, for connections without TCP.
    #[must_use]
    pub fn socket_directory(&self) -> PathBuf {
        self.lock().process.directory().to_owned()
    }

    /// Returns the pid of the postmaster, or `None` while it is stopped.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        let pid = self.lock().process.pid()?;
        u32::try_from(pid.as_raw_nonzero().get()).ok()
    }

    /// Returns the server's log.
    #[must_use]
    pub fn log(&self) -> String {
        self.lock().process.log()
    }

    /// Creates an empty database in this cluster. It stays until the cluster ends.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn fresh_database(&self) -> Database {
        self.database_like(EMPTY).await
    }

    /// Copies a database of this cluster that has no connections.
    pub(crate) async fn copy_of(&self, template: &str) -> Database {
        self.database_like(&format!("TEMPLATE {template}")).await
    }

    async fn database_like(&self, like: &str) -> Database {
        let version = self.lock().process.directory().join("data/PG_VERSION");
        let major: Option<u32> = fs::read_to_string(version).ok().and_then(|text| text.trim().parse().ok());
        // Uses `file_copy`, because it takes half the work without waiting for the disk. Since PostgreSQL 15 the
        // default writes everything to the WAL.
        let strategy = if major >= Some(15) { " STRATEGY file_copy" } else { "" };
        Database::create(&self.admin_url(), &format!("{like}{strategy}"), false).await
    }

    /// Runs an SQL script as superuser.
    ///
    /// # Panics
    ///
    /// If the server refuses it.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn run_sql(&self, database: &str, sql: impl Into<String>) {
        or_panic(admin::script(self.url(database), sql.into()).await);
    }

    /// Queries one number as superuser.
    ///
    /// # Panics
    ///
    /// If the server refuses the statement, or returns anything except one `bigint`.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn number(&self, database: &str, sql: impl Into<String>) -> i64 {
        or_panic(admin::rows(self.url(database), sql.into(), Vec::new()).await.and_then(admin::first))
    }

    /// Returns the client sessions of a database, without the observing one.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn backends(&self, database: &str) -> Vec<crate::Backend> {
        or_panic(observe::backends(&self.admin_url(), database).await)
    }

    /// Returns the advisory locks held or awaited in a database.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn advisory_locks(&self, database: &str) -> Vec<crate::AdvisoryLock> {
        or_panic(observe::advisory_locks(&self.admin_url(), database).await)
    }

    /// Stops the server and waits until all its processes have ended. Data and port stay.
    ///
    /// # Panics
    ///
    /// If it takes more than two minutes.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn stop(&self, mode: StopMode) {
        let signal = match mode {
            StopMode::Smart => Signal::TERM,
            StopMode::Fast => Signal::INT,
            StopMode::Immediate => Signal::QUIT,
        };
        self.change(move |server, _| server.process.end(signal)).await;
    }

    /// Kills the postmaster, as a crash of the machine does, and waits until its children have ended.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn kill_postmaster(&self) {
        self.change(|server, _| server.process.end(Signal::KILL)).await;
    }

    /// Starts the stopped server on the same port.
    ///
    /// # Panics
    ///
    /// If it does not start. The message contains its log.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn start_again(&self) {
        self.change(Server::start).await;
    }

    /// Stops and starts the server.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn restart(&self, mode: StopMode) {
        self.stop(mode).await;
        self.start_again().await;
    }

    /// Sends a signal to one process of this server, by its pid in `pg_stat_activity` or [`Self::backends`].
    ///
    /// After SIGKILL the postmaster ends all other sessions too, and recovers.
    #[track_caller]
    pub fn kill_backend(&self, pid: i32, signal: Signal) {
        let server = self.lock();
        let family = server.family();
        let known = family.iter().find(|process| process.as_raw_nonzero().get() == pid);
        match known {
            Some(process) => send(*process, signal),
            None => panic!("{pid} is no process of this server"),
        }
    }

    /// Freezes the server. Connections stay open without replies.
    pub fn pause(&self) {
        let server = self.lock();
        // Stops the postmaster first, because it could start children during the scan.
        server.process.signal(Signal::STOP);
        for process in server.family() {
            send(process, Signal::STOP);
        }
    }

    /// Ends [`Self::pause`].
    pub fn resume(&self) {
        self.lock().resume();
    }

    /// Limits the size of every file that the server writes (EFBIG), as a full disk does. Lasts until the next start
    /// of the server. Blocks for some milliseconds.
    ///
    /// # Panics
    ///
    /// If `prlimit` (util-linux) is missing.
    #[track_caller]
    pub fn limit_files(&self, bytes: u64) {
        let server = self.lock();
        // Limits the postmaster first, because its later children inherit the limit.
        for process in server.family() {
            let pid = process.as_raw_nonzero().to_string();
            let limited = server.process.run(Path::new("prlimit"), |command| {
                command.args(["--pid", &pid, &format!("--fsize={bytes}:{bytes}")]);
            });
            // The child might have ended.
            if server.family().contains(&process) {
                or_panic(limited);
            }
        }
    }

    pub(crate) fn environment(&self) -> Vec<(String, String)> {
        self.lock().process.environment().to_owned()
    }

    pub(crate) fn password(&self) -> Option<&str> {
        self.password.as_deref()
    }

    fn lock(&self) -> MutexGuard<'_, Server> {
        self.server.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs blocking work on the server beside the caller's runtime. The work completes even if the caller is
    /// dropped.
    async fn change(&self, work: impl FnOnce(&mut Server, u16) -> Outcome + Send + 'static) {
        let (server, port) = (self.server.clone(), self.port());
        let done =
            admin::blocking(move || work(&mut server.lock().unwrap_or_else(PoisonError::into_inner), port));
        or_panic(done.await);
    }
}

impl Server {
    fn start(&mut self, port: u16) -> Outcome {
        if self.process.pid().is_some() {
            return Err("the server runs already".to_owned());
        }
        // Set on the command line, because a standby must not copy these settings.
        let arguments = [
            "-D".to_owned(),
            "data".to_owned(),
            "-c".to_owned(),
            format!("port={port}"),
            "-c".to_owned(),
            "listen_addresses=127.0.0.1".to_owned(),
            "-c".to_owned(),
            format!("unix_socket_directories={}", self.process.directory().display()),
        ];
        self.process.start(&self.program, &arguments, is_ready)
    }

    /// Returns the postmaster and its children.
    fn family(&self) -> Vec<Pid> {
        let Some(postmaster) = self.process.pid() else { return Vec::new() };
        let children = observe::children(postmaster);
        std::iter::once(postmaster).chain(children).collect()
    }

    fn resume(&self) {
        for process in self.family() {
            send(process, Signal::CONT);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Resumes the children, because frozen ones cannot end.
        self.resume();
    }
}

/// Returns whether the server is ready. Like `pg_ctl`, reads the state in the eighth line of the lock file.
fn is_ready(process: &Guarded) -> bool {
    let Some(pid) = process.pid() else { return false };
    let text = fs::read_to_string(process.directory().join("data/postmaster.pid")).unwrap_or_default();
    let lines: Vec<_> = text.lines().map(str::trim).collect();
    let is_ours = lines.first().is_some_and(|line| *line == pid.as_raw_nonzero().to_string());
    is_ours && lines.get(7).is_some_and(|status| ["ready", "standby"].contains(status))
}
