//! One program on any store. A feature of cargo chooses the store:
//!
//! ```text
//! cargo run -p leasehold --example swap --no-default-features --features memory
//! cargo run -p leasehold --example swap --no-default-features --features file
//! LEASEHOLD_URL='postgres+ttl://app@localhost/app?install=true' \
//!     cargo run -p leasehold --example swap --no-default-features --features postgres-ttl
//! LEASEHOLD_URL='etcd://localhost:2379/shop' \
//!     cargo run -p leasehold --example swap --no-default-features --features etcd
//! ```
//!
//! `LEASEHOLD_URL` chooses among the stores that the program was built with.

use std::error::Error;

use shop::{Clerk, Stock};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// The code of the domain, which names no store.
pub mod shop {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use leasehold::{Error, Lock, LockExt as _};

    /// The number of items left.
    #[derive(Clone, Debug)]
    pub struct Stock(Arc<AtomicU32>);

    impl Stock {
        /// Returns a stock of `items`.
        pub fn of(items: u32) -> Self {
            Self(Arc::new(AtomicU32::new(items)))
        }
    }

    /// Sells from a stock that other clerks sell from as well.
    #[derive(Debug)]
    pub struct Clerk {
        /// The lock that excludes the other clerks.
        pub lock: Arc<dyn Lock>,
        /// The items for sale.
        pub stock: Stock,
    }

    impl Clerk {
        /// Sells an item. Returns whether an item was left to sell.
        ///
        /// # Errors
        ///
        /// The lock's error. After a failed release, the item might be sold.
        ///
        /// # Cancel safety
        ///
        /// If dropped, the lock is released in the background. The item might be sold.
        pub async fn sell(&self) -> Result<bool, Error> {
            let guard = self.lock.key("shop:stock").acquire().await?;
            let left = self.stock.0.load(Ordering::SeqCst);
            // Lets other clerks run here. Without the lock, another clerk would read the same number.
            tokio::task::yield_now().await;
            if left > 0 {
                self.stock.0.store(left - 1, Ordering::SeqCst);
            }
            guard.release().await?;
            Ok(left > 0)
        }
    }
}

#[tokio::main]
pub(crate) async fn main() -> Result<()> {
    let sold = run(&url()?).await?;
    println!("{sold} sold of 5");
    Ok(())
}

/// Returns the URL of the store. No other line depends on the store.
fn url() -> Result<String> {
    if let Ok(url) = std::env::var("LEASEHOLD_URL") {
        return Ok(url);
    }
    if cfg!(feature = "file") {
        Ok(format!("file://{}/leasehold-swap", std::env::temp_dir().display()))
    } else if cfg!(feature = "memory") {
        Ok("memory:swap".to_owned())
    } else {
        Err("set LEASEHOLD_URL, such as postgres+ttl://app@localhost/app?install=true".into())
    }
}

/// Sells the last five items through two clients of the store, with four attempts each. Returns the number sold.
///
/// # Cancel safety
///
/// If dropped, the sales under way stop, and their locks are released. Sold items stay sold.
pub async fn run(url: &str) -> Result<usize> {
    let stock = Stock::of(5);
    let clerk = async || {
        Ok::<_, leasehold::Error>(Clerk { lock: leasehold::connect(url).await?, stock: stock.clone() })
    };
    let (one, other) = (clerk().await?, clerk().await?);
    let sales = tokio::try_join!(
        one.sell(),
        one.sell(),
        one.sell(),
        one.sell(),
        other.sell(),
        other.sell(),
        other.sell(),
        other.sell(),
    )?;
    let (a, b, c, d, e, f, g, h) = sales;
    one.lock.close().await?;
    other.lock.close().await?;
    Ok([a, b, c, d, e, f, g, h].into_iter().filter(|sold| *sold).count())
}
