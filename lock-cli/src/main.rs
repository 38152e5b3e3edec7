//! The command `leasehold`: see the library of this package.

fn main() -> std::process::ExitCode {
    leasehold_cli::main()
}
