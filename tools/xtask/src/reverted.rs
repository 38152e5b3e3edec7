//! Bugs that were mended, brought back in a copy of the engine: the simulator has to find them again, each by a seed of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::{fs, io};

use crate::metadata::{API_SNAPSHOTS, Metadata};
use crate::step::{self, Outcome};

/// A bug that is mended, and what brings it back in today's code.
struct Reverted {
    /// As the review called it that found it.
    name: &'static str,
    /// What is put back.
    what: &'static str,
    edits: &'static [Edit],
    found_by: FoundBy,
}

/// One place: the code is `then` where the bug is back, which [`IS_BACK`] tells.
struct Edit {
    file: &'static str,
    now: &'static str,
    then: &'static str,
}

#[derive(Clone, Copy)]
enum FoundBy {
    Simulator,
    /// Out of the simulator's reach, for that reason; this test of `lock-engine` finds it.
    Test {
        target: &'static str,
        name: &'static str,
        why: &'static str,
    },
}

const REVERTED: [Reverted; 6] = [
    Reverted {
        name: "B2",
        what: "a request that the store turned down counts as one whose outcome is not known, and is released until the store confirms it",
        edits: &[Edit {
            file: "lock-engine/src/acquire/acquisition.rs",
            now: "                Ok(Attempt::Refused(error)) => {\n",
            then: "                Ok(Attempt::Refused(error)) if crate::is_back(\"B2\") => error,\n                Ok(Attempt::Refused(error)) => {\n",
        }],
        found_by: FoundBy::Simulator,
    },
    Reverted {
        name: "B3",
        what: "a grant that comes too late stays in a store that keeps lost holds",
        edits: &[Edit {
            file: "lock-engine/src/hold.rs",
            now: "        self.shared.release_in_background(PendingRelease::held(self, permit));\n        let message",
            then: "        if crate::is_back(\"B3\") && self.stays_when_lost(LossReason::Expired) {\n            drop(permit);\n        } else {\n            self.shared.release_in_background(PendingRelease::held(self, permit));\n        }\n        let message",
        }],
        found_by: FoundBy::Simulator,
    },
    Reverted {
        name: "B5",
        what: "an engine that is dropped, and not closed, keeps the long pauses between releases",
        edits: &[Edit {
            file: "lock-engine/src/driver.rs",
            now: "        self.outbox.begin_closing(begun);\n",
            then: "        if !crate::is_back(\"B5\") || self.shared.strong_count() > 0 {\n            self.outbox.begin_closing(begun);\n        }\n",
        }],
        found_by: FoundBy::Simulator,
    },
    Reverted {
        name: "B8",
        what: "a caller who does not wait for a cooldown is not told of the one that its own client has begun",
        edits: &[Edit {
            file: "lock-engine/src/acquire/waiting.rs",
            now: "    if policy != OnCooldown::NotDue {\n",
            then: "    if policy != OnCooldown::NotDue || crate::is_back(\"B8\") {\n",
        }],
        found_by: FoundBy::Simulator,
    },
    Reverted {
        name: "B9",
        what: "a try does not leave a key that was released here to those who wait elsewhere",
        edits: &[
            Edit {
                file: "lock-engine/src/acquire/fast_path.rs",
                now: "    if yields.is_some() && shared",
                then: "    if yields.is_some() && (waits || !crate::is_back(\"B9\")) && shared",
            },
            Edit {
                file: "lock-engine/src/acquire/acquisition.rs",
                now: "        let Some(until) = yields.max() else { return Ok(()) };\n",
                then: "        let Some(until) = yields.max() else { return Ok(()) };\n        if self.budget == Budget::Once && crate::is_back(\"B9\") {\n            return Ok(());\n        }\n",
            },
        ],
        found_by: FoundBy::Simulator,
    },
    Reverted {
        name: "B14",
        what: "each call of `close` collects holds, and the driver hears the first one",
        edits: &[
            Edit {
                file: "lock-engine/src/shared.rs",
                now: "        self.inbox.close();\n    }\n\n    /// Every guard",
                then: "        if crate::is_back(\"B14\") {\n            for hold in self.lose_all(LossReason::Closed) {\n                self.inbox.queue_release(PendingRelease::lost(&hold));\n            }\n        }\n        self.inbox.close();\n    }\n\n    /// Every guard",
            },
            Edit {
                file: "lock-engine/src/driver.rs",
                now: "        if let Some(shared) = self.shared.upgrade() {\n            for hold in shared.lose_all",
                then: "        if let Some(shared) = self.shared.upgrade().filter(|_| !crate::is_back(\"B14\")) {\n            for hold in shared.lose_all",
            },
        ],
        found_by: FoundBy::Test {
            target: "life",
            name: "a_close_that_is_held_up_leaves_nothing",
            why: "it takes two threads that close at once",
        },
    },
];

/// Put into the copy of the engine.
const IS_BACK: &str = r#"
/// Whether that bug is back.
pub(crate) fn is_back(bug: &str) -> bool {
    static BACK: std::sync::LazyLock<Option<String>> = std::sync::LazyLock::new(|| std::env::var("LEASEHOLD_BUG").ok());
    BACK.as_deref() == Some(bug)
}
"#;

/// Where [`IS_BACK`] goes.
const ENGINE: &str = "lock-engine/src/lib.rs";
const BUG: &str = "LEASEHOLD_BUG";
const SEED: (&str, &str) = ("LEASEHOLD_SIMULATE_SEED", "0");
/// For how long it is looked for.
const MINUTES: (&str, &str) = ("LEASEHOLD_SIMULATE_MINUTES", "5");
const HEAD: &str = "\
| Bug | What is put back | Found by | Schedules until then | Verdict |
|---|---|---|---|---|
";
/// What is not copied.
const NOT_COPIED: [&str; 2] = ["target", ".git"];

/// Brings back those whose name is among `names`, or all, and sees them found.
pub(crate) fn run(names: &[&str]) -> Outcome {
    let unknown = names.iter().find(|name| REVERTED.iter().all(|bug| bug.name != **name));
    if let Some(unknown) = unknown {
        let known: Vec<_> = REVERTED.iter().map(|bug| bug.name).collect();
        return Err(format!("there is no bug {unknown:?}; there are {}", known.join(", ")));
    }
    let metadata = Metadata::read()?;
    let features = metadata.all_features();
    let target = Path::new(metadata.target_directory());
    let copy = target.join("reverted");
    let changed = changed()?;
    copy_all(&root(), &copy, &|file| changed.get(file))
        .map_err(|error| format!("cannot copy the workspace to {}: {error}", copy.display()))?;
    let manifest = copy.join("Cargo.toml");
    let (manifest, target) = (manifest.to_string_lossy(), target.to_string_lossy());
    let own =
        ["--manifest-path", &manifest, "--target-dir", &target, "--workspace", "--exclude", API_SNAPSHOTS];
    let mut rows = String::new();
    for bug in REVERTED.iter().filter(|bug| names.is_empty() || names.contains(&bug.name)) {
        let (target, test) = match bug.found_by {
            FoundBy::Simulator => ("simulation", "thousands_of_schedules"),
            FoundBy::Test { target, name, .. } => (target, name),
        };
        let wanted = ["--features", &features, "--test", target, "--", "--nocapture", test];
        let variables = [(BUG, bug.name), SEED, MINUTES];
        let mut said = Vec::new();
        let what = format!("{} is back: {}", bug.name, bug.what);
        let outcome = step::tests_seen(&what, &[&own[..], &wanted].concat(), &variables, |line| {
            said.push(line.to_owned());
        });
        let row = bug.row(&said).filter(|_| outcome.is_err());
        rows += &row.ok_or_else(|| format!("{} is back, and nothing has found it", bug.name))?;
    }
    println!("\n{HEAD}{rows}");
    Ok(())
}

impl Reverted {
    /// How it was found, if `said` tells.
    fn row(&self, said: &[String]) -> Option<String> {
        let Self { name, what, found_by, .. } = self;
        let found = match found_by {
            FoundBy::Simulator => {
                let verdict = said.iter().find_map(|line| line.strip_prefix("WRONG  "))?;
                let seed = said
                    .iter()
                    .find_map(|line| line.strip_prefix("seed ")?.split_once(',').map(|(seed, _)| seed))?;
                let schedules = seed.parse::<u64>().ok()? + 1;
                format!("simulator, seed {seed} | {schedules} | {verdict}")
            }
            FoundBy::Test { name, why, .. } => {
                said.iter().find(|line| line.starts_with(&format!("test {name} ... FAILED")))?;
                format!("`{name}` | – | out of the simulator's reach: {why}")
            }
        };
        Some(format!("| {name} | {what} | {found} |\n"))
    }
}

/// The files that are not as they are: with each bug in them, for [`IS_BACK`] to choose.
fn changed() -> Outcome<BTreeMap<&'static str, String>> {
    let read = |file: &str| {
        fs::read_to_string(root().join(file)).map_err(|error| format!("cannot read {file}: {error}"))
    };
    let mut changed = BTreeMap::from([(ENGINE, read(ENGINE)? + IS_BACK)]);
    for bug in &REVERTED {
        for Edit { file, now, then } in bug.edits {
            if !changed.contains_key(file) {
                changed.insert(file, read(file)?);
            }
            let Some(text) = changed.get_mut(file) else { continue };
            let times = text.matches(now).count();
            if times != 1 {
                return Err(format!("{}: this is {times} times in {file}, not once: {now}", bug.name));
            }
            *text = text.replace(now, then);
        }
    }
    Ok(changed)
}

/// Makes `to` what `from` is, but for what is `changed`. Files that are so already are not touched: cargo compiles less.
fn copy_all<'a>(from: &Path, to: &Path, changed: &impl Fn(&str) -> Option<&'a String>) -> io::Result<()> {
    let mut names = BTreeSet::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        fs::create_dir_all(to.join(&folder))?;
        for entry in fs::read_dir(from.join(&folder))? {
            let entry = entry?;
            let name = folder.join(entry.file_name());
            if NOT_COPIED.iter().any(|left_out| entry.file_name() == *left_out) {
                continue;
            }
            names.insert(name.clone());
            if entry.file_type()?.is_dir() {
                folders.push(name);
                continue;
            }
            let wanted = match changed(&name.to_string_lossy()) {
                Some(text) => text.clone().into_bytes(),
                None => fs::read(entry.path())?,
            };
            if fs::read(to.join(&name)).ok().as_ref() != Some(&wanted) {
                fs::write(to.join(&name), wanted)?;
            }
        }
    }
    remove_others(to, Path::new(""), &names)
}

/// Removes what an earlier copy left.
fn remove_others(to: &Path, folder: &Path, names: &BTreeSet<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(to.join(folder))? {
        let entry = entry?;
        let name = folder.join(entry.file_name());
        match (names.contains(&name), entry.file_type()?.is_dir()) {
            (true, true) => remove_others(to, &name, names)?,
            (true, false) => {}
            (false, true) => fs::remove_dir_all(entry.path())?,
            (false, false) => fs::remove_file(entry.path())?,
        }
    }
    Ok(())
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap_or(Path::new(".")).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bug_can_be_brought_back() {
        let changed = changed().unwrap();
        for bug in &REVERTED {
            let back = format!("crate::is_back(\"{}\")", bug.name);
            for edit in bug.edits {
                assert!(changed[edit.file].contains(edit.then) && edit.then.contains(&back), "{}", bug.name);
            }
        }
    }

    #[test]
    fn every_bug_is_on_the_page_with_how_it_was_found() {
        let page = fs::read_to_string(root().join("docs/testing.md")).unwrap();
        assert!(page.contains(HEAD));
        for Reverted { name, what, .. } in &REVERTED {
            assert!(
                page.contains(&format!("| {name} | {what} | ")),
                "{name} is not on the page as it is here"
            );
        }
    }

    #[test]
    fn what_was_found_is_read_from_what_was_said() {
        let said = |lines: &[&str]| lines.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>();
        let found =
            said(&["   1s  client 0  a  asked", "WRONG  C3, 1.2s: twice", "seed 41, disturbed by: cut"]);
        let row = REVERTED[0].row(&found).unwrap();
        assert!(row.ends_with("| simulator, seed 41 | 42 | C3, 1.2s: twice |\n"), "{row}");
        assert_eq!(REVERTED[0].row(&said(&["error: could not compile", "seed 41, disturbed by: cut"])), None);
        let bug = &REVERTED[5];
        assert_eq!(bug.row(&said(&["test a_close_that_is_held_up_leaves_nothing ... ok"])), None);
        let row = bug.row(&said(&["test a_close_that_is_held_up_leaves_nothing ... FAILED"])).unwrap();
        assert!(row.contains("| `a_close_that_is_held_up_leaves_nothing` | – | "), "{row}");
    }
}
