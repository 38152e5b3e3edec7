//! How a handler gets its transaction, and the responses after which it is committed, by the kind of request.

use std::future::{Future, ready};

use http::{Extensions, Request, Response};

use super::shared::{SharedTx, Tx};
use crate::commit::{OpenCommit, Reads};
use crate::http::Http;
use crate::message::Message;

/// The transports of a [`TxLayer`](crate::TxLayer): [`Http`] and [`Message`].
pub trait CarryTx<Req>: Send + Sync + 'static {
    /// The request as the handler gets it.
    type Carried: Send + 'static;

    /// Adds the transaction to a request. Lock layers inside pass their locks to the returned [`OpenCommit`].
    fn carry(&self, request: Req, tx: &Tx) -> impl Future<Output = (Self::Carried, OpenCommit)> + Send;
}

/// The decision between commit and rollback.
pub trait Commits<Res> {
    /// Returns whether the transaction is committed after `response`.
    fn commits(&self, response: &Res) -> bool;
}

impl<B: Send + 'static> CarryTx<Request<B>> for Http {
    type Carried = Request<B>;

    fn carry(
        &self,
        mut request: Request<B>,
        tx: &Tx,
    ) -> impl Future<Output = (Request<B>, OpenCommit)> + Send {
        request.extensions_mut().insert(tx.slot());
        let open = OpenCommit::around(request.extensions_mut(), Reads::Committed);
        ready((request, open))
    }
}

impl<R> Commits<Response<R>> for Http {
    fn commits(&self, response: &Response<R>) -> bool {
        response.status().is_success() || response.status().is_redirection()
    }
}

impl<F, M> CarryTx<M> for Message<F>
where
    F: Send + Sync + 'static,
    M: Send + 'static,
{
    type Carried = (M, SharedTx);

    async fn carry(&self, message: M, tx: &Tx) -> ((M, SharedTx), OpenCommit) {
        let open = OpenCommit::around(&mut Extensions::new(), Reads::Committed);
        ((message, tx.share().await), open)
    }
}

impl<F, Res> Commits<Res> for Message<F> {
    fn commits(&self, _: &Res) -> bool {
        true
    }
}
