//! Inputs near to valid ones, for tests that read what comes from outside.
//!
//! A target is a test that begins with `fuzz_`. It names valid inputs and words that mean something to what reads them,
//! and checks one input at a time. In the ordinary tests it checks a fixed number of inputs; `cargo xtask fuzz` goes on
//! for minutes. Each input is made from one number, its seed. What has failed once is kept in `corpus`, one input in a
//! line, and is checked first.

mod corpus;
mod inputs;

use std::env;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use proptest::strategy::{BoxedStrategy, Strategy as _};
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};

/// One input that takes longer is a failure of `cargo xtask fuzz`, if it does so twice.
const SLOW: Duration = Duration::from_secs(1);

/// How many inputs a thread takes at once.
const AT_ONCE: u64 = 64;

/// What is read, and how often.
#[derive(Clone, Copy, Debug)]
pub struct Fuzz<'a> {
    /// Its name: that of the test, behind `fuzz_`, and that of its corpus.
    pub target: &'a str,
    /// How many inputs the ordinary tests check.
    pub inputs: u64,
    /// Inputs that are valid, or nearly so.
    pub examples: &'a [&'a str],
    /// Pieces of inputs.
    pub words: &'a [&'a str],
}

impl Fuzz<'_> {
    /// Checks the corpus and then new inputs by `check`, which panics where something is wrong.
    ///
    /// # Panics
    ///
    /// With the smallest input that was found to fail, and how to repeat it.
    pub fn check(&self, check: impl Fn(&[u8]) + Sync) {
        let kept = corpus::of(self.target);
        let (first, minutes) = (number("LEASEHOLD_FUZZ_SEED"), number("LEASEHOLD_FUZZ_MINUTES"));
        // In the ordinary tests a busy machine is no failure.
        let limit = (first.is_some() || minutes.is_some()).then_some(SLOW);
        let check = |input: &[u8]| outcome(input, limit, &check);
        for (line, input) in &kept {
            if let Err(message) = check(input) {
                panic!("line {line} of {}: {message}", corpus::path(self.target).display());
            }
        }
        let begun = Instant::now();
        let until = minutes.map(|minutes| begun + Duration::from_secs(60 * minutes));
        // One seed without a time is one input.
        let most = if first.is_some() { 1 } else { self.inputs };
        let goes_on = |checked| until.map_or(checked < most, |until| Instant::now() < until);
        let all = || thread::available_parallelism().map_or(1, usize::from);
        let (threads, at_once) = if minutes.is_some() { (all(), AT_ONCE) } else { (1, 1) };
        let first = first.unwrap_or(0);
        let checked = self.search(first, at_once, threads, &goes_on, &check);
        // `cargo xtask fuzz` adds them up.
        println!(
            "fuzz: {}: {} kept inputs and {checked} new ones in {:.1?}, seeds from {first} on",
            self.target,
            kept.len(),
            begun.elapsed()
        );
    }

    /// Checks inputs of the seeds from `first` on as long as `goes_on` says, after so many.
    fn search(
        &self,
        first: u64,
        at_once: u64,
        threads: usize,
        goes_on: &(impl Fn(u64) -> bool + Sync),
        check: &(impl Fn(&[u8]) -> Result<(), String> + Sync),
    ) -> u64 {
        let (next, failure) = (AtomicU64::new(0), Mutex::new(None));
        let work = || {
            let inputs = inputs::near(self.examples, self.words);
            loop {
                let from = next.fetch_add(at_once, Ordering::Relaxed);
                if failure.lock().is_ok_and(|failure| failure.is_some()) || !goes_on(from) {
                    next.fetch_sub(at_once, Ordering::Relaxed);
                    return;
                }
                for seed in from..from + at_once {
                    if let Err(found) = self.one(first.wrapping_add(seed), &inputs, check)
                        && let Ok(mut failure) = failure.lock()
                    {
                        failure.get_or_insert(found);
                    }
                }
            }
        };
        thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(work);
            }
        });
        if let Ok(Some(found)) = failure.into_inner() {
            panic!("{found}");
        }
        next.into_inner()
    }

    fn one(
        &self,
        seed: u64,
        inputs: &BoxedStrategy<Vec<u8>>,
        check: &impl Fn(&[u8]) -> Result<(), String>,
    ) -> Result<(), String> {
        let config = Config { failure_persistence: None, max_shrink_iters: 2_000, ..Config::default() };
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
        let tree = inputs.new_tree(&mut runner).map_err(|reason| reason.message().to_owned())?;
        match runner.run_one(tree, |input| check(&input).map_err(TestCaseError::fail)) {
            Ok(_) => Ok(()),
            Err(TestError::Abort(reason)) => Err(reason.message().to_owned()),
            Err(TestError::Fail(reason, input)) => Err(format!(
                "{}: {}\nthe input, as a line of {}:\n{}\nrepeat it with: cargo xtask fuzz --target {} --seed {seed}",
                self.target,
                reason.message(),
                corpus::path(self.target).display(),
                corpus::line(&input),
                self.target,
            )),
        }
    }
}

/// The parts of an input that is several texts, which are between bytes 0x1f.
#[must_use]
pub fn parts(input: &[u8]) -> Vec<&[u8]> {
    input.split(|byte| *byte == 0x1f).collect()
}

/// The input as text, with a character in the place of what is none.
#[must_use]
pub fn text(input: &[u8]) -> String {
    String::from_utf8_lossy(input).into_owned()
}

/// What `check` says of the input: where it panicked, or took longer than the limit.
fn outcome(input: &[u8], limit: Option<Duration>, check: &impl Fn(&[u8])) -> Result<(), String> {
    let took = || {
        let begun = Instant::now();
        catch_unwind(AssertUnwindSafe(|| check(input))).map(|()| begun.elapsed()).map_err(|panic| {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic").to_owned()
        })
    };
    let is_slow = |time| limit.is_some_and(|limit| time > limit);
    // Twice, because the machine may have stood still.
    if is_slow(took()?) {
        let again = took()?;
        if is_slow(again) {
            return Err(format!("it takes {again:?}"));
        }
    }
    Ok(())
}

fn number(variable: &str) -> Option<u64> {
    let value = env::var(variable).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{variable} is no number: {value:?}")))
}

#[cfg(test)]
mod tests;
