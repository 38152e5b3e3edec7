//! Checks that the example store keeps the rules in real time. Other stores mount all cases with `suite!`, or
//! use the program.

#[allow(unreachable_pub)]
#[path = "../examples/your_sql_store.rs"]
mod your_sql_store;

use leasehold_conformance::{Mount, Outcome, Report, Run, Verdict};
use your_sql_store::SqlFactory;

mod child {
    #[test]
    fn entry() {
        super::mount().child_entry();
    }
}

fn mount() -> Mount {
    Mount::new(SqlFactory, module_path!())
}

fn run(only: &[&str]) -> Report {
    let run = Run::new(&SqlFactory).threads(8).child_test("child::entry");
    only.iter().fold(run, |run, word| run.only(*word)).run()
}

#[test]
fn nothing_of_what_it_declares_is_out_of_reach() {
    mount().judge();
}

/// Runs one case for each ability of the harness: the table, a killed child, lost calls, a wrong clock, a
/// deleted row and a restart.
#[test]
fn it_keeps_the_rules_in_real_time() {
    let cases = [
        "exclusion::one_winner_of_twenty_tries",
        "crash::tokens_grow_across_processes",
        "crash::a_killed_holder_frees",
        "renewal::a_failure_is_no_extension",
        "expiry::a_clock_that_is_off_takes_nothing_early",
        "loss::a_purge_is_found_at_the_next_word",
        "fencing::grows_across_a_purge",
        "fencing::grows_across_a_restart",
    ];
    let report = run(&cases);
    assert_eq!(report.cases.len(), cases.len());
    let passed = report.cases.iter().filter(|entry| entry.outcome == Outcome::Passed).count();
    assert_eq!((passed, report.failures().count()), (cases.len(), 0), "{report}");
    assert_eq!(
        (report.verdict_of_rule("C8"), report.verdict_of_rule("C17")),
        (Verdict::Proven, Verdict::Unproven)
    );
    assert_eq!(report.verdict(), Verdict::Unproven, "eight cases prove no store");
}
