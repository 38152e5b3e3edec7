//! Transport for other messages: a function of the program builds the refusal.

use std::fmt;

use crate::hold::RequestHold;
use crate::transport::{Refused, Transport};

/// Responds to messages of any type. The function converts a refusal to a response or an error.
///
/// These messages carry no [`Held`](crate::Held). Implement [`Transport`] for messages that can. Inside of a
/// [`TxLayer`](crate::TxLayer) the service is called with the message and its [`SharedTx`](crate::SharedTx).
#[derive(Clone, Copy)]
#[allow(clippy::exhaustive_structs)] // Exhaustive, because it contains only a function.
pub struct Message<F>(pub F);

impl<F, Req, Res, E> Transport<Req, Res, E> for Message<F>
where
    F: Fn(Refused) -> Result<Res, E> + Send + Sync + 'static,
    Res: Send + 'static,
{
    type Response = Res;

    fn refuse(&self, why: Refused) -> Result<Res, E> {
        (self.0)(why)
    }

    fn pass(&self, response: Res, hold: Option<RequestHold>) -> (Res, Option<RequestHold>) {
        (response, hold)
    }
}

impl<F> fmt::Debug for Message<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Message")
    }
}
