//! Runs single cases, each with a runtime, a time limit and an outcome.

use std::any::Any;
use std::fmt;
use std::future::Future;
use std::io::Write as _;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError, RwLock, mpsc};
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use leasehold_api::{Capabilities, Error};
use tokio::runtime::{Builder, Runtime};

use crate::case::{Case, CaseDecision, Need, Outcome};
use crate::cases::all_cases;
use crate::context::Context;
use crate::harness::{Factory, Time};
use crate::inconclusive::{after_error, outcome_of};
use crate::pace::{Slower, pace};
use crate::report::{CaseReport, Report};
use crate::stall::{Stall, StallWatch};
use crate::verdict::declared;

/// The limit of virtual time for one case.
const VIRTUAL_LIMIT: Duration = Duration::from_secs(27 * 3600);
/// The limit of wall time for one case at the usual pace, in virtual and in real time.
const WALL_LIMIT: Duration = Duration::from_secs(120);

/// The maximum number of attempts of a case that is inconclusive.
const ATTEMPTS: u32 = 3;

/// The slow-down factor of each retry, because a busy machine would be inconclusive again at the same pace.
const SLOWER_BY: u32 = 3;

/// The pause before the first retry, longer before each further one. In this time the store can end what the
/// last attempt left.
const PAUSE: Duration = Duration::from_secs(2);

/// Locked by each case in real time while it runs: shared in the first attempt, exclusively in a retry. Other
/// cases then cannot load the machine and the server during the retry.
static RUNNING: RwLock<()> = RwLock::new(());

/// Runs one case against a fresh store of `factory`. In real time an [inconclusive](Outcome::Inconclusive)
/// case runs at most three times. Each retry has a slower [`pace`](crate::pace()), excludes other cases of
/// this process, and is reported on stdout.
///
/// Blocks until the case has ended. Do not call it in a case.
pub fn run_case(case: &Case, factory: &dyn Factory) -> CaseReport {
    run(case, factory, None)
}

/// A store whose cases are mounted as tests. Made by [`suite!`](crate::suite).
pub struct Mount {
    factory: Box<dyn Factory>,
    module: String,
}

impl Mount {
    /// Makes a mount. `module` is the value of `module_path!()` at the mounting place.
    pub fn new(factory: impl Factory + 'static, module: &str) -> Self {
        // Names of tests do not start with the name of the crate.
        let module = module.split_once("::").map_or("", |(_, rest)| rest);
        Self { factory: Box::new(factory), module: module.to_owned() }
    }

    /// Runs the case `name` as a test.
    ///
    /// # Panics
    ///
    /// If the store breaks the rule, or the case is inconclusive in every attempt.
    pub fn run(&self, name: &str) {
        let Some(case) = all_cases().iter().find(|c| c.name == name) else {
            panic!("there is no case {name}");
        };
        let report = run(case, &*self.factory, Some(self.child_test()));
        report.publish();
        match report.outcome {
            Outcome::Failed { message } => panic!("{name} ({}): {message}", case.rules.join(", ")),
            Outcome::Inconclusive { message } => panic!(
                "INCONCLUSIVE after {ATTEMPTS} attempts, which is no verdict on the store: {name}: {message}; run it on a machine with less to do, or with a larger LEASEHOLD_CONFORMANCE_PACE"
            ),
            _ => {}
        }
    }

    /// Checks that the harness can try everything that the store declares.
    ///
    /// # Panics
    ///
    /// If something cannot be tried, with its name and the missing ability in the message. Also if no store
    /// opens.
    pub fn judge(&self) {
        let mut report = Report::default();
        match declared(&*self.factory, true) {
            Ok(declared) => report.declarations = declared.declarations,
            Err(error) => panic!("the harness has no client: {error}"),
        }
        let unproven = report.unproven();
        assert!(unproven.is_empty(), "UNPROVEN: {}", unproven.join("; "));
    }

    /// Acts as the child process if the suite started this process as a child. Otherwise checks that this
    /// test can be started as one.
    ///
    /// # Panics
    ///
    /// If the started child does not answer.
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

pub(crate) fn run(case: &Case, factory: &dyn Factory, child_test: Option<String>) -> CaseReport {
    let mut attempt = 1;
    loop {
        let run = || run_once(case, factory, child_test.clone());
        let report = if factory.time() == Time::Virtual {
            run()
        } else if attempt == 1 {
            let _beside_others = RUNNING.read().unwrap_or_else(PoisonError::into_inner);
            run()
        } else {
            let _alone = RUNNING.write().unwrap_or_else(PoisonError::into_inner);
            let _slower = Slower::by(SLOWER_BY.pow(attempt - 1));
            run()
        };
        if attempt == ATTEMPTS || !matches!(report.outcome, Outcome::Inconclusive { .. }) {
            return report;
        }
        // Written to stdout directly, because the test harness captures `print!`.
        let _ = writeln!(std::io::stdout().lock(), "{report} (attempt {attempt} of {ATTEMPTS})");
        thread::sleep(PAUSE * attempt);
        attempt += 1;
    }
}

fn run_once(case: &Case, factory: &dyn Factory, child_test: Option<String>) -> CaseReport {
    let start = Instant::now();
    let watch = (factory.time() == Time::Real).then(StallWatch::start);
    let outcome = match runtime(factory.time()) {
        Ok(runtime) => {
            let limit = WallLimit::new();
            let outcome = runtime.block_on(limited(&limit, judge_and_run(case, factory, child_test, &limit)));
            // Do not wait for tasks, because a case that hangs would delay its report.
            runtime.shutdown_background();
            outcome
        }
        Err(error) => Outcome::Failed { message: format!("no runtime for the case: {error}") },
    };
    CaseReport { case: *case, outcome: excused(outcome, watch.map(StallWatch::end)), took: start.elapsed() }
}

/// Turns a failure in real time into an inconclusive outcome if the machine stood still too long.
fn excused(outcome: Outcome, stall: Option<Stall>) -> Outcome {
    match (outcome, stall) {
        (Outcome::Failed { message }, Some(stall)) if stall.may_excuse(pace()) => {
            Outcome::Inconclusive { message: format!("{message}; {stall}") }
        }
        (Outcome::Inconclusive { message }, Some(stall)) => {
            Outcome::Inconclusive { message: format!("{message}; {stall}") }
        }
        (outcome, _) => outcome,
    }
}

pub(crate) fn runtime(time: Time) -> std::io::Result<Runtime> {
    match time {
        Time::Virtual => Builder::new_current_thread().enable_time().start_paused(true).build(),
        Time::Real => Builder::new_multi_thread().worker_threads(4).enable_all().build(),
    }
}

async fn judge_and_run(
    case: &Case,
    factory: &dyn Factory,
    child_test: Option<String>,
    limit: &WallLimit,
) -> Outcome {
    let time = factory.time();
    let work = async {
        let opened = match case.needs.contains(&Need::Restart) {
            true => factory.open_alone().await,
            false => factory.open().await,
        };
        let harness = match opened {
            Ok(harness) => harness,
            Err(error) => return no_harness("no store", &error, time),
        };
        let has_child_test = child_test.is_some();
        let cx = match Context::new(harness, time, child_test).await {
            Ok(cx) => cx,
            Err(error) => return no_harness("no client", &error, time),
        };
        if time == Time::Real {
            limit.extend(declared_bounds(cx.capabilities()));
        }
        let outcome = match Need::judge(case.needs, cx.capabilities(), cx.harness(), time, has_child_test) {
            CaseDecision::NotApplicable(reason) => Outcome::NotApplicable { reason },
            CaseDecision::Refusal(need) => {
                need.assert_refused(&cx).await;
                Outcome::Refused { capability: need.capability() }
            }
            CaseDecision::Run => {
                (case.body)(&cx).await;
                Outcome::Passed
            }
        };
        cx.close_all().await;
        outcome
    };
    let work = AssertUnwindSafe(work).catch_unwind();
    // In real time `limited` ends the case earlier.
    match tokio::time::timeout(VIRTUAL_LIMIT, work).await {
        Ok(Ok(outcome)) => outcome,
        Ok(Err(panic)) => outcome_of(panic, time),
        Err(_) => failed(format!("hangs: not done after {VIRTUAL_LIMIT:?}")),
    }
}

/// Returns the extra wall time for the declared bounds that a case in real time waits out.
fn declared_bounds(declared: &Capabilities) -> Duration {
    let lease = declared.lease.and_then(|lease| lease.default).unwrap_or_default();
    let crash = declared.crash_release.unwrap_or_default();
    [declared.loss_detection, declared.undo, declared.handover, lease, crash].into_iter().sum::<Duration>()
        * 2
}

fn no_harness(what: &str, error: &Error, time: Time) -> Outcome {
    after_error(format!("the harness has {what}: {error}"), error, time)
}

fn failed(message: String) -> Outcome {
    Outcome::Failed { message }
}

/// Fails `work` when its wall time is over. A thread outside of the runtime wakes it, because the case can
/// hang in real time or keep the runtime busy without progress of virtual time.
async fn limited(limit: &WallLimit, work: impl Future<Output = Outcome>) -> Outcome {
    let mut work = std::pin::pin!(work);
    let mut alarm = None;
    std::future::poll_fn(|cx| {
        if let Some(over) = limit.over() {
            return Poll::Ready(failed(format!("hangs or is busy: not done after {over:?} of wall time")));
        }
        alarm.get_or_insert_with(|| Alarm::set(limit, cx.waker().clone()));
        work.as_mut().poll(cx)
    })
    .await
}

/// The limit of the wall time of a case.
#[derive(Clone, Debug)]
struct WallLimit {
    start: Instant,
    limit: Arc<Mutex<Duration>>,
}

impl WallLimit {
    fn new() -> Self {
        Self { start: Instant::now(), limit: Arc::new(Mutex::new(WALL_LIMIT * pace())) }
    }

    fn extend(&self, by: Duration) {
        *self.limit.lock().unwrap_or_else(PoisonError::into_inner) += by;
    }

    fn left(&self) -> Duration {
        let limit = *self.limit.lock().unwrap_or_else(PoisonError::into_inner);
        limit.saturating_sub(self.start.elapsed())
    }

    /// Returns the elapsed time if the limit is over.
    fn over(&self) -> Option<Duration> {
        self.left().is_zero().then(|| self.start.elapsed())
    }
}

struct Alarm {
    _off: mpsc::Sender<()>,
}

impl Alarm {
    fn set(limit: &WallLimit, waker: std::task::Waker) -> Self {
        let (off, ring) = mpsc::channel::<()>();
        let limit = limit.clone();
        thread::spawn(move || {
            while ring.recv_timeout(limit.left()) == Err(mpsc::RecvTimeoutError::Timeout) {
                if limit.over().is_some() {
                    return waker.wake();
                }
            }
        });
        Self { _off: off }
    }
}

pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without a text").to_owned()
}

/// Makes a shared factory mountable.
#[leasehold_api::async_trait]
impl<F: Factory + ?Sized> Factory for Arc<F> {
    fn time(&self) -> Time {
        (**self).time()
    }

    async fn open(&self) -> Result<Box<dyn crate::Harness>, Error> {
        (**self).open().await
    }

    async fn open_alone(&self) -> Result<Box<dyn crate::Harness>, Error> {
        (**self).open_alone().await
    }

    async fn connect_child(&self, spec: &str) -> Result<Arc<dyn leasehold_api::Lock>, Error> {
        (**self).connect_child(spec).await
    }
}

#[cfg(test)]
mod tests {
    use std::panic::panic_any;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

    use leasehold_api::{Error, Lock, async_trait};
    use leasehold_memory::MemoryStore;

    use super::*;
    use crate::Harness;
    use crate::case::CaseFuture;
    use crate::inconclusive::InconclusivePanic;
    use crate::pace::usual_pace;

    #[derive(Debug)]
    struct Memory(MemoryStore);

    #[async_trait]
    impl Harness for Memory {
        async fn client(&self) -> Result<Arc<dyn Lock>, Error> {
            Ok(Arc::new(self.0.client()?))
        }
    }

    #[derive(Debug)]
    struct Stores;

    #[async_trait]
    impl Factory for Stores {
        fn time(&self) -> Time {
            Time::Real
        }

        async fn open(&self) -> Result<Box<dyn Harness>, Error> {
            Ok(Box::new(Memory(MemoryStore::new())))
        }
    }

    #[test]
    fn a_case_that_is_run_again_has_the_process_alone_and_more_time() {
        static BESIDE: AtomicUsize = AtomicUsize::new(0);
        static RUNS: AtomicUsize = AtomicUsize::new(0);
        fn busy(_: &Context) -> CaseFuture<'_> {
            BESIDE.fetch_add(1, SeqCst);
            thread::sleep(Duration::from_millis(5));
            BESIDE.fetch_sub(1, SeqCst);
            Box::pin(async {})
        }
        fn doubtful(_: &Context) -> CaseFuture<'_> {
            if RUNS.fetch_add(1, SeqCst) == 0 {
                panic_any(InconclusivePanic("a first attempt".to_owned()));
            }
            assert_eq!(BESIDE.load(SeqCst), 0, "other cases are run beside");
            assert_eq!(pace(), (SLOWER_BY * usual_pace()).min(100));
            Box::pin(async {})
        }
        let case = |body| Case { name: "a::case", rules: &[], needs: &[], body };
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while !done.load(SeqCst) {
                        run(&case(busy), &Stores, None);
                    }
                });
            }
            let report = run(&case(doubtful), &Stores, None);
            done.store(true, SeqCst);
            assert_eq!((report.outcome, RUNS.load(SeqCst)), (Outcome::Passed, 2));
            assert_eq!(pace(), usual_pace(), "only that attempt is slower");
        });
    }

    #[test]
    fn only_what_failed_is_excused_and_only_by_a_stall() {
        let still = || Some(Stall::of(Duration::from_secs(1)));
        let failed = || failed("seen".to_owned());
        assert!(
            matches!(excused(failed(), still()), Outcome::Inconclusive { message } if message.starts_with("seen; "))
        );
        assert_eq!(excused(Outcome::Passed, still()), Outcome::Passed);
        assert_eq!(excused(failed(), None), failed());
        assert_eq!(excused(failed(), Some(Stall::of(Duration::ZERO))), failed());
    }
}
