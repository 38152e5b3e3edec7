//! Inputs near to valid ones, for tests of code that reads external input.
//!
//! A target is a test that begins with `fuzz_`. It names valid inputs and words with a meaning in its format, and
//! checks one input at a time. The ordinary tests check a fixed number of inputs, and `cargo xtask fuzz` runs for
//! minutes. Each input is made from one number, its seed. An input that failed is kept in `corpus`, one per line, and
//! is checked first.

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

/// Time limit of an input under `cargo xtask fuzz`. An input that exceeds it twice fails.
const SLOW: Duration = Duration::from_secs(1);

/// Number of inputs that a thread takes at once.
const AT_ONCE: u64 = 64;

/// The inputs of a target and their number.
#[derive(Clone, Copy, Debug)]
pub struct Fuzz<'a> {
    /// The target's name: the test's name without `fuzz_`, and the corpus's name.
    pub target: &'a str,
    /// Number of inputs checked by the ordinary tests.
    pub inputs: u64,
    /// Valid or nearly valid inputs.
    pub examples: &'a [&'a str],
    /// Pieces of inputs.
    pub words: &'a [&'a str],
}

impl Fuzz<'_> {
    /// Checks the corpus and then new inputs by `check`, which panics on a failure.
    ///
    /// # Panics
    ///
    /// With the smallest failing input found, and the command to repeat it.
    pub fn check(&self, check: impl Fn(&[u8]) + Sync) {
        let kept = corpus::of(self.target);
        let (first, minutes) = (number("LEASEHOLD_FUZZ_SEED"), number("LEASEHOLD_FUZZ_MINUTES"));
        // No time limit in the ordinary tests, because the machine might be busy.
        let limit = (first.is_some() || minutes.is_some()).then_some(SLOW);
        let check = |input: &[u8]| outcome(input, limit, &check);
        for (line, input) in &kept {
            if let Err(message) = check(input) {
                panic!("line {line} of {}: {message}", corpus::path(self.target).display());
            }
        }
        let begun = Instant::now();
        let until = minutes.map(|minutes| begun + Duration::from_secs(60 * minutes));
        // A seed without a time means one input.
        let most = if first.is_some() { 1 } else { self.inputs };
        let goes_on = |checked| until.map_or(checked < most, |until| Instant::now() < until);
        let all = || thread::available_parallelism().map_or(1, usize::from);
        let (threads, at_once) = if minutes.is_some() { (all(), AT_ONCE) } else { (1, 1) };
        let first = first.unwrap_or(0);
        let checked = self.search(first, at_once, threads, &goes_on, &check);
        // `cargo xtask fuzz` parses this line to add up the counts.
        println!(
            "fuzz: {}: {} kept inputs and {checked} new ones in {:.1?}, seeds from {first} on",
            self.target,
            kept.len(),
            begun.elapsed()
        );
    }

    /// Checks inputs of the seeds from `first` upwards while `goes_on` returns true for the number checked.
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

/// Splits an input that contains several texts at the bytes 0x1f.
#[must_use]
pub fn parts(input: &[u8]) -> Vec<&[u8]> {
    input.split(|byte| *byte == 0x1f).collect()
}

/// Converts the input to text. A replacement character stands for invalid bytes.
#[must_use]
pub fn text(input: &[u8]) -> String {
    String::from_utf8_lossy(input).into_owned()
}

/// Runs `check` on the input. Returns an error if it panicked or exceeded the limit.
fn outcome(input: &[u8], limit: Option<Duration>, check: &impl Fn(&[u8])) -> Result<(), String> {
    let took = || {
        let begun = Instant::now();
        catch_unwind(AssertUnwindSafe(|| check(input))).map(|()| begun.elapsed()).map_err(|panic| {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic").to_owned()
        })
    };
    let is_slow = |time| limit.is_some_and(|limit| time > limit);
    // Runs twice, because the machine might have been suspended.
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
