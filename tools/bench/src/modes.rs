//! Measures readers and permits of one key against callers of different keys in the same rounds, and a writer beside a
//! crowd of readers on each store.

mod one_key;
mod processes;
mod writer;

use std::sync::Arc;

use bench::record::Group;
use leasehold_api::{AcquireOptions, Lock, LockKey, Mode};
use test_servers::Cluster;

use crate::Sections;
use crate::contest::{Contender, Worker};
use crate::postgres;

/// Number of callers at work at the same time.
const TASKS: usize = 64;

/// Runs a child process with readers.
pub(crate) async fn readers(url: &str, process: &str) {
    processes::child(url, process).await;
}

pub(crate) async fn measure(sections: &Sections, group: &mut Group) {
    let cluster = Cluster::start(bench::server());
    let database = postgres::prepared(&cluster).await;
    let server = database.url().strip_prefix("postgres").unwrap();
    let (lease, dir) = (format!("postgres+ttl{server}"), tempfile::tempdir().unwrap());
    if sections.want("one-key") {
        group.note(
            "Each caller holds its lock for one turn of the scheduler, because readers share a hold only while they \
             overlap.",
        );
        one_key::measure("memory", "memory:one-key", [None, None], &mut group.rows).await;
        one_key::measure("lease", &lease, [Some(20.0), Some(0.5)], &mut group.rows).await;
        one_key::permits_of_clients(&lease, &mut group.rows).await;
    }
    if sections.want("processes") {
        processes::measure(database.url(), &mut group.rows).await;
    }
    if sections.want("writer") {
        group.note(
            "A writer's bound is the declared `handover` and `share_for`, plus the longest read of 3 ms.",
        );
        let stores = [
            ("memory", "memory:crowd".to_owned()),
            ("file", format!("file://{}", dir.path().display())),
            ("session", database.url().to_owned()),
            ("row", format!("postgres+row{server}")),
            ("lease", lease),
        ];
        for (store, url) in stores {
            writer::measure(store, &url, &mut group.rows).await;
        }
        writer_on_etcd(group).await;
    }
}

async fn writer_on_etcd(group: &mut Group) {
    if let Some(etcd) = crate::etcd::cluster(group) {
        let url = etcd.url(&test_servers::Etcd::fresh_prefix());
        writer::measure("etcd", &url, &mut group.rows).await;
    }
}

/// Connects `count` clients, each with its own connections.
async fn connect(url: &str, count: usize) -> Vec<Arc<dyn Lock>> {
    let mut clients = Vec::with_capacity(count);
    for _ in 0..count {
        clients.push(leasehold::connect(url).await.unwrap());
    }
    clients
}

async fn close(clients: Vec<Arc<dyn Lock>>) {
    for client in clients {
        client.close().await.unwrap();
    }
}

/// Returns a contender with one caller for each key, on the clients in turn.
fn callers(
    name: &str,
    clients: &[Arc<dyn Lock>],
    mode: Mode,
    keys: impl Iterator<Item = String>,
) -> Contender {
    let caller = |(client, key): (&Arc<dyn Lock>, String)| Caller {
        lock: Arc::clone(client),
        key: LockKey::new(key).unwrap(),
        options: AcquireOptions::new().mode(mode),
    };
    Contender::new(name, "", clients.iter().cycle().zip(keys).map(caller).collect())
}

/// Takes a key, holds it for one turn of the scheduler, and releases it.
struct Caller {
    lock: Arc<dyn Lock>,
    key: LockKey,
    options: AcquireOptions,
}

impl Worker for Caller {
    async fn cycle(&mut self) {
        let guard = self.lock.acquire(&self.key, &self.options).await.unwrap();
        tokio::task::yield_now().await;
        guard.release().await.unwrap();
    }
}
