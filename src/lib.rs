#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(feature = "memory", doc = include_str!("../README.md"))]
#![cfg_attr(
    not(feature = "memory"),
    doc = "A pluggable distributed lock: one contract, many stores. See the README."
)]
//!
//! # In domain code
//!
//! Domain code depends on [`Lock`] as `Arc<dyn Lock>`, and [`connect`] chooses the store at start-up. Guards and futures are `Send`, so they go into tasks:
//!
#![cfg_attr(feature = "memory", doc = "```")]
#![cfg_attr(not(feature = "memory"), doc = "```no_run")]
//! use std::sync::Arc;
//! use std::time::Duration;
//! use leasehold::{Error, FencingToken, Lock, LockExt, RunError, WindowOutcome, key};
//!
//! const HOUR: Duration = Duration::from_secs(3600);
//!
//! async fn work(lock: Arc<dyn Lock>) -> Result<(), Error> {
//!     let guard = lock.key(key!["ledger", 42]?).wait(Duration::from_millis(250)).acquire().await?;
//!     spend(guard.token(), 10).await;
//!     guard.release().await?; // lost or unknown is an error; drop is the safety net
//!
//!     // `?` makes an `Error` of a `RunError`, which also has a case for a body that did not run.
//!     let report = lock.key("nightly-report").run(async |guard| build(guard.token()).await).await?;
//!     assert_eq!(report, "built");
//!     match lock.key("deploy").max_hold(HOUR).run(async |guard| build(guard.token()).await).await {
//!         Ok(built) => println!("{built}, and held until the end"),
//!         Err(RunError::NotRun(error)) => println!("not granted, nothing was done: {error}"),
//!         Err(error) => return Err(error.into()), // lost half-way, or perhaps before the end
//!     }
//!
//!     let guards = lock.keys(["acct:1", "acct:2"]).acquire().await?; // ordered, all or nothing
//!     assert!(guards.len() == 2 && guards.validity().is_held()); // one `MultiGuard`
//!     guards.release().await?;
//!
//!     match lock.key("hourly").at_most_once_per(HOUR).run(async |_| ()).await? {
//!         WindowOutcome::Due(()) => println!("ran"),
//!         WindowOutcome::NotDue { retry_after } => println!("not before {retry_after:?} from now"),
//!     }
//!     Ok(())
//! }
//!
//! # async fn spend(_: Option<FencingToken>, _: u32) {}
//! # async fn build(_: Option<FencingToken>) -> &'static str { "built" }
//! # #[tokio::main]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let lock = leasehold::connect("memory:").await?;
//! tokio::spawn(work(lock)).await??;
//! # Ok(())
//! # }
//! ```
//!
//! and into handlers written with `async_trait`:
//!
#![cfg_attr(feature = "memory", doc = "```")]
#![cfg_attr(not(feature = "memory"), doc = "```no_run")]
//! use std::sync::Arc;
//! use leasehold::{Error, Lock, LockExt, async_trait};
//!
//! #[async_trait]
//! trait Handler: Send + Sync {
//!     async fn handle(&self, account: u32) -> Result<u64, Error>;
//! }
//!
//! struct Spend {
//!     lock: Arc<dyn Lock>,
//! }
//!
//! #[async_trait]
//! impl Handler for Spend {
//!     async fn handle(&self, account: u32) -> Result<u64, Error> {
//!         let guard = self.lock.key(format!("acct:{account}")).acquire().await?;
//!         let token = guard.token().map_or(0, |token| token.as_u64());
//!         guard.release().await?;
//!         Ok(token)
//!     }
//! }
//!
//! # #[tokio::main]
//! # async fn main() -> Result<(), Error> {
//! let handler = Spend { lock: leasehold::connect("memory:").await? };
//! assert!(handler.handle(1).await? < handler.handle(1).await?, "tokens grow");
//! # Ok(())
//! # }
//! ```
//!
//! # Your own store
//!
//! The module [`engine`] is the crate `leasehold-engine`. Implement its trait [`Backend`](engine::Backend), and an
//! [`Engine`](engine::Engine) turns it into a [`Lock`] that keeps the contract. The stores' own `connect` functions also
//! return an engine, with its [`counters`](engine::Engine::counters). [`register_scheme`] makes the store known to
//! [`connect`] by a URL, and to the command in a program that links both (`leasehold-cli`).
//!
//! # Features
//!
//! | Feature | Adds |
//! |---|---|
//! | `memory` (default) | the module `memory`, and `memory:` URLs |
//! | `file` | the module `file`, and `file:///` URLs |
//! | `postgres-advisory` | the modules `postgres` and `postgres_advisory`, `postgres://`, `postgres+advisory://` and `postgres+advisory-xact://` URLs |
//! | `postgres-row` | the modules `postgres` and `postgres_row`, and `postgres+row://` URLs |
//! | `postgres-ttl` | the modules `postgres` and `postgres_ttl`, and `postgres+ttl://` URLs |
//! | `etcd` | the module `etcd`, and `etcd://` and `etcds://` URLs |
//! | `claim` | the modules `postgres` and `claim`: each row of your table to one worker |
//! | `capture` | `claim`, and the module `capture`: triggers that record each change of other tables as a row to be claimed |
//! | `plain-tables` | `claim`, and the module `plain_tables`: locks in your tables |
//! | `election` | the module `election`: one leader among replicas, on every store |
//! | `tower` | the module `tower`: a lock around a request, for HTTP, gRPC and messages, and with `postgres-advisory` also a transaction around it |
//! | `axum` | `tower`, and in its module the parts for axum: extractors, keys of path parameters |
//! | `idempotency` | the modules `postgres` and `idempotency`: keys whose record and effect share one transaction |
//! | `idempotency-tower` | in `idempotency`, middleware for axum |
//! | `blocking` | the module `blocking`: locks for programs without an async runtime |
//! | `metrics` | waits, holds, losses and renewals, published through the crate `metrics` (`docs/metrics.md`) |
//! | `test-util` | `memory`, and in its module the test double: moved time, forced loss, scripted faults, and with `claim` claims in memory |
//! | `tls-native-tls`, `tls-rustls-aws-lc-rs`, `tls-rustls-ring-webpki`, `tls-rustls-ring-native-roots` | one TLS library each, for Postgres and (except the first) for etcd. Without one, `sslmode=require` and `etcds://` are errors |
//!
//! A feature only adds items. It changes no others.

#[cfg(feature = "blocking")]
pub mod blocking;
mod connect;
mod duration;
#[cfg(feature = "etcd")]
mod etcd_urls;
#[cfg(test)]
mod fuzz;
#[cfg(any(feature = "postgres-advisory", feature = "postgres-row", feature = "postgres-ttl"))]
mod postgres_urls;
mod schemes;
mod stores;

pub use connect::{ConnectOptions, connect, connect_with};
pub use duration::parse_duration;
#[cfg(feature = "etcd")]
pub use etcd_urls::etcd_login;
pub use leasehold_api::*;
#[cfg(any(feature = "postgres-advisory", feature = "postgres-row", feature = "postgres-ttl"))]
pub use postgres_urls::{postgres_config, postgres_credentials, postgres_stores};
pub use schemes::register_scheme;

/// The engine that turns a store into a [`Lock`], for store authors and for reading an engine's counters.
pub use leasehold_engine as engine;

/// The store inside this process.
#[cfg(feature = "memory")]
pub use leasehold_memory as memory;

/// The store in a directory, between the processes of one machine.
#[cfg(feature = "file")]
pub use leasehold_file as file;

/// The common parts of the Postgres stores: connections, the schema, numbers for keys.
#[cfg(any(
    feature = "postgres-advisory",
    feature = "postgres-row",
    feature = "postgres-ttl",
    feature = "claim",
    feature = "idempotency"
))]
pub use leasehold_postgres as postgres;

/// Postgres advisory locks.
#[cfg(feature = "postgres-advisory")]
pub use leasehold_postgres_advisory as postgres_advisory;

/// Postgres mutex rows, which stay locked when their holder dies.
#[cfg(feature = "postgres-row")]
pub use leasehold_postgres_row as postgres_row;

/// Postgres lease rows.
#[cfg(feature = "postgres-ttl")]
pub use leasehold_postgres_ttl as postgres_ttl;

/// Locks in an etcd cluster, which replaces a failed member by itself.
#[cfg(feature = "etcd")]
pub use leasehold_etcd as etcd;

/// Claims on the rows of your Postgres table. Each row goes to one worker, and no row is lost.
#[cfg(feature = "claim")]
pub use leasehold_claim as claim;

/// Triggers that record each change of other tables as a row to be claimed.
#[cfg(feature = "capture")]
pub use leasehold_capture as capture;

/// Locks in your plain tables: an id and a boolean, or an id, a timestamp and a timeout.
#[cfg(feature = "plain-tables")]
pub use leasehold_plain_tables as plain_tables;

/// Leader election on any lock: terms, observers, stepping down.
#[cfg(feature = "election")]
pub use leasehold_election as election;
/// Idempotency keys: a request that is sent again does not repeat its effect.
#[cfg(feature = "idempotency")]
pub use leasehold_idempotency as idempotency;
/// Middleware: a lock around a request, for HTTP (axum), gRPC (tonic) and messages.
#[cfg(feature = "tower")]
pub use leasehold_tower as tower;
