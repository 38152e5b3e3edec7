//! Memory use of keys: a million used once, and a hundred thousand held.

#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)]

use std::alloc::System;

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
    let lock = MemoryStore::new().client().unwrap();
    let options = AcquireOptions::new();

    let region = Region::new(ALLOCATOR);
    for i in 0..USED_ONCE {
        let key = LockKey::new(format!("once:{i}")).unwrap();
        lock.acquire(&key, &options).await.unwrap().release().await.unwrap();
    }
    let left = live_bytes(&region);
    println!("{USED_ONCE} keys used once leave {left} bytes behind (at most {LEFT_AT_MOST})");
    assert!(left <= LEFT_AT_MOST, "keys that were used once leave memory behind");
    assert_eq!(lock.active_keys(), 0);

    let keys: Vec<_> = (0..HELD).map(|i| LockKey::new(format!("held:{i}")).unwrap()).collect();
    let mut guards = Vec::with_capacity(HELD);
    let region = Region::new(ALLOCATOR);
    for key in &keys {
        guards.push(lock.acquire(key, &options).await.unwrap());
    }
    let held = live_bytes(&region);
    println!(
        "{HELD} held keys take {} bytes each, the key's text not counted",
        held / isize::try_from(HELD).unwrap()
    );

    guards.clear();
    let left = live_bytes(&region);
    println!("after their release {left} bytes are left (at most {LEFT_AT_MOST})");
    assert!(left <= LEFT_AT_MOST, "held keys leave memory behind");
}
