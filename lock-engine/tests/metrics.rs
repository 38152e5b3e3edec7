//! What a scrape sees: the metrics that `docs/metrics.md` describes, in a real exporter of Prometheus's format.
#![allow(clippy::unwrap_used)]

#[path = "metrics/documents.rs"]
mod documents;
#[path = "metrics/ends.rs"]
mod ends;
#[path = "metrics/scenes.rs"]
mod scenes;
#[path = "metrics/scrape.rs"]
mod scrape;
