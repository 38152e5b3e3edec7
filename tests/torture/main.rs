//! Processes lock keys of real stores while they, the server and the network are disturbed, and a checker reads their
//! records. All random choices come from one seed, but the timing depends on the machine.
#![allow(clippy::unwrap_used)]
#![cfg(all(
    feature = "etcd",
    feature = "file",
    feature = "postgres-advisory",
    feature = "postgres-row",
    feature = "postgres-ttl"
))]

mod campaign;
mod checker;
mod clock;
mod disk;
mod faults;
mod members;
mod network;
mod processes;
mod record;
mod register;
mod report;
mod server;
mod stalls;
mod worker;

use std::time::Duration;

use campaign::{FUTILE, STORES, Settings, torture};
use faults::Fault;
use test_bounds::Bound;
use worker::Broken;

fn setting(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Returns the settings from `cargo xtask torture`. Without it, each fault happens at least once.
fn settings() -> Settings {
    let number = |name: &str| setting(name).map(|value| value.parse::<u64>().unwrap());
    let fault = |name: &str| Fault::of_name(name).unwrap_or_else(|| panic!("there is no fault {name:?}"));
    let faults = setting("LEASEHOLD_TORTURE_FAULTS");
    Settings {
        seed: number("LEASEHOLD_TORTURE_SEED").unwrap_or(1),
        time: Duration::from_secs(number("LEASEHOLD_TORTURE_MINUTES").unwrap_or(0) * 60),
        faults: faults.iter().flat_map(|names| names.split(',')).map(fault).collect(),
        broken: None,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 8)]
async fn stores_keep_their_promises() {
    let (settings, begun) = (settings(), Bound::new(FUTILE));
    let wanted = setting("LEASEHOLD_TORTURE_STORE");
    let stores = STORES.into_iter().filter(|store| wanted.as_ref().is_none_or(|wanted| wanted == store.name));
    let mut reports = Vec::new();
    // One after the other, because the processes of all stores at once leave faults no time to meet a section.
    for store in stores {
        reports.extend(torture(store, &settings).await);
    }
    assert!(!reports.is_empty(), "none of these faults can happen to these stores");
    println!("\n{}", report::tables(settings.seed, &reports));
    let violations = report::violations(settings.seed, &reports);
    assert!(violations.is_empty(), "{violations}");
    // The machine decides when a fault meets a section. A fault without effect accuses no store.
    for report in &reports {
        if let Some(fault) = report.without_effect().next() {
            begun.check(format!("{}: {fault} never took effect", report.store));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 8)]
async fn workers_that_lock_something_else_are_found() {
    let faults = vec![Fault::Kill, Fault::Stop];
    let found = broken("files", Broken::OtherKey, faults).await;
    assert!(found.contains("overlap of") && found.contains("both were held"), "{found}");
    assert!(found.contains("lost update") || found.contains("tokens fall"), "{found}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 8)]
async fn workers_that_do_not_hear_of_a_loss_are_found() {
    let found = broken("lease", Broken::Deaf, vec![Fault::Stop]).await;
    assert!(found.contains("overlap of"), "{found}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 8)]
async fn workers_that_read_beside_each_other_and_say_that_they_write_are_found() {
    let found = broken("etcd", Broken::OtherMode, vec![Fault::Kill]).await;
    assert!(found.contains("overlap of") && found.contains("both were held"), "{found}");
}

/// Returns the violations found in campaigns whose workers have the fault `broken`. On a busy machine no other worker
/// may enter while one works on without its lock, so a campaign that finds nothing is followed by another one.
async fn broken(store: &str, broken: Broken, faults: Vec<Fault>) -> String {
    let store = STORES.into_iter().find(|known| known.name == store).unwrap();
    let mut settings = Settings { seed: 1, faults, broken: Some(broken), ..Settings::default() };
    loop {
        let violations = torture(store, &settings).await.unwrap().findings.violations.join("\n");
        if violations.contains("overlap of") || settings.seed == 10 {
            return violations;
        }
        settings.seed += 1;
    }
}
