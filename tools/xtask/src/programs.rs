//! Runs several test programs in parallel, unlike `cargo test`. Most programs wait for servers and clocks, and the last
//! test of a program leaves the other processors idle.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Instant;

use serde_json::Value;

use crate::late::{self, Failure};
use crate::machine::{MachineLoad, MachineWatch};
use crate::step::{self, Outcome};

/// Ends of the names of the programs that run the suites of the stores and of claims.
const SUITES: [&str; 2] = ["/tests/conformance.rs", "/tests/stores/main.rs"];
/// Start of the name of the suite that needs no server.
const FILES: &str = "lock-file/";
/// Start of the names of the etcd store's programs.
const ETCD: &str = "lock-etcd/";
/// The program that runs the suite on three members of etcd. It waits for disks and elections, so it is run separately.
const THREE_MEMBERS: &str = "lock-etcd/tests/three_members.rs";

/// Default timeout in seconds for the tests' connections to Postgres, because the usual 5 are too short on a busy
/// machine.
const CONNECT_TIMEOUT: &str = "60";

/// Number of tests of one program that run at once. It is half of `cargo test`'s (`.cargo/config.toml`), because one
/// program runs on each processor. More tests starve the servers.
const THREADS: &str = "8";

/// Lines of a failed program's output that the end of a job repeats.
const SHOWN: usize = 60;

/// An executable with tests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Program {
    /// Folder of the package and path of the source, such as `lock-file/tests/backend.rs`.
    name: String,
    executable: PathBuf,
    /// Folder of the package, the working directory of its tests.
    folder: PathBuf,
}

impl Program {
    /// Returns the path of the file with the program's output.
    fn output(&self) -> PathBuf {
        self.executable.with_extension("txt")
    }

    fn is_suite(&self) -> bool {
        SUITES.iter().any(|suite| self.name.ends_with(suite))
    }
}

/// Treatment of tests that were late while other programs used the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LateTests {
    /// Runs them again if other programs used the machine.
    RunAgainIfShared,
    /// Runs them again, because this program builds beside the tests.
    RunAgain,
    Failed,
}

impl LateTests {
    fn are_run_again(self, machine: MachineLoad) -> bool {
        match self {
            Self::RunAgainIfShared => machine.is_shared(),
            Self::RunAgain => true,
            Self::Failed => false,
        }
    }
}

/// A program's output and exit, and the load of the machine while it ran.
struct FinishedProgram<'a> {
    program: &'a Program,
    outcome: Outcome<TestOutput>,
    machine: MachineLoad,
}

/// Tests that failed only because of bounds in real time, on a machine that other programs used.
struct LateProgram<'a> {
    program: &'a Program,
    failures: Vec<Failure>,
    machine: MachineLoad,
}

struct TestOutput {
    text: String,
    succeeded: bool,
}

impl TestOutput {
    /// Returns the output of the failed tests, or the last lines of a program that just ended. A job prints it again at its
    /// end, because readers of a long log start there.
    fn end(&self) -> String {
        let lines: Vec<_> = self.text.lines().collect();
        let start = lines.iter().position(|line| *line == "failures:");
        let shown = match start {
            Some(start) => &lines[start..lines.len().min(start + SHOWN)],
            None => &lines[lines.len().saturating_sub(SHOWN)..],
        };
        shown.join("\n")
    }

    /// Returns the failed tests if each of them failed only because of bounds in real time. `None` if none failed.
    fn only_late(&self) -> Option<Vec<Failure>> {
        let failures = late::failures(&self.text);
        let failed = self
            .text
            .lines()
            .filter(|line| line.starts_with("test ") && line.ends_with(" ... FAILED"))
            .count();
        let is_all = !failures.is_empty() && failures.len() == failed;
        (is_all && failures.iter().all(|failure| failure.late.is_some())).then_some(failures)
    }
}

/// Builds the tests that `cargo test` would run with these arguments, except the documentation's.
pub(crate) fn build(what: &str, arguments: &[&str]) -> Outcome<Vec<Program>> {
    step::announce(&format!("building: {what}"));
    let start = Instant::now();
    let build = ["test", "--profile", "tests", "--no-run", "--message-format", "json-render-diagnostics"];
    let output = step::command(&[&build[..], arguments].concat())
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("cannot start cargo: {error}"))?;
    if !output.status.success() {
        return Err(format!(
            "\nfailed: building\nrepeat it with: cargo test --profile tests --no-run {}",
            arguments.join(" ")
        ));
    }
    let programs: Vec<_> = String::from_utf8_lossy(&output.stdout).lines().filter_map(program_in).collect();
    println!("-- {what}: {} programs built in {:.0?}", programs.len(), start.elapsed());
    Ok(longest_first(programs))
}

/// Returns the `programs` that run the suites on Postgres.
pub(crate) fn suites(programs: &[Program]) -> Vec<Program> {
    let on_postgres = |program: &&Program| program.is_suite() && !program.name.starts_with(FILES);
    without_etcd(programs).iter().filter(on_postgres).cloned().collect()
}

/// Returns the `programs` except the etcd store's, to which the version of Postgres does not matter.
pub(crate) fn without_etcd(programs: &[Program]) -> Vec<Program> {
    programs.iter().filter(|program| !program.name.starts_with(ETCD)).cloned().collect()
}

/// Splits off the program that runs the suite on three members of etcd. Returns the others, and that program.
pub(crate) fn split_three_members(programs: Vec<Program>) -> (Vec<Program>, Vec<Program>) {
    programs.into_iter().partition(|program| program.name != THREE_MEMBERS)
}

/// Runs all programs with `options`, also after a failure. Returns the number of passed tests.
pub(crate) fn run(
    what: &str,
    programs: &[Program],
    options: &[&str],
    variables: &[(&str, &str)],
    late: LateTests,
) -> Outcome<u64> {
    step::announce(what);
    if programs.is_empty() {
        return Err(format!("failed: {what}: there are no tests"));
    }
    let start = Instant::now();
    let watch = MachineWatch::start();
    let queue = Mutex::new(programs.iter());
    let (tell, told) = mpsc::channel();
    let (mut passed, mut failed, mut late_programs) = (0, Vec::new(), Vec::new());
    thread::scope(|scope| {
        for _ in 0..step::processors() {
            let (queue, tell, watch) = (&queue, tell.clone(), &watch);
            scope.spawn(move || {
                let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
                while let Some(program) = next() {
                    // Printed at the start, because it names a program that hangs.
                    println!("     Running {} ({})", program.name, program.executable.display());
                    let begun = Instant::now();
                    let outcome = run_one(program, options, variables);
                    let machine = watch.since(begun);
                    if tell.send(FinishedProgram { program, outcome, machine }).is_err() {
                        return;
                    }
                }
            });
        }
        drop(tell);
        for FinishedProgram { program, outcome, machine } in told {
            println!("\n-- {}", program.name);
            match outcome {
                Ok(said) => {
                    print!("{}", said.text);
                    passed += said.text.lines().map(step::passed_in).sum::<u64>();
                    match said.only_late() {
                        _ if said.succeeded => {}
                        Some(failures) if late.are_run_again(machine) => {
                            late_programs.push(LateProgram { program, failures, machine });
                        }
                        _ => failed.push((program, said.end())),
                    }
                }
                Err(message) => {
                    println!("{message}");
                    failed.push((program, message));
                }
            }
        }
    });
    for late in late_programs {
        match run_again(&late, variables, &watch) {
            Ok(count) => passed += count,
            Err(end) => failed.push((late.program, end)),
        }
    }
    if !failed.is_empty() {
        return Err(repeat(what, &failed, options, variables));
    }
    println!("-- {what}: {passed} passed in {:.0?}", start.elapsed());
    Ok(passed)
}

/// Reruns the late tests of a program, each alone, and prints the results of both runs. Returns the number of passed
/// tests, or the output of the tests that failed again.
fn run_again(late: &LateProgram<'_>, variables: &[(&str, &str)], watch: &MachineWatch) -> Outcome<u64> {
    let (mut passed, mut ends) = (0, Vec::new());
    for Failure { test, late: bound } in &late.failures {
        let begun = Instant::now();
        let outcome = run_one(late.program, &["--exact", test, "--test-threads", "1"], variables);
        let alone = watch.since(begun);
        let bound = bound.as_deref().unwrap_or_default();
        let is_passed = outcome.as_ref().is_ok_and(|said| said.succeeded);
        let verdict = if is_passed { "passed" } else { "failed" };
        println!(
            "-- run again: {} {test}: {bound} ({}), then {verdict} alone ({alone})",
            late.program.name, late.machine
        );
        match outcome {
            Ok(_) if is_passed => passed += 1,
            Ok(said) => {
                println!("{}", said.text);
                ends.push(said.end());
            }
            Err(message) => {
                println!("{message}");
                ends.push(message);
            }
        }
    }
    if ends.is_empty() { Ok(passed) } else { Err(ends.join("\n")) }
}

/// Moves the suites to the front. They run longest, so one at the end would leave the other processors idle.
fn longest_first(mut programs: Vec<Program>) -> Vec<Program> {
    programs.sort_by_key(|program| !program.is_suite());
    programs
}

/// Returns the test program that a line of cargo's JSON output reports as built.
fn program_in(line: &str) -> Option<Program> {
    let message: Value = serde_json::from_str(line).ok()?;
    if message["profile"]["test"] != true {
        return None;
    }
    let executable = message["executable"].as_str()?;
    let folder = Path::new(message["manifest_path"].as_str()?).parent()?;
    let source = Path::new(message["target"]["src_path"].as_str()?);
    let package = folder.file_name().unwrap_or_default();
    let name = Path::new(package).join(source.strip_prefix(folder).unwrap_or(source));
    Some(Program { name: name.display().to_string(), executable: executable.into(), folder: folder.into() })
}

fn run_one(program: &Program, options: &[&str], variables: &[(&str, &str)]) -> Outcome<TestOutput> {
    // Both streams go to one file, which keeps their order. A pipe would not end while a process that the test left behind
    // has it open.
    let path = program.output();
    let failed = |error| format!("cannot write {}: {error}", path.display());
    let output = File::create(&path).map_err(failed)?;
    let copy = output.try_clone().map_err(failed)?;
    let mut command = Command::new(&program.executable);
    command
        .args(options)
        .current_dir(&program.folder)
        .env("CARGO_MANIFEST_DIR", &program.folder)
        .env("PGCONNECT_TIMEOUT", CONNECT_TIMEOUT)
        .env("RUST_TEST_THREADS", THREADS)
        .envs(variables.iter().copied())
        .stdin(Stdio::null())
        .stdout(output)
        .stderr(copy);
    let status = command.status().map_err(|error| format!("cannot start it: {error}"))?;
    let text = fs::read(&path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    let mut text = String::from_utf8_lossy(&text).into_owned();
    if !status.success() {
        text += &format!("ended with {status}\n");
    }
    Ok(TestOutput { text, succeeded: status.success() })
}

fn repeat(what: &str, failed: &[(&Program, String)], options: &[&str], variables: &[(&str, &str)]) -> String {
    let variables: String = variables.iter().map(|(name, value)| format!("{name}='{value}' ")).collect();
    let commands: String = failed
        .iter()
        .map(|(program, _)| {
            let (folder, executable) = (program.folder.display(), program.executable.display());
            format!(
                "\n  (cd {folder} && CARGO_MANIFEST_DIR={folder} PGCONNECT_TIMEOUT={CONNECT_TIMEOUT} {variables}{executable} {})",
                options.join(" ")
            )
        })
        .collect();
    let ends: String =
        failed.iter().map(|(program, end)| format!("\n-- {} failed:\n{end}\n", program.name)).collect();
    format!("{ends}\nfailed: {what}: {} programs\nrepeat them with:{commands}", failed.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_what_has_tests_and_was_built() {
        let line = r#"{"reason":"compiler-artifact","manifest_path":"/a/lock-file/Cargo.toml","target":{"kind":["test"],"src_path":"/a/lock-file/tests/backend.rs"},"profile":{"test":true},"executable":"/a/target/tests/deps/backend-1"}"#;
        let program = Program {
            name: "lock-file/tests/backend.rs".to_owned(),
            executable: "/a/target/tests/deps/backend-1".into(),
            folder: "/a/lock-file".into(),
        };
        assert_eq!(program_in(line), Some(program));
        assert_eq!(program_in(&line.replace("\"test\":true", "\"test\":false")), None, "an example");
        assert_eq!(program_in(r#"{"reason":"build-finished","success":true}"#), None);
        let suite = line.replace("backend.rs", "conformance.rs");
        let both = longest_first(vec![program_in(line).unwrap(), program_in(&suite).unwrap()]);
        assert!(both[0].name.ends_with("conformance.rs"), "{both:?}");
        assert_eq!(suites(&both), [], "files are not on Postgres");
        let rows = program_in(&suite.replace("lock-file", "lock-postgres-row")).unwrap();
        let etcd = program_in(&suite.replace("lock-file", "lock-etcd")).unwrap();
        let all = [both[1].clone(), rows.clone(), etcd.clone()];
        assert_eq!(suites(&all), [rows]);
        assert_eq!(without_etcd(&all), all[..2]);
        let three = suite.replace("lock-file", "lock-etcd").replace("conformance", "three_members");
        let three = program_in(&three).unwrap();
        let split = split_three_members(vec![etcd.clone(), three.clone()]);
        assert_eq!(split, (vec![etcd], vec![three]));
    }

    #[test]
    fn what_a_program_says_and_how_it_ends_is_known() {
        let folder = std::env::temp_dir().join(format!("xtask-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let executable = folder.join("sh");
        std::os::unix::fs::symlink("/bin/sh", &executable).unwrap();
        let shell = Program { name: "sh".to_owned(), executable, folder: "/".into() };
        let of = |script: &str| run_one(&shell, &["-c", script], &[("WORD", "b")]).unwrap();
        let good = of("echo a; echo $WORD >&2; pwd");
        assert_eq!((good.text.as_str(), good.succeeded), ("a\nb\n/\n", true));
        let bad = of("echo a; exit 3");
        assert!(!bad.succeeded && bad.text.starts_with("a\nended with exit status: 3"), "{}", bad.text);
        assert_eq!(bad.end(), "a\nended with exit status: 3");
        let left_behind = of("sleep 60 & echo $!");
        assert!(left_behind.succeeded);
        of(&format!("kill {}", left_behind.text));
        assert!(run("nothing", &[], &[], &[], LateTests::Failed).is_err(), "no tests are no success");
        let missing = Program { executable: folder.join("nothing"), ..shell };
        assert!(run_one(&missing, &[], &[]).is_err());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_late_test_is_run_again_and_counts_as_it_ends_then() {
        use crate::late::tests::{LATE_IF_WANTED, WANTED};

        // A link with another name, because a program's output goes to a file beside it, and this program's file is in use.
        let folder = std::env::temp_dir().join(format!("xtask-late-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let executable = folder.join("late");
        std::os::unix::fs::symlink(std::env::current_exe().unwrap(), &executable).unwrap();
        let program =
            Program { name: "xtask".to_owned(), executable, folder: env!("CARGO_MANIFEST_DIR").into() };
        let first = run_one(&program, &["--exact", LATE_IF_WANTED], &[(WANTED, "")]).unwrap();
        let failures = first.only_late().expect("nothing but a bound has failed");
        let late = LateProgram { program: &program, failures, machine: MachineLoad::default() };
        let watch = MachineWatch::start();
        assert_eq!(run_again(&late, &[], &watch), Ok(1));
        let again = run_again(&late, &[(WANTED, "")], &watch).expect_err("late again is red");
        assert!(again.starts_with("failures:") && again.contains(LATE_IF_WANTED), "{again}");
        let other = first.text.clone() + "test other ... FAILED\n";
        assert_eq!(
            TestOutput { text: other, succeeded: false }.only_late(),
            None,
            "another failure is none of time"
        );
        assert_eq!(
            TestOutput { text: String::new(), succeeded: false }.only_late(),
            None,
            "a program that just died"
        );
        fs::remove_dir_all(folder).unwrap();
    }
}
