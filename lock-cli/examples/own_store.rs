//! The command `leasehold` with a custom store: a program that registers the store's scheme, then calls the command.
//!
//! ```text
//! cargo run -p leasehold-cli --example own_store -- run report --url shelf:///tmp/locks -- echo done
//! ```

use std::process::ExitCode;

fn main() -> ExitCode {
    run()
}

/// Runs the command. Returns its exit code.
pub fn run() -> ExitCode {
    // Opens a store of files for the scheme `shelf:`, because this example does not implement a store.
    let open = |url: String| async move { leasehold::connect(&url.replacen("shelf:", "file:", 1)).await };
    if let Err(error) = leasehold::register_scheme("shelf", open) {
        eprintln!("{error}");
        return ExitCode::FAILURE;
    }
    leasehold_cli::main()
}
