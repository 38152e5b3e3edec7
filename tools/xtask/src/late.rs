//! Finds the tests that failed only because they were late. On a busy machine they are rerun alone, other failures are not.

use test_bounds::MARK;

/// A test that failed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) test: String,
    /// Bound in real time that the test exceeded, if every panic of the test is of this kind.
    pub(crate) late: Option<String>,
}

/// Message of a panic whose payload is not a string, such as a [`test_bounds::BoundPassed`].
const NO_TEXT: &str = "Box<dyn Any>";

/// Place of the last panic of a conformance case.
const SUITE: &str = "conformance-tests/src/runner.rs:";

/// Words in the message of a conformance case that the machine was too slow to decide, or that exceeded a bound.
const LATE_CASE: [&str; 2] = ["INCONCLUSIVE after ", ": not within "];

/// Returns the failed tests in the output of a test program.
pub(crate) fn failures(output: &str) -> Vec<Failure> {
    let mut failures: Vec<(&str, Vec<&str>)> = Vec::new();
    let mut is_inside = false;
    for line in output.lines() {
        if let Some(test) = line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----")) {
            failures.push((test, Vec::new()));
            is_inside = true;
        } else if line == "failures:" {
            is_inside = false;
        } else if let (true, Some((_, lines))) = (is_inside, failures.last_mut()) {
            lines.push(line);
        }
    }
    failures.into_iter().map(|(test, lines)| Failure { test: test.to_owned(), late: late(&lines) }).collect()
}

/// Returns the first exceeded bound if each panic of the test is about such a bound, or the message of a late conformance
/// case.
fn late(lines: &[&str]) -> Option<String> {
    let is_panic = |at: &usize| lines[*at].starts_with("thread '") && lines[*at].contains(" panicked at ");
    let panics: Vec<usize> = (0..lines.len()).filter(is_panic).collect();
    // The runner of the suite panics last, after each attempt has failed in its own way.
    if let Some([place, message]) = panics.last().and_then(|at| lines.get(*at..at + 2))
        && place.contains(SUITE)
        && LATE_CASE.iter().any(|words| message.contains(words))
    {
        return Some((*message).to_owned());
    }
    let bounds: Vec<&str> = lines.iter().filter_map(|line| line.strip_prefix(MARK)).collect();
    let is_bound = |at: &usize| lines.get(at + 1) == Some(&NO_TEXT);
    let is_all = !panics.is_empty() && panics.iter().all(is_bound) && bounds.len() == panics.len();
    is_all.then(|| bounds[0].to_owned())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    const OUTPUT: &str = "
running 3 tests
test a ... FAILED
test b ... FAILED
test c ... ok

failures:

---- a stdout ----
bound in real time passed: not granted within 60s

thread 'a' (71) panicked at tests/a.rs:7:5:
Box<dyn Any>
note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace

---- b::c stdout ----
bound in real time passed: not granted within 60s

thread 'b::c' (72) panicked at tests/a.rs:7:5:
Box<dyn Any>

thread 'b::c' (72) panicked at tests/a.rs:9:5:
two holders

failures:
    a
    b::c

test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s
";

    #[test]
    fn a_test_is_late_if_nothing_but_a_bound_has_failed() {
        let late =
            |test: &str, late: Option<&str>| Failure { test: test.to_owned(), late: late.map(str::to_owned) };
        assert_eq!(failures(OUTPUT), [late("a", Some("not granted within 60s")), late("b::c", None)]);
        let said = OUTPUT.replace("Box<dyn Any>", "assertion failed");
        assert!(failures(&said).iter().all(|failure| failure.late.is_none()), "a line of text is no bound");
        assert_eq!(failures("error: the process was killed"), []);
    }

    #[test]
    fn an_inconclusive_case_of_the_suite_and_one_that_exceeds_a_bound_are_late() {
        let last = "thread 'b::c' (72) panicked at conformance-tests/src/runner.rs:82:50:\nINCONCLUSIVE after 3 attempts";
        let output = OUTPUT.replace("\nfailures:\n    a", &format!("\n{last}\n\nfailures:\n    a"));
        let late = |output: &str| failures(output).pop().unwrap().late;
        assert_eq!(late(&output), Some("INCONCLUSIVE after 3 attempts".to_owned()), "{output}");
        let elsewhere = output.replace("conformance-tests/src/runner.rs", "tests/a.rs");
        assert_eq!(late(&elsewhere), None, "only the runner of the suite decides so");
        let next = format!("{last}\n\nthread 'b::c' (72) panicked at tests/a.rs:9:5:\ntwo holders");
        assert_eq!(late(&output.replace(last, &next)), None, "another panic follows");
        let bound = "b::c (C4): the grant: not within 1s (waited 6s)";
        let slow = output.replace("INCONCLUSIVE after 3 attempts", bound);
        assert_eq!(late(&slow), Some(bound.to_owned()));
        assert_eq!(late(&output.replace("INCONCLUSIVE", "C1")), None, "a broken rule is not late");
    }

    /// Passes unless [`a_bound_that_really_passes_is_recognised`] runs it in a separate process.
    #[test]
    fn passes_a_bound_if_wanted() {
        if std::env::var_os(WANTED).is_some() {
            test_bounds::Bound::new(std::time::Duration::ZERO).check("not granted");
        }
    }

    pub(crate) const WANTED: &str = "XTASK_TEST_PASSES_A_BOUND";
    pub(crate) const LATE_IF_WANTED: &str = "late::tests::passes_a_bound_if_wanted";

    #[test]
    fn a_bound_that_really_passes_is_recognised() {
        let mut program = std::process::Command::new(std::env::current_exe().unwrap());
        let output = program.args(["--exact", LATE_IF_WANTED]).env(WANTED, "").output().unwrap();
        let output = String::from_utf8(output.stdout).unwrap();
        let late = Some("not granted within 0ns".to_owned());
        assert_eq!(failures(&output), [Failure { test: LATE_IF_WANTED.to_owned(), late }], "{output}");
    }
}
