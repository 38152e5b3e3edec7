//! The checks of the members when a client connects.

use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use leasehold_api::{Error, ErrorKind};
use tokio::time::{Instant, timeout_at};

use super::{Class, Cluster, Failure};
use crate::error::invalid;
use crate::wire::StatusResponse;

/// The time for the first reply.
const FIRST_LIMIT: Duration = Duration::from_secs(5);

/// The time for the other members after the first reply. A member that is down does not delay the client further.
const REST_LIMIT: Duration = Duration::from_millis(500);

/// The first supported version.
const OLDEST: (u32, u32) = (3, 4);

/// The versions after [`OLDEST`] with the fault that a crash can damage their data.
const DAMAGING: [(u32, u32, u32); 3] = [(3, 5, 0), (3, 5, 1), (3, 5, 2)];

/// The replies of the members so far.
#[derive(Default)]
struct Greeted {
    answered: usize,
    leader: Option<usize>,
    follower: Option<usize>,
    failure: Option<Failure>,
}

impl Cluster {
    /// Queries the state of each member, and chooses the leader, because it handles a request without another member.
    /// Fails without a reply, if two members belong to different clusters, or if one has an unsupported version.
    pub(super) async fn greet(&self) -> Result<(), Error> {
        let mut asked: FuturesUnordered<_> = (0..self.members.len())
            .map(|member| async move { (member, self.status(member).await) })
            .collect();
        let mut greeted = Greeted::default();
        let mut end = Instant::now() + FIRST_LIMIT;
        while let Ok(Some((member, status))) = timeout_at(end, asked.next()).await {
            self.greet_one(&mut greeted, member, status)?;
            if greeted.answered == 1 {
                end = end.min(Instant::now() + REST_LIMIT);
            }
        }
        if greeted.answered == 0 {
            let failure = greeted.failure.unwrap_or(Failure::unsent(Class::Unreachable));
            return Err(failure.into_unsent().error(None));
        }
        let chosen = greeted.leader.or(greeted.follower).unwrap_or_default();
        self.choice.choose(self.choice.chosen(), chosen);
        Ok(())
    }

    fn greet_one(
        &self,
        greeted: &mut Greeted,
        member: usize,
        status: Result<StatusResponse, Failure>,
    ) -> Result<(), Error> {
        let name = self.name_of(member);
        match status {
            Ok(status) => {
                check_version(&status.version, name)?;
                greeted.answered += 1;
                let id = status.header.map_or(0, |header| header.member_id);
                if status.is_learner || status.leader == 0 {
                    tracing::warn!(member = name, "this member of etcd is a learner, or knows no leader");
                } else if status.leader == id {
                    greeted.leader = Some(member);
                } else {
                    greeted.follower = greeted.follower.or(Some(member));
                }
            }
            Err(failure) if failure.is_other_cluster() => {
                return Err(invalid(format!(
                    "the members named belong to two clusters: {name} is in another one than a member that replied before it; name the members of one cluster"
                )));
            }
            // A user without the right to read a member's state can still have the right to lock.
            Err(failure) if failure.class() == Class::Denied => greeted.answered += 1,
            Err(failure) if !failure.may_pass() => return Err(failure.into_unsent().error(None)),
            Err(failure) => {
                tracing::warn!(member = name, error = %failure, "this member of etcd does not reply");
                greeted.failure = Some(failure.or_more_telling(greeted.failure.take()));
            }
        }
        Ok(())
    }
}

fn check_version(version: &str, member: &str) -> Result<(), Error> {
    let Some((major, minor, patch)) = parse(version) else {
        tracing::warn!(member, "this member of etcd has a version that is no number");
        return Ok(());
    };
    if (major, minor) < OLDEST {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!("{member} is an etcd {major}.{minor}.{patch}; this store needs 3.4 or newer"),
        ));
    }
    if DAMAGING.contains(&(major, minor, patch)) {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "{member} is an etcd {major}.{minor}.{patch}, which is known to damage its data when it crashes; use 3.5.3 or newer"
            ),
        ));
    }
    Ok(())
}

/// Reads `3.5.1`, also with a suffix such as `-rc.0` or `+git`.
fn parse(version: &str) -> Option<(u32, u32, u32)> {
    let plain = version.split(['-', '+']).next()?;
    let mut numbers = plain.split('.').map(|number| number.parse().ok());
    let parsed = (numbers.next()??, numbers.next()??, numbers.next()??);
    numbers.next().is_none().then_some(parsed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_old_versions_and_those_that_damage_data() {
        for fine in ["3.4.0", "3.4.23", "3.5.3", "3.6.0-rc.1", "3.7.2+git", "4.0.0", "", "not provided"] {
            check_version(fine, "h").unwrap();
        }
        for wrong in ["2.3.8", "3.3.27", "3.5.0", "3.5.1", "3.5.2", "3.5.0-rc.0"] {
            let error = check_version(wrong, "h:2379").unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{wrong}");
            assert!(error.message().starts_with("h:2379 is an etcd"), "{error}");
        }
    }
}
