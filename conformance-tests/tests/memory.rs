//! The suite on the memory store: with each way to wait, with a lease by default, and behind a wrapper.

mod common;

mod queue {
    leasehold_conformance::suite!(super::common::Memory::new());
}

mod queue_with_leases {
    leasehold_conformance::suite!(super::common::Memory::new().leased());
}

mod hints {
    leasehold_conformance::suite!(super::common::Memory::new().polling());
}

mod polls {
    leasehold_conformance::suite!(super::common::Memory::new().polling().without_hints().leased());
}

mod namespaced {
    leasehold_conformance::suite!(super::common::Memory::new().namespaced());
}
