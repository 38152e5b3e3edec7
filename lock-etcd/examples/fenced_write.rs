//! A write in etcd that is carried out only while the lock is held.
//!
//! Run it with the URL of a cluster: `cargo run -p leasehold-etcd --example fenced_write -- etcd://127.0.0.1:2379/locks`.

use leasehold_api::{Error, ErrorKind, LockExt as _};
use leasehold_engine::Engine;
use leasehold_etcd::{EtcdFence, EtcdGuardExt as _, EtcdWrite};

/// Writes under the lock, then shows that the fence of a released hold refuses a write.
///
/// # Errors
///
/// The store's error.
pub async fn fenced_write(lock: &Engine) -> Result<(), Error> {
    let guard = lock.key("ledger:42").acquire().await?;
    let late = guard.extension::<EtcdFence>().cloned();
    guard.write(vec![EtcdWrite::put("example/ledger/42", "90")]).await?;
    guard.release().await?;
    if let Some(late) = late {
        // A holder that was paused for longer than its lease would write here.
        let refused = late.write(vec![EtcdWrite::put("example/ledger/42", "80")]).await;
        assert_eq!(refused.map_err(|error| error.kind()), Err(ErrorKind::Lost));
    }
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "etcd://127.0.0.1:2379/locks".to_owned());
    let lock = leasehold_etcd::connect(&url).await?;
    fenced_write(&lock).await
}
