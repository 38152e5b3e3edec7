//! Names of the stores and faults of the torture test on the command line.

/// The tested stores.
pub const STORES: [&str; 5] = ["files", "session", "transaction", "row", "lease"];

/// The faults, in the order of the enumeration `Fault`.
pub const FAULTS: [&str; 17] = [
    "kill",
    "kill-command",
    "stop",
    "end",
    "end-sessions",
    "restart",
    "crash",
    "freeze",
    "reset",
    "cut",
    "silence",
    "lose-reply",
    "delay",
    "promote",
    "disk-full",
    "server-clock",
    "client-clock",
];
