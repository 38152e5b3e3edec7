#![doc = include_str!("../README.md")]

mod admin;
mod capabilities;
mod error;
mod ext;
mod guard;
mod id;
mod key;
mod lock;
mod namespaced;
mod options;
mod validity;

pub use admin::{HoldInfo, HoldState, ListQuery, LockAdmin, SessionInfo};
pub use capabilities::{
    AdminCapabilities, Capabilities, Fairness, Fencing, KeyIdentity, LeaseBounds, Requirements, Scope,
};
pub use error::{Error, ErrorKind};
pub use ext::{KeyRequest, KeysRequest, LockExt, Once, OncePer};
pub use guard::{LockGuard, release_all};
pub use id::{FencingToken, HolderId};
pub use key::{LockKey, MAX_KEY_BYTES};
pub use lock::{BoxFuture, Grant, Lock, Release};
pub use namespaced::Namespaced;
pub use options::{AcquireOptions, DEFAULT_WAIT, MAX_LABEL_BYTES, Mode, OnCooldown, Wait};
pub use validity::{LossReason, LossSignal, Lost, Validity};

// Store authors and wrappers write `#[async_trait]` impls of the traits above.
pub use async_trait::async_trait;
