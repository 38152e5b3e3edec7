//! The plan of one call, and its failure.

use std::time::Duration;

use leasehold_api::{Error, ErrorKind};

/// The plan of the link for one call.
#[derive(Debug)]
pub(super) struct CallPlan {
    pub(super) before: Duration,
    pub(super) after: Duration,
    pub(super) delivery: Delivery,
}

#[derive(Debug)]
pub(super) enum Delivery {
    Delivered,
    RequestLost,
    AnswerLost { silent: bool },
    Twice { apart: Duration },
    Failed(ErrorKind),
    Refused(ErrorKind),
}

/// The failure of a call.
#[derive(Clone, Debug)]
pub(crate) struct CallFailure {
    pub(crate) kind: ErrorKind,
    pub(crate) refused: bool,
}

impl CallFailure {
    pub(crate) fn error(&self) -> Error {
        Error::new(self.kind, "the simulated store was told to answer so")
    }
}
