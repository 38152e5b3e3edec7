//! Runs the ledger until a signal stops it.

use std::process::ExitCode;

use clap::Parser;
use ledger::{Mode, Options};

/// A credit ledger over HTTP, with and without a lock. The page at its address shows the outcome.
#[derive(Parser)]
#[command(name = "ledger", version)]
struct Arguments {
    /// The ledger's database, as `postgres://user@host/database`. Without it, the ledger is in this process.
    #[arg(long, env = "DATABASE_URL", hide_env_values = true, value_name = "URL")]
    database_url: Option<String>,
    /// The guard of spending.
    #[arg(long, value_enum)]
    lock: Option<Mode>,
    /// The port on loopback, or 0 for any free port.
    #[arg(long, default_value_t = 3000)]
    port: u16,
    /// Starts the load at once: clients that spend and top up for a minute.
    #[arg(long)]
    load: bool,
}

#[tokio::main]
async fn main() -> ExitCode {
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(tracing::Level::WARN).init();
    match run(Arguments::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprint!("ledger: {error}");
            let mut next = error.source();
            while let Some(source) = next {
                eprint!(": {source}");
                next = source.source();
            }
            eprintln!();
            ExitCode::FAILURE
        }
    }
}

async fn run(arguments: Arguments) -> Result<(), Box<dyn std::error::Error>> {
    let mut options = Options::default();
    // Ignores an empty value, because some tools unset a variable this way.
    options.database_url = arguments.database_url.filter(|url| !url.is_empty());
    options.mode = arguments.lock;
    options.port = arguments.port;
    options.load = arguments.load;
    let running = ledger::start(options).await?;
    println!("http://{}/ shows the ledger; Ctrl-C stops it", running.address());
    told_to_stop().await?;
    running.stop().await?;
    println!("stopped");
    Ok(())
}

/// Resolves on Ctrl-C or on the default signal of `kill`.
#[cfg(unix)]
async fn told_to_stop() -> std::io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        told = tokio::signal::ctrl_c() => told,
        _ = terminate.recv() => Ok(()),
    }
}

#[cfg(not(unix))]
async fn told_to_stop() -> std::io::Result<()> {
    tokio::signal::ctrl_c().await
}
