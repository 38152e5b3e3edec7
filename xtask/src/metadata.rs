//! What `cargo metadata` says about the workspace and its dependencies.

use serde_json::Value;

use crate::step::{Outcome, command};

pub(crate) struct Metadata(Value);

impl Metadata {
    /// The workspace's own packages; needs nothing that is not here.
    pub(crate) fn read() -> Outcome<Self> {
        Self::run(&["--no-deps", "--offline"])
    }

    /// Everything that the lock file names; downloads what is missing. Where it cannot, everything
    /// that this machine uses, and `false`.
    pub(crate) fn read_with_dependencies() -> Outcome<(Self, bool)> {
        if let Ok(metadata) = Self::run(&["--locked", "--all-features"]) {
            return Ok((metadata, true));
        }
        let host = host()?;
        Self::run(&["--locked", "--all-features", "--offline", "--filter-platform", &host])
            .map(|metadata| (metadata, false))
    }

    pub(crate) fn packages(&self) -> impl Iterator<Item = &Value> {
        self.0["packages"].as_array().into_iter().flatten()
    }

    /// Every library with features, with none of them and with each alone. Default and all features
    /// are checked for the whole workspace.
    pub(crate) fn feature_combinations(&self) -> Vec<(String, String)> {
        let mut combinations = Vec::new();
        for package in self.packages() {
            let features = package["features"].as_object().into_iter().flatten().map(|(name, _)| name);
            let features: Vec<_> = features.filter(|name| *name != "default").cloned().collect();
            if !features.is_empty() {
                let all = std::iter::once(String::new()).chain(features);
                combinations.extend(all.map(|feature| (name(package), feature)));
            }
        }
        combinations
    }

    pub(crate) fn packages_with_benches(&self) -> Vec<String> {
        let has_bench = |package: &&Value| {
            let targets = package["targets"].as_array().into_iter().flatten();
            targets.flat_map(|target| target["kind"].as_array()).flatten().any(|kind| kind == "bench")
        };
        self.packages().filter(has_bench).map(name).collect()
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

fn host() -> Outcome<String> {
    let output = command(&["-vV"]).output().map_err(|error| format!("cannot start cargo: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(str::to_owned).ok_or_else(|| "cargo -vV names no host".to_owned())
}
