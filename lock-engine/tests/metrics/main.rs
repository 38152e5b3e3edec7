//! What a scrape sees: the metrics that `docs/metrics.md` describes, in a real exporter of Prometheus's format.
#![allow(clippy::unwrap_used)]

mod documents;
mod ends;
mod scenes;
mod scrape;
