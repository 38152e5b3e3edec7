//! The whole suite on one member, in real time, with real processes.

#![allow(clippy::unwrap_used)]

#[path = "common/harness.rs"]
mod harness;
#[path = "common/ways.rs"]
mod ways;

use harness::OnEtcd;
use leasehold_conformance::suite;

suite!(OnEtcd(1));
