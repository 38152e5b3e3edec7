//! Tests of errors.

use super::*;

#[test]
fn names_key_store_and_reason() {
    let key = LockKey::new("ledger:42").unwrap();
    let error = Error::lost(LossReason::Expired).with_key(&key).with_store("memory:ledger");
    let text = error.to_string();
    for part in ["lost", "ledger:42", "memory:ledger", "expired", "acquire it anew"] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn first_key_and_store_stay() {
    let [a, b] = ["a", "b"].map(|k| LockKey::new(k).unwrap());
    let error = Error::closed().with_key(&a).with_key(&b).with_store("x").with_store("y");
    assert_eq!(error.key(), Some(&a));
    assert_eq!(error.store(), Some("x"));
}

#[test]
fn every_clone_keeps_the_source() {
    let error = Error::new(ErrorKind::Unavailable, "no answer").with_source(std::io::Error::other("cable"));
    let [a, b] = ["a", "b"].map(|k| error.clone().with_key(&LockKey::new(k).unwrap()));
    assert_eq!(
        (a.source().unwrap().to_string(), b.source().unwrap().to_string()),
        ("cable".into(), "cable".into())
    );
    assert_eq!((error.key(), a.key().unwrap().as_str(), b.key().unwrap().as_str()), (None, "a", "b"));
}

#[test]
fn every_kind_says_whether_it_passes_and_whether_it_can_recover() {
    use ErrorKind::{
        Capacity, Closed, Corrupt, Deadlock, InvalidKey, InvalidOption, Lost, ModeMismatch, NeedsOperator,
        NoRuntime, NotDue, OutcomeUnknown, PermissionDenied, SchemaMissing, Timeout, Unavailable,
        Unsupported,
    };
    let passes = [Timeout, NotDue, OutcomeUnknown, Deadlock, Capacity, Unavailable];
    let is_repaired = [Lost, NeedsOperator, SchemaMissing, PermissionDenied, Corrupt, ModeMismatch];
    let stays = [InvalidKey, InvalidOption, Unsupported, Closed, NoRuntime];
    let said = |kind: &ErrorKind| (kind.is_transient(), kind.can_recover());
    assert!(passes.iter().all(|kind| said(kind) == (true, true)));
    assert!(is_repaired.iter().all(|kind| said(kind) == (false, true)));
    assert!(stays.iter().all(|kind| said(kind) == (false, false)));
    for kind in passes.into_iter().chain(is_repaired).chain(stays) {
        // No `_` arm: a new kind has to be put into one of the lists above.
        match kind {
            InvalidKey | InvalidOption | Timeout | NotDue | Lost | OutcomeUnknown | Deadlock
            | Unsupported | Capacity | NeedsOperator | SchemaMissing | PermissionDenied | Unavailable
            | Corrupt | Closed | NoRuntime | ModeMismatch => {}
        }
    }
}

#[test]
fn what_was_released_or_has_run_is_not_retried() {
    let error = || Error::new(ErrorKind::Unavailable, "no answer");
    assert!(error().with_operation(Operation::Acquire).is_retryable());
    for operation in [Operation::Release, Operation::GiveOut, Operation::Run] {
        assert!(!error().with_operation(operation).is_retryable(), "{operation}");
    }
    let lost = || Error::lost(LossReason::Expired);
    assert!(lost().with_operation(Operation::Acquire).is_retryable());
    assert!(!lost().is_retryable());
}
