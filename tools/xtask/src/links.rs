//! Checks that each relative link of a Markdown page leads to a file or folder.

use std::fs;
use std::path::Path;

use crate::step::Outcome;

/// Checks all pages of the repository.
pub(crate) fn check() -> Outcome {
    // Goes up two folders, because this package is `tools/xtask`.
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap_or(Path::new("."));
    let (mut count, mut dead) = (0, Vec::new());
    below(root, &mut count, &mut dead)?;
    if !dead.is_empty() {
        return Err(format!("failed: links\n  {}", dead.join("\n  ")));
    }
    println!("-- links: {count} within the repository, all lead somewhere");
    Ok(())
}

fn below(folder: &Path, count: &mut usize, dead: &mut Vec<String>) -> Outcome {
    let entries = fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    for entry in entries.flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let name = name.to_string_lossy();
        if path.is_dir() {
            if name != "target" && !name.starts_with('.') {
                below(&path, count, dead)?;
            }
        } else if name.ends_with(".md") {
            let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
            for (line, link) in links(&text) {
                *count += 1;
                if !folder.join(link).exists() {
                    dead.push(format!("{}:{line}: {link} is not there", path.display()));
                }
            }
        }
    }
    Ok(())
}

/// Returns the relative links of a page without their anchors, each with its line number. Skips code.
fn links(text: &str) -> Vec<(usize, &str)> {
    let (mut found, mut in_code) = (Vec::new(), false);
    for (at, line) in text.lines().enumerate() {
        in_code ^= line.trim_start().starts_with("```");
        if in_code {
            continue;
        }
        // Every second piece is in backquotes.
        for piece in line.split('`').step_by(2) {
            let targets = piece.split("](").skip(1).filter_map(|rest| rest.split(')').next());
            let paths = targets.map(|target| target.split('#').next().unwrap_or(target));
            let is_path = |path: &&str| {
                !path.is_empty() && !path.contains(':') && (path.contains('/') || path.contains('.'))
            };
            found.extend(paths.filter(is_path).map(|path| (at + 1, path)));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_links_alone_are_found() {
        let page = "[a](b.md) and [c](../d/e.md#f), [g](https://h/i.md)\n`[j](k.md)` [l](#m) [n](Item::o) [p](q)\n```\n[r](s.md)\n```\n[`t`](u/v)";
        assert_eq!(links(page), [(1, "b.md"), (1, "../d/e.md"), (6, "u/v")]);
    }
}
