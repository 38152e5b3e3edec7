//! One obvious command for each job: `cargo xtask` lists them.

mod dependencies;
mod documents;
mod licence;
mod metadata;
mod servers;
mod step;

use std::process::ExitCode;

use metadata::Metadata;
use step::{Outcome, cargo};

const USAGE: &str = "\
usage: cargo xtask JOB

  test        every test: unit, documentation, conformance, mutants, the command end to end; installs
              PostgreSQL and PgBouncer if they are missing and apt-get may, or says how
  lint        tests named in the documents, formatting, clippy for each combination of features,
              documentation; no warning passes; the public interface is that of docs/public-api
  api         the public interface alone; with --update, docs/public-api becomes what it is now
  deps        licences, sources and duplicate versions of all dependencies
  bench NAME  the benchmarks of the crates leasehold-NAME and leasehold-NAME-..., such as `bench memory`,
              `bench postgres`, `bench claims` or `bench companions` (middleware and idempotency keys)
  ci          lint, deps and test: what has to pass before a change goes in";

/// What is in the names of the packages whose benchmarks start servers.
const NEED_SERVERS: [&str; 3] = ["postgres", "claims", "companions"];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match arguments[..] {
        ["test"] => test(),
        ["lint"] => lint(),
        ["api"] => api("check"),
        ["api", "--update"] => api("update"),
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
    servers::ensure()?;
    let features = Metadata::read()?.all_features();
    let all = step::tests(
        "unit, integration, conformance, mutant and command tests, and the examples in the documentation",
        // Its tests belong to `lint`, and what it depends on would be built for them alone.
        &["--workspace", "--exclude", "api-snapshots", "--features", &features, "--no-fail-fast"],
    )?;
    // Some errors exist only where a feature is missing.
    let bare = step::tests(
        "the facade without its features",
        &["--package", "leasehold", "--no-default-features", "--tests"],
    )?;
    println!("\n{} tests passed", all + bare);
    Ok(())
}

fn lint() -> Outcome {
    documents::check()?;
    step::need_component("fmt", "rustfmt")?;
    step::need_component("clippy", "clippy")?;
    cargo("formatting", &["fmt", "--all", "--check"])?;
    let metadata = Metadata::read()?;
    let features = metadata.all_features();
    let workspace = ["clippy", "--workspace", "--all-targets", "--locked"];
    clippy("clippy, all features", &[&workspace[..], &["--features", &features]].concat())?;
    clippy("clippy, default features", &workspace)?;
    for (package, features) in metadata.feature_combinations() {
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
    // One for all ways to speak TLS: the one that needs no more than a C compiler.
    let tls =
        ["--package", "leasehold-postgres", "--lib", "--locked", "--features", "tls-rustls-ring-webpki"];
    clippy("clippy, leasehold-postgres with TLS", &[&["clippy"], &tls[..]].concat())?;
    step::cargo_with(
        "documentation",
        &["doc", "--workspace", "--no-deps", "--features", &features, "--locked"],
        &[("RUSTDOCFLAGS", "-D warnings")],
    )?;
    cargo("tests of api-snapshots", &["test", "--quiet", "--locked", "--package", "api-snapshots"])?;
    api("check")
}

/// A program of its own, because what it depends on is of no use to the other jobs.
fn api(job: &str) -> Outcome {
    let metadata = Metadata::read()?;
    let (features, target) = (metadata.all_features(), metadata.target_directory());
    let arguments =
        ["run", "--quiet", "--locked", "--package", "api-snapshots", "--", job, &features, target];
    cargo("public interface", &arguments)
}

/// Warnings are denied after the `--`, not in RUSTFLAGS: those would build all dependencies once more.
fn clippy(what: &str, arguments: &[&str]) -> Outcome {
    cargo(what, &[arguments, &["--", "-D", "warnings"]].concat())
}

fn bench(name: &str) -> Outcome {
    let metadata = Metadata::read()?;
    let packages = metadata.packages_with_benches(name);
    if packages.is_empty() {
        let all = metadata.all_with_benches();
        let names: Vec<_> = all.iter().filter_map(|known| known.strip_prefix("leasehold-")).collect();
        return Err(format!(
            "there are no benchmarks for {name:?}; there are some for: {}",
            names.join(", ")
        ));
    }
    let needs_servers = |package: &String| NEED_SERVERS.iter().any(|name| package.contains(name));
    if packages.iter().any(needs_servers) {
        servers::ensure()?;
    }
    let packages = packages.iter().flat_map(|package| ["--package", package]);
    cargo("benchmarks", &["bench"].into_iter().chain(packages).chain(["--benches"]).collect::<Vec<_>>())
}
