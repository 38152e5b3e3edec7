//! Backups of a cluster, and their restore.

use std::fs;
use std::path::Path;

use rustix::process::Signal;
use tempfile::TempDir;
use test_setup::programs;

use super::member::{Member, identity};
use super::{Etcd, Inner};
use crate::{Outcome, or_panic};

/// The loss of a restore from a [`Backup`], beside the writes after the backup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// The log. The members start a new one, as after `etcdctl snapshot restore`, which operators use. Needs the
    /// machine's own `etcdctl` and [`crate::EtcdProgram::Installed`].
    Log,
    /// Nothing else. Each member gets an earlier copy of its directory, as from a snapshot of its disk. Needs no program.
    Nothing,
}

/// The data of all members at one time.
#[derive(Debug)]
pub struct Backup {
    /// The folder `snapshot`, or one folder for each member.
    directory: TempDir,
    loss: Loss,
}

/// The file with a snapshot.
const SNAPSHOT: &str = "snapshot";

impl Etcd {
    /// Copies the data of all members. Clients stay connected.
    ///
    /// # Panics
    ///
    /// If a file cannot be copied, or the snapshot is refused.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn backup(&self, loss: Loss) -> Backup {
        or_panic(self.calls(move |inner| inner.backup(loss)).await)
    }

    /// Kills all members, replaces their data, and starts them on the same ports. The revision goes back.
    ///
    /// # Panics
    ///
    /// If a file cannot be copied, or a program fails.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn restore(&self, backup: &Backup) {
        let (directory, loss) = (backup.directory.path().to_owned(), backup.loss);
        or_panic(self.calls(move |inner| inner.restore(&directory, loss)).await);
        self.ready().await;
    }
}

impl Inner {
    fn backup(&self, loss: Loss) -> Outcome<Backup> {
        let directory = tempfile::tempdir().map_err(|error| format!("cannot make a directory: {error}"))?;
        match loss {
            Loss::Log => {
                let data = self.api(0).snapshot();
                let data = data.map_err(|refusal| format!("cannot make a snapshot: {refusal}"))?;
                fs::write(directory.path().join(SNAPSHOT), data)
                    .map_err(|error| format!("cannot write a snapshot: {error}"))?;
            }
            Loss::Nothing => {
                // Freezes all members first, because their files must be of the same time.
                let members: Vec<_> = (0..self.members.len()).map(|number| self.member(number)).collect();
                members.iter().for_each(|member| member.signal(Signal::STOP));
                let copied = members.iter().enumerate().try_for_each(|(number, member)| {
                    member.copy_data(&directory.path().join(number.to_string()))
                });
                members.iter().for_each(|member| member.signal(Signal::CONT));
                copied?;
            }
        }
        Ok(Backup { directory, loss })
    }

    fn restore(&self, from: &Path, loss: Loss) -> Outcome {
        let mut members: Vec<_> = (0..self.members.len()).map(|number| self.member(number)).collect();
        for member in &mut members {
            member.end(Signal::KILL)?;
        }
        for (number, member) in members.iter_mut().enumerate() {
            match loss {
                Loss::Nothing => member.replace_data(&from.join(number.to_string()))?,
                Loss::Log => self.restore_snapshot(member, number, &from.join(SNAPSHOT))?,
            }
            member.start()?;
        }
        Ok(())
    }

    fn restore_snapshot(&self, member: &Member, number: usize, snapshot: &Path) -> Outcome {
        let etcdctl = programs::etcd()?.join("etcdctl");
        member.restore_snapshot(&etcdctl, snapshot, &identity(number, &self.addresses))
    }
}
