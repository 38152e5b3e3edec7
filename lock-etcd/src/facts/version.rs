//! Versions of etcd with known faults.

/// Returns the advice for a version with a known fault. `None` for any other text.
pub(super) fn advice(version: &str) -> Option<&'static str> {
    match parse(version)? {
        (3, 5, 0..=2) => Some("update etcd: the versions 3.5.0 to 3.5.2 can damage their data"),
        // A leader of these versions that was frozen and replaced revokes leases that were renewed in time.
        (3, 4, 0..=30) => {
            Some("update etcd to 3.4.31 or newer: an old leader that wakes can revoke live leases")
        }
        (3, 5, 3..=12) => {
            Some("update etcd to 3.5.13 or newer: an old leader that wakes can revoke live leases")
        }
        _ => None,
    }
}

fn parse(version: &str) -> Option<(u32, u32, u32)> {
    let mut parts = version.split(['.', '-', '+']).map(|part| part.parse().ok());
    Some((parts.next()??, parts.next()??, parts.next()??))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faulty_versions_have_advice_and_fixed_ones_have_none() {
        for faulty in ["3.4.23", "3.4.30", "3.5.0", "3.5.2-rc.1", "3.5.12"] {
            assert!(advice(faulty).is_some(), "{faulty}");
        }
        for fixed in ["3.4.31", "3.5.13", "3.6.0", "3.7.2", "4.0.0-alpha.1", "", "unknown"] {
            assert!(advice(fixed).is_none(), "{fixed}");
        }
    }
}
