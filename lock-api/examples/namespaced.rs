//! Two services on one store. Each has a namespace, so equal names are different keys.
//!
//! ```text
//! cargo run -p leasehold-api --example namespaced
//! ```

use std::sync::Arc;

use leasehold_api::{Error, Lock, LockExt as _, Namespaced};

#[tokio::main]
async fn main() -> Result<(), Error> {
    for line in run(Arc::new(leasehold_memory::connect()?)).await? {
        println!("{line}");
    }
    Ok(())
}

/// Returns the result of each step, one line each.
pub async fn run(store: Arc<dyn Lock>) -> Result<Vec<String>, Error> {
    let billing = Namespaced::new(Arc::clone(&store), "billing")?;
    let search = Namespaced::new(store, "search")?;
    let said = |who: &str, granted: bool| format!("{who}: {}", if granted { "granted" } else { "refused" });

    let held = billing.key("nightly").acquire().await?;
    let mut steps = vec![format!("billing holds {}", held.key())];
    steps.push(said("billing once more", billing.key("nightly").try_acquire().await?.is_some()));
    steps.push(said("search", search.key("nightly").try_acquire().await?.is_some()));
    held.release().await?;
    steps.push(said("billing after its release", billing.key("nightly").try_acquire().await?.is_some()));
    Ok(steps)
}
