//! Reads the workspace and its dependencies from `cargo metadata`.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::step::{Outcome, command};

pub(crate) struct Metadata(Value);

/// TLS feature of the driver that is tested. The driver has one feature per TLS library, and this library needs only a C
/// compiler.
const TLS: &str = "tls-rustls-ring-webpki";

const FACADE: &str = "leasehold";

/// The package whose tests run in `lint`. Other jobs exclude it because they do not need its dependencies.
pub(crate) const API_SNAPSHOTS: &str = "api-snapshots";

impl Metadata {
    /// Reads the packages of the workspace, without the network.
    pub(crate) fn read() -> Outcome<Self> {
        Self::run(&["--no-deps", "--offline"])
    }

    /// Reads all packages in the lock file, and downloads missing ones. If that fails, reads the packages that this
    /// machine's platform uses and returns `false`.
    pub(crate) fn read_with_dependencies() -> Outcome<(Self, bool)> {
        if let Ok(metadata) = Self::run(&["--locked", "--all-features"]) {
            return Ok((metadata, true));
        }
        let host = toolchain("host: ")?;
        Self::run(&["--locked", "--all-features", "--offline", "--filter-platform", &host])
            .map(|metadata| (metadata, false))
    }

    pub(crate) fn packages(&self) -> impl Iterator<Item = &Value> {
        self.0["packages"].as_array().into_iter().flatten()
    }

    /// Returns the published packages.
    pub(crate) fn published(&self) -> impl Iterator<Item = &Value> {
        self.packages().filter(|package| package["publish"].is_null())
    }

    /// Returns cargo's target directory.
    pub(crate) fn target_directory(&self) -> &str {
        self.0["target_directory"].as_str().unwrap_or("target")
    }

    /// Returns the features of all packages for cargo's `--features`. Of the TLS features, only [`TLS`].
    pub(crate) fn all_features(&self) -> String {
        self.packages().flat_map(features_of).collect::<Vec<_>>().join(",")
    }

    /// Returns cargo arguments that select the facade without features, and all packages that do not depend on it with
    /// their features. These packages keep the features of the shared dependencies, which are then not built again.
    pub(crate) fn bare_facade(&self) -> Vec<String> {
        let on_it = |needed: &Value| needed["name"] == FACADE;
        let beside: Vec<&Value> = self
            .packages()
            .filter(|package| !package["dependencies"].as_array().into_iter().flatten().any(on_it))
            .filter(|package| name(package) != API_SNAPSHOTS)
            .collect();
        let others = beside.iter().copied().filter(|package| name(package) != FACADE);
        let features: Vec<String> = others.flat_map(features_of).collect();
        let packages = beside.iter().flat_map(|package| ["--package".to_owned(), name(package)]);
        let features = ["--no-default-features".to_owned(), "--features".to_owned(), features.join(",")];
        packages.chain(features).collect()
    }

    /// Returns each package that has features, with no feature and with each feature alone. All features together
    /// are checked for the whole workspace.
    pub(crate) fn feature_combinations(&self) -> Vec<(String, String)> {
        let mut combinations = Vec::new();
        for package in self.packages() {
            let is_code = |name: &&String| *name != "default" && *name != TLS;
            let features: Vec<_> = features(package).filter(is_code).cloned().collect();
            if !features.is_empty() {
                let all = std::iter::once(String::new()).chain(features);
                combinations.extend(all.map(|feature| (name(package), feature)));
            }
        }
        combinations
    }

    /// Returns the names of the integration tests of all packages that depend on `test-servers`.
    pub(crate) fn tests_with_servers(&self) -> BTreeSet<String> {
        let starts_servers = |package: &&Value| {
            let mut dependencies = package["dependencies"].as_array().into_iter().flatten();
            name(package) == "test-servers" || dependencies.any(|needed| needed["name"] == "test-servers")
        };
        let tests = |package| targets_of(package, "test");
        self.packages().filter(starts_servers).flat_map(tests).map(name).collect()
    }

    fn run(arguments: &[&str]) -> Outcome<Self> {
        let arguments = [&["metadata", "--format-version", "1"], arguments].concat();
        let output = command(&arguments).output().map_err(|error| format!("cannot start cargo: {error}"))?;
        if !output.status.success() {
            return Err(format!(
                "cargo {}:\n{}",
                arguments.join(" "),
                String::from_utf8_lossy(&output.stderr)
            ));
        }
        serde_json::from_slice(&output.stdout)
            .map(Self)
            .map_err(|error| format!("cannot read what cargo metadata prints: {error}"))
    }
}

pub(crate) fn name(package: &Value) -> String {
    package["name"].as_str().unwrap_or_default().to_owned()
}

/// Returns the targets of a package of the given kind, such as `lib` or `test`.
fn targets_of<'a>(package: &'a Value, kind: &'static str) -> impl Iterator<Item = &'a Value> {
    let is_of_kind =
        move |target: &&Value| target["kind"].as_array().into_iter().flatten().any(|it| it == kind);
    package["targets"].as_array().into_iter().flatten().filter(is_of_kind)
}

/// Returns the features of a package as `PACKAGE/FEATURE`.
fn features_of(package: &Value) -> impl Iterator<Item = String> {
    features(package).map(move |feature| format!("{}/{feature}", name(package)))
}

fn features(package: &Value) -> impl Iterator<Item = &String> {
    let all = package["features"].as_object().into_iter().flatten().map(|(name, _)| name);
    all.filter(|name| !is_tls(name) || *name == TLS)
}

/// Returns whether a feature selects a TLS library.
pub(crate) fn is_tls(feature: &str) -> bool {
    feature.starts_with("tls-")
}

/// Returns the value of `field`, such as `host: `, in the output of `cargo -vV`.
pub(crate) fn toolchain(field: &str) -> Outcome<String> {
    let output = command(&["-vV"]).output().map_err(|error| format!("cannot start cargo: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let value = text.lines().find_map(|line| line.strip_prefix(field));
    value.map(str::to_owned).ok_or_else(|| format!("cargo -vV does not say {field}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_the_ways_to_speak_tls_there_is_one() {
        let metadata = Metadata(serde_json::json!({"packages": [
            {"name": "a", "features": {"default": ["x"], "x": [], "tls-openssl": []}},
            {"name": "b", "features": {"tls-openssl": [], "tls-rustls-ring-webpki": []}},
        ]}));
        assert_eq!(metadata.all_features(), "a/default,a/x,b/tls-rustls-ring-webpki");
        let combinations = [("a".to_owned(), String::new()), ("a".to_owned(), "x".to_owned())];
        assert_eq!(metadata.feature_combinations(), combinations);
    }

    #[test]
    fn the_bare_facade_is_beside_what_does_not_depend_on_it() {
        let on_it = serde_json::json!([{"name": "leasehold"}]);
        let metadata = Metadata(serde_json::json!({"packages": [
            {"name": "leasehold", "features": {"x": []}},
            {"name": "a", "features": {"y": []}},
            {"name": "b", "features": {"z": []}, "dependencies": on_it},
            {"name": "api-snapshots", "features": {}},
        ]}));
        let arguments =
            ["--package", "leasehold", "--package", "a", "--no-default-features", "--features", "a/y"];
        assert_eq!(metadata.bare_facade(), arguments);
    }

    /// Without this feature, the tests of TLS would be skipped silently.
    #[test]
    fn the_command_has_the_way_to_speak_tls_that_is_tested() {
        let features = Metadata::read().unwrap_or_else(|error| panic!("{error}")).all_features();
        assert!(features.split(',').any(|feature| feature == format!("leasehold-cli/{TLS}")), "{features}");
    }

    #[test]
    fn tests_of_packages_that_start_servers() {
        let targets =
            serde_json::json!([{"name": "unit", "kind": ["lib"]}, {"name": "real", "kind": ["test"]}]);
        let metadata = Metadata(serde_json::json!({"packages": [
            {"name": "a", "targets": targets, "dependencies": [{"name": "x"}, {"name": "test-servers"}]},
            {"name": "b", "targets": [{"name": "other", "kind": ["test"]}], "dependencies": [{"name": "x"}]},
            {"name": "test-servers", "targets": [{"name": "own", "kind": ["test"]}], "dependencies": []},
        ]}));
        assert_eq!(Vec::from_iter(metadata.tests_with_servers()), ["own", "real"]);
    }
}
