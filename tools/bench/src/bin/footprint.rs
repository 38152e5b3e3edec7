//! Measures the memory of keys: a million used once, and a hundred thousand held. Prints rows of the report as JSON.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::alloc::System;

use bench::report::Row;
use leasehold_api::{AcquireOptions, Lock, LockKey};
use leasehold_memory::MemoryStore;
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const USED_ONCE: u64 = 1_000_000;
const HELD: usize = 100_000;
/// Allowance for the room that tables keep for more keys.
const LEFT_AT_MOST: isize = 256 * 1024;

fn live_bytes(region: &Region<'_, System>) -> isize {
    let change = region.change();
    isize::try_from(change.bytes_allocated).unwrap() - isize::try_from(change.bytes_deallocated).unwrap()
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let part = if std::env::args().any(|argument| argument == "--smoke") { 100 } else { 1 };
    let (used_once, held) = (USED_ONCE / part, HELD / usize::try_from(part).unwrap());
    let lock = MemoryStore::new().client().unwrap();
    let options = AcquireOptions::new();

    let region = Region::new(ALLOCATOR);
    for i in 0..used_once {
        let key = LockKey::new(format!("once:{i}")).unwrap();
        lock.acquire(&key, &options).await.unwrap().release().await.unwrap();
    }
    let left_once = live_bytes(&region);
    assert_eq!(lock.active_keys(), 0);

    let keys: Vec<_> = (0..held).map(|i| LockKey::new(format!("held:{i}")).unwrap()).collect();
    let mut guards = Vec::with_capacity(held);
    let region = Region::new(ALLOCATOR);
    for key in &keys {
        guards.push(lock.acquire(key, &options).await.unwrap());
    }
    let each = live_bytes(&region) / isize::try_from(held).unwrap();
    guards.clear();
    let left_held = live_bytes(&region);

    let rows = [
        left(&format!("{used_once} keys used once"), left_once),
        left(&format!("{held} held keys, after their release"), left_held),
        Row {
            work: format!("{held} held keys, without their text"),
            measured: format!("{each} bytes each"),
            ..Row::default()
        },
    ];
    println!("{}", serde_json::to_string(&rows).unwrap());
}

/// Returns a row about the memory that keys leave behind.
fn left(work: &str, bytes: isize) -> Row {
    Row {
        work: work.to_owned(),
        measured: format!("{bytes} bytes left"),
        goal: format!("at most {LEFT_AT_MOST} bytes"),
        met: Some(bytes <= LEFT_AT_MOST),
        ..Row::default()
    }
}
