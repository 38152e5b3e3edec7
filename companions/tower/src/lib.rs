#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(feature = "axum", doc = include_str!("../README.md"))]
#![cfg_attr(
    not(feature = "axum"),
    doc = "A lock around a request: middleware for HTTP, gRPC and messages. See the README."
)]
#![warn(clippy::exhaustive_enums, clippy::exhaustive_structs)]

mod body;
mod commit;
#[cfg(feature = "axum")]
mod extracted;
mod finish;
mod grpc;
mod held;
mod hold;
mod http;
mod key;
mod layer;
mod message;
mod metrics;
mod problem;
mod service;
mod settings;
mod stats;
mod template;
mod transport;
#[cfg(feature = "postgres")]
mod tx;

pub use body::LockBody;
pub use commit::{OpenCommit, Reads};
#[cfg(feature = "axum")]
pub use extracted::{Extracted, extracted};
pub use finish::Finish;
pub use grpc::Grpc;
pub use held::Held;
pub use hold::RequestHold;
pub use http::Http;
pub use key::{KeyError, KeyFor};
pub use layer::LockLayer;
pub use message::Message;
pub use service::Locked;
pub use settings::{OnGone, OnLost, Until};
pub use stats::LayerStats;
pub use template::{BodyTemplate, MessageTemplate, Template, TemplateBuilder, TemplateError};
pub use transport::{Refused, Transport};
#[cfg(feature = "postgres")]
pub use tx::{InTx, SharedTx, SharedTxError, TxLayer};

/// The error of a response body: an error of the inner body, or the loss of the lock.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
