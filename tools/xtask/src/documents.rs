//! What the documentation says is shown by a test: is there such a test?

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::step::Outcome;

/// Pages whose tables name tests, in backquotes, in their last column.
const PAGES: [&str; 1] = ["docs/coverage.md"];

/// Every test that a page names exists somewhere in the workspace.
pub(crate) fn check() -> Outcome {
    // This package is `tools/xtask`.
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap_or(Path::new("."));
    let mut functions = BTreeSet::new();
    collect(root, &mut functions)?;
    let mut missing = Vec::new();
    let mut named = 0;
    for page in PAGES {
        let text = read(&root.join(page))?;
        for (line, test) in tests_named(&text) {
            named += 1;
            if !functions.contains(&test) {
                missing.push(format!("{page}:{line}: there is no test {test}"));
            }
        }
    }
    if !missing.is_empty() {
        return Err(missing.join("\n"));
    }
    println!("-- documents: {named} tests named, all of them there");
    Ok(())
}

/// The function of each test that is named in the last column of a table, with its line.
fn tests_named(text: &str) -> Vec<(usize, String)> {
    let mut tests = Vec::new();
    for (at, line) in text.lines().enumerate() {
        let Some(cell) = line.trim_end().strip_suffix('|').and_then(|row| row.rsplit('|').next()) else {
            continue;
        };
        // Every second piece is in backquotes.
        for name in cell.split('`').skip(1).step_by(2) {
            let function = name.rsplit("::").next().unwrap_or(name);
            tests.push((at + 1, function.to_owned()));
        }
    }
    tests
}

/// The names of all functions in the Rust files below `folder`.
fn collect(folder: &Path, functions: &mut BTreeSet<String>) -> Outcome {
    let entries =
        fs::read_dir(folder).map_err(|error| format!("cannot read {}: {error}", folder.display()))?;
    for entry in entries.flatten() {
        let path: PathBuf = entry.path();
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if path.is_dir() {
            if name != "target" && !name.starts_with('.') {
                collect(&path, functions)?;
            }
        } else if name.ends_with(".rs") {
            functions.extend(read(&path)?.lines().filter_map(function_of));
        }
    }
    Ok(())
}

/// The name after `fn`, if the line begins a function.
fn function_of(line: &str) -> Option<String> {
    let (before, after) = line.split_once("fn ")?;
    let is_item = before.split_whitespace().all(|word| word.starts_with("pub") || word == "async");
    let name: String = after.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
    (is_item && !name.is_empty()).then_some(name)
}

fn read(path: &Path) -> Outcome<String> {
    fs::read_to_string(path).map_err(|error| format!("cannot read {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_in_the_last_column_only() {
        let page = "| `a` | `suite::b_c`, `d` |\ntext `e`\n|---|---|\n| x | open |";
        assert_eq!(tests_named(page), [(1, "b_c".to_owned()), (1, "d".to_owned())]);
    }

    #[test]
    fn functions_are_found_and_calls_are_not() {
        assert_eq!(function_of("    pub(crate) async fn row_1_x<T>(").as_deref(), Some("row_1_x"));
        assert_eq!(function_of("// a fn here"), None);
        assert_eq!(function_of("let f = |x| fn y"), None);
    }
}
