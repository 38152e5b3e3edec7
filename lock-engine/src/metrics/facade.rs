//! Metrics for the program's own recorder, through the `metrics` facade. `docs/metrics.md` describes them.

#[cfg(feature = "metrics")]
mod classes;
#[cfg(not(feature = "metrics"))]
mod off;
#[cfg(feature = "metrics")]
mod on;

#[cfg(not(feature = "metrics"))]
pub(crate) use off::{AcquireCall, FacadeMetrics, Times};
#[cfg(feature = "metrics")]
pub(crate) use on::{AcquireCall, FacadeMetrics, Times};

/// A function that puts keys into few classes for the label `key_class`, because keys themselves would be
/// labels without bound.
pub(crate) type KeyClass = fn(&leasehold_api::LockKey) -> &str;

/// Returns the part before the first separator. A key without a separator has no class, because the whole key
/// would be a separate class.
pub(crate) fn first_part(key: &leasehold_api::LockKey) -> &str {
    key.as_str().split_once(':').map_or("", |(first, _)| first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_never_its_own_class() {
        for (key, class) in [("order:7", "order"), ("order:7:line", "order"), ("7f3c", "")] {
            assert_eq!(first_part(&leasehold_api::LockKey::new(key).unwrap()), class, "{key}");
        }
    }
}
