//! Real servers for tests: private Postgres clusters, streaming standbys, `PgBouncer`, etcd, and proxies that break
//! connections.
//!
//! Every server runs in its own temporary directory, on loopback, never as root. Its program is the machine's own, or for
//! etcd also the one inside a crate. It ends when the process that started it ends, even by SIGKILL. If the setup fails,
//! the helpers panic with advice, because a test must fail without its server.

mod admin;
mod cluster;
mod database;
mod etcd;
mod fresh;
pub mod growth;
mod guarded;
mod isolation;
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
pub use etcd::{
    Backup, Certificates, Counter, Entry, Etcd, EtcdOptions, EtcdProgram, EtcdUser, Loss, Refusal, Relay,
    Status,
};
pub use isolation::isolationtester;
pub use observe::{AdvisoryLock, Backend};
pub use pgbouncer::{PgBouncer, PgBouncerOptions};
pub use proxy::{Proxy, Traffic};
pub use rustix::process::Signal;
pub use standby::Standby;

/// The result of a setup, with an error message for people.
type Outcome<T = ()> = Result<T, String>;

/// Panics if the setup failed, because the test cannot continue and its output must contain the reason.
#[track_caller]
fn or_panic<T>(outcome: Outcome<T>) -> T {
    match outcome {
        Ok(value) => value,
        Err(message) => panic!("{message}"),
    }
}
