//! A `PgBouncer` in front of a cluster.

use std::fmt::Write as _;

use rustix::process::Signal;
use test_setup::programs;

use crate::guarded::Guarded;
use crate::user::Medium;
use crate::{Cluster, Outcome, or_panic, port::Port};

/// The pooling of a `PgBouncer`. Other options keep their defaults, because tests must run into the same refusals as
/// users.
#[derive(Debug, Clone, Default)]
pub struct PgBouncerOptions {
    settings: Vec<(String, String)>,
}

impl PgBouncerOptions {
    /// Creates options for transaction pooling.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Gives each transaction the least recently used server connection, instead of the most recently used.
    #[must_use]
    pub fn round_robin(self) -> Self {
        self.setting("server_round_robin", "1")
    }

    /// Sets the maximum number of connections per database of the server.
    #[must_use]
    pub fn pool_size(self, connections: u32) -> Self {
        self.setting("default_pool_size", connections.to_string())
    }

    /// Adds a line to `pgbouncer.ini`. The last line of a name wins.
    #[must_use]
    pub fn setting(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.settings.push((name.into(), value.into()));
        self
    }

    fn configuration(&self, cluster: &Cluster, port: u16) -> String {
        let password =
            cluster.password().map(|password| format!(" password='{}'", password.replace('\'', "''")));
        let mut text = format!(
            "[databases]\n* = host=127.0.0.1 port={} user=postgres{}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
             listen_port = {port}\nunix_socket_dir =\npidfile = pgbouncer.pid\nauth_type = any\n\
             pool_mode = transaction\nmax_client_conn = 500\n",
            cluster.port(),
            password.unwrap_or_default(),
        );
        for (name, value) in &self.settings {
            // Writing into a String cannot fail.
            let _ = writeln!(text, "{name} = {value}");
        }
        text
    }
}

/// A `PgBouncer`. It ends when its value is dropped or this process ends in any way.
#[derive(Debug)]
pub struct PgBouncer {
    process: Guarded,
    port: Port,
}

impl PgBouncer {
    /// Starts a pooler in transaction mode.
    ///
    /// # Panics
    ///
    /// If `pgbouncer` is missing (the message names the package to install) or fails.
    #[track_caller]
    #[must_use]
    pub fn transaction_mode(cluster: &Cluster) -> Self {
        Self::start(cluster, &PgBouncerOptions::new())
    }

    /// Starts a pooler with options.
    ///
    /// # Panics
    ///
    /// As [`Self::transaction_mode`].
    #[track_caller]
    #[must_use]
    pub fn start(cluster: &Cluster, options: &PgBouncerOptions) -> Self {
        or_panic(Self::try_start(cluster, options))
    }

    fn try_start(cluster: &Cluster, options: &PgBouncerOptions) -> Outcome<Self> {
        let program = programs::pgbouncer()?;
        let mut process = Guarded::new("leasehold-pgbouncer-", "pgbouncer.pid", Medium::Disk)?;
        for _ in 0..10 {
            let port = Port::reserve();
            process.write("pgbouncer.ini", &options.configuration(cluster, port.number()))?;
            let is_up = |process: &Guarded| process.log().contains("process up");
            match process.start(&program, &["pgbouncer.ini".to_owned()], is_up) {
                Ok(()) => return Ok(Self { process, port }),
                // Retries with another port, because another process took this one.
                Err(message) if message.contains("ddress already in use") => {}
                Err(message) => return Err(message),
            }
        }
        Err("ten random ports were taken one after the other".to_owned())
    }

    /// Returns the URL of a database through this pooler.
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        format!("postgres://postgres@127.0.0.1:{}/{database}", self.port.number())
    }

    /// Returns `127.0.0.1:PORT`, for a [`crate::Proxy`].
    #[must_use]
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port.number())
    }

    /// Returns the pooler's TCP port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// Freezes the pooler. Connections stay open without forwarding.
    pub fn pause(&self) {
        self.process.signal(Signal::STOP);
    }

    /// Ends [`Self::pause`].
    pub fn resume(&self) {
        self.process.signal(Signal::CONT);
    }
}
