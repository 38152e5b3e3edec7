#![cfg_attr(docsrs, feature(doc_cfg))]
// The README also shows the layer, so it is included only with the feature `tower`.
#![cfg_attr(feature = "tower", doc = include_str!("../README.md"))]
#![cfg_attr(
    not(feature = "tower"),
    doc = "Idempotency keys on Postgres: the effect and its record in one transaction. See the README."
)]

mod begin;
mod error;
mod flight;
mod ident;
mod journey;
mod key_transaction;
#[cfg(feature = "tower")]
mod layer;
mod memory;
mod open_key;
mod postgres;
mod record;
mod schema;
mod sql;
mod store;
mod stored;
mod transaction;

pub use begin::{Begin, RequestOutcome};
pub use error::IdempotencyError;
pub use ident::{Fingerprint, Ident, MAX_KEY_BYTES, MAX_SCOPE_BYTES, fingerprint};
pub use journey::{Journey, Journeys, PhaseKey};
pub use key_transaction::KeyTransaction;
#[cfg(feature = "tower")]
pub use layer::{IdemTx, IdempotencyLayer, Idempotent, OnReplay};
pub use memory::{MemoryIdempotency, MemoryKeyTransaction};
pub use open_key::OpenKey;
pub use postgres::{Isolation, PgIdempotency};
pub use store::IdempotencyStore;
pub use stored::Stored;

/// The driver whose types are part of this crate's interface.
pub use sqlx;
