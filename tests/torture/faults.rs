//! What is done to workers, connections and the server, and whether it took effect.

use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;
use test_servers::StopMode;
use test_setup::torture as names;

use crate::disk::Disk;
use crate::processes::{Commands, Workers};
use crate::record;
use crate::register;
use crate::server::Server;

/// In the order of their names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fault {
    /// A worker is killed; took effect if it had begun a section.
    Kill,
    /// The same for the real command.
    KillCommand,
    /// A worker stands still for longer than a lease; in a section.
    Stop,
    /// All workers end, and others begin; after they have worked.
    End,
    /// The server ends its sessions; of which there were some.
    EndSessions,
    /// The server ends and begins again; while it had sessions.
    Restart,
    /// Killed, with the next start recovering.
    Crash,
    /// The server stands still; and was asked meanwhile.
    Freeze,
    /// Connections end; that is, there were some.
    Reset,
    /// What was on its way when they end does not arrive; there was something.
    Cut,
    /// Nothing arrives for a while; though something was sent.
    Silence,
    /// The server has done it, and its answer does not arrive.
    LoseReply,
    /// All takes longer; and something was said.
    Delay,
    /// A standby takes over, half of the time without the last commits; there were sessions.
    Promote,
    /// Nothing more can be written; and that was tried.
    DiskFull,
    /// The server's clock is set; and it has seen so. Without `faketime` the ends of leases are moved; there were some.
    ServerClock,
    /// A worker's wall clock is set; and it has seen so.
    ClientClock,
}

use Fault::{
    ClientClock, Crash, Cut, Delay, DiskFull, End, EndSessions, Freeze, Kill, KillCommand, LoseReply,
    Promote, Reset, Restart, ServerClock, Silence, Stop,
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
    ];

    pub(crate) fn name(self) -> &'static str {
        names::FAULTS[self as usize]
    }

    pub(crate) fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|fault| fault.name() == name)
    }
}

/// For files, which no server and no network can disturb.
pub(crate) const OF_FILES: &[Fault] = &[Kill, KillCommand, Stop, End, DiskFull, ClientClock];
/// A mutex row whose holder has died, or was lost for a fail-over or a server that was away for more than ten seconds (as
/// a restart on a busy machine), stays shut until an operator opens it, and there is none here.
pub(crate) const OF_ROWS: &[Fault] =
    &[Stop, End, EndSessions, Freeze, Reset, Cut, Silence, LoseReply, Delay, ServerClock, ClientClock];
/// Of advisory locks and leases.
pub(crate) const ALL: &[Fault] = &Fault::ALL;

/// With its session an advisory lock ends, and its holder learns of it a moment later. A server whose clock is set forward
/// finds that sessions have been silent for too long.
pub(crate) const THAT_END_SESSIONS: &[Fault] =
    &[EndSessions, Restart, Crash, Reset, Cut, LoseReply, Promote, DiskFull, ServerClock];
/// All else a lease survives, or ends as its holder knows: that he was stopped, or the server away, is no excuse.
pub(crate) const THAT_END_LEASES: &[Fault] = &[Promote, ServerClock];

/// How long a worker is stopped: for longer than its lease.
const STOPPED: Duration = Duration::from_millis(2500);
/// How long a fault waits for what it is about.
const PATIENCE: Duration = Duration::from_secs(5);

/// What faults happen to.
#[derive(Debug)]
pub(crate) struct Scene<'a> {
    pub(crate) workers: Workers,
    pub(crate) commands: Commands,
    pub(crate) server: Option<Server>,
    pub(crate) disk: Option<Disk>,
    /// Whether a holder that stands still is overtaken.
    pub(crate) has_leases: bool,
    /// Where the records are.
    pub(crate) dir: &'a Path,
}

impl Scene<'_> {
    /// Lets one fault happen; whether it took effect.
    pub(crate) async fn disturb(&mut self, fault: Fault, random: &mut fastrand::Rng) -> bool {
        let pause = Duration::from_millis(random.u64(100..1500));
        let victim = Workers::victim(random);
        match fault {
            Kill => {
                // At any moment, or in a section.
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
                // Seen from a minute on.
                let seconds = random.i64(100..100_000);
                self.workers.step_clock(if random.bool() { seconds } else { -seconds });
                until(|| self.workers.clock_jumps() > known).await
            }
            DiskFull if self.server.is_none() => self.fill_disk(pause).await,
            _ => self.disturb_server(fault, pause, random).await,
        }
    }

    async fn fill_disk(&self, pause: Duration) -> bool {
        let (disk, failures) = (self.disk.as_ref().unwrap(), self.failures());
        disk.fill();
        tokio::time::sleep(pause).await;
        disk.free();
        self.failures() > failures
    }

    /// How many calls of workers have failed.
    fn failures(&self) -> usize {
        records(self.dir).iter().map(|text| record::read(text).failures.len()).sum()
    }

    async fn disturb_server(&mut self, fault: Fault, pause: Duration, random: &mut fastrand::Rng) -> bool {
        let server = self.server.as_mut().unwrap();
        let had_connections = server.has_connections();
        let before = server.proxy.traffic();
        match fault {
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
            Reset => {
                server.proxy.reset();
                server.proxy.restore();
            }
            Cut => {
                server.proxy.stall();
                tokio::time::sleep(pause / 4).await;
                server.proxy.reset();
                let held = server.proxy.traffic().held;
                server.proxy.restore();
                return had_connections && held > before.held;
            }
            Silence => {
                server.proxy.stall();
                tokio::time::sleep(pause).await;
                server.proxy.restore();
                return server.proxy.traffic().held > before.held;
            }
            LoseReply => {
                server.proxy.drop_next_reply();
                let lost = || server.proxy.traffic().dropped_replies > before.dropped_replies;
                let is_lost = until(lost).await;
                server.proxy.restore();
                return is_lost;
            }
            Delay => {
                server.proxy.delay(Duration::from_millis(20));
                tokio::time::sleep(pause).await;
                server.proxy.delay(Duration::ZERO);
                return server.proxy.traffic().round_trips > before.round_trips;
            }
            Promote => server.fail_over(random.bool().then_some(pause / 2)).await,
            DiskFull => return server.fill_disk(pause).await,
            ServerClock => {
                // Back by no more than the bounds of leases have room for.
                return server.step_clock(if random.bool() { 3600 } else { -3 }).await;
            }
            Kill | KillCommand | Stop | End | ClientClock => unreachable!("{fault:?} is not of servers"),
        }
        had_connections
    }
}

/// The texts of all records.
pub(crate) fn records(dir: &Path) -> Vec<String> {
    let paths = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let records = paths.filter(|path| path.extension().is_some_and(|extension| extension == "record"));
    records.map(|path| std::fs::read_to_string(path).unwrap()).collect()
}

async fn until(mut is_so: impl FnMut() -> bool) -> bool {
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
