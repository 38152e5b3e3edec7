//! The printed report, in the form of the documentation.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::time::Duration;

use crate::campaign::Report;

/// Returns two tables in Markdown: the stores, and the faults with the number of effective ones and the longest pause.
pub(crate) fn tables(seed: u64, reports: &[Report]) -> String {
    let mut text = format!("Seed {seed}:\n\n");
    text += "| Store | Minutes | Grants | Faults that took effect | Violations | At most (3/N) | Lost in the plain register, of \
             100,000 | In the fenced one | Next grant after a fault: median, 99 %, longest |\n";
    text += "|---|---|---|---|---|---|---|---|---|\n";
    for report in reports {
        row(&mut text, report);
    }
    let kinds: BTreeSet<_> = reports.iter().flat_map(|report| report.faults.keys()).collect();
    text += "\n| Took effect, and the longest time without a grant of any key";
    text += &reports.iter().map(|report| format!(" | {}", report.store)).collect::<String>();
    text += " |\n|---";
    text += &"|---".repeat(reports.len());
    text += "|\n";
    for fault in kinds {
        let _ = write!(text, "| `{}`", fault.name());
        for report in reports {
            match report.faults.get(fault) {
                Some((_, effective)) => {
                    let pause = report.findings.pauses.get(fault.name()).copied().unwrap_or_default();
                    let _ = write!(text, " | {effective}, {}", readable(pause));
                }
                None => text += " | –",
            }
        }
        text += " |\n";
    }
    for report in reports {
        for reason in &report.left_out {
            let _ = writeln!(text, "\n{}: left out: {reason}", report.store);
        }
        if !report.findings.longest_overlap.is_zero() {
            let longest = readable(report.findings.longest_overlap);
            let _ = writeln!(text, "\n{}: two guards of a key read valid for up to {longest}", report.store);
        }
        if let Some((longest, fault)) = report.findings.longest_wait {
            let longest = readable(longest);
            let _ = writeln!(text, "\n{}: the longest wait, {longest}, was after `{fault}`", report.store);
        }
        if report.stalls > 0 {
            let inconclusive = report.findings.inconclusive;
            let stalls = format!("the machine stood still {} times", report.stalls);
            let _ = writeln!(text, "\n{}: {stalls}; {inconclusive} waits say nothing", report.store);
        }
    }
    text
}

fn row(text: &mut String, report: &Report) {
    let findings = &report.findings;
    let mut waits = findings.waits.clone();
    waits.sort_unstable();
    let at = |part: usize| waits.get((waits.len() * part / 100).min(waits.len().saturating_sub(1)));
    let shown = |part| at(part).map_or_else(|| "–".to_owned(), |wait| readable(*wait));
    let effective: usize = report.faults.values().map(|(_, effective)| effective).sum();
    let _ = writeln!(
        text,
        "| {} | {:.1} | {} | {effective} of {} kinds | {} | {:.1e} | {} | {} | {}, {}, {} |",
        report.store,
        report.elapsed.as_secs_f64() / 60.0,
        thousands(findings.grants),
        report.faults.len(),
        findings.violations.len(),
        3.0 / findings.grants.max(1) as f64,
        of_many(findings.plain_lost, findings.grants),
        of_many(findings.fenced_lost, findings.grants),
        shown(50),
        shown(99),
        shown(100),
    );
}

/// Returns all violations, with the command that repeats them. Empty if there are none.
pub(crate) fn violations(seed: u64, reports: &[Report]) -> String {
    let mut text = String::new();
    for report in reports.iter().filter(|report| !report.findings.violations.is_empty()) {
        let _ = writeln!(text, "{}:", report.store);
        for violation in &report.findings.violations {
            let _ = writeln!(text, "  {violation}");
        }
        let _ = writeln!(text, "to repeat: cargo xtask torture --store {} --seed {seed}", report.store);
    }
    text
}

fn of_many(lost: usize, grants: usize) -> String {
    if lost == 0 {
        return "0".to_owned();
    }
    format!("{:.1}", lost as f64 * 100_000.0 / grants as f64)
}

fn readable(duration: Duration) -> String {
    if duration < Duration::from_secs(1) {
        return format!("{} ms", duration.as_millis());
    }
    format!("{:.1} s", duration.as_secs_f64())
}

fn thousands(number: usize) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[test]
fn numbers_are_written_for_people() {
    assert_eq!([0, 999, 1000, 1_234_567].map(thousands), ["0", "999", "1,000", "1,234,567"]);
    assert_eq!((of_many(0, 9), of_many(3, 100_000)), ("0".to_owned(), "3.0".to_owned()));
    assert_eq!(readable(Duration::from_millis(1500)), "1.5 s");
}
