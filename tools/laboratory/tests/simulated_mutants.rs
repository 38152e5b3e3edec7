//! Checks which mutants the simulator catches without the suite.
//!
//! A mutant is caught if the judge finds a violation in a schedule, or if it never reaches a situation that its version
//! without a fault reaches often. `LEASEHOLD_MUTANT` restricts the run to mutants whose name contains it. A mutant that is
//! listed as out of reach runs only under its full name.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeSet;
use std::env;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use laboratory::mutants::{Mutant, all_mutants, further_unmutated, unmutated};
use leasehold_api::Mode;
use leasehold_conformance::simulation::{Coverage, Disturbances, Scope, Simulation, Situation};

/// Number of schedules of each mutant.
const SCHEDULES: u64 = 1_000;

/// Number of times that a version without a fault must reach a situation before a mutant that never does is caught.
const OFTEN: u64 = 50;

/// Mutants that the simulator cannot catch, with the reason. The suite catches all of them.
const OUT_OF_REACH: [(&str, &[&str]); 26] = [
    (
        "the order between clients, and among the callers of one, is not judged",
        &[
            "backend:hides-waiters",
            "backend:try-overtakes-waiters",
            "backend:window-overtakes-waiters",
            "backend:queue-is-lifo",
            "backend:queue-is-passed-at-a-lapse",
            "backend:fifo-is-polled",
            "lock:try-barges",
            "lock:lifo",
            "lock:drop-forgets-waiters",
            "lock:chain-ignores-remote",
            "backend:tells-of-no-remote-waiter",
        ],
    ),
    (
        "nobody looks, waits for a change, changes a label, asks for a release, or for what is invalid or not declared",
        &[
            "backend:force-ignores-holder",
            "backend:force-undeclared",
            "backend:look-takes",
            "backend:look-lengthens",
            "backend:look-ends-cooldown",
            "backend:look-counts-as-waiting",
            "backend:try-counts-as-waiting",
            "backend:list-takes",
            "backend:list-shows-expired",
            "backend:list-limits-first",
            "backend:label-of-the-one-before",
            "backend:label-lost-in-queue",
            "lock:handed-over-to-another-label",
            "lock:hands-over-when-off",
            "backend:relabels-successor",
            "backend:relabel-is-forgotten",
            "backend:asks-successor",
            "backend:ask-is-not-told",
            "backend:ask-is-not-shown",
            "backend:ask-stays-with-key",
            "backend:ask-releases",
            "backend:ask-lengthens",
            "lock:chain-ignores-requests",
            "backend:force-ends-expired",
            "backend:admin-missing",
            "backend:password-shown",
            "backend:errors-alike",
            "lock:no-holder-is-not-told",
            "lock:observer-outlives-close",
            "lock:errors-unnamed",
            "lock:errors-name-the-first",
            "lock:kind-flattened",
            "lock:zero-ttl-accepted",
            "lock:ttl-clamped",
            "lock:huge-wait-panics",
            "lock:label-unchecked",
            "lock:shared-as-exclusive",
            "lock:max-hold-zero-accepted",
            "lock:all-keeps-duplicates",
        ],
    ),
    (
        "no caller of a schedule confirms or fences a grant, or follows its validity",
        &[
            "lock:confirms-from-memory",
            "lock:confirms-by-earlier-renewal",
            "lock:doubt-is-not-told",
            "lock:handed-over-under-a-fence",
            "lock:ended-handle-fences-under-its-successor",
        ],
    ),
    (
        "no caller of a schedule gives a hold out",
        &[
            "backend:adopts-expired",
            "backend:adopts-twice",
            "backend:adopts-held",
            "backend:adopts-by-key",
            "backend:adopts-by-holder",
            "backend:adopts-by-token",
            "backend:adoption-again-shortens",
            "backend:token-kept",
            "backend:old-process-renews",
            "backend:old-process-ends",
        ],
    ),
    (
        "needs more keys, longer ones, more refusals, or more hand-overs than a schedule has",
        &[
            "backend:grants-every-thousandth",
            "backend:capacity-is-contended",
            "backend:key-colons-dropped",
            "backend:key-cut",
            "backend:key-hashed",
            "backend:token-restarts-after-many-keys",
            "backend:cooldown-forgotten-after-many-keys",
            "lock:token-beyond-block",
            "backend:reserves-too-few",
        ],
    ),
    (
        "the fault is in how the store answers to faults of its own link, which the wire of the simulation replaces",
        &[
            "backend:error-is-contended",
            "backend:neighbour-fails",
            "backend:renew-failure-is-extended",
            "backend:late-copy-is-granted",
            "backend:late-copy-is-granted-for-a-moment",
        ],
    ),
    (
        "the store of the mutants always tells of a hold that it ended, so nobody asks for one that has gone",
        &[
            "backend:release-always-held",
            "backend:renew-recreates",
            "backend:neighbour-lost",
            "backend:renewals-in-key-order",
            "backend:release-stops-at-gone",
        ],
    ),
    (
        "keys are kept longer than need be, which is within the bounds",
        &[
            "backend:renew-from-old-deadline",
            "backend:cooldown-ends-late",
            "backend:ttl-rounded-up",
            "backend:cooldown-from-release",
            "backend:cooldown-outlives-its-undo",
            "backend:held-hides-cooldown",
            "backend:cooldown-from-renewal",
            "backend:queue-sleeps-to-the-old-end",
            "lock:baton-lost-on-cancel",
            "lock:baton-lost-on-close",
        ],
    ),
    (
        "a schedule lasts for minutes, deletes no rows, and never restarts the store",
        &[
            "backend:token-restarts-after-a-day",
            "backend:token-restarts-after-a-purge",
            "backend:token-saved-at-the-end",
        ],
    ),
    (
        "the simulator starts the engine itself, and the fault is in what the engine does with its readers",
        &[
            "modes:readers-join-beyond-share-for",
            "modes:first-reader-releases-for-all",
            "modes:loss-ends-one-reader-alone",
        ],
    ),
    (
        "the order between readers and writers, holds of the dead and of late copies, and looks are not judged",
        &[
            "modes:readers-starve-writer",
            "modes:renew-lengthens-all-readers",
            "modes:look-shows-one-of-many",
            "modes:force-ends-all",
            "modes:n-mismatch-is-contention",
            "modes:same-id-takes-two",
        ],
    ),
    ("a request that arrives twice has its second answer lost", &["backend:same-id-is-contended"]),
    (
        "no hold with a cooldown is ended early while somebody asks for its key",
        &["backend:cooldown-ends-with-a-loss"],
    ),
    (
        "only a paused client finds a grant late, and what overlaps a pause is not judged",
        &["backend:queue-counts-from-pick-up"],
    ),
    (
        "whether a lease had ended when its release arrived, and when the lost signal fires, is not judged",
        &[
            "backend:release-of-ended-is-ok",
            "backend:release-of-ended-is-ok-where-it-cools",
            "lock:lost-waits-for-failure",
        ],
    ),
    ("no word of a loss comes late", &["lock:loss-ends-the-next"]),
    ("whether a caller knows of a cooldown is decided when it asks", &["lock:not-due-hears-of-no-begin"]),
    ("whether a close succeeds is not judged", &["lock:close-asks-once"]),
    ("nobody looks at the store just after a close", &["lock:close-forgets-abandoned"]),
    ("the engine keeps the first token", &["backend:token-changes-on-renew"]),
    (
        "what the fault forgets seldom comes just before or after a hand-over",
        &["lock:shorter-ttl-forgotten", "lock:loss-not-passed-on"],
    ),
    ("nobody looks at a grant that was released", &["lock:lost-told-to-the-earlier-guard"]),
    ("nobody closes a client twice", &["lock:close-twice-early"]),
    (
        "that a maximum hold ends too early is not judged",
        &["lock:max-hold-from-request", "lock:max-hold-passed-on"],
    ),
    (
        "only the wire knows which call failed, or how often the store was asked",
        &[
            "lock:give-up-ignored",
            "lock:try-asks-again",
            "lock:outage-is-contended",
            "lock:outage-blames-store",
            "lock:own-attempt-blames-holder",
            "lock:outage-is-remembered",
            "lock:retries-into-cooldown",
            "lock:retries-without-pause",
            "lock:renew-stops-on-failure",
            "lock:renew-stops-on-silence",
            "lock:loss-at-first-failure",
            "lock:renews-too-late",
            "lock:refusal-is-undone",
            "lock:undo-for-ever",
            "lock:failed-undo-is-forgotten",
            "lock:release-for-the-known-lease",
            "lock:shorter-from-failure",
            "lock:late-grant-is-kept",
            "lock:own-release-is-contended",
            "lock:releases-one-by-one",
        ],
    ),
    (
        "the runtime does not end under a client, no wait lasts a minute, and nobody closes with a guard in hand for long",
        &[
            "lock:drop-needs-runtime",
            "lock:runtime-end-is-silent",
            "lock:forever-ends",
            "lock:close-leaves-holds",
            "lock:ended-never-fires",
        ],
    ),
];

#[test]
fn every_mutant_in_reach_dies() {
    let only = env::var("LEASEHOLD_MUTANT").unwrap_or_default();
    let out_of_reach: BTreeSet<_> = OUT_OF_REACH.iter().flat_map(|(_, names)| *names).copied().collect();
    let mutants = all_mutants();
    let unknown: Vec<_> =
        out_of_reach.iter().filter(|name| mutants.iter().all(|m| m.name() != **name)).collect();
    assert!(unknown.is_empty(), "there are no mutants {unknown:?}");
    // The last one is the memory store with all modes.
    let mut sound = unmutated();
    sound.extend(further_unmutated().into_iter().filter(|mutant| mutant.name() == "modes"));
    let sound: Vec<Coverage> = in_parallel(&sound, |mutant| {
        let (seen, wrong) = play(mutant);
        assert_eq!(wrong, None, "{} has no fault", mutant.name());
        seen
    });
    let wanted: Vec<_> = mutants
        .into_iter()
        .filter(|mutant| !out_of_reach.contains(mutant.name()) || mutant.name() == only)
        .filter(|mutant| mutant.name().contains(&only))
        .collect();
    assert!(!wanted.is_empty(), "no mutant is named like {only}");
    let outcomes = in_parallel(&wanted, |mutant| {
        let (seen, wrong) = play(mutant);
        let hands_over = mutant.rules().contains(&"C21");
        let is_of_modes = mutant.name().starts_with("modes:");
        let sound = &sound[match mutant.name().starts_with("lock:") {
            _ if is_of_modes => sound.len() - 1,
            true if hands_over => 6,
            true => 2,
            false if hands_over => 4,
            false => 0,
        }];
        let missed = |what: &Situation| sound.of(*what) >= OFTEN && seen.of(*what) == 0;
        let missed = || Situation::ALL.into_iter().find(missed).map(|what| format!("never {what:?}"));
        (mutant.name().to_owned(), wrong.or_else(missed))
    });
    for (name, death) in &outcomes {
        println!("{name:40} {}", death.as_deref().unwrap_or("SURVIVES"));
    }
    println!("{} die, {} are out of reach", outcomes.len(), out_of_reach.len());
    let survivors: Vec<_> =
        outcomes.iter().filter(|(_, death)| death.is_none()).map(|(name, _)| name).collect();
    assert!(survivors.is_empty(), "{survivors:?} survive {SCHEDULES} schedules");
}

/// Checks the simulator itself: an engine that does not check the store between two renewals must violate C1. A client that
/// is stopped together with its clock notices its loss only by the next call to the store.
#[test]
fn an_engine_that_never_looks_dies() {
    let simulation = Simulation::of_an_engine_that_never_looks();
    let wrong = (0..SCHEDULES).find_map(|seed| {
        let played = simulation.play(seed, Disturbances::none());
        let wrong = played.violations.first()?;
        assert!(played.happened.to_string().contains("stop"), "seed {seed}: {wrong}");
        Some(format!("seed {seed}: {wrong}"))
    });
    println!("{wrong:?}");
    assert!(wrong.is_some_and(|wrong| wrong.contains("C1")), "it survives {SCHEDULES} schedules");
}

/// Checks that the small scopes find these mutants, and that the version without a fault is correct.
#[test]
fn small_scopes_find_mutants_of_modes() {
    let readers = Scope::new([[Mode::Shared, Mode::Exclusive]; 2]);
    let permits = |of| Scope::new([[Mode::Permit { of }; 2]; 2]).together();
    let mutants = [all_mutants(), further_unmutated()].concat();
    for (name, scope) in [
        ("modes:writer-joins-readers", readers.clone()),
        ("modes:reader-joins-writer", readers.clone()),
        ("modes:shared-token-below-last-writer", readers.clone()),
        ("modes:exclusive-token-not-above-readers", readers.clone()),
        ("modes:n-plus-one", permits(1)),
        ("modes:permits-are-shared", permits(1)),
        ("modes:number-is-constant", permits(2)),
        ("modes:number-is-missing", permits(2)),
    ] {
        for name in [name, "modes"] {
            let mutant = mutants.iter().find(|mutant| mutant.name() == name).unwrap();
            let all = mutant.simulation().enumerate(&scope, &[], || true);
            println!("{name:40} {} schedules", all.schedules);
            let wrong = all.found.map(|found| found.to_string());
            assert_eq!(wrong.is_some(), name != "modes", "{name}: {wrong:?}");
            assert!(wrong.is_some() || all.is_complete, "{name} has diverged");
        }
    }
}

/// Plays schedules until one has a violation. Returns the coverage, and the violation with its seed.
fn play(mutant: &Mutant) -> (Coverage, Option<String>) {
    let (simulation, all) = (mutant.simulation(), Coverage::default());
    for seed in 0..SCHEDULES {
        let played = simulation.play(seed, Disturbances::none());
        all.add(played.coverage());
        if let Some(wrong) = played.violations.first() {
            return (all, Some(format!("seed {seed}: {wrong}")));
        }
    }
    (all, None)
}

/// Returns the results of `work` for each mutant, in order.
fn in_parallel<T: Send>(mutants: &[Mutant], work: impl Fn(&Mutant) -> T + Sync) -> Vec<T> {
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from).min(4) {
            scope.spawn(|| {
                while let Some((at, mutant)) = {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    mutants.get(at).map(|mutant| (at, mutant))
                } {
                    let outcome = work(mutant);
                    done.lock().unwrap().push((at, outcome));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap();
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, outcome)| outcome).collect()
}
