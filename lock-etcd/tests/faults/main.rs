//! Hazards of etcd on real clusters, and bad settings. `docs/hazards.md` has the hazards E1 to E14.

#![allow(clippy::unwrap_used)]

mod admin;
mod authentication;
mod compaction;
#[cfg(feature = "tls-rustls-ring-webpki")]
mod encryption;
mod fence;
mod late;
mod members;
mod modes;
mod race;
mod restores;
mod sessions;
mod settings;
mod space;
mod support;
#[path = "../common/ways.rs"]
mod ways;

/// Time limit that only a broken program reaches.
const LONG: std::time::Duration = std::time::Duration::from_secs(120);
