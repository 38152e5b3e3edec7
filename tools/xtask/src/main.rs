//! One command for each job. `cargo xtask` lists them.

mod bench;
mod campaign;
mod dependencies;
mod documents;
mod fuzz;
mod late;
mod links;
mod machine;
mod metadata;
mod oldest;
mod programs;
mod publish;
mod servers;
mod simulate;
mod step;
mod torture;
mod versions;
mod words;

use std::path::Path;
use std::process::ExitCode;
use std::thread;

use metadata::{API_SNAPSHOTS, Metadata};
use programs::{LateTests, Program};
use step::{Outcome, cargo};

const USAGE: &str = "\
usage: cargo xtask JOB

  test [--strict]
              every test: unit, documentation, conformance, mutants, the command end to end, a page in a browser;
              installs PostgreSQL, PgBouncer, etcd and Chromium if they are missing and apt-get may, or says how;
              runs a test that only passed a bound in real time again alone if other programs used the machine, not
              with --strict
  test --postgres VERSION [--core]
              the tests that start servers, on a Postgres of that major version (15 to 18, by npm); with
              --core those of exclusion, fencing, release and crashes alone, and one suite of claims
  test --etcd the suite of the etcd store on three members that wait for their disks; `test` runs it on one
  simulate [--minutes N] [--seed S] [--without NAMES]
              schedules of the simulator: for that long from a new seed or from S on, or that of S alone, without
              the disturbances that are named
  simulate --all | --choices SCOPE:NUMBERS
              all schedules of two clients with at most two faults, with their number, or one of these schedules
  fuzz [--minutes N] [--seed S] [--target NAME]
              inputs near to valid ones: for that long on each target from a new seed or from S on, or that of S
              alone
  torture [--minutes N] [--seed S] [--store NAME] [--faults NAMES]
              processes that lock real stores while they, their connections and the server are killed, stopped
              and cut; for that long on each of files, session, transaction, row, lease and etcd, or on that
              one; by the faults with those names, as in --faults kill,lose-reply
  lint        tests named in the documents, formatting, clippy for each combination of features,
              documentation; no warning passes; the public interface is that of docs/public-api
  api         the last two alone; with --update, docs/public-api becomes what the interface is now
  package     the published packages: manifests, archives, whether each archive builds by itself; what lint and ci do of it
  words [--list SIGN | --sample N [--seed S] | --update]
              signs of hard text in comments and documents, counted; the places of one sign; N comments with their
              items and without bodies, and half as many paragraphs, to be graded; ceilings that fall to the counts
  deps        licences, sources and duplicate versions of all dependencies
  bench [GROUP[:SECTION]..] [--smoke] [--json FILE] [--publish]
              stores, claims and companions beside their peers; the groups are memory, files, postgres, etcd, modes,
              claims, companions and peers, all without one; --smoke takes seconds per group and its figures mean nothing;
              --publish writes docs/performance.md with charts, with groups only their parts again
  ci          lint, deps, test, the core of the stores' tests on the newest Postgres and on three members of etcd: what
              has to pass before a change goes in";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match arguments[..] {
        ["test"] => test(LateTests::RunAgainIfShared),
        ["test", "--strict"] => test(LateTests::Failed),
        ["test", "--postgres", version] => test_on(version),
        ["test", "--postgres", version, "--core"] => core_on(version),
        ["test", "--etcd"] => test_on_three_members(),
        ["simulate", ..] => simulate::run(&arguments[1..]),
        ["fuzz", ..] => fuzz::run(&arguments[1..]),
        ["torture", ..] => torture::run(&arguments[1..]),
        ["lint"] => lint(),
        ["api"] => api("check"),
        ["api", "--update"] => api("update"),
        ["package"] => publish::check().and_then(|()| publish::verify()),
        ["words", ..] => words::run(&arguments[1..]),
        ["deps"] => dependencies::check(),
        ["bench", ..] => bench::run(&arguments[1..]),
        ["ci"] => ci(),
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

const TESTS: &str = "unit, integration, conformance, mutant and command tests";

fn test(late: LateTests) -> Outcome {
    servers::ensure_browser()?;
    // The suite on three members is a separate job, because it waits for disks and elections.
    let (programs, _) = programs::split_three_members(built(&[])?);
    // Both run even if one fails, so one run shows all failures. The programs run last, because their output ends with the
    // results of reruns.
    let passed = step::sum([compiled_tests(), programs::run(TESTS, &programs, &[], &[], late)])?;
    println!("\n{passed} tests passed");
    Ok(())
}

/// Runs all checks. The lint of each library, the documentation's examples and the archives compile in a second thread,
/// because the tests leave processor time unused.
fn ci() -> Outcome {
    lint_of_all()?;
    dependencies::check()?;
    servers::ensure_browser()?;
    let (programs, on_etcd) = programs::split_three_members(built(&[])?);
    let passed = thread::scope(|scope| {
        let compiled = scope.spawn(|| {
            // On Linux for this thread and its children alone. A failure only makes the tests slower.
            let _ = rustix::process::nice(19);
            step::sum([lint_of_each().map(|()| 0), compiled_tests(), publish::verify().map(|()| 0)])
        });
        let tested = programs::run(TESTS, &programs, &[], &[], LateTests::RunAgain);
        let newest = core_on_the_newest_postgres(&programs);
        let three_members = on_three_members(&on_etcd, &CORE);
        let compiled =
            compiled.join().unwrap_or_else(|_| Err("failed: what is compiled beside the tests".to_owned()));
        step::sum([tested, newest, three_members, compiled])
    })?;
    println!("\n{passed} tests passed");
    Ok(())
}

/// Builds the test programs of the workspace, or only the programs that cargo's arguments in `targets` select.
fn built(targets: &[&str]) -> Outcome<Vec<Program>> {
    servers::ensure()?;
    let features = Metadata::read()?.all_features();
    programs::build(TESTS, &[&all_tests(&features)[..], targets].concat())
}

/// Runs the tests that need separate compilation: documentation examples, and the facade with few features.
fn compiled_tests() -> Outcome<u64> {
    let metadata = Metadata::read()?;
    let features = metadata.all_features();
    let examples = [&all_tests(&features)[..], &["--doc"]].concat();
    // Tests the facade without its features too, because some errors exist only if a feature is missing.
    let bare = metadata.bare_facade();
    let bare = |more: &[&'static str]| {
        bare.iter().map(String::as_str).chain(more.iter().copied()).collect::<Vec<_>>()
    };
    let swap = |feature| {
        let what = format!("the example `swap` with {feature} alone");
        step::tests(&what, &bare(&["--features", feature, "--test", "swap"]), &[])
    };
    step::sum([
        step::tests("examples in the documentation", &examples, &[]),
        step::tests("the facade without its features", &bare(&["--test", "connect"]), &[]),
        swap("leasehold/memory"),
        swap("leasehold/file"),
        swap("leasehold/postgres-ttl"),
        swap("leasehold/etcd"),
    ])
}

fn all_tests(features: &str) -> [&str; 5] {
    ["--workspace", "--exclude", API_SNAPSHOTS, "--features", features]
}

/// Filters of the tests that run on another Postgres: families of the stores' suite, and the claims' suite on one kind of
/// table.
const CORE: [&str; 5] = ["exclusion::", "fencing::", "release::", "crash::", "postgres::text::"];

fn core_on_the_newest_postgres(programs: &[Program]) -> Outcome<u64> {
    if versions::has_npm() {
        return tests_on(versions::newest(), &programs::suites(programs), &CORE);
    }
    println!(
        "\n-- not tried, because npm is missing: the core on PostgreSQL {}; see `cargo xtask test --postgres`",
        versions::newest()
    );
    Ok(0)
}

/// Runs the tests that start servers on a Postgres of another major version. After [`test()`], nothing is compiled again.
fn test_on(version: &str) -> Outcome {
    servers::ensure_browser()?;
    let targets = Metadata::read()?.tests_with_servers();
    let targets: Vec<&str> =
        ["--lib"].into_iter().chain(targets.iter().flat_map(|target| ["--test", target])).collect();
    tests_on(version, &programs::without_etcd(&built(&targets)?), &[]).map(|_| ())
}

fn core_on(version: &str) -> Outcome {
    // Selects the test programs that contain these families.
    let targets = ["--test", "conformance", "--test", "stores"];
    tests_on(version, &programs::suites(&built(&targets)?), &CORE).map(|_| ())
}

fn tests_on(version: &str, programs: &[Program], families: &[&str]) -> Outcome<u64> {
    let metadata = Metadata::read()?;
    let directory = versions::programs(version, Path::new(metadata.target_directory()))?;
    let directory = directory.to_str().ok_or("the target directory's name is not UTF-8")?;
    // Empties `DATABASE_URL`, because the server of a given URL has another version.
    let variables = [("LEASEHOLD_PG_BIN", directory), ("DATABASE_URL", "")];
    programs::run(
        &format!("tests on PostgreSQL {version}"),
        programs,
        families,
        &variables,
        LateTests::Failed,
    )
}

fn test_on_three_members() -> Outcome {
    let (_, programs) = programs::split_three_members(built(&["--test", "three_members"])?);
    on_three_members(&programs, &[]).map(|_| ())
}

fn on_three_members(programs: &[Program], families: &[&str]) -> Outcome<u64> {
    programs::run("the suite on three members of etcd", programs, families, &[], LateTests::RunAgainIfShared)
}

fn lint() -> Outcome {
    lint_of_all()?;
    lint_of_each()
}

fn lint_of_all() -> Outcome {
    documents::check()?;
    links::check()?;
    publish::check()?;
    oldest::check()?;
    words::check()?;
    step::need_component("fmt", "rustfmt")?;
    step::need_component("clippy", "clippy")?;
    // `cargo fmt` does not find modules that a macro declares.
    let cases = words::tracked("conformance-tests/src/cases/*.rs")?;
    let cases: Vec<&str> = cases.iter().map(String::as_str).collect();
    cargo("formatting", &[&["fmt", "--all", "--check", "--"], &cases[..]].concat())?;
    let metadata = Metadata::read()?;
    let features = metadata.all_features();
    clippy("clippy, all features", &["--workspace", "--all-targets", "--features", &features])
}

/// Runs the lints of single libraries: clippy with each feature alone, the documentation, and the public interface.
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

/// Builds the documentation without warnings and checks or updates the public interface. This is a separate program, because
/// other jobs do not need its dependencies.
fn api(job: &str) -> Outcome {
    let metadata = Metadata::read()?;
    let (features, target) = (metadata.all_features(), metadata.target_directory());
    let program = ["--package", API_SNAPSHOTS, "--", job, &features, target];
    cargo("documentation and public interface", &[&["run", "--quiet"], &AS_TESTS[..], &program].concat())
}

/// Arguments that select the profile of the tests, so that macros and build scripts are built once for both.
const AS_TESTS: [&str; 3] = ["--locked", "--profile", "tests"];

/// Runs clippy and denies warnings. Denies them after the `--`, because RUSTFLAGS would rebuild all dependencies.
fn clippy(what: &str, arguments: &[&str]) -> Outcome {
    cargo(what, &[&["clippy"], &AS_TESTS[..], arguments, &["--", "-D", "warnings"]].concat())
}
