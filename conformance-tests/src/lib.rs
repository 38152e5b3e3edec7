#![cfg_attr(docsrs, feature(doc_cfg))]
#![doc = include_str!("../README.md")]

mod case;
// Cases and the modules they use fail by panic, because a case is a test.
#[allow(clippy::expect_used)]
mod cases;
#[allow(clippy::expect_used)]
mod child;
mod clock;
#[allow(clippy::expect_used)]
mod context;
mod disturbed;
mod harness;
#[cfg(feature = "simulation")]
pub mod history;
mod inconclusive;
mod pace;
mod program;
#[cfg(feature = "simulation")]
mod recorder;
mod report;
mod run;
mod runner;
#[cfg(feature = "simulation")]
pub mod simulation;
mod stall;
mod suite;
mod verdict;

pub use case::{Case, Need, Outcome};
pub use cases::all_cases;
pub use clock::SkewedClock;
pub use context::Context;
pub use disturbed::Disturbed;
pub use harness::{
    ClientFaults, ClientSetup, Factory, Fault, FaultSet, Faults, FaultyClient, Fences, Harness, Op, Skew,
    Time, Wire,
};
pub use pace::pace;
pub use program::main;
pub use report::{CaseReport, Report};
pub use run::{Run, run_all};
pub use runner::{Mount, run_case};
pub use verdict::{Declaration, Verdict};

// Authors of stores write `#[async_trait]` impls of the traits above.
pub use leasehold_api::async_trait;
