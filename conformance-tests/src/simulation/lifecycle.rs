//! How clients end: they die, are closed or are dropped, and what they must not leave behind.

use std::sync::Arc;

use leasehold_api::{ErrorKind, Lock as _};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout};

use super::client::InTurn;
use super::judge::Book;
use super::network::Wire;
use super::requests::ASKS_ONCE_MORE;
use super::stores::{ClientEnvironment, SimulatedClient};
use super::table::Kind;

/// A client, until it is closed, dropped or dies.
pub(super) struct Client {
    pub(super) number: u64,
    pub(super) seat: ClientEnvironment,
    pub(super) connection: SimulatedClient,
    pub(super) callers: Vec<JoinHandle<()>>,
}

/// What died stays where it is: nothing of it is dropped before the schedule ends.
pub(super) fn forget(client: Client) {
    let Client { callers, connection, .. } = client;
    drop(callers);
    std::mem::forget(connection.lock);
    std::mem::forget(connection.engine);
}

pub(super) async fn close(client: Client, book: Arc<Book>) {
    let Client { number, seat, connection, callers } = client;
    let (turns, begun) = (Arc::clone(&seat.turns), Instant::now());
    let closing = InTurn::new(&turns, async {
        let most = book.bounds.close;
        let twice = async { tokio::join!(connection.lock.close(), connection.lock.close()) };
        match timeout(most, twice).await {
            Ok((once, again)) => {
                let fails =
                    [once, again].into_iter().filter_map(Result::err).find(|e| e.kind() == ErrorKind::Closed);
                if let Some(error) = fails {
                    book.wrong("C17", format!("who closes what is being closed is told {error}"));
                }
                book.closed(number);
            }
            Err(_) => book.wrong("C17", format!("closing takes longer than {:?}", begun.elapsed())),
        }
        drop(connection);
    });
    closing.await;
    for caller in callers {
        let _ = caller.await;
    }
    has_let_go(number, &seat.wire, begun, &book).await;
}

pub(super) async fn drop_client(client: Client, book: Arc<Book>) {
    let Client { number, seat, connection, callers } = client;
    for caller in callers {
        caller.abort();
        let _ = caller.await;
    }
    drop(connection);
    has_let_go(number, &seat.wire, Instant::now(), &book).await;
}

/// A client that was closed or dropped at `begun` leaves nothing behind, if the store could be told in time. Of what ends
/// by itself it cannot be said: a late request may have been granted.
async fn has_let_go(client: u64, wire: &Wire, begun: Instant, book: &Book) {
    let latch = book.truth.as_ref().filter(|table| table.kind == Kind::Latch);
    if let Some(table) = latch {
        sleep_until(begun + book.bounds.close).await;
        let asked_until = begun + book.bounds.close.mul_f64(0.75);
        let in_time = wire.untroubled_since().max(begun) + ASKS_ONCE_MORE < asked_until;
        let left = if in_time { table.held_by(client) } else { Vec::new() };
        for (key, holder) in left.into_iter().filter(|(_, holder)| !book.was_lost(*holder)) {
            let what = format!("{key} is still held by {holder} of a client that has gone and could say so");
            book.wrong("C17", what);
        }
    }
    book.goes(client);
}
