//! Checks that the published packages can be published: their manifests, the files in their archives, and that each archive
//! builds without the rest of this repository.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::metadata::{Metadata, is_tls, name};
use crate::step::{Outcome, announce, cargo};

const LICENCES: [&str; 2] = ["LICENSE-MIT", "LICENSE-APACHE"];

/// The limits of crates.io for keywords and categories.
const MOST_WORDS: usize = 5;
const LONGEST_WORD: usize = 20;

/// Checks the manifests, makes the archives without building them, and checks their files. Needs no network if the
/// dependencies are downloaded.
pub(crate) fn check() -> Outcome {
    announce("packages: manifests and archives");
    let metadata = Metadata::read()?;
    let published: Vec<&Value> = metadata.published().collect();
    let names: BTreeSet<String> = published.iter().map(|package| name(package)).collect();
    let mut wrong = Vec::new();
    for package in &published {
        wrong.extend(manifest(package, &names).into_iter().map(|what| format!("{}: {what}", name(package))));
        wrong.extend(examples(package)?.into_iter().map(|what| format!("{}: {what}", name(package))));
    }
    if !wrong.is_empty() {
        return Err(format!("failed: packages\n  {}", wrong.join("\n  ")));
    }
    let arguments = ["package", "--quiet", "--no-verify", "--allow-dirty", "--offline"];
    let packages = names.iter().flat_map(|package| ["--package", package]);
    cargo("archives", &arguments.into_iter().chain(packages).collect::<Vec<_>>())?;
    let unpacked = unpack(&metadata)?;
    for package in &published {
        wrong.extend(contents(package, &unpacked.join(directory(package)))?);
    }
    if !wrong.is_empty() {
        return Err(format!("failed: archives\n  {}", wrong.join("\n  ")));
    }
    println!("-- {} packages, each with both licences, its README and its examples", published.len());
    Ok(())
}

/// Checks each archive of [`check`] by `cargo check` with its default features. The unpacked archives form one workspace, because
/// they depend on each other by version. It uses the tests' profile and target directory, because the dependencies are
/// already compiled there.
pub(crate) fn verify() -> Outcome {
    let metadata = Metadata::read()?;
    let unpacked = unpack(&metadata)?;
    let published: Vec<&Value> = metadata.published().collect();
    let root = root();
    let members: Vec<String> = published.iter().map(|package| directory(package)).collect();
    let patches = published
        .iter()
        .map(|package| format!("{} = {{ path = {:?} }}\n", name(package), directory(package)));
    let manifest = format!(
        "[workspace]\nresolver = \"3\"\nmembers = {members:?}\n\n[patch.crates-io]\n{}\n{}",
        patches.collect::<String>(),
        profiles(&read(&root.join("Cargo.toml"))?)
    );
    let file = unpacked.join("Cargo.toml");
    fs::write(&file, manifest).map_err(|error| failed(&file, &error))?;
    let lock = unpacked.join("Cargo.lock");
    fs::copy(root.join("Cargo.lock"), &lock).map_err(|error| failed(&lock, &error))?;
    let file = file.to_string_lossy().into_owned();
    for package in &published {
        let package = name(package);
        let check = ["check", "--quiet", "--offline", "--profile", "tests", "--manifest-path", &file];
        let rest = ["--target-dir", metadata.target_directory(), "--package", &package];
        cargo(&format!("the archive of {package}"), &[&check[..], &rest].concat())?;
    }
    Ok(())
}

/// Returns the faults of a published package's manifest.
fn manifest(package: &Value, published: &BTreeSet<String>) -> Vec<String> {
    let mut wrong = Vec::new();
    for field in ["description", "license", "readme", "rust_version"] {
        if package[field].as_str().is_none_or(str::is_empty) {
            wrong.push(format!("{} is missing", field.replace('_', "-")));
        }
    }
    let documentation = format!("https://docs.rs/{}", name(package));
    if package["documentation"] != documentation.as_str() {
        wrong.push(format!("documentation is not {documentation:?}"));
    }
    for field in ["keywords", "categories"] {
        let words: Vec<&str> = strings(&package[field]).collect();
        let is_short = |word: &&str| field == "categories" || word.len() <= LONGEST_WORD;
        if words.is_empty() || words.len() > MOST_WORDS || !words.iter().all(is_short) {
            wrong.push(format!(
                "{field} are one to {MOST_WORDS}, of {LONGEST_WORD} letters at most: {words:?}"
            ));
        }
    }
    let docs = &package["metadata"]["docs"]["rs"];
    let features =
        || package["features"].as_object().into_iter().flatten().map(|(feature, _)| feature.as_str());
    let shown: BTreeSet<&str> = if docs["all-features"] == true {
        features().collect()
    } else {
        strings(&docs["features"]).collect()
    };
    if docs.is_null() {
        wrong.push("[package.metadata.docs.rs] is missing".to_owned());
    } else if !features()
        .filter(|feature| *feature != "default")
        .all(|feature| shown.contains(feature) != is_tls(feature))
    {
        wrong.push(
            "[package.metadata.docs.rs] does not name each feature but the ways to speak TLS".to_owned(),
        );
    }
    for dependency in package["dependencies"].as_array().into_iter().flatten() {
        let needed = name(dependency);
        let is_ours = dependency["path"].is_string();
        let has_version = dependency["req"] != "*";
        if dependency["kind"] == "dev" {
            if is_ours && has_version {
                wrong.push(format!("the dev-dependency {needed} has a version; name its path alone, so that it is left out when packaged"));
            }
        } else if is_ours && !(has_version && published.contains(&needed)) {
            wrong.push(format!("{needed} is not published, or has no version"));
        }
    }
    wrong
}

/// Returns the faults of a package's examples. A package must have an example, and a test must run each.
fn examples(package: &Value) -> Outcome<Vec<String>> {
    let folder = folder(package);
    let mut tests = String::new();
    collect(&folder.join("tests"), &mut tests)?;
    let targets = package["targets"].as_array().into_iter().flatten();
    let examples: Vec<&Value> =
        targets.filter(|target| strings(&target["kind"]).any(|kind| kind == "example")).collect();
    if examples.is_empty() {
        return Ok(vec!["there are no examples".to_owned()]);
    }
    let is_run = |target: &&&Value| {
        let source = Path::new(target["src_path"].as_str().unwrap_or_default());
        let included = source.strip_prefix(&folder).unwrap_or(source).display().to_string();
        target["test"] == true || tests.contains(&format!("../{included}\""))
    };
    let is_idle = |target: &&&Value| !is_run(target);
    Ok(examples
        .iter()
        .filter(is_idle)
        .map(|target| format!("no test includes the example {}", name(target)))
        .collect())
}

/// Returns the faults of an archive that was unpacked into `folder`.
fn contents(package: &Value, folder: &Path) -> Outcome<Vec<String>> {
    let (mut wrong, root) = (Vec::new(), root());
    for licence in LICENCES {
        if fs::read_to_string(folder.join(licence)).unwrap_or_default() != read(&root.join(licence))? {
            wrong.push(format!("{}: {licence} is not that of the repository; link to it", name(package)));
        }
    }
    if fs::read_to_string(folder.join("README.md")).unwrap_or_default().is_empty() {
        wrong.push(format!("{}: README.md is missing", name(package)));
    }
    let has_features = |feature: &String| feature != "default" && !is_tls(feature);
    let mut features = package["features"].as_object().into_iter().flatten().map(|(feature, _)| feature);
    let library = fs::read_to_string(folder.join("src/lib.rs")).unwrap_or_default();
    if features.any(has_features) && !library.contains("#![cfg_attr(docsrs, feature(doc_cfg))]") {
        wrong.push(format!(
            "{}: src/lib.rs lacks #![cfg_attr(docsrs, feature(doc_cfg))], which marks features",
            name(package)
        ));
    }
    Ok(wrong)
}

/// Unpacks all archives into one folder. Returns the folder.
fn unpack(metadata: &Metadata) -> Outcome<PathBuf> {
    let archives = Path::new(metadata.target_directory()).join("package");
    let unpacked = archives.join("unpacked");
    if unpacked.exists() {
        fs::remove_dir_all(&unpacked).map_err(|error| failed(&unpacked, &error))?;
    }
    fs::create_dir_all(&unpacked).map_err(|error| failed(&unpacked, &error))?;
    for package in metadata.published() {
        let archive = archives.join(format!("{}.crate", directory(package)));
        // `m` sets the current time. The files in archives are dated 2006, so cargo would not notice that they changed.
        let status = Command::new("tar").arg("-xmzf").arg(&archive).arg("-C").arg(&unpacked).status();
        if !status.is_ok_and(|status| status.success()) {
            return Err(format!("cannot unpack {}", archive.display()));
        }
    }
    Ok(unpacked)
}

/// Returns the sections of a manifest that define profiles.
fn profiles(manifest: &str) -> String {
    let is_inside = |inside: &mut bool, line: &str| {
        if line.starts_with('[') {
            *inside = line.starts_with("[profile.");
        }
        *inside
    };
    let mut inside = false;
    manifest.lines().filter(|line| is_inside(&mut inside, line)).map(|line| format!("{line}\n")).collect()
}

/// Returns the name of the folder in a package's archive.
fn directory(package: &Value) -> String {
    format!("{}-{}", name(package), package["version"].as_str().unwrap_or_default())
}

fn folder(package: &Value) -> PathBuf {
    let manifest = Path::new(package["manifest_path"].as_str().unwrap_or_default());
    manifest.parent().unwrap_or(manifest).to_owned()
}

/// Appends all Rust files below `folder` to `text`.
fn collect(folder: &Path, text: &mut String) -> Outcome {
    let Ok(entries) = fs::read_dir(folder) else { return Ok(()) };
    for path in entries.flatten().map(|entry| entry.path()) {
        if path.is_dir() {
            collect(&path, text)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            text.push_str(&read(&path)?);
        }
    }
    Ok(())
}

fn strings(list: &Value) -> impl Iterator<Item = &str> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str)
}

fn root() -> PathBuf {
    // Goes up two folders, because this package is `tools/xtask`.
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap_or(Path::new(".")).to_owned()
}

fn read(path: &Path) -> Outcome<String> {
    fs::read_to_string(path).map_err(|error| failed(path, &error))
}

fn failed(path: &Path, error: &std::io::Error) -> String {
    format!("{}: {error}", path.display())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn good() -> Value {
        json!({
            "name": "a", "description": "A.", "license": "MIT", "readme": "README.md", "rust_version": "1.85",
            "documentation": "https://docs.rs/a", "keywords": ["lock"], "categories": ["development-tools::testing"],
            "features": {"default": ["x"], "x": [], "tls-x": []},
            "metadata": {"docs": {"rs": {"features": ["x"]}}},
            "dependencies": [
                {"name": "b", "kind": null, "path": "/b", "req": "^0.1"},
                {"name": "c", "kind": "dev", "path": "/c", "req": "*"},
                {"name": "d", "kind": "dev", "req": "^1"},
            ],
        })
    }

    /// Returns the number of faults of a good manifest after `change`.
    fn wrong(change: impl FnOnce(&mut Value)) -> usize {
        let mut package = good();
        change(&mut package);
        manifest(&package, &BTreeSet::from(["a".to_owned(), "b".to_owned()])).len()
    }

    #[test]
    fn what_a_manifest_lacks_is_found() {
        assert_eq!(wrong(|_| {}), 0);
        for field in
            ["description", "license", "readme", "rust_version", "documentation", "keywords", "categories"]
        {
            assert_eq!(wrong(|package| package[field] = Value::Null), 1, "{field}");
        }
        assert_eq!(wrong(|package| package["keywords"] = json!(["a", "b", "c", "d", "e", "f"])), 1);
        assert_eq!(wrong(|package| package["keywords"] = json!(["longer-than-twenty-letters"])), 1);
        assert_eq!(wrong(|package| package["metadata"] = Value::Null), 1);
        assert_eq!(
            wrong(|package| package["features"]["y"] = json!([])),
            1,
            "one that a reader does not see"
        );
        assert_eq!(wrong(|package| package["metadata"]["docs"]["rs"] = json!({"all-features": true})), 1);
        assert_eq!(
            wrong(|package| package["dependencies"][0]["name"] = json!("c")),
            1,
            "it is not published"
        );
        assert_eq!(wrong(|package| package["dependencies"][0]["req"] = json!("*")), 1);
        assert_eq!(wrong(|package| package["dependencies"][1]["req"] = json!("^0.1")), 1);
    }

    #[test]
    fn profiles_are_taken_over_and_nothing_else() {
        let manifest = "[a]\nb = 1\n[profile.x]\nc = 2\n\n[profile.x.package.y]\nd = 3\n[e]\nf = 4\n";
        assert_eq!(profiles(manifest), "[profile.x]\nc = 2\n\n[profile.x.package.y]\nd = 3\n");
    }

    #[test]
    fn a_package_without_examples_and_one_whose_example_no_test_runs_are_found() {
        let package = |targets: Value| json!({"name": "a", "manifest_path": concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"), "targets": targets});
        let example = |tested: bool| json!([{"name": "e", "kind": ["example"], "src_path": "/a/examples/e.rs", "test": tested}]);
        assert_eq!(
            examples(&package(json!([{"name": "a", "kind": ["lib"]}]))),
            Ok(vec!["there are no examples".to_owned()])
        );
        assert_eq!(examples(&package(example(false))), Ok(vec!["no test includes the example e".to_owned()]));
        assert_eq!(examples(&package(example(true))), Ok(Vec::new()), "its tests are in it");
    }
}
