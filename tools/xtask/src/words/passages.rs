//! The comments of sources and the paragraphs of documents, without code.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::step::Outcome;

/// A comment, or a paragraph of a document.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Passage {
    /// `path:line`.
    pub(super) place: String,
    /// Package of a comment, or path of a document.
    pub(super) room: String,
    /// Text in one line, including code in backquotes.
    pub(super) text: String,
    /// Item after a comment, up to its body. Empty for a document.
    pub(super) signature: String,
    /// Whether this is the documentation comment of a function.
    pub(super) is_of_function: bool,
}

impl Passage {
    /// Returns the text with `X` for code in backquotes, because code has no signs.
    pub(super) fn plain(&self) -> String {
        let parts = self.text.split('`').enumerate();
        parts.map(|(at, part)| if at % 2 == 0 { part } else { "X" }).collect()
    }

    pub(super) fn words(&self) -> usize {
        words(&self.plain())
    }
}

fn words(text: &str) -> usize {
    let is_part = |letter: char| letter.is_ascii_alphanumeric() || letter == '\'' || letter == '_';
    text.split(|letter| !is_part(letter)).filter(|word| !word.is_empty()).count()
}

/// Returns the comments of all sources except tests and benchmarks.
pub(super) fn comments(root: &Path) -> Outcome<Vec<Passage>> {
    let mut found = Vec::new();
    for path in tracked(root, "*.rs")? {
        let is_part = |folders: &[&str]| path.split('/').any(|part| folders.contains(&part));
        if is_part(&["src", "examples"]) && !is_part(&["tests", "benches"]) {
            let folder = ["/src/", "/examples/"].iter().find_map(|part| Some(path.split_once(part)?.0));
            // The facade is the package in the root folder.
            let room = folder.unwrap_or("leasehold").to_owned();
            found.extend(in_source(&path, &room, &read(root, &path)?));
        }
    }
    Ok(found)
}

/// Returns the paragraphs, list items and table rows of all documents except the changelog.
pub(super) fn paragraphs(root: &Path) -> Outcome<Vec<Passage>> {
    let mut found = Vec::new();
    for path in tracked(root, "*.md")? {
        if path != "CHANGELOG.md" {
            found.extend(in_document(&path, &read(root, &path)?));
        }
    }
    Ok(found)
}

/// The page of measured figures, which the program `measure` of `tools/bench` writes.
const FIGURES: &str = "docs/performance.md";

/// Returns the number of words, separated by white space, in all files that match `pattern`. Does not count the tables of
/// [`FIGURES`].
pub(super) fn total(root: &Path, pattern: &str) -> Outcome<usize> {
    let mut sum = 0;
    for path in tracked(root, pattern)? {
        let text = read(root, &path)?;
        let is_counted = |line: &&str| path != FIGURES || !line.starts_with('|');
        sum += text.lines().filter(is_counted).map(|line| line.split_whitespace().count()).sum::<usize>();
    }
    Ok(sum)
}

fn read(root: &Path, path: &str) -> Outcome<String> {
    fs::read_to_string(root.join(path)).map_err(|error| format!("cannot read {path}: {error}"))
}

/// Returns the paths of the files in git that match `pattern`.
pub(super) fn tracked(root: &Path, pattern: &str) -> Outcome<Vec<String>> {
    let output = Command::new("git").arg("-C").arg(root).args(["ls-files", pattern]).output();
    let output = output.map_err(|error| format!("cannot start git: {error}"))?;
    if !output.status.success() {
        return Err(format!("git ls-files: {}", String::from_utf8_lossy(&output.stderr)));
    }
    Ok(String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect())
}

/// Returns the mark and the text of a comment line.
fn comment_of(line: &str) -> Option<(&'static str, &str)> {
    let line = line.trim_start();
    ["///", "//!", "//"].into_iter().find_map(|mark| Some((mark, line.strip_prefix(mark)?)))
}

fn in_source(path: &str, room: &str, source: &str) -> Vec<Passage> {
    let lines: Vec<&str> = source.lines().collect();
    let (mut found, mut at) = (Vec::new(), 0);
    while at < lines.len() {
        let Some((mark, _)) = comment_of(lines[at]) else {
            found.extend(trailing(lines[at]).map(|text| Passage {
                place: format!("{path}:{}", at + 1),
                room: room.to_owned(),
                text: text.to_owned(),
                signature: lines[at].trim().to_owned(),
                is_of_function: false,
            }));
            at += 1;
            continue;
        };
        let (start, mut is_code, mut parts) = (at, false, Vec::new());
        while let Some((_, text)) =
            lines.get(at).and_then(|line| comment_of(line)).filter(|found| found.0 == mark)
        {
            let text = text.trim();
            if text.starts_with("```") {
                is_code = !is_code;
            } else if !is_code && !text.is_empty() {
                let heading = text.trim_start_matches(['#', ' ']);
                parts.push(if heading == text { text.to_owned() } else { format!("{heading}.") });
            }
            at += 1;
        }
        if parts.is_empty() {
            continue;
        }
        let signature = if mark == "//!" { String::new() } else { signature(&lines[at..]) };
        found.push(Passage {
            place: format!("{path}:{}", start + 1),
            room: room.to_owned(),
            text: parts.join(" "),
            is_of_function: mark == "///" && is_function(&signature),
            signature,
        });
    }
    found
}

/// Returns the comment after code in the same line.
fn trailing(line: &str) -> Option<&str> {
    let (code, text) = line.split_once(" // ")?;
    code.trim_end().ends_with([';', ',', '{', ')', '}', ']']).then(|| text.trim())
}

/// Returns the item after a comment, without its attributes and its body.
fn signature(lines: &[&str]) -> String {
    let mut parts = Vec::new();
    for line in lines.iter().map(|line| line.trim()).filter(|line| !line.starts_with("#[")).take(12) {
        parts.push(line);
        if line.is_empty() || line.ends_with(['{', ';', ',', '}']) && !line.ends_with("(,") {
            let is_open = parts.concat().matches('(').count() > parts.concat().matches(')').count();
            if !is_open {
                break;
            }
        }
    }
    parts.join(" ").trim_end_matches(['{', ' ']).to_owned()
}

fn is_function(signature: &str) -> bool {
    let mut words = signature.split_whitespace().map(|word| word.split('(').next().unwrap_or_default());
    words.find(|word| !matches!(*word, "pub" | "const" | "async")) == Some("fn")
}

fn in_document(path: &str, document: &str) -> Vec<Passage> {
    let (mut found, mut parts, mut start, mut is_code) = (Vec::new(), Vec::new(), 0, false);
    let mut flush = |parts: &mut Vec<&str>, start: usize| {
        if !parts.is_empty() {
            let text = parts.join(" ");
            let (place, room) = (format!("{path}:{start}"), path.to_owned());
            found.push(Passage { place, room, text, signature: String::new(), is_of_function: false });
            parts.clear();
        }
    };
    for (at, line) in document.lines().enumerate() {
        let line = line.trim();
        let is_fence = line.starts_with("```");
        let is_rule = line.starts_with('|') && line.chars().all(|letter| "|-: ".contains(letter));
        let begins = line.starts_with(['#', '|']) || is_item(line);
        if is_fence || line.is_empty() || begins {
            flush(&mut parts, start);
        }
        is_code ^= is_fence;
        if is_code || is_fence || line.is_empty() || line.starts_with('#') || is_rule {
            continue;
        }
        if parts.is_empty() {
            start = at + 1;
        }
        parts.push(line);
    }
    flush(&mut parts, start);
    found
}

fn is_item(line: &str) -> bool {
    let rest = line.trim_start_matches(|letter: char| letter.is_ascii_digit());
    line.starts_with("- ") || line.starts_with("* ") || rest.len() < line.len() && rest.starts_with(". ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "\
//! The module.

/// Returns the key.
///
/// ```
/// let code = 1;
/// ```
/// # Errors
#[must_use]
pub(crate) async fn key(
    self,
) -> Key {
    let a = 1; // Not two.
    // Why.
    go(a);
}
";

    #[test]
    fn comments_come_with_their_item_and_without_code() {
        let found = in_source("a/src/b.rs", "a", SOURCE);
        let seen: Vec<_> = found.iter().map(|passage| (&*passage.text, &*passage.signature)).collect();
        let expected = [
            ("The module.", ""),
            ("Returns the key. Errors.", "pub(crate) async fn key( self, ) -> Key"),
            ("Not two.", "let a = 1; // Not two."),
            ("Why.", "go(a);"),
        ];
        assert_eq!(seen, expected);
        assert_eq!(found[1].place, "a/src/b.rs:3");
        assert!(found[0].signature.is_empty() && !found[3].is_of_function);
    }

    #[test]
    fn documents_are_read_by_paragraph_item_and_row() {
        let page = "# Head\n\nOne `code` of\ntwo.\n- item\n```\ncode\n```\n| a | b |\n|---|---|\n| c | d |\n";
        let found = in_document("docs/a.md", page);
        let texts: Vec<_> = found.iter().map(|passage| &*passage.text).collect();
        assert_eq!(texts, ["One `code` of two.", "- item", "| a | b |", "| c | d |"]);
        assert_eq!((found[0].plain().as_str(), found[0].words()), ("One X of two.", 4));
    }
}
