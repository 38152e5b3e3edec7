//! Compares the finished statements of typical specs with the files `companions/claim/sql/*.sql`, which a reader can
//! open. The test fails if a statement differs from its file.

#![allow(clippy::unwrap_used)] // An error here fails the test.

mod layout;
mod parameters;
mod single;
mod specs;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

use layout::{layout, squeezed};
use parameters::Parameters;

/// The environment variable that makes the test write the files instead of comparing them.
const UPDATE: &str = "LEASEHOLD_UPDATE_SQL";

/// One statement of a file, with its explanation.
struct Statement {
    name: String,
    what: &'static str,
    /// The type and the meaning of each parameter.
    parameters: Parameters,
    sql: String,
}

impl Statement {
    /// Formats the statement and its explanation as they stand in a file.
    fn text(&self) -> String {
        let mut text = format!("-- {}\n-- {}\n", self.name, self.what);
        for (at, (kind, meaning)) in self.parameters.iter().enumerate() {
            let unused = if self.uses(at + 1) { "" } else { " (not used here)" };
            writeln!(text, "-- ${} {kind}: {meaning}{unused}", at + 1).unwrap();
        }
        let parameters = self.parameters.len();
        assert!(
            (parameters + 1..20).all(|next| !self.uses(next)),
            "{}: a parameter has no meaning",
            self.name
        );
        let sql = layout(&self.sql);
        assert_eq!(squeezed(&sql), squeezed(&self.sql), "{}: only white space may differ", self.name);
        format!("{text}{sql}\n;\n")
    }

    fn uses(&self, parameter: usize) -> bool {
        let name = format!("${parameter}");
        self.sql.split(&name).skip(1).any(|rest| !rest.starts_with(|next: char| next.is_ascii_digit()))
    }
}

#[test]
fn statements_are_those_of_the_sql_files() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("sql");
    let (mut differences, mut names) = (String::new(), BTreeSet::new());
    for (name, head, statements) in specs::files() {
        let blocks: Vec<String> = statements.iter().map(Statement::text).collect();
        let text = format!("{head}\n{}", blocks.join("\n"));
        let path = folder.join(format!("{name}.sql"));
        names.insert(format!("{name}.sql"));
        if env::var_os(UPDATE).is_some() {
            fs::write(&path, &text).unwrap();
        }
        let kept = fs::read_to_string(&path).unwrap_or_default();
        differences += &difference(name, &kept, &text);
    }
    let kept = fs::read_dir(&folder).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
    assert_eq!(kept.collect::<BTreeSet<_>>(), names, "files of {}", folder.display());
    assert!(
        differences.is_empty(),
        "Statements differ from the files in companions/claim/sql:\n{differences}\n\
         If the change is meant, run `{UPDATE}=1 cargo test --profile tests -p leasehold-claim --lib golden`, read the difference of the \
         files and commit them."
    );
}

/// Returns the lines that differ in each statement: `-` from the file, `+` from the code.
fn difference(name: &str, kept: &str, made: &str) -> String {
    let blocks = |text: &str| text.split("\n\n").map(str::to_owned).collect::<Vec<_>>();
    let title = |block: &str| block.lines().next().unwrap_or_default().to_owned();
    let (kept, made) = (blocks(kept), blocks(made));
    let mut titles: Vec<String> = made.iter().chain(&kept).map(|block| title(block)).collect();
    let mut seen = BTreeSet::new();
    titles.retain(|one| seen.insert(one.clone()));
    let mut report = String::new();
    for one in titles {
        let of =
            |blocks: &[String]| blocks.iter().find(|block| title(block) == one).cloned().unwrap_or_default();
        let (before, after) = (of(&kept), of(&made));
        if before.trim_end() == after.trim_end() {
            continue;
        }
        let (before, after): (Vec<&str>, Vec<&str>) = (before.lines().collect(), after.lines().collect());
        let same = |(a, b): &(&&str, &&str)| a == b;
        let first = before.iter().zip(&after).take_while(same).count();
        let most = before.len().min(after.len()) - first;
        let last = before.iter().rev().zip(after.iter().rev()).take(most).take_while(same).count();
        writeln!(report, "{name}.sql, {}, line {}", one.trim_start_matches("-- "), first + 1).unwrap();
        for (mark, lines) in [("-", &before), ("+", &after)] {
            for line in &lines[first..lines.len() - last] {
                writeln!(report, "  {mark} {line}").unwrap();
            }
        }
    }
    report
}
