//! A process that takes locks, and writes down what it saw while it believed to hold them.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use leasehold::{FencingToken, Lock, LockExt as _, LockGuard, Validity};
use rustix::time::{ClockId, clock_gettime};

/// `SEED` of this worker, and where it works and writes.
pub(crate) const SEED: &str = "LEASEHOLD_TORTURE_WORKER";
pub(crate) const URL: &str = "LEASEHOLD_TORTURE_URL";
pub(crate) const DIR: &str = "LEASEHOLD_TORTURE_DIR";
/// The worker ends gracefully once this file is there.
pub(crate) const STOP: &str = "stop";

const KEYS: [&str; 3] = ["a", "b", "c"];
/// No call, and no wait for another process's write, is longer.
const PATIENCE: Duration = Duration::from_millis(500);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker() {
    let Ok(seed) = std::env::var(SEED) else { return };
    let mut random = fastrand::Rng::with_seed(seed.parse().unwrap());
    let (url, dir) = (std::env::var(URL).unwrap(), std::env::var(DIR).unwrap());
    let dir = Path::new(&dir);
    let mut record = File::create(dir.join(format!("worker-{seed}.record"))).unwrap();
    while !dir.join(STOP).exists() {
        // The server may be away.
        let Ok(lock) = leasehold::connect(&url).await else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        while !dir.join(STOP).exists() {
            section(&lock, &mut random, dir, &mut record).await;
        }
    }
}

async fn section(lock: &Arc<dyn Lock>, random: &mut fastrand::Rng, dir: &Path, record: &mut File) {
    let key = KEYS[random.usize(..KEYS.len())];
    let Ok(guard) = lock.key(key).wait(PATIENCE).acquire().await else {
        // A refused connection answers at once.
        tokio::time::sleep(Duration::from_millis(5)).await;
        return;
    };
    let begin = now();
    let token = guard.token().map(FencingToken::as_u64);
    line(record, &format!("B {key} {begin} {}", or_dash(token)));
    let pause = Duration::from_micros(random.u64(..4000));
    let plain = read_then_write(&register(dir, key, "plain"), None, pause).await;
    let fenced = match token {
        Some(token) => read_then_write(&register(dir, key, "fenced"), Some(token), pause).await,
        None => None,
    };
    end(&guard, fenced, plain, record);
    if random.u8(..20) == 0 {
        drop(guard);
    } else {
        // Its outcome is of no interest: what counts is what others see.
        let _ = guard.release().await;
    }
}

fn end(guard: &LockGuard, fenced: Option<u64>, plain: Option<u64>, record: &mut File) {
    // The clock first: what is valid after it was valid then.
    let at = now();
    let validity = if guard.validity() == Validity::Valid { "valid" } else { "lost" };
    line(record, &format!("E {at} {validity} {} {}", or_dash(fenced), plain.unwrap_or_default()));
}

fn or_dash(number: Option<u64>) -> String {
    number.map_or_else(|| "-".to_owned(), |number| number.to_string())
}

/// In one write, so that death does not tear it.
fn line(record: &mut File, line: &str) {
    record.write_all(format!("{line}\n").as_bytes()).unwrap();
}

/// Of the clock that all processes of the machine share.
fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    u64::try_from(now.tv_sec).unwrap() * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap()
}

fn register(dir: &Path, key: &str, name: &str) -> File {
    let path = dir.join(format!("{key}.{name}"));
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

/// Adds one to the register, with a pause between reading and writing. A fenced register refuses whoever comes with a
/// token below the highest it has seen, to read as well.
async fn read_then_write(register: &File, token: Option<u64>, pause: Duration) -> Option<u64> {
    let value = visit(register, token, |value| value)?;
    tokio::time::sleep(pause).await;
    visit(register, token, |_| value + 1)
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
