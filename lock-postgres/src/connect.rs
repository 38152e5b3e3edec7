//! From a configuration to an open connection: URL and environment, credentials, which host and address takes the
//! session, and what is found out about poolers.

pub(crate) mod credentials;
pub(crate) mod libpq;
pub(crate) mod link;
pub(crate) mod probe;
#[cfg(unix)]
pub(crate) mod relay;
pub(crate) mod route;
pub(crate) mod slow_statements;
