//! One member: a process with its data.

use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::{Pid, Signal};
use test_setup::programs;

use super::options::{EtcdOptions, EtcdProgram};
use crate::guarded::Guarded;
use crate::port::Port;
use crate::user::Medium;
use crate::{Outcome, tree};

/// The ports of a member, all on loopback.
#[derive(Debug)]
pub(super) struct Addresses {
    /// For clients.
    pub(super) client: Port,
    /// For the calls of the tests, never encrypted.
    pub(super) own: Port,
    /// The listener for other members.
    pub(super) peer: Port,
    /// The port that other members connect to. It leads to `peer`.
    pub(super) link: u16,
}

/// The folder of the data, in the member's directory.
const DATA: &str = "data";

#[derive(Debug)]
pub(super) struct Member {
    process: Guarded,
    program: PathBuf,
    arguments: Vec<String>,
}

impl Member {
    /// Creates the directory of a member that has not started.
    pub(super) fn new(options: &EtcdOptions, number: usize, all: &[Addresses]) -> Outcome<Self> {
        // The guard deletes the directory when this file is missing. It is missing from the start, because etcd never
        // writes it.
        let medium = if options.durable { Medium::Disk } else { Medium::MemoryWithProgram };
        let process = Guarded::new("leasehold-etcd-", "ended", medium)?;
        let program = match options.program {
            EtcdProgram::Installed => programs::etcd()?.join("etcd"),
            EtcdProgram::Vendored => vendored(&process)?,
        };
        let mut arguments = identity(number, all);
        arguments.extend(tuning(options));
        let addresses = &all[number];
        let url = |scheme: &str, port: u16| format!("{scheme}://127.0.0.1:{port}");
        let mut scheme = "http";
        if let Some(certificates) = &options.certificates {
            scheme = "https";
            for (name, text) in certificates.of_server() {
                process.write_secret(name, text)?;
            }
            arguments.extend(["--cert-file", "server.crt", "--key-file", "server.key"].map(String::from));
            if options.clients_have_certificates {
                arguments.extend(["--client-cert-auth", "--trusted-ca-file", "ca.crt"].map(String::from));
            }
        }
        let client = url(scheme, addresses.client.number());
        arguments.extend([
            "--listen-client-urls".to_owned(),
            format!("{client},{}", url("http", addresses.own.number())),
        ]);
        arguments.extend(["--advertise-client-urls".to_owned(), client]);
        arguments.extend(["--listen-peer-urls".to_owned(), url("http", addresses.peer.number())]);
        arguments.extend(options.arguments.iter().cloned());
        Ok(Self { process, program, arguments })
    }

    /// Starts the process. It might not reply yet.
    pub(super) fn start(&mut self) -> Outcome {
        if self.process.pid().is_some() {
            return Err("the member runs already".to_owned());
        }
        self.process.start(&self.program, &self.arguments, |_| true)
    }

    /// Returns an error with the log if the process has ended on its own.
    pub(super) fn check(&mut self) -> Outcome {
        match self.process.exited()? {
            Some(status) => Err(format!("etcd ended ({status}):\n{}", self.log())),
            None => Ok(()),
        }
    }

    pub(super) fn end(&mut self, signal: Signal) -> Outcome {
        // A frozen process cannot end in an orderly way.
        self.process.signal(Signal::CONT);
        self.process.end(signal)
    }

    pub(super) fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    pub(super) fn pid(&self) -> Option<Pid> {
        self.process.pid()
    }

    pub(super) fn log(&self) -> String {
        self.process.log()
    }

    /// Copies the data to `to`. The process is stopped or frozen.
    pub(super) fn copy_data(&self, to: &Path) -> Outcome {
        tree::copy(&self.process.directory().join(DATA), to, |_| Ok(()), |_, _| true)
    }

    /// Replaces the data of the stopped process by the data of a snapshot.
    pub(super) fn restore_snapshot(&self, etcdctl: &Path, snapshot: &Path, identity: &[String]) -> Outcome {
        self.remove_data()?;
        let copy = self.process.directory().join("snapshot");
        std::fs::copy(snapshot, &copy)
            .map_err(|error| format!("cannot copy {}: {error}", snapshot.display()))?;
        self.process.give(&copy)?;
        self.process.run(etcdctl, |command| {
            command.args(["snapshot", "restore", "snapshot"]).args(identity).env("ETCDCTL_API", "3");
        })
    }

    /// Replaces the data of the stopped process.
    pub(super) fn replace_data(&self, from: &Path) -> Outcome {
        self.remove_data()?;
        let data = self.process.directory().join(DATA);
        tree::copy(from, &data, |path| self.process.give(path), |_, _| true)?;
        tree::close(&data)
    }

    fn remove_data(&self) -> Outcome {
        let data = self.process.directory().join(DATA);
        std::fs::remove_dir_all(&data).map_err(|error| format!("cannot remove {}: {error}", data.display()))
    }
}

/// Copies the program from its crate, because the servers' user might not be able to enter the folder of crates.
fn vendored(process: &Guarded) -> Outcome<PathBuf> {
    let kept = etcd_bin_vendored::etcd_bin_path().map_err(|error| {
        format!("{error}: set LEASEHOLD_ETCD=installed after the installation of etcd on this machine")
    })?;
    let copy = process.directory().join("etcd");
    // Copies in another process. Otherwise a child that another test starts at the same time would inherit the open file,
    // and the kernel refuses to run a program that is open for writing.
    let copied = Command::new("cp").arg(kept).arg(&copy).status();
    if !copied.is_ok_and(|status| status.success()) {
        return Err(format!("cannot copy {}", kept.display()));
    }
    process.give(&copy)?;
    Ok(copy)
}

/// Returns the arguments that name a member and its cluster. A restore from a snapshot has the same ones.
pub(super) fn identity(number: usize, all: &[Addresses]) -> Vec<String> {
    let link = |number: usize| format!("http://127.0.0.1:{}", all[number].link);
    let cluster: Vec<_> = (0..all.len()).map(|other| format!("n{other}={}", link(other))).collect();
    let pairs = [
        ("--name", format!("n{number}")),
        ("--data-dir", DATA.to_owned()),
        ("--initial-advertise-peer-urls", link(number)),
        ("--initial-cluster", cluster.join(",")),
        // The ports are random, so they also distinguish clusters.
        ("--initial-cluster-token", format!("t{}", all[0].link)),
    ];
    pairs.into_iter().flat_map(|(name, value)| [name.to_owned(), value]).collect()
}

fn tuning(options: &EtcdOptions) -> Vec<String> {
    let heartbeat = options.heartbeat.as_millis();
    let mut arguments = ["--initial-cluster-state", "new", "--logger", "zap"].map(String::from).to_vec();
    arguments.extend(["--heartbeat-interval".to_owned(), heartbeat.to_string()]);
    arguments.extend(["--election-timeout".to_owned(), (heartbeat * 10).to_string()]);
    // The cheapest hash of passwords, because tests log in often.
    arguments.extend(["--bcrypt-cost", "4"].map(String::from));
    if !options.durable {
        arguments.push("--unsafe-no-fsync".to_owned());
    }
    arguments
}
