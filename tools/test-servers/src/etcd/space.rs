//! The space of the database, and the counters of a member.

use serde_json::{Value, json};

use super::Etcd;
use super::api::Refusal;
use crate::or_panic;

/// Prefix of the keys that fill the database.
const FILL: &str = "fill/";

/// The code of gRPC for a full database.
const RESOURCE_EXHAUSTED: u64 = 8;

/// A counter of a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counter {
    /// Proposals that the member has applied.
    Proposals,
    /// Calls of `KV.Txn` that succeeded.
    Transactions,
    /// Calls of `KV.Range` that succeeded.
    Reads,
    /// Calls of `Lease.LeaseGrant` that succeeded.
    LeaseGrants,
    /// Messages on streams of `Lease.LeaseKeepAlive`.
    KeepAlives,
}

impl Counter {
    /// Returns the start of the counter's lines.
    fn line(self) -> &'static str {
        match self {
            Self::Proposals => "etcd_server_proposals_applied_total",
            Self::Transactions => {
                r#"grpc_server_handled_total{grpc_code="OK",grpc_method="Txn",grpc_service="etcdserverpb.KV""#
            }
            Self::Reads => {
                r#"grpc_server_handled_total{grpc_code="OK",grpc_method="Range",grpc_service="etcdserverpb.KV""#
            }
            Self::LeaseGrants => {
                r#"grpc_server_handled_total{grpc_code="OK",grpc_method="LeaseGrant",grpc_service="etcdserverpb.Lease""#
            }
            Self::KeepAlives => {
                r#"grpc_server_msg_received_total{grpc_method="LeaseKeepAlive",grpc_service="etcdserverpb.Lease""#
            }
        }
    }
}

impl Etcd {
    /// Returns a counter of a member.
    ///
    /// # Panics
    ///
    /// If the member does not reply.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn counter(&self, member: usize, counter: Counter) -> u64 {
        let text = self.calls(move |inner| inner.api(member).metrics()).await;
        let text = or_panic(text.map_err(|refusal| format!("no counters of member {member}: {refusal}")));
        let lines = text.lines().filter(|line| line.starts_with(counter.line()));
        let values = lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        // Counters are whole numbers, which the server prints as floating point.
        values.sum::<f64>().round() as u64
    }

    /// Fills the database until writes are refused (`NOSPACE`). The cluster needs a small
    /// [quota](crate::EtcdOptions::quota).
    ///
    /// # Panics
    ///
    /// If 200 values of 100 kB fit.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn fill(&self) -> Refusal {
        for number in 0..200 {
            match self.put(format!("{FILL}{number}"), [b'x'; 100_000]).await {
                Ok(_) => {}
                Err(refusal) if refusal.code == Some(RESOURCE_EXHAUSTED) => return refusal,
                Err(refusal) => or_panic(Err(format!("cannot fill the database: {refusal}"))),
            }
        }
        or_panic(Err("the quota of the cluster is too large to be filled".to_owned()))
    }

    /// Makes room after [`Self::fill`], and ends the alarm.
    ///
    /// # Panics
    ///
    /// If a member refuses it.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn make_room(&self) {
        self.delete(FILL).await;
        self.compact().await;
        for member in 0..self.members() {
            let call = move |inner: &super::Inner| {
                inner.api(member).call_slowly("maintenance/defragment", &json!({}))
            };
            let done = self.calls(call).await;
            or_panic(done.map_err(|refusal| format!("cannot defragment member {member}: {refusal}")));
        }
        for mut alarm in self.alarms().await {
            alarm["action"] = json!("DEACTIVATE");
            self.ask("maintenance/alarm", alarm).await;
        }
    }

    /// Returns whether a member has run out of space.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn is_full(&self) -> bool {
        !self.alarms().await.is_empty()
    }

    /// Returns all alarms, each with its member.
    async fn alarms(&self) -> Vec<Value> {
        let reply = self.ask("maintenance/alarm", json!({ "action": "GET" })).await;
        reply["alarms"].as_array().cloned().unwrap_or_default()
    }
}
