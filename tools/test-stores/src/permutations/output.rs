//! The output of `isolationtester`.

use std::str::Lines;

/// One permutation that was run.
#[derive(Debug, Default)]
pub(super) struct Permutation {
    /// The output.
    pub(super) text: String,
    /// The steps in the order in which they were sent.
    pub(super) steps: Vec<Step>,
    /// The cells of the key's row at the end.
    pub(super) row: Option<Vec<String>>,
}

impl Permutation {
    /// Returns the step of this name.
    pub(super) fn step(&self, name: &str) -> &Step {
        match self.steps.iter().find(|step| step.name == name) {
            Some(step) => step,
            None => panic!("step {name} was not sent: {}", self.text),
        }
    }
}

/// One step that was sent. The numbers of moments grow by four with each step. Equal moments can be in either order.
#[derive(Debug)]
pub(super) struct Step {
    name: String,
    pub(super) begun: usize,
    /// One more than its beginning. If it waited, two more than the beginning of the step that ended the wait, because
    /// that step ended first.
    pub(super) ended: usize,
    pub(super) waited: bool,
    pub(super) replies: Vec<Reply>,
}

/// The reply to a statement.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Reply {
    /// The cells of its rows. A NULL is an empty text.
    Rows(Vec<Vec<String>>),
    /// The message of its error.
    Failed(String),
}

/// Reads the output of a run.
pub(super) fn parse(output: &str) -> Vec<Permutation> {
    let mut permutations: Vec<Permutation> = Vec::new();
    let mut lines = output.lines();
    // The step to which the following replies belong.
    let mut current: Option<usize> = None;
    while let Some(line) = lines.next() {
        if line.starts_with("starting permutation: ") {
            permutations.push(Permutation::default());
            current = None;
        }
        let Some(Permutation { text, steps, row }) = permutations.last_mut() else { continue };
        text.push_str(line);
        text.push('\n');
        if line.is_empty() || line.starts_with("starting permutation: ") {
            continue;
        }
        if let Some((name, words)) = line.strip_prefix("step ").and_then(|rest| rest.split_once(": ")) {
            current = Some(read_step(steps, name, words));
            continue;
        }
        let (names, reply) = match line.strip_prefix("ERROR:  ") {
            Some(message) => ("", Reply::Failed(message.to_owned())),
            None => (line, Reply::Rows(read_table(&mut lines, text))),
        };
        if names.starts_with("row_holder|") {
            let Reply::Rows(rows) = reply else { continue };
            *row = rows.into_iter().next();
        } else if let Some(at) = current {
            steps[at].replies.push(reply);
        }
    }
    permutations
}

/// Reads the line of a step that was sent, or that has ended its wait. Returns its place.
fn read_step(steps: &mut Vec<Step>, name: &str, words: &str) -> usize {
    if words == "<... completed>" {
        let last = steps.len().saturating_sub(1) * 4;
        if let Some(at) = steps.iter().position(|step| step.name == name) {
            steps[at].ended = last + 2;
            return at;
        }
    }
    let begun = steps.len() * 4;
    let waited = words.ends_with(" <waiting ...>");
    steps.push(Step { name: name.to_owned(), begun, ended: begun + 1, waited, replies: Vec::new() });
    steps.len() - 1
}

/// Reads a table after the names of its columns.
fn read_table(lines: &mut Lines<'_>, text: &mut String) -> Vec<Vec<String>> {
    let mut next = || {
        let line = lines.next().unwrap_or_else(|| panic!("the output ends inside a table:\n{text}"));
        text.push_str(line);
        text.push('\n');
        line
    };
    let border = next();
    let is_border = !border.is_empty() && border.chars().all(|char| "-+".contains(char));
    assert!(is_border, "no table, because {border:?} follows the names of its columns");
    let mut rows = Vec::new();
    loop {
        let line = next();
        if line.starts_with('(') && (line.ends_with(" row)") || line.ends_with(" rows)")) {
            return rows;
        }
        rows.push(line.split('|').map(|cell| cell.trim().to_owned()).collect());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "\
Parsed test spec with 2 sessions

starting permutation: open s1 close
setval|setval
------+------
     0|    10
(1 row)

step open: BEGIN; SELECT 1 AS locked;
locked
------
     1
(1 row)

step s1: EXECUTE q1 ('k'); <waiting ...>
step close: COMMIT
step s1: <... completed>
key|token
---+-----
k  |   11
k  |
(2 rows)

row_holder|token|released|live|parts
----------+-----+--------+----+-----
b         |   11|f       |t   |     
(1 row)


starting permutation: s1 open close
step s1: EXECUTE q1 ('k');
ERROR:  out of luck
step open: BEGIN; SELECT 1 AS locked;
locked
------
(0 rows)

step close: COMMIT
row_holder|token|released|live|parts
----------+-----+--------+----+-----
(0 rows)

";

    fn rows(rows: &[&[&str]]) -> Reply {
        let cells = |row: &&[&str]| row.iter().map(|cell| (*cell).to_owned()).collect();
        Reply::Rows(rows.iter().map(cells).collect())
    }

    #[test]
    fn steps_have_their_moments_and_replies() {
        let permutations = parse(OUTPUT);
        let [waiting, failing] = &permutations[..] else { panic!("two permutations") };
        let step = waiting.step("s1");
        assert_eq!((step.begun, step.ended, step.waited), (4, 10, true));
        assert_eq!(step.replies, [rows(&[&["k", "11"], &["k", ""]])]);
        assert_eq!((waiting.step("close").begun, waiting.step("close").ended), (8, 9));
        assert!(waiting.step("close").replies.is_empty());
        assert_eq!(waiting.step("open").replies, [rows(&[&["1"]])]);
        assert_eq!(waiting.row.as_deref().unwrap(), ["b", "11", "f", "t", ""]);
        let step = failing.step("s1");
        assert_eq!((step.begun, step.ended, step.waited), (0, 1, false));
        assert_eq!(step.replies, [Reply::Failed("out of luck".to_owned())]);
        assert_eq!(failing.step("open").replies, [rows(&[])]);
        assert_eq!(failing.row, None);
    }
}
