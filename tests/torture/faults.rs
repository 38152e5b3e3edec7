//! Faults of workers, connections and the server, and the check of their effect.

use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;
use test_servers::StopMode;
use test_setup::torture as names;

use crate::disk::Disk;
use crate::members::Members;
use crate::processes::{Commands, Workers};
use crate::server::Server;
use crate::{network, record, register};

/// The faults, in the order of their names. Each comment ends with the condition under which the fault took effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fault {
    /// Kills a worker. Effect: it was in a section.
    Kill,
    /// Kills a command `leasehold run`. Effect: it was in a section.
    KillCommand,
    /// Stops a worker for longer than a lease. Effect: it was in a section.
    Stop,
    /// Ends all workers and starts others. Effect: each had acquired a lock.
    End,
    /// Ends the server's sessions. Effect: there were some.
    EndSessions,
    /// Restarts the server. Effect: it had connections.
    Restart,
    /// Kills the server and starts it with recovery. Effect: it had connections.
    Crash,
    /// Stops the server for a while. Effect: a request was sent during the stop.
    Freeze,
    /// Closes all connections. Effect: there were some.
    Reset,
    /// Closes all connections and discards data in transit. Effect: there was some.
    Cut,
    /// Holds all data for a while. Effect: some was sent.
    Silence,
    /// Discards a reply of the server. Effect: one was discarded.
    LoseReply,
    /// Delays all data. Effect: there was a round trip.
    Delay,
    /// Promotes a standby, half of the time without the last commits. Effect: the server had connections.
    Promote,
    /// Makes all writes to the disk fail. Effect: a write was tried.
    DiskFull,
    /// Moves the server's clock. Effect: the server saw the step. Without `faketime`, moves the ends of existing leases.
    ServerClock,
    /// Moves a worker's wall clock. Effect: the worker saw the step.
    ClientClock,
    /// Kills the leader of a cluster and starts it after a while. Effect: another member led.
    KillLeader,
    /// Kills a member that clients use, and starts it after a while. Effect: there was one.
    KillMember,
    /// Stops the leader for a while. Effect: another member led.
    StopLeader,
    /// Stops a follower for a while, if possible a used one. Effect: a request was sent during the stop.
    StopFollower,
    /// Cuts the leader off from its peers but not from the clients. Effect: another member led.
    IsolateLeader,
    /// Stops all followers, so no majority is left. Effect: a request was sent during the stop.
    NoQuorum,
    /// Makes another member the leader. Effect: it led.
    MoveLeader,
    /// Removes the history up to the newest revision, several times. Effect: new revisions came between.
    Compact,
    /// Raises the alarm of a full database for a while. Effect: a worker's call failed.
    NoSpace,
    /// Ends all logins of the clients. Effect: clients were connected.
    EndLogins,
    /// Restores a backup while the clients go on. Effect: the revision went back.
    PutBack,
}

use Fault::{
    ClientClock, Compact, Crash, Cut, Delay, DiskFull, End, EndLogins, EndSessions, Freeze, IsolateLeader,
    Kill, KillCommand, KillLeader, KillMember, LoseReply, MoveLeader, NoQuorum, NoSpace, Promote, PutBack,
    Reset, Restart, ServerClock, Silence, Stop, StopFollower, StopLeader,
};

impl Fault {
    const ALL: [Self; names::FAULTS.len()] = [
        Kill,
        KillCommand,
        Stop,
        End,
        EndSessions,
        Restart,
        Crash,
        Freeze,
        Reset,
        Cut,
        Silence,
        LoseReply,
        Delay,
        Promote,
        DiskFull,
        ServerClock,
        ClientClock,
        KillLeader,
        KillMember,
        StopLeader,
        StopFollower,
        IsolateLeader,
        NoQuorum,
        MoveLeader,
        Compact,
        NoSpace,
        EndLogins,
        PutBack,
    ];

    pub(crate) fn name(self) -> &'static str {
        names::FAULTS[self as usize]
    }

    pub(crate) fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|fault| fault.name() == name)
    }
}

/// Faults of the file store, which has no server and no network.
pub(crate) const OF_FILES: &[Fault] = &[Kill, KillCommand, Stop, End, DiskFull, ClientClock];
/// Faults of the row store. Omitted are faults after which a row may stay locked until an operator releases it, because
/// there is no operator here: deaths of holders, a fail-over, and outages of more than ten seconds.
pub(crate) const OF_ROWS: &[Fault] =
    &[Stop, End, EndSessions, Freeze, Reset, Cut, Silence, LoseReply, Delay, ServerClock, ClientClock];
/// Faults of advisory locks and leases.
pub(crate) const OF_POSTGRES: &[Fault] = &[
    Kill,
    KillCommand,
    Stop,
    End,
    EndSessions,
    Restart,
    Crash,
    Freeze,
    Reset,
    Cut,
    Silence,
    LoseReply,
    Delay,
    Promote,
    DiskFull,
    ServerClock,
    ClientClock,
];
/// Faults of etcd. Omitted are the server's clock, because the program does not use the library that `faketime` replaces,
/// and a full disk, because a member ends by it.
pub(crate) const OF_ETCD: &[Fault] = &[
    Kill,
    KillCommand,
    Stop,
    End,
    EndSessions,
    Restart,
    Crash,
    Freeze,
    Reset,
    Cut,
    Silence,
    LoseReply,
    Delay,
    ClientClock,
    KillLeader,
    KillMember,
    StopLeader,
    StopFollower,
    IsolateLeader,
    NoQuorum,
    MoveLeader,
    Compact,
    NoSpace,
    EndLogins,
    PutBack,
];
/// Faults of etcd in a short run. An election takes a second and a lost quorum more, so all of them would take longer than
/// the other stores together.
pub(crate) const OF_ETCD_IN_SHORT: &[Fault] =
    &[Kill, Stop, LoseReply, KillLeader, IsolateLeader, Compact, EndLogins, PutBack];

/// Faults that end sessions. An advisory lock ends with its session, and its holder notices a moment later. A server whose
/// clock jumps forward ends sessions because they seem silent for too long.
pub(crate) const THAT_END_SESSIONS: &[Fault] =
    &[EndSessions, Restart, Crash, Reset, Cut, LoseReply, Promote, DiskFull, ServerClock];
/// Faults that end leases before their holders notice. After any other fault, such as a stopped worker or an outage, the
/// holder knows the end of its lease.
pub(crate) const THAT_END_LEASES: &[Fault] = &[Promote, ServerClock];
/// Faults that end the leases of etcd before their holders notice: an operator revokes them, or a backup lacks them.
pub(crate) const THAT_REVOKE_LEASES: &[Fault] = &[EndSessions, PutBack];

/// Time for which a worker is stopped, longer than its lease.
const STOPPED: Duration = Duration::from_millis(2500);
/// Time for which a fault waits for its effect.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// The targets of faults.
#[derive(Debug)]
pub(crate) struct Scene<'a> {
    pub(crate) workers: Workers,
    pub(crate) commands: Commands,
    /// The server, if it is Postgres.
    pub(crate) server: Option<Server>,
    /// The servers, if they are etcd.
    pub(crate) members: Option<Members>,
    pub(crate) disk: Option<Disk>,
    /// Whether the store has leases, so a stopped holder loses its lock.
    pub(crate) has_leases: bool,
    /// Directory of the records.
    pub(crate) dir: &'a Path,
}

impl Scene<'_> {
    /// Causes one fault. Returns whether it took effect.
    pub(crate) async fn disturb(&mut self, fault: Fault, random: &mut fastrand::Rng) -> bool {
        let pause = Duration::from_millis(random.u64(100..1500));
        let victim = Workers::victim(random);
        match fault {
            Kill => {
                // Half of the kills wait for a section.
                if random.bool() {
                    self.workers.aim(victim).await;
                }
                self.workers.kill(victim)
            }
            KillCommand => self.commands.kill(random).await,
            Stop => {
                self.workers.aim(victim).await;
                self.workers.signal(victim, Signal::STOP);
                tokio::time::sleep(STOPPED).await;
                if self.has_leases {
                    register::settle(self.dir, PATIENCE).await;
                }
                let was_in_section = self.workers.is_in_section(victim);
                self.workers.signal(victim, Signal::CONT);
                was_in_section
            }
            End => {
                let have_worked = self.workers.have_worked();
                self.workers.end();
                self.workers.start_all();
                have_worked
            }
            ClientClock => {
                let known = self.workers.clock_jumps();
                // Workers record steps of a minute or more.
                let seconds = random.i64(100..100_000);
                self.workers.step_clock(if random.bool() { seconds } else { -seconds });
                until(|| self.workers.clock_jumps() > known).await
            }
            DiskFull if self.disk.is_some() => self.fill_disk(pause).await,
            _ if self.members.is_some() => self.disturb_members(fault, pause, random).await,
            _ => self.disturb_server(fault, pause, random).await,
        }
    }

    async fn fill_disk(&self, pause: Duration) -> bool {
        let (disk, before) = (self.disk.as_ref().unwrap(), failures(self.dir));
        disk.fill();
        tokio::time::sleep(pause).await;
        disk.free();
        failures(self.dir) > before
    }

    async fn disturb_members(&self, fault: Fault, pause: Duration, random: &mut fastrand::Rng) -> bool {
        let members = self.members.as_ref().unwrap();
        match fault {
            NoSpace => {
                let before = failures(self.dir);
                // Longer than the wait budget of a worker, after which its call fails.
                members.refuse_writes(Duration::from_secs(1) + pause).await;
                failures(self.dir) > before
            }
            PutBack => {
                // A restore shows by the writes that it loses, which must include some of this life of the cluster.
                register::settle(self.dir, PATIENCE).await;
                members.put_back(Duration::from_secs(1) + pause).await
            }
            _ => members.disturb(fault, pause, random).await,
        }
    }

    async fn disturb_server(&mut self, fault: Fault, pause: Duration, random: &mut fastrand::Rng) -> bool {
        let server = self.server.as_mut().unwrap();
        let had_connections = server.has_connections();
        match fault {
            _ if network::is_of_connections(fault) => {
                return network::disturb(&[&server.proxy], fault, pause).await;
            }
            EndSessions => return server.end_sessions().await > 0,
            Restart => server.cluster.restart(StopMode::Fast).await,
            Crash => server.crash().await,
            Freeze => {
                server.cluster.pause();
                let asked = server.proxy.traffic().bytes_to_server;
                tokio::time::sleep(pause).await;
                let was_asked = server.proxy.traffic().bytes_to_server > asked;
                server.cluster.resume();
                return was_asked;
            }
            Promote => server.fail_over(random.bool().then_some(pause / 2)).await,
            DiskFull => return server.fill_disk(pause).await,
            ServerClock => {
                // Steps back by only 3 s, because a longer step would exceed the bounds of leases.
                return server.step_clock(if random.bool() { 3600 } else { -3 }).await;
            }
            _ => unreachable!("{fault:?} is not of Postgres"),
        }
        had_connections
    }
}

/// Returns the number of failed calls of workers.
fn failures(dir: &Path) -> usize {
    records(dir).iter().map(|text| record::read(text).failures.len()).sum()
}

/// Returns the texts of all records.
pub(crate) fn records(dir: &Path) -> Vec<String> {
    let paths = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let records = paths.filter(|path| path.extension().is_some_and(|extension| extension == "record"));
    records.map(|path| std::fs::read_to_string(path).unwrap()).collect()
}

/// Waits until `is_so`, at most [`PATIENCE`]. Returns whether it became so.
pub(crate) async fn until(mut is_so: impl FnMut() -> bool) -> bool {
    let begun = std::time::Instant::now();
    while !is_so() {
        if begun.elapsed() > PATIENCE {
            return false;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    true
}

#[test]
fn faults_and_their_names_are_in_the_same_order() {
    for fault in Fault::ALL {
        let name = fault.name().replace('-', "");
        assert_eq!(name, format!("{fault:?}").to_lowercase());
        assert_eq!(Fault::of_name(fault.name()), Some(fault));
    }
    assert_eq!(Fault::of_name("flood"), None);
}

#[test]
fn each_fault_happens_to_a_store_and_those_of_a_short_run_in_a_long_one_too() {
    let is_caused =
        |fault: &Fault| [OF_FILES, OF_POSTGRES, OF_ETCD].iter().any(|faults| faults.contains(fault));
    assert!(Fault::ALL.iter().all(is_caused));
    assert!(OF_ETCD_IN_SHORT.iter().all(|fault| OF_ETCD.contains(fault)));
}
