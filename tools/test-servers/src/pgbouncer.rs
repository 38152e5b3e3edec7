//! A `PgBouncer` in front of a cluster.

use std::fmt::Write as _;

use rustix::process::Signal;
use test_setup::programs;

use crate::guarded::Guarded;
use crate::user::Medium;
use crate::{Cluster, Outcome, or_panic, port};

/// How a `PgBouncer` pools. The options that it leaves out have its own defaults, so that tests meet the
/// refusals that users meet.
#[derive(Debug, Clone, Default)]
pub struct PgBouncerOptions {
    settings: Vec<(String, String)>,
}

impl PgBouncerOptions {
    /// Pools transactions.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Gives each transaction the server connection that was unused for longest, instead of the last used.
    #[must_use]
    pub fn round_robin(self) -> Self {
        self.setting("server_round_robin", "1")
    }

    /// How many connections it opens to a database of the server, at most.
    #[must_use]
    pub fn pool_size(self, connections: u32) -> Self {
        self.setting("default_pool_size", connections.to_string())
    }

    /// One more line of `pgbouncer.ini`; the last one of a name wins.
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

/// A `PgBouncer`, which ends with its value or with this process, however that ends.
#[derive(Debug)]
pub struct PgBouncer {
    process: Guarded,
    port: u16,
}

impl PgBouncer {
    /// Starts one that pools transactions.
    ///
    /// # Panics
    ///
    /// When there is no `pgbouncer` (the message says what to install) or it fails.
    #[track_caller]
    #[must_use]
    pub fn transaction_mode(cluster: &Cluster) -> Self {
        Self::start(cluster, &PgBouncerOptions::new())
    }

    /// Starts one with options.
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
            let port = port::free();
            process.write("pgbouncer.ini", &options.configuration(cluster, port))?;
            let is_up = |process: &Guarded| process.log().contains("process up");
            match process.start(&program, &["pgbouncer.ini".to_owned()], is_up) {
                Ok(()) => return Ok(Self { process, port }),
                // Somebody was quicker.
                Err(message) if message.contains("ddress already in use") => {}
                Err(message) => return Err(message),
            }
        }
        Err("ten random ports were taken one after the other".to_owned())
    }

    /// The URL of a database through this pooler.
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        format!("postgres://postgres@127.0.0.1:{}/{database}", self.port)
    }

    /// `127.0.0.1:PORT`, for a [`crate::Proxy`].
    #[must_use]
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Its TCP port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Freezes it: connections stay open and nothing is forwarded.
    pub fn pause(&self) {
        self.process.signal(Signal::STOP);
    }

    /// Ends [`Self::pause`].
    pub fn resume(&self) {
        self.process.signal(Signal::CONT);
    }
}
