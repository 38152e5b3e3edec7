//! What workers write down: lines, each in one write, so that death tears at most the last one.

/// One section of one worker, as far as its record goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Section {
    pub(crate) key: String,
    pub(crate) begin: u64,
    pub(crate) token: Option<u64>,
    /// None: the worker died in it.
    pub(crate) end: Option<End>,
    /// The release said that the lock was held until then.
    pub(crate) is_released: bool,
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

/// What one file says.
#[derive(Debug, Default)]
pub(crate) struct Record {
    pub(crate) sections: Vec<Section>,
    /// When calls failed for another reason than that the lock was held.
    pub(crate) failures: Vec<u64>,
    /// How often the wall clock was seen to jump.
    pub(crate) jumps: usize,
}

/// Reads the complete lines of one record; a line that death cut short counts as not written.
pub(crate) fn read(text: &str) -> Record {
    let mut record = Record::default();
    let number = |text: &str| text.parse().ok();
    for line in text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')) {
        match line.split(' ').collect::<Vec<_>>()[..] {
            ["B", key, begin, token] => record.sections.push(Section {
                key: key.to_owned(),
                begin: begin.parse().unwrap(),
                token: number(token),
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
                // Whoever cannot ask (a command's child), or was in doubt, knows it by now.
                section.end.as_mut().unwrap().valid = true;
            }
            ["F", at] => record.failures.push(at.parse().unwrap()),
            ["C"] => record.jumps += 1,
            _ => panic!("not a line of a record: {line:?}"),
        }
    }
    record
}

/// Whether the last complete line says that a section has begun, and nothing that it has ended.
pub(crate) fn is_in_section(text: &str) -> bool {
    let mut lines = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    lines.next_back().is_some_and(|line| line.starts_with('B'))
}

#[test]
fn lines_are_read_and_one_that_was_cut_short_is_not() {
    let record = read("B k 10 1\nE 20 - 1 1\nR\nF 30\nC\nB k 40 -\nE 50 lost - 3\nB k 6");
    let [first, second] = &record.sections[..] else { panic!("{record:?}") };
    assert_eq!((first.token, first.is_released), (Some(1), true));
    assert_eq!(first.end, Some(End { at: 20, valid: true, fenced: Some(1), plain: 1 }));
    assert_eq!((second.token, second.is_released), (None, false));
    assert_eq!(second.end, Some(End { at: 50, valid: false, fenced: None, plain: 3 }));
    assert_eq!((record.failures, record.jumps), (vec![30], 1));
}

#[test]
fn a_section_is_open_from_its_first_line_to_its_second() {
    assert!(is_in_section("R\nB k 10 1\n") && is_in_section("B k 10 1\nE 2"));
    assert!(!is_in_section("B k 10 1\nE 20 valid 1 1\n") && !is_in_section("") && !is_in_section("B k"));
}
