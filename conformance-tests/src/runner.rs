//! Runs cases: a runtime for each, a limit on each, a verdict on each.

use std::any::Any;
use std::fmt;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::mpsc;
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use tokio::runtime::{Builder, Runtime};

use crate::case::{Case, Need, Outcome, Verdict};
use crate::cases::all_cases;
use crate::context::Context;
use crate::harness::{Factory, Time};
use crate::report::{CaseReport, Report};

/// The longest that one case may take: of virtual time.
const VIRTUAL_LIMIT: Duration = Duration::from_secs(24 * 3600);
/// The longest that one case may take by the wall clock, whatever its clock.
const WALL_LIMIT: Duration = Duration::from_secs(120);

/// Runs one case against a fresh store of `factory`.
pub fn run_case(case: &Case, factory: &dyn Factory) -> CaseReport {
    run(case, factory, None)
}

/// Runs all cases. Those that need a child process are not applicable: only mounted tests can be
/// started again as one.
pub fn run_all(factory: &dyn Factory) -> Report {
    Report { cases: all_cases().iter().map(|case| run_case(case, factory)).collect() }
}

/// A store whose cases are tests, made by [`suite!`](crate::suite).
pub struct Mount {
    factory: Box<dyn Factory>,
    module: String,
}

impl Mount {
    /// `module` is what `module_path!()` says where the suite is mounted.
    pub fn new(factory: impl Factory + 'static, module: &str) -> Self {
        // Test names do not begin with the crate's name.
        let module = module.split_once("::").map_or("", |(_, rest)| rest);
        Self { factory: Box::new(factory), module: module.to_owned() }
    }

    /// The test of the case `name`.
    ///
    /// # Panics
    ///
    /// When the store breaks the rule.
    pub fn run(&self, name: &str) {
        let Some(case) = all_cases().iter().find(|c| c.name == name) else {
            panic!("there is no case {name}");
        };
        let report = run(case, &*self.factory, Some(self.child_test()));
        report.publish();
        if let Outcome::Failed { message } = report.outcome {
            panic!("{name} ({}): {message}", case.rules.join(", "));
        }
    }

    /// The test that acts as the child process when the suite starts it as one.
    ///
    /// # Panics
    ///
    /// When the child does not answer.
    pub fn child_entry(&self) {
        crate::child::entry(&*self.factory, &self.child_test());
    }

    fn child_test(&self) -> String {
        match self.module.as_str() {
            "" => "child::entry".to_owned(),
            module => format!("{module}::child::entry"),
        }
    }
}

impl fmt::Debug for Mount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mount").field("module", &self.module).finish_non_exhaustive()
    }
}

fn run(case: &Case, factory: &dyn Factory, child_test: Option<String>) -> CaseReport {
    let start = Instant::now();
    let outcome = match runtime(factory.time()) {
        Ok(runtime) => {
            let outcome = runtime.block_on(limited(judge_and_run(case, factory, child_test)));
            // A case that hung must not hang its report as well.
            runtime.shutdown_background();
            outcome
        }
        Err(error) => Outcome::Failed { message: format!("no runtime for the case: {error}") },
    };
    CaseReport { case: *case, outcome, took: start.elapsed() }
}

pub(crate) fn runtime(time: Time) -> std::io::Result<Runtime> {
    match time {
        Time::Virtual => Builder::new_current_thread().enable_time().start_paused(true).build(),
        Time::Real => Builder::new_multi_thread().worker_threads(4).enable_all().build(),
    }
}

async fn judge_and_run(case: &Case, factory: &dyn Factory, child_test: Option<String>) -> Outcome {
    let time = factory.time();
    let work = async {
        let harness = match factory.open().await {
            Ok(harness) => harness,
            Err(error) => return failed(format!("the harness has no store: {error}")),
        };
        let has_child_test = child_test.is_some();
        let cx = match Context::new(harness, time, child_test).await {
            Ok(cx) => cx,
            Err(error) => return failed(format!("the harness has no client: {error}")),
        };
        let outcome = match Need::judge(case.needs, cx.capabilities(), cx.harness(), time, has_child_test) {
            Verdict::NotApplicable(reason) => Outcome::NotApplicable { reason },
            Verdict::Refusal(need) => {
                need.assert_refused(&cx).await;
                Outcome::Refused { capability: need.capability() }
            }
            Verdict::Run => {
                (case.body)(&cx).await;
                Outcome::Passed
            }
        };
        cx.close_all().await;
        outcome
    };
    let work = AssertUnwindSafe(work).catch_unwind();
    let limit = match time {
        Time::Virtual => VIRTUAL_LIMIT,
        Time::Real => WALL_LIMIT,
    };
    match tokio::time::timeout(limit, work).await {
        Ok(Ok(outcome)) => outcome,
        Ok(Err(panic)) => failed(panic_text(&*panic)),
        Err(_) => failed(format!("hangs: not done after {limit:?}")),
    }
}

fn failed(message: String) -> Outcome {
    Outcome::Failed { message }
}

/// Ends a case that keeps its runtime busy without letting virtual time pass: a thread outside wakes
/// the case once its wall time is over.
async fn limited(work: impl Future<Output = Outcome>) -> Outcome {
    let mut work = std::pin::pin!(work);
    let end = Instant::now() + WALL_LIMIT;
    let mut alarm = None;
    std::future::poll_fn(|cx| {
        if Instant::now() >= end {
            return Poll::Ready(failed(format!("busy loop: not done after {WALL_LIMIT:?} of wall time")));
        }
        alarm.get_or_insert_with(|| Alarm::set(WALL_LIMIT, cx.waker().clone()));
        work.as_mut().poll(cx)
    })
    .await
}

struct Alarm {
    _off: mpsc::Sender<()>,
}

impl Alarm {
    fn set(after: Duration, waker: std::task::Waker) -> Self {
        let (off, ring) = mpsc::channel::<()>();
        thread::spawn(move || {
            if ring.recv_timeout(after) == Err(mpsc::RecvTimeoutError::Timeout) {
                waker.wake();
            }
        });
        Self { _off: off }
    }
}

pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without a text").to_owned()
}

/// Lets a shared factory be mounted.
#[leasehold_api::async_trait]
impl<F: Factory + ?Sized> Factory for Arc<F> {
    fn time(&self) -> Time {
        (**self).time()
    }

    async fn open(&self) -> Result<Box<dyn crate::Harness>, leasehold_api::Error> {
        (**self).open().await
    }

    async fn connect_child(&self, spec: &str) -> Result<Arc<dyn leasehold_api::Lock>, leasehold_api::Error> {
        (**self).connect_child(spec).await
    }
}
