//! Opens connections: URL and environment, credentials, choice of host and address, and pooler detection.

pub(crate) mod credentials;
pub(crate) mod libpq;
pub(crate) mod link;
pub(crate) mod probe;
#[cfg(unix)]
pub(crate) mod relay;
pub(crate) mod route;
pub(crate) mod slow_statements;
