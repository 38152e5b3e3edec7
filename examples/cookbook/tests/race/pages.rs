//! Checks that the pages and the code are the same.

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns all files of a folder, sorted, with their text.
fn files(folder: impl AsRef<Path>) -> Vec<(String, String)> {
    let mut files: Vec<_> = fs::read_dir(root().join(folder))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_file())
        .map(|path| {
            (path.file_name().unwrap().to_string_lossy().into_owned(), fs::read_to_string(path).unwrap())
        })
        .collect();
    files.sort();
    files
}

/// Returns the blocks of a language on a page.
fn blocks<'a>(page: &'a str, language: &str) -> Vec<&'a str> {
    let fence = format!("```{language}\n");
    page.split(&fence).skip(1).map(|rest| rest.split("\n```").next().unwrap()).collect()
}

/// Returns the text without indentation, which differs inside modules and lists.
fn lines(text: &str) -> String {
    text.lines().map(|line| line.trim().to_owned() + "\n").collect()
}

#[test]
fn the_rust_of_the_pages_is_the_code_of_the_recipes() {
    let code: String = files("examples/cookbook/src").iter().map(|(_, text)| lines(text)).collect();
    let mut checked = 0;
    for (page, text) in files("docs/cookbook") {
        for block in blocks(&text, "rust") {
            assert!(code.contains(&lines(block)), "docs/cookbook/{page} differs from the code:\n{block}");
            checked += 1;
        }
    }
    assert!(checked >= 10, "{checked}");
}

#[test]
fn each_statement_of_the_pages_is_run_by_name() {
    let mut code = String::new();
    for folder in ["examples/cookbook/src", "examples/cookbook/tests/race"] {
        code.extend(files(folder).into_iter().map(|(_, text)| text));
    }
    let mut names = Vec::new();
    for (page, text) in files("docs/cookbook") {
        for block in blocks(&text, "sql") {
            let name = block.lines().next().and_then(|line| line.strip_prefix("-- "));
            let name =
                name.unwrap_or_else(|| panic!("docs/cookbook/{page} has SQL without a name:\n{block}"));
            assert!(code.contains(&format!("\"{name}\")")), "nothing runs {name:?} of docs/cookbook/{page}");
            assert!(
                !names.contains(&(page.clone(), name.to_owned())),
                "docs/cookbook/{page} has {name:?} twice"
            );
            names.push((page.clone(), name.to_owned()));
        }
    }
    assert!(names.len() >= 30, "{names:?}");
}

#[test]
fn each_page_is_listed_and_names_tests_that_exist() {
    let tests: String = files("examples/cookbook/tests/race").into_iter().map(|(_, text)| text).collect();
    let pages = files("docs/cookbook");
    let index = &pages.iter().find(|(name, _)| name == "README.md").unwrap().1;
    for (page, text) in &pages {
        assert!(
            page == "README.md" || index.contains(&format!("]({page})")),
            "README.md does not list {page}"
        );
        // The last paragraph names the tests.
        let Some((_, named)) = text.rsplit_once("\nTest") else { continue };
        for test in named.split('`').skip(1).step_by(2) {
            assert!(tests.contains(&format!("fn {test}(")), "docs/cookbook/{page}: there is no test {test}");
        }
    }
}
