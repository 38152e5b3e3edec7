//! The base of the tokens: a number that is added to revisions. It makes tokens grow although a restore sets revisions
//! back.
//!
//! A token is the create revision of its entry plus the base. The revision survives crashes and changes of the leader.
//! The restore of a backup sets it back, under the same cluster id and with the same keys. In one life of a cluster, from
//! its start or a restore to the next restore, the raft index minus the revision never shrinks. The reason is that every
//! revision needs an entry of the raft log. A restored cluster starts that log again, so its difference is far smaller
//! than the one noted beside the base. Every grant compares the revision of the base's key, so no client grants with an
//! old base.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use leasehold_api::{Error, ErrorKind, FencingToken, LockKey};
use leasehold_engine::token;

use crate::cluster::{Cluster, Failure, Heard};
use crate::names::Names;
use crate::wire::{Compare, KeyValue, RangeRequest, ResponseHeader, StatusRequest, Target, TxnRequest, put};

/// The distance from an old base to the next one if the clock was set back. It is more than the revisions that a backup
/// misses.
const STEP: i64 = 1 << 32;

/// The base that a client knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Base {
    value: i64,
    /// The revision of the last write of the base's key, which grants compare.
    modified: i64,
}

impl Base {
    /// Returns the store's number of a grant whose entry was created at this revision.
    pub(crate) fn number(self, created: i64) -> Option<u64> {
        u64::try_from(self.value.checked_add(created)?).ok()
    }

    /// Returns the token of a grant whose entry was created at this revision.
    pub(crate) fn token(self, key: &LockKey, created: i64) -> Result<FencingToken, Error> {
        self.number(created).and_then(token::from_store_number).ok_or_else(|| {
            let message = "the base of the fencing tokens leaves no room for more; use a new prefix";
            Error::new(ErrorKind::Corrupt, message).with_key(key)
        })
    }
}

/// The content of the base's key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Noted {
    value: i64,
    /// The raft index minus the revision when the base was written. It can be too small, but not too large.
    offset: i64,
    cluster: u64,
    /// The time at which the base was written, in microseconds since 1970.
    time: i64,
}

impl Noted {
    fn read(kv: &KeyValue) -> Option<Self> {
        let mut parts = std::str::from_utf8(&kv.value).ok()?.split('|');
        let noted = Self {
            value: parts.next()?.parse().ok()?,
            offset: parts.next()?.parse().ok()?,
            cluster: parts.next()?.parse().ok()?,
            time: parts.next()?.parse().ok()?,
        };
        parts.next().is_none().then_some(noted)
    }

    fn write(self) -> String {
        format!("{}|{}|{}|{}", self.value, self.offset, self.cluster, self.time)
    }

    /// Returns whether the cluster is still in the life in which the base was written. `offset`, the raft index minus the
    /// revision, can be too large, but not too small.
    const fn lasts(self, offset: i64, cluster: u64) -> bool {
        self.cluster == cluster && offset >= self.offset
    }

    /// Returns the value of the next base, in a life whose revision is `revision`. `greatest` is the greatest number that
    /// this client might have granted. `now` is in microseconds since 1970.
    ///
    /// A base grows by the time since the previous base, because no life has more writes than microseconds. So the value
    /// depends on the time alone. Two restores of one backup bring the same base back, but they end with different ones,
    /// even if clients replaced the base between the restores. The step is for a clock that was set back.
    fn next_value(old: Option<Self>, greatest: i64, revision: i64, now: i64) -> i64 {
        let by_time = match old {
            None => now.saturating_sub(revision),
            Some(old) if now > old.time => old.value.saturating_add(now - old.time),
            Some(old) => old.value.saturating_add(STEP),
        };
        by_time.max(greatest.saturating_sub(revision)).max(0)
    }
}

/// The base that this client knows, and whether it has to be checked again.
#[derive(Debug)]
pub(crate) struct Bases {
    cluster: Arc<Cluster>,
    names: Names,
    known: Mutex<Base>,
    /// The number of connects before the last check of the base. Greater than each possible number before the first check,
    /// so the first grant checks the base.
    connects: AtomicU64,
    /// Whether a reply has shown that the store lost writes. The next check then replaces the base without a comparison
    /// of the raft index, because a restored copy of the disks sets that index back too.
    has_lost_writes: AtomicBool,
    settling: tokio::sync::Mutex<()>,
}

impl Bases {
    pub(crate) fn new(cluster: &Arc<Cluster>, names: &Names) -> Self {
        Self {
            cluster: Arc::clone(cluster),
            names: names.clone(),
            known: Mutex::default(),
            connects: AtomicU64::new(u64::MAX),
            has_lost_writes: AtomicBool::new(false),
            settling: tokio::sync::Mutex::default(),
        }
    }

    pub(crate) fn known(&self) -> Base {
        *self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the condition that the base is still `base`.
    pub(crate) fn compare(&self, base: Base) -> Compare {
        Compare::is(self.names.base(), Target::Mod(base.modified))
    }

    /// Learns the base from a read of its key. Returns `false` if the key does not exist, or was last written before the
    /// known base. The caller then has to [settle](Self::settle) the base.
    pub(crate) fn learn(&self, read: Option<&KeyValue>) -> bool {
        let Some((kv, noted)) = read.and_then(|kv| Some((kv, Noted::read(kv)?))) else { return false };
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if kv.mod_revision < known.modified {
            self.has_lost_writes.store(true, Ordering::Release);
            return false;
        }
        *known = Base { value: noted.value, modified: kv.mod_revision };
        true
    }

    /// Returns whether the base has to be checked before the grant of this reply counts. That is so if the client has
    /// connected again, or if the reply has smaller numbers than `before`, the greatest ones before the request was sent.
    /// `wrote` is whether the request was carried out by a write, whose revision is new.
    pub(crate) fn is_doubted(&self, before: Heard, header: &ResponseHeader, wrote: bool) -> bool {
        let has_lost_writes = has_lost_writes(before, header, wrote);
        if has_lost_writes {
            self.has_lost_writes.store(true, Ordering::Release);
        }
        let connects = self.cluster.heard().connects;
        let has_connected = connects != self.connects.load(Ordering::Acquire);
        has_connected || has_lost_writes || header.raft_term < before.term
    }

    /// Reads the base, and replaces it if the cluster is in another life. Returns whether the base is still the known
    /// one.
    ///
    /// Two clients that settle at the same time get the same base, because the write compares the revision that was read.
    pub(crate) async fn settle(&self, limit: Duration) -> Result<bool, Failure> {
        let _settling = self.settling.lock().await;
        let connects = self.cluster.heard().connects;
        let has_lost_writes = self.has_lost_writes.swap(false, Ordering::AcqRel);
        let settled = self.settle_now(has_lost_writes, limit).await;
        if settled.is_err() && has_lost_writes {
            self.has_lost_writes.store(true, Ordering::Release);
        }
        let base = settled?;
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        self.connects.store(connects, Ordering::Release);
        Ok(std::mem::replace(&mut *known, base) == base)
    }

    async fn settle_now(&self, has_lost_writes: bool, limit: Duration) -> Result<Base, Failure> {
        // Repeats only after another client has written a base, which the next read finds.
        loop {
            let heard = self.cluster.heard();
            let read = self.cluster.call(RangeRequest::key(self.names.base()), limit).await?;
            let before = read.header();
            let is_lost = has_lost_writes || self::has_lost_writes(heard, &before, false);
            let has_gone_back = is_lost || before.raft_term < heard.term;
            // The index is read after the revision, so the difference can only be too large.
            let index = self.raft_index(limit).await?;
            let kv = read.reply.kvs.first();
            let noted = kv.and_then(Noted::read);
            if let (Some(kv), Some(noted)) = (kv, noted)
                && !is_lost
                && noted.lasts(index.saturating_sub(before.revision), before.cluster_id)
            {
                self.hear_again(has_gone_back, &before);
                return Ok(Base { value: noted.value, modified: kv.mod_revision });
            }
            // The index is read before the revision, so the difference can only be too small.
            let index = self.raft_index(limit).await?;
            let later = self.cluster.call(RangeRequest::key(self.names.base()), limit).await?.header();
            let now = unix_micros();
            let greatest = self.known().value.saturating_add(heard.revision);
            let next = Noted {
                value: Noted::next_value(noted, greatest, later.revision, now),
                offset: index.saturating_sub(later.revision),
                cluster: later.cluster_id,
                time: now,
            };
            let unchanged = kv.map_or(0, |kv| kv.mod_revision);
            let txn = TxnRequest {
                compare: vec![Compare::is(self.names.base(), Target::Mod(unchanged))],
                success: vec![put(self.names.base(), next.write(), 0)],
                failure: Vec::new(),
            };
            let written = self.cluster.call(txn, limit).await?;
            if written.reply.succeeded {
                tracing::warn!(store = %self.cluster.store(), base = next.value, "wrote the base of the fencing tokens, because the cluster is new or was restored");
                self.hear_again(has_gone_back, &written.header());
                return Ok(Base { value: next.value, modified: written.header().revision });
            }
        }
    }

    /// Counts from the numbers of `header` if the store has gone back, because every later reply would otherwise be
    /// doubted.
    fn hear_again(&self, has_gone_back: bool, header: &ResponseHeader) {
        if has_gone_back {
            self.cluster.start_over(header);
        }
    }

    /// Returns the raft index of the chosen member. Its index is close to the leader's, because the member replied to the
    /// read before.
    async fn raft_index(&self, limit: Duration) -> Result<i64, Failure> {
        let status = self.cluster.call(StatusRequest {}, limit).await?;
        Ok(i64::try_from(status.reply.raft_index).unwrap_or(i64::MAX))
    }
}

/// Returns whether the store has lost writes, because a reply has a smaller revision than the ones before its request. An
/// example is the restore of a backup behind a proxy that keeps the client's connection.
const fn has_lost_writes(before: Heard, header: &ResponseHeader, wrote: bool) -> bool {
    if wrote { header.revision <= before.revision } else { header.revision < before.revision }
}

fn unix_micros() -> i64 {
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    i64::try_from(now.as_micros()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTED: Noted =
        Noted { value: 1_700_000_000_000_000, offset: 17_000, cluster: 9, time: 1_700_000_000_000_000 };

    #[test]
    fn the_base_reads_as_it_was_written() {
        let kv = KeyValue { value: NOTED.write().into_bytes(), ..KeyValue::default() };
        assert_eq!(Noted::read(&kv), Some(NOTED));
        for damaged in ["", "1", "1|2", "1|2|3", "1|2|x|4", "1|2|3|4|5"] {
            let kv = KeyValue { value: damaged.as_bytes().to_vec(), ..KeyValue::default() };
            assert_eq!(Noted::read(&kv), None, "{damaged}");
        }
    }

    #[test]
    fn a_restored_cluster_and_another_cluster_end_the_base() {
        assert!(NOTED.lasts(17_000, 9) && NOTED.lasts(40_000, 9));
        assert!(!NOTED.lasts(16_999, 9), "the raft index minus the revision has shrunk");
        assert!(!NOTED.lasts(-95_992, 9));
        assert!(!NOTED.lasts(17_000, 8), "another cluster");
    }

    #[test]
    fn numbers_grow_although_revisions_go_back_and_the_backup_is_restored_twice() {
        let number = |value, revision| Base { value, modified: 1 }.number(revision).unwrap();
        let last = number(NOTED.value, 96_041);
        // Both restores bring the same base back. One is a minute after its write, the other two minutes.
        let minute = 60_000_000;
        let next = |old, minutes| Noted::next_value(Some(old), 0, 500, NOTED.time + minutes * minute);
        let first = next(NOTED, 1);
        assert!(number(first, 1) > last);
        // A second client replaces the base again before the second restore.
        let replaced = Noted { value: first, time: NOTED.time + minute, ..NOTED };
        let again = Noted::next_value(Some(replaced), 0, 500, replaced.time + 1_000);
        assert!(number(next(NOTED, 2), 1) > number(again, 1_000_000));
        // The clock of this client is behind.
        assert!(number(Noted::next_value(Some(NOTED), 0, 500, 0), 1) > last);
        // The client has granted a greater number than the clock allows for.
        assert_eq!(Noted::next_value(None, 5_000, 40, 1_000), 4_960);
        assert_eq!(Noted::next_value(None, 0, 40, 1_000), 960, "a new cluster");
    }

    #[test]
    fn a_revision_that_is_not_new_shows_a_loss_of_writes() {
        let heard = Heard { revision: 10, term: 3, connects: 1 };
        let header = |revision| ResponseHeader { revision, raft_term: 4, ..ResponseHeader::default() };
        assert!(!has_lost_writes(heard, &header(11), true));
        assert!(has_lost_writes(heard, &header(10), true), "a write has a revision of its own");
        assert!(!has_lost_writes(heard, &header(10), false));
        assert!(has_lost_writes(heard, &header(9), false));
    }

    #[test]
    fn a_token_leaves_room_for_hand_overs_and_a_full_base_is_an_error() {
        let base = Base { value: 1_000, modified: 3 };
        let token = base.token(&LockKey::new("k").unwrap(), 41).unwrap();
        let next = base.token(&LockKey::new("k").unwrap(), 42).unwrap();
        assert!(next.as_u64() - token.as_u64() >= 1 << token::LOCAL_BITS);
        let full = Base { value: i64::MAX, modified: 3 };
        assert_eq!(full.token(&LockKey::new("k").unwrap(), 1).unwrap_err().kind(), ErrorKind::Corrupt);
    }
}
