//! Common parts of the benchmarks: the measured server and the report of figures. Absolute figures depend on the
//! machine and its load. Ratios do so much less.

pub mod report;

use test_servers::ClusterOptions;

/// Returns the options of a durable server.
#[must_use]
pub fn server() -> ClusterOptions {
    ClusterOptions::new()
        .durable()
        .setting("shared_buffers", "1GB")
        // Prevents a checkpoint during the measurement, because its writes belong to no contender.
        .setting("max_wal_size", "8GB")
        .setting("checkpoint_timeout", "1h")
}

/// Returns the arguments of a benchmark without cargo's. They are names of sections to run.
#[must_use]
pub fn arguments() -> Vec<String> {
    std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect()
}
