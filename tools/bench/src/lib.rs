//! Common parts of the benchmarks: results and their statistics, the file and the page that show them, and the measured
//! server. Absolute figures depend on the machine and its load. Ratios do so much less.

pub mod machine;
pub mod page;
pub mod record;
pub mod report;
pub mod svg;

use std::sync::atomic::{AtomicBool, Ordering};

use test_servers::ClusterOptions;

static SMOKE: AtomicBool = AtomicBool::new(false);

/// Shortens all later measurements. Such a run only shows whether the benchmarks work.
pub fn only_smoke() {
    SMOKE.store(true, Ordering::Relaxed);
}

/// Returns whether measurements are shortened.
#[must_use]
pub fn is_smoke() -> bool {
    SMOKE.load(Ordering::Relaxed)
}

/// Returns `full`, or `short` if measurements are shortened.
pub fn or_smoke<T>(full: T, short: T) -> T {
    if is_smoke() { short } else { full }
}

/// Returns the options of a durable server.
#[must_use]
pub fn server() -> ClusterOptions {
    ClusterOptions::new()
        .durable()
        .setting("shared_buffers", or_smoke("1GB", "128MB"))
        // Prevents a checkpoint during the measurement, because its writes belong to no contender.
        .setting("max_wal_size", "8GB")
        .setting("checkpoint_timeout", "1h")
}
