//! Runs the suite on the example store in real time. Use a file like this for your own store.

// The example is a program, but only its store is used here.
#[allow(unreachable_pub)]
#[path = "../examples/your_sql_store.rs"]
mod your_sql_store;

use leasehold_conformance::{Outcome, Run, Verdict, suite};
use your_sql_store::SqlFactory;

suite!(SqlFactory);

#[test]
fn some_cases_prove_their_rule_and_no_store() {
    let report = Run::new(&SqlFactory).only("exclusion::free_key_is_granted").run();
    let [case] = &report.cases[..] else { panic!("{report}") };
    assert_eq!(case.outcome, Outcome::Passed, "{report}");
    assert_eq!(report.verdict_of_rule("C17"), Verdict::Unproven);
    assert_eq!(report.verdict(), Verdict::Unproven);
}
