//! Measures readers and permits of one key in one process, against exclusive callers of as many keys.

use std::iter::repeat_n;
use std::sync::Arc;
use std::time::Duration;

use bench::report::{Row, row};
use futures_util::future::try_join_all;
use leasehold_api::{AcquireOptions, HoldState, Lock, LockKey, Mode};

use crate::contest::{Contender, compete};
use crate::modes::{TASKS, callers, close, connect};

const ROUNDS: usize = 7;
const ROUND: Duration = Duration::from_secs(1);
/// How many times the holds in the store are counted.
const COUNTS: usize = 5;
const PERMITS: Mode = Mode::Permit { of: TASKS as u32 };

/// Measures callers of one client. `least` contains the least ratios of readers and of permits.
pub(crate) async fn measure(
    store: &str,
    url: &str,
    [least, least_of_permits]: [Option<f64>; 2],
    rows: &mut Vec<Row>,
) {
    println!("{TASKS} callers of one client, {store}");
    let (clients, other) = (connect(url, 1).await, connect(url, 1).await);
    let holds = most_holds(&clients[0], &other[0]).await;
    let mut contenders = [
        exclusive(&clients),
        callers("readers", &clients, Mode::Shared, keys("read")),
        callers("permits", &clients, PERMITS, keys("permits")),
    ];
    let entries = compete(&mut contenders, ROUNDS, ROUND).await;
    let [floor, readers, permits] = [0, 1, 2].map(|at| &entries[at].series);
    let mut shared = row(&format!("{TASKS} readers of one key, {store}"), readers, floor, least);
    shared.measured += &format!(", {holds} hold(s) in the store");
    shared.goal = least.map_or_else(|| "one hold".to_owned(), |least| format!("at least {least}, one hold"));
    shared.met = Some(shared.met.unwrap_or(true) && holds == 1);
    rows.push(shared);
    let work = format!("permits of {TASKS} on one key, {store}");
    rows.push(row(&work, permits, floor, least_of_permits));
    close(clients).await;
    close(other).await;
}

/// Measures permits with a client for each caller, because callers of one client request a key one after the other.
pub(crate) async fn permits_of_clients(url: &str, rows: &mut Vec<Row>) {
    println!("{TASKS} permits, each of another client");
    let clients = connect(url, TASKS).await;
    let mut contenders =
        [exclusive(&clients), callers("permits", &clients, PERMITS, keys("permits of clients"))];
    let entries = compete(&mut contenders, ROUNDS, ROUND).await;
    let work = format!("permits of {TASKS} on one key, a client for each, lease");
    rows.push(row(&work, &entries[1].series, &entries[0].series, None));
    close(clients).await;
}

/// Returns the floor: exclusive callers, each with its own key.
fn exclusive(clients: &[Arc<dyn Lock>]) -> Contender {
    let keys = (0..TASKS).map(|task| format!("own:{task}"));
    callers(&format!("{TASKS} keys, exclusive"), clients, Mode::Exclusive, keys)
}

fn keys(key: &str) -> impl Iterator<Item = String> {
    repeat_n(key.to_owned(), TASKS)
}

/// Lets all readers of `client` hold a key at once, several times. Returns the largest number of holds that the `other`
/// client then finds in the store.
async fn most_holds(client: &Arc<dyn Lock>, other: &Arc<dyn Lock>) -> usize {
    let (key, options) = (LockKey::new("counted").unwrap(), AcquireOptions::new().mode(Mode::Shared));
    // Prepares the statements, because a slow first call is not shared.
    client.acquire(&key, &options).await.unwrap().release().await.unwrap();
    let mut most = 0_usize;
    for _ in 0..COUNTS {
        let guards = try_join_all((0..TASKS).map(|_| client.acquire(&key, &options))).await.unwrap();
        let found = other.admin().unwrap().inspect(&key).await.unwrap();
        most = most.max(found.holders.iter().filter(|hold| hold.state == HoldState::Held).count());
        for guard in guards {
            guard.release().await.unwrap();
        }
    }
    most
}
