//! Any other message: the program says what a refusal is.

use std::fmt;

use crate::hold::RequestHold;
use crate::transport::{Refused, Transport};

/// Answers messages of any type: the function makes a response, or an error, of a refusal.
///
/// Messages have no place for a [`Held`](crate::Held); implement [`Transport`] for one that has.
#[derive(Clone, Copy)]
#[allow(clippy::exhaustive_structs)] // A function and nothing else.
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
