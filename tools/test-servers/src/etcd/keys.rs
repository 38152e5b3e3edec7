//! Reads and writes of keys, beside the store.

use std::time::Instant;

use serde_json::{Value, json};

use super::api::{Refusal, decoded, encoded, number};
use super::{ELECTED, Etcd, Inner, PAUSE};
use crate::or_panic;

/// The code of gRPC for a call that might succeed later, for example without a leader.
const UNAVAILABLE: u64 = 14;

/// A key with its value.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The key.
    pub key: Vec<u8>,
    /// The value.
    pub value: Vec<u8>,
    /// The revision that created the key.
    pub created: u64,
    /// The revision of the last write.
    pub modified: u64,
    /// The lease that the key ends with, or 0.
    pub lease: i64,
}

impl Etcd {
    /// Writes a key without a lease.
    ///
    /// # Errors
    ///
    /// A refusal, for example without space.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn put(&self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Result<u64, Refusal> {
        let body = json!({ "key": encoded(key), "value": encoded(value) });
        self.calls(move |inner| inner.insist("kv/put", &body)).await.map(|reply| revision(&reply))
    }

    /// Deletes all keys that begin with `prefix`. Returns their number.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn delete(&self, prefix: impl AsRef<[u8]>) -> u64 {
        let reply = self.ask("kv/deleterange", range(prefix.as_ref())).await;
        number(&reply["deleted"])
    }

    /// Returns the keys that begin with `prefix`, the oldest first.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn entries(&self, prefix: impl AsRef<[u8]>) -> Vec<Entry> {
        let reply = self.ask("kv/range", range(prefix.as_ref())).await;
        let mut entries: Vec<_> = reply["kvs"].as_array().into_iter().flatten().map(entry).collect();
        entries.sort_by_key(|entry| entry.created);
        entries
    }

    /// Returns all leases.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn leases(&self) -> Vec<i64> {
        let reply = self.ask("lease/leases", json!({})).await;
        reply["leases"].as_array().into_iter().flatten().map(|lease| id(&lease["ID"])).collect()
    }

    /// Ends a lease and deletes its keys. Returns whether the lease existed.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn revoke(&self, lease: i64) -> bool {
        let body = json!({ "ID": lease.to_string() });
        self.calls(move |inner| inner.insist("lease/revoke", &body)).await.is_ok()
    }

    /// Returns the number of the last write.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn revision(&self) -> u64 {
        // Reads linearizably, because the state of one member can be old.
        let reply = self.ask("kv/range", json!({ "key": encoded("x"), "count_only": true })).await;
        revision(&reply)
    }

    /// Deletes the history before the last write. Returns that revision.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn compact(&self) -> u64 {
        let revision = self.revision().await;
        // `physical` waits until the old values are removed. A defragmentation before that would keep their space.
        let body = json!({ "revision": revision.to_string(), "physical": true });
        // Another compaction at the same revision is refused.
        let _ = self.calls(move |inner| inner.call("kv/compaction", &body)).await;
        revision
    }

    /// Makes a call that the members must carry out.
    pub(super) async fn ask(&self, path: &'static str, body: Value) -> Value {
        let reply = self.calls(move |inner| inner.insist(path, &body)).await;
        or_panic(reply.map_err(|refusal| format!("etcd refused {path}: {refusal}")))
    }
}

impl Inner {
    /// Makes a call, and repeats it while an election interferes or a busy machine delays the reply. The first copy of a
    /// repeated call was possibly carried out.
    fn insist(&self, path: &str, body: &Value) -> Result<Value, Refusal> {
        let start = Instant::now();
        loop {
            match self.call(path, body) {
                Err(refusal)
                    if matches!(refusal.code, None | Some(UNAVAILABLE)) && start.elapsed() < ELECTED =>
                {
                    std::thread::sleep(PAUSE);
                }
                reply => return reply,
            }
        }
    }
}

/// Returns the request of the keys that begin with `prefix`.
fn range(prefix: &[u8]) -> Value {
    json!({ "key": encoded(prefix), "range_end": encoded(end(prefix)) })
}

/// Returns the first key after all keys that begin with `prefix`.
pub(super) fn end(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end;
        }
    }
    // All keys.
    vec![0]
}

fn entry(value: &Value) -> Entry {
    Entry {
        key: decoded(&value["key"]),
        value: decoded(&value["value"]),
        created: number(&value["create_revision"]),
        modified: number(&value["mod_revision"]),
        lease: id(&value["lease"]),
    }
}

fn id(value: &Value) -> i64 {
    value.as_str().and_then(|text| text.parse().ok()).unwrap_or_default()
}

fn revision(reply: &Value) -> u64 {
    number(&reply["header"]["revision"])
}
