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
const RULES: [&str; 18] = [
    "C1", "C2", "C3", "C4", "C5", "C6", "C7", "C8", "C9", "C10", "C11", "C12", "C13", "C14", "C15", "C16",
    "C17", "C18",
];

/// The version of the suite.
const SUITE: &str = env!("CARGO_PKG_VERSION");

/// What a run of the suite has shown of one store.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Report {
    /// One entry per case, in the order of the suite.
    pub cases: Vec<CaseReport>,
    /// What the store declares.
    pub declarations: Vec<Declaration>,
    pub(crate) about: About,
}

/// What was tried, and how.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct About {
    /// The store's name for itself.
    pub(crate) store: String,
    /// The package that ran it, with its version, if cargo has started it.
    pub(crate) package: Option<String>,
    pub(crate) time: &'static str,
    pub(crate) threads: usize,
    pub(crate) pace: u32,
    /// What the machine was asked to do on average in the minute before and in the last one, where it says so.
    pub(crate) load: [Option<f64>; 2],
    /// Words that chose the cases; none: all.
    pub(crate) filter: Vec<String>,
}

/// What one case has shown.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CaseReport {
    /// The case.
    pub case: Case,
    /// How it ended.
    pub outcome: Outcome,
    /// How long it took by the wall clock.
    pub took: Duration,
}

impl Report {
    /// Whether no case failed, and none was inconclusive.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        self.cases.iter().all(|c| c.outcome.is_ok())
    }

    /// The cases that failed.
    pub fn failures(&self) -> impl Iterator<Item = &CaseReport> {
        self.cases.iter().filter(|c| matches!(c.outcome, Outcome::Failed { .. }))
    }

    /// What the store declares and could not be tried, each with the reason. Neither shown nor refuted.
    #[must_use]
    pub fn unproven(&self) -> Vec<String> {
        let reason = |declaration: &Declaration| {
            Some(format!("{} ({})", declaration.text, declaration.hindrance.as_ref()?))
        };
        self.declarations.iter().filter_map(reason).collect()
    }

    /// What is known of the store. A store of which not every case was run is unproven.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        let is_all = self.cases.len() == all_cases().len();
        let hindered = self.declarations.iter().any(|declaration| declaration.hindrance.is_some());
        let least = if is_all && !hindered { Verdict::Proven } else { Verdict::Unproven };
        least.max(Verdict::of(self.cases.iter()))
    }

    /// What is known of a rule, such as `"C8"`.
    #[must_use]
    pub fn verdict_of_rule(&self, rule: &str) -> Verdict {
        let hindered = self
            .declarations
            .iter()
            .any(|declaration| declaration.is_of_rule(rule) && declaration.hindrance.is_some());
        let least = if hindered { Verdict::Unproven } else { Verdict::Proven };
        least.max(Verdict::of(self.cases.iter().filter(|entry| entry.case.rules.contains(&rule))))
    }

    /// What is known of something that the store declares.
    #[must_use]
    pub fn verdict_of(&self, declaration: &Declaration) -> Verdict {
        let least = if declaration.hindrance.is_some() { Verdict::Unproven } else { Verdict::Proven };
        least.max(Verdict::of(self.cases.iter().filter(|entry| declaration.concerns(&entry.case))))
    }

    /// The verdict as shields.io's endpoint badge wants it: a file that is served somewhere, for
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

    /// For each rule, how many cases passed, were refused, could not run, failed, and were inconclusive, in this order.
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

    /// The rules that at least one case has shown and none has refuted.
    #[must_use]
    pub fn shown(&self) -> Vec<&'static str> {
        let rules = self.rules();
        RULES.into_iter().filter(|r| rules[r][0] > 0 && rules[r][3] == 0).collect()
    }

    /// The report as JSON lines: one object per case, then one with the verdict, by what is declared and by rule.
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
            // What cases decide at random is drawn from numbers in the suite.
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
    /// For people: counts, every case that did not simply pass, and the verdict by what is declared and by rule.
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
    /// One line of JSON.
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
        // A struct of strings and numbers always has a JSON form.
        serde_json::to_string(&line).unwrap_or_default()
    }

    /// Says on stdout what did not simply pass, and appends to the file that
    /// `LEASEHOLD_CONFORMANCE_REPORT` names.
    pub(crate) fn publish(&self) {
        if !matches!(self.outcome, Outcome::Passed) {
            // Past the capture of the test harness, which swallows only what `print!` writes: a case
            // that did not run shall be seen.
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

/// Names the file that mounted cases append their line to.
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
