//! Private etcd clusters of one or three members.

mod alarm;
mod api;
mod backup;
mod certificates;
mod keys;
mod member;
mod options;
mod peers;
mod relay;
mod space;
mod users;

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;

pub use api::{Refusal, Status};
pub use backup::{Backup, Loss};
pub use certificates::Certificates;
pub use keys::Entry;
pub use options::{EtcdOptions, EtcdProgram};
pub use relay::Relay;
pub use space::Counter;
pub use users::EtcdUser;

use crate::{Outcome, admin, or_panic, port::Port};
use api::Api;
use member::{Addresses, Member};
use peers::Peers;

/// Time limit for the election of a leader. It is long because the machine might be busy.
const ELECTED: Duration = Duration::from_secs(120);

/// Interval of polls.
const PAUSE: Duration = Duration::from_millis(20);

/// An etcd cluster with its own data. It ends when its value is dropped or this process ends in any way.
///
/// Members have the numbers from 0. The methods that read or write data call the first member that replies.
#[derive(Debug)]
pub struct Etcd {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    members: Vec<Mutex<Member>>,
    addresses: Vec<Addresses>,
    options: EtcdOptions,
    /// The connections between the members.
    peers: Peers,
    /// The password of `root`. `None` before authentication is turned on.
    root: Mutex<Option<String>>,
}

impl Etcd {
    /// Returns the cluster of one member shared by all tests of this process that only need prefixes.
    ///
    /// # Panics
    ///
    /// As [`Etcd::start`].
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<Etcd> = OnceLock::new();
        SHARED.get_or_init(|| Self::start(EtcdOptions::new()))
    }

    /// Returns the cluster of three members shared by all tests of this process that only need prefixes. It syncs
    /// its disk, as in production, and its elections allow for a slow one.
    ///
    /// # Panics
    ///
    /// As [`Etcd::start`].
    pub fn shared_three() -> &'static Self {
        static SHARED: OnceLock<Etcd> = OnceLock::new();
        SHARED.get_or_init(|| Self::start(EtcdOptions::three().durable()))
    }

    /// Starts a separate cluster, for tests that stop or configure it. Blocks until each member knows the leader.
    ///
    /// # Panics
    ///
    /// If a program is missing (the message names the package to install) or fails.
    #[track_caller]
    #[must_use]
    pub fn start(options: EtcdOptions) -> Self {
        or_panic(Self::try_start(options))
    }

    fn try_start(options: EtcdOptions) -> Outcome<Self> {
        for _ in 0..10 {
            match Self::launch(&options) {
                Ok(etcd) => return Ok(etcd),
                // Retries with other ports, because another process took one of these.
                Err(message) if message.contains("address already in use") => {}
                Err(message) => return Err(message),
            }
        }
        Err("random ports were taken ten times".to_owned())
    }

    fn launch(options: &EtcdOptions) -> Outcome<Self> {
        let peer_ports: Vec<_> = (0..options.members).map(|_| Port::reserve()).collect();
        let peers = Peers::start(&peer_ports)?;
        let addresses: Vec<_> = peer_ports
            .into_iter()
            .zip(peers.ports())
            .map(|(peer, link)| Addresses { client: Port::reserve(), own: Port::reserve(), peer, link })
            .collect();
        let mut members = Vec::new();
        for number in 0..options.members {
            let mut member = Member::new(options, number, &addresses)?;
            member.start()?;
            members.push(Mutex::new(member));
        }
        let inner = Inner { members, addresses, options: options.clone(), peers, root: Mutex::new(None) };
        inner.wait_for_leader(0..options.members)?;
        let etcd = Self { inner: Arc::new(inner) };
        for number in 0..etcd.members() {
            etcd.inner.peers.name(number, etcd.inner.status(number)?.member);
        }
        Ok(etcd)
    }

    /// Returns a prefix for keys that no other test uses.
    #[must_use]
    pub fn fresh_prefix() -> String {
        format!("test-{}", uuid::Uuid::new_v4().simple())
    }

    /// Returns the number of members.
    #[must_use]
    pub fn members(&self) -> usize {
        self.inner.members.len()
    }

    /// Returns `127.0.0.1:PORT` of a member, for clients and a [`crate::Proxy`].
    #[must_use]
    pub fn address(&self, member: usize) -> String {
        format!("127.0.0.1:{}", self.inner.addresses[member].client.number())
    }

    /// Returns the addresses of all members.
    #[must_use]
    pub fn addresses(&self) -> Vec<String> {
        (0..self.members()).map(|member| self.address(member)).collect()
    }

    /// Returns the URL of the store with this prefix of keys, without user and settings.
    #[must_use]
    pub fn url(&self, prefix: &str) -> String {
        let scheme = if self.inner.options.certificates.is_some() { "etcds" } else { "etcd" };
        format!("{scheme}://{}/{prefix}", self.addresses().join(","))
    }

    /// Returns a member's log.
    #[must_use]
    pub fn log(&self, member: usize) -> String {
        self.inner.member(member).log()
    }

    /// Returns the pid of a member, or `None` while it is stopped.
    #[must_use]
    pub fn pid(&self, member: usize) -> Option<u32> {
        let pid = self.inner.member(member).pid()?;
        u32::try_from(pid.as_raw_nonzero().get()).ok()
    }

    /// Returns the state of a member.
    ///
    /// # Errors
    ///
    /// A refusal if the member does not reply.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn status(&self, member: usize) -> Result<Status, Refusal> {
        let inner = self.inner.clone();
        admin::blocking(move || inner.api(member).status()).await
    }

    /// Returns the number of the leader, once the members that reply agree. Of two that regard themselves as leader, the
    /// one in the newer term counts.
    ///
    /// # Panics
    ///
    /// If no leader is elected within two minutes.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn leader(&self) -> usize {
        let inner = self.inner.clone();
        or_panic(admin::blocking(move || inner.leader()).await)
    }

    /// Kills a member, as a crash of its machine does.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn kill(&self, member: usize) {
        self.change(member, |member| member.end(Signal::KILL)).await;
    }

    /// Ends a member in an orderly way.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn stop(&self, member: usize) {
        self.change(member, |member| member.end(Signal::TERM)).await;
    }

    /// Starts a stopped member on the same ports and data. Returns at once, so the member might not reply yet.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn start_again(&self, member: usize) {
        self.change(member, Member::start).await;
    }

    /// Waits until all running members know a leader.
    ///
    /// # Panics
    ///
    /// If it takes more than two minutes.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn ready(&self) {
        let inner = self.inner.clone();
        or_panic(admin::blocking(move || inner.wait_for_leader(inner.running())).await);
    }

    /// Kills all members and starts them again, as a power failure does.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn crash(&self) {
        for member in 0..self.members() {
            self.kill(member).await;
        }
        for member in 0..self.members() {
            self.start_again(member).await;
        }
        self.ready().await;
    }

    /// Freezes a member. Connections stay open without replies.
    pub fn pause(&self, member: usize) {
        self.inner.member(member).signal(Signal::STOP);
    }

    /// Ends [`Self::pause`].
    pub fn resume(&self, member: usize) {
        self.inner.member(member).signal(Signal::CONT);
    }

    /// Separates a member from the other members. Its clients still reach it.
    pub fn isolate(&self, member: usize) {
        self.inner.peers.isolate(member);
    }

    /// Ends [`Self::isolate`] for all members.
    pub fn rejoin(&self) {
        self.inner.peers.rejoin();
    }

    /// Makes the next member the leader. Returns its number, or `None` if an election interfered.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn move_leader(&self) -> Option<usize> {
        let next = (self.leader().await + 1) % self.members();
        self.try_leader(next).await.then_some(next)
    }

    /// Makes this member the leader.
    ///
    /// # Panics
    ///
    /// If the member is not the leader after two minutes.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn make_leader(&self, member: usize) {
        let start = Instant::now();
        while self.leader().await != member {
            self.try_leader(member).await;
            assert!(start.elapsed() < ELECTED, "member {member} never leads");
        }
    }

    async fn try_leader(&self, member: usize) -> bool {
        self.calls(move |inner| {
            let (Ok(leader), Ok(target)) = (inner.leader(), inner.status(member)) else { return false };
            let target = json!({ "targetID": target.member.to_string() });
            inner.api(leader).call("maintenance/transfer-leadership", &target).is_ok()
        })
        .await
    }

    /// Runs blocking work on a member beside the caller's runtime. The work completes even if the caller is dropped.
    async fn change(&self, member: usize, work: impl FnOnce(&mut Member) -> Outcome + Send + 'static) {
        let inner = self.inner.clone();
        or_panic(admin::blocking(move || work(&mut inner.member(member))).await);
    }

    /// Runs blocking calls of the cluster beside the caller's runtime.
    async fn calls<T: Send + 'static>(&self, work: impl FnOnce(&Inner) -> T + Send + 'static) -> T {
        let inner = self.inner.clone();
        admin::blocking(move || work(&inner)).await
    }
}

impl Inner {
    fn member(&self, number: usize) -> MutexGuard<'_, Member> {
        self.members[number].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn running(&self) -> Vec<usize> {
        (0..self.members.len()).filter(|&number| self.member(number).pid().is_some()).collect()
    }

    /// Returns the calls of a member, as `root` if authentication is on.
    fn api(&self, member: usize) -> Api {
        let root = self.root.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Api::new(self.addresses[member].own.number(), root)
    }

    fn status(&self, member: usize) -> Outcome<Status> {
        self.api(member).status().map_err(|refusal| format!("member {member} has no status: {refusal}"))
    }

    fn leader(&self) -> Outcome<usize> {
        let start = Instant::now();
        loop {
            let states: Vec<_> = self
                .running()
                .into_iter()
                .filter_map(|number| Some((number, self.api(number).status().ok()?)))
                .collect();
            let leaders = states.iter().filter(|(_, status)| status.leader == status.member);
            if let Some((number, _)) = leaders.max_by_key(|(_, status)| status.term) {
                return Ok(*number);
            }
            if start.elapsed() > ELECTED {
                return Err(format!("no leader after {ELECTED:?}: {states:?}"));
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Waits until these members know a leader.
    fn wait_for_leader(&self, members: impl IntoIterator<Item = usize>) -> Outcome {
        let start = Instant::now();
        for number in members {
            while !self.api(number).status().is_ok_and(|status| status.leader != 0) {
                self.member(number).check()?;
                if start.elapsed() > ELECTED {
                    return Err(format!("no leader after {ELECTED:?}:\n{}", self.member(number).log()));
                }
                std::thread::sleep(PAUSE);
            }
        }
        Ok(())
    }

    /// Calls the first member that replies.
    fn call(&self, path: &str, body: &serde_json::Value) -> Result<serde_json::Value, Refusal> {
        let mut last = Refusal::no_reply("no member runs".to_owned());
        for number in self.running() {
            match self.api(number).call(path, body) {
                Err(refusal) if refusal.code.is_none() => last = refusal,
                reply => return reply,
            }
        }
        Err(last)
    }
}
