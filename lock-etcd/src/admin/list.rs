//! The operators' view of keys: holders, waiters and cooldowns.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use leasehold_api::{Error, HoldInfo, KeyInfo, ListQuery, LockKey};

use crate::backend::{LIMIT, Shared};
use crate::cluster::Failure;
use crate::entry::{Cooldown, Entry};
use crate::names::{Names, Span};
use crate::wire::{KeyValue, LeaseTimeToLiveRequest, RangeRequest, TxnRequest};

/// The most keys of etcd in one read. The server handles other requests between two reads.
const PAGE: i64 = 1_000;

/// The entries of one key, and its cooldown.
#[derive(Clone, Debug, Default)]
struct Found {
    /// The oldest entry.
    first: Option<KeyValue>,
    entries: u64,
    cooldown: Option<KeyValue>,
}

impl Shared {
    pub(super) async fn inspect(&self, key: &LockKey) -> Result<KeyInfo, Error> {
        let failed = |failure: Failure| failure.error(Some(key));
        let (queue, cooldown) = (self.names.queue(key), self.names.cooldown(key));
        let whole = || RangeRequest::range(queue.begin.clone(), queue.end.clone());
        let cooldowns = RangeRequest::range(cooldown.begin, cooldown.end).oldest(1);
        let reads = vec![whole().oldest(1).op(), cooldowns.op(), whole().count_only().op()];
        let read = self.cluster.call(TxnRequest::of_all(reads), LIMIT).await.map_err(failed)?.reply;
        let found = Found {
            first: read.range(0).first().cloned(),
            entries: u64::try_from(read.count(2)).unwrap_or(0),
            cooldown: read.range(1).first().cloned(),
        };
        self.describe(key.clone(), found, &mut HashMap::new()).await.map_err(failed)
    }

    pub(super) async fn list(&self, query: &ListQuery) -> Result<Vec<KeyInfo>, Error> {
        let failed = |failure: Failure| failure.error(None);
        let limit = query.limit.unwrap_or(usize::MAX);
        let mut keys: BTreeMap<LockKey, Found> = BTreeMap::new();
        let add = |keys: &mut BTreeMap<LockKey, Found>, kv| add_entry(&self.names, keys, kv);
        // Reads until a key above the limit appears, because only then all entries of the last key were read.
        self.pages(self.names.queues(&query.prefix), |kv| {
            add(&mut keys, kv);
            query.include_ended || keys.len() <= limit
        })
        .await
        .map_err(failed)?;
        self.pages(self.names.cooldowns(&query.prefix), |kv| {
            if let Some((key, _)) = self.names.parse(&kv.key) {
                if query.include_ended {
                    keys.entry(key).or_default().cooldown = Some(kv);
                } else if let Some(found) = keys.get_mut(&key) {
                    found.cooldown = Some(kv);
                }
            }
            true
        })
        .await
        .map_err(failed)?;
        let (mut infos, mut leases) = (Vec::new(), HashMap::new());
        for (key, found) in keys {
            if infos.len() == limit {
                break;
            }
            let info = self.describe(key, found, &mut leases).await.map_err(failed)?;
            // Skips a key whose entries all wait for the end of a cooldown, because no client holds it.
            if info.is_held() || query.include_ended {
                infos.push(info);
            }
        }
        Ok(infos)
    }

    /// Reads a range page by page, and passes each key to `add` until that returns `false`.
    async fn pages(&self, span: Span, mut add: impl FnMut(KeyValue) -> bool) -> Result<(), Failure> {
        let Span { mut begin, end } = span;
        loop {
            let mut request = RangeRequest::range(begin.clone(), end.clone());
            request.limit = PAGE;
            let page = self.cluster.call(request, LIMIT).await?.reply;
            let last = page.kvs.last().map(|kv| kv.key.clone());
            for kv in page.kvs {
                if !add(kv) {
                    return Ok(());
                }
            }
            match last {
                Some(last) if page.more => {
                    begin = last;
                    begin.push(0);
                }
                _ => return Ok(()),
            }
        }
    }

    async fn describe(
        &self,
        key: LockKey,
        found: Found,
        leases: &mut HashMap<i64, Option<Duration>>,
    ) -> Result<KeyInfo, Failure> {
        let holder = holder(&self.names, &key, found.first.as_ref(), found.cooldown.as_ref()).cloned();
        let mut info = KeyInfo::free(key);
        info.waiters = Some(found.entries.saturating_sub(u64::from(holder.is_some())));
        info.cooldown = found.cooldown.map(|cooldown| Cooldown::rest(&cooldown.value));
        if let Some(kv) = holder {
            let entry = Entry::read(&kv.value);
            let mut hold = HoldInfo::new();
            hold.holder = self.names.parse(&kv.key).map(|(_, holder)| holder);
            hold.token = self.bases.known().token(&info.key, kv.create_revision).ok();
            hold.since = entry.since();
            hold.expires_in = match leases.get(&kv.lease) {
                Some(left) => *left,
                None => {
                    let left = self.time_left(kv.lease).await?;
                    leases.insert(kv.lease, left);
                    left
                }
            };
            hold.label = entry.label.map(Into::into);
            hold.owner = Some(entry.owner).filter(|owner| !owner.is_empty());
            hold.asked = entry.asked;
            info.holders.push(hold);
        }
        Ok(info)
    }

    /// Returns the time until a lease ends without a renewal. `None` if it has ended.
    async fn time_left(&self, lease: i64) -> Result<Option<Duration>, Failure> {
        let reply = self.cluster.call(LeaseTimeToLiveRequest { id: lease, keys: false }, LIMIT).await?.reply;
        Ok(time_left(reply.ttl, reply.granted_ttl))
    }
}

fn time_left(ttl: i64, granted: i64) -> Option<Duration> {
    let seconds = |seconds| u64::try_from(seconds).ok().map(Duration::from_secs);
    // Adds half a second, because etcd rounds down to seconds. That is closer on average.
    Some((seconds(ttl)? + Duration::from_millis(500)).min(seconds(granted)?))
}

fn add_entry(names: &Names, keys: &mut BTreeMap<LockKey, Found>, kv: KeyValue) {
    let Some((key, _)) = names.parse(&kv.key) else { return };
    let found = keys.entry(key).or_default();
    found.entries += 1;
    if found.first.as_ref().is_none_or(|first| kv.create_revision < first.create_revision) {
        found.first = Some(kv);
    }
}

/// Returns the entry that holds the key, given its oldest entry and its cooldown. `None` if that entry waits for the end
/// of another grant's cooldown.
pub(super) fn holder<'a>(
    names: &Names,
    key: &LockKey,
    first: Option<&'a KeyValue>,
    cooldown: Option<&KeyValue>,
) -> Option<&'a KeyValue> {
    let first = first?;
    let started = |cooldown: &KeyValue| Some(names.entry(key, names.parse(&cooldown.key)?.1));
    let is_blocked = cooldown.is_some_and(|cooldown| started(cooldown).as_ref() != Some(&first.key));
    (!is_blocked).then_some(first)
}

#[cfg(test)]
mod tests {
    use leasehold_api::HolderId;

    use super::*;

    fn kv(key: Vec<u8>, create_revision: i64) -> KeyValue {
        KeyValue { key, create_revision, ..KeyValue::default() }
    }

    #[test]
    fn the_oldest_entry_holds_and_the_others_wait() {
        let (names, key) = (Names::new("p"), LockKey::new("k").unwrap());
        let mut keys = BTreeMap::new();
        for (serial, created) in [(1, 12), (2, 11), (3, 13)] {
            add_entry(&names, &mut keys, kv(names.entry(&key, HolderId::from_parts(1, serial)), created));
        }
        add_entry(&names, &mut keys, kv(b"p/q/not ours".to_vec(), 1));
        assert_eq!(keys.len(), 1);
        let found = &keys[&key];
        assert_eq!(found.entries, 3);
        assert_eq!(holder(&names, &key, found.first.as_ref(), None).map(|kv| kv.create_revision), Some(11));
    }

    #[test]
    fn a_waiter_behind_a_cooldown_is_no_holder() {
        let (names, key) = (Names::new("p"), LockKey::new("k").unwrap());
        let (waiter, other) = (HolderId::from_parts(1, 1), HolderId::from_parts(1, 2));
        let first = Some(kv(names.entry(&key, waiter), 11));
        let holds = |started_by| {
            let cooldown = kv(names.cooldown_of(&key, started_by), 9);
            holder(&names, &key, first.as_ref(), Some(&cooldown)).is_some()
        };
        assert!(!holds(other));
        assert!(holds(waiter), "its own cooldown");
    }

    #[test]
    fn the_time_left_of_a_lease_is_at_most_its_ttl() {
        assert_eq!(time_left(0, 2), Some(Duration::from_millis(500)), "its last second");
        assert_eq!(time_left(2, 2), Some(Duration::from_secs(2)));
        assert_eq!(time_left(-1, 0), None, "it has ended");
    }
}
