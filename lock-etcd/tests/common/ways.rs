//! Proxies between one client and the members, to hold its requests back.

use std::time::Duration;

use test_servers::{Etcd, Proxy};

/// Pause between the held pieces of requests when they are delivered.
const GAP: Duration = Duration::from_millis(50);

/// A proxy in front of each member.
#[derive(Debug)]
pub(crate) struct Ways(Vec<Proxy>);

impl Ways {
    /// Starts the proxies. A single member gets two, because a client whose way is held back needs another.
    pub(crate) async fn to(etcd: &Etcd) -> Self {
        let mut addresses = etcd.addresses();
        if addresses.len() == 1 {
            addresses.extend(etcd.addresses());
        }
        let mut proxies = Vec::new();
        for address in addresses {
            proxies.push(Proxy::start(address).await);
        }
        Self(proxies)
    }

    /// Returns the addresses that the client uses as members.
    pub(crate) fn addresses(&self) -> Vec<String> {
        self.0.iter().map(|proxy| format!("127.0.0.1:{}", proxy.port())).collect()
    }

    /// Returns the number of the proxy with the most requests so far, and the proxy.
    pub(crate) fn busiest(&self) -> (usize, &Proxy) {
        let busiest = self.0.iter().enumerate().max_by_key(|(_, proxy)| proxy.traffic().bytes_to_server);
        busiest.unwrap()
    }

    /// Holds the requests on the way that the client uses, on its open connections.
    pub(crate) fn hold_back(&self) {
        self.busiest().1.stall_open();
    }

    /// Returns how many pieces of requests were held back.
    pub(crate) fn held_back(&self) -> u64 {
        self.0.iter().map(|proxy| proxy.traffic().held).sum()
    }

    /// Delivers the held requests.
    pub(crate) fn deliver(&self) {
        self.0.iter().for_each(|proxy| proxy.restore_apart(GAP));
    }
}
