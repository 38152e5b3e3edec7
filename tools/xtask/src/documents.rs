//! Checks documents against tests: each test that a document names exists, `docs/coverage.md` has every number once, and the
//! counts of `docs/bugs.md` are right. Also checks that no test is named by a number of `docs/coverage.md`, that no file is
//! called `mod.rs`, and that each file is short enough.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use crate::step::Outcome;

/// Pages with tables that name tests in backquotes, and the heading of that column.
const PAGES: [(&str, &str); 2] = [(COVERAGE, "Shown by"), (BUGS, "Test")];

/// The page that maps each number of the list of covered cases to tests.
const COVERAGE: &str = "docs/coverage.md";

/// The page of all bugs. It also names functions as `folder/file.rs::function`, and counts bugs by finder.
const BUGS: &str = "docs/bugs.md";

/// Limit of lines per file, from CONTRIBUTING.md.
const MOST_LINES: usize = 500;

/// Files that define a function, by its name.
type Functions = BTreeMap<String, BTreeSet<PathBuf>>;

/// Checks that each test named by a page exists in the workspace and each named function in its file, and the numbers,
/// counts, names and lengths.
pub(crate) fn check() -> Outcome {
    // Goes up two folders, because this package is `tools/xtask`.
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap_or(Path::new("."));
    let (mut functions, mut wrong) = (Functions::new(), Vec::new());
    collect(root, &mut functions, &mut wrong)?;
    let mut named = 0;
    for (page, column) in PAGES {
        for (line, test) in named_in(&cells(&read(&root.join(page))?, column)) {
            named += 1;
            let function = test.rsplit("::").next().unwrap_or(&test);
            if !functions.contains_key(function) {
                wrong.push(format!("{page}:{line}: there is no test {test}"));
            }
        }
    }
    let bugs = read(&root.join(BUGS))?;
    for (line, name) in named_in(&cells(&bugs, "To see it again")) {
        let Some((file, function)) = name.split_once(".rs::") else { continue };
        let file_of = |path: &PathBuf| path.ends_with(format!("{file}.rs"));
        if !functions.get(function).is_some_and(|files| files.iter().any(file_of)) {
            wrong.push(format!("{BUGS}:{line}: there is no function {function} in a {file}.rs"));
        }
    }
    wrong.extend(misnumbered(&read(&root.join(COVERAGE))?));
    wrong.extend(miscounted(&bugs));
    if !wrong.is_empty() {
        return Err(wrong.join("\n"));
    }
    println!("-- documents: {named} tests named, all of them there");
    Ok(())
}

/// Returns the cells of the column `head` in all tables, with their line numbers.
fn cells<'a>(text: &'a str, head: &str) -> Vec<(usize, &'a str)> {
    let mut found = Vec::new();
    // `Some` inside a table, with the position of the column if the table has it.
    let mut table: Option<Option<usize>> = None;
    for (at, line) in text.lines().enumerate() {
        let Some(row) = line.trim().strip_prefix('|').and_then(|row| row.strip_suffix('|')) else {
            table = None;
            continue;
        };
        let mut row = row.split('|').map(str::trim);
        match table {
            None => table = Some(row.position(|cell| cell == head)),
            Some(column) => {
                let cell = column.and_then(|column| row.nth(column)).filter(|cell| *cell != "---");
                found.extend(cell.map(|cell| (at + 1, cell)));
            }
        }
    }
    found
}

/// Returns the names in backquotes, with their line numbers.
fn named_in(cells: &[(usize, &str)]) -> Vec<(usize, String)> {
    let names = |(line, cell): &(usize, &str)| {
        let line = *line;
        // Every second piece is in backquotes.
        cell.split('`').skip(1).step_by(2).map(move |name| (line, name.to_owned())).collect::<Vec<_>>()
    };
    cells.iter().flat_map(names).collect()
}

/// Returns a message for each row whose number does not follow the previous row's. A table continues the previous table
/// or starts a list.
fn misnumbered(text: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    let (mut last_line, mut last) = (0, 0);
    for (line, cell) in cells(text, "#") {
        let number: usize = cell.parse().unwrap_or(0);
        let begins_list = line != last_line + 1 && number == 1;
        if number != last + 1 && !begins_list {
            wrong.push(format!("{COVERAGE}:{line}: {cell} after {last}: a number is missing or there twice"));
        }
        (last_line, last) = (line, number);
    }
    wrong
}

/// Returns a message for each finder whose number of bugs is missing or differs from the rows of bugs.
fn miscounted(text: &str) -> Vec<String> {
    let bugs: BTreeSet<usize> = cells(text, "To see it again").into_iter().map(|(line, _)| line).collect();
    let numbers = cells(text, "Bugs");
    let mut counted: BTreeMap<String, usize> = BTreeMap::new();
    let mut said = BTreeMap::new();
    for (line, finder) in cells(text, "Found by") {
        if bugs.contains(&line) {
            *counted.entry(finder.to_lowercase()).or_default() += 1;
        } else if let Some((_, number)) = numbers.iter().find(|(at, _)| *at == line) {
            said.insert(finder.to_lowercase(), number.parse().unwrap_or(usize::MAX));
            counted.entry(finder.to_lowercase()).or_default();
        }
    }
    let is_wrong = |(finder, number): &(&String, &usize)| said.get(*finder) != Some(*number);
    let say = |(finder, number)| {
        format!("{BUGS}: {number} bugs were found by: {finder}, and the page says otherwise")
    };
    counted.iter().filter(is_wrong).map(say).collect()
}

/// Adds the functions in the Rust files below `folder` to `functions`, and messages about these files to `wrong`.
fn collect(folder: &Path, functions: &mut Functions, wrong: &mut Vec<String>) -> Outcome {
    let entries =
        fs::read_dir(folder).map_err(|error| format!("cannot read {}: {error}", folder.display()))?;
    for entry in entries.flatten() {
        let path: PathBuf = entry.path();
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if path.is_dir() {
            if name != "target" && !name.starts_with('.') {
                collect(&path, functions, wrong)?;
            }
        } else if name.ends_with(".rs") {
            if name == "mod.rs" {
                wrong.push(format!("{}: a module with parts is x.rs beside x/", path.display()));
            }
            let text = read(&path)?;
            if text.lines().count() > MOST_LINES {
                wrong.push(format!("{}: more than {MOST_LINES} lines", path.display()));
            }
            for function in text.lines().filter_map(function_of) {
                if is_numbered(&function) {
                    wrong.push(format!("{}: {function} is named by a number", path.display()));
                }
                functions.entry(function).or_default().insert(path.clone());
            }
        }
    }
    Ok(())
}

/// Returns the function's name if the line starts a function.
fn function_of(line: &str) -> Option<String> {
    let (before, after) = line.split_once("fn ")?;
    let begins = |word: &str| word.starts_with("pub") || word == "async" || word == "const";
    let is_item = before.split_whitespace().all(begins);
    let name: String = after.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
    (is_item && !name.is_empty()).then_some(name)
}

/// Returns whether a function's name starts with a number of the list of covered cases, such as `row_12_`.
fn is_numbered(function: &str) -> bool {
    let rest = ["row_", "trap_"].iter().find_map(|prefix| function.strip_prefix(prefix));
    rest.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}

fn read(path: &Path) -> Outcome<String> {
    fs::read_to_string(path).map_err(|error| format!("cannot read {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_in_their_column_only() {
        let page = "| x | Test |\n|---|---|\n| `a` | `suite::b_c`, `d` |\ntext `e`\n| Test | y |\n|---|---|\n| `f` | `g` |\n\n| z |\n|---|\n| `h` |";
        let names = named_in(&cells(page, "Test"));
        let names: Vec<_> = names.iter().map(|(line, name)| (*line, name.as_str())).collect();
        assert_eq!(names, [(3, "suite::b_c"), (3, "d"), (7, "f")]);
    }

    #[test]
    fn functions_are_found_and_calls_are_not() {
        assert_eq!(function_of("    pub(crate) async fn x_1<T>(").as_deref(), Some("x_1"));
        assert_eq!(function_of("    pub const fn y() {").as_deref(), Some("y"));
        assert_eq!(function_of("// a fn here"), None);
        assert_eq!(function_of("let f = |x| fn y"), None);
    }

    #[test]
    fn each_number_of_a_list_comes_once_and_in_order() {
        let page = |tables: &[&[usize]]| {
            let row = |number: &usize| format!("| {number} | x |\n");
            let table = |rows: &&[usize]| {
                format!("| # | What |\n|---|---|\n{}\n", rows.iter().map(row).collect::<String>())
            };
            misnumbered(&tables.iter().map(table).collect::<String>()).len()
        };
        assert_eq!(page(&[&[1, 2], &[3, 4], &[1, 2, 3]]), 0, "a list of two tables, and one more list");
        assert_eq!(page(&[&[1, 2], &[4, 5]]), 1, "one is missing");
        assert_eq!(page(&[&[2, 3]]), 1, "the first is missing");
        assert_eq!(page(&[&[1, 2, 2, 3], &[3, 4]]), 2, "two are there twice");
        assert_eq!(page(&[&[1, 2, 1]]), 1, "a list begins with a table");
    }

    #[test]
    fn names_of_tests_have_no_number_of_the_list() {
        let names = ["row_12_in_order", "trap_07", "rows_12", "row_of_12", "a_row_12", "trap"];
        assert_eq!(names.map(is_numbered), [true, true, false, false, false, false]);
    }

    #[test]
    fn bugs_are_counted_by_finder() {
        let page = |numbers: &str| {
            let rows =
                "| Found by | To see it again |\n|---|---|\n| reader | a |\n| reader | b |\n| suite | c |";
            format!(
                "| Found by | Bugs |\n|---|---|\n{numbers}\n\n{rows}\n\n| Found by | y |\n|---|---|\n| user | open |"
            )
        };
        assert_eq!(miscounted(&page("| Reader | 2 |\n| Suite | 1 |\n| Torture | 0 |")), Vec::<String>::new());
        assert_eq!(miscounted(&page("| Reader | 3 |\n| Suite | 1 |")).len(), 1);
        assert_eq!(
            miscounted(&page("| Reader | 2 |\n| Torture | 1 |")).len(),
            2,
            "one is missing, one is none"
        );
    }
}
