//! Runs the suite against every mutant and against the versions without a fault.
//!
//! A mutant runs the cases of the rules that it breaks until one catches it. The versions without a fault run every case
//! and must pass. The test prints which case caught which mutant. If `LEASEHOLD_MUTANT` is set, only mutants whose name
//! contains it run (all if it is empty), and every case that fails is printed with its reason.

// An `expect` that fails is a failed test.
#![allow(clippy::expect_used)]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write as _;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use laboratory::mutants::{Mutant, all_mutants, further_unmutated, unmutated};
use leasehold_conformance::{Case, CaseReport, Outcome, all_cases, run_case};

/// Wall-clock time after which a case of a mutant counts as hanging.
const CASE_LIMIT: Duration = Duration::from_secs(20);

/// The same limit for versions without a fault. It is long because a busy machine slows their cases down.
const SOUND_LIMIT: Duration = Duration::from_secs(600);

const RULES: [&str; 23] = [
    "C1", "C2", "C3", "C4", "C5", "C6", "C7", "C8", "C9", "C10", "C11", "C12", "C13", "C14", "C15", "C16",
    "C17", "C18", "C19", "C20", "C21", "C22", "C23",
];

#[test]
fn the_versions_without_a_fault_pass_everything() {
    let mut failures = String::new();
    let rows = sound();
    println!("the slowest cases: {}", slowest(rows));
    for row in rows {
        for (case, message) in &row.killed_by {
            let _ = writeln!(failures, "{} fails {case}: {message}", row.mutant.name());
        }
        assert!(row.passed * 2 > all_cases().len(), "{} passes {} cases only", row.mutant.name(), row.passed);
    }
    assert!(failures.is_empty(), "{failures}");
}

#[test]
fn every_mutant_is_caught() {
    let only = std::env::var("LEASEHOLD_MUTANT");
    let why = only.is_ok();
    let only = only.unwrap_or_default();
    let mutants: Vec<_> = all_mutants().into_iter().filter(|m| m.name().contains(&only)).collect();
    assert!(!mutants.is_empty(), "no mutant is named like {only}");
    let start = Instant::now();
    // Cheap cases first, because a single case that catches the mutant is enough.
    let mut cases: Vec<_> = all_cases().iter().collect();
    cases.sort_by_key(|case| sound().iter().filter_map(|row| row.took.get(case.name)).sum::<Duration>());
    let rows = run_matrix(mutants, cases);
    print!("{}", show(&rows, why));
    println!("the slowest cases: {}", slowest(&rows));
    println!("{} mutants in {:.1?}", rows.len(), start.elapsed());
    let survivors: Vec<_> = rows.iter().filter(|r| r.killed_by.is_empty()).map(|r| r.mutant.name()).collect();
    assert!(survivors.is_empty(), "no case catches {}: {}", survivors.len(), survivors.join(", "));
    let strays: Vec<_> = rows
        .iter()
        .filter(|row| !row.killed_by.keys().any(|case| shows_rule_of(case, &row.mutant)))
        .map(|row| format!("{} ({})", row.mutant.name(), row.mutant.rules().join(" ")))
        .collect();
    assert!(strays.is_empty(), "caught, but by no case of a rule that they break: {}", strays.join(", "));
}

/// Returns the outcomes of the versions without a fault.
fn sound() -> &'static [Row] {
    static SOUND: OnceLock<Vec<Row>> = OnceLock::new();
    SOUND.get_or_init(|| {
        let sound = unmutated().into_iter().chain(further_unmutated()).collect();
        run_matrix(sound, all_cases().iter().collect())
    })
}

#[test]
fn every_rule_has_a_case_and_a_mutant() {
    let cases: BTreeSet<_> = all_cases().iter().flat_map(|c| c.rules).collect();
    let mutants: BTreeSet<_> = all_mutants().iter().flat_map(Mutant::rules).copied().collect();
    for rule in RULES {
        assert!(cases.contains(&rule), "no case shows {rule}");
        assert!(mutants.contains(rule), "no mutant breaks {rule}");
    }
    let unknown: Vec<_> = mutants.iter().filter(|r| !RULES.contains(r)).collect();
    assert!(unknown.is_empty(), "there are no rules {unknown:?}");
}

#[test]
fn names_are_unique() {
    let names: BTreeSet<_> = all_mutants().iter().map(|m| m.name().to_owned()).collect();
    assert_eq!(names.len(), all_mutants().len());
}

fn shows_rule_of(case: &str, mutant: &Mutant) -> bool {
    let case = all_cases().iter().find(|c| c.name == case);
    case.is_some_and(|c| shows(c, mutant))
}

fn shows(case: &Case, mutant: &Mutant) -> bool {
    case.rules.iter().any(|rule| mutant.rules().contains(rule))
}

/// Outcomes of the cases that ran against one mutant.
struct Row {
    mutant: Mutant,
    passed: usize,
    killed_by: BTreeMap<&'static str, String>,
    took: BTreeMap<&'static str, Duration>,
}

/// Runs each of `mutants` against `cases`, in that order.
fn run_matrix(mutants: Vec<Mutant>, cases: Vec<&'static Case>) -> Vec<Row> {
    // Mutants panic by design, so their panics are not printed.
    std::panic::set_hook(Box::new(|info| {
        if thread::current().name().is_none_or(|name| !name.starts_with("mutant")) {
            eprintln!("{info}");
        }
    }));
    let next = AtomicUsize::new(0);
    let workers = thread::available_parallelism().map_or(1, usize::from).min(4);
    let mut rows: Vec<(usize, Row)> = thread::scope(|scope| {
        let work = || {
            let mut rows = Vec::new();
            loop {
                let n = next.fetch_add(1, Ordering::Relaxed);
                let Some(mutant) = mutants.get(n) else { return rows };
                rows.push((n, run_row(mutant, &cases)));
            }
        };
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|w| w.join().expect("a worker does not panic")).collect()
    });
    rows.sort_by_key(|(n, _)| *n);
    rows.into_iter().map(|(_, row)| row).collect()
}

fn run_row(mutant: &Mutant, cases: &[&'static Case]) -> Row {
    let mut row =
        Row { mutant: mutant.clone(), passed: 0, killed_by: BTreeMap::new(), took: BTreeMap::new() };
    // A version without a fault breaks no rule and runs every case.
    let all = mutant.rules().is_empty() || std::env::var_os("LEASEHOLD_MUTANT").is_some();
    let (first, others): (VecDeque<&Case>, _) = cases.iter().partition(|case| all || shows(case, mutant));
    for mut cases in [first, others] {
        while !cases.is_empty() && (all || row.killed_by.is_empty()) {
            run_cases(&mut row, &mut cases, !all);
        }
    }
    row
}

/// Runs cases on one thread until all are done, one has caught the mutant (if `one_is_enough`), or one hangs. A hanging
/// case counts as failed, and its thread is abandoned.
fn run_cases(row: &mut Row, cases: &mut VecDeque<&'static Case>, one_is_enough: bool) {
    let outcomes = start(&row.mutant, cases.iter().copied().collect(), one_is_enough);
    loop {
        let limit = cases.front().map_or(CASE_LIMIT, |case| limit_of(case, &row.mutant));
        match outcomes.recv_timeout(limit) {
            Ok(report) => {
                cases.pop_front();
                row.took.insert(report.case.name, report.took);
                row.passed += usize::from(report.outcome == Outcome::Passed);
                if let Outcome::Failed { message } = report.outcome {
                    row.killed_by.insert(report.case.name, message);
                }
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {
                if let Some(hung) = cases.pop_front() {
                    row.killed_by.insert(hung.name, format!("still busy after {limit:?}"));
                    row.took.insert(hung.name, limit);
                }
                return;
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Returns the time after which `case` of `mutant` counts as hanging.
fn limit_of(case: &Case, mutant: &Mutant) -> Duration {
    if mutant.rules().is_empty() {
        return SOUND_LIMIT;
    }
    // Scales with the versions without a fault, because a busy machine slows them down as well.
    let took = sound().iter().filter_map(|row| row.took.get(case.name)).max();
    CASE_LIMIT.max(took.copied().unwrap_or_default() * 10)
}

fn start(mutant: &Mutant, cases: Vec<&'static Case>, one_is_enough: bool) -> mpsc::Receiver<CaseReport> {
    let (report, outcomes) = mpsc::channel();
    let mutant = mutant.clone();
    let work = move || {
        for case in cases {
            let outcome = run_case(case, &mutant);
            let caught = matches!(outcome.outcome, Outcome::Failed { .. });
            if report.send(outcome).is_err() || caught && one_is_enough {
                return;
            }
        }
    };
    thread::Builder::new().name("mutant".into()).spawn(work).expect("one more thread");
    outcomes
}

fn show(rows: &[Row], why: bool) -> String {
    let mut text = String::new();
    let width = rows.iter().map(|r| r.mutant.name().len()).max().unwrap_or(0);
    for row in rows {
        let rules = row.mutant.rules().join(" ");
        let killers: Vec<_> = row.killed_by.keys().copied().collect();
        let _ = match &killers[..] {
            [] => writeln!(text, "{:width$}  {rules:9}  SURVIVES", row.mutant.name()),
            killers => {
                let shown = killers.iter().take(4).copied().collect::<Vec<_>>().join(" ");
                let more = killers.len().saturating_sub(4);
                let more = if more > 0 { format!(" and {more} more") } else { String::new() };
                writeln!(text, "{:width$}  {rules:9}  {shown}{more}", row.mutant.name())
            }
        };
        if why {
            for (case, message) in &row.killed_by {
                let _ = writeln!(text, "    {case}: {}", message.lines().collect::<Vec<_>>().join(" | "));
            }
        }
    }
    text
}

/// Returns the eight slowest cases with their total time over all mutants.
fn slowest(rows: &[Row]) -> String {
    let mut sums: BTreeMap<&str, Duration> = BTreeMap::new();
    for (case, took) in rows.iter().flat_map(|r| &r.took) {
        *sums.entry(case).or_default() += *took;
    }
    let mut sums: Vec<_> = sums.into_iter().collect();
    sums.sort_by_key(|(_, took)| std::cmp::Reverse(*took));
    sums.iter().take(8).map(|(case, took)| format!("{case} {took:.1?}")).collect::<Vec<_>>().join(", ")
}
