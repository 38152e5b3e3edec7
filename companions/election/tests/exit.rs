//! A process that ends when its term is lost: this test starts itself again.

#![allow(clippy::unwrap_used)]

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{LockKey, LossReason};
use leasehold_election::{ElectExt as _, Next, OnLoss};
use leasehold_memory::MemoryStore;
use test_bounds::Bound;

const ROLE: &str = "LEASEHOLD_ELECTION_TEST";

/// Runs a body on a runtime with one thread. `act` is what happens to the term.
fn child(act: &str) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let store = MemoryStore::new();
        let lock = store.client().unwrap();
        let key = LockKey::new("leader").unwrap();
        let store = Arc::new(store);
        let election = lock.elect(key.clone()).on_loss(OnLoss::Exit(42));
        let outcome = election.lead(async |term| {
            match act {
                "lose" => {
                    assert!(store.lose(&key, LossReason::ForcedRelease));
                    // Blocks the only thread of the runtime.
                    std::thread::sleep(Duration::from_secs(600));
                    unreachable!("the process goes on without its term");
                }
                "step down" => {
                    term.step_down(Duration::ZERO);
                    term.over().await;
                }
                _ => {}
            }
            Ok(Next::Done)
        });
        outcome.await.unwrap();
        // The lock is released, which is no loss.
        std::thread::sleep(Duration::from_millis(500));
    });
    println!("the campaign is over");
}

fn ends_with(act: &str) -> (Option<i32>, String) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([
        "--exact",
        "a_lost_term_ends_the_process_though_its_body_blocks_the_thread",
        "--nocapture",
    ]);
    let mut process = command.env(ROLE, act).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let bound = Bound::new(Duration::from_secs(120));
    while process.try_wait().unwrap().is_none() {
        bound.pause(Duration::from_millis(10), "not ended");
    }
    let output = process.wait_with_output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn a_lost_term_ends_the_process_though_its_body_blocks_the_thread() {
    if let Ok(act) = std::env::var(ROLE) {
        return child(&act);
    }
    let (code, said) = ends_with("lose");
    assert!(code == Some(42) && !said.contains("over"), "{code:?} {said}");
    for act in ["done", "step down"] {
        let (code, said) = ends_with(act);
        assert!(code == Some(0) && said.contains("the campaign is over"), "{act}: {code:?} {said}");
    }
}
