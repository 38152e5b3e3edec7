//! The suite on the memory store: with each way to wait, with a default lease, in a namespace, and with latency.

// An `expect` that fails is a failed test.
#![allow(clippy::expect_used)]

use laboratory::memory::Memory;
use leasehold_conformance::{Outcome, all_cases, run_case};

mod queue {
    leasehold_conformance::suite!(super::Memory::new());
}

mod queue_with_leases {
    leasehold_conformance::suite!(super::Memory::new().leased());
}

mod hints {
    leasehold_conformance::suite!(super::Memory::new().polling());
}

mod polls {
    leasehold_conformance::suite!(super::Memory::new().polling().without_hints().leased());
}

mod namespaced {
    leasehold_conformance::suite!(super::Memory::new().namespaced());
}

mod remote {
    leasehold_conformance::suite!(super::Memory::new().remote());
}

mod remote_polls {
    leasehold_conformance::suite!(super::Memory::new().polling().leased().remote());
}

/// A sticky store leaves lost holds in place, but must still release a grant that no caller received. The other cases
/// do not fit, because it declares the capabilities of a store that is not sticky.
#[test]
fn late_grants_are_given_back_by_a_store_that_keeps_lost_holds() {
    let name = "faults::a_grant_that_comes_too_late_is_given_back";
    let case = all_cases().iter().find(|case| case.name == name).expect("a case of this name");
    for store in [Memory::new(), Memory::new().polling()] {
        assert_eq!(run_case(case, &store.sticky()).outcome, Outcome::Passed);
    }
}
