//! The machine-readable report.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Write as _;
use std::time::Duration;

use serde::Serialize;

use crate::case::{Case, Outcome};
use crate::cases::all_cases;
use crate::verdict::{Declaration, Verdict};

/// The rules of the contract.
const RULES: [&str; 23] = [
    "C1", "C2", "C3", "C4", "C5", "C6", "C7", "C8", "C9", "C10", "C11", "C12", "C13", "C14", "C15", "C16",
    "C17", "C18", "C19", "C20", "C21", "C22", "C23",
];

/// The version of the suite.
const SUITE: &str = env!("CARGO_PKG_VERSION");

/// The results of a run of the suite on one store.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Report {
    /// One entry per case, in the order of the suite.
    pub cases: Vec<CaseReport>,
    /// The declarations of the store.
    pub declarations: Vec<Declaration>,
    pub(crate) about: About,
}

/// The store under test and the conditions of the run.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct About {
    /// The store's name, from the `Display` of its client.
    pub(crate) store: String,
    /// The package that ran the suite, with its version. Set if cargo started it.
    pub(crate) package: Option<String>,
    pub(crate) time: &'static str,
    pub(crate) threads: usize,
    pub(crate) pace: u32,
    /// The average load of the machine in the minute before the start and in the last minute, if the system
    /// reports it.
    pub(crate) load: [Option<f64>; 2],
    /// The filters of the run. Empty if all cases ran.
    pub(crate) filter: Vec<String>,
}

/// The result of one case.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CaseReport {
    /// The case.
    pub case: Case,
    /// The outcome of the case.
    pub outcome: Outcome,
    /// The wall time of the case.
    pub took: Duration,
}

impl Report {
    /// Returns whether no case failed and none was inconclusive.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        self.cases.iter().all(|c| c.outcome.is_ok())
    }

    /// Returns the failed cases.
    pub fn failures(&self) -> impl Iterator<Item = &CaseReport> {
        self.cases.iter().filter(|c| matches!(c.outcome, Outcome::Failed { .. }))
    }

    /// Returns each declaration that cannot be tried completely, with the reason.
    #[must_use]
    pub fn unproven(&self) -> Vec<String> {
        let reason = |declaration: &Declaration| {
            Some(format!("{} ({})", declaration.text, declaration.hindrance.as_ref()?))
        };
        self.declarations.iter().filter_map(reason).collect()
    }

    /// Returns the verdict on the store. [`Verdict::Unproven`] at best if some case was left out.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        let is_all = self.cases.len() == all_cases().len();
        let hindered = self.declarations.iter().any(|declaration| declaration.hindrance.is_some());
        let least = if is_all && !hindered { Verdict::Proven } else { Verdict::Unproven };
        least.max(Verdict::of(self.cases.iter()))
    }

    /// Returns the verdict on a rule, such as `"C8"`.
    #[must_use]
    pub fn verdict_of_rule(&self, rule: &str) -> Verdict {
        let hindered = self
            .declarations
            .iter()
            .any(|declaration| declaration.is_of_rule(rule) && declaration.hindrance.is_some());
        let least = if hindered { Verdict::Unproven } else { Verdict::Proven };
        least.max(Verdict::of(self.cases.iter().filter(|entry| entry.case.rules.contains(&rule))))
    }

    /// Returns the verdict on a declaration.
    #[must_use]
    pub fn verdict_of(&self, declaration: &Declaration) -> Verdict {
        let least = if declaration.hindrance.is_some() { Verdict::Unproven } else { Verdict::Proven };
        least.max(Verdict::of(self.cases.iter().filter(|entry| declaration.concerns(&entry.case))))
    }

    /// Returns the verdict as JSON for an endpoint badge of shields.io. Serve it as a file and refer to it as
    /// `https://img.shields.io/endpoint?url=...`.
    #[must_use]
    pub fn badge(&self) -> String {
        let verdict = self.verdict();
        let badge = serde_json::json!({
            "schemaVersion": 1,
            "label": format!("leasehold contract {SUITE}"),
            "message": verdict.to_string(),
            "color": verdict.colour(),
        });
        badge.to_string()
    }

    /// Returns for each rule how many cases passed, were refused, were not applicable, failed and were
    /// inconclusive, in this order.
    #[must_use]
    pub fn rules(&self) -> BTreeMap<&'static str, [usize; 5]> {
        let mut rules: BTreeMap<_, _> = RULES.into_iter().map(|r| (r, [0; 5])).collect();
        for entry in &self.cases {
            let column = match entry.outcome {
                Outcome::Passed => 0,
                Outcome::Refused { .. } => 1,
                Outcome::NotApplicable { .. } => 2,
                Outcome::Failed { .. } => 3,
                Outcome::Inconclusive { .. } => 4,
            };
            for rule in entry.case.rules {
                if let Some(counts) = rules.get_mut(rule) {
                    counts[column] += 1;
                }
            }
        }
        rules
    }

    /// Returns the rules for which at least one case passed and none failed.
    #[must_use]
    pub fn shown(&self) -> Vec<&'static str> {
        let rules = self.rules();
        RULES.into_iter().filter(|r| rules[r][0] > 0 && rules[r][3] == 0).collect()
    }

    /// Returns the report as JSON lines: one object per case, then one with the verdicts on the store, its
    /// declarations and the rules.
    #[must_use]
    pub fn to_json_lines(&self) -> String {
        let mut text: String = self.cases.iter().map(|c| c.to_json() + "\n").collect();
        let rules: BTreeMap<_, _> = self
            .rules()
            .into_iter()
            .map(|(rule, [passed, refused, not_applicable, failed, inconclusive])| {
                let verdict = self.verdict_of_rule(rule).to_string();
                (rule, RuleLine { verdict, passed, refused, not_applicable, failed, inconclusive })
            })
            .collect();
        let declaration = |declaration: &Declaration| {
            let verdict = self.verdict_of(declaration).to_string();
            serde_json::json!({ "claim": declaration.text, "verdict": verdict, "hindrance": declaration.hindrance })
        };
        let end = serde_json::json!({
            "verdict": self.verdict().to_string(),
            "suite": SUITE,
            // Random choices in cases use seeds that the suite fixes.
            "seed": "fixed by the suite's version",
            "about": self.about,
            "claims": self.declarations.iter().map(declaration).collect::<Vec<_>>(),
            "rules": rules,
            "shown": self.shown(),
            "unproven": self.unproven(),
        });
        text.push_str(&end.to_string());
        text.push('\n');
        text
    }
}

impl fmt::Display for Report {
    /// Writes the report for people: the counts, every case that did not pass, and all verdicts.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let passed = self.cases.iter().filter(|c| c.outcome == Outcome::Passed).count();
        writeln!(f, "{passed} of {} cases passed", self.cases.len())?;
        for entry in self.cases.iter().filter(|c| c.outcome != Outcome::Passed) {
            writeln!(f, "{entry}")?;
        }
        for declaration in self.unproven() {
            writeln!(f, "UNPROVEN: {declaration}")?;
        }
        writeln!(f, "{}", self.about)?;
        for declaration in &self.declarations {
            writeln!(f, "{:12}  {}", self.verdict_of(declaration), declaration.text)?;
        }
        let rules = self.rules();
        for rule in RULES {
            let [passed, refused, not_applicable, failed, inconclusive] = rules[rule];
            write!(f, "{:12}  {rule:3}  {passed} passed", self.verdict_of_rule(rule))?;
            let others = [(refused, "refused"), (not_applicable, "not applicable"), (failed, "failed")];
            for (count, what) in others.into_iter().chain([(inconclusive, "inconclusive")]) {
                if count > 0 {
                    write!(f, ", {count} {what}")?;
                }
            }
            writeln!(f)?;
        }
        write!(f, "verdict: {}", self.verdict())
    }
}

impl fmt::Display for About {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { store, package, time, threads, pace, load, filter } = self;
        write!(f, "store {store}")?;
        if let Some(package) = package {
            write!(f, ", {package}")?;
        }
        write!(f, "; leasehold-conformance {SUITE}; {time} time, {threads} threads, pace {pace}")?;
        if let [Some(before), Some(after)] = load {
            write!(f, ", load {before} to {after}")?;
        }
        if filter.is_empty() { Ok(()) } else { write!(f, "; only {}", filter.join(" ")) }
    }
}

impl CaseReport {
    /// Returns the result as one line of JSON.
    #[must_use]
    pub fn to_json(&self) -> String {
        let (outcome, detail) = match &self.outcome {
            Outcome::Passed => ("passed", None),
            Outcome::Refused { capability } => ("refused", Some(*capability)),
            Outcome::NotApplicable { reason } => ("not_applicable", Some(reason.as_str())),
            Outcome::Inconclusive { message } => ("inconclusive", Some(message.as_str())),
            Outcome::Failed { message } => ("failed", Some(message.as_str())),
        };
        let line = CaseLine {
            case: self.case.name,
            rules: self.case.rules,
            outcome,
            detail,
            milliseconds: self.took.as_secs_f64() * 1000.0,
        };
        // Strings and numbers always serialize.
        serde_json::to_string(&line).unwrap_or_default()
    }

    /// Prints the result if the case did not pass. Appends it to the file in `LEASEHOLD_CONFORMANCE_REPORT`
    /// if this variable is set.
    pub(crate) fn publish(&self) {
        if !matches!(self.outcome, Outcome::Passed) {
            // Written to stdout directly, because the test harness captures `print!` and would hide a case
            // that did not run.
            let _ = writeln!(std::io::stdout().lock(), "{self}");
        }
        if let Some(path) = std::env::var_os(REPORT) {
            let file = std::fs::OpenOptions::new().create(true).append(true).open(&path);
            let written = file.and_then(|mut f| f.write_all((self.to_json() + "\n").as_bytes()));
            if let Err(error) = written {
                panic!("{REPORT} names {path:?}, which cannot be written: {error}");
            }
        }
    }
}

impl fmt::Display for CaseReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.case.name;
        match &self.outcome {
            Outcome::Passed => write!(f, "{name}: passed"),
            Outcome::Refused { capability } => write!(f, "{name}: refused as declared (no {capability})"),
            Outcome::NotApplicable { reason } => write!(f, "{name}: NOT APPLICABLE: {reason}"),
            Outcome::Inconclusive { message } => write!(f, "{name}: INCONCLUSIVE: {message}"),
            Outcome::Failed { message } => write!(f, "{name}: FAILED: {message}"),
        }
    }
}

/// The environment variable with the file to which mounted cases append their results.
const REPORT: &str = "LEASEHOLD_CONFORMANCE_REPORT";

#[derive(Serialize)]
struct CaseLine<'a> {
    case: &'a str,
    rules: &'a [&'a str],
    outcome: &'a str,
    detail: Option<&'a str>,
    milliseconds: f64,
}

#[derive(Serialize)]
struct RuleLine {
    verdict: String,
    passed: usize,
    refused: usize,
    not_applicable: usize,
    failed: usize,
    inconclusive: usize,
}
