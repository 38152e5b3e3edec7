//! Checks the workers' records, without knowledge of the stores' code.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::record::{End, Section};

/// A fault of the store, with its times.
#[derive(Clone, Debug)]
pub(crate) struct Done {
    pub(crate) fault: &'static str,
    pub(crate) begin: u64,
    pub(crate) end: u64,
    /// Time after the fault's end until which two guards of a key may read valid, starting with the fault.
    pub(crate) gap: Option<Duration>,
}

/// The store's promises, and the events during the run.
#[derive(Debug, Default)]
pub(crate) struct Circumstances {
    /// Maximum time after a loss until the holder notices it.
    pub(crate) loss: Duration,
    /// Maximum time after a fault until each key is granted again.
    pub(crate) bound: Duration,
    pub(crate) faults: Vec<Done>,
    /// Stalls of the machine. Waits that are too long because of them are not the store's fault.
    pub(crate) stalls: Vec<(u64, u64)>,
    /// Time at which the workers were stopped.
    pub(crate) end: u64,
}

/// Results of the check.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    pub(crate) grants: usize,
    /// Lost updates of the plain register.
    pub(crate) plain_lost: usize,
    /// Lost updates of the fenced register.
    pub(crate) fenced_lost: usize,
    /// The longest time for which two guards of a key read valid.
    pub(crate) longest_overlap: Duration,
    /// Times from the end of a fault to the next grant of a key.
    pub(crate) waits: Vec<Duration>,
    /// Longest of these waits, and the fault before it.
    pub(crate) longest_wait: Option<(Duration, &'static str)>,
    /// Longest time without a grant of any key, from the beginning of each fault to the beginning of the next one.
    pub(crate) pauses: BTreeMap<&'static str, Duration>,
    /// Waits that were too long while the machine stood still.
    pub(crate) inconclusive: usize,
    pub(crate) violations: Vec<String>,
}

type Keys<'a> = BTreeMap<&'a str, Vec<&'a Section>>;

/// Checks the sections of all workers.
pub(crate) fn check(sections: &[Section], circumstances: &Circumstances) -> Findings {
    let mut findings = Findings { grants: sections.len(), ..Findings::default() };
    let mut keys = Keys::new();
    for section in sections {
        keys.entry(&section.key).or_default().push(section);
    }
    for (key, sections) in &mut keys {
        sections.sort_by_key(|section| section.begin);
        valid_together(key, sections, circumstances, &mut findings);
        released_together(key, sections, circumstances, &mut findings.violations);
        tokens(key, sections, circumstances, &mut findings.violations);
        registers(key, sections, circumstances, &mut findings);
    }
    next_grants(&keys, circumstances, &mut findings);
    findings.pauses = pauses(sections, circumstances);
    findings
}

impl Circumstances {
    /// Returns whether the whole time is within one fault's gap.
    fn is_in_gap(&self, from: u64, to: u64) -> bool {
        self.faults.iter().any(|done| {
            let is_until = |gap| to <= done.end.saturating_add(nanos(gap));
            done.begin <= from && done.gap.is_some_and(is_until)
        })
    }

    /// Returns the message of a violation, with the last fault before it.
    fn violation(&self, what: &str, earlier: &Section, section: &Section) -> String {
        let before = self.faults.iter().rev().find(|done| done.begin <= section.begin);
        let after = before.map_or_else(String::new, |done| {
            let since = Duration::from_nanos(section.begin - done.begin);
            format!("{since:?} after the beginning of {}: ", done.fault)
        });
        format!("{after}{what}: {earlier:?} and {section:?}")
    }
}

/// Calls `found` for each section that started before an earlier section ended, with the start and the end of the overlap.
fn overlaps<'a>(sections: &[&'a Section], mut found: impl FnMut((u64, u64), &'a Section, &'a Section)) {
    // Compares with the section that ends last so far, because it has the longest overlap.
    let mut furthest: Option<(u64, &Section)> = None;
    for section in sections {
        let Some(end) = &section.end else { continue };
        if let Some((reached, earlier)) = furthest
            && section.begin < reached
        {
            found((section.begin, reached.min(end.at)), earlier, section);
        }
        if furthest.is_none_or(|(reached, _)| reached < end.at) {
            furthest = Some((end.at, section));
        }
    }
}

/// Checks C1: no two overlapping sections read valid at their ends.
fn valid_together(key: &str, sections: &[&Section], around: &Circumstances, findings: &mut Findings) {
    let is_valid = |section: &&Section| section.end.as_ref().is_some_and(|end| end.valid);
    let valid: Vec<_> = sections.iter().copied().filter(is_valid).collect();
    overlaps(&valid, |(from, to), earlier, section| {
        let shared = Duration::from_nanos(to.saturating_sub(from));
        findings.longest_overlap = findings.longest_overlap.max(shared);
        if !around.is_in_gap(from, to) {
            let what = format!("overlap of {shared:?} on {key}");
            findings.violations.push(around.violation(&what, earlier, section));
        }
    });
}

/// Checks C6: no two overlapping sections have releases that both confirm the lock, even after a fault.
fn released_together(key: &str, sections: &[&Section], around: &Circumstances, violations: &mut Vec<String>) {
    let released: Vec<_> = sections.iter().copied().filter(|section| section.is_released).collect();
    overlaps(&released, |_, earlier, section| {
        let what = format!("both were held on {key} until released");
        violations.push(around.violation(&what, earlier, section));
    });
}

/// Checks C8: tokens are unique, and a grant after the end of another has a greater token.
fn tokens(key: &str, sections: &[&Section], around: &Circumstances, violations: &mut Vec<String>) {
    let mut seen: BTreeMap<u64, &Section> = BTreeMap::new();
    for section in sections {
        let Some(token) = section.token else { continue };
        if let Some(earlier) = seen.insert(token, section) {
            violations.push(around.violation(&format!("one token twice on {key}"), earlier, section));
        }
        // A stopped worker might record its grant only after a successor has ended. Such a grant does not read valid,
        // unless it is within a gap, and its release is never confirmed.
        let is_valid = |end: &End| end.valid && !around.is_in_gap(section.begin, end.at);
        if !section.is_released && !section.end.as_ref().is_some_and(is_valid) {
            continue;
        }
        let ended = |other: &&Section| other.end.as_ref().is_some_and(|end| end.at < section.begin);
        if let Some((_, earlier)) = seen.range(token + 1..).find(|(_, other)| ended(other)) {
            violations.push(around.violation(&format!("tokens fall on {key}"), earlier, section));
        }
    }
}

/// Counts lost updates: if two sections wrote the same value, one update is lost.
fn registers(key: &str, sections: &[&Section], around: &Circumstances, findings: &mut Findings) {
    let mut fenced: BTreeMap<u64, &Section> = BTreeMap::new();
    let mut plain = BTreeMap::new();
    for section in sections {
        let Some(end) = &section.end else { continue };
        if let Some(value) = end.fenced
            && let Some(earlier) = fenced.insert(value, section)
        {
            findings.fenced_lost += 1;
            let what = format!("lost update of {key}'s fenced register");
            findings.violations.push(around.violation(&what, earlier, section));
        }
        findings.plain_lost += usize::from(plain.insert(end.plain, ()).is_some());
    }
}

/// Checks C11: each key is granted again within the bound after each fault, unless the next fault comes earlier.
fn next_grants(keys: &Keys<'_>, around: &Circumstances, findings: &mut Findings) {
    for (at, fault) in around.faults.iter().enumerate() {
        let until = around.faults.get(at + 1).map_or(around.end, |next| next.begin);
        for (key, sections) in keys {
            let first = sections.partition_point(|section| section.begin <= fault.end);
            let granted = sections.get(first).map(|section| section.begin).filter(|begin| *begin <= until);
            let waited = Duration::from_nanos(granted.unwrap_or(until).saturating_sub(fault.end));
            if granted.is_some() {
                findings.waits.push(waited);
                findings.longest_wait = findings.longest_wait.max(Some((waited, fault.fault)));
            }
            if waited <= around.bound {
                continue;
            }
            let stood_still = |(from, to): &(u64, u64)| *from < fault.end + nanos(waited) && *to > fault.end;
            if around.stalls.iter().any(stood_still) {
                findings.inconclusive += 1;
                continue;
            }
            let what = if granted.is_some() { "granted only" } else { "not granted" };
            findings.violations.push(format!("{key} was {what} {waited:?} after {}", fault.fault));
        }
    }
}

/// Returns the longest time without a grant of any key, by fault. It includes the fault itself, in which a store cannot
/// always grant.
fn pauses(sections: &[Section], around: &Circumstances) -> BTreeMap<&'static str, Duration> {
    let mut begins: Vec<u64> = sections.iter().map(|section| section.begin).collect();
    begins.sort_unstable();
    let mut pauses = BTreeMap::new();
    for (at, fault) in around.faults.iter().enumerate() {
        let until = around.faults.get(at + 1).map_or(around.end, |next| next.begin);
        let first = begins.partition_point(|begin| *begin <= fault.begin);
        let grants = begins[first..].iter().copied().take_while(|begin| *begin < until);
        let (mut last, mut longest) = (fault.begin, 0);
        for time in grants.chain([until]) {
            longest = longest.max(time.saturating_sub(last));
            last = time;
        }
        let known: &mut Duration = pauses.entry(fault.fault).or_default();
        *known = (*known).max(Duration::from_nanos(longest));
    }
    pauses
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn section(begin: u64, at: u64, token: u64) -> Section {
        let end = Some(End { at, valid: true, fenced: Some(token), plain: token });
        Section { key: "k".to_owned(), begin, token: Some(token), end, is_released: false }
    }

    fn ended(section: &mut Section) -> &mut End {
        section.end.as_mut().unwrap()
    }

    fn checked(sections: &[Section]) -> Findings {
        check(sections, &Circumstances::default())
    }

    fn violations(sections: &[Section]) -> String {
        checked(sections).violations.join("; ")
    }

    fn done(begin: u64, end: u64, gap: Option<u64>) -> Done {
        Done { fault: "promote", begin, end, gap: gap.map(Duration::from_nanos) }
    }

    #[test]
    fn a_good_record_has_no_violation() {
        let mut sections = [section(10, 20, 1), section(21, 30, 2), section(40, 50, 3)];
        ended(&mut sections[2]).valid = false;
        let findings = checked(&sections);
        assert_eq!((findings.grants, findings.plain_lost, findings.fenced_lost), (3, 0, 0));
        assert_eq!(findings.violations, Vec::<String>::new());
    }

    #[test]
    fn an_overlap_is_found_where_both_read_valid() {
        let mut sections = [section(10, 100, 1), section(20, 30, 2), section(90, 120, 3)];
        let found = checked(&sections);
        assert_eq!((found.violations.len(), found.longest_overlap), (2, Duration::from_nanos(10)));
        ended(&mut sections[0]).valid = false;
        assert_eq!(violations(&sections), "");
    }

    #[test]
    fn an_overlap_is_allowed_in_the_gap_of_a_fault_and_not_after() {
        let sections = [section(10, 100, 1), section(80, 110, 2)];
        let with_gap = |begin, end, gap| {
            let faults = vec![done(begin, end, gap)];
            let bound = Duration::from_secs(1);
            check(&sections, &Circumstances { faults, bound, ..Circumstances::default() }).violations.len()
        };
        assert_eq!(with_gap(70, 90, Some(10)), 0);
        assert_eq!(with_gap(70, 90, Some(9)), 1);
        assert_eq!(with_gap(81, 90, Some(99)), 1);
        assert_eq!(with_gap(70, 90, None), 1);
    }

    #[test]
    fn nothing_excuses_two_that_were_held_until_released() {
        let mut sections = [section(10, 100, 1), section(20, 30, 2)];
        let found = |sections: &[Section]| {
            let faults = vec![done(0, 200, Some(10))];
            let bound = Duration::from_secs(1);
            check(sections, &Circumstances { faults, bound, ..Circumstances::default() })
                .violations
                .join("; ")
        };
        sections[0].is_released = true;
        assert_eq!(found(&sections), "");
        sections[1].is_released = true;
        assert!(found(&sections).contains("both were held"));
    }

    #[test]
    fn keys_do_not_disturb_each_other() {
        let mut sections = [section(10, 30, 1), section(20, 40, 1)];
        "other".clone_into(&mut sections[1].key);
        assert_eq!(violations(&sections), "");
    }

    #[test]
    fn tokens_that_fall_or_come_twice_are_found() {
        let mut sections = [section(10, 20, 2), section(30, 40, 1)];
        assert!(violations(&sections).contains("tokens fall"));
        // The first section was granted earlier but ended later.
        ended(&mut sections[0]).at = 35;
        ended(&mut sections[0]).valid = false;
        assert_eq!(violations(&sections), "");
        // The worker was stopped before it could write its line, and the guard reads lost.
        let mut late = [section(10, 20, 2), section(30, 40, 1)];
        ended(&mut late[1]).valid = false;
        assert_eq!(violations(&late), "");
        // The store ended the hold before the worker learned of the grant.
        ended(&mut late[1]).valid = true;
        let in_a_gap = |sections: &[Section]| {
            let (faults, bound) = (vec![done(20, 30, Some(10))], Duration::from_secs(1));
            check(sections, &Circumstances { faults, bound, ..Circumstances::default() })
                .violations
                .join("; ")
        };
        assert_eq!(in_a_gap(&late), "");
        late[1].is_released = true;
        let found = in_a_gap(&late);
        assert!(found.starts_with("10ns after the beginning of promote: tokens fall"), "{found}");
        let mut twice = [section(10, 20, 2), section(30, 40, 2)];
        ended(&mut twice[1]).fenced = None;
        assert!(violations(&twice).contains("one token twice"));
    }

    #[test]
    fn lost_updates_are_violations_where_they_are_fenced_and_counted_elsewhere() {
        let mut sections = [section(10, 20, 1), section(30, 40, 2)];
        ended(&mut sections[1]).plain = 1;
        let findings = checked(&sections);
        assert_eq!((findings.plain_lost, findings.violations.len()), (1, 0));
        ended(&mut sections[1]).fenced = Some(1);
        assert!(violations(&sections).contains("lost update"));
        assert_eq!(checked(&sections).fenced_lost, 1);
    }

    #[test]
    fn a_key_that_is_granted_too_late_is_found_unless_the_machine_stood_still() {
        let sections = [section(10, 20, 1), section(160, 170, 2)];
        let after = |faults: &[Done], stalls: &[(u64, u64)], end| {
            let (faults, stalls) = (faults.to_vec(), stalls.to_vec());
            let bound = Duration::from_nanos(50);
            check(&sections, &Circumstances { bound, faults, stalls, end, ..Circumstances::default() })
        };
        let late = after(&[done(90, 100, None)], &[], 200);
        assert!(late.violations[0].contains("granted only 60ns after promote"), "{late:?}");
        let never = after(&[done(180, 190, None)], &[], 300);
        assert!(never.violations[0].contains("not granted 110ns after promote"), "{never:?}");
        let stalled = after(&[done(90, 100, None)], &[(120, 130)], 200);
        assert_eq!((stalled.violations.len(), stalled.inconclusive), (0, 1));
        // Each fault starts a separate wait.
        let good = after(&[done(90, 100, None), done(110, 120, None)], &[(0, 20)], 200);
        assert_eq!((good.violations.len(), good.waits), (0, vec![Duration::from_nanos(40)]));
        assert_eq!(good.longest_wait, Some((Duration::from_nanos(40), "promote")));
        assert_eq!(
            good.pauses["promote"],
            Duration::from_nanos(50),
            "from the second fault to the second grant"
        );
    }
}
