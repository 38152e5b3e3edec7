//! The facts about a cluster that `leasehold check` prints.

mod version;

use std::time::Duration;

use leasehold_api::StoreFact;

use crate::backend::Shared;
use crate::cluster::{Class, Failure};
use crate::wire::{AlarmMember, AlarmRequest, AlarmType, RangeRequest, StatusResponse};

/// The limit of each request. It is less than the 10 s for which the command waits for all facts.
const LIMIT: Duration = Duration::from_secs(3);

/// The default quota of a server, in bytes.
const DEFAULT_QUOTA: i64 = 2 << 30;

/// The number of revisions from which a missing compaction is a problem, because the history grows indefinitely.
const MANY: i64 = 100_000;

impl Shared {
    /// Returns the facts. The failure of a request is a fact too.
    pub(crate) async fn facts(&self) -> Vec<StoreFact> {
        let (members, alarms, history) = tokio::join!(
            self.cluster.status_of_all(LIMIT),
            self.cluster.call(AlarmRequest::default(), LIMIT),
            self.cluster.call(RangeRequest { revision: 1, ..RangeRequest::key(self.names.base()) }, LIMIT),
        );
        let named: Vec<_> =
            members.iter().enumerate().map(|(at, status)| (self.cluster.name_of(at), status)).collect();
        let mut facts = vec![versions(&named), quorum(&named)];
        facts.extend(size(&named));
        facts.push(match alarms {
            Ok(answer) => alarm(answer.reply.alarms.iter().map(AlarmMember::alarm)),
            Err(failure) if failure.is_denied() => StoreFact::new("alarms", "not shown to this user"),
            Err(failure) => StoreFact::new("alarms", failure.error(None).to_string()),
        });
        let revision = self.cluster.heard().revision;
        facts.push(compaction(history.is_err_and(|failure| failure.class() == Class::Compacted), revision));
        if let Some(lease) = self.shortest.get() {
            facts.push(StoreFact::new("shortest TTL", format!("{lease:?}")));
        }
        facts
    }
}

type Named<'a> = (&'a str, &'a Result<StatusResponse, Failure>);

fn answered<'a>(members: &'a [Named<'a>]) -> impl Iterator<Item = (&'a str, &'a StatusResponse)> {
    members.iter().filter_map(|(name, status)| Some((*name, status.as_ref().ok()?)))
}

/// Returns the versions of the members, with advice for versions with known faults.
fn versions(members: &[Named<'_>]) -> StoreFact {
    let mut versions: Vec<_> = answered(members).map(|(_, status)| status.version.as_str()).collect();
    versions.sort_unstable();
    versions.dedup();
    let fact = StoreFact::new("etcd", versions.join(", "));
    match versions.into_iter().find_map(version::advice) {
        Some(advice) => fact.advice(advice),
        None => fact,
    }
}

/// Returns how many members reply, and whether they have one leader.
fn quorum(members: &[Named<'_>]) -> StoreFact {
    let count = answered(members).count();
    let mut leaders: Vec<_> = answered(members).map(|(_, status)| status.leader).collect();
    leaders.sort_unstable();
    leaders.dedup();
    let fact = StoreFact::new("members", format!("{count} of {} reply", members.len()));
    let silent: Vec<_> =
        members.iter().filter(|(_, status)| status.is_err()).map(|(name, _)| *name).collect();
    if !silent.is_empty() {
        return fact
            .advice(format!("start these members, or take them out of the URL: {}", silent.join(", ")));
    }
    match leaders[..] {
        [leader] if leader != 0 => fact,
        _ => fact.advice("the members know no common leader; see whether they reach each other"),
    }
}

/// Returns the size of the largest database in comparison with its quota.
fn size(members: &[Named<'_>]) -> Option<StoreFact> {
    let largest = answered(members).map(|(_, status)| status).max_by_key(|status| status.db_size)?;
    let is_known = largest.db_size_quota > 0;
    let quota = if is_known { largest.db_size_quota } else { DEFAULT_QUOTA };
    let (used, of) = (mebibytes(largest.db_size), mebibytes(quota));
    let which = if is_known { "quota" } else { "default quota, the own one is not shown before etcd 3.6" };
    let fact = StoreFact::new("database", format!("{used} MiB of {of} MiB ({which})"));
    Some(if largest.db_size / 4 >= quota / 5 {
        fact.advice("compact and defragment before the quota is reached, because etcd then refuses every grant (alarm NOSPACE)")
    } else {
        fact
    })
}

const fn mebibytes(bytes: i64) -> i64 {
    bytes >> 20
}

fn alarm(alarms: impl Iterator<Item = AlarmType>) -> StoreFact {
    let mut names: Vec<_> = alarms
        .filter_map(|alarm| match alarm {
            AlarmType::None => None,
            AlarmType::Nospace => Some("NOSPACE"),
            AlarmType::Corrupt => Some("CORRUPT"),
        })
        .collect();
    names.sort_unstable();
    names.dedup();
    if names.is_empty() {
        return StoreFact::new("alarms", "none");
    }
    let fact = StoreFact::new("alarms", names.join(", "));
    fact.advice(if names.contains(&"CORRUPT") {
        "the data of the members differs: replace the damaged member, or restore a backup"
    } else {
        "grants are refused: compact, defragment, then disarm the alarm with `etcdctl alarm disarm`"
    })
}

/// Returns whether old revisions were ever removed, because a server does not show its setting. `revision` is the current
/// one.
fn compaction(was_compacted: bool, revision: i64) -> StoreFact {
    if was_compacted {
        return StoreFact::new("history", "was compacted");
    }
    let fact = StoreFact::new("history", format!("{revision} revisions, never compacted"));
    if revision < MANY {
        return fact;
    }
    fact.advice("start etcd with --auto-compaction-retention, because each lock and release adds two revisions until then")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(
        version: &str,
        leader: u64,
        db_size: i64,
        db_size_quota: i64,
    ) -> Result<StatusResponse, Failure> {
        Ok(StatusResponse {
            version: version.into(),
            leader,
            db_size,
            db_size_quota,
            ..StatusResponse::default()
        })
    }

    #[test]
    fn every_version_is_named_once_and_a_faulty_one_has_advice() {
        let (new, old) = (status("3.7.2", 1, 0, 0), status("3.4.23", 1, 0, 0));
        assert_eq!(versions(&[("a", &new), ("b", &new)]), StoreFact::new("etcd", "3.7.2"));
        let mixed = versions(&[("a", &new), ("b", &old)]);
        assert_eq!(mixed.value, "3.4.23, 3.7.2");
        assert!(mixed.advice.is_some());
    }

    #[test]
    fn members_without_a_common_leader_are_a_problem() {
        let (one, two, none) = (status("3.7.2", 1, 0, 0), status("3.7.2", 2, 0, 0), status("3.7.2", 0, 0, 0));
        assert_eq!(quorum(&[("a", &one), ("b", &one)]).advice, None);
        assert!(quorum(&[("a", &one), ("b", &two)]).advice.is_some());
        assert!(quorum(&[("a", &none)]).advice.is_some());
    }

    #[test]
    fn a_database_near_its_quota_is_a_problem() {
        let of = |size: i64, quota: i64| size_of(&status("3.7.2", 1, size << 20, quota << 20));
        fn size_of(status: &Result<StatusResponse, Failure>) -> StoreFact {
            size(&[("a", status)]).unwrap()
        }
        assert_eq!(of(79, 100).advice, None);
        assert!(of(80, 100).advice.is_some());
        assert_eq!(
            of(10, 0).value,
            "10 MiB of 2048 MiB (default quota, the own one is not shown before etcd 3.6)"
        );
    }

    #[test]
    fn an_alarm_is_a_problem() {
        assert_eq!(alarm([AlarmType::None].into_iter()), StoreFact::new("alarms", "none"));
        let both = alarm([AlarmType::Nospace, AlarmType::Corrupt, AlarmType::Nospace].into_iter());
        assert_eq!(both.value, "CORRUPT, NOSPACE");
        assert!(both.advice.is_some_and(|advice| advice.contains("damaged")));
    }

    #[test]
    fn a_long_history_without_a_compaction_is_a_problem() {
        assert_eq!(compaction(true, MANY * 2).advice, None);
        assert_eq!(compaction(false, MANY - 1).advice, None);
        assert!(compaction(false, MANY).advice.is_some());
    }
}
