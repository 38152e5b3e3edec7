//! One obvious command for each job: `cargo xtask` lists them.

mod dependencies;
mod licence;
mod metadata;
mod step;

use std::process::ExitCode;

use metadata::Metadata;
use step::{Outcome, cargo};

const USAGE: &str = "\
usage: cargo xtask JOB

  test        every test: unit, documentation, conformance, mutants, the command end to end
  lint        formatting, clippy for each combination of features, documentation; no warning passes
  deps        licences, sources and duplicate versions of all dependencies
  bench NAME  the benchmarks of the crate leasehold-NAME, such as `bench memory`
  ci          lint, deps and test: what has to pass before a change goes in";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match arguments[..] {
        ["test"] => test(),
        ["lint"] => lint(),
        ["deps"] => dependencies::check(),
        ["bench", name] => bench(name),
        ["ci"] => lint().and_then(|()| dependencies::check()).and_then(|()| test()),
        _ => Err(USAGE.to_owned()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

fn test() -> Outcome {
    let all = step::tests(
        "unit, integration, conformance, mutant and command tests, and the examples in the documentation",
        &["test", "--workspace", "--all-features", "--no-fail-fast"],
    )?;
    // Some errors exist only where a feature is missing.
    let bare = step::tests(
        "the facade without its features",
        &["test", "--package", "leasehold", "--no-default-features", "--tests"],
    )?;
    println!("\n{} tests passed", all + bare);
    Ok(())
}

fn lint() -> Outcome {
    step::need_component("fmt", "rustfmt")?;
    step::need_component("clippy", "clippy")?;
    cargo("formatting", &["fmt", "--all", "--check"])?;
    let workspace = ["clippy", "--workspace", "--all-targets", "--locked"];
    clippy("clippy, all features", &[&workspace[..], &["--all-features"]].concat())?;
    clippy("clippy, default features", &workspace)?;
    for (package, features) in Metadata::read()?.feature_combinations() {
        let what =
            format!("clippy, {package} with {}", if features.is_empty() { "no features" } else { &features });
        let arguments = [
            "clippy",
            "--package",
            &package,
            "--lib",
            "--locked",
            "--no-default-features",
            "--features",
            &features,
        ];
        clippy(&what, &arguments)?;
    }
    step::cargo_with(
        "documentation",
        &["doc", "--workspace", "--no-deps", "--all-features", "--locked"],
        &[("RUSTDOCFLAGS", "-D warnings")],
    )
}

/// Warnings are denied after the `--`, not in RUSTFLAGS: those would build all dependencies once more.
fn clippy(what: &str, arguments: &[&str]) -> Outcome {
    cargo(what, &[arguments, &["--", "-D", "warnings"]].concat())
}

fn bench(name: &str) -> Outcome {
    let package = format!("leasehold-{name}");
    let with_benches = Metadata::read()?.packages_with_benches();
    if !with_benches.contains(&package) {
        let names: Vec<_> =
            with_benches.iter().filter_map(|known| known.strip_prefix("leasehold-")).collect();
        return Err(format!(
            "there are no benchmarks for {name:?}; there are some for: {}",
            names.join(", ")
        ));
    }
    cargo("benchmarks", &["bench", "--package", &package, "--benches"])
}
