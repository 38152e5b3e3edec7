//! A credit ledger over HTTP, with and without a lock.

fn main() {}
