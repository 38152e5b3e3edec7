//! A job that must not restart after a failed run: its row stays locked until an operator releases it.
//!
//! ```text
//! DATABASE_URL=postgres://localhost/test cargo run -p leasehold-postgres-row --example month_end
//! ```

use std::error::Error;

use leasehold_api::{Lock as _, LockExt as _, LockKey};
use leasehold_postgres_row::{PgConfig, RowConfig};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

#[tokio::main]
async fn main() -> Result<()> {
    let url = std::env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL to a database to try this in")?;
    for line in run(&url).await? {
        println!("{line}");
    }
    Ok(())
}

/// Runs the job and the operator. Returns a line for each step.
pub async fn run(url: &str) -> Result<Vec<String>> {
    let connect = async || RowConfig::new(PgConfig::from_url(url)?.install_schema(true)).connect().await;
    let (job, operator) = (connect().await?, connect().await?);
    let key: LockKey = "month-end".parse()?;

    // The job stops half-way and does not release. The guard lives until the end of this function.
    let stuck = job.key(key.clone()).label("closing of June").acquire().await?;
    let mut steps = vec!["the job has started".to_owned()];
    let second = operator.key(key.clone()).try_acquire().await?;
    steps.push(format!("a second run {}", if second.is_some() { "started" } else { "was refused" }));

    // The operator investigates, then ends exactly this grant.
    let admin = operator.admin().ok_or("this store can be administered")?;
    let holds = admin.inspect(&key).await?.holders;
    let hold = holds.first().ok_or("the job holds the key")?;
    steps.push(format!("held for: {}", hold.label.as_deref().unwrap_or_default()));
    let holder = hold.holder.ok_or("the store knows the holder")?;
    steps.push(format!("released by force: {}", admin.force_release(&key, holder).await?));
    steps.push(format!("released by force again: {}", admin.force_release(&key, holder).await?));

    operator.key(key).acquire().await?.release().await?;
    steps.push("the next run is done".to_owned());
    stuck.lost().await;
    steps.push("the job has lost its lock".to_owned());
    Ok(steps)
}
