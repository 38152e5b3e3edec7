//! The cluster of the etcd store, and its faults.

use std::time::{Duration, Instant};

use test_servers::{Etcd, EtcdOptions, EtcdUser, Loss, Proxy};

use crate::faults::Fault::{
    self, Compact, Crash, EndLogins, EndSessions, Freeze, IsolateLeader, KillLeader, KillMember, MoveLeader,
    NoQuorum, Restart, StopFollower, StopLeader,
};
use crate::network;

const MEMBERS: usize = 3;
/// Life in seconds of an unused login, about the time for which a worker is stopped.
const LOGIN: u32 = 3;
const USER: &str = "worker";
const PASSWORD: &str = "secret";
const PREFIX: &str = "torture";
/// Keeps the history of half a minute, because the backups of a long campaign would otherwise become large.
const HISTORY: [&str; 4] = ["--auto-compaction-mode", "periodic", "--auto-compaction-retention", "30s"];
/// Number of compactions in one fault.
const COMPACTIONS: u32 = 10;
/// Bound of an election. A busy machine needs more than a second for it.
const ELECTED: Duration = Duration::from_secs(60);
/// Interval of polls.
const PAUSE: Duration = Duration::from_millis(50);

/// A cluster of three members that requires logins. Each member is behind a proxy for the clients.
#[derive(Debug)]
pub(crate) struct Members {
    etcd: Etcd,
    proxies: Vec<Proxy>,
}

impl Members {
    /// Starts a cluster. Returns it with the URL of the store.
    pub(crate) async fn start() -> (Self, String) {
        let options = EtcdOptions::three().token_ttl(LOGIN);
        let options = HISTORY.into_iter().fold(options, EtcdOptions::argument);
        let etcd = tokio::task::spawn_blocking(|| Etcd::start(options)).await.unwrap();
        etcd.require_users(&[EtcdUser::new(USER, PASSWORD, format!("{PREFIX}/"))]).await;
        let mut proxies = Vec::new();
        for address in etcd.addresses() {
            proxies.push(Proxy::start(address).await);
        }
        let hosts: Vec<_> = proxies.iter().map(|proxy| format!("127.0.0.1:{}", proxy.port())).collect();
        let url = format!("etcd://{USER}:{PASSWORD}@{}/{PREFIX}?ttl=2s", hosts.join(","));
        (Self { etcd, proxies }, url)
    }

    /// Causes one fault. Returns whether it took effect.
    pub(crate) async fn disturb(&self, fault: Fault, pause: Duration, random: &mut fastrand::Rng) -> bool {
        let had_connections = self.proxies.iter().any(|proxy| proxy.traffic().open > 0);
        match fault {
            _ if network::is_of_connections(fault) => {
                let proxies = self.some_proxies(random);
                return network::disturb(&proxies, fault, pause).await;
            }
            KillLeader | StopLeader | IsolateLeader => return self.lose_leader(fault, pause).await,
            KillMember => {
                let Some(member) = self.used(random) else { return false };
                self.etcd.kill(member).await;
                tokio::time::sleep(pause).await;
                self.etcd.start_again(member).await;
            }
            StopFollower => {
                let leader = self.etcd.leader().await;
                let used = self.used(random).filter(|member| *member != leader);
                let other = (leader + random.usize(1..MEMBERS)) % MEMBERS;
                return self.stop(&[used.unwrap_or(other)], pause * 2).await;
            }
            NoQuorum => {
                let leader = self.etcd.leader().await;
                // Longer than a lease, for most pauses.
                return self.stop(&[(leader + 1) % MEMBERS, (leader + 2) % MEMBERS], pause * 3).await;
            }
            Freeze => return self.stop(&[0, 1, 2], pause).await,
            MoveLeader => return self.etcd.move_leader().await.is_some(),
            EndSessions => return self.revoke_leases().await > 0,
            Restart => {
                for member in 0..MEMBERS {
                    self.etcd.stop(member).await;
                    self.etcd.start_again(member).await;
                    self.etcd.ready().await;
                }
            }
            Crash => self.etcd.crash().await,
            Compact => return self.compact(pause).await,
            // The same password ends the logins too, and the workers know it.
            EndLogins => self.etcd.change_password(USER, PASSWORD).await,
            _ => unreachable!("{fault:?} is not of etcd"),
        }
        had_connections
    }

    /// Raises the alarm of a full database for a while.
    pub(crate) async fn refuse_writes(&self, time: Duration) {
        self.etcd.set_alarm(true).await;
        tokio::time::sleep(time).await;
        self.etcd.set_alarm(false).await;
    }

    /// Makes a backup, and restores it after a while as operators do. Returns whether the revision went back.
    pub(crate) async fn put_back(&self, time: Duration) -> bool {
        self.etcd.ready().await;
        let backup = self.etcd.backup(Loss::Log).await;
        tokio::time::sleep(time).await;
        let before = self.etcd.revision().await;
        self.etcd.restore(&backup).await;
        self.etcd.revision().await < before
    }

    /// Returns the leases that remain after all clients have ended.
    pub(crate) async fn leftovers(&self) -> Vec<String> {
        self.etcd.ready().await;
        self.etcd.leases().await.iter().map(|lease| format!("lease {lease:x}")).collect()
    }

    /// Returns all proxies, or half of the time only the proxy of a member that clients use.
    fn some_proxies(&self, random: &mut fastrand::Rng) -> Vec<&Proxy> {
        match self.used(random) {
            Some(member) if random.bool() => vec![&self.proxies[member]],
            _ => self.proxies.iter().collect(),
        }
    }

    /// Returns a random member to which clients are connected.
    fn used(&self, random: &mut fastrand::Rng) -> Option<usize> {
        let is_used = |member: &usize| self.proxies[*member].traffic().open > 0;
        let used: Vec<_> = (0..MEMBERS).filter(is_used).collect();
        random.choice(used)
    }

    /// Stops members for a while. Returns whether clients sent requests.
    async fn stop(&self, members: &[usize], time: Duration) -> bool {
        let sent = || self.proxies.iter().map(|proxy| proxy.traffic().bytes_to_server).sum::<u64>();
        members.iter().for_each(|member| self.etcd.pause(*member));
        let before = sent();
        tokio::time::sleep(time).await;
        let was_asked = sent() > before;
        members.iter().for_each(|member| self.etcd.resume(*member));
        was_asked
    }

    /// Takes the leader away until another member has led for `pause`. Returns whether another one led.
    async fn lose_leader(&self, fault: Fault, pause: Duration) -> bool {
        let leader = self.etcd.leader().await;
        let Ok(old) = self.etcd.status(leader).await else { return false };
        match fault {
            KillLeader => self.etcd.kill(leader).await,
            StopLeader => self.etcd.pause(leader),
            _ => self.etcd.isolate(leader),
        }
        let has_led = self.another_leads((leader + 1) % MEMBERS, old.member).await;
        tokio::time::sleep(pause).await;
        match fault {
            KillLeader => self.etcd.start_again(leader).await,
            StopLeader => self.etcd.resume(leader),
            _ => self.etcd.rejoin(),
        }
        has_led
    }

    /// Waits until `member` knows another leader than the one with the id `old`, for a limited time.
    async fn another_leads(&self, member: usize, old: u64) -> bool {
        let begun = Instant::now();
        while begun.elapsed() < ELECTED {
            let status = self.etcd.status(member).await;
            if status.is_ok_and(|status| status.leader != 0 && status.leader != old) {
                return true;
            }
            tokio::time::sleep(PAUSE).await;
        }
        false
    }

    async fn revoke_leases(&self) -> usize {
        let mut revoked = 0;
        for lease in self.etcd.leases().await {
            revoked += usize::from(self.etcd.revoke(lease).await);
        }
        revoked
    }

    /// Removes the history several times. Returns whether revisions came between.
    async fn compact(&self, time: Duration) -> bool {
        let first = self.etcd.compact().await;
        let mut last = first;
        for _ in 1..COMPACTIONS {
            tokio::time::sleep(time / COMPACTIONS).await;
            last = self.etcd.compact().await;
        }
        last > first
    }
}
