//! Records of workers. Each line is one write, so a kill truncates at most the last line.

use std::fmt;

use leasehold::{LockGuard, Mode};

/// The mode of a section's grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Held {
    Exclusive,
    Shared,
    Permit { number: u32, of: u32 },
}

impl Held {
    pub(crate) fn of(guard: &LockGuard) -> Self {
        match (guard.mode(), guard.permit()) {
            (Mode::Shared, _) => Self::Shared,
            // A permit without a number is recorded with one that no key has.
            (Mode::Permit { of }, number) => Self::Permit { number: number.unwrap_or(of), of },
            _ => Self::Exclusive,
        }
    }

    /// Returns whether two grants of one key must not be held at the same time.
    pub(crate) fn excludes(self, other: Self) -> bool {
        match (self, other) {
            (Self::Shared, Self::Shared) => false,
            (Self::Permit { number, of }, Self::Permit { number: other, of: all }) => {
                of != all || number == other
            }
            _ => true,
        }
    }

    fn parse(text: &str) -> Option<Self> {
        match text {
            "exclusive" => Some(Self::Exclusive),
            "shared" => Some(Self::Shared),
            _ => {
                let (number, of) = text.split_once('/')?;
                Some(Self::Permit { number: number.parse().ok()?, of: of.parse().ok()? })
            }
        }
    }
}

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exclusive => f.write_str("exclusive"),
            Self::Shared => f.write_str("shared"),
            Self::Permit { number, of } => write!(f, "{number}/{of}"),
        }
    }
}

/// One critical section of one worker, from its record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Section {
    pub(crate) key: String,
    pub(crate) begin: u64,
    pub(crate) token: Option<u64>,
    pub(crate) held: Held,
    /// End of the section. `None` if the worker died in it.
    pub(crate) end: Option<End>,
    /// Whether the release confirmed that the lock was held until then.
    pub(crate) is_released: bool,
}

/// The end of a section.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct End {
    /// Time, read before `valid`.
    pub(crate) at: u64,
    pub(crate) valid: bool,
    /// Value written to the fenced register. `None` if it refused the write, or without a token.
    pub(crate) fenced: Option<u64>,
    /// Value written to the plain register. Only exclusive sections write to the registers.
    pub(crate) plain: u64,
}

/// Content of one record.
#[derive(Debug, Default)]
pub(crate) struct Record {
    pub(crate) sections: Vec<Section>,
    /// Times of failed calls, except timeouts.
    pub(crate) failures: Vec<u64>,
    /// Number of jumps of the wall clock.
    pub(crate) jumps: usize,
}

/// Parses the complete lines of one record. A truncated line does not count.
pub(crate) fn read(text: &str) -> Record {
    let mut record = Record::default();
    let number = |text: &str| text.parse().ok();
    for line in text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')) {
        match line.split(' ').collect::<Vec<_>>()[..] {
            ["B", key, begin, token, held] => record.sections.push(Section {
                key: key.to_owned(),
                begin: begin.parse().unwrap(),
                token: number(token),
                held: Held::parse(held).unwrap(),
                end: None,
                is_released: false,
            }),
            ["E", at, valid, fenced, plain] => {
                record.sections.last_mut().unwrap().end = Some(End {
                    at: at.parse().unwrap(),
                    valid: valid == "valid",
                    fenced: number(fenced),
                    plain: plain.parse().unwrap(),
                });
            }
            ["R"] => {
                let section = record.sections.last_mut().unwrap();
                section.is_released = true;
                // The release confirms validity for a command's child, which cannot check, and for a guard in doubt.
                section.end.as_mut().unwrap().valid = true;
            }
            ["F", at] => record.failures.push(at.parse().unwrap()),
            ["C"] => record.jumps += 1,
            _ => panic!("not a line of a record: {line:?}"),
        }
    }
    record
}

/// Returns whether the last complete line is the start of a section.
pub(crate) fn is_in_section(text: &str) -> bool {
    let mut lines = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    lines.next_back().is_some_and(|line| line.starts_with('B'))
}

#[test]
fn lines_are_read_and_one_that_was_cut_short_is_not() {
    let record = read("B k 10 1 exclusive\nE 20 - 1 1\nR\nF 30\nC\nB k 40 - 2/3\nE 50 lost - 3\nB k 6");
    let [first, second] = &record.sections[..] else { panic!("{record:?}") };
    assert_eq!((first.token, first.is_released), (Some(1), true));
    assert_eq!(first.end, Some(End { at: 20, valid: true, fenced: Some(1), plain: 1 }));
    assert_eq!((first.held, second.held), (Held::Exclusive, Held::Permit { number: 2, of: 3 }));
    assert_eq!((second.token, second.is_released), (None, false));
    assert_eq!(second.end, Some(End { at: 50, valid: false, fenced: None, plain: 3 }));
    assert_eq!((record.failures, record.jumps), (vec![30], 1));
}

#[test]
fn a_section_is_open_from_its_first_line_to_its_second() {
    assert!(is_in_section("R\nB k 10 1\n") && is_in_section("B k 10 1\nE 2"));
    assert!(!is_in_section("B k 10 1\nE 20 valid 1 1\n") && !is_in_section("") && !is_in_section("B k"));
}

#[test]
fn a_mode_is_read_as_it_was_written() {
    for held in [Held::Exclusive, Held::Shared, Held::Permit { number: 0, of: 7 }] {
        assert_eq!(Held::parse(&held.to_string()), Some(held));
    }
    assert_eq!((Held::parse("x"), Held::parse("1/x")), (None, None));
}

#[test]
fn modes_exclude_each_other_except_readers_and_permits_with_other_numbers() {
    let permit = |number, of| Held::Permit { number, of };
    let all = [Held::Exclusive, Held::Shared, permit(0, 2), permit(1, 2), permit(1, 3)];
    for one in all {
        for other in all {
            let together = one == Held::Shared && other == Held::Shared
                || [(permit(0, 2), permit(1, 2)), (permit(1, 2), permit(0, 2))].contains(&(one, other));
            assert_eq!(one.excludes(other), !together, "{one} and {other}");
        }
    }
}
