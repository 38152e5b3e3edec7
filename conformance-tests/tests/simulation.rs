//! Simulates the engine in thousands of schedules, each from one seed.
//!
//! `LEASEHOLD_SIMULATE_SEED` sets the first seed. Only this seed is played unless
//! `LEASEHOLD_SIMULATE_MINUTES` sets a duration. `LEASEHOLD_SIMULATE_WITHOUT` leaves disturbances out. `cargo
//! xtask simulate` sets these variables.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "simulation/candidate.rs"]
mod candidate;

use std::env;
use std::fmt::Write as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use candidate::{Broken, Elections};
use leasehold_conformance::simulation::{Counterexample, Coverage, Disturbances, ScheduleReport, Simulation};

/// The number of schedules of a test run.
const SCHEDULES: u64 = 3_000;

/// Seeds of schedules that have shown a fault of the engine or of the simulator, with its description.
const KEPT: [(u64, &str); 13] = [
    (228, "keys that one call had taken, lost by silence while it waited for the next, stayed shut for ever"),
    (6_624, "a renewal that was confirmed just before its lock was closed"),
    (75_755, "a hint at the end of a budget, while the store's queue was being left"),
    (
        1_795_424_161_309_775,
        "a late copy was granted, and the lease not begun anew when its caller asked again",
    ),
    (
        1_795_574_538_607_596,
        "an answer that came after an operator had ended its hold, and a late copy was granted with the next token",
    ),
    (1_795_581_853_927_321, "a lease made shorter by a holder that stood still until another had the key"),
    (
        1_795_586_995_836_775,
        "whom an operator had ended, and who had not been told yet when a lease ended that a late copy was granted",
    ),
    (
        1_795_586_996_184_573,
        "a key of a call that waits for the next, lost by silence, of an engine that closed before the call was polled",
    ),
    (
        1_795_600_000_522_505,
        "two callers of one client, each with a permit that the other waits for, after a grant that came too late",
    ),
    (1_795_590_000_029_953, "a key that was freed twice, so that its release told of no waiters"),
    (88_042_020, "a grant whose client had stood still until its lease ended and a late copy was granted"),
    (88_050_958, "a try whose late copy was granted after the reply, and kept its own client out"),
    (
        88_217_084,
        "a client that was paused just after its clocks had stood still, before it looked at its holds",
    ),
];

#[test]
fn thousands_of_schedules() {
    let number = |name: &str| env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    let minutes = number("LEASEHOLD_SIMULATE_MINUTES");
    let first = number("LEASEHOLD_SIMULATE_SEED");
    let without: Disturbances = env::var("LEASEHOLD_SIMULATE_WITHOUT").unwrap_or_default().parse().unwrap();
    if let (Some(seed), None) = (first, minutes) {
        let played = simulation().play(seed, without);
        println!("{}", text_of(&played));
        assert_eq!(played.violations, Vec::<String>::new());
        return;
    }
    let begun = Instant::now();
    let until = minutes.map(|minutes| begun + Duration::from_secs(60 * minutes));
    let first = first.unwrap_or(0);
    let (seen, found, played) = campaign(&simulation(), first, |played| match until {
        Some(until) => Instant::now() < until,
        None => played < SCHEDULES,
    });
    let took = begun.elapsed();
    println!(
        "{played} schedules in {took:.1?}, {:.0} a minute, seeds from {first} on\n{seen}",
        60.0 * played as f64 / took.as_secs_f64()
    );
    if let Some(found) = found {
        println!("{found}");
        panic!("seed {} shows something wrong", found.report.seed);
    }
    let never = seen.never();
    assert!(never.is_empty(), "{played} schedules have never run into {never:?}");
}

#[test]
fn schedules_that_have_shown_a_fault() {
    for (seed, what) in KEPT {
        let played = simulation().play(seed, Disturbances::none());
        assert_eq!(played.violations, Vec::<String>::new(), "seed {seed}: {what}");
    }
}

#[test]
fn the_same_seed_gives_the_same_history() {
    let simulation = simulation();
    let mut events = 0;
    for seed in 0..100 {
        let [once, again] = [(); 2].map(|()| simulation.play(seed, Disturbances::none()));
        assert_eq!(text_of(&once), text_of(&again), "seed {seed}");
        events += once.history.events.len();
    }
    assert!(events > 5_000, "{events} events in all are too few to tell");
}

#[test]
fn what_is_left_out_does_not_happen() {
    for seed in 0..50 {
        let played = simulation().play(seed, Disturbances::all());
        assert_eq!((played.happened, played.violations), (Disturbances::none(), Vec::new()), "seed {seed}");
    }
}

/// Checks the judge itself.
#[test]
fn candidates_that_break_a_rule_are_found() {
    for (broken, wrong) in [
        (Broken::AlwaysLeads, "shows that it leads"),
        (Broken::OutlivesLoss, "and its guard is Some(Lost)"),
        (Broken::KeepsBody, "its body still runs"),
    ] {
        let simulation = Simulation::of_the_engine().with_candidates(Elections(Some(broken)));
        let mut violations = (0..300).flat_map(|seed| simulation.play(seed, Disturbances::none()).violations);
        assert!(violations.any(|violation| violation.contains(wrong)), "{broken:?} is not found");
    }
}

/// Returns the simulation of the engine, in which some callers campaign.
fn simulation() -> Simulation {
    Simulation::of_the_engine().with_candidates(Elections(None))
}

/// Plays schedules on several threads while `goes_on` returns true for the number of schedules so far.
fn campaign(
    simulation: &Simulation,
    first: u64,
    goes_on: impl Fn(u64) -> bool + Sync,
) -> (Coverage, Option<Counterexample>, u64) {
    const AT_ONCE: u64 = 100;
    let (seen, next, found) = (Coverage::default(), AtomicU64::new(0), Mutex::new(None));
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from).min(8) {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let from = next.fetch_add(AT_ONCE, Ordering::Relaxed);
                    if !goes_on(from) {
                        next.fetch_sub(AT_ONCE, Ordering::Relaxed);
                        return;
                    }
                    let from = first.wrapping_add(from);
                    if let Some(one) = simulation.search(from..from + AT_ONCE, &seen) {
                        stop.store(true, Ordering::Relaxed);
                        // Keeps the lowest seed, so that the result does not depend on the number of cores.
                        let mut found = found.lock().unwrap();
                        if found
                            .as_ref()
                            .is_none_or(|other: &Counterexample| one.report.seed < other.report.seed)
                        {
                            *found = Some(one);
                        }
                    }
                }
            });
        }
    });
    (seen, found.into_inner().unwrap(), next.into_inner())
}

fn text_of(played: &ScheduleReport) -> String {
    let mut text = String::new();
    for event in &played.history.events {
        writeln!(text, "{event}").unwrap();
    }
    for hold in &played.holds {
        writeln!(text, "{hold}").unwrap();
    }
    writeln!(text, "disturbed by: {}", played.happened).unwrap();
    text
}
