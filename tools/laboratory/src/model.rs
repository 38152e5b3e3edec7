//! The model-based test: random operations of several clients, compared with a model of a lock.
//!
//! Each seed gives one sequence of steps. The outcome of a step is known while no call is in
//! flight (see `model/world.rs`). All calls are also recorded, and the record is checked as a whole. A
//! sequence that fails is shrunk to a minimal failing one.

// An expectation that fails is a failed sequence, so `expect` is allowed.
#[allow(clippy::expect_used)]
mod world;

use std::any::Any;
use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

use leasehold_api::LockKey;
use leasehold_conformance::{Factory, Time};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest};

use self::world::World;

/// Number of clients in a generated sequence of calls.
pub(crate) const CLIENTS: usize = 3;
/// Number of keys that a generated sequence of calls uses.
pub(crate) const KEYS: usize = 3;
/// Largest number of steps of a generated sequence.
const STEPS: usize = 40;

/// Runs `seeds` sequences against fresh stores of `factory`, starting with the seed `first`.
///
/// The store must follow tokio's paused clock. A seed gives the same sequence each time.
///
/// # Errors
///
/// [`Failure`] if a sequence fails: the first failing seed, its shrunk steps and the message.
///
/// # Panics
///
/// If the store follows real time.
pub fn run(factory: Arc<dyn Factory>, seeds: u64, first: u64) -> Result<(), Failure> {
    assert_eq!(factory.time(), Time::Virtual, "the model test needs a store in virtual time");
    // Fixes the hash seed, because a failed sequence must also fail in the next process.
    LockKey::fix_hashes();
    FACTORY.set(Some(factory));
    let outcome = (first..first.saturating_add(seeds)).try_for_each(run_seed);
    FACTORY.set(None);
    outcome
}

/// A failed sequence.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct Failure {
    /// Seed of the sequence.
    pub seed: u64,
    /// Shrunk steps, one per line.
    pub steps: Vec<String>,
    /// Message of the failed check.
    pub message: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "seed {}: {}", self.seed, self.message)?;
        self.steps.iter().try_for_each(|step| writeln!(f, "    {step}"))
    }
}

thread_local! {
    /// Factory of the store under test, because the traits of the state machine cannot pass it.
    static FACTORY: RefCell<Option<Arc<dyn Factory>>> = const { RefCell::new(None) };
}

fn run_seed(seed: u64) -> Result<(), Failure> {
    let config = Config {
        cases: 1,
        failure_persistence: None,
        max_shrink_iters: 2_000,
        verbose: 0,
        ..Config::default()
    };
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let mut runner = TestRunner::new_with_rng(config.clone(), rng);
    let strategy = Plan::sequential_strategy(1..STEPS);
    let outcome = runner.run(&strategy, |(start, steps, seen)| {
        let played = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            Sequence::test_sequential(config.clone(), start, steps, seen);
        }));
        played.map_err(|panic| TestCaseError::fail(panic_text(&*panic)))
    });
    match outcome {
        Ok(()) => Ok(()),
        Err(TestError::Fail(reason, (_, steps, _))) => Err(Failure {
            seed,
            steps: steps.iter().map(|step| format!("{step:?}")).collect(),
            message: reason.message().to_owned(),
        }),
        Err(TestError::Abort(reason)) => {
            Err(Failure { seed, steps: Vec::new(), message: reason.message().to_owned() })
        }
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_default()
}

/// One step. The indices select among the clients, keys, guards and pending calls that exist when it runs.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    Try {
        client: usize,
        key: usize,
    },
    Acquire {
        client: usize,
        key: usize,
        millis: Option<u64>,
    },
    AcquireAll {
        client: usize,
        keys: u8,
        millis: u64,
    },
    /// Polls an acquire up to `polls` times, then drops it.
    Cancelled {
        client: usize,
        key: usize,
        polls: u8,
    },
    /// Drops a pending acquire.
    Cancel {
        which: usize,
    },
    Release {
        which: usize,
    },
    /// Polls a release up to `polls` times, then drops it.
    ReleaseCancelled {
        which: usize,
        polls: u8,
    },
    Drop {
        which: usize,
    },
    Renew {
        which: usize,
        seconds: Option<u64>,
    },
    Pass {
        millis: u64,
    },
    Lose {
        key: usize,
    },
    Force {
        client: usize,
        key: usize,
    },
    Inspect {
        client: usize,
        key: usize,
    },
    Silence {
        client: usize,
    },
    Speak {
        client: usize,
    },
    Mute {
        client: usize,
        muted: bool,
    },
    Disturb {
        client: usize,
        how: u8,
    },
    Reopen {
        client: usize,
    },
}

/// The plan of a sequence. It has no state: every step is valid at any time, so every part of a sequence is a valid
/// sequence.
#[derive(Clone, Debug)]
struct Plan;

impl ReferenceStateMachine for Plan {
    type State = Self;
    type Transition = Step;

    fn init_state() -> BoxedStrategy<Self> {
        Just(Self).boxed()
    }

    fn transitions(_: &Self) -> BoxedStrategy<Step> {
        let (client, key, which) = (0..CLIENTS, 0..KEYS, 0..8usize);
        let millis = prop_oneof![Just(0), Just(30), Just(400), Just(3_000), Just(40_000)];
        let pair = (client.clone(), key.clone());
        prop_oneof![
            6 => pair.clone().prop_map(|(client, key)| Step::Try { client, key }),
            8 => (pair.clone(), proptest::option::weighted(0.8, millis.clone()))
                .prop_map(|((client, key), millis)| Step::Acquire { client, key, millis }),
            3 => (client.clone(), 0..8u8, millis)
                .prop_map(|(client, keys, millis)| Step::AcquireAll { client, keys, millis }),
            3 => (pair.clone(), 0..6u8).prop_map(|((client, key), polls)| Step::Cancelled { client, key, polls }),
            2 => which.clone().prop_map(|which| Step::Cancel { which }),
            8 => which.clone().prop_map(|which| Step::Release { which }),
            2 => (which.clone(), 0..4u8).prop_map(|(which, polls)| Step::ReleaseCancelled { which, polls }),
            3 => which.clone().prop_map(|which| Step::Drop { which }),
            2 => (which, proptest::option::of(1..30u64)).prop_map(|(which, seconds)| Step::Renew { which, seconds }),
            7 => prop_oneof![Just(1), Just(60), Just(900), Just(5_000), Just(20_000), Just(200_000)]
                .prop_map(|millis| Step::Pass { millis }),
            2 => key.prop_map(|key| Step::Lose { key }),
            2 => pair.clone().prop_map(|(client, key)| Step::Force { client, key }),
            2 => pair.prop_map(|(client, key)| Step::Inspect { client, key }),
            2 => client.clone().prop_map(|client| Step::Silence { client }),
            2 => client.clone().prop_map(|client| Step::Speak { client }),
            1 => (client.clone(), any::<bool>()).prop_map(|(client, muted)| Step::Mute { client, muted }),
            1 => (client.clone(), any::<u8>()).prop_map(|(client, how)| Step::Disturb { client, how }),
            1 => client.prop_map(|client| Step::Reopen { client }),
        ]
        .boxed()
    }

    fn apply(state: Self, _: &Step) -> Self {
        state
    }
}

struct Sequence;

impl StateMachineTest for Sequence {
    type SystemUnderTest = World;
    type Reference = Plan;

    #[allow(clippy::expect_used)] // Set by `run`, which is all that plays sequences.
    fn init_test(_: &Plan) -> World {
        let factory = FACTORY.with_borrow(Clone::clone);
        World::open(&*factory.expect("a factory is set while sequences run"))
    }

    fn apply(mut world: World, _: &Plan, step: Step) -> World {
        world.step(&step);
        world
    }

    fn teardown(mut world: World, _: Plan) {
        world.finish();
    }
}
