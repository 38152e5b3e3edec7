//! A run of all cases or of selected ones, on one or several threads.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::case::Case;
use crate::cases::all_cases;
use crate::harness::{Factory, Time};
use crate::pace::usual_pace;
use crate::report::{About, CaseReport, Report};
use crate::runner::run;
use crate::verdict::{StoreDeclarations, declared};

/// Runs all cases one after the other. Cases that need a child process are not applicable.
pub fn run_all(factory: &dyn Factory) -> Report {
    Run::new(factory).run()
}

/// A run of the suite without the test harness. By default it runs all cases one after the other.
#[must_use = "nothing runs before run is called"]
pub struct Run<'a> {
    factory: &'a dyn Factory,
    filter: Vec<String>,
    threads: usize,
    child_test: Option<String>,
}

impl<'a> Run<'a> {
    /// Makes a run on stores of `factory`.
    pub fn new(factory: &'a dyn Factory) -> Self {
        Self { factory, filter: Vec::new(), threads: 1, child_test: None }
    }

    /// Selects the cases of this rule, such as `C8`, or with this text in their name. Repeated calls select
    /// more cases.
    pub fn only(mut self, rule_or_name: impl Into<String>) -> Self {
        self.filter.push(rule_or_name.into());
        self
    }

    /// Runs `threads` cases at a time. In real time cases mostly wait, so that many can run in parallel.
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = threads.max(1);
        self
    }

    /// Sets the test that acts as the child process. It calls
    /// [`Mount::child_entry`](crate::Mount::child_entry). Children are this executable, started with this
    /// test. [`main`](crate::main) needs no such test.
    pub fn child_test(mut self, name: impl Into<String>) -> Self {
        self.child_test = Some(name.into());
        self
    }

    /// Runs the selected cases and returns their report.
    #[must_use]
    pub fn run(self) -> Report {
        // Continue if the store does not open, because each case then fails with its own message.
        let declared = declared(self.factory, self.child_test.is_some());
        let StoreDeclarations { store, declarations } = declared.unwrap_or_else(|_| StoreDeclarations {
            store: "that does not open".to_owned(),
            declarations: Vec::new(),
        });
        let before = load();
        let cases = self.run_cases();
        let about = About {
            store,
            package: package(),
            time: if self.factory.time() == Time::Real { "real" } else { "virtual" },
            threads: self.threads,
            pace: usual_pace(),
            load: [before, load()],
            filter: self.filter,
        };
        Report { cases, declarations, about }
    }

    fn is_wanted(&self, case: &Case) -> bool {
        let means = |word: &String| case.rules.contains(&word.as_str()) || case.name.contains(word.as_str());
        self.filter.is_empty() || self.filter.iter().any(means)
    }

    fn run_cases(&self) -> Vec<CaseReport> {
        let wanted: Vec<_> = all_cases().iter().filter(|case| self.is_wanted(case)).collect();
        let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
        thread::scope(|scope| {
            for _ in 0..self.threads.min(wanted.len()) {
                scope.spawn(|| {
                    while let Some((at, case)) = {
                        let at = next.fetch_add(1, Ordering::Relaxed);
                        wanted.get(at).map(|case| (at, case))
                    } {
                        let report = run(case, self.factory, self.child_test.clone());
                        done.lock().unwrap_or_else(PoisonError::into_inner).push((at, report));
                    }
                });
            }
        });
        let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
        done.sort_by_key(|(at, _)| *at);
        done.into_iter().map(|(_, report)| report).collect()
    }
}

/// Returns the name and the version of the package that cargo runs.
fn package() -> Option<String> {
    let of = |name: &str| std::env::var(name).ok();
    Some(format!("{} {}", of("CARGO_PKG_NAME")?, of("CARGO_PKG_VERSION")?))
}

/// Returns the average load of the last minute. `None` if the system does not report it.
fn load() -> Option<f64> {
    std::fs::read_to_string("/proc/loadavg").ok()?.split(' ').next()?.parse().ok()
}

impl fmt::Debug for Run<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Run")
            .field("filter", &self.filter)
            .field("threads", &self.threads)
            .finish_non_exhaustive()
    }
}
