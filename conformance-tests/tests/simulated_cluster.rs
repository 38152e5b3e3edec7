//! Simulates the engine over a consensus cluster, with correct clients and with mutants that leave out one check.
//!
//! `LEASEHOLD_CLUSTER_SCAN=N` plays N schedules of the correct clients and of each mutant, and prints the first seed
//! that shows each mutant. `LEASEHOLD_CLUSTER_SEED=S` prints the schedule of one seed, without the disturbances in
//! `LEASEHOLD_CLUSTER_WITHOUT` and with the mutant in `LEASEHOLD_CLUSTER_MUTANT`.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::env;
use std::fmt::Write as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use leasehold_conformance::simulation::{
    ClusterMutant as M, Disturbance, Disturbances, ScheduleReport, Simulation,
};

/// The number of schedules of the correct clients.
const SCHEDULES: u64 = 300;

/// The disturbances that happen only in schedules of a cluster.
const OF_CLUSTERS: [Disturbance; 3] =
    [Disturbance::StuckLeader, Disturbance::NewLeader, Disturbance::Restore];

/// The number of schedules to play for each mutant, from its seed in [`NEEDED`]. More than one, because a change of the
/// engine can move the violation to a neighbour.
const WITHIN: u64 = 5;

/// The mutants, each with the rule that it violates and the seed of its first schedule.
const NEEDED: [(M, &str, u64); 9] = [
    (M::LateCopyGuard, "C23", 2),
    (M::SessionCompare, "C23", 2),
    (M::TermCheck, "C1", 55),
    (M::ReadAfterKeepAlive, "C1", 55),
    (M::BaseCheckAfterReconnect, "C8", 651),
    (M::HeardRevision, "C8", 147),
    (M::OwnEntry, "C1", 123),
    (M::DeletionOfGhosts, "C11", 196),
    (M::DeletionAfterRelease, "C11", 787),
];

#[test]
fn a_cluster_whose_clients_check_everything_is_correct() {
    if let Some(seed) = number("LEASEHOLD_CLUSTER_SEED") {
        print_schedule(seed);
        return;
    }
    let seeds = number("LEASEHOLD_CLUSTER_SCAN").unwrap_or(SCHEDULES);
    let (next, found) = (AtomicU64::new(0), Mutex::new((Vec::new(), Disturbances::none())));
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from).min(8) {
            scope.spawn(|| {
                let simulation = Simulation::of_a_cluster(None);
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds {
                        return;
                    }
                    let played = simulation.play(seed, Disturbances::none());
                    let mut found = found.lock().unwrap();
                    found.1 = played.happened.iter().fold(found.1, Disturbances::with);
                    let violations = played.violations.into_iter().map(|what| (seed, what));
                    found.0.extend(violations);
                }
            });
        }
    });
    let (mut violations, happened) = found.into_inner().unwrap();
    violations.sort();
    assert!(violations.is_empty(), "{violations:#?} in {seeds} schedules");
    let never: Vec<_> = OF_CLUSTERS.into_iter().filter(|one| !happened.has(*one)).collect();
    assert!(never.is_empty(), "{never:?} never happen in {seeds} schedules");
}

#[test]
fn each_check_of_a_client_is_needed() {
    assert_eq!(NEEDED.map(|(mutant, ..)| mutant), M::ALL);
    let scan = number("LEASEHOLD_CLUSTER_SCAN");
    let outcomes: Vec<_> = thread::scope(|scope| {
        let searches = NEEDED.map(|(mutant, rule, first)| {
            scope.spawn(move || match scan {
                Some(schedules) => (mutant, rule, shown(mutant, rule, 0, schedules)),
                None => (mutant, rule, shown(mutant, rule, first, WITHIN)),
            })
        });
        searches.into_iter().map(|search| search.join().unwrap()).collect()
    });
    for (mutant, rule, shown) in &outcomes {
        match shown {
            Some((seed, what)) => println!("{mutant:?}: seed {seed}: {what}"),
            None => println!("{mutant:?}: no schedule shows {rule}"),
        }
    }
    let survivors: Vec<_> = outcomes.iter().filter(|(.., shown)| shown.is_none()).collect();
    assert!(survivors.is_empty(), "{survivors:?}");
}

#[test]
fn the_same_seed_gives_the_same_history_of_a_cluster() {
    let simulation = Simulation::of_a_cluster(None);
    let mut events = 0;
    for seed in 0..40 {
        let [once, again] = [(); 2].map(|()| simulation.play(seed, Disturbances::none()));
        assert_eq!(text_of(&once), text_of(&again), "seed {seed}");
        events += once.history.events.len();
    }
    assert!(events > 1_000, "{events} events in all are too few to tell");
}

#[test]
fn what_is_left_out_does_not_happen_to_a_cluster() {
    let simulation = Simulation::of_a_cluster(None);
    for seed in 0..40 {
        let played = simulation.play(seed, Disturbances::all());
        assert_eq!((played.happened, played.violations), (Disturbances::none(), Vec::new()), "seed {seed}");
    }
}

#[test]
fn a_disturbance_of_the_cluster_alone_breaks_nothing() {
    let simulation = Simulation::of_a_cluster(None);
    for one in OF_CLUSTERS {
        let mut happened = 0;
        for seed in 0..30 {
            let played = simulation.play(seed, Disturbances::all().without(one));
            assert_eq!(played.violations, Vec::<String>::new(), "{one:?}, seed {seed}");
            happened += u32::from(played.happened.has(one));
        }
        assert!(happened > 0, "{one:?} never happens");
    }
}

/// Plays up to this number of `schedules` of a mutant, from the seed `first`. Returns the first seed whose schedule
/// violates `rule`, with the violation.
fn shown(mutant: M, rule: &str, first: u64, schedules: u64) -> Option<(u64, String)> {
    let simulation = Simulation::of_a_cluster(Some(mutant));
    let (start, end) = (format!("{rule},"), format!("({rule})"));
    (first..first + schedules).find_map(|seed| {
        let played = simulation.play(seed, Disturbances::none());
        let what = played.violations.into_iter().find(|what| what.starts_with(&start) || what.contains(&end));
        Some((seed, what?))
    })
}

fn print_schedule(seed: u64) {
    let without: Disturbances = env::var("LEASEHOLD_CLUSTER_WITHOUT").unwrap_or_default().parse().unwrap();
    let name = env::var("LEASEHOLD_CLUSTER_MUTANT").ok();
    let mutant = name.map(|name| {
        let known = M::ALL.into_iter().find(|mutant| format!("{mutant:?}") == name);
        known.expect("the name of a check")
    });
    let played = Simulation::of_a_cluster(mutant).play(seed, without);
    println!("{}", text_of(&played));
    assert_eq!(played.violations, Vec::<String>::new(), "seed {seed}");
}

fn number(name: &str) -> Option<u64> {
    env::var(name).ok().map(|text| text.parse().expect("a number"))
}

fn text_of(played: &ScheduleReport) -> String {
    let mut text = String::new();
    for event in &played.history.events {
        writeln!(text, "{event}").unwrap();
    }
    writeln!(text, "disturbed by: {}", played.happened).unwrap();
    text
}
