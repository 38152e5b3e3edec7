//! Random operations against stores, compared with a model of a lock.
//!
//! `LEASEHOLD_MODEL_SEEDS` sets the number of sequences, by default a thousand. Some tests run only a
//! half or a quarter of them. `LEASEHOLD_MODEL_FIRST` sets the first seed. A seed that fails is printed.

// An `expect` that fails is a failed test.
#![allow(clippy::expect_used)]

use std::sync::Arc;

use laboratory::memory::Memory;
use laboratory::model::run;
use laboratory::mutants::{all_mutants, unmutated};
use leasehold_conformance::Factory;

fn number(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|e| panic!("{name}={text} is not a number: {e}")),
        Err(_) => default,
    }
}

fn stands(factory: Arc<dyn Factory>, share: u64) {
    be_quiet();
    let seeds = number("LEASEHOLD_MODEL_SEEDS", 1_000).div_ceil(share);
    if let Err(failure) = run(factory, seeds, number("LEASEHOLD_MODEL_FIRST", 0)) {
        panic!("{failure}");
    }
}

/// Hides the panics of the model, because shrinking repeats a failed sequence many times.
fn be_quiet() {
    let loud = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if !info.location().is_some_and(|at| at.file().ends_with("world.rs")) {
            loud(info);
        }
    }));
}

fn correct(name: &str) -> Arc<dyn Factory> {
    Arc::new(unmutated().into_iter().find(|m| m.name() == name).expect("a store of this name"))
}

#[test]
fn memory() {
    stands(Arc::new(Memory::new()), 1);
}

#[test]
fn memory_with_leases() {
    stands(Arc::new(Memory::new().leased()), 1);
}

#[test]
fn memory_polled() {
    stands(Arc::new(Memory::new().polling().leased()), 1);
}

#[test]
fn memory_in_a_namespace() {
    stands(Arc::new(Memory::new().leased().namespaced()), 4);
}

#[test]
fn the_small_backend_polled() {
    stands(correct("backend"), 2);
}

#[test]
fn the_small_backend_with_a_queue() {
    stands(correct("backend-with-queue"), 2);
}

#[test]
fn the_small_lock() {
    stands(correct("lock"), 2);
}

/// Checks the model itself: it must catch each of these mutants within 300 sequences.
#[test]
fn mutants_are_caught() {
    be_quiet();
    let mut survivors = Vec::new();
    for name in [
        "backend:excludes-per-client",
        "backend:release-does-nothing",
        "backend:no-poll-no-wake",
        "backend:token-per-client",
        "lock:head-swallows-wake",
        "lock:drop-leaves",
        "lock:timeout-ignored",
        "lock:lifo",
        "lock:close-leaves-holds",
        "lock:reentrant",
    ] {
        let mutant = all_mutants().into_iter().find(|m| m.name() == name).expect("a mutant of this name");
        match run(Arc::new(mutant), 300, 0) {
            Err(failure) => {
                let why = failure.message.lines().next().unwrap_or_default();
                println!("{name}: seed {}, {} steps: {why}", failure.seed, failure.steps.len());
            }
            Ok(()) => survivors.push(name),
        }
    }
    assert!(survivors.is_empty(), "not caught: {}", survivors.join(", "));
}
