//! The suite on the table in memory, in each variant of states and leases.

use std::sync::Arc;

use crate::suite::Variant;
use crate::suite::memory::{Bare, run};
use crate::suite::{for_each_case, mount_cases};

mod text {
    use super::*;

    fn start(name: &str) {
        run(Variant::TEXT, Arc::new(Bare), name);
    }

    for_each_case!(mount_cases);
}

mod enumeration {
    use super::*;

    fn start(name: &str) {
        run(Variant::ENUM, Arc::new(Bare), name);
    }

    for_each_case!(mount_cases);
}

mod boolean {
    use super::*;

    fn start(name: &str) {
        run(Variant::BOOLEAN, Arc::new(Bare), name);
    }

    for_each_case!(mount_cases);
}

mod side {
    use super::*;

    fn start(name: &str) {
        run(Variant::SIDE, Arc::new(Bare), name);
    }

    for_each_case!(mount_cases);
}

mod boolean_side {
    use super::*;

    fn start(name: &str) {
        run(Variant::BOOLEAN_SIDE, Arc::new(Bare), name);
    }

    for_each_case!(mount_cases);
}

/// Features of the table in memory only.
mod table {
    use std::time::Duration;

    use leasehold_claim::{
        ClaimError, ClaimSpec, ClaimSpecBuilder, ClaimStore, MemoryClaims, MemoryClock, MemoryRow, OrderType,
        Outcome, RowKey, Sql, States, Table, Take,
    };
    use serde_json::{Map, Value, json};

    fn spec() -> ClaimSpecBuilder {
        ClaimSpec::builder(Table::new("request").unwrap())
            .state("status", States::text(["new"], "complete").taken("in-progress"))
            .lease_columns("owner", "epoch", "lease_until")
    }

    fn columns(value: Value) -> Map<String, Value> {
        value.as_object().unwrap().clone()
    }

    #[test]
    fn a_filter_is_refused() {
        let spec = spec().filter(Sql::trusted("t.region = 'eu'")).build().unwrap();
        match MemoryClaims::new(spec) {
            Err(ClaimError::Unsupported(message)) => {
                assert!(message.contains("t.region = 'eu'"), "{message}");
            }
            other => panic!("{other:?}"),
        }
    }

    /// Exactly at the end of its lease, a row no longer belongs to its owner alone.
    #[tokio::test]
    async fn a_lease_ends_to_the_microsecond() {
        let clock = MemoryClock::stopped();
        let claims = MemoryClaims::with_clock(spec().build().unwrap(), clock.clone()).unwrap();
        claims.insert(MemoryRow::new(1)).unwrap();
        let lease = Duration::from_secs(30);
        assert_eq!(claims.take(&Take::up_to(1).lease(lease)).await.unwrap().claims.len(), 1);
        clock.advance(lease - Duration::from_micros(1));
        assert!(claims.sweep(1).await.unwrap().returned.is_empty());
        clock.advance(Duration::from_micros(1));
        assert_eq!(claims.sweep(1).await.unwrap().returned, [RowKey::new(1)]);
    }

    #[tokio::test]
    async fn columns_are_read_by_the_names_of_the_spec() {
        let spec = spec()
            .order_by("due", OrderType::Time)
            .attempts("tries")
            .ready_at("not_before")
            .group("entity")
            .work(["id", "entity", "due", "document"])
            .build()
            .unwrap();
        let claims = MemoryClaims::new(spec).unwrap();
        let first =
            json!({"id": 1, "due": "2026-01-02T00:00:00+01:00", "tries": 3, "entity": 7, "document": [1]});
        let second = json!({"id": 2, "due": "2026-01-01 22:30:00Z", "not_before": "2026-01-01T00:00:00Z"});
        let late = json!({"id": 3, "due": "2020-01-01T00:00:00Z", "not_before": "2999-01-01T00:00:00Z"});
        for row in [first, second, late] {
            claims.insert_columns(columns(row)).unwrap();
        }
        let taken = claims.take(&Take::up_to(5)).await.unwrap();
        let ids: Vec<String> =
            taken.claims.iter().map(|claimed| claimed.rows[0].key.id.to_string()).collect();
        assert_eq!(ids, ["2", "1"], "by the instant, whatever the zone");
        assert_eq!(taken.claims[1].group.as_deref(), Some("7"));
        assert_eq!(taken.claims[1].rows[0].attempts_left, Some(2));
        assert_eq!(taken.claims[1].rows[0].work["document"], json!([1]));
        assert_eq!(taken.claims[1].rows[0].work["entity"], json!(7));
    }

    #[test]
    fn what_the_table_could_not_hold_is_refused() {
        let claims = MemoryClaims::new(spec().order_by("due", OrderType::Time).build().unwrap()).unwrap();
        let key = claims.insert(MemoryRow::new(1)).unwrap();
        let again = claims.insert(MemoryRow::new(1));
        assert!(matches!(again, Err(ClaimError::Duplicate { .. })), "{again:?}");
        let bad = [
            json!({"status": "new"}),
            json!({"id": "x"}),
            json!({"id": 2, "status": "unheard-of"}),
            json!({"id": 2, "status": null}),
            json!({"id": 2, "epoch": "many"}),
            json!({"id": 2, "lease_until": "soon"}),
            json!({"id": 2, "due": 5}),
        ];
        for row in bad {
            let refused = claims.insert_columns(columns(row.clone()));
            assert!(matches!(refused, Err(ClaimError::InvalidSpec(_))), "{row}: {refused:?}");
        }
        for row in [MemoryRow::new("text"), MemoryRow::new(2).with_queue("none")] {
            assert!(matches!(claims.insert(row), Err(ClaimError::InvalidSpec(_))));
        }
        assert!(matches!(claims.update(&key, "id", json!(2)), Err(ClaimError::InvalidSpec(_))));
        let missing = RowKey::new(9);
        assert!(matches!(claims.update(&missing, "status", json!("new")), Err(ClaimError::NotFound { .. })));
        assert!(matches!(claims.delete(&missing), Err(ClaimError::NotFound { .. })));
        assert!(matches!(claims.expire(&missing), Err(ClaimError::NotFound { .. })));
        assert!(!claims.expire(&key).unwrap(), "it has no lease");
        assert_eq!(claims.rows().len(), 1);
    }

    #[test]
    fn a_locked_row_is_not_changed_by_hand() {
        let claims = MemoryClaims::new(spec().build().unwrap()).unwrap();
        let key = claims.insert(MemoryRow::new(1)).unwrap();
        let lock = claims.lock(&key).unwrap();
        assert!(matches!(claims.lock(&key), Err(ClaimError::Busy { .. })));
        assert!(matches!(claims.update(&key, "status", json!("complete")), Err(ClaimError::Busy { .. })));
        assert!(matches!(claims.delete(&key), Err(ClaimError::Busy { .. })));
        drop(lock);
        claims.update(&key, "status", json!("complete")).unwrap();
        assert_eq!(claims.clone().delete(&key).unwrap().state(), Some(&"complete".into()));
    }

    /// A settle of a locked row gives up after its time limit.
    #[tokio::test(start_paused = true)]
    async fn a_settle_gives_up_waiting() {
        let claims = MemoryClaims::new(spec().build().unwrap()).unwrap();
        let key = claims.insert(MemoryRow::new(1)).unwrap();
        let claim = claims.take(&Take::up_to(1)).await.unwrap().claims[0].claim.clone();
        let lock = claims.lock(&key).unwrap();
        let answer = claims.settle(&[(claim.clone(), Outcome::Done)]).await.unwrap().remove(0);
        assert!(matches!(answer, Err(ClaimError::Busy { .. })), "{answer:?}");
        drop(lock);
        claims.settle(&[(claim, Outcome::Done)]).await.unwrap().remove(0).unwrap();
    }
}
