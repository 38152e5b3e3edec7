//! Checks the output of the example.

#![allow(clippy::unwrap_used)]

#[allow(dead_code, unreachable_pub)] // A program, of which the test uses parts.
#[path = "../examples/namespaced.rs"]
mod namespaced;

use std::sync::Arc;

#[tokio::test]
async fn equal_names_in_two_namespaces_are_two_keys() {
    let steps = namespaced::run(Arc::new(leasehold_memory::connect().unwrap())).await.unwrap();
    let expected = [
        "billing holds nightly",
        "billing once more: refused",
        "search: granted",
        "billing after its release: granted",
    ];
    assert_eq!(steps, expected);
}
