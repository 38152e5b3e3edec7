//! The checker of histories on recorded traffic: correct stores pass, and mutants are flagged.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::Duration;

use laboratory::mutants::{Mutant, all_mutants, unmutated};
use leasehold_api::{Capabilities, Lock, LockExt as _};
use leasehold_conformance::Factory as _;
use leasehold_conformance::history::{History, Log, Recorder, ViolationKind, check};

fn show(history: &History) -> String {
    history.events.iter().enumerate().map(|(i, e)| format!("{i:>3} {e}\n")).collect()
}

/// Records two clients that compete for two keys, with dropped guards, one cancelled call and one forced release.
async fn traffic(store: &Mutant) -> (History, Capabilities) {
    let harness = store.open().await.unwrap();
    let log = Log::new();
    let mut clients: Vec<Arc<dyn Lock>> = Vec::new();
    for n in 1..=2 {
        clients.push(Arc::new(Recorder::new(harness.client().await.unwrap(), n, &log)));
    }
    let capabilities = clients[0].capabilities().clone();
    let tasks: Vec<_> = (0..6)
        .map(|n: usize| {
            let lock = Arc::clone(&clients[n % 2]);
            tokio::spawn(async move {
                for round in 0..5 {
                    let key = ["a", "b"][(n + round) % 2];
                    let Ok(guard) = lock.key(key).wait_forever().acquire().await else { continue };
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    if round == 2 {
                        drop(guard);
                    } else {
                        // `Lost` is also in the record.
                        let _ = guard.release().await;
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let guard = clients[0].key("c").acquire().await.unwrap();
    let waiting = tokio::time::timeout(Duration::from_millis(10), clients[1].key("c").acquire());
    // Cancelled unless a mutant grants it.
    drop(waiting.await);
    clients[1].admin().unwrap().force_release(guard.key(), guard.holder()).await.unwrap();
    let next = clients[1].key("c").acquire().await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    // The record has the results of these releases.
    let _ = guard.release().await;
    let _ = next.release().await;
    (log.history(), capabilities)
}

#[tokio::test(start_paused = true)]
async fn what_correct_locks_do_passes() {
    for store in unmutated() {
        let (history, capabilities) = traffic(&store).await;
        assert!(history.complete && history.events.len() > 60, "{}", show(&history));
        assert_eq!(check(&history, &capabilities), Ok(()), "{}: {}", store.name(), show(&history));
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_mutant_does_is_flagged() {
    for (name, kind) in [
        ("backend:excludes-per-client", ViolationKind::Overlap),
        ("backend:token-constant", ViolationKind::TokenNotGreater),
        ("backend:token-missing", ViolationKind::TokenMismatch),
        ("lock:holder-reused", ViolationKind::GrantedTwice),
    ] {
        let store = all_mutants().into_iter().find(|m| m.name() == name).unwrap();
        let (history, capabilities) = traffic(&store).await;
        let violations = check(&history, &capabilities).err().unwrap_or_default();
        assert!(violations.iter().any(|v| v.kind == kind), "{name}: {violations:?}\n{}", show(&history));
    }
}
