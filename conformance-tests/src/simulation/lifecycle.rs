//! The end of clients: their death, close or drop, and the checks afterwards.

use std::sync::Arc;

use leasehold_api::{ErrorKind, HolderId, Lock as _};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout};

use super::client::InTurn;
use super::judge::Judge;
use super::network::NetworkLink;
use super::requests::ASKS_ONCE_MORE;
use super::stores::{ClientEnvironment, SimulatedClient};
use super::table::{HoldKind, Table};

/// A client that is neither closed nor dropped nor dead.
pub(super) struct RunningClient {
    pub(super) number: u64,
    pub(super) environment: ClientEnvironment,
    pub(super) connection: SimulatedClient,
    pub(super) callers: Vec<JoinHandle<()>>,
}

/// Leaks a dead client, so that none of its destructors runs.
pub(super) fn forget(client: RunningClient) {
    let RunningClient { callers, connection, .. } = client;
    drop(callers);
    std::mem::forget(connection.lock);
    std::mem::forget(connection.engine);
}

pub(super) async fn close(client: RunningClient, judge: Arc<Judge>) {
    let RunningClient { number, environment, connection, callers } = client;
    let (turns, begun) = (Arc::clone(&environment.turns), Instant::now());
    let closing = InTurn::new(&turns, async {
        let most = judge.bounds.close;
        let twice = async { tokio::join!(connection.lock.close(), connection.lock.close()) };
        match timeout(most, twice).await {
            Ok((once, again)) => {
                let fails =
                    [once, again].into_iter().filter_map(Result::err).find(|e| e.kind() == ErrorKind::Closed);
                if let Some(error) = fails {
                    judge.violation("C17", format!("who closes what is being closed is told {error}"));
                }
                judge.closed(number);
            }
            Err(_) => judge.violation("C17", format!("closing takes longer than {:?}", begun.elapsed())),
        }
        drop(connection);
    });
    closing.await;
    for caller in callers {
        let _ = caller.await;
    }
    check_nothing_left(number, &environment.link, begun, &judge).await;
}

pub(super) async fn drop_client(client: RunningClient, judge: Arc<Judge>) {
    let RunningClient { number, environment, connection, callers } = client;
    for caller in callers {
        caller.abort();
        let _ = caller.await;
    }
    drop(connection);
    check_nothing_left(number, &environment.link, Instant::now(), &judge).await;
}

/// Checks that a client that was closed or dropped at `begun` left no latch (a hold without lease or session) at the
/// store, if it could reach the store in time. Leases and sessions are not checked, because a late request might have
/// been granted and they end by themselves.
async fn check_nothing_left(client: u64, link: &NetworkLink, begun: Instant, judge: &Judge) {
    let latch = judge.truth.as_ref().filter(|table| table.kind == HoldKind::Latch);
    if let Some(table) = latch {
        let begun = judge.gone_since(client).unwrap_or(begun);
        sleep_until(begun + judge.bounds.close).await;
        let asked_until = begun + judge.bounds.close.mul_f64(0.75);
        let in_time = link.undisturbed_since().max(begun) + ASKS_ONCE_MORE < asked_until;
        let left = if in_time { table.held_by(client) } else { Vec::new() };
        for (key, holder) in left.into_iter().filter(|(_, holder)| !judge.was_lost(*holder)) {
            let what = format!("{key} is still held by {holder} of a client that has gone and could say so");
            judge.violation("C17", what);
        }
    }
    judge.client_gone(client);
}

/// Ends the holds that `such` selects, as an operator does.
pub(super) fn force_release_where(table: &Table, such: impl Fn(HolderId, bool) -> bool) {
    for (key, holder, is_dead) in table.held() {
        if such(holder, is_dead) {
            table.force_holder(&key, holder);
        }
    }
}
