//! Locks of etcd's own service `v3lock`, as a program without this library uses them.

use crate::contest::Worker;
use crate::etcd::wire::Member;

/// Lease of all locks of a program, seconds. It outlasts the measurement, so nothing renews it.
const LONG: i64 = 3600;
/// Lease of `etcdctl lock`, seconds.
const OF_COMMAND: i64 = 10;

/// Returns tasks that share one connection and one lease.
pub(crate) async fn v3lock(address: &str, tasks: usize) -> Vec<V3Lock> {
    let mut member = Member::connect(address).await;
    let lease = member.grant(LONG).await;
    (0..tasks).map(|task| V3Lock { member: member.clone(), name: name("v3lock", task), lease }).collect()
}

/// Returns tasks that share one connection, and take a lease for each lock.
pub(crate) async fn command(address: &str, tasks: usize) -> Vec<OfCommand> {
    let member = Member::connect(address).await;
    (0..tasks).map(|task| OfCommand { member: member.clone(), name: name("command", task) }).collect()
}

fn name(of: &str, task: usize) -> Vec<u8> {
    format!("{of}/{task}").into_bytes()
}

pub(crate) struct V3Lock {
    member: Member,
    name: Vec<u8>,
    lease: i64,
}

impl Worker for V3Lock {
    async fn cycle(&mut self) {
        let key = self.member.lock(&self.name, self.lease).await;
        self.member.unlock(key).await;
    }
}

/// The calls of `etcdctl lock` without its process. The command leaves the revoke to the server, at the lease's end. Here it
/// is part of the cycle, because the leases of one contender would end in the round of another.
pub(crate) struct OfCommand {
    member: Member,
    name: Vec<u8>,
}

impl Worker for OfCommand {
    async fn cycle(&mut self) {
        let lease = self.member.grant(OF_COMMAND).await;
        let key = self.member.lock(&self.name, lease).await;
        self.member.unlock(key).await;
        self.member.revoke(lease).await;
    }
}
