//! The guards of spending: ways to lock an account.

use serde::{Deserialize, Serialize};

/// The guard of `POST /accounts/{holder}/spend`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Mode {
    /// No guard, which shows how spends overlap.
    None,
    /// The layer, with locks in this process (the default without a database).
    Memory,
    /// The layer, with advisory locks of a session (the default with a database).
    Session,
    /// The layer, with lease rows.
    Lease,
    /// The layer, with lease rows, and a commit that fails if the lease has ended.
    Fence,
    /// Idempotency keys, whose layer runs the handler in its transaction. They stop repetitions alone.
    Key,
    /// The handler's own transaction, which begins with the lock.
    Tx,
    /// The layer that runs the handler in its transaction.
    LayerTx,
}

impl std::fmt::Display for Mode {
    /// Writes the value of `--lock`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Memory => "memory",
            Self::Session => "session",
            Self::Lease => "lease",
            Self::Fence => "fence",
            Self::Key => "key",
            Self::Tx => "tx",
            Self::LayerTx => "layer-tx",
        })
    }
}
