//! The protected resources: two numbers in files per key. The fenced number refuses older tokens.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

pub(crate) const KEYS: [&str; 16] =
    ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "p"];

/// Adds one to a register of a key, with a pause between reading and writing. Returns the written value. With a token, uses
/// the fenced register, which refuses reads and writes with a token below its highest, and returns `None` then.
pub(crate) async fn add_one(dir: &Path, key: &str, token: Option<u64>, pause: Duration) -> Option<u64> {
    let register = open(dir, key, if token.is_some() { "fenced" } else { "plain" });
    let value = visit(&register, token, |value| value)?;
    if pause.is_zero() {
        tokio::task::yield_now().await;
    } else {
        tokio::time::sleep(pause).await;
    }
    visit(&register, token, |_| value + 1)
}

/// Waits until each key was granted again, at most `limit`. The checker takes the times from the records, not from here.
pub(crate) async fn settle(dir: &Path, limit: Duration) {
    let (before, begun) = (values(dir), Instant::now());
    // Waits for two updates, because the first one might belong to an earlier grant.
    let is_granted = |(before, now): (&u64, u64)| now >= before + 2;
    while !before.iter().zip(values(dir)).all(is_granted) && begun.elapsed() < limit {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Returns the plain registers of all keys. Reads without the file lock, because a stopped worker might hold it.
fn values(dir: &Path) -> [u64; KEYS.len()] {
    KEYS.map(|key| {
        let mut bytes = [0; 8];
        open(dir, key, "plain").read_at(&mut bytes, 0).unwrap();
        u64::from_le_bytes(bytes)
    })
}

fn open(dir: &Path, key: &str, name: &str) -> File {
    let path = dir.join(format!("{key}.{name}"));
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

fn visit(register: &File, token: Option<u64>, change: impl FnOnce(u64) -> u64) -> Option<u64> {
    register.lock().unwrap();
    let mut bytes = [0; 16];
    let filled = register.read_at(&mut bytes, 0).unwrap();
    assert!(filled == 0 || filled == bytes.len());
    let (value, highest) = bytes.split_at(8);
    let value = u64::from_le_bytes(value.try_into().unwrap());
    let highest = u64::from_le_bytes(highest.try_into().unwrap());
    let token = token.unwrap_or_default();
    let changed = (token >= highest).then(|| change(value));
    if let Some(changed) = changed {
        let bytes = [changed.to_le_bytes(), token.to_le_bytes()].concat();
        register.write_all_at(&bytes, 0).unwrap();
    }
    register.unlock().unwrap();
    changed
}
