//! What the benchmarks share: the server that they measure on, and how figures are reported. Absolute figures belong to the
//! machine and to what else it does; the ratios do so much less.

pub mod report;

use test_servers::ClusterOptions;

/// A durable server.
#[must_use]
pub fn server() -> ClusterOptions {
    ClusterOptions::new()
        .durable()
        .setting("shared_buffers", "1GB")
        // One checkpoint before, none during: their writes belong to no contender.
        .setting("max_wal_size", "8GB")
        .setting("checkpoint_timeout", "1h")
}

/// The arguments of a benchmark, without cargo's own. The name of a section chooses it.
#[must_use]
pub fn arguments() -> Vec<String> {
    std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect()
}
