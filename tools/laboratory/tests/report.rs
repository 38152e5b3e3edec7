//! Tests of the suite: every outcome of a case, and how the suite reports it.

#![allow(clippy::expect_used)]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use laboratory::memory::Memory;
use laboratory::mutants::{Mutant, all_mutants};
use leasehold_api::{Capabilities, Error, ErrorKind, Fencing, Scope};
use leasehold_conformance::{
    Case, Disturbed, Factory, Harness, Mount, Outcome, Report, Run, Time, Verdict, all_cases, async_trait,
    run_all, run_case,
};
use leasehold_engine::{Attempt, Engine, HoldRef, ReleaseReply, Renewed, Request, Single, SingleKey};
use serde_json::json;

fn case(name: &str) -> &'static Case {
    all_cases().iter().find(|c| c.name == name).expect("a case of this name")
}

#[test]
fn cases_have_unique_names_and_known_rules() {
    let names: BTreeSet<_> = all_cases().iter().map(|c| c.name).collect();
    assert_eq!(names.len(), all_cases().len());
    let shown: BTreeSet<_> = all_cases().iter().flat_map(|c| c.rules).map(ToString::to_string).collect();
    let rules: BTreeSet<_> = (1..=23).map(|n| format!("C{n}")).collect();
    assert_eq!(shown, rules, "every rule has a case, and every case a rule of the contract");
    assert!(all_cases().iter().all(|c| !c.rules.is_empty() && c.name.starts_with(c.group())));
}

#[test]
fn a_good_store_passes_and_what_cannot_be_tried_is_said() {
    let memory = Memory::new();
    let passed = run_case(case("exclusion::free_key_is_granted"), &memory);
    assert_eq!(passed.outcome, Outcome::Passed);
    let elsewhere = run_case(case("crash::a_killed_holder_frees"), &memory);
    let Outcome::NotApplicable { reason } = &elsewhere.outcome else { panic!("{elsewhere}") };
    assert!(reason.contains("within one process"), "{reason}");
    let line: serde_json::Value = serde_json::from_str(&elsewhere.to_json()).expect("a line of JSON");
    assert_eq!(line["outcome"], "not_applicable");
    assert_eq!(line["case"], "crash::a_killed_holder_frees");
    assert_eq!(line["detail"], reason.as_str());
}

#[test]
fn what_is_not_declared_is_seen_to_be_refused() {
    let report = run_case(case("cooldown::a_try_reads_held"), &Odd::Open);
    assert_eq!(report.outcome, Outcome::Refused { capability: "cooldowns" });
    let line: serde_json::Value = serde_json::from_str(&report.to_json()).expect("a line of JSON");
    assert_eq!((line["outcome"].as_str(), line["detail"].as_str()), (Some("refused"), Some("cooldowns")));
}

#[test]
fn a_bad_store_fails_with_the_rule_it_breaks() {
    let report = run_case(case("exclusion::held_key_reads_held_for_another_client"), &Odd::Open);
    let Outcome::Failed { message } = &report.outcome else { panic!("{report}") };
    assert!(message.contains("granted again"), "{message}");
    assert!(report.case.rules.contains(&"C1"));
}

#[test]
fn what_is_declared_and_cannot_be_tried_is_unproven() {
    let panic = std::panic::catch_unwind(|| Mount::new(Odd::Boasts, module_path!()).judge());
    let panic = panic.expect_err("nothing of it can be tried");
    let text = panic.downcast_ref::<String>().expect("a text");
    let claims: Vec<_> =
        text.strip_prefix("UNPROVEN: ").expect(text).split("; ").map(str::to_owned).collect();
    for claim in [
        "loss_detection = ",
        "undo = ",
        "fencing = Durable (the harness names no way to reach the store from a child process)",
        "scope = Machine",
        "crash_release = 30s",
        "handover = 30s (the harness cannot lose the wake-ups of a client)",
    ] {
        assert!(claims.iter().any(|found| found.starts_with(claim)), "{claim}: {claims:?}");
    }
    assert_eq!(claims.len(), 6, "{claims:?}");
    let report = Run::new(&Odd::Boasts).only("exclusion::free_key_is_granted").run();
    assert_eq!(report.unproven(), claims);
    assert!(report.to_string().contains("UNPROVEN: fencing = Durable"), "{report}");
    assert!(report.to_string().contains("unproven      C8 "), "{report}");
    let end = last_line(&report);
    assert_eq!(
        (end["unproven"].as_array().map(Vec::len), &end["rules"]["C8"]["verdict"]),
        (Some(6), &json!("unproven"))
    );
    let fencing =
        end["claims"].as_array().expect("claims").iter().find(|claim| claim["claim"] == "fencing = Durable");
    assert_eq!(fencing.expect("what is declared")["verdict"], "unproven");
    Mount::new(Memory::new(), module_path!()).judge();
}

#[test]
fn durable_tokens_of_a_store_that_is_never_restarted_are_unproven() {
    let panic = std::panic::catch_unwind(|| Mount::new(Odd::Remembers, module_path!()).judge());
    let panic = panic.expect_err("nobody restarts it");
    let text = panic.downcast_ref::<String>().expect("a text");
    assert!(text.contains("fencing = Durable (the harness cannot restart the store)"), "{text}");
    let report = run_case(case("fencing::grows_across_a_restart"), &Odd::Remembers);
    assert!(matches!(report.outcome, Outcome::NotApplicable { .. }), "{report}");
}

#[test]
fn a_store_on_a_network_whose_requests_cannot_be_held_back_is_unproven() {
    let report = Run::new(&Odd::Far).only("C23").run();
    let wanted = "late requests are refused (the harness cannot hold requests of a client back on their way to the store)";
    assert!(report.unproven().iter().any(|claim| claim == wanted), "{report}");
    assert_eq!(report.verdict_of_rule("C23"), Verdict::Unproven, "{report}");
}

/// A mutant in real time.
struct InRealTime(Mutant);

#[async_trait]
impl Factory for InRealTime {
    fn time(&self) -> Time {
        Time::Real
    }

    async fn open(&self) -> Result<Box<dyn Harness>, Error> {
        self.0.open().await
    }
}

#[test]
fn a_newcomer_that_passes_the_queue_is_seen_in_real_time() {
    let passed = all_mutants().into_iter().find(|m| m.name() == "backend:queue-is-passed-at-a-lapse");
    let passed = InRealTime(passed.expect("a mutant of this name"));
    let name = "fairness::the_queue_comes_before_newcomers_as_a_lease_ends";
    let report = run_case(case(name), &passed);
    let message = match &report.outcome {
        Outcome::Failed { message } => message,
        // A machine that stands still makes each failure inconclusive.
        Outcome::Inconclusive { message } if message.contains("this process stood still") => message,
        _ => panic!("{report}"),
    };
    assert!(message.contains("a newcomer came before the first in the queue"), "{report}");
}

#[test]
fn a_hang_is_a_failure_and_costs_no_time() {
    let report = run_case(case("exclusion::free_key_is_granted"), &Odd::Hangs);
    let Outcome::Failed { message } = &report.outcome else { panic!("{report}") };
    assert!(message.contains("hangs"), "{message}");
}

#[test]
fn a_store_that_does_not_open_fails_every_case() {
    let report = run_all(&Odd::Closed);
    assert!(!report.is_ok());
    assert_eq!(report.failures().count(), all_cases().len());
    assert!(report.shown().is_empty());
    let lines = report.to_json_lines();
    let lines: Vec<serde_json::Value> =
        lines.lines().map(|l| serde_json::from_str(l).expect("a line of JSON")).collect();
    assert_eq!(lines.len(), all_cases().len() + 1, "one line per case, and one for the rules");
    assert_eq!(lines[0]["outcome"], "failed");
    let last = &lines[lines.len() - 1];
    assert!(last["rules"]["C1"]["failed"].as_u64() > Some(10), "{last}");
    assert!(report.to_string().contains("0 of"), "{report}");
}

fn last_line(report: &Report) -> serde_json::Value {
    let lines = report.to_json_lines();
    serde_json::from_str(lines.lines().last().expect("a line")).expect("JSON")
}

#[test]
fn a_run_takes_what_is_wanted_in_the_order_of_the_suite() {
    let memory = Memory::new();
    let report = Run::new(&memory).only("C8").only("free_key_is_granted").threads(3).run();
    let names: Vec<_> = report.cases.iter().map(|entry| entry.case.name).collect();
    let wanted = |case: &&Case| case.rules.contains(&"C8") || case.name == "exclusion::free_key_is_granted";
    assert_eq!(names, all_cases().iter().filter(wanted).map(|case| case.name).collect::<Vec<_>>());
    let about = &last_line(&report)["about"];
    assert_eq!((&about["filter"], &about["threads"]), (&json!(["C8", "free_key_is_granted"]), &json!(3)));
    assert!(about["store"].as_str().is_some_and(|store| store.starts_with("memory")), "{about}");
}

#[test]
fn a_run_has_so_many_cases_at_a_time() {
    let crowd = Crowd::default();
    let report = Run::new(&crowd).only("exclusion").threads(4).run();
    assert!(report.cases.len() > 4);
    assert_eq!(crowd.most.load(SeqCst), 4);
}

/// Opens no store and counts concurrent opens. Each open waits up to two seconds until four run at a time.
#[derive(Default)]
struct Crowd {
    now: AtomicUsize,
    most: AtomicUsize,
}

#[async_trait]
impl Factory for Crowd {
    fn time(&self) -> Time {
        Time::Virtual
    }

    async fn open(&self) -> Result<Box<dyn Harness>, Error> {
        self.most.fetch_max(self.now.fetch_add(1, SeqCst) + 1, SeqCst);
        let patience = Instant::now() + Duration::from_secs(2);
        while self.most.load(SeqCst) < 4 && Instant::now() < patience {
            std::thread::yield_now();
        }
        self.now.fetch_sub(1, SeqCst);
        Err(Error::closed())
    }
}

#[test]
fn the_verdict_is_one_word_on_the_report_and_on_the_badge() {
    let memory = Memory::new();
    let said = |report: &Report| {
        let badge: serde_json::Value = serde_json::from_str(&report.badge()).expect("a badge");
        assert_eq!((&badge["schemaVersion"], &last_line(report)["verdict"]), (&json!(1), &badge["message"]));
        assert!(report.to_string().ends_with(&format!("verdict: {}", report.verdict())), "{report}");
        (
            badge["message"].as_str().unwrap_or_default().to_owned(),
            badge["color"].as_str().unwrap_or_default().to_owned(),
        )
    };
    let words = |message: &str, colour: &str| (message.to_owned(), colour.to_owned());
    let mut report = Run::new(&memory).threads(4).run();
    assert_eq!(said(&report), words("proven", "brightgreen"), "{report}");
    report.cases[0].outcome = Outcome::Inconclusive { message: "slow".to_owned() };
    assert_eq!(said(&report), words("inconclusive", "lightgrey"));
    assert_eq!(
        (report.verdict_of_rule("C1"), report.verdict_of_rule("C17")),
        (Verdict::Inconclusive, Verdict::Proven)
    );
    report.cases[1].outcome = Outcome::Failed { message: "wrong".to_owned() };
    assert_eq!(said(&report), words("failed", "red"));
    let part = Run::new(&memory).only("exclusion").run();
    assert_eq!(said(&part), words("unproven", "yellow"));
}

/// Factories of broken stores.
#[derive(Clone, Copy)]
enum Odd {
    /// Grants every request.
    Open,
    /// As `Open`, and declares capabilities that its harness cannot test.
    Boasts,
    /// As `Open`, and declares durable tokens, although its harness cannot restart the store.
    Remembers,
    /// As `Open`, and declares to be on a network.
    Far,
    /// Never answers.
    Hangs,
    /// Cannot be opened.
    Closed,
}

#[async_trait]
impl Factory for Odd {
    fn time(&self) -> Time {
        Time::Virtual
    }

    async fn open(&self) -> Result<Box<dyn Harness>, Error> {
        match self {
            Self::Open => Ok(Box::new(OpenHarness(Capabilities::new(Scope::Process)))),
            Self::Boasts => {
                let mut declared = Capabilities::new(Scope::Machine);
                declared.fencing = Fencing::Durable;
                declared.crash_release = Some(Duration::from_secs(30));
                Ok(Box::new(OpenHarness(declared)))
            }
            Self::Remembers => {
                let mut declared = Capabilities::new(Scope::Process);
                declared.fencing = Fencing::Durable;
                Ok(Box::new(OpenHarness(declared)))
            }
            Self::Far => Ok(Box::new(OpenHarness(Capabilities::new(Scope::Network)))),
            Self::Hangs => std::future::pending().await,
            Self::Closed => Err(Error::new(ErrorKind::Unavailable, "there is no such store")),
        }
    }
}

#[derive(Debug)]
struct OpenHarness(Capabilities);

#[async_trait]
impl Harness for OpenHarness {
    async fn client(&self) -> Result<Arc<dyn leasehold_api::Lock>, Error> {
        let backend = Single::new(OpenStore(self.0.clone()));
        // Without scripted faults, the wrapper changes no call.
        Ok(Arc::new(Engine::start(Disturbed::new(backend))?))
    }
}

#[derive(Debug)]
struct OpenStore(Capabilities);

impl std::fmt::Display for OpenStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("open to all")
    }
}

#[async_trait]
impl SingleKey for OpenStore {
    fn capabilities(&self) -> &Capabilities {
        &self.0
    }

    async fn acquire(&self, _: Request) -> Result<Attempt, Error> {
        Ok(Attempt::Granted(Default::default()))
    }

    async fn renew(&self, _: HoldRef) -> Result<Renewed, Error> {
        Ok(Renewed::Extended)
    }

    async fn release(&self, _: HoldRef) -> Result<ReleaseReply, Error> {
        Ok(ReleaseReply::new(true))
    }
}
