//! The operators' view of keys: holders, waiters and cooldowns.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use leasehold_api::{Error, HoldInfo, HolderId, KeyInfo, ListQuery, LockKey, Mode};

use crate::backend::{LIMIT, Shared};
use crate::cluster::Failure;
use crate::entry::{Cooldown, Entry};
use crate::names::{Named, Names, Span};
use crate::wire::{KeyValue, LeaseTimeToLiveRequest, RangeRequest, TxnRequest};

/// The most keys of etcd in one read. The server handles other requests between two reads.
const PAGE: i64 = 1_000;

/// The entries of one key, the numbers of its permits, and its cooldown.
#[derive(Clone, Debug, Default)]
pub(super) struct Found {
    entries: Vec<KeyValue>,
    numbers: Vec<KeyValue>,
    cooldown: Option<KeyValue>,
}

/// An entry that holds its key.
#[derive(Clone, Debug)]
pub(super) struct Holding {
    pub(super) named: Named,
    /// The number of the permit.
    pub(super) permit: Option<u32>,
    pub(super) entry: KeyValue,
}

impl Shared {
    /// Reads the entries, the numbers and the cooldown of a key at one revision.
    pub(super) async fn find_key(&self, key: &LockKey) -> Result<Found, Failure> {
        let range = |span: Span| RangeRequest::range(span.begin, span.end);
        let reads = vec![
            range(self.names.queue(key)).op(),
            range(self.names.numbers(key)).op(),
            range(self.names.cooldown(key)).oldest(1).op(),
        ];
        let read = self.cluster.call(TxnRequest::of_all(reads), LIMIT).await?.reply;
        Ok(Found {
            entries: read.range(0).to_vec(),
            numbers: read.range(1).to_vec(),
            cooldown: read.range(2).first().cloned(),
        })
    }

    pub(super) async fn inspect(&self, key: &LockKey) -> Result<KeyInfo, Error> {
        let failed = |failure: Failure| failure.error(Some(key));
        let found = self.find_key(key).await.map_err(failed)?;
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
        self.pages(self.names.all_numbers(&query.prefix), |kv| {
            if let Some((key, _)) = self.names.parse_number(&kv.key)
                && let Some(found) = keys.get_mut(&key)
            {
                found.numbers.push(kv);
            }
            true
        })
        .await
        .map_err(failed)?;
        self.pages(self.names.cooldowns(&query.prefix), |kv| {
            if let Some((key, _)) = self.names.parse_cooldown(&kv.key) {
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
        let holders = found.holders(&self.names, &key);
        let mut info = KeyInfo::free(key);
        let waiters = found.entries.len().saturating_sub(holders.len());
        info.waiters = u64::try_from(waiters).ok();
        info.cooldown = found.cooldown.map(|cooldown| Cooldown::rest(&cooldown.value));
        for Holding { named, permit, entry: kv } in holders {
            let entry = Entry::read(&kv.value);
            let mut hold = HoldInfo::new();
            hold.holder = Some(named.holder);
            hold.mode = named.mode;
            hold.permit = permit;
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
    let Some(named) = names.parse_entry(&kv.key) else { return };
    keys.entry(named.key).or_default().entries.push(kv);
}

impl Found {
    /// Returns the entries that hold `key`, the oldest first: the oldest one alone if it is exclusive, else it and the next
    /// ones of its mode. Empty if the oldest entry waits for the end of another grant's cooldown.
    pub(super) fn holders(&self, names: &Names, key: &LockKey) -> Vec<Holding> {
        let mut entries: Vec<&KeyValue> = self.entries.iter().collect();
        entries.sort_by_key(|kv| kv.create_revision);
        let Some(first) = entries.first() else { return Vec::new() };
        let started =
            |kv: &KeyValue| Some(names.entry(key, names.parse_cooldown(&kv.key)?.1, Mode::Exclusive));
        if self.cooldown.as_ref().is_some_and(|cooldown| started(cooldown).as_ref() != Some(&first.key)) {
            return Vec::new();
        }
        let named: Vec<_> = entries.iter().map_while(|kv| Some((names.parse_entry(&kv.key)?, *kv))).collect();
        let Some(mode) = named.first().map(|(named, _)| named.mode) else { return Vec::new() };
        let same = named.into_iter().take_while(|(named, _)| named.mode == mode);
        let holding = |(named, entry): (Named, &KeyValue)| {
            // A holder of a permit has a number.
            let permit = match mode {
                Mode::Permit { .. } => Some(self.number_of(names, named.holder)?),
                _ => None,
            };
            Some(Holding { named, permit, entry: entry.clone() })
        };
        let most = if mode == Mode::Exclusive { 1 } else { usize::MAX };
        same.take(most).filter_map(holding).collect()
    }

    fn number_of(&self, names: &Names, holder: HolderId) -> Option<u32> {
        let text = holder.to_string();
        let own = self.numbers.iter().find(|kv| kv.value == text.as_bytes())?;
        names.parse_number(&own.key).map(|(_, number)| number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: Mode = Mode::Permit { of: 2 };

    fn key() -> LockKey {
        LockKey::new("k").unwrap()
    }

    const fn holder(serial: u64) -> HolderId {
        HolderId::from_parts(1, serial)
    }

    fn kv(key: Vec<u8>, create_revision: i64) -> KeyValue {
        KeyValue { key, create_revision, ..KeyValue::default() }
    }

    /// Makes the entries (holder, mode, create revision) and the numbers (number, holder) of a key.
    fn found(entries: &[(u64, Mode, i64)], numbers: &[(u32, u64)]) -> Found {
        let names = Names::new("p");
        let number = |(number, serial): &(u32, u64)| {
            let value = holder(*serial).to_string().into_bytes();
            KeyValue { value, ..kv(names.number(&key(), *number), 20) }
        };
        let entry = |(serial, mode, created): &(u64, Mode, i64)| {
            kv(names.entry(&key(), holder(*serial), *mode), *created)
        };
        Found {
            entries: entries.iter().map(entry).collect(),
            numbers: numbers.iter().map(number).collect(),
            cooldown: None,
        }
    }

    /// Returns the holders with their permits, the oldest first.
    fn holders(found: &Found) -> Vec<(u64, Option<u32>)> {
        let holders = found.holders(&Names::new("p"), &key());
        holders.iter().map(|holding| (holding.named.holder.serial(), holding.permit)).collect()
    }

    #[test]
    fn the_oldest_entry_holds_and_the_others_wait() {
        let names = Names::new("p");
        let mut keys = BTreeMap::new();
        for (serial, created) in [(1, 12), (2, 11), (3, 13)] {
            add_entry(&names, &mut keys, kv(names.entry(&key(), holder(serial), Mode::Exclusive), created));
        }
        add_entry(&names, &mut keys, kv(b"p/q/not ours".to_vec(), 1));
        assert_eq!(keys.len(), 1);
        assert_eq!(keys[&key()].entries.len(), 3);
        assert_eq!(holders(&keys[&key()]), [(2, None)]);
    }

    #[test]
    fn the_shared_entries_before_the_first_other_one_hold() {
        use Mode::{Exclusive, Shared};
        let queue = [(1, Shared, 12), (2, Shared, 11), (3, Exclusive, 13), (4, Shared, 14)];
        assert_eq!(holders(&found(&queue, &[])), [(2, None), (1, None)]);
        assert_eq!(holders(&found(&[(1, Exclusive, 11), (2, Shared, 12)], &[])), [(1, None)]);
    }

    #[test]
    fn the_entries_with_a_number_hold_a_permit() {
        let queue = [(1, TWO, 11), (2, TWO, 12), (3, TWO, 13)];
        assert_eq!(holders(&found(&queue, &[(1, 1), (0, 2)])), [(1, Some(1)), (2, Some(0))]);
        assert_eq!(
            holders(&found(&queue, &[(1, 1)])),
            [(1, Some(1))],
            "the second one has not taken its number"
        );
        assert_eq!(holders(&found(&[(9, Mode::Exclusive, 10), (1, TWO, 11)], &[])), [(9, None)]);
    }

    #[test]
    fn a_waiter_behind_a_cooldown_is_no_holder() {
        let names = Names::new("p");
        let holds = |mode, started_by| {
            let cooldown = Some(kv(names.cooldown_of(&key(), holder(started_by)), 9));
            !holders(&Found { cooldown, ..found(&[(1, mode, 11)], &[]) }).is_empty()
        };
        assert!(!holds(Mode::Exclusive, 2) && !holds(Mode::Shared, 2));
        assert!(holds(Mode::Exclusive, 1), "its own cooldown");
    }

    #[test]
    fn the_time_left_of_a_lease_is_at_most_its_ttl() {
        assert_eq!(time_left(0, 2), Some(Duration::from_millis(500)), "its last second");
        assert_eq!(time_left(2, 2), Some(Duration::from_secs(2)));
        assert_eq!(time_left(-1, 0), None, "it has ended");
    }
}
