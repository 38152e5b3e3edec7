//! The settings of one client.

mod address;
mod credentials;
mod tls;
mod url;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use leasehold_api::Error;
use leasehold_engine::Engine;

pub(crate) use address::Address;
pub use credentials::EtcdCredentials;
pub use tls::EtcdTls;
pub(crate) use url::read;

use crate::backend::EtcdBackend;
use crate::error::invalid;

/// The default TTL of a grant: 30 s, renewed every 10 s.
pub const DEFAULT_TTL: Duration = Duration::from_secs(30);

/// The longest TTL: an hour, because a dead holder's key stays locked for up to its TTL. The server has the shortest one,
/// 2 s by default.
pub const MAX_TTL: Duration = Duration::from_secs(3600);

/// The prefix of a URL without one.
pub(crate) const DEFAULT_PREFIX: &str = "leasehold";

/// The most bytes of a prefix.
const MAX_PREFIX: usize = 256;

/// The most members of one cluster. etcd advises at most seven.
const MAX_MEMBERS: usize = 32;

/// Connects to the cluster that `url` names, as [`EtcdConfig::from_url`] reads it.
///
/// # Errors
///
/// See [`EtcdConfig::from_url`] and [`EtcdConfig::connect`].
///
/// # Cancel safety
///
/// If dropped, the call closes the connections it has opened.
pub async fn connect(url: &str) -> Result<Engine, Error> {
    EtcdConfig::from_url(url)?.connect().await
}

/// The settings of one client.
#[derive(Clone)]
pub struct EtcdConfig {
    members: Vec<String>,
    pub(crate) prefix: String,
    pub(crate) ttl: Duration,
    pub(crate) credentials: Option<EtcdCredentials>,
    pub(crate) tls: Option<EtcdTls>,
    pub(crate) handover: bool,
    /// Whether the client only reads and releases. Its connect writes nothing.
    pub(crate) look_only: bool,
}

impl EtcdConfig {
    /// Creates the settings for a cluster. Each member is a `host` or a `host:port` of its client URL, with 2379 as the
    /// default port. All keys of the store begin with `prefix` and a slash. Clients lock against each other if their cluster
    /// and prefix are the same.
    pub fn new<M: Into<String>>(members: impl IntoIterator<Item = M>, prefix: impl Into<String>) -> Self {
        Self {
            members: members.into_iter().map(Into::into).collect(),
            prefix: prefix.into(),
            ttl: DEFAULT_TTL,
            credentials: None,
            tls: None,
            handover: true,
            look_only: false,
        }
    }

    /// Reads `etcd://[user:password@]host1,host2:port,host3/prefix?ttl=30s&handover=off`. The scheme `etcds` stands for TLS,
    /// with the parameters `ca`, `cert` and `key`, the paths of PEM files. A URL without a prefix means `leasehold`.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](leasehold_api::ErrorKind::InvalidOption) if `url` is not the URL of a cluster. The error does not
    /// repeat the URL.
    pub fn from_url(url: &str) -> Result<Self, Error> {
        read(&url::split(url)?)
    }

    /// Sets the TTL of grants without an explicit one, up to [`MAX_TTL`]. The server counts in whole seconds, so a TTL is
    /// rounded up.
    #[must_use]
    pub const fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// Sets the user and the password, for a cluster with authentication.
    #[must_use]
    pub fn credentials(self, user: impl Into<String>, password: impl Into<String>) -> Self {
        self.credentials_from(EtcdCredentials::new(user, password))
    }

    /// Sets the source of user and password, for example a callback for passwords that change.
    #[must_use]
    pub fn credentials_from(mut self, credentials: EtcdCredentials) -> Self {
        self.credentials = Some(credentials);
        self
    }

    /// Connects with TLS. Needs one of the cargo features `tls-rustls-*`.
    #[must_use]
    pub fn tls(mut self, tls: EtcdTls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Sets whether callers of this client pass a hold to each other for a short time, without the server. By default
    /// they do.
    #[must_use]
    pub const fn handover(mut self, on: bool) -> Self {
        self.handover = on;
        self
    }

    /// Connects to the cluster, without an engine.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](leasehold_api::ErrorKind::InvalidOption) for settings that cannot be used, and for a TTL below
    /// the server's minimum. [`Unavailable`](leasehold_api::ErrorKind::Unavailable) if no member replies.
    /// [`Unsupported`](leasehold_api::ErrorKind::Unsupported) for a server other than etcd 3.4 or newer, and for a
    /// version with a fault that damages its data. [`PermissionDenied`](leasehold_api::ErrorKind::PermissionDenied) for a
    /// wrong user or password, or without a right to the prefix.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the call closes the connections it has opened.
    pub async fn backend(&self) -> Result<EtcdBackend, Error> {
        EtcdBackend::connect(self).await
    }

    /// Connects and starts an engine on the current tokio runtime.
    ///
    /// # Errors
    ///
    /// See [`backend`](Self::backend). Also [`NoRuntime`](leasehold_api::ErrorKind::NoRuntime) outside of a tokio
    /// runtime.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the call closes the connections it has opened.
    pub async fn connect(&self) -> Result<Engine, Error> {
        Engine::start(self.backend().await?)
    }

    /// Checks the settings and returns the addresses of the members, each once.
    pub(crate) fn addresses(&self) -> Result<Vec<Address>, Error> {
        let (prefix, length) = (&self.prefix, self.prefix.len());
        let has_empty_part = prefix.contains("//") || prefix.ends_with('/');
        if length == 0 || length > MAX_PREFIX || prefix.contains('\0') || has_empty_part {
            return Err(invalid(
                "the prefix of an etcd store has 1 to 256 bytes, no NUL, no two slashes in a row and none at its end; name another one",
            ));
        }
        if self.ttl.is_zero() || self.ttl > MAX_TTL {
            return Err(invalid("the TTL of an etcd store is at most an hour, and more than zero"));
        }
        if self.members.is_empty() || self.members.len() > MAX_MEMBERS {
            return Err(invalid("name 1 to 32 members of the etcd cluster, each as host or host:port"));
        }
        let mut addresses: Vec<Address> = Vec::with_capacity(self.members.len());
        for member in &self.members {
            let address = Address::parse(member)?;
            if addresses.contains(&address) {
                return Err(invalid(format!("the member {address} is named twice; leave one out")));
            }
            addresses.push(address);
        }
        Ok(addresses)
    }

    /// Returns the name of the store for errors, which contains no password.
    pub(crate) fn store(&self) -> Arc<str> {
        let scheme = if self.tls.is_some() { "etcds" } else { "etcd" };
        format!("{scheme}://{}/{}", self.members.join(","), self.prefix).into()
    }
}

/// Shows no password.
impl fmt::Debug for EtcdConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdConfig")
            .field("members", &self.members)
            .field("prefix", &self.prefix)
            .field("ttl", &self.ttl)
            .field("credentials", &self.credentials)
            .field("tls", &self.tls)
            .field("handover", &self.handover)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
