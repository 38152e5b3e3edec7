//! A replica of `docs/cookbook/leader.md`. Start several with `DATABASE_URL=postgres://user@localhost/db cargo run -p
//! cookbook --example leader -- 127.0.0.1:3001`, each with another port, then: `curl 127.0.0.1:3001/leader` and `curl
//! -X POST 127.0.0.1:3001/leader/step-down`
#![allow(clippy::print_stdout)]

use std::sync::Arc;

use cookbook::leader::{Inbox, KEY, lead, pages};
use leasehold_api::Lock;
use leasehold_election::Election;
use leasehold_postgres::PgConfig;
use leasehold_postgres_ttl::TtlConfig;
use tokio::net::TcpListener;
use tokio::sync::mpsc::unbounded_channel;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::var("DATABASE_URL")
        .map_err(|_| "set DATABASE_URL, such as postgres://user@localhost/db")?;
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:3001".to_owned());
    let config = PgConfig::from_url(&url)?.install_schema(true);
    let lock: Arc<dyn Lock> = Arc::new(TtlConfig::new(config).connect().await?);

    let election = Election::new(Arc::clone(&lock), KEY).value(address.as_str());
    let router = pages(election.handle(), Arc::clone(&lock));
    let (rounds, mut done) = unbounded_channel();
    let campaign = tokio::spawn(async move { lead(&election, &Inbox::new(rounds)).await });
    tokio::spawn(async move {
        let mut last = None;
        while let Some(token) = done.recv().await {
            if std::mem::replace(&mut last, token) != token {
                println!("working with token {token:?}");
            }
        }
    });

    let listener = TcpListener::bind(&address).await?;
    println!("http://{address}/leader");
    let stopped = async { drop(tokio::signal::ctrl_c().await) };
    axum::serve(listener, router).with_graceful_shutdown(stopped).await?;
    // Ends the work, then releases the lock, so another replica leads at once.
    lock.close().await?;
    println!("{:?}", campaign.await?);
    Ok(())
}
