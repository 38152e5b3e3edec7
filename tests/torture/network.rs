//! Faults of the connections between clients and servers.

use std::time::Duration;

use test_servers::{Proxy, Traffic};

use crate::faults::Fault::{self, Cut, Delay, LoseReply, Reset, Silence};
use crate::faults::until;

/// Returns whether a fault is one of connections.
pub(crate) fn is_of_connections(fault: Fault) -> bool {
    matches!(fault, Reset | Cut | Silence | LoseReply | Delay)
}

/// Causes one fault of the connections through these proxies. Returns whether it took effect.
pub(crate) async fn disturb(proxies: &[&Proxy], fault: Fault, pause: Duration) -> bool {
    let count = |of: fn(Traffic) -> u64| proxies.iter().map(|proxy| of(proxy.traffic())).sum::<u64>();
    let all = |change: fn(&Proxy)| proxies.iter().for_each(|proxy| change(proxy));
    let had_connections = count(|seen| seen.open) > 0;
    let (held, dropped) = (count(|seen| seen.held), count(|seen| seen.dropped_replies));
    let round_trips = count(|seen| seen.round_trips);
    match fault {
        Reset => {
            all(Proxy::reset);
            all(Proxy::restore);
            had_connections
        }
        Cut => {
            all(Proxy::stall);
            tokio::time::sleep(pause / 4).await;
            all(Proxy::reset);
            let has_held = count(|seen| seen.held) > held;
            all(Proxy::restore);
            had_connections && has_held
        }
        Silence => {
            all(Proxy::stall);
            tokio::time::sleep(pause).await;
            all(Proxy::restore);
            count(|seen| seen.held) > held
        }
        LoseReply => {
            all(Proxy::drop_next_reply);
            let is_lost = until(|| count(|seen| seen.dropped_replies) > dropped).await;
            all(Proxy::restore);
            is_lost
        }
        Delay => {
            all(|proxy| proxy.delay(Duration::from_millis(20)));
            tokio::time::sleep(pause).await;
            all(|proxy| proxy.delay(Duration::ZERO));
            count(|seen| seen.round_trips) > round_trips
        }
        _ => unreachable!("{fault:?} is not of connections"),
    }
}
