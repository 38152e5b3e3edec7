//! The command `leasehold` with a custom store: a program that registers the store's scheme, then calls the command.
//!
//! ```text
//! cargo run -p leasehold-cli --example own_store -- run report --url shelf:///tmp/locks -- echo done
//! ```

use std::process::ExitCode;

use leasehold::Error;
use leasehold::engine::scheme::{Scheme, StoreConfig, StoreUrl};

fn main() -> ExitCode {
    run()
}

/// Runs the command. Returns its exit code.
pub fn run() -> ExitCode {
    if let Err(error) = leasehold::register_scheme(Scheme::new(&["shelf"], read)) {
        eprintln!("{error}");
        return ExitCode::FAILURE;
    }
    leasehold_cli::main()
}

/// Reads a URL of the scheme `shelf:`. It names a store of files, because this example does not implement a store.
fn read(url: &StoreUrl) -> Result<Box<dyn StoreConfig>, Error> {
    leasehold::file::SCHEMES[0].read(&StoreUrl { scheme: "file".to_owned(), ..url.clone() })
}
