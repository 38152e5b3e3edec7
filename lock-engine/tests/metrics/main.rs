//! The metrics of `docs/metrics.md`, as a real Prometheus exporter shows them.
#![allow(clippy::unwrap_used)]

mod documents;
mod ends;
mod scenes;
mod scrape;
