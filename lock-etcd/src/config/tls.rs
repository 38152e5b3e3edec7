//! The settings of TLS.

use std::path::PathBuf;

/// The settings of TLS. By default the client trusts the roots of the cargo feature, checks the names of the members, and
/// shows no certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EtcdTls {
    /// The file of the trusted authorities.
    pub(crate) ca: Option<PathBuf>,
    /// The files of the certificate and of its key.
    pub(crate) identity: Option<(PathBuf, PathBuf)>,
}

impl EtcdTls {
    /// Creates the default settings.
    #[must_use]
    pub const fn new() -> Self {
        Self { ca: None, identity: None }
    }

    /// Trusts the authorities in this PEM file, and no others.
    #[must_use]
    pub fn ca(mut self, file: impl Into<PathBuf>) -> Self {
        self.ca = Some(file.into());
        self
    }

    /// Shows this certificate to the members, for a cluster with `--client-cert-auth`. Both files are PEM.
    #[must_use]
    pub fn identity(mut self, certificate: impl Into<PathBuf>, key: impl Into<PathBuf>) -> Self {
        self.identity = Some((certificate.into(), key.into()));
        self
    }
}
