//! Real servers for tests: private Postgres clusters, streaming standbys, `PgBouncer`, and a proxy that
//! breaks connections.
//!
//! Every server runs from the machine's own binaries, in its own temporary directory, on loopback, never as
//! root, and is gone when the process that started it is gone, however that process ends (also by
//! SIGKILL). What cannot be set up panics with what to install or look at: a test that needs a server must
//! not pass without one.

mod admin;
mod cluster;
mod database;
mod fresh;
pub mod growth;
mod guarded;
mod observe;
mod pgbouncer;
mod port;
mod proxy;
pub mod sql;
mod standby;
mod tree;
mod user;

pub use cluster::{Cluster, ClusterOptions, StopMode};
pub use database::{Database, fresh_database, ordinary_role, prepared_cluster, prepared_database};
pub use observe::{AdvisoryLock, Backend};
pub use pgbouncer::{PgBouncer, PgBouncerOptions};
pub use proxy::{Proxy, Traffic};
pub use rustix::process::Signal;
pub use standby::Standby;

/// What went wrong while a server was set up, for people.
type Outcome<T = ()> = Result<T, String>;

/// The end of a failed setup. A test cannot go on, and its output must say why.
#[track_caller]
fn or_panic<T>(outcome: Outcome<T>) -> T {
    match outcome {
        Ok(value) => value,
        Err(message) => panic!("{message}"),
    }
}
