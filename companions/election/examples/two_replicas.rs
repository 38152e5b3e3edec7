//! Two replicas of one service, each with its own client. The first one leads, hands over by stepping down, and the
//! second one finishes the work.
#![allow(clippy::print_stdout)]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold_api::{Error, Lock};
use leasehold_election::{Election, Next};
use leasehold_memory::MemoryStore;
use tokio::task::JoinHandle;

/// The parts of the work that are done, each with the replica that did it.
type Log = Arc<Mutex<Vec<(&'static str, usize)>>>;

/// Starts a replica, which does parts of the work while it leads.
fn replica(lock: Arc<dyn Lock>, name: &'static str, log: &Log) -> JoinHandle<Result<(), Error>> {
    let (election, log) = (Election::new(lock, "work").value(name), Arc::clone(log));
    tokio::spawn(async move {
        let campaign = election.lead_boxed(|term| {
            let log = Arc::clone(&log);
            Box::pin(async move {
                loop {
                    let done = log.lock().map_or(0, |log| log.len());
                    match done {
                        4 => return Ok(Next::Done),
                        // Half of the work is done, so another replica is next.
                        2 if name == "a" => term.step_down(Duration::from_millis(100)),
                        _ => drop(log.lock().map(|mut log| log.push((name, done)))),
                    }
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            })
        });
        campaign.await
    })
}

/// Runs both replicas to the end of the work. Returns the log.
///
/// # Errors
///
/// The error of a campaign.
pub async fn run() -> Result<Vec<(&'static str, usize)>, Error> {
    let (store, log) = (MemoryStore::new(), Log::default());
    let first = replica(Arc::new(store.client()?), "a", &log);
    // The second one comes when the first one leads.
    while log.lock().map_or(true, |log| log.is_empty()) {
        tokio::task::yield_now().await;
    }
    let second = replica(Arc::new(store.client()?), "b", &log);
    for campaign in [first, second] {
        campaign.await.map_err(|_| Error::closed())??;
    }
    Ok(log.lock().map(|log| log.clone()).unwrap_or_default())
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    for (replica, part) in run().await? {
        println!("{replica} does part {part}");
    }
    Ok(())
}
