//! The setup of an etcd cluster.

use std::time::Duration;

use super::certificates::Certificates;

/// The shortest interval of heartbeats of members that sync their disks. A busy disk takes a second, and an election after
/// a second would replace a healthy leader.
const DURABLE: Duration = Duration::from_millis(250);

/// The program of the members.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EtcdProgram {
    /// The newest one, which comes with a crate.
    Vendored,
    /// The one installed on this machine, for example Debian's 3.4.
    Installed,
}

/// The setup of a cluster.
#[derive(Debug, Clone)]
pub struct EtcdOptions {
    pub(super) members: usize,
    pub(super) program: EtcdProgram,
    pub(super) heartbeat: Duration,
    pub(super) durable: bool,
    pub(super) certificates: Option<Certificates>,
    pub(super) clients_have_certificates: bool,
    pub(super) arguments: Vec<String>,
}

impl EtcdOptions {
    /// Creates one member that elects itself at once and does not wait for its disk. The shortest TTL is a second.
    ///
    /// The variable `LEASEHOLD_ETCD=installed` selects the machine's own program for all clusters that do not choose.
    #[must_use]
    pub fn new() -> Self {
        let installed = std::env::var_os("LEASEHOLD_ETCD").is_some_and(|value| value == "installed");
        Self {
            members: 1,
            program: if installed { EtcdProgram::Installed } else { EtcdProgram::Vendored },
            heartbeat: Duration::from_millis(10),
            durable: false,
            certificates: None,
            clients_have_certificates: false,
            arguments: Vec::new(),
        }
    }

    /// Creates three members with etcd's usual timing (heartbeat 100 ms, election 1 s). The shortest TTL is 2 s.
    #[must_use]
    pub fn three() -> Self {
        Self { members: 3, ..Self::new() }.heartbeat(Duration::from_millis(100))
    }

    /// Selects the program.
    #[must_use]
    pub fn program(mut self, program: EtcdProgram) -> Self {
        self.program = program;
        self
    }

    /// Sets the interval of heartbeats. An election starts after ten of them. The shortest TTL is fifteen of them,
    /// rounded up to seconds.
    #[must_use]
    pub fn heartbeat(mut self, interval: Duration) -> Self {
        self.heartbeat = interval;
        self
    }

    /// Waits for the disk at every proposal, as in production. An election starts after 2.5 s at the earliest, so the
    /// shortest TTL is at least 4 s.
    #[must_use]
    pub fn durable(mut self) -> Self {
        self.durable = true;
        self.heartbeat = self.heartbeat.max(DURABLE);
        self
    }

    /// Limits the size of the database, after which writes are refused (`NOSPACE`).
    #[must_use]
    pub fn quota(self, bytes: u64) -> Self {
        self.argument("--quota-backend-bytes").argument(bytes.to_string())
    }

    /// Sets the life of a token of authentication, from its last use.
    #[must_use]
    pub fn token_ttl(self, seconds: u32) -> Self {
        self.argument("--auth-token-ttl").argument(seconds.to_string())
    }

    /// Keeps only this many revisions, by a compaction every five minutes.
    #[must_use]
    pub fn auto_compaction(self, revisions: u32) -> Self {
        let arguments = ["--auto-compaction-mode", "revision", "--auto-compaction-retention"];
        arguments.into_iter().fold(self, Self::argument).argument(revisions.to_string())
    }

    /// Encrypts the connections of clients with these certificates.
    #[must_use]
    pub fn encrypted(mut self, certificates: Certificates) -> Self {
        self.certificates = Some(certificates);
        self
    }

    /// Requires certificates of clients too, with [`Self::encrypted`].
    #[must_use]
    pub fn client_certificates(mut self) -> Self {
        self.clients_have_certificates = true;
        self
    }

    /// Adds an argument of the command line. Later arguments override earlier ones.
    #[must_use]
    pub fn argument(mut self, argument: impl Into<String>) -> Self {
        self.arguments.push(argument.into());
        self
    }
}

impl Default for EtcdOptions {
    fn default() -> Self {
        Self::new()
    }
}
