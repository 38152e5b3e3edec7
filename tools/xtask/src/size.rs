//! How much of claims a user compiles and meets: lines without tests, those of them that are code, and public names.

use std::fs;
use std::path::{Path, PathBuf};

use crate::step::Outcome;

/// The package, and what it is to have at most.
const SOURCE: &str = "companions/claim/src";
const MOST_LINES: usize = 9_000;
const MOST_NAMES: usize = 40;

/// What is compiled for tests alone.
const FOR_TESTS: [&str; 2] = ["#[cfg(test)]", "#[cfg(feature = \"test-util\")]"];

pub(crate) fn report() -> Outcome {
    // This package is `tools/xtask`.
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap_or(Path::new("."));
    let source = root.join(SOURCE);
    let library = source.join("lib.rs");
    let (lines, names) = (lines_below(&library, &source)?, names_in(&read(&library)?).len());
    println!(
        "-- claims: {} lines without tests (goal: {MOST_LINES}), {} of them code, {names} public names (goal: {MOST_NAMES})",
        lines.all, lines.code
    );
    Ok(())
}

#[derive(Debug, Default, PartialEq)]
struct Lines {
    all: usize,
    /// Without blank lines and comments.
    code: usize,
}

impl Lines {
    fn of(text: &str) -> Self {
        let is_code = |line: &&str| !line.trim().is_empty() && !line.trim().starts_with("//");
        Self { all: text.lines().count(), code: text.lines().filter(is_code).count() }
    }
}

/// The lines of `file` and of its modules, which are below `folder`.
fn lines_below(file: &Path, folder: &Path) -> Outcome<Lines> {
    let text = compiled(&read(file)?);
    let mut lines = Lines::of(&text);
    for module in text.lines().filter_map(module_of) {
        let (below, beside) = (folder.join(module), folder.join(format!("{module}.rs")));
        let inside: PathBuf = below.join("mod.rs");
        let more = lines_below(if beside.exists() { &beside } else { &inside }, &below)?;
        lines = Lines { all: lines.all + more.all, code: lines.code + more.code };
    }
    Ok(lines)
}

/// Without what is there for tests: items, and the module of tests at the end.
fn compiled(text: &str) -> String {
    let (mut kept, mut lines) = (String::new(), text.lines());
    while let Some(line) = lines.next() {
        if FOR_TESTS.contains(&line.trim()) {
            let item = lines.next().unwrap_or_default();
            if item.ends_with('{') {
                // To the end of the item, whose brackets `cargo fmt` has put below each other.
                let indent = item.len() - item.trim_start().len();
                let end = format!("{}}}", " ".repeat(indent));
                lines.by_ref().find(|line| line.trim_end_matches(';') == end);
            }
            continue;
        }
        kept.push_str(line);
        kept.push('\n');
    }
    kept
}

/// The module whose file this line names.
fn module_of(line: &str) -> Option<&str> {
    let name = line.trim().strip_suffix(';')?.rsplit_once("mod ")?;
    let is_item = name.0.is_empty() || name.0.starts_with("pub");
    (is_item && name.1.chars().all(|c| c.is_alphanumeric() || c == '_')).then_some(name.1)
}

/// The names that the library re-exports.
fn names_in(library: &str) -> Vec<String> {
    let library = compiled(library);
    let uses = library.split("pub use ").skip(1).filter_map(|rest| rest.split(';').next());
    let names = uses.flat_map(|path| {
        let names = match path.split_once('{') {
            Some((_, list)) => list.trim_end().trim_end_matches('}'),
            None => path.rsplit("::").next().unwrap_or(path),
        };
        names
            .split(',')
            .map(|name| name.trim().to_owned())
            .filter(|name| !name.is_empty())
            .collect::<Vec<_>>()
    });
    names.collect()
}

fn read(path: &Path) -> Outcome<String> {
    fs::read_to_string(path).map_err(|error| format!("cannot read {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_for_tests_is_left_out() {
        let text = "mod a;\n#[cfg(test)]\nmod growth;\nfn f() {}\n#[cfg(test)]\nmod tests {\n    fn g() {\n    }\n}\nmod b;\n";
        assert_eq!(compiled(text), "mod a;\nfn f() {}\nmod b;\n");
        assert_eq!(compiled(text).lines().filter_map(module_of).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(module_of("pub(crate) mod words;"), Some("words"));
        assert_eq!(module_of("// the mod of it;"), None);
    }

    #[test]
    fn comments_and_blank_lines_are_no_code() {
        let text = "//! A.\n\nfn f() {\n    // Why.\n    g(); // Here.\n}\n    \n";
        assert_eq!(Lines::of(text), Lines { all: 7, code: 3 });
    }

    #[test]
    fn names_of_one_and_of_several() {
        let text = "pub use a::A;\n#[cfg(feature = \"test-util\")]\npub use m::M;\npub use b::{\n    B, C,\n    D,\n};\npub use e::sqlx;\n";
        assert_eq!(names_in(text), ["A", "B", "C", "D", "sqlx"]);
    }
}
