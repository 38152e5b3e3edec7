//! Names of the stores and faults of the torture test on the command line.

/// The tested stores.
pub const STORES: [&str; 6] = ["files", "session", "transaction", "row", "lease", "etcd"];

/// The faults, in the order of the enumeration `Fault`.
pub const FAULTS: [&str; 28] = [
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
    "kill-leader",
    "kill-member",
    "stop-leader",
    "stop-follower",
    "isolate-leader",
    "no-quorum",
    "move-leader",
    "compact",
    "no-space",
    "end-logins",
    "put-back",
];
