//! Faults of workers, connections and the server, and the check of their effect.

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

/// Faults of the file store, which has no server and no network.
pub(crate) const OF_FILES: &[Fault] = &[Kill, KillCommand, Stop, End, DiskFull, ClientClock];
/// Faults of the row store. Omitted are faults after which a row may stay locked until an operator releases it, because
/// there is no operator here: deaths of holders, a fail-over, and outages of more than ten seconds.
pub(crate) const OF_ROWS: &[Fault] =
    &[Stop, End, EndSessions, Freeze, Reset, Cut, Silence, LoseReply, Delay, ServerClock, ClientClock];
/// Faults of advisory locks and leases.
pub(crate) const ALL: &[Fault] = &Fault::ALL;

/// Faults that end sessions. An advisory lock ends with its session, and its holder notices a moment later. A server whose
/// clock jumps forward ends sessions because they seem silent for too long.
pub(crate) const THAT_END_SESSIONS: &[Fault] =
    &[EndSessions, Restart, Crash, Reset, Cut, LoseReply, Promote, DiskFull, ServerClock];
/// Faults that end leases before their holders notice. After any other fault, such as a stopped worker or an outage, the
/// holder knows the end of its lease.
pub(crate) const THAT_END_LEASES: &[Fault] = &[Promote, ServerClock];

/// Time for which a worker is stopped, longer than its lease.
const STOPPED: Duration = Duration::from_millis(2500);
/// Time for which a fault waits for its effect.
const PATIENCE: Duration = Duration::from_secs(5);

/// The targets of faults.
#[derive(Debug)]
pub(crate) struct Scene<'a> {
    pub(crate) workers: Workers,
    pub(crate) commands: Commands,
    pub(crate) server: Option<Server>,
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

    /// Returns the number of failed calls of workers.
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
                // Steps back by only 3 s, because a longer step would exceed the bounds of leases.
                return server.step_clock(if random.bool() { 3600 } else { -3 }).await;
            }
            Kill | KillCommand | Stop | End | ClientClock => unreachable!("{fault:?} is not of servers"),
        }
        had_connections
    }
}

/// Returns the texts of all records.
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
