#![cfg_attr(docsrs, feature(doc_cfg))]
#![doc = include_str!("../README.md")]
// Which public types are exhaustive is decided type by type in docs/decisions/public-api.md.
#![warn(clippy::exhaustive_enums, clippy::exhaustive_structs)]

mod admin;
mod capabilities;
mod error;
#[cfg(test)]
mod fuzz;
mod grant;
mod guard;
mod handle;
mod id;
mod key;
mod lock;
mod loss;
mod multi;
mod namespaced;
mod options;
mod portable;
mod request;
mod run;
mod validity;

pub use admin::{HoldInfo, HoldState, KeyInfo, ListQuery, LockAdmin, StoreFact};
pub use capabilities::{
    AdminCapabilities, Capabilities, Fairness, Fencing, KeyIdentity, LeaseBounds, Modes, Requirements, Scope,
};
pub use error::{Error, ErrorKind, Operation};
pub use grant::{Grant, Release};
pub use guard::LockGuard;
pub use handle::GrantHandle;
pub use id::{FencingToken, HolderId};
pub use key::{LockKey, MAX_KEY_BYTES};
pub use lock::{BoxFuture, Lock};
pub use loss::{End, Ended, LossSignal, Lost};
pub use multi::MultiGuard;
pub use namespaced::Namespaced;
pub use options::{AcquireOptions, DEFAULT_WAIT, MAX_LABEL_BYTES, Mode, OnCooldown, Wait, Wanted};
pub use portable::PortableHold;
pub use request::{
    Always, KeyRequest, KeysRequest, LockExt, LockRequest, WantedRequest, Window, WindowOutcome,
};
pub use run::RunError;
pub use validity::{LossReason, Validity};

// Re-exported because stores and wrappers need `#[async_trait]` to implement the traits above.
pub use async_trait::async_trait;
