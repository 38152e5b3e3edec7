//! Checks the workers' records, without knowledge of the stores' code.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::record::{End, Held, Section};

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
        numbers(key, sections, &mut findings.violations);
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

/// Calls `found` for each section that started before an earlier section ended that excludes it, or before all permits but
/// one were free. Passes the start and the end of the overlap.
fn overlaps<'a>(sections: &[&'a Section], mut found: impl FnMut((u64, u64), &'a Section, &'a Section)) {
    // The earlier sections that have not ended, with their ends.
    let mut open: Vec<(u64, &Section)> = Vec::new();
    for section in sections {
        let Some(end) = &section.end else { continue };
        open.retain(|(reached, _)| section.begin < *reached);
        let rivals = open.iter().filter(|(_, earlier)| earlier.held.excludes(section.held));
        // Compares with the section that ends last, because it has the longest overlap.
        let rival = rivals.max_by_key(|(reached, _)| *reached).copied();
        if let Some((reached, earlier)) = rival.or_else(|| beyond_n(&open, section.held)) {
            found((section.begin, reached.min(end.at)), earlier, section);
        }
        open.push((end.at, section));
    }
}

/// Returns the permit whose end leaves one free for a further grant, if all are held.
fn beyond_n<'a>(open: &[(u64, &'a Section)], held: Held) -> Option<(u64, &'a Section)> {
    let Held::Permit { of, .. } = held else { return None };
    let is_like = |section: &Section| matches!(section.held, Held::Permit { of: all, .. } if all == of);
    let mut permits: Vec<_> = open.iter().copied().filter(|(_, section)| is_like(section)).collect();
    permits.sort_by_key(|(reached, _)| *reached);
    let too_many = permits.len().checked_sub(of as usize)?;
    permits.get(too_many).copied()
}

/// Checks C20: the number of each permit is below N.
fn numbers(key: &str, sections: &[&Section], violations: &mut Vec<String>) {
    for section in sections {
        if let Held::Permit { number, of } = section.held
            && number >= of
        {
            violations.push(format!("no permit of {key} has this number: {section:?}"));
        }
    }
}

/// Checks C1, C19 and C20: no two overlapping sections that exclude each other, and no more than N permits, read valid at
/// their ends.
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

/// Checks C8: the token of an exclusive grant is unique, and of two grants of which one is exclusive, the grant after the
/// end of the other has a greater token.
fn tokens(key: &str, sections: &[&Section], around: &Circumstances, violations: &mut Vec<String>) {
    let mut seen: BTreeMap<u64, Vec<&Section>> = BTreeMap::new();
    for section in sections {
        let Some(token) = section.token else { continue };
        let are_ordered = |other: &&&Section| [other.held, section.held].contains(&Held::Exclusive);
        let same = seen.entry(token).or_default();
        if let Some(earlier) = same.iter().find(are_ordered) {
            violations.push(around.violation(&format!("one token twice on {key}"), earlier, section));
        }
        same.push(section);
        // A stopped worker might record its grant only after a successor has ended. Such a grant does not read valid,
        // unless it is within a gap, and its release is never confirmed.
        let is_valid = |end: &End| end.valid && !around.is_in_gap(section.begin, end.at);
        if !section.is_released && !section.end.as_ref().is_some_and(is_valid) {
            continue;
        }
        let ended = |other: &&&Section| other.end.as_ref().is_some_and(|end| end.at < section.begin);
        let mut greater = seen.range(token + 1..).flat_map(|(_, others)| others).filter(are_ordered);
        if let Some(earlier) = greater.find(ended) {
            violations.push(around.violation(&format!("tokens fall on {key}"), earlier, section));
        }
    }
}

/// Counts lost updates: if two exclusive sections wrote the same value, one update is lost.
fn registers(key: &str, sections: &[&Section], around: &Circumstances, findings: &mut Findings) {
    let mut fenced: BTreeMap<u64, &Section> = BTreeMap::new();
    let mut plain = BTreeMap::new();
    for section in sections.iter().filter(|section| section.held == Held::Exclusive) {
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
        let held = Held::Exclusive;
        Section { key: "k".to_owned(), begin, token: Some(token), held, end, is_released: false }
    }

    fn held(held: Held, begin: u64, at: u64, token: u64) -> Section {
        Section { held, ..section(begin, at, token) }
    }

    const fn permit(number: u32, of: u32) -> Held {
        Held::Permit { number, of }
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
    fn readers_overlap_and_a_writer_does_not() {
        use Held::{Exclusive, Shared};
        let readers = [held(Shared, 10, 100, 1), held(Shared, 20, 50, 1), held(Shared, 60, 90, 3)];
        assert_eq!(violations(&readers), "");
        let with = |mode, begin, at| [&readers[..], &[held(mode, begin, at, 7)]].concat();
        assert_eq!(violations(&with(Exclusive, 100, 120)), "");
        assert_eq!(checked(&with(Exclusive, 95, 120)).longest_overlap, Duration::from_nanos(5));
        assert!(violations(&with(Exclusive, 95, 120)).contains("overlap of 5ns"));
        assert!(violations(&with(permit(0, 2), 95, 120)).contains("overlap of 5ns"));
        // A short reader that began later does not hide the longer one.
        assert!(violations(&with(Exclusive, 55, 58)).contains("overlap of 3ns"));
        let mut released = with(Exclusive, 95, 120);
        (released[0].is_released, released[3].is_released) = (true, true);
        assert!(violations(&released).contains("both were held"));
    }

    #[test]
    fn there_are_never_more_than_n_permits_and_each_number_is_held_once() {
        let two = [held(permit(0, 2), 10, 100, 1), held(permit(1, 2), 20, 60, 2)];
        let with = |third| violations(&[&two[..], &[third]].concat());
        assert_eq!(with(held(permit(1, 2), 60, 120, 3)), "");
        // Number 1 is free again, and number 0 is held.
        assert!(with(held(permit(0, 2), 60, 120, 3)).contains("overlap of 40ns"));
        assert!(
            with(held(permit(0, 3), 60, 120, 3)).contains("overlap of 40ns"),
            "another number of permits"
        );
        assert!(with(held(permit(2, 2), 60, 120, 3)).contains("no permit of k has this number"));
        // A third holder of two permits is found although its number is of its own.
        let crowd = checked(&[&two[..], &[held(permit(2, 2), 30, 50, 3)]].concat());
        assert!(crowd.violations.iter().any(|found| found.contains("overlap of 20ns")), "{crowd:?}");
        let until_first = checked(&[&two[..], &[held(permit(2, 2), 30, 90, 3)]].concat());
        assert_eq!(until_first.longest_overlap, Duration::from_nanos(30), "one permit is free from 60 on");
    }

    #[test]
    fn tokens_of_readers_are_compared_with_those_of_writers_alone() {
        use Held::{Exclusive, Shared};
        let readers = |first, second| [held(Shared, 10, 20, first), held(Shared, 30, 40, second)];
        assert_eq!((violations(&readers(2, 1)), violations(&readers(2, 2))), (String::new(), String::new()));
        for (first, second) in [(Exclusive, Shared), (Shared, Exclusive), (Exclusive, permit(0, 1))] {
            let found = |one, other| violations(&[held(first, 10, 20, one), held(second, 30, 40, other)]);
            assert_eq!(found(1, 2), "");
            assert!(found(2, 1).contains("tokens fall"), "{first} {second}");
            assert!(found(2, 2).contains("one token twice"), "{first} {second}");
        }
    }

    #[test]
    fn readers_write_to_no_register() {
        let mut readers = [held(Held::Shared, 10, 20, 1), held(permit(0, 2), 30, 40, 2)];
        for reader in &mut readers {
            (ended(reader).plain, ended(reader).fenced) = (0, Some(0));
        }
        let findings = checked(&readers);
        assert_eq!((findings.plain_lost, findings.fenced_lost, violations(&readers)), (0, 0, String::new()));
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
