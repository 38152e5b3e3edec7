//! Checks that the suite catches each mutant, which has one fault.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::suite::memory::{Bare, Front, run};
use crate::suite::mutant::{Fault, Mutant};
use crate::suite::{CASES, Variant};

/// Returns the cases that fail on `front`.
fn caught_by(variant: Variant, front: impl Fn() -> Arc<dyn Front>) -> Vec<&'static str> {
    let fails = |name: &str| catch_unwind(AssertUnwindSafe(|| run(variant, front(), name))).is_err();
    CASES.iter().map(|case| case.name).filter(|name| fails(name)).collect()
}

#[test]
fn every_mutant_of_the_claims_is_caught() {
    // Hides panics, because hundreds of cases must fail here. Only the summary counts.
    std::panic::set_hook(Box::new(|_| {}));
    let clean = caught_by(Variant::TEXT, || Arc::new(Bare));
    let mut missed = Vec::new();
    for fault in Fault::ALL {
        let caught = caught_by(Variant::TEXT, || Arc::new(Mutant::new(*fault)));
        println!("{fault:?}: {} by {}", caught.len(), caught.join(", "));
        if caught.is_empty() {
            missed.push(fault);
        }
    }
    let _ = std::panic::take_hook();
    assert!(clean.is_empty(), "without a fault: {clean:?}");
    assert!(missed.is_empty(), "no case sees {missed:?}");
    assert!(Fault::ALL.len() >= 20);
}
