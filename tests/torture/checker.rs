//! Reads what the workers saw, and knows nothing of how the stores work.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::time::Duration;

/// One section of one worker, as far as its record goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Section {
    pub(crate) key: String,
    pub(crate) begin: u64,
    pub(crate) token: Option<u64>,
    /// None: the worker died in it.
    pub(crate) end: Option<End>,
}

/// How a section ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct End {
    /// Read before `valid` was asked.
    pub(crate) at: u64,
    pub(crate) valid: bool,
    /// The value that the fenced register took; None: it refused, or there is no token.
    pub(crate) fenced: Option<u64>,
    pub(crate) plain: u64,
}

/// What was found.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    pub(crate) grants: usize,
    /// Updates of the plain register that another one wrote over.
    pub(crate) plain_lost: usize,
    pub(crate) violations: Vec<String>,
}

/// Reads the complete lines of one worker's record; a line that its death cut short counts as not written.
pub(crate) fn read(record: &str) -> Vec<Section> {
    let mut sections: Vec<Section> = Vec::new();
    for line in record.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')) {
        let number = |text: &str| text.parse().ok();
        match line.split(' ').collect::<Vec<_>>()[..] {
            ["B", key, begin, token] => sections.push(Section {
                key: key.to_owned(),
                begin: begin.parse().unwrap(),
                token: number(token),
                end: None,
            }),
            ["E", at, valid, fenced, plain] => {
                sections.last_mut().unwrap().end = Some(End {
                    at: at.parse().unwrap(),
                    valid: valid == "valid",
                    fenced: number(fenced),
                    plain: plain.parse().unwrap(),
                });
            }
            _ => panic!("not a line of a record: {line:?}"),
        }
    }
    sections
}

/// Checks the sections of all workers. Two that read valid at their ends may overlap for `allowed` only.
pub(crate) fn check(sections: &[Section], allowed: Duration) -> Findings {
    let mut findings = Findings { grants: sections.len(), ..Findings::default() };
    let mut keys: BTreeMap<&str, Vec<&Section>> = BTreeMap::new();
    for section in sections {
        keys.entry(&section.key).or_default().push(section);
    }
    for (key, mut sections) in keys {
        sections.sort_by_key(|section| section.begin);
        overlaps(key, &sections, allowed, &mut findings.violations);
        tokens(key, &sections, &mut findings.violations);
        findings.plain_lost += registers(key, &sections, &mut findings.violations);
    }
    findings
}

fn overlaps(key: &str, sections: &[&Section], allowed: Duration, violations: &mut Vec<String>) {
    // The section that reached furthest so far is the one that the next can overlap most.
    let mut furthest: Option<(u64, &Section)> = None;
    for section in sections {
        let Some(end) = section.end.as_ref().filter(|end| end.valid) else { continue };
        if let Some((reached, earlier)) = furthest {
            let shared = Duration::from_nanos(reached.min(end.at).saturating_sub(section.begin));
            if shared > allowed {
                violations.push(format!("overlap of {shared:?} on {key}: {earlier:?} and {section:?}"));
            }
        }
        if furthest.is_none_or(|(reached, _)| reached < end.at) {
            furthest = Some((end.at, section));
        }
    }
}

/// Grants of which one had ended before the other began have their tokens in that order; no two have the same.
fn tokens(key: &str, sections: &[&Section], violations: &mut Vec<String>) {
    let mut seen: BTreeMap<u64, &Section> = BTreeMap::new();
    for section in sections {
        let Some(token) = section.token else { continue };
        if let Some(earlier) = seen.insert(token, section) {
            violations.push(format!("one token twice on {key}: {earlier:?} and {section:?}"));
        }
        // A grant may wait for a stopped worker until a successor has come and gone; it does not read valid then.
        if section.end.as_ref().is_none_or(|end| !end.valid) {
            continue;
        }
        let ended = |other: &&Section| other.end.as_ref().is_some_and(|end| end.at < section.begin);
        if let Some((_, earlier)) = seen.range(token + 1..).find(|(_, other)| ended(other)) {
            violations.push(format!("tokens fall on {key}: {earlier:?} before {section:?}"));
        }
    }
}

/// Two updates that wrote one value: one is lost. Returns how many of the plain register are.
fn registers(key: &str, sections: &[&Section], violations: &mut Vec<String>) -> usize {
    let mut fenced: BTreeMap<u64, &Section> = BTreeMap::new();
    let mut plain = BTreeMap::new();
    let mut lost = 0;
    for section in sections {
        let Some(end) = &section.end else { continue };
        if let Some(value) = end.fenced
            && let Some(earlier) = fenced.insert(value, section)
        {
            violations.push(format!("lost update of {key}'s fenced register: {earlier:?} and {section:?}"));
        }
        lost += usize::from(plain.insert(end.plain, ()).is_some());
    }
    lost
}

fn section(begin: u64, at: u64, token: u64) -> Section {
    let end = End { at, valid: true, fenced: Some(token), plain: token };
    Section { key: "k".to_owned(), begin, token: Some(token), end: Some(end) }
}

fn ended(section: &mut Section) -> &mut End {
    section.end.as_mut().unwrap()
}

fn violations(sections: &[Section], allowed: u64) -> String {
    check(sections, Duration::from_nanos(allowed)).violations.join("; ")
}

#[test]
fn a_good_record_has_no_violation() {
    let record = "B k 10 1\nE 20 valid 1 1\nB k 40 3\nE 50 lost - 3\nB k 6";
    let mut sections = read(record);
    assert_eq!(sections.len(), 2, "the line that was cut short is left out");
    sections.push(section(21, 30, 2));
    let findings = check(&sections, Duration::ZERO);
    assert_eq!((findings.grants, findings.plain_lost), (3, 0));
    assert_eq!(findings.violations, Vec::<String>::new());
}

#[test]
fn an_overlap_is_found_beyond_its_bound_and_where_both_read_valid() {
    let mut sections = [section(10, 100, 1), section(20, 30, 2), section(90, 120, 3)];
    let found = violations(&sections, 0);
    assert_eq!(found.matches("overlap of").count(), 2, "{found}");
    assert_eq!(violations(&sections, 10), "");
    ended(&mut sections[0]).valid = false;
    assert_eq!(violations(&sections, 0), "");
}

#[test]
fn keys_do_not_disturb_each_other() {
    let mut sections = [section(10, 30, 1), section(20, 40, 1)];
    "other".clone_into(&mut sections[1].key);
    assert_eq!(violations(&sections, 0), "");
}

#[test]
fn tokens_that_fall_or_come_twice_are_found() {
    let mut sections = [section(10, 20, 2), section(30, 40, 1)];
    assert!(violations(&sections, 0).contains("tokens fall"));
    // It was granted before, and wrote its line after.
    ended(&mut sections[0]).at = 35;
    ended(&mut sections[0]).valid = false;
    assert_eq!(violations(&sections, 0), "");
    // It was stopped before it could write its line, and reads lost.
    let mut late = [section(10, 20, 2), section(30, 40, 1)];
    ended(&mut late[1]).valid = false;
    assert_eq!(violations(&late, 0), "");
    let mut twice = [section(10, 20, 2), section(30, 40, 2)];
    ended(&mut twice[1]).fenced = None;
    assert!(violations(&twice, 0).contains("one token twice"));
}

#[test]
fn lost_updates_are_violations_where_they_are_fenced_and_counted_elsewhere() {
    let mut sections = [section(10, 20, 1), section(30, 40, 2)];
    ended(&mut sections[1]).plain = 1;
    let findings = check(&sections, Duration::ZERO);
    assert_eq!((findings.plain_lost, findings.violations.len()), (1, 0));
    ended(&mut sections[1]).fenced = Some(1);
    assert!(violations(&sections, 0).contains("lost update"));
}
