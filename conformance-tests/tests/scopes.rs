//! Plays all schedules of small scopes: two clients, one key, two calls each. The reductions are listed in
//! `src/simulation/scope.rs`.
//!
//! `LEASEHOLD_SIMULATE_ALL` adds the larger scopes, with two faults. `LEASEHOLD_SIMULATE_CHOICES=NAME:1,0,2` plays one
//! schedule of the scope with this name. `cargo xtask simulate` sets both.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::env;
use std::fmt::Write as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use leasehold_api::Mode;
use leasehold_conformance::simulation::{
    ByteChoices, Disturbance, Disturbances, Enumeration, Scope, ScopeReport, SeededChoices, Simulation,
};

/// The limit of all larger scopes together.
const WITHIN: Duration = Duration::from_secs(600);
/// The number of first choices by which the schedules of a scope are divided among the threads.
const DEPTH: usize = 5;
/// The number of schedules at random of each scope.
const AT_RANDOM: u64 = 100;

const SHARE_FOR: Duration = Duration::from_millis(300);

const WRITERS: [[Mode; 2]; 2] = [[Mode::Exclusive; 2]; 2];
/// Each client reads before it writes.
const READERS: [[Mode; 2]; 2] = [[Mode::Shared, Mode::Exclusive]; 2];
/// Two readers of one client, beside a reader and a writer of the other one.
const READERS_OF_ONE: [[Mode; 2]; 2] = [[Mode::Shared; 2], [Mode::Shared, Mode::Exclusive]];
const PERMITS: [[Mode; 2]; 2] = [[Mode::Permit { of: 2 }; 2]; 2];

/// The scopes of the usual tests.
static SMALL: [(&str, Scope); 6] = [
    ("small-exclusive", Scope::new(WRITERS).faults(1)),
    ("small-shared", Scope::new(READERS).faults(1)),
    ("small-permits", Scope::new(PERMITS).faults(1)),
    ("small-handover", Scope::new(WRITERS).together().hands_over()),
    ("small-sharing", Scope::new(READERS_OF_ONE).together().share_for(SHARE_FOR)),
    ("small-crowd", Scope::new(PERMITS).together()),
];

/// The scopes of `cargo xtask simulate --all`.
static LARGE: [(&str, Scope); 6] = [
    ("exclusive", Scope::new(WRITERS).faults(2)),
    ("shared", Scope::new(READERS).faults(2)),
    ("permits", Scope::new(PERMITS).faults(2)),
    ("handover", Scope::new(WRITERS).together().hands_over().faults(1).pauses(1)),
    ("sharing", Scope::new(READERS_OF_ONE).together().share_for(SHARE_FOR).faults(1).pauses(1)),
    ("crowd", Scope::new(PERMITS).together().faults(1)),
];

/// The disturbances that the faults of a scope are.
const FAULTS: [Disturbance; 6] = [
    Disturbance::LostRequest,
    Disturbance::LostAnswer,
    Disturbance::LateRequest,
    Disturbance::Twice,
    Disturbance::Failure,
    Disturbance::Cancel,
];

#[test]
fn every_schedule_of_a_scope_is_correct() {
    if let Ok(text) = env::var("LEASEHOLD_SIMULATE_CHOICES") {
        return repeat(&text);
    }
    let begun = Instant::now();
    let is_long = env::var("LEASEHOLD_SIMULATE_ALL").is_ok();
    for (name, scope) in SMALL.iter().chain(LARGE.iter().filter(|_| is_long)) {
        let from = Instant::now();
        let all = enumerate(scope, DEPTH, begun + WITHIN);
        println!("{name:16} {:>10} schedules in {:.1?}: {}", all.schedules, from.elapsed(), all.happened);
        if let Some(found) = all.found {
            let choices: Vec<_> = found.choices.iter().map(u8::to_string).collect();
            println!("{found}");
            println!("repeat it with: cargo xtask simulate --choices {name}:{}", choices.join(","));
            panic!("a schedule of the scope {name} shows something wrong");
        }
        assert!(all.is_complete, "{name}: not all schedules were played within {WITHIN:?}, or not each once");
        if scope.most_faults() > 0 {
            let never: Vec<_> = FAULTS.into_iter().filter(|fault| !all.happened.has(*fault)).collect();
            assert!(never.is_empty(), "{name}: {never:?} never happened");
        }
        assert!(all.schedules > 1, "{name} has one order only");
    }
}

#[test]
fn the_number_of_schedules_does_not_depend_on_how_they_are_divided() {
    let until = Instant::now() + WITHIN;
    for (name, scope) in &SMALL[3..] {
        let [whole, divided] = [0, 3].map(|depth| enumerate(scope, depth, until).schedules);
        assert_eq!(whole, divided, "{name}");
    }
}

#[test]
fn the_choices_of_a_schedule_at_random_repeat_it_as_bytes() {
    let simulation = Simulation::of_the_engine();
    for (name, scope) in &LARGE {
        for seed in 0..AT_RANDOM {
            let played = simulation.play_scope(scope, &mut SeededChoices::new(seed));
            assert_eq!(played.violations, Vec::<String>::new(), "{name}, seed {seed}:\n{played}");
            let again = simulation.play_scope(scope, &mut ByteChoices::new(&played.choices));
            assert_eq!(text_of(&played), text_of(&again), "{name}, seed {seed}");
        }
    }
}

/// Plays the schedule of `NAME:CHOICES`.
fn repeat(text: &str) {
    let (name, choices) = text.split_once(':').expect("a scope and choices: NAME:1,0,2");
    let mut scopes = SMALL.iter().chain(&LARGE);
    let (_, scope) = scopes.find(|(known, _)| *known == name).expect("the name of a scope");
    let choices = choices.split(',').filter(|choice| !choice.is_empty());
    let choices: Vec<u8> = choices.map(|choice| choice.parse().expect("choices are numbers")).collect();
    let played = Simulation::of_the_engine().play_scope(scope, &mut ByteChoices::new(&choices));
    println!("{played}");
    assert_eq!(played.violations, Vec::<String>::new());
}

/// Plays all schedules of the scope on several threads, until `until`.
fn enumerate(scope: &Scope, depth: usize, until: Instant) -> Enumeration {
    let simulation = Simulation::of_the_engine();
    let parts = simulation.parts(scope, depth);
    let (next, results) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    thread::scope(|threads| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from).min(8) {
            threads.spawn(|| {
                while let Some((at, part)) = {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    parts.get(at).map(|part| (at, part))
                } {
                    let result = simulation.enumerate(scope, part, || Instant::now() < until);
                    if result.found.is_some() {
                        next.store(parts.len(), Ordering::Relaxed);
                    }
                    results.lock().unwrap().push((at, result));
                }
            });
        }
    });
    let mut results = results.into_inner().unwrap();
    // Keeps the first violation, because the order of the threads differs.
    results.sort_by_key(|(at, _)| *at);
    let mut all = Enumeration { is_complete: results.len() == parts.len(), ..Enumeration::default() };
    for (_, result) in results {
        all.schedules += result.schedules;
        all.happened = result.happened.iter().fold(all.happened, Disturbances::with);
        all.is_complete &= result.is_complete;
        all.found = all.found.or(result.found);
    }
    all
}

fn text_of(played: &ScopeReport) -> String {
    let mut text = String::new();
    write!(text, "{played}\n{}", played.happened).unwrap();
    text
}
