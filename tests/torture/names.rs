//! What stores and faults are called on the command line; `xtask` reads this file too.

/// The stores that are tortured.
pub(crate) const STORES: [&str; 5] = ["files", "session", "transaction", "row", "lease"];

/// The faults, in the order of the enumeration `Fault`.
pub(crate) const FAULTS: [&str; 17] = [
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
