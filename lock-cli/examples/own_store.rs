//! The command `leasehold` with a store of your own: a program that registers its scheme, then is the command.
//!
//! ```text
//! cargo run -p leasehold-cli --example own_store -- run report --url shelf:///tmp/locks -- echo done
//! ```

use std::process::ExitCode;

fn main() -> ExitCode {
    run()
}

/// The command. Returns its exit code.
pub fn run() -> ExitCode {
    // As a store, this example has files.
    let open = |url: String| async move { leasehold::connect(&url.replacen("shelf:", "file:", 1)).await };
    if let Err(error) = leasehold::register_scheme("shelf", open) {
        eprintln!("{error}");
        return ExitCode::FAILURE;
    }
    leasehold_cli::main()
}
