//! The verdict on a store, a rule or a declaration.

use std::fmt;

use leasehold_api::{Capabilities, Error, Fencing, Scope};

use crate::case::{Case, Need, Outcome};
use crate::harness::{Factory, Harness, Time};
use crate::report::CaseReport;
use crate::runner::runtime;

/// The verdict on a store, a rule or a declaration. The variants are ordered: the verdict on several parts is
/// the greatest.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// The subject was tested, and no case refuted it.
    Proven,
    /// The subject was not tested, or only in part.
    Unproven,
    /// A case failed, perhaps because of the machine.
    Inconclusive,
    /// A case refuted the subject.
    Failed,
}

impl Verdict {
    /// Returns the worst outcome of `cases`. [`Unproven`](Self::Unproven) at best if none of them passed or
    /// was refused.
    pub(crate) fn of<'a>(cases: impl Iterator<Item = &'a CaseReport>) -> Self {
        let (mut worst, mut tried) = (Self::Proven, false);
        for entry in cases {
            let one = match entry.outcome {
                Outcome::Failed { .. } => Self::Failed,
                Outcome::Inconclusive { .. } => Self::Inconclusive,
                // A refusal of an undeclared capability is proof too.
                Outcome::Passed | Outcome::Refused { .. } => {
                    tried = true;
                    Self::Proven
                }
                Outcome::NotApplicable { .. } => Self::Proven,
            };
            worst = worst.max(one);
        }
        if tried { worst } else { worst.max(Self::Unproven) }
    }

    /// Returns the exit code of the program for this verdict.
    pub(crate) const fn exit_code(self) -> u8 {
        match self {
            Self::Proven => 0,
            Self::Failed => 1,
            Self::Inconclusive => 2,
            Self::Unproven => 3,
        }
    }

    pub(crate) const fn colour(self) -> &'static str {
        match self {
            Self::Proven => "brightgreen",
            Self::Unproven => "yellow",
            Self::Inconclusive => "lightgrey",
            Self::Failed => "red",
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Proven => "proven",
            Self::Unproven => "unproven",
            Self::Inconclusive => "inconclusive",
            Self::Failed => "failed",
        })
    }
}

/// A capability or bound that the store declares.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct Declaration {
    /// The declaration with its bound, for people.
    pub text: String,
    /// The reason why the harness cannot test the declaration completely. `None` if it can.
    pub hindrance: Option<String>,
    concerns: TriedBy,
}

/// The cases that try a declaration.
#[derive(Clone, Copy, Debug)]
enum TriedBy {
    Rule(&'static str),
    Group(&'static str),
    Need(Need),
}

impl Declaration {
    pub(crate) fn concerns(&self, case: &Case) -> bool {
        match self.concerns {
            TriedBy::Rule(rule) => case.rules.contains(&rule),
            TriedBy::Group(group) => case.group() == group,
            TriedBy::Need(need) => case.needs.contains(&need),
        }
    }

    pub(crate) fn is_of_rule(&self, rule: &str) -> bool {
        matches!(self.concerns, TriedBy::Rule(own) if own == rule)
    }
}

/// The facts about a store that are known before any case runs.
#[derive(Clone, Debug)]
pub(crate) struct StoreDeclarations {
    pub(crate) store: String,
    pub(crate) declarations: Vec<Declaration>,
}

/// Opens a store of `factory` and returns its declarations.
pub(crate) fn declared(factory: &dyn Factory, child_test: bool) -> Result<StoreDeclarations, Error> {
    let runtime = runtime(factory.time())
        .map_err(|error| Error::new(leasehold_api::ErrorKind::Unavailable, error.to_string()))?;
    let found = runtime.block_on(async {
        let harness = factory.open().await?;
        let client = harness.client().await?;
        let declarations = list(client.capabilities(), &*harness, factory.time(), child_test);
        let store = client.to_string();
        client.close().await.map(|()| StoreDeclarations { store, declarations })
    });
    runtime.shutdown_background();
    found
}

fn list(has: &Capabilities, harness: &dyn Harness, time: Time, child_test: bool) -> Vec<Declaration> {
    use TriedBy::{Group, Need as Needs, Rule};
    let elsewhere = (has.scope != Scope::Process).then_some(Need::Child);
    let durable = (has.fencing == Fencing::Durable).then_some(Need::Restart);
    let mut declarations = vec![
        (format!("scope = {:?}", has.scope), Rule("C1"), [elsewhere, None]),
        (format!("loss_detection = {:?}", has.loss_detection), Group("loss"), [Some(Need::Silence), None]),
        (format!("undo = {:?}", has.undo), Group("cancellation"), [Some(Need::Script), None]),
        (format!("handover = {:?}", has.handover), Rule("C11"), [Some(Need::Mute), None]),
        (format!("fairness = {:?}", has.fairness), Rule("C12"), [None, None]),
    ];
    if has.scope == Scope::Network {
        // Only a network delivers a request after its sender has given up.
        let declaration = "late requests are refused".to_owned();
        declarations.push((declaration, Rule("C23"), [Some(Need::LateRequests), None]));
    }
    if let Some(lease) = has.lease {
        let declaration = format!("lease = {:?} to {:?}, by the store's clock", lease.min, lease.max);
        declarations.push((declaration, Needs(Need::Lease), [Some(Need::Skew), None]));
    }
    if !has.ends_late_by.is_zero() {
        declarations.push((format!("ends_late_by = {:?}", has.ends_late_by), Rule("C16"), [None, None]));
    }
    if has.fencing != Fencing::None {
        let across = elsewhere.filter(|_| durable.is_some());
        declarations.push((format!("fencing = {:?}", has.fencing), Rule("C8"), [across, durable]));
    }
    if !has.handover_for.is_zero() {
        let needs = [Some(Need::HandOverOff), Some(Need::Calls)];
        declarations.push((format!("handover_for = {:?}", has.handover_for), Rule("C21"), needs));
    }
    if !has.share_for.is_zero() {
        let declaration = format!("share_for = {:?}", has.share_for);
        declarations.push((declaration, Needs(Need::Sharing), [Some(Need::Calls), None]));
    }
    if let (Some(bound), Some(need)) = (has.crash_release, elsewhere) {
        declarations.push((format!("crash_release = {bound:?}"), Group("crash"), [Some(need), None]));
    }
    for (has, need) in [
        (has.cooldown, Need::Cooldown),
        (has.admin.inspect, Need::Inspect),
        (has.admin.list, Need::List),
        (has.admin.force_release, Need::ForceRelease),
        (has.admin.ask, Need::Ask),
        (has.portable, Need::Portable),
        (has.modes.shared, Need::Shared),
        (has.modes.max_permits > 0, Need::Permits),
    ] {
        if has {
            declarations.push((need.capability().to_owned(), Needs(need), [None, None]));
        }
    }
    let reason = |need: Need| need.hindrance(has, harness, time, child_test);
    declarations
        .into_iter()
        .map(|(declaration, concerns, needs)| {
            let hindrance = needs.into_iter().flatten().find_map(reason);
            Declaration { text: declaration, hindrance, concerns }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_verdict_has_an_exit_code_of_its_own_and_the_worst_counts() {
        use Verdict::{Failed, Inconclusive, Proven, Unproven};
        assert_eq!([Proven, Failed, Inconclusive, Unproven].map(Verdict::exit_code), [0, 1, 2, 3]);
        assert!(Proven < Unproven && Unproven < Inconclusive && Inconclusive < Failed);
    }
}
